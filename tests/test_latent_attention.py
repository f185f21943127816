"""Latent sparse attention: recent positions and listed entries, against a literal reference, in every form."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf, log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.batches import F8
from support.properties import property_test
from support.reference import Ragged, assert_close, assert_same_bits
from support.running import each
from support.selection import (
    Latent,
    Layout,
    Stored,
    latent,
    latent_reference,
    public_indexer,
    public_latent,
    run_latent,
    scored,
)
from torch import Tensor

from tilewright.codegen_cache.bind import bind
from tilewright.codegen_cache.programs import programs
from tilewright.dsl.dtypes import f32
from tilewright.dsl.errors import (
    ArgumentDTypeError,
    ArgumentError,
    ArgumentLayoutError,
    ArgumentRankError,
    ArgumentShapeError,
    ArgumentTypeError,
    ArgumentValueError,
    IllegalSchedule,
    NotFinite,
)
from tilewright.dsl.interp import Interpreter
from tilewright.dsl.loops import Stmt
from tilewright.dsl.lower import lower
from tilewright.dsl.schedule import Schedule
from tilewright.ops import PagedKVCache
from tilewright.ops.latent_attention import latent_sparse_attention

pytestmark = pytest.mark.both_targets(slow=True)

NAME = "latent_sparse_attention_ragged_paged"

EVERY_SCHEDULE = each(
    Schedule(rows=1, heads=1, keys=3, masks="split"),
    Schedule(rows=1, keys=4, partitions=2),
    Schedule(rows=1, keys=512),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=1, heads=1, keys=7, partitions=4, masks="split", start="first"),
    Schedule(rows=1, keys=64, partitions=3, masks="always"),
    Schedule(rows=1, keys=3, start="first"),
)

# past, rows and entries of each sequence
BATCHES = {
    "prefill": ([0, 0, 0], [5, 1, 9], [3, 0, 7]),
    "decode": ([7, 0, 31, 12], [1, 1, 1, 1], [9, 1, 0, 20]),
    "mixed, with sequences of no rows": ([0, 17, 3, 0, 9], [4, 0, 6, 0, 1], [5, 8, 2, 0, 11]),
    "one row": ([0], [1], [1]),
}


def check(data: Latent, found: tuple[Tensor, Tensor], **tolerance: float) -> None:
    """Both results are those of the reference."""
    out, lse = latent_reference(data)
    assert_close(found[0], out, **tolerance)
    assert_close(found[1], lse)


def equal_weights(listed: list[list[float]], indices: list[list[int]], **options: Any) -> Latent:
    """One sequence, one head, q = 0: every key that a row sees weighs the same. Entries are written numbers."""
    recent = options.pop("recent", None)
    rows = len(indices)
    past = 0 if recent is None else len(recent) - rows
    return Latent(
        Ragged((past,), (rows,)),
        torch.zeros(rows, 1, len(listed[0])),
        torch.tensor(indices, dtype=torch.int32).reshape(rows, -1),
        None if recent is None else Stored((torch.tensor(recent),)),
        Stored((torch.tensor(listed),)),
        options.pop("window", 0),
        1.0,
        **options,
    )


# ---- against the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@EVERY_SCHEDULE
def test_agrees_with_the_reference(
    batch: tuple[list[int], list[int], list[int]], schedule: Schedule, rng: np.random.Generator
) -> None:
    """Ragged rows, repeated and unused indices, poison in all that no row sees: out and lse under every schedule."""
    data = latent(rng, *batch, sink=[0.5, -1.0])
    check(data, run_latent(data, data.leaves(rng, Layout(3), Layout(5)), schedule))


@pytest.mark.parametrize(("recent", "listed"), [(1, 64), (64, 1), (3, 5), (5, 3), (16, 16), (3, 64), (16, 1)])
@EVERY_SCHEDULE
def test_leaves_are_paged_each_in_its_own_way(
    recent: int, listed: int, schedule: Schedule, rng: np.random.Generator
) -> None:
    """Page sizes of the two leaves need not match, nor divide a tile or each other."""
    data = latent(rng, [70, 0, 5], [2, 3, 1], [140, 30, 1], slots=40, window=50)
    check(data, run_latent(data, data.leaves(rng, Layout(recent), Layout(listed)), schedule))


@pytest.mark.parametrize(
    ("heads", "width"), [(1, 8), (4, 24), (12, 40), (128, 8), (1, 576), (4, 512), pytest.param(128, 576)]
)
@pytest.mark.parametrize("schedule", [None, Schedule(rows=1, heads=1, keys=5, partitions=2)], ids=["default", "split"])
def test_heads_and_widths(heads: int, width: int, schedule: Schedule | None, rng: np.random.Generator) -> None:
    """All query heads share the one latent head, over the full head size."""
    data = latent(rng, [3, 0], [2, 1], [6, 2], heads=heads, width=width, sink=rng.standard_normal(heads).tolist())
    if schedule is not None and heads > 4:
        schedule = replace(schedule, heads=heads // 4)
    check(data, run_latent(data, data.leaves(rng), schedule))


@pytest.mark.parametrize("window", [0, 1, 2, 16, 17, 1000])
@EVERY_SCHEDULE
def test_windows(window: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """The window counts the query's own key; 0 is no window leaf at all, a long one begins at 0."""
    data = latent(rng, [20, 0, 3], [2, 4, 18], [5, 4, 0], window=window)
    assert (data.recent is None) == (window == 0)
    check(data, run_latent(data, data.leaves(rng), schedule))


@pytest.mark.parametrize("layout", [Layout(layers=3, layer=1), Layout(3, sliced=True), Layout(2, 2, 1, sliced=True)])
def test_layers_and_slices(layout: Layout, rng: np.random.Generator) -> None:
    """A leaf is one layer of a pool, which may be a slice of a larger buffer; the rest is never read."""
    data = latent(rng, [5, 0], [2, 3], [6, 4])
    check(data, run_latent(data, data.leaves(rng, layout, replace(layout, page_size=5))))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_index_dtypes(kind: torch.dtype, rng: np.random.Generator) -> None:
    """Tables, lengths, offsets and indices in every index dtype."""
    data = latent(rng, [5, 0], [2, 3], [6, 4], unused=0 if kind == torch.uint32 else 0.5, index_dtype=kind)
    leaves = data.leaves(rng, Layout(3, index_dtype=kind), Layout(2, index_dtype=kind))
    check(data, public_latent(data, leaves, input_row_offsets=data.offsets.to(kind)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Latent, Layout, Layout, Schedule, np.random.Generator]:
    """Any batch, layout and schedule."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch = draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 12), min_size=batch, max_size=batch)
    heads = draw(st.sampled_from([1, 2, 3, 6]))
    sink = None if draw(st.booleans()) else draw(st.lists(SINKS, min_size=heads, max_size=heads))
    data = latent(
        rng,
        draw(lengths),
        draw(lengths),
        draw(lengths),
        slots=draw(st.integers(0, 9)),
        window=draw(st.sampled_from([0, 1, 2, 5, 40])),
        heads=heads,
        width=draw(st.sampled_from([1, 8, 10])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, F8])),
        q_dtype=torch.float32,
        sink=sink,
        unused=draw(st.sampled_from([0, 0.3, 1])),
    )
    layouts = st.builds(Layout, st.sampled_from([1, 2, 3, 5, 16]), st.integers(1, 2), sliced=st.booleans())
    schedule = Schedule(
        rows=1,
        heads=draw(st.sampled_from([n for n in (None, 1, 2, 3) if n is None or heads % n == 0])),
        keys=draw(st.integers(1, 9)),
        partitions=draw(st.integers(1, 4)),
        masks=draw(st.sampled_from(["branch", "split", "always"])),
    )
    return data, draw(layouts), draw(layouts), schedule, rng


SINKS = st.sampled_from([-inf, inf, 0.0]) | st.floats(-3, 3, width=32)


@pytest.mark.slow
@property_test(cases(), interpreted=80, native=40)
def test_any_batch_agrees(case: tuple[Latent, Layout, Layout, Schedule, np.random.Generator]) -> None:
    """Lengths of 0 to 12, any lists, sinks, dtypes of leaves, page sizes and schedules."""
    data, recent, listed, schedule, rng = case
    check(data, run_latent(data, data.leaves(rng, recent, listed), schedule))


# ---- lists -----------------------------------------------------------------------------------------------------------


@EVERY_SCHEDULE
def test_duplicates_count_once_each(schedule: Schedule, rng: np.random.Generator) -> None:
    """An entry listed n times has n keys' weight."""
    data = equal_weights([[1.0], [5.0], [9.0]], [[1, 1, 1, 0], [2, 2, 2, 2], [0, 1, 2, 0], [0, 2, 0, 2]])
    out, lse = run_latent(data, data.leaves(rng), schedule)
    assert_close(out[:, 0, 0], [4.0, 9.0, 4.0, 5.0])
    assert_close(lse[:, 0], [log(4)] * 4)


@pytest.mark.parametrize("junk", [-1, -2, -(1 << 31)])
@EVERY_SCHEDULE
def test_negative_indices_are_skipped_wherever_they_stand(
    junk: int, schedule: Schedule, rng: np.random.Generator
) -> None:
    """The first, the last, in between, runs longer than a tile, and all of them."""
    lists = [[1, 3], [-1, 1, 3], [1, -1, 3], [1, 3, -1], [-1] * 9 + [1] + [-1] * 9 + [3], [-1] * 20]
    indices = [[junk if e < 0 else e for e in row] + [junk] * (20 - len(row)) for row in lists]
    data = equal_weights([[0.0], [2.0], [0.0], [4.0]], indices)
    out, lse = run_latent(data, data.leaves(rng), schedule)
    assert_close(out[:, 0, 0], [3.0] * 5 + [0.0])
    assert_close(lse[:, 0], [log(2)] * 5 + [-inf])


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("sink", [None, -inf, 0.0, inf])
@pytest.mark.parametrize("indices", [[[]] * 3, [[-1, -5]] * 3], ids=["zero width", "all unused"])
@EVERY_SCHEDULE
def test_rows_that_list_nothing(
    indices: list[list[int]], sink: float | None, window: int, schedule: Schedule, rng: np.random.Generator
) -> None:
    """With a window they see the window alone, without one they give 0 and an lse of -inf, whatever the sink."""
    recent = [[1.0], [2.0], [3.0], [4.0]] if window else None
    data = equal_weights([[9.0]], indices, window=window, recent=recent)
    data = replace(data, sink=None if sink is None else torch.tensor([sink]))
    out, lse = run_latent(data, data.leaves(rng), schedule)
    share = {None: 1.0, -inf: 1.0, 0.0: 2 / 3, inf: 0.0}[sink]
    assert_close(out[:, 0, 0], [share * x for x in (1.5, 2.5, 3.5)] if window else [0.0] * 3)
    assert_close(lse[:, 0], [log(2) if window else -inf] * 3)


@EVERY_SCHEDULE
def test_a_token_counts_through_both_leaves(schedule: Schedule, rng: np.random.Generator) -> None:
    """What the window holds and what is listed are added up, equal rows or not."""
    data = equal_weights([[6.0], [0.0]], [[0, 0]], window=2, recent=[[100.0], [6.0], [12.0]])
    out, lse = run_latent(data, data.leaves(rng), schedule)
    assert_close(out, [[[7.5]]])
    assert_close(lse, [[log(4)]])


def test_listed_entries_are_not_checked_causally(rng: np.random.Generator) -> None:
    """Entry numbers are no positions: the first row of a sequence may list the last of many."""
    data = equal_weights([[float(e)] for e in range(50)], [[49, 40], [0, 1]], window=1, recent=[[1.0], [2.0]])
    out, _ = run_latent(data, data.leaves(rng))
    assert_close(out[:, 0, 0], [30.0, 1.0])


def test_positions_are_those_of_the_window_leaf(rng: np.random.Generator) -> None:
    """The compressed leaf's lengths count entries, and move no window."""
    for entries in (1, 5, 40):
        data = latent(rng, [6, 2], [2, 3], [entries] * 2, window=3)
        check(data, public_latent(data, data.leaves(rng)))


def test_indices_of_the_indexer(rng: np.random.Generator) -> None:
    """The indexer's output is taken as it is: int32, best first, then -1."""
    pools = scored(rng, [9, 0, 21], [2, 3, 1], pool=3, heads=4)
    indices = public_indexer(pools, pools.cache(rng), 5)
    assert int(indices.min()) == -1
    assert int(indices.max()) > 0
    data = replace(latent(rng, [9, 0, 21], [2, 3, 1], [4, 1, 8]), indices=indices)
    check(data, public_latent(data, data.leaves(rng)))


# ---- sinks -----------------------------------------------------------------------------------------------------------


@EVERY_SCHEDULE
def test_a_sink_of_each_head(schedule: Schedule, rng: np.random.Generator) -> None:
    """One more logit in the denominator, once, however the keys are split; +inf gives 0; lse does not count it."""
    data = latent(rng, [9, 0], [3, 2], [7, 3], heads=4, sink=[-inf, inf, 0.7, 30.0])
    out, lse = run_latent(data, data.leaves(rng), schedule)
    check(data, (out, lse))
    bare, same = run_latent(replace(data, sink=None), data.leaves(rng), schedule)
    assert_close(out[:, 0], bare[:, 0].double().numpy())
    assert_same_bits(lse, same)
    assert not bool(out[:, 1].any())


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_of_sinks(kind: torch.dtype, rng: np.random.Generator) -> None:
    """Sinks in any dtype of rows, also another than q's."""
    data = latent(rng, [9, 0], [3, 2], [7, 3], sink=[0.5, -2.0])
    assert data.sink is not None
    check(data, public_latent(data, data.leaves(rng), attn_sink=data.sink.to(kind)))


@EVERY_SCHEDULE
def test_scores_far_from_zero(schedule: Schedule, rng: np.random.Generator) -> None:
    """Very negative and very large scores are scores: no overflow, no finite stand-in for what is hidden."""
    for far in (-66855.55, 66855.55):
        base = equal_weights([[far, 1.0], [far, 3.0]], [[-1, 0, 1], [1, -1, -1]])
        data = replace(base, q=torch.tensor([[[1.0, 0.0]]] * 2))
        out, lse = run_latent(data, data.leaves(rng), schedule)
        assert_close(out[:, 0, 1], [2.0, 3.0])
        assert_close(lse[:, 0], [far + log(2), far])


# ---- dtypes and buffers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_dtype", "dtype"), list(product([torch.float32, torch.float16, torch.bfloat16], repeat=2)), ids=str
)
def test_mixes_of_dtypes(q_dtype: torch.dtype, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """q may be wider or narrower than the leaves. Sums are float32 and round once: lse is as exact as ever."""
    data = latent(rng, [9, 0], [3, 2], [7, 3], dtype=dtype, q_dtype=q_dtype, sink=[0.5, -2.0], width=40)
    out, lse = public_latent(data, data.leaves(rng))
    assert (out.dtype, lse.dtype) == (q_dtype, torch.float32)
    check(data, (out, lse))


@pytest.mark.parametrize("granularity", [1, 3, 8, 16, 20, 64])
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_leaves(granularity: int, q_dtype: torch.dtype, rng: np.random.Generator) -> None:
    """fp8 rows mean `stored * scale`, one scale per `granularity` elements, the last of a row perhaps fewer."""
    data = latent(rng, [9, 0], [3, 2], [7, 3], dtype=F8, q_dtype=q_dtype, granularity=granularity, width=20)
    check(data, public_latent(data, data.leaves(rng, Layout(3), Layout(2))))


def test_float8_leaves_without_scales_are_refused(rng: np.random.Generator) -> None:
    """What is stored means nothing without its scales, however the leaf was made."""
    data = latent(rng, [9], [3], [7], dtype=F8, granularity=8, width=20)
    swa, comp = data.leaves(rng)
    with pytest.raises(ArgumentError, match=r"comp_cache holds float8 without scales; expected scales beside its rows"):
        public_latent(data, (swa, replace(comp, key_scales=None)))


@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16, "float32", np.float32], ids=str)
def test_output_dtype(wanted: Any, rng: np.random.Generator) -> None:
    """The result is float32 rounded once to the dtype asked for."""
    data = latent(rng, [9, 0], [3, 2], [7, 3])
    leaves = data.leaves(rng)
    full, _ = public_latent(data, leaves)
    out, _ = public_latent(data, leaves, output_dtype=wanted)
    assert_same_bits(out, full.to(wanted if isinstance(wanted, torch.dtype) else torch.float32))


@pytest.mark.parametrize("strided", [False, True])
def test_output_buffer(strided: bool, rng: np.random.Generator) -> None:
    """Written in place and returned, every element of it, strided or not; nothing around it."""
    data = latent(rng, [9, 0, 4], [3, 2, 0], [7, 3, 1])
    leaves = data.leaves(rng)
    around = torch.full((9, 4, 16) if strided else (5, 2, 8), torch.nan)
    buffer = around[2:7, 1:3, 4:12] if strided else around
    out, lse = public_latent(data, leaves, output=buffer)
    assert out is buffer
    check(data, (out, lse))
    assert int(around.isfinite().sum()) == buffer.numel()
    assert_same_bits(out, public_latent(data, leaves)[0])


def test_numpy_arguments(rng: np.random.Generator) -> None:
    """numpy arrays wherever tensors are taken, on their own memory."""
    data = latent(rng, [9, 0], [3, 2], [7, 3], sink=[0.5, -2.0])
    leaves, buffer = data.leaves(rng), np.full((5, 2, 8), np.nan, np.float32)
    assert data.sink is not None
    found = public_latent(
        data,
        leaves,
        q=data.q.numpy(),
        input_row_offsets=data.offsets.numpy(),
        comp_indices=data.indices.numpy(),
        attn_sink=data.sink.numpy(),
        scale=np.float32(data.scale),
        window=np.int64(data.window),
        output=buffer,
    )
    check(data, found)
    assert_same_bits(torch.from_numpy(buffer), public_latent(data, leaves)[0])


def test_strided_arguments(rng: np.random.Generator) -> None:
    """q and the indices may be slices of larger tensors."""
    data = latent(rng, [9, 0], [3, 2], [7, 3])
    wide, spread = torch.full((10, 4, 16), torch.nan), torch.full((10, 20), 1 << 30, dtype=torch.int32)
    wide[::2, ::2, :8], spread[::2, 5:11] = data.q, data.indices
    check(data, public_latent(data, data.leaves(rng), q=wide[::2, ::2, :8], comp_indices=spread[::2, 5:11]))


def test_out_alone(rng: np.random.Generator) -> None:
    """Without return_lse, the output alone."""
    from tilewright.ops import latent_sparse_attention_ragged_paged

    data = latent(rng, [9, 0], [3, 2], [7, 3])
    swa, comp = data.leaves(rng)
    out = latent_sparse_attention_ragged_paged(
        data.q, data.offsets, data.indices, None, swa, comp, data.scale, window=data.window
    )
    assert isinstance(out, Tensor)
    assert_close(out, latent_reference(data)[0])


@pytest.mark.parametrize("batch", [([], [], []), ([3, 0], [0, 0], [2, 0])], ids=["no sequences", "no rows"])
def test_batches_of_no_rows(batch: tuple[list[int], list[int], list[int]], rng: np.random.Generator) -> None:
    """Legal, and give results of no rows."""
    data = latent(rng, *batch)
    out, lse = public_latent(data, data.leaves(rng))
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


# ---- what does not change a result -----------------------------------------------------------------------------------


@EVERY_SCHEDULE
def test_where_pages_lie_changes_no_bit(schedule: Schedule) -> None:
    """Pages in any order, other poison around them."""
    data = latent(np.random.default_rng(5), [17, 0, 6], [2, 3, 4], [30, 5, 12], slots=12, window=9, width=40)
    first = run_latent(data, data.leaves(np.random.default_rng(0), Layout(3), Layout(2)), schedule)
    for seed in range(1, 5):
        for one, other in zip(
            first,
            run_latent(data, data.leaves(np.random.default_rng(seed), Layout(3), Layout(2)), schedule),
            strict=True,
        ):
            assert_same_bits(one, other)


@EVERY_SCHEDULE
def test_a_sequence_alone_gives_the_same_bits(schedule: Schedule, rng: np.random.Generator) -> None:
    """No sequence of a batch knows of another."""
    data = latent(rng, [17, 0, 6], [2, 3, 4], [30, 5, 12], slots=12, window=9, width=40, sink=[0.5, -1.0])
    out, lse = run_latent(data, data.leaves(rng), schedule)
    for b in range(3):
        rows = slice(data.ragged.offsets[b], data.ragged.offsets[b + 1])
        alone = data.only(b)
        found = run_latent(alone, alone.leaves(rng), schedule)
        assert_same_bits(found[0], out[rows])
        assert_same_bits(found[1], lse[rows])


def test_threads_change_no_bit(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker, four workers, and again."""
    data = latent(rng, [17, 0, 6], [2, 30, 4], [30, 5, 12], slots=12, window=9, width=40)
    leaves, schedule = data.leaves(rng), Schedule(rows=1, keys=4, partitions=3)
    found = []
    for threads in ("1", "4", "4", "1"):
        monkeypatch.setenv("TILEWRIGHT_THREADS", threads)
        found.append(run_latent(data, leaves, schedule))
    for out, lse in found[1:]:
        assert_same_bits(out, found[0][0])
        assert_same_bits(lse, found[0][1])


def test_run_time_values_compile_nothing(rng: np.random.Generator) -> None:
    """Lengths, tables, widths of lists, scale and sinks change from call to call; the window and the heads do not."""
    data = latent(rng, [17, 0], [2, 3], [30, 5], sink=[0.5, 1.0], width=24)
    check(data, run_latent(data, data.leaves(rng), Schedule(rows=1, keys=5)))
    before = len(programs())
    for slots in (0, 1, 9):
        other = latent(rng, [3, 5, 1], [1, 0, 4], [3, 2, 60], sink=[0.1, 9.0], slots=slots, width=24)
        other = replace(other, scale=0.7)
        check(other, run_latent(other, other.leaves(rng), Schedule(rows=1, keys=5)))
    assert len(programs()) == before
    wider = latent(rng, [3], [1], [3], sink=[0.1, 9.0], width=24, window=6)
    check(wider, run_latent(wider, wider.leaves(rng), Schedule(rows=1, keys=5)))
    assert len(programs()) == before + 1


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(rows=2), "schedule field rows=2: listed entries differ from row to row, so a tile holds one row"),
        (Schedule(rows=1, heads=3), "schedule field heads=3: does not divide the group of 4 query heads"),
        (Schedule(rows=1, partitions=0), "schedule field partitions=0: must be at least 1"),
    ],
)
def test_illegal_schedules(schedule: Schedule, message: str, rng: np.random.Generator) -> None:
    """Refused by field."""
    data = latent(rng, [9, 0], [3, 2], [7, 3], heads=4)
    with pytest.raises(IllegalSchedule) as raised:
        run_latent(data, data.leaves(rng), schedule)
    assert str(raised.value).startswith(message)


@pytest.mark.interpreted("tells of statements")
def test_statement_trace(rng: np.random.Generator) -> None:
    """An interpreter that tells of every statement gives the same bits, and tells of both loops."""
    data = latent(rng, [9, 0], [3, 2], [7, 3])
    swa, comp = data.leaves(rng)
    schedule = Schedule(rows=1, keys=4, partitions=2)
    expected = run_latent(data, (swa, comp), schedule)
    spec = latent_sparse_attention.trace(window=data.window, with_lse=True, attn_sink=None)
    arguments = {"q": data.q, "comp_indices": data.indices, "swa_cache": swa, "comp_cache": comp, "scale": data.scale}
    bound = bind("test", spec, arguments, data.offsets, {"out": f32, "lse": f32}, {})
    told: list[Stmt] = []
    interpreter = Interpreter(lower(spec, bound.binding, schedule), on_statement=lambda s, f: told.append(s))
    results = {"out": torch.full((5, 2, 8), torch.nan), "lse": torch.full((5, 2), torch.nan)}
    interpreter.run({**bound.tensors, **results, "offsets": data.offsets}, bound.scalars)
    assert_same_bits(results["out"], expected[0])
    assert_same_bits(results["lse"], expected[1])
    names = {s.dst.name for s in told if hasattr(s, "dst")}
    assert {"page0", "page1", "entry1"} <= names


# ---- bad input -------------------------------------------------------------------------------------------------------


def refused(data: Latent, error: type[ArgumentError], message: str, rng: np.random.Generator, **options: Any) -> None:
    """The call raises exactly this message, and leaves its buffer alone."""
    buffer = torch.full(data.q.shape, torch.nan)
    with pytest.raises(error) as raised:
        public_latent(data, data.leaves(rng), **{"output": buffer, **options})
    assert str(raised.value) == f"{NAME}: {message}"
    assert bool(buffer.isnan().all())


def example(rng: np.random.Generator, **options: Any) -> Latent:
    """5 rows of 2 heads of 8; lists of 6 slots, none unused, over 7 and 3 entries."""
    return latent(rng, [9, 0], [3, 2], [7, 3], unused=0, **options)


@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("row", "slot", "limit", "seq"), [(0, 0, 7, 0), (2, 5, 7, 0), (3, 1, 3, 1)])
def test_an_index_beyond_the_leaf(
    row: int, slot: int, limit: int, seq: int, width: torch.dtype, rng: np.random.Generator
) -> None:
    """Names row, slot, index and bound, for the first entry that does not exist and for one far away."""
    for index in (limit, (1 << 31) - 1, *([1 << 32, 1 << 62] if width == torch.int64 else [])):
        data = example(rng)
        indices = data.indices.to(width).clone()
        indices[row, slot] = index
        expected = f"expected below {limit}, the entries that comp_cache holds for sequence {seq}"
        message = f"comp_indices[{row}, {slot}] (row {row}, slot {slot}) is {index}; {expected}"
        refused(data, ArgumentValueError, message, rng, comp_indices=indices)


def test_an_index_beyond_the_table(rng: np.random.Generator) -> None:
    """Lengths that say more than the table has pages for: what counts is the table."""
    data = example(rng)
    _, comp = data.leaves(rng)
    short = replace(comp, cache_lengths=torch.tensor([100, 100]))
    indices = data.indices.clone()
    indices[4, 2] = 12
    assert comp.lookup_table.shape[1] * comp.page_size == 12
    message = (
        "comp_indices[4, 2] (row 4, slot 2) is 12; expected below 12, the entries that comp_cache holds for sequence 1"
    )
    refused(data, ArgumentValueError, message, rng, comp_cache=short, comp_indices=indices)


@pytest.mark.parametrize("page", [-1, 77])
def test_a_listed_entry_on_a_page_outside_the_pool(page: int, rng: np.random.Generator) -> None:
    """Names the table's entry and who lists it."""
    data = example(rng)
    indices = torch.full_like(data.indices, -1)
    indices[1, 3] = 5
    data = replace(data, indices=indices)
    _, comp = data.leaves(rng)
    table = comp.lookup_table.clone()
    table[0, 1] = page
    message = (
        f"comp_cache.lookup_table[0, 1] is {page}; expected a page in 0..{comp.num_pages - 1}, "
        "as comp_indices[1, 3] lists entry 5"
    )
    refused(data, ArgumentValueError, message, rng, comp_cache=replace(comp, lookup_table=table))


def test_a_window_on_a_page_outside_the_pool(rng: np.random.Generator) -> None:
    """The window leaf's pages are checked where some row sees them, and no others."""
    data = example(rng)  # positions 9..11 and 0..1, window 5: keys 5..11 of sequence 0
    swa, _ = data.leaves(rng)
    assert swa is not None
    table = swa.lookup_table.clone()
    table[0, 0], table[0, 2] = 99, 99
    message = f"swa_cache.lookup_table[0, 2] is 99; expected a page in 0..{swa.num_pages - 1}"
    refused(data, ArgumentValueError, message, rng, swa_cache=replace(swa, lookup_table=table))


def test_lengths_beyond_the_window_table(rng: np.random.Generator) -> None:
    """A sequence longer than its table's row."""
    data = example(rng)
    swa, _ = data.leaves(rng)
    assert swa is not None
    message = "swa_cache sequence 1 is 52 keys long; expected at most 16, as its lookup_table row holds 4 pages of 4"
    refused(data, ArgumentValueError, message, rng, swa_cache=replace(swa, cache_lengths=torch.tensor([9, 50])))


def test_negative_lengths(rng: np.random.Generator) -> None:
    """Of either leaf."""
    data = example(rng)
    swa, comp = data.leaves(rng)
    assert swa is not None
    for name, leaf in (("swa_cache", swa), ("comp_cache", comp)):
        message = f"{name}.cache_lengths[1] is -2; expected 0 or more"
        bad = replace(leaf, cache_lengths=torch.tensor([7, -2]))
        refused(data, ArgumentValueError, message, rng, **{name: bad})


@pytest.mark.parametrize("argument", ["swa_cache", "comp_cache"])
def test_leaves_of_other_shapes(argument: str, rng: np.random.Generator) -> None:
    """One latent head of q's head size; as many sequences as offsets."""
    data = example(rng)
    place = 0 if argument == "swa_cache" else 1

    def like(pages: Tensor, batch: int = 2) -> object:
        table, lengths = torch.zeros(batch, 9, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
        return PagedKVCache(pages, table, lengths).layer(0)

    expected = "[pages, page_size, kv_heads=1, head_dim=8]"
    for shape in ((3, 1, 1, 4, 2, 8), (3, 1, 1, 4, 1, 4), (3, 1, 1, 4, 1, 16)):
        got = [shape[0], *shape[3:]]
        message = f"{argument}.keys has shape {got}; expected {expected}"
        refused(data, ArgumentShapeError, message, rng, **{argument: like(torch.zeros(shape))})
    message = f"{argument} has shape [3]; expected [seq=2], as input_row_offsets has seq 2"
    refused(data, ArgumentShapeError, message, rng, **{argument: like(torch.zeros(3, 1, 1, 4, 1, 8), 3)})
    assert data.leaves(rng)[place] is not None


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (-1, ArgumentValueError, "window is -1; expected an integer in 0..2147483647"),
        (1 << 31, ArgumentValueError, "window is 2147483648; expected an integer in 0..2147483647"),
        (2.0, ArgumentTypeError, "window is a float; expected an integer in 0..2147483647"),
        (None, ArgumentTypeError, "window is a NoneType; expected an integer in 0..2147483647"),
        (True, ArgumentTypeError, "window is a bool; expected an integer in 0..2147483647"),
    ],
)
def test_bad_windows(window: object, error: type[ArgumentError], message: str, rng: np.random.Generator) -> None:
    """A whole number, not negative."""
    refused(example(rng), error, message, rng, window=window)


def test_a_window_without_its_leaf(rng: np.random.Generator) -> None:
    """None is for window 0."""
    message = "swa_cache is None; expected the window leaf, as window is 5"
    refused(example(rng), ArgumentError, message, rng, swa_cache=None)


def test_a_leaf_without_a_window(rng: np.random.Generator) -> None:
    """With window 0 the window leaf is not read, whatever its pages hold."""
    data = example(rng)
    swa, comp = data.leaves(rng)
    assert swa is not None
    swa.keys.fill_(torch.nan)
    alone = replace(data, window=0, recent=None)
    check(alone, public_latent(alone, (swa, comp)))


ROWS = "float32, float16 or bfloat16"
A_LEAF = "one layer of a paged cache: cache.layer(i)"
BOTH = "both or neither, and one leaf at least"
WHOLE_CACHE = PagedKVCache(torch.zeros(1, 1, 1, 4, 1, 8), torch.zeros(2, 1).int(), torch.zeros(2).int())
INDICES = "int32, int64 or uint32"


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_alone(window: int, rng: np.random.Generator) -> None:
    """Without a compressed leaf the window is all there is."""
    data = latent(rng, [9, 0, 4], [3, 2, 0], [7, 3, 1], slots=0, window=window, sink=[0.5, -1.0])
    check(data, public_latent(data, data.leaves(rng), comp_indices=None, comp_cache=None))


BAD: list[tuple[type[ArgumentError], str, dict[str, Any]]] = [
    (ArgumentDTypeError, f"q has dtype float64; expected {ROWS}", {"q": torch.zeros(5, 2, 8).double()}),
    (ArgumentDTypeError, f"q has dtype float8_e4m3fn; expected {ROWS}", {"q": torch.zeros(5, 2, 8).to(F8)}),
    (ArgumentTypeError, "q is a list; expected a torch tensor or a numpy array", {"q": [0.0]}),
    (ArgumentDTypeError, f"comp_indices has dtype float32; expected {INDICES}", {"comp_indices": torch.zeros(5, 6)}),
    (ArgumentDTypeError, f"comp_indices has dtype bool; expected {INDICES}", {"comp_indices": torch.ones(5, 6) > 0}),
    (ArgumentRankError, "comp_indices has rank 1; expected 2: [row, slot]", {"comp_indices": torch.zeros(5).int()}),
    (
        ArgumentShapeError,
        "comp_indices has shape [4, 6]; expected [row=5, slot], as q has row 5",
        {"comp_indices": torch.zeros(4, 6).int()},
    ),
    (ArgumentShapeError, "attn_sink has shape [3]; expected [num_heads=2]", {"attn_sink": torch.zeros(3)}),
    (ArgumentDTypeError, f"attn_sink has dtype int64; expected {ROWS}", {"attn_sink": torch.zeros(2).long()}),
    (ArgumentTypeError, "scale is a str; expected a number", {"scale": "1"}),
    (ArgumentTypeError, "scale is a bool; expected a number", {"scale": True}),
    (
        ArgumentValueError,
        "input_row_offsets[2] is 6; expected 5, the number of rows",
        {"input_row_offsets": torch.tensor([0, 3, 6])},
    ),
    (
        ArgumentValueError,
        "input_row_offsets[2] is 2; expected at least input_row_offsets[1] = 3",
        {"input_row_offsets": torch.tensor([0, 3, 2])},
    ),
    (
        ArgumentShapeError,
        "output has shape [5, 2, 9]; expected [rows=5, head=2, dim=8]",
        {"output": torch.zeros(5, 2, 9)},
    ),
    (
        ArgumentDTypeError,
        "output has dtype float16; expected float32",
        {"output": torch.zeros(5, 2, 8).half()},
    ),
    (ArgumentDTypeError, "output has dtype float32; expected bfloat16", {"output_dtype": "bfloat16"}),
    (ArgumentDTypeError, f"output_dtype has dtype int8; expected {ROWS}", {"output_dtype": torch.int8}),
    (
        ArgumentLayoutError,
        "output has strides [32, 16, 2]; expected a contiguous last axis (stride 1)",
        {"output": torch.zeros(5, 2, 16)[:, :, ::2]},
    ),
    (ArgumentError, f"comp_indices or comp_cache is None; expected {BOTH}", {"comp_cache": None}),
    (ArgumentError, f"comp_indices or comp_cache is None; expected {BOTH}", {"comp_indices": None}),
    (
        ArgumentError,
        f"comp_indices or comp_cache is None; expected {BOTH}",
        {"comp_indices": None, "comp_cache": None, "window": 0},
    ),
    (ArgumentTypeError, f"comp_cache is a PagedKVCache; expected {A_LEAF}", {"comp_cache": WHOLE_CACHE}),
    (ArgumentTypeError, f"swa_cache is a PagedKVCache; expected {A_LEAF}", {"swa_cache": WHOLE_CACHE}),
]


@pytest.mark.parametrize(("error", "message", "options"), BAD, ids=[m.split(";")[0] for _, m, _ in BAD])
def test_bad_arguments(
    error: type[ArgumentError], message: str, options: dict[str, Any], rng: np.random.Generator
) -> None:
    """Named, with what it was and what was expected; the buffer untouched."""
    refused(example(rng), error, message, rng, **options)


def test_float8_without_scales() -> None:
    """Refused where the cache is made."""
    with pytest.raises(ArgumentError) as raised:
        PagedKVCache(torch.zeros(2, 1, 1, 4, 1, 8).to(F8), torch.zeros(1, 1).int(), torch.zeros(1).int())
    assert "scales" in str(raised.value)


def test_a_read_only_buffer(rng: np.random.Generator) -> None:
    """numpy's flag counts."""
    buffer = np.zeros((5, 2, 8), np.float32)
    buffer.flags.writeable = False
    message = "output is read-only; expected a buffer that can be written"
    refused(example(rng), ArgumentError, message, rng, output=buffer)
    assert not buffer.any()


@pytest.mark.parametrize("wide", [False, True])
@EVERY_SCHEDULE
def test_unchecked_an_index_past_the_leaf_is_unused(
    wide: bool, schedule: Schedule, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TILEWRIGHT_VALIDATE=0: no error and nothing read, past the entries or past the table, in 64 bits too."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    past = [7, 8, 11, 12, 100, (1 << 31) - 1] + ([1 << 32, (1 << 32) + 1, 1 << 62, -(1 << 32) + 1] if wide else [])
    data = example(rng)
    unused = data.indices.to(torch.int64 if wide else torch.int32).clone()
    bad = unused.clone()
    for n, index in enumerate(past):
        unused[n % 3, n % 4], bad[n % 3, n % 4] = -1, index
    expected = replace(data, indices=unused)
    leaves = expected.leaves(rng)
    for one, other in zip(
        run_latent(replace(data, indices=bad), leaves, schedule), run_latent(expected, leaves, schedule), strict=True
    ):
        assert_same_bits(one, other)
    check(expected, run_latent(replace(data, indices=bad), leaves, schedule))


def test_checked_contents(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """TILEWRIGHT_VALIDATE=1: poison that no row sees passes, a visible row that is not finite is named."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    data = example(rng)
    swa, comp = data.leaves(rng)
    check(data, public_latent(data, (swa, comp)))
    assert swa is not None
    buffer = torch.full(data.q.shape, torch.nan)
    swa.keys[int(swa.lookup_table[0, 2]), 1] = torch.inf
    with pytest.raises(NotFinite, match=r"swa_cache_k of sequence 0, key 9: a visible slot holds NaN or infinity"):
        public_latent(data, (swa, comp), output=buffer)
    swa, comp = data.leaves(rng)
    entry = int(data.indices[3, 0])
    comp.keys[int(comp.lookup_table[1, 0]), entry] = torch.nan
    with pytest.raises(NotFinite, match=rf"comp_cache_k of sequence 1, key {entry}: a visible slot holds NaN or inf"):
        public_latent(data, (swa, comp), output=buffer)
    assert bool(buffer.isnan().all())
