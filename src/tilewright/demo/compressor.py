"""DeepSeek-V4's compressors over ragged rows: windows of tokens become entries as they close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.compressor import closed_windows, compress

from .page_pool import PagePool


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The trailing slice of x [1, heads, rows, dim] turned by angles [1, rows, pairs]."""
    # Imported here because transformers is optional.
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    turned: Tensor = apply_rotary_pos_emb(x, cos, sin)
    return turned


class CompressedPages:
    """The pages of compressors of one kind, the model's or its indexers': of tokens, gates and rows; and of entries."""

    def __init__(
        self, modules: Sequence[Any], requests: int, longest: int, page_sizes: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """Room for `longest` tokens of each request. page_sizes: of tokens, of entries. dtype: of entries."""
        self._modules, self._rate = modules, int(modules[0].compress_rate)
        layers, width, dim = len(modules), modules[0].kv_proj.out_features, modules[0].head_dim
        self._tokens = PagePool(requests, longest, layers, width, page_size=page_sizes[0], values=True)
        self.entries = PagePool(requests, longest // self._rate, layers, dim, page_size=page_sizes[1], dtype=dtype)

    def begin(self, counts: Sequence[int]) -> None:
        """A call with so many new tokens of each request."""
        self._tokens.begin(counts)
        offsets = closed_windows(self._tokens.before.cache_lengths, self._tokens.offsets, self._rate)
        self.entries.begin(offsets.diff().tolist())

    def append(self, layer: int, hidden: Tensor) -> None:
        """Store what tokens hidden [rows, hidden_size] leave to the compressor of a layer, and the entries they close.

        `layer` counts the layers of this kind.
        """
        module, entries = self._modules[layer], self.entries
        self._tokens.append(layer, module.gate_proj(hidden)[:, None], module.kv_proj(hidden)[:, None])
        tokens, stored = self._tokens.after.layer(layer), entries.before.layer(layer)
        made = module.kv_norm(compress(tokens, stored, entries.offsets, module.position_bias))
        first = entries.positions * self._rate  # an entry is turned as its first token
        cos, sin = module.rotary_emb(made, position_ids=first[None], layer_type=module.rope_layer_type)
        entries.append(layer, rotated(made[None, None], cos, sin)[0].transpose(0, 1))

    def end(self) -> None:
        self._tokens.end()
        self.entries.end()
