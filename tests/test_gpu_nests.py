"""The nest for a GPU computes what the plain nest does: the interpreter runs both. And what has no room is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.gpu import bound_call, fitted, nest_for, outputs_of, spread
from support.native import CONSTANTS, NARROW, OPERATORS, distance, inputs_of

from tilewright.dsl.dtypes import bf16, f32
from tilewright.dsl.errors import IllegalSchedule
from tilewright.dsl.expr import Elem, walk
from tilewright.dsl.gpu import GPUS
from tilewright.dsl.interp import Interpreter
from tilewright.dsl.legal_gpu import selection_bytes, shared_bytes
from tilewright.dsl.loops import Best, For
from tilewright.dsl.lower import lower
from tilewright.dsl.rewrite import expressions, statements
from tilewright.dsl.schedule import Binding, LeafBinding, Schedule
from tilewright.dsl.targets import TARGETS, default_schedule
from tilewright.ops.flash_attention import flash_attention

NAMES = sorted(OPERATORS)
ARCHS = tuple(GPUS)
STORED = ("bfloat16", "float32", "float16")


@pytest.mark.parametrize("n", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_nest_computes_what_the_plain_nest_does(name: str, n: int) -> None:
    """For every operator, all architectures and values of fields in turn; weights are rounded, scores are not."""
    number = 3 * NAMES.index(name) + n
    target, stored = ARCHS[number % len(ARCHS)], STORED[number % len(STORED)]
    inputs = inputs_of(name, number, cache_dtype=stored, dtype=stored, page_size=(5, 64)[number % 2])
    bound, dtypes = bound_call(inputs)
    schedule = fitted(inputs, bound, spread(number), GPUS[target])
    nest = nest_for(inputs, bound, schedule, target)
    plain = lower(inputs.spec, bound.binding, Schedule(rows=schedule.rows, heads=schedule.heads, keys=32))
    got = outputs_of(inputs, bound, dtypes, Interpreter(nest))
    want = outputs_of(inputs, bound, dtypes, Interpreter(plain))
    tolerance = {"float32": 3e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[schedule.products]
    for key, x in want.items():
        assert distance(got[key], x) <= tolerance, (schedule, target, key)


def test_features_are_padded_for_matrix_units_and_reach_nothing() -> None:
    """24 and 20 features become 32: loads are guarded, so is the store, and sums over them are of zeros."""
    inputs = inputs_of("flash_attention", 0, cache_dtype="bfloat16", dtype="bfloat16")
    bound, _ = bound_call(inputs)
    (kernel,) = nest_for(inputs, bound, Schedule(rows=4, keys=32, products="bfloat16"), "cuda:sm_80").kernels
    sizes = {a: n for t in kernel.tiles for a, n in t.axes}
    assert NARROW == {"dim": 24, "value_dim": 20}
    assert (sizes["dim"], sizes["value_dim"]) == (32, 32)
    reads = [x for s in statements(kernel.body) for e in expressions(s) for x in walk(e) if isinstance(x, Elem)]
    for x in reads:
        for axis, size in NARROW.items():
            if any(axis in i.axes for i in x.index):
                assert f"Const(value={size})" in repr(x.ok)


def test_points_are_a_multiple_of_what_warps_own() -> None:
    """Sixteen rows of a product for each warp; none are added where there are no matrix products."""
    inputs = inputs_of("flash_attention", 0, cache_dtype="bfloat16", dtype="bfloat16")
    bound, _ = bound_call(inputs)
    for threads, points in ((32, 16), (64, 32), (128, 64), (256, 128)):
        schedule = Schedule(rows=3, keys=32, products="bfloat16", threads=threads)
        (kernel,) = nest_for(inputs, bound, schedule, "cuda:sm_80").kernels
        assert (kernel.threads, kernel.points) == (threads, points)
    (kernel,) = nest_for(inputs, bound, Schedule(rows=3, keys=32), "cuda:sm_80").kernels
    assert kernel.points == 3 * bound.binding.group


def test_loads_run_ahead_only_where_loops_leave_them_alone() -> None:
    """Every key loop has the schedule's stages."""
    inputs = inputs_of("flash_attention", 0, cache_dtype="bfloat16", dtype="bfloat16")
    bound, _ = bound_call(inputs)
    schedule = Schedule(rows=4, keys=32, products="bfloat16", masks="split", stages=1)
    (kernel,) = nest_for(inputs, bound, schedule, "cuda:sm_80").kernels
    loops = [s for s in statements(kernel.body) if isinstance(s, For)]
    assert [s.stages for s in loops] == [1, 1, 1]
    taken = shared_bytes(nest_for(inputs, bound, schedule, "cuda:sm_80"), "fold")
    once = shared_bytes(nest_for(inputs, bound, replace(schedule, stages=0), "cuda:sm_80"), "fold")
    assert taken["keys0_k"] == 2 * once["keys0_k"]
    assert taken["q"] == once["q"]


def test_a_selection_chooses_for_one_row_at_a_time() -> None:
    """However many rows share the scores' tile; its slots are counted as shared memory."""
    inputs = inputs_of("indexer", 0)
    bound, _ = bound_call(inputs)
    program = nest_for(inputs, bound, Schedule(rows=4, keys=32), "hip:gfx942")
    scores, select = program.kernels
    assert (scores.rows, select.rows) == (None, 1)
    assert any(isinstance(s, Best) for s in statements(select.body))
    k = next(n for t in select.tiles for a, n in t.axes if a not in ("row", "head"))
    assert sum(shared_bytes(program, select.name).values()) == selection_bytes(k) + 4 * k


@pytest.mark.parametrize("name", NAMES)
def test_default_schedules_fit(name: str) -> None:
    """For decoding and for long prompts, whatever is stored, on the architectures with the least and the most room."""
    for n, (stored, rows, batch) in enumerate((("bfloat16", 1, 1), ("float32", 4000, 1), ("float16", 64, 16))):
        inputs = inputs_of(name, 0, cache_dtype=stored, dtype=stored, heads=8)
        bound, _ = bound_call(inputs)
        target = TARGETS[("hip:gfx942", "hip:gfx942", "cuda:sm_90a")[n]]
        schedule = default_schedule(target, inputs.spec, bound.binding, rows, batch)
        lower(inputs.spec, bound.binding, schedule, gpu=target.gpu)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(schedule: Schedule, target: str, dim: int = 128, page_size: int = 64) -> IllegalSchedule:
    spec = flash_attention.trace(**{**CONSTANTS["flash_attention"], "sink": None})
    sizes = (("dim", dim), ("head", 8), ("value_dim", dim))
    dtypes = {p.name: bf16 if p.name == "q" else f32 for p in spec.params} | {n: f32 for n, _ in spec.outputs}
    binding = Binding(sizes, tuple(sorted(dtypes.items())), (("kv", LeafBinding(page_size, 2, bf16)),))
    with pytest.raises(IllegalSchedule) as raised:
        lower(spec, binding, schedule, gpu=GPUS[target])
    return raised.value


WRONG = {
    "threads that are no warps": (Schedule(threads=96), "hip:gfx942"),
    "more threads than a block has": (Schedule(threads=2048), "cuda:sm_80"),
    "strips": (Schedule(strip=12), "cuda:sm_80"),
    "keys that matrix units do not take": (Schedule(keys=40, products="bfloat16"), "cuda:sm_90a"),
    "gathers far ahead": (Schedule(rows=8, keys=64, stages=2, products="bfloat16"), "cuda:sm_80"),
    "no room": (Schedule(rows=16, keys=512, products="bfloat16"), "hip:gfx942"),
    "pages of another size": (Schedule(keys=48, fetch="pages", masks="split", products="bfloat16"), "cuda:sm_90a"),
    "pages without loops for them": (Schedule(keys=64, fetch="pages", products="bfloat16"), "cuda:sm_90a"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_refusals_name_field_and_limit(kind: str, golden: Callable[[str, str], None]) -> None:
    """Before anything is emitted."""
    schedule, target = WRONG[kind]
    golden(f"errors_gpu_{kind.replace(' ', '_')}", str(refused(schedule, target)))


def test_what_fits_one_architecture_may_not_fit_another() -> None:
    """The same tiles: 227 KiB have room, 64 KiB have not."""
    schedule = Schedule(rows=16, keys=256, products="bfloat16")
    with pytest.raises(pytest.fail.Exception):
        refused(schedule, "cuda:sm_90a")
    assert refused(schedule, "hip:gfx942").fields["field"] == "keys"
