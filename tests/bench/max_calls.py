"""Our workloads as calls of MAX's operators, which run in a process of their own; see `protocol.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from protocol import Apart, Asked
from support.peer_calls import Call
from support.peers import call, of_bits
from torch import Tensor
from workloads import SCALE, Workload

MAX = "MAX"


def attention(w: Workload, apart: Mapping[str, Apart]) -> dict[str, Asked]:
    """Pages token first, as MAX has them. Empty where it is not there."""
    if MAX not in apart:
        return {}
    k, v = (x.transpose(1, 2) for x in w.head_first())
    blocks = torch.stack([k, v], 1)[:, :, None]  # [pages, key or value, layer, slot, kv_head, dim]
    window = -1 if w.shape.window is None else w.shape.window
    mask = "causal" if w.shape.window is None else "sliding_window_causal"
    tensors = {"q": w.q, "blocks": blocks, "sinks": None if w.sinks is None else w.sinks.to(w.dtype)}
    given = call("attention", tensors, layer=0, scale=SCALE, mask=mask, window=window)
    given = with_indices(given, offsets=w.offsets, table=w.table.clamp(min=0), lengths=w.cached)
    return {MAX: Asked(apart[MAX], given, of_bits)}


def with_indices(given: Call, **indices: Tensor) -> Call:
    """MAX's indices are uint32."""
    return replace(given, arrays={**given.arrays, **{n: x.numpy().astype(np.uint32) for n, x in indices.items()}})
