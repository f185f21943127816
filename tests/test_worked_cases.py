"""The worked cases of the semantics that attention must give, under every kind of schedule, page size and dtype."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf, log

import numpy as np
import pytest
import torch
from support.batches import content, place
from support.reference import assert_close, assert_same_bits, flash
from support.running import attend, attention, each, mask, of_numbers, public
from torch import Tensor

from tilewright.dsl import head, seq
from tilewright.dsl.schedule import Schedule
from tilewright.ops import PagedKVCache, merge_states

pytestmark = pytest.mark.both_targets(slow=True)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EVERY_SCHEDULE = each()
PAGE_SIZES = (1, 2, 3, 5, 8, 16, 48, 64, 96, 160, 192, 224)


def constant(n: int, value: float = 0.0) -> list[list[float]]:
    return [[value]] * n


# ---- C1: the sink ----------------------------------------------------------------------------------------------------

C1_KEYS, C1_VALUES = [[0.0, 0], [log(2), 0], [log(3), 0]], [[1.0, 0], [0, 1], [1, 1]]
C1_SINKS: list[tuple[float | None, list[float]]] = [
    (None, [2 / 3, 5 / 6]),
    (-inf, [2 / 3, 5 / 6]),
    (0.0, [4 / 7, 5 / 7]),
    (log(6), [1 / 3, 5 / 12]),
    (inf, [0, 0]),
]


@EVERY_SCHEDULE
@DTYPES
@pytest.mark.parametrize(("sink", "expected"), C1_SINKS, ids=["none", "-inf", "0", "ln6", "inf"])
def test_c1_sink_enters_the_denominator_once(
    sink: float | None, expected: list[float], dtype: torch.dtype, schedule: Schedule
) -> None:
    """A sink is one more logit, however many tiles and partitions the keys are cut into; lse does not count it."""
    data = of_numbers([[1, 0]], [C1_KEYS], [C1_VALUES], past=[2], rows=[1], dtype=dtype)
    given = None if sink is None else torch.tensor([sink])
    out, lse = attend(data, page_size=2, sink=given, schedule=schedule)
    assert_close(out, [[expected]])
    assert_close(lse, [[log(6)]], rtol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_c1_three_heads_have_sinks_of_their_own(partitions: int, heads: int) -> None:
    """Sinks are per query head: -inf, 0 and ln 6 in one call give the three rows, split as 1+2 or 1+1+1+0 keys."""
    data = of_numbers([[1, 0]], [C1_KEYS], [C1_VALUES], past=[2], rows=[1], heads=3)
    sinks = torch.tensor([-inf, 0.0, log(6)])
    out, lse = attend(data, sink=sinks, schedule=Schedule(rows=1, heads=heads, keys=1, partitions=partitions))
    assert_close(out, [[expected for _, expected in C1_SINKS[1:4]]])
    assert_close(lse, [[log(6)] * 3])


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_c1_split_by_the_caller(cut: int) -> None:
    """Results over two disjoint sets of keys merge to the result over all, wherever the cut is."""
    data = of_numbers([[1, 0]], [C1_KEYS], [C1_VALUES], past=[2], rows=[1])
    first = attend(data, where=lambda q, k: k < cut, sees=lambda at: at.key < cut)
    rest = attend(data, where=lambda q, k: k >= cut, sees=lambda at: at.key >= cut)
    out, lse = merge_states(*first, *rest)
    assert_close(out, [[[2 / 3, 5 / 6]]])
    assert_close(lse, [[log(6)]])


# ---- C2: rows that see nothing ---------------------------------------------------------------------------------------


@EVERY_SCHEDULE
def test_c2_a_key_for_the_last_row_only(schedule: Schedule) -> None:
    """Rows that see no key give 0 and -inf, although they share a tile with one that does."""
    data = of_numbers([[2.0]] * 3, [[[0.5], [9], [9]]], [[[7.0], [9], [9]]], past=[0], rows=[3])
    buffer = torch.full((3, 1, 1), torch.nan)
    out, lse = attend(
        data,
        sees=lambda at: (at.key == 0) & (at.pos == 2),
        where=lambda q, k: (k == 0) & (q == 2),
        schedule=schedule,
        out=buffer,
    )
    assert out is buffer
    assert_close(out, [[[0.0]], [[0.0]], [[7.0]]])
    assert_close(lse, [[-inf], [-inf], [1.0]])


@EVERY_SCHEDULE
def test_c2_a_request_that_sees_nothing(schedule: Schedule, rng: np.random.Generator) -> None:
    """Counts [0, 3, 2] with a mask that hides all of request 1: the others give what they give alone, bit for bit."""
    data = content(rng, [4, 5, 3], [0, 3, 2])
    buffer = torch.full((5, 2, 8), torch.nan)
    out, lse = attend(
        data,
        sees=lambda at: (at.key <= at.pos) & (at.seq != 1),
        where=lambda q, k: (k <= q) & (seq != 1),
        schedule=schedule,
        out=buffer,
    )
    assert_close(buffer[:3], np.zeros((3, 2, 8)))
    assert_close(lse[:3], np.full((3, 2), -inf))
    alone, lse_alone = attend(data.only(2), where=mask("causal"), schedule=schedule)
    assert_same_bits(out[3:], alone)
    assert_same_bits(lse[3:], lse_alone)


# ---- C3: very negative scores ----------------------------------------------------------------------------------------


@EVERY_SCHEDULE
def test_c3_very_negative_scores_are_scores(schedule: Schedule) -> None:
    """Two keys of score -66855.55 share the weight."""
    data = of_numbers([[1.0]], [[[-66855.55]] * 2], [[[1.0], [3]]], past=[1], rows=[1])
    out, lse = attend(data, schedule=schedule)
    assert_close(out, [[[2.0]]])
    assert_close(lse, [[-66854.856853]])


@EVERY_SCHEDULE
def test_c3_a_masked_key_beside_a_very_negative_one(schedule: Schedule) -> None:
    """The valid key takes all weight, which a finite stand-in for -inf would have shared."""
    data = of_numbers([[1.0]], [[[0.0], [-20000]]], [[[5.0], [3]]], past=[1], rows=[1])
    out, lse = attend(data, sees=lambda at: at.key == 1, where=lambda q, k: k == 1, schedule=schedule)
    assert_close(out, [[[3.0]]])
    assert_close(lse, [[-20000.0]])


# ---- C4: page sizes --------------------------------------------------------------------------------------------------


def decoded(values: Tensor, page_size: int, schedule: Schedule, table: Tensor) -> Tensor:
    """The last position's row with q = 0, over the pages of a table."""
    length, pages = len(values), table.shape[1]
    stored = torch.full((pages * page_size,), torch.nan)
    stored[:length] = values
    blocks = torch.full((pages, 2, 1, page_size, 1, 1), torch.nan)
    for logical, physical in enumerate(table[0].tolist()):
        blocks[physical, 0, 0, :, 0, 0] = stored[logical * page_size :][:page_size] * 0
        blocks[physical, 1, 0, :, 0, 0] = stored[logical * page_size :][:page_size]
    cache = PagedKVCache(blocks, table, torch.tensor([length - 1]))
    out, _ = attention(torch.zeros(1, 1, 1), torch.tensor([0, 1]), cache, where=mask("causal"), schedule=schedule)
    return out


@EVERY_SCHEDULE
def test_c4_page_of_192_in_reverse(schedule: Schedule) -> None:
    """A page size that no key tile divides, pages stored in reverse: a third of the values are 1."""
    values = (torch.arange(3072) % 192 >= 128).float()
    slow = schedule.keys < 16  # 3072 tiles of one key say no more than 192 of 16
    table = torch.arange(15, -1, -1).reshape(1, 16)
    found = decoded(values, 192, replace(schedule, keys=16) if slow else schedule, table)
    assert_close(found, [[[1 / 3]]])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@EVERY_SCHEDULE
def test_c4_every_page_size(page_size: int, schedule: Schedule) -> None:
    """The mean of 0..12 is 6.0 whatever the page size."""
    pages = -(-13 // page_size)
    found = decoded(torch.arange(13.0), page_size, schedule, torch.arange(pages - 1, -1, -1).reshape(1, pages))
    assert_close(found, [[[6.0]]])


# ---- C5: unused slots ------------------------------------------------------------------------------------------------


@EVERY_SCHEDULE
@DTYPES
def test_c5_unused_slots_are_nan(dtype: torch.dtype, schedule: Schedule) -> None:
    """Slots past the end of the last page never reach a result."""
    data = of_numbers([[1.0]], [constant(5, 2)], [constant(5, 1)], past=[4], rows=[1], dtype=dtype)
    out, _ = attend(data, page_size=4, schedule=schedule, where=mask("causal"))
    assert_close(out, [[[1.0]]])


@pytest.mark.parametrize("length", [16, 64, 255, 256, 257])
@pytest.mark.parametrize("masks", ["branch", "split", "always"])
def test_c5_lengths_around_a_tile(length: int, masks: str) -> None:
    """A last tile that is full, one short or one over."""
    data = of_numbers([[1.0]], [constant(length, 2)], [constant(length, 1)], past=[length - 1], rows=[1])
    out, lse = attend(data, page_size=16, schedule=Schedule(rows=1, keys=256, masks=masks), where=mask("causal"))
    assert_close(out, [[[1.0]]])
    assert_close(lse, [[2.0 + log(length)]])


# ---- C6: windows, in three ways of calling ---------------------------------------------------------------------------

C6 = [sum(range(max(0, p - 3), p + 1)) / len(range(max(0, p - 3), p + 1)) for p in range(10)]
C6_SPLITS = {"prefill": [10], "decode": [1] * 10, "chunks of 6 and 4": [6, 4], "chunks of 1, 8, 1": [1, 8, 1]}


@EVERY_SCHEDULE
@pytest.mark.parametrize("calls", C6_SPLITS.values(), ids=C6_SPLITS)
def test_c6_window_counts_its_own_key(calls: list[int], schedule: Schedule) -> None:
    """w = 4 shows positions p-3..p, the same from prefill, decode and chunks."""
    assert [C6[p] for p in (9, 4, 3, 2)] == [7.5, 2.5, 1.5, 1.0]
    found = []
    for n, rows in enumerate(calls):
        past = sum(calls[:n])
        values = [[float(t)] for t in range(past + rows)]
        data = of_numbers(constant(rows), [constant(past + rows)], [values], past=[past], rows=[rows])
        where = mask("sliding_window_causal", 4)
        found += attend(data, page_size=3, where=where, schedule=schedule)[0].reshape(-1).tolist()
    assert_close(torch.tensor(found), C6)


# ---- C9: merging -----------------------------------------------------------------------------------------------------


@DTYPES
def test_c9_merge_weighs_by_lse(dtype: torch.dtype) -> None:
    """lse ln 3 and 0 weigh .75 and .25."""
    one = torch.tensor([[[1.0, 0]]], dtype=dtype), torch.tensor([[log(3)]])
    other = torch.tensor([[[0.0, 1]]], dtype=dtype), torch.tensor([[0.0]])
    out, lse = merge_states(*one, *other)
    assert out.dtype == dtype
    assert_close(out, [[[0.75, 0.25]]])
    assert_close(lse, [[log(4)]])


def test_c9_merging_with_nothing() -> None:
    """The result over no keys returns the other bit for bit, and itself when merged with itself."""
    nothing = torch.zeros(1, 2, 3), torch.full((1, 2), -inf)
    some = torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([[-66855.55, 3e30]])
    for pair in ((*nothing, *some), (*some, *nothing)):
        out, lse = merge_states(*pair)
        assert_same_bits(out, some[0])
        assert_same_bits(lse, some[1])
    out, lse = merge_states(*nothing, *nothing)
    assert_same_bits(out, nothing[0])
    assert_same_bits(lse, nothing[1])


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_c9_partitions_merge_like_merge_states(parts: int, rng: np.random.Generator) -> None:
    """However many partitions, empty ones among them, out and lse are those of one walk."""
    data = content(rng, [9, 0, 2], [3, 1, 4], heads=4, kv_heads=2)
    expected, lse_expected = flash(data.ragged, data.q64, data.keys, data.values, lambda at: at.key <= at.pos, 0.3)
    schedule = Schedule(rows=2, keys=2, partitions=parts)
    out, lse = attend(data, where=mask("causal"), schedule=schedule, scale=0.3)
    assert_close(out, expected)
    assert_close(lse, lse_expected)


# ---- C10: 64-bit addresses -------------------------------------------------------------------------------------------


def spacious(pages: int, stride: int, dtype: torch.dtype) -> Tensor:
    """Pages of 2 x 4 slots of 8 elements, `stride` elements apart: address space that nobody touches is free."""
    whole = torch.empty((pages - 1) * stride + 64, dtype=dtype)
    return whole.as_strided((pages, 2, 1, 4, 1, 8), (stride, 32, 32, 8, 8, 1))


@pytest.mark.parametrize(
    ("page", "stride", "dtype"),
    [
        (131072, 16384, torch.bfloat16),  # element 2**31, byte 2**32
        (131072, 16384, torch.float32),  # byte 2**33
        (262147, 16384, torch.bfloat16),  # past 2**32 elements
    ],
    ids=["C10", "float32", "2**32"],
)
def test_c10_far_pages(page: int, stride: int, dtype: torch.dtype) -> None:
    """The value stored on a page past 2**31 elements, not on page 0, and no fault."""
    blocks = spacious(page + 1, stride, dtype)
    blocks[0] = torch.nan
    blocks[page], blocks[1] = 3.0, 5.0
    cache = PagedKVCache(blocks, torch.tensor([[page], [1]]), torch.tensor([3, 3]))
    q = torch.zeros(2, 1, 8, dtype=dtype)
    assert_close(public(q, torch.tensor([0, 1, 2]), cache), [[[3.0] * 8], [[5.0] * 8]])


def test_c10_far_pages_of_float8() -> None:
    """The same for a cache with scales, both past 2**31 elements."""
    page, stride = 131072, 32768
    blocks = spacious(page + 1, stride, torch.float8_e4m3fn)
    scales = torch.empty(page * 16384 + 64).as_strided((page + 1, 2, 1, 4, 1, 1), (16384, 32, 32, 8, 8, 1))
    blocks[page], scales[page] = torch.full((2, 1, 4, 1, 8), 3.0).to(blocks.dtype), 0.5
    cache = PagedKVCache(blocks, torch.tensor([[page]]), torch.tensor([3]), scales=scales)
    q, offsets = torch.zeros(1, 1, 8), torch.tensor([0, 1])
    assert_close(public(q, offsets, cache), [[[1.5] * 8]])


def test_every_head_of_a_call_is_its_own() -> None:
    """Head ids count query heads over the whole tensor, in any tile: weights log(1 + head) on one of two keys."""
    data = of_numbers([[0.0]], [constant(2)], [[[0.0], [1.0]]], past=[1], rows=[1], heads=6)
    cache = place(data, np.random.default_rng(0))
    out, _ = attention(data.q, data.offsets, cache, where=lambda q, k: (k == 0) | (head >= 3))
    assert_close(out[0, :, 0], [0, 0, 0, 0.5, 0.5, 0.5])
    assert math.isclose(float(out.sum()), 1.5)
