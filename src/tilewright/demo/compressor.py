"""DeepSeek-V4's compressors over ragged rows: windows of tokens become entries as they close."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The trailing slice of x [1, heads, rows, dim] turned by angles [1, rows, pairs]."""
    # Imported here because transformers is optional.
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    turned: Tensor = apply_rotary_pos_emb(x, cos, sin)
    return turned


class RaggedCompressor:
    """A compressor module of the model, or of its indexer, for requests that come in chunks of any size.

    An entry is the average of the window's projected rows, weighted by a softmax over the window, for each feature.
    Where the module projects to twice its width, the first half belongs to the entry of the *next* window: an entry
    averages the first halves of the window before and the second halves of its own.
    """

    def __init__(self, module: Any, requests: int) -> None:
        self._module, self._rate, self._dim = module, int(module.compress_rate), int(module.head_dim)
        width = module.kv_proj.out_features
        self._overlaps = width == 2 * self._dim
        # Rows without an entry yet and, with overlap, the last closed window. Before the first window stands one
        # without weight.
        before = self._rate if self._overlaps else 0
        nothing = torch.zeros(before, width), torch.full((before, width), -torch.inf)
        self._kept = [nothing] * requests
        self._closed = [0] * requests

    def __call__(self, hidden: Tensor, offsets: Tensor) -> Tensor:
        """The entries [entries, dim], by request, that new rows hidden [rows, hidden_size] of the requests close."""
        kv, gate = self._module.kv_proj(hidden), self._module.gate_proj(hidden)
        made, tokens = [], []
        for request, (low, high) in enumerate(pairwise(offsets.tolist())):
            entries = self._close(request, kv[low:high], gate[low:high])
            first, self._closed[request] = self._closed[request], self._closed[request] + len(entries)
            made.append(entries)
            tokens.append(torch.arange(first, self._closed[request]) * self._rate)  # an entry turns as its first token
        entries, module = self._module.kv_norm(torch.cat(made)), self._module
        cos, sin = module.rotary_emb(entries, position_ids=torch.cat(tokens)[None], layer_type=module.rope_layer_type)
        return rotated(entries[None, None], cos, sin)[0, 0]

    def _close(self, request: int, kv: Tensor, gate: Tensor) -> Tensor:
        """The weighted averages [entries, dim] of the windows that new rows [rows, width] of a request close."""
        kv, gate = (torch.cat([kept, new]) for kept, new in zip(self._kept[request], (kv, gate), strict=True))
        windows = len(kv) // self._rate
        closed = windows - 1 if self._overlaps else windows
        self._kept[request] = kv[closed * self._rate :], gate[closed * self._rate :]
        shape = windows, self._rate, kv.shape[1]
        kv = kv[: windows * self._rate].view(shape)
        gate = gate[: windows * self._rate].view(shape) + self._module.position_bias
        if self._overlaps:
            kv, gate = (torch.cat([x[:-1, :, : self._dim], x[1:, :, self._dim :]], 1) for x in (kv, gate))
        return (kv * gate.softmax(1)).sum(1)
