"""vLLM's compiled CPU operators on our workloads, in this process. They must have been found: see `run.py`.

Caches are filled and calls planned beforehand.
"""

from __future__ import annotations

import torch
from names import Method
from torch import Tensor
from workloads import SCALE, Workload

KERNELS = {torch.float32: ("vec",), torch.bfloat16: ("vec", "amx")}  # its kernels for a page of 128


def attention(w: Workload, isa: str) -> Method:
    from support.peer_vllm import Attention, prepared_attention

    keys = torch.tensor(w.shape.keys, dtype=torch.int32)
    k, v = (x.transpose(1, 2).contiguous() for x in w.head_first())
    window = -1 if w.shape.window is None else w.shape.window
    options = Attention(SCALE, window=window, isa=isa)
    return prepared_attention(w.q, k, v, w.table, w.offsets, keys, w.sinks, options)


def latent(
    q: Tensor, recent: Tensor, recent_slots: Tensor, entries: Tensor, entry_slots: Tensor, page: int, scale: float
) -> Method:
    """recent, entries: DeepSeek-V4's bytes, by page; slots: physical."""
    from support.peer_vllm import expect_whole, ops

    expect_whole()
    no_sinks = torch.full((q.shape[1],), -torch.inf)

    def call() -> Tensor:
        out = torch.empty_like(q)
        ops.flash_mla_with_kvcache_cpu(out, q, recent, recent_slots, page, entries, entry_slots, page, no_sinks, scale)
        return out

    return call


def scores(q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, table: Tensor) -> Method:
    """Of one sequence whose rows see all keys. keys: [pages, page, 1, depth] float8; scales: [pages, page, 1, 1]."""
    from support.peer_vllm import expect_whole, ops

    expect_whole()
    pages, page = keys.shape[:2]
    cache = torch.cat([keys.view(torch.uint8).view(pages, -1), scales.view(torch.uint8).view(pages, -1)], 1)
    visible = torch.full((len(q),), table.shape[1] * page, dtype=torch.int32)
    tables, most = table.expand(len(q), -1).contiguous(), int(visible.max())

    def call() -> Tensor:
        found: Tensor = ops.fp8_paged_mqa_logits_cpu(q, cache, weights, visible, tables, page, most)
        return found

    return call
