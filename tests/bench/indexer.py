"""The float8 indexer, at the sizes of DeepSeek-V3.2: every row scores every key, and keeps the best.

All rows see all keys, so that no baseline needs a mask. Baselines return their keys in any order, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from suite import OURS, Method, Prepared
from torch import Tensor

from tilewright.ops import PagedKVCache, mla_indexer_ragged_float8_paged

HEADS, KEYS, DEPTH, TOP, PAGE = 64, 16384, 128, 2048, 128
ROWS = (1, 64)
BASELINE = "torch tile loop"
GOAL = 1.3
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a baseline's arithmetic, relative to the largest score
_TILE = 8, 1024  # rows and keys


@dataclass(frozen=True, eq=False)
class Workload:
    """One sequence."""

    q: Tensor  # [rows, heads, depth], float8
    q_scale: Tensor  # [rows, heads]
    pool: Tensor  # [pages, slot, 1, depth], float8
    scales: Tensor  # [pages, slot, 1, 1]
    table: Tensor  # [1, pages]

    @property
    def bytes(self) -> int:
        """Keys and queries with their scales read once, indices written once."""
        read = (self.q, self.q_scale, self.pool, self.scales)
        return sum(t.nbytes for t in read) + len(self.q) * TOP * 4


def make(rows: int) -> Workload:
    """The same on every run."""
    g = torch.Generator().manual_seed(0)
    pages = KEYS // PAGE
    return Workload(
        q=torch.randn(rows, HEADS, DEPTH, generator=g).to(torch.float8_e4m3fn),
        q_scale=torch.randn(rows, HEADS, generator=g),
        pool=torch.randn(pages, PAGE, 1, DEPTH, generator=g).to(torch.float8_e4m3fn),
        scales=torch.rand(pages, PAGE, 1, 1, generator=g) + 0.5,
        table=torch.randperm(pages, generator=g).to(torch.int32)[None],
    )


def weights() -> dict[str, float]:
    return {_name(rows): 1 + rows / 10 for rows in ROWS}


def workloads(match: str, threads: int) -> Iterator[Prepared]:
    for rows in ROWS:
        if match in _name(rows):
            w = make(rows)
            scores = _scores(w)
            yield Prepared(
                name=_name(rows),
                flops=2 * rows * HEADS * KEYS * DEPTH,
                bytes=w.bytes,
                dtype=torch.bfloat16,
                methods=_methods(w),
                baseline=BASELINE,
                goal=GOAL,
                error=partial(_error, scores),
            )


def _name(rows: int) -> str:
    return f"indexer {rows}x{HEADS}x{KEYS}x{DEPTH}, top {TOP}, float8_e4m3"


def _methods(w: Workload) -> dict[str, Method]:
    out: dict[str, Method] = {OURS: public_operator(w)}
    for dtype in (torch.float32, torch.bfloat16):
        suffix = "" if dtype == torch.float32 else ", bfloat16"
        for name, scored in {BASELINE: _tile_loop, "torch row loop": _row_loop, "torch whole": _whole}.items():
            out[f"{name}{suffix}"] = partial(_best, w, scored, dtype)
    return out


def public_operator(w: Workload) -> Method:
    """The public operator, as a model calls it."""
    rows = len(w.q)
    cached = torch.tensor([KEYS - rows], dtype=torch.int32)
    cache = PagedKVCache.from_block_table(w.pool, None, w.table, cached, k_scales=w.scales)
    offsets = torch.tensor([0, rows], dtype=torch.int32)
    return lambda: mla_indexer_ragged_float8_paged(w.q, w.q_scale, offsets, cache, 0, top_k=TOP, mask_str="null")


# ---- what results are checked against --------------------------------------------------------------------------------


def _scores(w: Workload) -> Tensor:
    """[row, key] in float64."""
    keys, scales = (t[w.table[0].long()].view(KEYS, -1).double() for t in (w.pool.float(), w.scales))
    products = ((q.double() @ keys.T).relu() for q in w.q.float())
    return torch.stack([q_scale.double() @ p for q_scale, p in zip(w.q_scale, products, strict=True)]) * scales.T


def _error(scores: Tensor, name: str, got: Tensor) -> float:
    """How far the scores of the keys found lie from the best ones, rank by rank, relative to the largest score.

    Raises ArithmeticError where that is too much, or where a row has a key twice.
    """
    found = scores.gather(1, got.long()).sort(1, descending=True).values
    error = float((found - scores.topk(TOP).values).abs().max() / scores.abs().max())
    most = TOLERANCE[torch.bfloat16 if "bfloat16" in name else torch.float32]
    twice = bool((got.sort(1).values.diff(dim=1) == 0).any())
    if twice or not error <= most:
        raise ArithmeticError(
            f"{name} is wrong: {'a key twice, ' * twice}relative error {error:.1e}, at most {most:.0e}"
        )
    return error


# ---- baselines -------------------------------------------------------------------------------------------------------

Scored = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, their scales and keys -> [row, key] in float32


def _best(w: Workload, scored: Scored, dtype: torch.dtype) -> Tensor:
    """Keys gathered and converted once, scored in this dtype, scaled in float32."""
    pages = w.table[0].long()
    scores = scored(w.q.to(dtype), w.q_scale.to(dtype), w.pool[pages].view(KEYS, DEPTH).to(dtype))
    return (scores * w.scales[pages].view(KEYS)).topk(TOP, sorted=False).indices


def _tile_loop(q: Tensor, q_scale: Tensor, keys: Tensor) -> Tensor:
    """Some rows with all their heads, and some keys, at a time: the quickest form that we found."""
    out = torch.empty(len(q), KEYS)
    rows, columns = _TILE
    for row in range(0, len(q), rows):
        few, scale = q[row : row + rows], q_scale[row : row + rows, None]
        for key in range(0, KEYS, columns):
            product = (few.view(-1, DEPTH) @ keys[key : key + columns].t()).relu_()
            out[row : row + rows, key : key + columns] = torch.bmm(scale, product.view(len(few), HEADS, -1))[:, 0]
    return out


def _row_loop(q: Tensor, q_scale: Tensor, keys: Tensor) -> Tensor:
    out = torch.empty(len(q), KEYS)
    for row in range(len(q)):
        out[row] = q_scale[row] @ (q[row] @ keys.t()).relu_()
    return out


def _whole(q: Tensor, q_scale: Tensor, keys: Tensor) -> Tensor:
    """All products at once, [row, head, key]."""
    product = (q.view(-1, DEPTH) @ keys.t()).relu_().view(len(q), HEADS, KEYS)
    return torch.bmm(q_scale[:, None], product)[:, 0].float()
