# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, index"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Selecting keys in the language: what `topk` returns, of which sources, and how it is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.reference import assert_same_bits
from support.running import each
from support.selection import Layout, Stored, assert_indices, best, place, stored
from torch import Tensor

import tilewright
from tilewright.dsl import (
    Const,
    Paged,
    PerHead,
    Rows,
    Scalar,
    boolean,
    concat,
    dot,
    head,
    i32,
    key,
    logsumexp,
    max,
    op,
    pos,
    softmax,
    sum,
    to_float,
    topk,
    topk_with_values,
    where,
)
from tilewright.dsl import Tensor as Captured
from tilewright.dsl.build import build
from tilewright.dsl.errors import ArgumentValueError, AuthorError, AxisMismatch, DTypeMismatch, IllegalSchedule
from tilewright.dsl.errors import NotTraceable as NotAValue
from tilewright.dsl.schedule import Schedule
from tilewright.ops.cache import PagedLeaf

pytestmark = pytest.mark.both_targets(slow=True)

EVERY_SCHEDULE = each(
    Schedule(rows=2, keys=3, masks="split"),
    Schedule(rows=8, keys=1024),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=3, keys=4, start="first"),
    quick=2,
)
NAN, INF = float("nan"), float("inf")


@op
def chosen(q: Rows["dim"], cache: Paged["dim"], limit: Scalar[i32], *, k: Const[int]):
    values, indices = topk_with_values(dot(q, cache.keys(where=lambda query, key: key < limit)), k)
    return {"values": values, "indices": indices}


def leaf_of(columns: Sequence[Sequence[float]], rows: Sequence[int], page_size: int = 4, seed: int = 0) -> PagedLeaf:
    """Keys of one element, by sequence; the last `rows` of each are this call's."""
    data = Stored(tuple(torch.tensor(c, dtype=torch.float32).reshape(-1, 1) for c in columns))
    past = [len(c) - n for c, n in zip(columns, rows, strict=True)]
    need = [np.full(len(c), n > 0) for c, n in zip(columns, rows, strict=True)]
    return place(data, past, need, np.random.default_rng(seed), Layout(page_size)).layer(0)


def offsets_of(rows: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(rows)])


def choose(
    scores: Sequence[float], k: int, limit: int | None = None, *, page_size: int = 4, **options: Any
) -> tuple[Tensor, Tensor]:
    """(values, indices) of one row that sees the first `limit` of keys scored so."""
    found = tilewright.run(
        chosen,
        {"q": torch.ones(1, 1), "cache": leaf_of([scores], [1], page_size), "limit": limit or len(scores)}
        | ({"limit": 0} if limit == 0 else {}),
        torch.tensor([0, 1]),
        constants={"k": k},
        **options,
    )
    return found["values"], found["indices"]


def assert_values(actual: Tensor, expected: npt.ArrayLike) -> None:
    """float32, and equal one by one; NaN where NaN is expected, and nowhere else."""
    assert actual.dtype == torch.float32
    np.testing.assert_array_equal(actual.numpy(), np.asarray(expected, np.float32))


# ---- C8 --------------------------------------------------------------------------------------------------------------

C8 = [0.4519, 1.0099, -0.3167, -2.1224, 1.0826, 1.9583, 0.7, -0.1]


@pytest.mark.parametrize(
    ("length", "expected"), [(5, [4, 1, 0, 2]), (2, [1, 0, -1, -1]), (0, [-1, -1, -1, -1]), (8, [5, 4, 1, 6])]
)
@pytest.mark.parametrize("page_size", [1, 3, 8])
@EVERY_SCHEDULE
def test_c8(page_size: int, length: int, expected: list[int], schedule: Schedule) -> None:
    """The best four of those in sight, then -1 and -inf; a better key out of sight is no candidate."""
    values, indices = choose(C8, 4, length, page_size=page_size, schedule=schedule)
    assert_indices(indices, [expected])
    assert_values(values, [[C8[j] if j >= 0 else -INF for j in expected]])


@pytest.mark.parametrize("length", [1, 3, 50])
@EVERY_SCHEDULE
def test_c8_equal_scores(length: int, schedule: Schedule) -> None:
    """Equal scores come by ascending index."""
    _, indices = choose([0.25] * length, 3, schedule=schedule)
    assert_indices(indices, [[*range(min(3, length)), *[-1] * (3 - length)]])


# ---- order and values ------------------------------------------------------------------------------------------------

ORDERS = {
    "-0 equals +0": [0.0, -0.0, 1.0, -0.0, 0.0, -1.0],
    "-inf after the finite": [-INF, 1.0, -INF, -3e38, 3e38],
    "inf first": [1.0, INF, 2.0, INF, -INF],
    "NaN last": [NAN, -INF, NAN, 1.0, INF],
    "only NaN": [NAN] * 4,
    "next to each other": [1.0, 1.0000001, 0.99999994, 1.0, -1.0, -1.0000001],
    "tiny": [1.1754944e-38, 0.0, -1.1754944e-38, 2.3e-38, -2.3e-38],
}


@pytest.mark.parametrize("scores", ORDERS.values(), ids=ORDERS)
@EVERY_SCHEDULE
def test_order(scores: list[float], schedule: Schedule) -> None:
    """Descending, ties by index, -inf after what is finite, NaN after all; values are the scores there, then -inf."""
    exact = np.array(scores, np.float32).astype(np.float64)
    for k in (1, len(scores), len(scores) + 3):
        values, indices = choose(scores, k, schedule=schedule)
        expected = best(exact, k)
        assert_indices(indices, [expected])
        assert_values(values, [[scores[j] if j >= 0 else -INF for j in expected]])


@pytest.mark.slow
@pytest.mark.parametrize("count", [65535, 65536, 65537, 140_001])
@pytest.mark.parametrize("k", [1, 300, 140_002])
def test_long_rows(count: int, k: int) -> None:
    """More keys than are looked at together, ties across all of them, few or all of them wanted."""
    scores = np.random.default_rng(count).integers(-400, 400, count).astype(np.float32)
    scores[[0, -1]] = scores.max()
    _, indices = choose(scores.tolist(), k, page_size=count)
    expected = np.full(k, -1)
    order = np.argsort(-scores, kind="stable")[:k]
    expected[: len(order)] = order
    assert_indices(indices, expected[None])


# ---- against the reference -------------------------------------------------------------------------------------------


@op
def per_head(q: Rows["head", "dim"], cache: Paged["dim"], *, k: Const[int], mask: Const = None, pool: Const[int] = 1):
    values, indices = topk_with_values(dot(q, cache.keys(where=mask, pool=pool)), k)
    return {"values": values, "indices": indices}


@op
def over_heads(q: Rows["head", "dim"], cache: Paged["dim"], *, k: Const[int], mask: Const = None, pool: Const[int] = 1):
    values, indices = topk_with_values(sum(dot(q, cache.keys(where=mask, pool=pool)), over="head"), k)
    return {"values": values, "indices": indices}


class Batch:
    """Three sequences, one of no rows, and one longer than the others; whole numbers, so that scores are exact."""

    past, rows = (4, 6, 0), (3, 0, 11)

    def __init__(self, rng: np.random.Generator, heads: int = 3) -> None:
        self.q = torch.from_numpy(rng.integers(-2, 3, (14, heads, 4))).float()
        self.keys = [torch.from_numpy(rng.integers(-2, 3, (n, 4))).float() for n in (7, 6, 11)]

    def leaf(self, page_size: int = 3, seed: int = 0) -> PagedLeaf:
        need = [np.full(len(x), n > 0) for x, n in zip(self.keys, self.rows, strict=True)]
        rng = np.random.default_rng(seed)
        return place(Stored(tuple(self.keys)), self.past, need, rng, Layout(page_size)).layer(0)

    def places(self) -> list[tuple[int, int, int]]:
        """(sequence, row, position) of every row."""
        starts = [0, *itertools.accumulate(self.rows)]
        return [(b, starts[b] + i, self.past[b] + i) for b in range(3) for i in range(self.rows[b])]

    def expected(
        self,
        k: int,
        sees: Callable[[int, np.ndarray[Any, Any]], Any],
        *,
        pool: int = 1,
        heads_apart: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        """Values and indices by row (and head), pools seen where their last token is."""
        values, indices = [], []
        for b, t, at in self.places():
            last = np.arange(len(self.keys[b]) // pool) * pool + pool - 1
            seen = np.flatnonzero(np.broadcast_to(sees(at, last), last.shape))
            scores = self.q[t].double().numpy() @ self.keys[b].double().numpy()[: len(last)].T
            per_row = scores if heads_apart else scores.sum(0, keepdims=True)
            ranked = [[int(seen[j]) if j >= 0 else -1 for j in best(s[seen], k)] for s in per_row]
            found = [[s[j] if j >= 0 else -INF for j in row] for s, row in zip(per_row, ranked, strict=True)]
            values.append(found if heads_apart else found[0])
            indices.append(ranked if heads_apart else ranked[0])
        return values, indices


MASKS: dict[str, tuple[Any, Callable[[int, Any], Any]]] = {
    "all": (None, lambda q, k: True),
    "causal": (lambda q, k: k <= q, lambda q, k: k <= q),
    "window": (lambda q, k: (k <= q) & (q - k < 3), lambda q, k: (k <= q) & (q - k < 3)),
    "two ranges": (lambda q, k: (k < 2) | ((k <= q) & (q - k < 2)), lambda q, k: (k < 2) | ((k <= q) & (q - k < 2))),
    "every third": (lambda q, k: (k % 3 == 1) & (k <= q), lambda q, k: (k % 3 == 1) & (k <= q)),
    "none": (lambda q, k: k > q + 99, lambda q, k: k > q + 99),
}


@pytest.mark.parametrize("name", MASKS)
@EVERY_SCHEDULE
def test_predicates(name: str, schedule: Schedule, rng: np.random.Generator) -> None:
    """Candidates are the keys that a row sees, under any predicate, in several ranges too."""
    mask, sees = MASKS[name]
    data = Batch(rng)
    for k, budget in ((1, 1), (4, 150), (20, 1 << 20)):
        found = tilewright.run(
            over_heads,
            {"q": data.q, "cache": data.leaf()},
            offsets_of(data.rows),
            constants={"k": k, "mask": mask},
            schedule=schedule,
            budget_bytes=budget,
        )
        values, indices = data.expected(k, sees, heads_apart=False)
        assert_indices(found["indices"], indices)
        assert_values(found["values"], values)


@pytest.mark.slow
@pytest.mark.parametrize("heads_per_tile", [None, 1, 2])
@pytest.mark.parametrize("name", ["causal", "two ranges", "none"])
@EVERY_SCHEDULE
def test_heads_that_select_for_themselves(
    name: str, heads_per_tile: int | None, schedule: Schedule, rng: np.random.Generator
) -> None:
    """Scores with a head axis give [rows, heads, rank], in any grouping of heads into tiles."""
    mask, sees = MASKS[name]
    data = Batch(rng, heads=4)
    found = tilewright.run(
        per_head,
        {"q": data.q, "cache": data.leaf()},
        offsets_of(data.rows),
        constants={"k": 5, "mask": mask},
        schedule=replace(schedule, heads=heads_per_tile),
        budget_bytes=300,
    )
    assert found["indices"].shape == (14, 4, 5)
    values, indices = data.expected(5, sees)
    assert_indices(found["indices"], indices)
    assert_values(found["values"], values)


@pytest.mark.parametrize("pool", [1, 2, 3, 5, 20])
@EVERY_SCHEDULE
def test_pools(pool: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """`pool` tokens a key: candidates are the pools whose last token is seen."""
    data = Batch(rng)
    mask, sees = MASKS["causal"]
    found = tilewright.run(
        per_head,
        {"q": data.q, "cache": data.leaf()},
        offsets_of(data.rows),
        constants={"k": 4, "mask": mask, "pool": pool},
        schedule=schedule,
    )
    values, indices = data.expected(4, sees, pool=pool)
    assert_indices(found["indices"], indices)
    assert_values(found["values"], values)


# ---- lists -----------------------------------------------------------------------------------------------------------


@op
def of_list(q: Rows["head", "dim"], slots: Rows["slot", i32], cache: Paged["dim"], *, k: Const[int]):
    values, indices = topk_with_values(sum(dot(q, cache.entries(slots)), over="head"), k)
    return {"values": values, "indices": indices}


@op
def of_own_lists(q: Rows["head", "dim"], slots: Rows["head", "slot", i32], cache: Paged["dim"], *, k: Const[int]):
    values, indices = topk_with_values(dot(q, cache.entries(slots)), k)
    return {"values": values, "indices": indices}


@op
def of_blocks(q: Rows["dim"], slots: Rows["slot", i32], cache: Paged["dim"], *, k: Const[int], size: Const[int]):
    return topk(dot(q, cache.blocks(slots, size, where=lambda query, entry: entry <= query)), k)


LIST_SCHEDULES = each(
    Schedule(rows=1, keys=3, masks="split"),
    Schedule(rows=1, keys=64),
    Schedule(rows=1, keys=1, masks="always"),
    quick=2,
)


def listed(rng: np.random.Generator, data: Batch, *shape: int) -> Tensor:
    """Lists of 7 slots, entries of the row's own sequence and unused slots among them."""
    made = np.array([rng.integers(-2, len(data.keys[b]), (*shape, 7)) for b, _, _ in data.places()])
    return torch.from_numpy(made).to(torch.int32)


@LIST_SCHEDULES
def test_a_list_gives_the_entries_it_lists(schedule: Schedule, rng: np.random.Generator) -> None:
    """Of equal scores the earlier slot; an entry listed twice is found twice; unused slots never."""
    data = Batch(rng)
    slots = listed(rng, data)
    slots[0], slots[1] = torch.tensor([2, 0, 2, -1, 2, 1, 0]), -5
    for k, budget in ((1, 1), (4, 60), (9, 1 << 20)):
        found = tilewright.run(
            of_list,
            {"q": data.q, "slots": slots, "cache": data.leaf()},
            offsets_of(data.rows),
            constants={"k": k},
            schedule=schedule,
            budget_bytes=budget,
        )
        values, indices = [], []
        for b, t, _ in data.places():
            entries = [int(e) for e in slots[t] if e >= 0]
            scores = (data.keys[b][entries].double() @ data.q[t].double().sum(0)).numpy()
            order = best(scores, k)
            indices.append([entries[j] if j >= 0 else -1 for j in order])
            values.append([scores[j] if j >= 0 else -INF for j in order])
        assert_indices(found["indices"], indices)
        assert_values(found["values"], values)
    assert indices[1] == [-1] * 9


@LIST_SCHEDULES
def test_heads_that_list_for_themselves(schedule: Schedule, rng: np.random.Generator) -> None:
    """Lists with a head axis: each head's own entries, its own scores."""
    data = Batch(rng, heads=2)
    slots = listed(rng, data, 2)
    found = tilewright.run(
        of_own_lists,
        {"q": data.q, "slots": slots, "cache": data.leaf()},
        offsets_of(data.rows),
        constants={"k": 4},
        schedule=replace(schedule, heads=1),
    )
    indices = []
    for b, t, _ in data.places():
        rows = []
        for h in range(2):
            entries = [int(e) for e in slots[t, h] if e >= 0]
            order = best((data.keys[b][entries].double() @ data.q[t, h].double()).numpy(), 4)
            rows.append([entries[j] if j >= 0 else -1 for j in order])
        indices.append(rows)
    assert_indices(found["indices"], indices)


@pytest.mark.parametrize("size", [1, 2, 3])
@LIST_SCHEDULES
def test_blocks_give_entries(size: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """A block is its entries, those past the sequence's end or out of sight left out."""
    data = Batch(rng, heads=1)
    slots = listed(rng, data)
    found = tilewright.run(
        of_blocks,
        {"q": data.q[:, 0], "slots": slots, "cache": data.leaf()},
        offsets_of(data.rows),
        constants={"k": 6, "size": size},
        schedule=schedule,
    )
    indices = []
    for b, t, at in data.places():
        listed_ = [int(s) * size + i for s in slots[t] if s >= 0 for i in range(size)]
        entries = [e for e in listed_ if e < len(data.keys[b]) and e <= at]
        order = best((data.keys[b][entries].double() @ data.q[t, 0].double()).numpy(), 6)
        indices.append([entries[j] if j >= 0 else -1 for j in order])
    assert_indices(found["out"], indices)


def test_an_index_beyond_the_cache(rng: np.random.Generator) -> None:
    """Of a cache that defines positions: the bound counts this call's rows."""
    data = Batch(rng)
    slots = listed(rng, data)
    slots[1, 3] = 7
    with pytest.raises(ArgumentValueError) as raised:
        tilewright.run(
            of_list,
            {"q": data.q, "slots": slots, "cache": data.leaf()},
            offsets_of(data.rows),
            constants={"k": 3},
        )
    expected = "slots[1, 3] (row 1, slot 3) is 7; expected below 7, the entries that cache holds for sequence 0"
    assert str(raised.value) == f"of_list: {expected}"


# ---- scores of every kind --------------------------------------------------------------------------------------------


@op
def of_parts(
    q: Rows["head", "dim"],
    weight: Rows["head"],
    bias: Captured["distance"],
    shown: Captured["row", "key", boolean],
    slopes: PerHead,
    cache: Paged["dim"],
):
    scores = dot(q, cache.keys(where=lambda query, key: shown)) * weight
    return topk(scores + bias[pos - key] + slopes * to_float(head) + to_float(key % 2), 5)


@EVERY_SCHEDULE
def test_scores_of_captured_tensors_and_coordinates(schedule: Schedule, rng: np.random.Generator) -> None:
    """A score is any expression; a captured condition may say what a row sees."""
    data = Batch(rng, heads=2)
    weight = torch.from_numpy(rng.integers(-2, 3, (14, 2))).float()
    bias = torch.from_numpy(rng.integers(-2, 3, 20)).float()
    shown = torch.from_numpy(rng.random((14, 11)) < 0.6)
    slopes = torch.tensor([0.5, -0.25])
    arguments = {"q": data.q, "weight": weight, "bias": bias, "shown": shown, "slopes": slopes, "cache": data.leaf()}
    found = tilewright.run(of_parts, arguments, offsets_of(data.rows), schedule=schedule, budget_bytes=500)
    indices = []
    for b, t, at in data.places():
        n = len(data.keys[b])
        distance = at - np.arange(n)
        biased = np.where(distance >= 0, bias.double().numpy()[np.maximum(distance, 0)], 0.0)
        seen = np.flatnonzero(shown[t, :n].numpy())
        rows = []
        for h in range(2):
            s = data.keys[b].double().numpy() @ data.q[t, h].double().numpy() * float(weight[t, h])
            s = s + biased + float(slopes[h]) * h + np.arange(n) % 2
            rows.append([int(seen[j]) if j >= 0 else -1 for j in best(s[seen], 5)])
        indices.append(rows)
    assert_indices(found["out"], indices)


@op
def of_integers(q: Rows["dim"], cache: Paged["dim"]):
    values, indices = topk_with_values(where(dot(q, cache.keys()) > 0, key * 2, -key), 4)
    return {"values": values, "indices": indices}


def test_scores_may_be_integers() -> None:
    """Values are float32 as ever."""
    leaf = leaf_of([[1.0, -1.0, 1.0, -1.0, 1.0]], [1])
    found = tilewright.run(of_integers, {"q": torch.ones(1, 1), "cache": leaf}, torch.tensor([0, 1]))
    assert_indices(found["indices"], [[4, 2, 0, 1]])
    assert_values(found["values"], [[8.0, 4.0, 0.0, -1.0]])


@op
def several(q: Rows["dim"], slots: Rows["slot", i32], cache: Paged["dim"]):
    keys = cache.keys(where=lambda query, key: key <= query)
    scores = dot(q, keys)
    values, indices = topk_with_values(scores, 3)
    least = topk(-scores, 3)
    return {"best": indices, "values": values, "least": least, "mine": topk(dot(q, cache.entries(slots)), 3)}


def test_several_selections(rng: np.random.Generator) -> None:
    """One operator may select more than once, from one source and from others; all share the budget."""
    data = Batch(rng, heads=1)
    slots = listed(rng, data)
    arguments = {"q": data.q[:, 0], "slots": slots, "cache": data.leaf()}
    _, expected = data.expected(3, MASKS["causal"][1], heads_apart=False)
    data.q = -data.q
    _, least = data.expected(3, MASKS["causal"][1], heads_apart=False)
    for budget in (1, 200, 1 << 20):
        found = tilewright.run(
            several, arguments, offsets_of(data.rows), schedule=Schedule(rows=1, keys=4), budget_bytes=budget
        )
        assert_indices(found["best"], expected)
        assert_indices(found["least"], least)
        for b, t, _ in data.places():
            chosen_ = [int(j) for j in found["best"][t] if j >= 0]
            assert found["values"][t, : len(chosen_)].tolist() == (-data.keys[b][chosen_] @ data.q[t, 0]).tolist()
            entries = [int(e) for e in slots[t] if e >= 0]
            order = best((-data.keys[b][entries].double() @ data.q[t, 0].double()).numpy(), 3)
            assert found["mine"][t].tolist() == [entries[j] if j >= 0 else -1 for j in order]


@op
def with_any_name(q: Rows["dim"], other_lengths: Rows[i32], row_count: Rows[i32], cache: Paged["dim"]):
    return topk(dot(q, cache.keys()) * to_float(other_lengths) + to_float(row_count), 2)


def test_parameters_named_like_lengths() -> None:
    """A tensor of rows that is called as a cache's lengths are is a tensor of rows."""
    leaf, rows = leaf_of([[1.0, 3.0, 2.0], [1.0, 2.0]], [3, 2]), torch.tensor([1, -1, 1, -1, 1], dtype=torch.int32)
    arguments = {"q": torch.ones(5, 1), "other_lengths": rows, "row_count": rows, "cache": leaf}
    found = tilewright.run(with_any_name, arguments, torch.tensor([0, 3, 5]), budget_bytes=20)
    assert_indices(found["out"], [[1, 2], [0, 2], [1, 2], [0, 1], [1, 0]])


# ---- windows of rows, threads ----------------------------------------------------------------------------------------


@pytest.mark.interpreted("sees every window made: native calls keep theirs, tests/test_scratch_memory.py")
@pytest.mark.parametrize("heads_apart", [False, True])
def test_windows_keep_to_the_budget(
    heads_apart: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row takes 4 bytes for each key of the longest sequence, and for each head that selects for itself."""
    made: list[tuple[int, ...]] = []
    full = torch.full

    def noting(size: Any, *args: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.int32:
            made.append(tuple(size))
        return full(size, *args, **options)

    data = Batch(rng)
    row = 4 * 11 * (3 if heads_apart else 1)
    operator, values = (per_head, 3) if heads_apart else (over_heads, None)
    for budget, rows in ((1, 1), (row, 1), (2 * row - 1, 1), (2 * row, 2), (5 * row + 3, 5), (99 * row, 14)):
        arguments = {"q": data.q, "cache": data.leaf()}
        made.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "full", noting)
            found = tilewright.run(operator, arguments, offsets_of(data.rows), constants={"k": 3}, budget_bytes=budget)
        shape = (11,) if values is None else (values, 11)
        assert made == [(min(rows, 14 - lo), *shape) for lo in range(0, 14, rows)]
        assert_indices(found["indices"], data.expected(3, lambda q, k: True, heads_apart=heads_apart)[1])


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and indices of scores that round, from one worker and from four, at once and a window at a time."""
    rng = np.random.default_rng(3)
    data = Batch(rng)
    data.q = torch.from_numpy(rng.standard_normal(tuple(data.q.shape))).float()
    arguments, results = {"q": data.q, "cache": data.leaf()}, []
    for threads, budget in (("1", 1 << 20), ("4", 1 << 20), ("4", 1), ("1", 1), ("2", 300)):
        monkeypatch.setenv("TILEWRIGHT_THREADS", threads)
        results.append(
            tilewright.run(
                per_head,
                arguments,
                offsets_of(data.rows),
                constants={"k": 4},
                budget_bytes=budget,
                schedule=Schedule(rows=1, keys=4),
            )
        )
    for other in results[1:]:
        assert_same_bits(other["values"], results[0]["values"])
        assert_same_bits(other["indices"], results[0]["indices"])


def test_buffers_of_selections(rng: np.random.Generator) -> None:
    """Values round once to the buffer's dtype; indices may be wider than 32 bits."""
    data = Batch(rng)
    arguments = {"q": data.q, "cache": data.leaf()}
    buffers = {"values": torch.zeros(14, 3, 4).bfloat16(), "indices": torch.zeros(14, 3, 4).long()}
    found = tilewright.run(per_head, arguments, offsets_of(data.rows), constants={"k": 4}, outputs=buffers)
    values, indices = data.expected(4, lambda q, k: True)
    assert found["indices"] is buffers["indices"]
    np.testing.assert_array_equal(buffers["indices"].numpy(), np.asarray(indices))
    assert_values(buffers["values"].float(), torch.tensor(values).bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("operator", "schedule", "message"),
    [
        (over_heads, Schedule(partitions=2), "schedule field partitions=2: a selection wants whole rows of scores"),
        (over_heads, Schedule(heads=1), "schedule field heads=1: a reduction over heads needs all 3 heads in one tile"),
        (per_head, Schedule(heads=2), "schedule field heads=2: does not divide the group of 3 query heads"),
    ],
)
def test_illegal_schedules(operator: Any, schedule: Schedule, message: str, rng: np.random.Generator) -> None:
    """Refused by field."""
    data = Batch(rng)
    with pytest.raises(IllegalSchedule) as raised:
        tilewright.run(
            operator,
            {"q": data.q, "cache": data.leaf()},
            offsets_of(data.rows),
            constants={"k": 3},
            schedule=schedule,
        )
    assert str(raised.value).startswith(message)


# ---- looking inside --------------------------------------------------------------------------------------------------


@op
def shown(q: Rows["dim"], cache: Paged["dim"]):
    scores = dot(q, cache.keys())
    print(scores)
    print(q)
    return {"best": topk(scores, 2), "least": topk(-scores, 2)}


@pytest.mark.interpreted("print()")
def test_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """A print in an operator that selects shows its value, once."""
    leaf = leaf_of([[1.5, -2.5, 3.5]], [1])
    found = tilewright.run(shown, {"q": torch.ones(1, 1), "cache": leaf}, torch.tensor([0, 1]))
    assert_indices(found["best"], [[2, 0]])
    text = capsys.readouterr().out
    assert text.count("scores[row, key] at ") == 1
    assert text.count("q[row, dim] at ") == 1
    assert all(number in text for number in ("1.5", "-2.5", "3.5"))


# ---- errors at the author's line -------------------------------------------------------------------------------------


def refused(fn: Callable[..., Any], error: type[AuthorError], message: str, marked: str, **constants: Any) -> None:
    """Tracing or lowering raises exactly this message, with carets under exactly this text of the author's."""
    with pytest.raises(error) as raised:
        build(op(fn).trace(**constants))
    first, excerpt, carets = str(raised.value).split("\n")
    place_, _, said = first.partition(": ")
    assert said == message
    assert excerpt[carets.index("^") : carets.rindex("^") + 1] == marked
    assert place_.split(":")[0].endswith("test_topk.py")
    assert raised.value.loc is not None
    assert raised.value.loc.line >= fn.__code__.co_firstlineno


EITHER = "topk: an operator either selects keys or reduces over them: return the selection, and use two operators"


def in_a_fold(q: Rows["dim"], cache: Paged["dim"]):
    keys = cache.keys()
    scores = dot(q, keys)
    values, _ = topk_with_values(scores, 3)
    return softmax(where(scores >= max(values, over="rank"), scores, -INF)) @ keys


def after_a_fold(q: Rows["dim"], cache: Paged["dim"]):
    scores = dot(q, cache.keys())
    return topk(scores - logsumexp(scores), 4)


def beside_a_fold(q: Rows["dim"], cache: Paged["dim"]):
    scores = dot(q, cache.keys())
    return {"a": topk(scores, 3), "b": max(scores, over="key")}


def in_arithmetic(q: Rows["dim"], cache: Paged["dim"]):
    return topk(dot(q, cache.keys()), 3) + 1


@pytest.mark.parametrize(
    ("fn", "marked"),
    [
        (in_a_fold, "topk_with_values(scores, 3)"),
        (after_a_fold, "topk(scores - logsumexp(scores), 4)"),
        (beside_a_fold, "topk(scores, 3)"),
        (in_arithmetic, "topk(dot(q, cache.keys()), 3)"),
    ],
)
def test_a_selection_is_all_an_operator_does(fn: Callable[..., Any], marked: str) -> None:
    """What is selected is returned as it is: no fold reads it, it reads none, and none stands beside it."""
    refused(fn, AxisMismatch, EITHER, marked)


def softmax_of_selected(q: Rows["dim"], cache: Paged["dim"]):
    keys = cache.keys()
    return softmax(topk_with_values(dot(q, keys), 3)[0]) @ keys


def of_concatenation(q: Rows["dim"], slots: Rows["slot", i32], cache: Paged["dim"]):
    return topk(dot(q, concat(cache.keys(), cache.entries(slots))), 3)


def of_no_keys(q: Rows["dim"], cache: Paged["dim"]):
    return topk(key + pos, 3)


def of_rows(q: Rows["dim"], cache: Paged["dim"]):
    return topk(q, 3)


def of_a_number(q: Rows["dim"], cache: Paged["dim"]):
    return topk(2.0, 3)


def of_two_sources(q: Rows["dim"], cache: Paged["dim"]):
    return topk(dot(q, cache.keys()) + dot(q, cache.keys()), 3)


def of_features(q: Rows["dim"], cache: Paged["dim"]):
    return topk(q * cache.keys(), 3)


def without_rows(q: Rows["dim"], cache: Paged["dim"]):
    return topk(sum(cache.keys().k, over="dim"), 3)


def seen_by_heads(q: Rows["head", "dim"], cache: Paged["dim"]):
    keys = cache.keys(where=lambda query, key: (key <= query) | (head == 0))
    return topk(sum(dot(q, keys), over="head"), 3)


def listed_by_heads(q: Rows["head", "dim"], slots: Rows["head", "slot", i32], cache: Paged["dim"]):
    return topk(sum(dot(q, cache.entries(slots)), over="head"), 3)


def of_two_sizes(q: Rows["dim"], cache: Paged["dim"]):
    scores = dot(q, cache.keys())
    return {"a": topk(scores, 3), "b": topk(-scores, 5)}


def with_a_rank(q: Rows["rank"], cache: Paged["rank"]):
    return topk(dot(q, cache.keys()), 3)


def printed(q: Rows["dim"], cache: Paged["dim"]):
    indices = topk(dot(q, cache.keys()), 3)
    print(indices)
    return indices


SCORES = "dot(q[row, dim], keys0.k[key, dim], over=dim)"
PER_HEAD = "sum(dot(q[row, head, dim], keys0.k[key, dim], over=dim), over=head)"
UNSEEN = "which decides what keys are seen; multiply by a tensor that does"
MISTAKES: list[tuple[Callable[..., Any], str, str]] = [
    (
        softmax_of_selected,
        "softmax: scores has axes [row, rank]: it does not vary over keys",
        "softmax(topk_with_values(dot(q, keys), 3)[0]) @ keys",
    ),
    (
        of_concatenation,
        "topk: the keys of a concatenation have no one index",
        "topk(dot(q, concat(cache.keys(), cache.entries(slots))), 3)",
    ),
    (of_no_keys, "topk: no key rows among its inputs", "topk(key + pos, 3)"),
    (of_rows, "topk: scores has axes [row, dim]: it does not vary over keys", "topk(q, 3)"),
    (of_a_number, "topk: scores has axes []: it does not vary over keys", "topk(2.0, 3)"),
    (
        of_two_sources,
        "topk: its inputs come from different key sources, whose keys do not meet",
        "topk(dot(q, cache.keys()) + dot(q, cache.keys()), 3)",
    ),
    (
        of_features,
        "topk: (q[row, dim] * keys0.k[key, dim]) has axes [row, key, dim]; reduce over dim first",
        "topk(q * cache.keys(), 3)",
    ),
    (
        without_rows,
        "without_rows: output 'out' has axes [rank]; an output has one entry per row, none per key",
        'topk(sum(cache.keys().k, over="dim"), 3)',
    ),
    (
        seen_by_heads,
        f"topk: {PER_HEAD} does not vary over head, {UNSEEN}",
        'topk(sum(dot(q, keys), over="head"), 3)',
    ),
    (
        listed_by_heads,
        f"topk: {PER_HEAD} does not vary over head, {UNSEEN}",
        'topk(sum(dot(q, cache.entries(slots)), over="head"), 3)',
    ),
    (
        of_two_sizes,
        "topk: keeps 5 of the best where another keeps 3; an operator keeps as many in each, use two",
        "topk(-scores, 5)",
    ),
    (
        with_a_rank,
        "topk: its results have an axis 'rank', which parameter 'q' has too; rename that one",
        "topk(dot(q, cache.keys()), 3)",
    ),
    (printed, "print: a selection can be returned, and looked at there", "print(indices)"),
]


@pytest.mark.parametrize(("fn", "message", "marked"), MISTAKES, ids=[fn.__name__ for fn, _, _ in MISTAKES])
def test_mistakes(fn: Callable[..., Any], message: str, marked: str) -> None:
    """Named, where they stand."""
    refused(fn, AxisMismatch, message, marked)


def of_conditions(q: Rows["dim"], cache: Paged["dim"]):
    return topk(dot(q, cache.keys()) > 0, 3)


def test_conditions_have_no_order() -> None:
    """As in any reduction, the author says what numbers they are."""
    message = "topk does not take bool; write where(cond, 1.0, 0.0)"
    refused(of_conditions, DTypeMismatch, message, "topk(dot(q, cache.keys()) > 0, 3)")


def of_any_k(q: Rows["dim"], cache: Paged["dim"], *, k: Const):
    return topk(dot(q, cache.keys()), k)


@pytest.mark.parametrize(
    ("k", "got"),
    [
        (0, "int 0"),
        (-2, "int -2"),
        (2.0, "float 2.0"),
        (True, "bool True"),
        (None, "NoneType None"),
        ("3", "str '3'"),
    ],
)
def test_k_is_a_whole_number(k: object, got: str) -> None:
    """At least 1."""
    message = f"topk: expected k, a whole number, at least 1, got {got}"
    refused(of_any_k, NotAValue, message, "topk(dot(q, cache.keys()), k)", k=k)


def test_stored_rows_stay_exact(rng: np.random.Generator) -> None:
    """Scores of bfloat16 and float16 rows are those of the numbers stored."""
    for kind in (torch.bfloat16, torch.float16):
        data = stored(rng, [9], 4, kind)
        leaf = place(data, [8], [np.full(9, True)], rng).layer(0)
        q = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        found = tilewright.run(chosen, {"q": q, "cache": leaf, "limit": 9}, torch.tensor([0, 1]), constants={"k": 9})
        column = data.rows[0][:, 0].double().numpy()
        assert_indices(found["indices"], [best(column, 9)])
        assert_values(found["values"], [sorted(column, reverse=True)])
