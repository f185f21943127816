"""The float8 indexer: exactly the keys, and exactly the order, of a literal reference, in whatever way it is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.batches import F8
from support.properties import property_test
from support.reference import Ragged, assert_same_bits
from support.running import each
from support.selection import (
    Layout,
    Scored,
    Stored,
    assert_indices,
    best,
    indexer_reference,
    public_indexer,
    run_indexer,
    scored,
    scores_of,
)
from torch import Tensor

from tilewright.codegen_cache.bind import bind
from tilewright.codegen_cache.programs import programs
from tilewright.dsl.dtypes import i32
from tilewright.dsl.errors import (
    ArgumentDTypeError,
    ArgumentError,
    ArgumentRankError,
    ArgumentShapeError,
    ArgumentTypeError,
    ArgumentValueError,
    IllegalSchedule,
    NotFinite,
)
from tilewright.dsl.interp import Interpreter
from tilewright.dsl.loops import Best, Stmt
from tilewright.dsl.lower import lower
from tilewright.dsl.schedule import Schedule
from tilewright.ops import PagedKVCache, PagedLeaf
from tilewright.ops.indexer import mla_indexer
from tilewright.ops.masks import mask_named

pytestmark = pytest.mark.both_targets(slow=True)

NAME = "mla_indexer_ragged_float8_paged"

EVERY_SCHEDULE = each(
    Schedule(rows=2, keys=3, masks="split"),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=8, keys=1024),
    Schedule(rows=4, keys=4),
    Schedule(rows=3, keys=7, masks="split", start="first"),
    Schedule(rows=16, keys=64, masks="always"),
)

# past and rows of each sequence
BATCHES = {
    "prefill": ([0, 0, 0], [5, 1, 9]),
    "decode": ([7, 0, 31, 12], [1, 1, 1, 1]),
    "mixed, with sequences of no rows": ([0, 17, 3, 0, 9], [4, 0, 6, 0, 1]),
    "one row": ([0], [1]),
    "long": ([60, 2], [19, 21]),
}
BUDGETS = (1, 100, 333, 1 << 12, 1 << 29)


def numbers(
    q: list[list[list[float]]], q_s: list[list[float]], keys: list[list[float]], scales: list[float], **options: Any
) -> Scored:
    """One sequence of written numbers: q [rows, heads, depth], as many rows as it has, on keys [n, depth]."""
    stored = Stored((torch.tensor(keys).to(F8),), (torch.tensor(scales).reshape(-1, 1),), len(keys[0]))
    return Scored(
        Ragged((len(keys) - len(q),), (len(q),)), torch.tensor(q).to(F8), torch.tensor(q_s), stored, **options
    )


# ---- C7, C8 ----------------------------------------------------------------------------------------------------------

C7_Q, C7_KEYS = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [-1.0, 2.0], [3.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [2]), (2, [2, 0]), (3, [2, 0, 3]), (4, [2, 0, 3, 1]), (6, [2, 0, 3, 1, -1, -1])]
)
@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
@EVERY_SCHEDULE
def test_c7(page_size: int, k: int, expected: list[int], schedule: Schedule, rng: np.random.Generator) -> None:
    """Relu before q_s, so that a negative q_s gives a negative score; scores are 1, -1, 1.5, 0."""
    data = numbers([C7_Q], [[2.0, -1.0]], C7_KEYS, [1.0, 0.5, 0.25, 1.0])
    assert [s.tolist() for s in scores_of(data)] == [[1.0, -1.0, 1.5, 0.0]]
    for budget in BUDGETS:
        assert_indices(run_indexer(data, data.cache(rng, Layout(page_size)), k, schedule, budget=budget), [expected])


def test_c7_published(rng: np.random.Generator) -> None:
    """The published operator takes depths of 8 and more: the same keys, wider."""
    wide = [[[*x, *[0.0] * 6] for x in C7_Q]], [[*x, *[7.0] * 6] for x in C7_KEYS]
    data = numbers(wide[0], [[2.0, -1.0]], wide[1], [1.0, 0.5, 0.25, 1.0])
    assert_indices(public_indexer(data, data.cache(rng), 6), [[2, 0, 3, 1, -1, -1]])


@pytest.mark.parametrize("length", [1, 2, 5, 40])
@EVERY_SCHEDULE
def test_c8_equal_scores(length: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """Keys of one score come in the order of their index, however many there are."""
    for value in (1.0, 0.0, -1.0):
        data = numbers([[[value]]], [[1.0]], [[1.0]] * length, [0.5] * length)
        expected = [*range(min(3, length)), *[-1] * (3 - length)]
        assert_indices(run_indexer(data, data.cache(rng), 3, schedule), [expected])


# ---- against the reference -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "null"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@EVERY_SCHEDULE
def test_agrees_with_the_reference(
    batch: tuple[list[int], list[int]], mask: str, schedule: Schedule, rng: np.random.Generator
) -> None:
    """Scores that float32 holds exactly, ties among them: the indices are equal one by one, for every k and budget."""
    data = scored(rng, *batch, mask=mask, largest=1)
    for k, budget in ((1, 100), (4, 1), (7, 1 << 29), (90, 500)):
        found = run_indexer(data, data.cache(rng, Layout(3)), k, schedule, budget=budget)
        assert_indices(found, indexer_reference(data, k))


def test_the_batches_have_ties(rng: np.random.Generator) -> None:
    """The data of these tests ties scores of different keys, zero and negative ones among them."""
    data = scored(rng, *BATCHES["long"], largest=1)
    found = scores_of(data)
    assert sum(len(s) - len(np.unique(s)) for s in found) > 100
    assert sum(int((s == 0).sum()) for s in found) > 10
    assert sum(int((s < 0).sum()) for s in found) > 100


@pytest.mark.parametrize(("heads", "depth"), [(1, 8), (2, 16), (7, 24), (64, 128), (128, 64), (128, 128), (3, 40)])
@EVERY_SCHEDULE
def test_heads_and_depths(heads: int, depth: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """Sums over any number of heads and any depth."""
    data = scored(rng, [9, 0], [3, 4], heads=heads, depth=depth)
    assert_indices(run_indexer(data, data.cache(rng), 6, schedule), indexer_reference(data, 6))


@pytest.mark.parametrize("mask", ["causal", "null"])
@pytest.mark.parametrize("pool", [1, 2, 3, 7, 100])
@EVERY_SCHEDULE
def test_pools(pool: int, mask: str, schedule: Schedule, rng: np.random.Generator) -> None:
    """A pool counts once its last token is visible; the key of one that is not whole is never looked at."""
    data = scored(rng, [13, 0, 6, 2], [3, 8, 0, 1], mask=mask, pool=pool)
    found = run_indexer(data, data.cache(rng, Layout(2)), 5, schedule, budget=40)
    assert_indices(found, indexer_reference(data, 5))
    visible = [at.pos + 1 if mask == "causal" else at.num_keys for at in data.ragged.places(1)]
    assert (found >= 0).sum(1).tolist() == [min(5, n // pool) for n in visible]


@pytest.mark.parametrize("layout", [Layout(1), Layout(5, 3, 1), Layout(64), Layout(3, sliced=True)], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_layouts(layout: Layout, kind: torch.dtype, rng: np.random.Generator) -> None:
    """Page sizes, layers, slices of larger buffers and every index dtype."""
    data = scored(rng, [13, 0, 6], [3, 8, 0])
    cache = data.cache(rng, replace(layout, index_dtype=kind))
    found = public_indexer(data, cache, 5, layer_idx=layout.layer, input_row_offsets=data.offsets.to(kind))
    assert_indices(found, indexer_reference(data, 5))


@pytest.mark.parametrize("past", [0, 3])
def test_lengths(past: int, rng: np.random.Generator) -> None:
    """A first row sees itself; k may exceed every length, and be anything from 1."""
    data = scored(rng, [past, 0], [1, 2])
    for k in (1, 2, 3, 4, 5, 1000):
        found = public_indexer(data, data.cache(rng), k)
        assert found.shape == (3, k)
        assert_indices(found, indexer_reference(data, k))
        assert found[1].tolist() == [0, *[-1] * (k - 1)]


@pytest.mark.parametrize("batch", [([], []), ([3, 0], [0, 0])], ids=["no sequences", "no rows"])
def test_batches_of_no_rows(batch: tuple[list[int], list[int]], rng: np.random.Generator) -> None:
    """Legal, and give a result of no rows."""
    data = scored(rng, *batch)
    if not batch[0]:
        data = replace(data, keys=Stored((), None, None))
        empty = torch.zeros(1, 1, 1, 4, 1, 8).to(F8)
        cache = PagedKVCache(empty, torch.zeros(0, 2).int(), torch.zeros(0).int(), scales=torch.ones(1, 1, 1, 4, 1, 1))
    else:
        cache = data.cache(rng)
    for budget in BUDGETS:
        found = public_indexer(data, cache, 4, scores_budget_bytes=budget)
        assert (found.shape, found.dtype) == ((0, 4), torch.int32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Scored, Layout, int, int, Schedule, np.random.Generator]:
    """Any batch, layout, k, budget and schedule."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 14), min_size=batch, max_size=batch)
    data = scored(
        rng,
        draw(lengths),
        draw(lengths),
        heads=draw(st.integers(1, 5)),
        depth=draw(st.sampled_from([1, 8, 24])),
        mask=draw(st.sampled_from(["causal", "null"])),
        pool=draw(st.integers(1, 5)),
        largest=draw(st.integers(0, 3)),
    )
    layout = draw(st.builds(Layout, st.sampled_from([1, 2, 3, 5, 16]), st.integers(1, 2), sliced=st.booleans()))
    schedule = draw(
        st.builds(
            Schedule,
            rows=st.integers(1, 9),
            keys=st.integers(1, 9),
            masks=st.sampled_from(["branch", "split", "always"]),
            start=st.sampled_from(["aligned", "first"]),
        )
    )
    return data, layout, draw(st.integers(1, 30)), draw(st.integers(1, 2000)), schedule, rng


@pytest.mark.slow
@property_test(cases(), interpreted=80, native=40)
def test_any_batch_agrees(case: tuple[Scored, Layout, int, int, Schedule, np.random.Generator]) -> None:
    """Lengths of 0 to 14, pools, ties, windows of rows that cut sequences, every schedule."""
    data, layout, k, budget, schedule, rng = case
    found = run_indexer(data, data.cache(rng, layout), k, schedule, budget=budget)
    assert_indices(found, indexer_reference(data, k))


@pytest.mark.parametrize("seed", range(3))
def test_real_scores(seed: int) -> None:
    """Scores that do round: what is kept are the best ones within rounding, in order within rounding, each once."""
    rng = np.random.default_rng(seed)
    base = scored(rng, [200, 3], [3, 40], heads=16, depth=64)
    q = torch.from_numpy(rng.standard_normal(base.q.shape)).float().to(F8)
    q_s = torch.from_numpy(rng.standard_normal(base.q_s.shape)).float()
    keys = tuple(torch.from_numpy(rng.standard_normal(tuple(x.shape))).float().to(F8) for x in base.keys.rows)
    scales = tuple(torch.from_numpy(rng.uniform(0.1, 2, (len(x), 1))).float() for x in keys)
    data = replace(base, q=q, q_s=q_s, keys=Stored(keys, scales, 64))
    found = public_indexer(data, data.cache(rng), 32)
    for row, scores in zip(found.tolist(), scores_of(data), strict=True):
        chosen = [j for j in row if j >= 0]
        assert len(chosen) == len(set(chosen)) == min(32, len(scores))
        np.testing.assert_allclose(scores[chosen], scores[best(scores, 32)[: len(chosen)]], rtol=1e-4, atol=1e-4)


# ---- scores that are not ordinary ------------------------------------------------------------------------------------


def one_row(scores: list[float]) -> Scored:
    """A row that sees as many keys as there are scores, each scored so: q and keys are 1, the scales the scores."""
    return numbers([[[1.0]]], [[1.0]], [[1.0]] * len(scores), scores)


NAN, INF = float("nan"), float("inf")
ORDERS = {
    "-0 equals +0": [0.0, -0.0, 1.0, -0.0, 0.0, -1.0, 0.0],
    "-inf after the finite": [-INF, 1.0, -INF, -3e38, 3e38, 0.0],
    "inf first": [1.0, INF, 2.0, INF, -INF],
    "NaN last": [NAN, -INF, NAN, 1.0, INF, NAN],
    "only NaN": [NAN] * 5,
    "only -inf": [-INF] * 5,
    "tiny": [1e-45, 0.0, -1e-45, 2e-45, -2e-45, 1.1754944e-38, -1.1754944e-38],
    "next to each other": [1.0, 1.0000001, 0.99999994, 1.0, -1.0, -1.0000001, -0.99999994],
    "negative": [-5.0, -1.0, -3.0, -1.0, -2.0],
}


@pytest.mark.parametrize("scores", ORDERS.values(), ids=ORDERS)
@EVERY_SCHEDULE
def test_order(scores: list[float], schedule: Schedule, rng: np.random.Generator) -> None:
    """Descending score, ties by index, -0 as +0, -inf after what is finite, NaN after all; then -1."""
    data = one_row(scores)
    for k in (1, 2, len(scores), len(scores) + 3):
        found = run_indexer(data, data.cache(rng), k, schedule)
        assert_indices(found, [best(np.array(scores, np.float32).astype(np.float64), k)])


def test_float8_nan_in_a_visible_key(rng: np.random.Generator) -> None:
    """A key of NaN bytes has a score of NaN for every row that sees it, and comes last; other keys keep their order."""
    data = scored(rng, [9, 0], [3, 4])
    keys = tuple(x.clone() for x in data.keys.rows)
    keys[0][4, 3], keys[1][0] = NAN, NAN
    data = replace(data, keys=replace(data.keys, rows=keys))
    assert [bool(np.isnan(s).any()) for s in scores_of(data)] == [True] * 7
    for k in (1, 3, 12, 20):
        assert_indices(public_indexer(data, data.cache(rng), k), indexer_reference(data, k))


def test_infinite_weights(rng: np.random.Generator) -> None:
    """q_s of either infinity, where a product of zero is NaN."""
    data = scored(rng, [9, 0], [3, 4], heads=1)
    q_s = torch.tensor([INF, -INF, 1.0, -1.0, INF, 0.0, -INF]).reshape(7, 1)
    data = replace(data, q_s=q_s)
    found = scores_of(data)
    assert any(np.isnan(s).any() and np.isinf(s).any() for s in found)
    assert_indices(public_indexer(data, data.cache(rng), 12), indexer_reference(data, 12))


def test_zero_queries(rng: np.random.Generator) -> None:
    """Rows whose every score is zero return the first keys."""
    data = scored(rng, [9, 0], [3, 4], largest=0)
    assert_indices(public_indexer(data, data.cache(rng), 4)[:3], [[0, 1, 2, 3]] * 3)


def test_poison_in_what_no_row_sees(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents are checked for visible keys alone: NaN elsewhere passes, in a visible key it is named."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    data = scored(rng, [9, 0], [3, 4], pool=2)
    cache = data.cache(rng, Layout(3, 2))
    assert_indices(public_indexer(data, cache, 4), indexer_reference(data, 4))
    cache.layer(0).keys[int(cache.lookup_table[0, 1]), 1] = NAN
    buffer = torch.full((7, 4), 77, dtype=torch.int32)
    with pytest.raises(NotFinite, match=r"k_k of sequence 0, key 4: a visible slot holds NaN or infinity"):
        public_indexer(data, cache, 4, output_indices=buffer)
    assert bool((buffer == 77).all())


# ---- what does not change a result -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pool", [1, 3])
@EVERY_SCHEDULE
def test_every_budget(pool: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """From one row at a time to all at once, with windows that cut sequences anywhere."""
    data = scored(rng, [9, 0, 2, 30], [3, 14, 0, 1], pool=pool)
    cache, expected = data.cache(rng), indexer_reference(data, 5)
    row = 4 * (31 // pool)
    for budget in (1, row - 1, row, row + 1, 2 * row, 3 * row, 7 * row, 17 * row, 18 * row, 99 * row):
        assert_indices(run_indexer(data, cache, 5, schedule, budget=budget), expected)


@pytest.mark.parametrize("budget", [1, 500, 1 << 20])
def test_threads_and_runs(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random scores, many ties: 1 thread and 4, and again, give the same answer to the last index."""
    rng = np.random.default_rng(7)
    data = scored(rng, [40, 0, 2], [13, 24, 1], heads=8, depth=32)
    normal = torch.from_numpy(rng.standard_normal(data.q_s.shape)).float()
    data = replace(data, q_s=normal)
    cache, found = data.cache(rng), []
    for threads in ("1", "4", "4", "1", "2"):
        monkeypatch.setenv("TILEWRIGHT_THREADS", threads)
        found.append(public_indexer(data, cache, 9, scores_budget_bytes=budget))
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_where_pages_lie(rng: np.random.Generator) -> None:
    """Pages in any order give the same keys of real scores, to the last index."""
    base = scored(rng, [40, 0, 2], [13, 24, 1], heads=8, depth=32)
    data = replace(base, q_s=torch.from_numpy(rng.standard_normal(base.q_s.shape)).float())
    first = public_indexer(data, data.cache(np.random.default_rng(0), Layout(3)), 9)
    for seed in range(1, 5):
        assert_same_bits(public_indexer(data, data.cache(np.random.default_rng(seed), Layout(3)), 9), first)


@EVERY_SCHEDULE
def test_a_sequence_alone(schedule: Schedule, rng: np.random.Generator) -> None:
    """No sequence of a batch knows of another."""
    base = scored(rng, [17, 0, 6], [2, 3, 4], heads=8, depth=32)
    data = replace(base, q_s=torch.from_numpy(rng.standard_normal(base.q_s.shape)).float())
    found = run_indexer(data, data.cache(rng), 6, schedule)
    for b in range(3):
        alone = data.only(b)
        rows = slice(data.ragged.offsets[b], data.ragged.offsets[b + 1])
        assert_same_bits(run_indexer(alone, alone.cache(rng), 6, schedule), found[rows])


def test_lengths_and_offsets_in_any_number(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of more sequences than the interpreter keeps as lists."""
    monkeypatch.setattr("tilewright.dsl.interp._SMALL", 2)
    data = scored(rng, [9, 0, 2, 30], [3, 14, 0, 1])
    for budget in (1, 1 << 20):
        assert_indices(run_indexer(data, data.cache(rng), 5, budget=budget), indexer_reference(data, 5))


def test_run_time_values_compile_nothing(rng: np.random.Generator) -> None:
    """Lengths, tables, offsets and budgets change from call to call; k and the pool do not."""
    schedule = Schedule(rows=4, keys=11)
    data = scored(rng, [17, 0], [2, 3], heads=3)
    assert_indices(run_indexer(data, data.cache(rng), 6, schedule), indexer_reference(data, 6))
    before = len(programs())
    for past, rows, budget in (([0, 4, 50], [1, 2, 3], 1), ([9], [0], 100), ([300], [1], 1 << 20)):
        other = scored(rng, past, rows, heads=3)
        found = run_indexer(other, other.cache(rng), 6, schedule, budget=budget)
        assert_indices(found, indexer_reference(other, 6))
    assert len(programs()) == before
    run_indexer(data, data.cache(rng), 7, schedule)
    assert len(programs()) == before + 1


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(rows=2, partitions=2), "schedule field partitions=2: a selection wants whole rows of scores"),
        (Schedule(rows=2, heads=1), "schedule field heads=1: a reduction over heads needs all 2 heads in one tile"),
        (Schedule(rows=0), "schedule field rows=0: must be at least 1"),
    ],
)
def test_illegal_schedules(schedule: Schedule, message: str, rng: np.random.Generator) -> None:
    """Refused by field."""
    data = scored(rng, [9, 0], [3, 2])
    with pytest.raises(IllegalSchedule) as raised:
        run_indexer(data, data.cache(rng), 3, schedule)
    assert str(raised.value) == message


@pytest.mark.interpreted("tells of statements")
def test_statement_trace(rng: np.random.Generator) -> None:
    """An interpreter that tells of every statement gives the same indices, and tells of the choice, once per window."""
    data = scored(rng, [9, 0], [3, 2])
    cache = data.cache(rng)
    constants = {"top_k": 4, "mask": mask_named("test", "causal", None), "kpool": 1}
    spec = mla_indexer.trace(**constants)
    bound = bind("test", spec, {"q": data.q, "q_s": data.q_s, "k": cache.layer(0)}, data.offsets, {"out": i32}, {})
    told: list[Stmt] = []
    program = lower(spec, bound.binding, Schedule(rows=8, keys=4))
    interpreter = Interpreter(program, on_statement=lambda s, f: told.append(s))
    out = torch.full((5, 4), 77, dtype=torch.int32)
    interpreter.run({**bound.tensors, "out": out, "offsets": data.offsets}, bound.scalars, budget_bytes=4 * 12)
    assert_indices(out, indexer_reference(data, 4))
    assert sum(isinstance(s, Best) for s in told) >= 5


def test_buffers(rng: np.random.Generator) -> None:
    """Written in place and returned, every element of it, strided or numpy's; nothing around it."""
    data = scored(rng, [9, 0, 4], [3, 2, 0])
    expected = indexer_reference(data, 4)
    around = torch.full((9, 12), 77, dtype=torch.int32)
    buffer = around[2:7, 4:8]
    assert public_indexer(data, data.cache(rng), 4, output_indices=buffer) is buffer
    assert_indices(buffer, expected)
    assert int((around == 77).sum()) == 9 * 12 - 20
    array = np.full((5, 4), 77, np.int32)
    public_indexer(data, data.cache(rng), 4, output_indices=array)
    np.testing.assert_array_equal(array, expected)


def test_numpy_arguments(rng: np.random.Generator) -> None:
    """numpy arrays wherever tensors are taken (there is no float8 in numpy), and numpy's integers."""
    data = scored(rng, [9, 0], [3, 2])
    found = public_indexer(
        data,
        data.cache(rng),
        np.int64(4),  # type: ignore[arg-type]  # any integer is taken
        q_s=data.q_s.numpy(),
        input_row_offsets=data.offsets.numpy(),
        kpool=np.int32(1),
        layer_idx=np.int64(0),
    )
    assert_indices(found, indexer_reference(data, 4))


# ---- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys
import torch
from tilewright.ops import PagedKVCache, mla_indexer_ragged_float8_paged

rows, keys, page, budget = json.loads(sys.argv[1])
torch.set_num_threads(1)


def peak():
    try:  # of this program; ru_maxrss counts what started it, too
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def operands(rows, keys):
    pages = -(-keys // page)
    ones = torch.full((pages, 1, 1, page, 1, 8), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.ones(pages, 1, 1, page, 1, 1)
    cache = PagedKVCache(ones, torch.arange(pages)[None], torch.tensor([keys - rows]), scales=scales)
    q = torch.ones(rows, 2, 8).to(torch.float8_e4m3fn)
    return q, torch.ones(rows, 2), torch.tensor([0, rows]), cache, 0


small, large = operands(rows, 2 * rows), operands(rows, keys)  # of one program, which is made before
mla_indexer_ragged_float8_paged(*small, top_k=16, scores_budget_bytes=budget)
before = peak()
out = mla_indexer_ragged_float8_paged(*large, top_k=16, scores_budget_bytes=budget)
print(json.dumps([peak() - before, out[-1].tolist()]))
"""


def measured(rows: int, keys: int, budget: int) -> int:
    """Bytes by which the peak of a fresh process grows in one call."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps([rows, keys, 64, budget])],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "TILEWRIGHT_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    grown, last = json.loads(done.stdout)
    assert last == list(range(16))
    return int(grown)


MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "keys", "budget"), [(128, 1 << 15, 4 * MIB), (64, 1 << 16, MIB), (16, 1 << 18, 1)])
def test_peak_memory_stays_near_the_budget(rows: int, keys: int, budget: int) -> None:
    """A batch whose scores would take 16 MiB takes the budget, or one row, and a few tiles."""
    assert rows * keys * 4 == 16 * MIB
    assert measured(rows, keys, budget) < max(budget, 4 * keys) + 6 * MIB


@pytest.mark.slow
def test_the_measure_of_memory_sees_a_score_matrix() -> None:
    """With a budget for all of it, the same batch does take 16 MiB."""
    assert measured(128, 1 << 15, 1 << 30) > 16 * MIB


@pytest.mark.parametrize(("rows", "budget"), [(1, 1), (1, 4 * 40 - 1), (1, 4 * 40), (2, 4 * 80), (5, 4 * 200 + 7)])
@pytest.mark.parametrize("pool", [1, 2])
def test_workspaces_keep_to_the_budget(
    rows: int, budget: int, pool: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows at a time as the budget holds, one at least: 4 bytes for each key of the longest sequence."""
    made: list[tuple[int, ...]] = []
    full = torch.full

    def noting(size: Any, *args: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.int32:
            made.append(tuple(size))
        return full(size, *args, **options)

    data = scored(rng, [30 * pool, 3, 0], [10 * pool, 7, 0], pool=pool)
    cache = data.cache(rng)
    monkeypatch.setattr(torch, "full", noting)
    found = run_indexer(data, cache, 5, budget=budget)
    assert_indices(found, indexer_reference(data, 5))
    total = 10 * pool + 7
    assert made == [(min(rows, total - lo), 40) for lo in range(0, total, rows)]


# ---- bad input -------------------------------------------------------------------------------------------------------


def refused(error: type[ArgumentError], message: str, rng: np.random.Generator, **options: Any) -> None:
    """The call raises exactly this message, and leaves its buffer alone."""
    data = scored(rng, [9, 0], [3, 2])
    buffer = torch.full((5, 4), 77, dtype=torch.int32)
    cache = data.cache(rng)
    options = {n: x(cache) if callable(x) else x for n, x in options.items()}
    with pytest.raises(error) as raised:
        public_indexer(data, cache, 4, **{"output_indices": buffer, **options})
    assert str(raised.value) == f"{NAME}: {message}"
    assert bool((buffer == 77).all())


def of_pages(pages: Tensor, **options: Any) -> PagedKVCache:
    """A cache of some pages for two sequences."""
    return PagedKVCache(pages, torch.zeros(2, 1).int(), torch.zeros(2).int(), **options)


ONE = "an integer in 1..2147483647"
F8_PAGES = torch.ones(2, 1, 1, 4, 1, 8).to(F8)
BAD: list[tuple[type[ArgumentError], str, dict[str, Any]]] = [
    (ArgumentValueError, f"top_k is 0; expected {ONE}", {"top_k": 0}),
    (ArgumentValueError, f"top_k is -3; expected {ONE}", {"top_k": -3}),
    (ArgumentTypeError, f"top_k is a float; expected {ONE}", {"top_k": 4.0}),
    (ArgumentTypeError, f"top_k is a bool; expected {ONE}", {"top_k": True}),
    (ArgumentValueError, f"kpool is 0; expected {ONE}", {"kpool": 0}),
    (ArgumentTypeError, f"kpool is a NoneType; expected {ONE}", {"kpool": None}),
    (ArgumentValueError, "mask_str is 'chunked'; expected 'causal' or 'null'", {"mask_str": "chunked"}),
    (ArgumentValueError, "mask_str is None; expected 'causal' or 'null'", {"mask_str": None}),
    (
        ArgumentValueError,
        "scores_budget_bytes is 0; expected an integer in 1..9223372036854775807",
        {"scores_budget_bytes": 0},
    ),
    (
        ArgumentTypeError,
        "scores_budget_bytes is a float; expected an integer in 1..9223372036854775807",
        {"scores_budget_bytes": 1e6},
    ),
    (ArgumentValueError, "layer_idx is 1; expected an integer in 0..0", {"layer_idx": 1}),
    (ArgumentValueError, "layer_idx is -1; expected an integer in 0..0", {"layer_idx": -1}),
    (ArgumentDTypeError, "q has dtype float32; expected float8_e4m3fn", {"q": torch.zeros(5, 2, 8)}),
    (ArgumentDTypeError, "q_s has dtype float16; expected float32", {"q_s": torch.zeros(5, 2).half()}),
    (ArgumentShapeError, "q_s has shape [5, 3]; expected [rows=5, num_heads=2]", {"q_s": torch.zeros(5, 3)}),
    (ArgumentShapeError, "q_s has shape [4, 2]; expected [rows=5, num_heads=2]", {"q_s": torch.zeros(4, 2)}),
    (ArgumentRankError, "q_s has rank 1; expected 2: [rows=5, num_heads=2]", {"q_s": torch.zeros(5)}),
    (
        ArgumentShapeError,
        "output_indices has shape [5, 5]; expected [rows=5, rank=4]",
        {"output_indices": torch.zeros(5, 5).int()},
    ),
    (
        ArgumentDTypeError,
        "output_indices has dtype int64; expected int32",
        {"output_indices": torch.zeros(5, 4).long()},
    ),
    (
        ArgumentTypeError,
        "k_collection is a PagedLeaf; expected a PagedKVCache",
        {"k_collection": lambda cache: cache.layer(0)},
    ),
    (
        ArgumentDTypeError,
        "k_collection has dtype float32; expected float8_e4m3fn",
        {"k_collection": of_pages(F8_PAGES.float())},
    ),
    (
        ArgumentShapeError,
        "k_collection.keys has shape [2, 4, 2, 8]; expected [pages, page_size, kv_heads=1, depth=8]",
        {"k_collection": of_pages(torch.ones(2, 1, 1, 4, 2, 8).to(F8), scales=torch.ones(2, 1, 1, 4, 2, 1))},
    ),
    (
        ArgumentShapeError,
        "k_collection.keys has shape [2, 4, 1, 16]; expected [pages, page_size, kv_heads=1, depth=8]",
        {"k_collection": of_pages(torch.ones(2, 1, 1, 4, 1, 16).to(F8), scales=torch.ones(2, 1, 1, 4, 1, 1))},
    ),
    (
        ArgumentError,
        "k_collection has a scale per 4 values; expected one scale per key of 8",
        {"k_collection": of_pages(F8_PAGES, scales=torch.ones(2, 1, 1, 4, 1, 2), quantization_granularity=4)},
    ),
    (
        ArgumentValueError,
        "input_row_offsets[2] is 4; expected 5, the number of rows",
        {"input_row_offsets": torch.tensor([0, 3, 4])},
    ),
    (
        ArgumentShapeError,
        "k_collection has shape [2]; expected [seq=1], as input_row_offsets has seq 1",
        {"input_row_offsets": torch.tensor([0, 5])},
    ),
]


@pytest.mark.parametrize(("error", "message", "options"), BAD, ids=[m.split(";")[0] for _, m, _ in BAD])
def test_bad_arguments(
    error: type[ArgumentError], message: str, options: dict[str, Any], rng: np.random.Generator
) -> None:
    """Named, with what it was and what was expected; the buffer untouched."""
    refused(error, message, rng, **options)


@pytest.mark.parametrize("depth", [1, 4, 12, 129])
def test_depths_are_multiples_of_eight(depth: int, rng: np.random.Generator) -> None:
    """And the message says so."""
    expected = "expected [rows, num_heads in 1..128, depth in multiples of 8]"
    message = f"q has shape [5, 2, {depth}]; {expected}"
    refused(ArgumentShapeError, message, rng, q=torch.zeros(5, 2, depth).to(F8))


def test_heads_are_128_at_most(rng: np.random.Generator) -> None:
    """As the interface has it."""
    data = scored(rng, [9, 0], [3, 2])
    with pytest.raises(
        ArgumentShapeError, match=r"q has shape \[5, 129, 8\]; expected \[rows, num_heads in 1\.\.128, "
    ):
        public_indexer(data, data.cache(rng), 4, q=torch.zeros(5, 129, 8).to(F8))


def test_pages_outside_the_pool(rng: np.random.Generator) -> None:
    """Of visible keys: named, before anything is written."""
    data = scored(rng, [9, 0], [3, 2])
    cache = data.cache(rng)
    cache.lookup_table[0, 2] = 1000
    buffer = torch.full((5, 4), 77, dtype=torch.int32)
    with pytest.raises(ArgumentValueError) as raised:
        public_indexer(data, cache, 4, output_indices=buffer)
    expected = f"expected a page in 0..{cache.num_pages - 1}"
    assert str(raised.value) == f"{NAME}: k_collection.lookup_table[0, 2] is 1000; {expected}"
    assert bool((buffer == 77).all())


def test_lengths_beyond_the_table(rng: np.random.Generator) -> None:
    """A pooled cache's table holds pools: as many of them as the lengths say tokens, divided."""
    data = scored(rng, [25], [2], pool=3)
    cache = data.cache(rng)
    assert cache.lookup_table.shape[1] * cache.page_size == 16
    assert_indices(public_indexer(data, cache, 9), indexer_reference(data, 9))
    with pytest.raises(ArgumentValueError) as raised:
        public_indexer(data, cache, 9, kpool=1)
    expected = "expected at most 16, as its lookup_table row holds 4 pages of 4"
    assert str(raised.value) == f"{NAME}: k_collection sequence 0 is 27 keys long; {expected}"


def test_a_leaf_is_what_a_cache_gives(rng: np.random.Generator) -> None:
    """The one scale of a key may be expanded, as coarser scales are."""
    data = scored(rng, [9, 0], [3, 2])
    cache = data.cache(rng)
    leaf = cache.layer(0)
    assert isinstance(leaf, PagedLeaf)
    assert leaf.key_scales is not None
    ones = torch.ones(1, 1, 1, 1, 1, 1).expand(cache.num_pages, 1, 1, 4, 1, 1)
    same = PagedKVCache(leaf.keys[:, None, None], cache.lookup_table, cache.cache_lengths, scales=ones)
    units = tuple(torch.ones_like(s) for s in data.keys.scales or ())
    plain = replace(data, keys=replace(data.keys, scales=units))
    assert_indices(public_indexer(data, same, 6), indexer_reference(plain, 6))
