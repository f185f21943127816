"""What verify refuses: finished programs with one thing broken, and programs that a pass should have left otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.running import mask

from tilewright.dsl.build import build
from tilewright.dsl.context import Context
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.errors import VerifyError
from tilewright.dsl.expr import Const, Coord, Elem, Expr, Iota, KeyField, Param, Tile, Var
from tilewright.dsl.loops import Fetch, For, If, Let, Program, Search, Stmt, Store
from tilewright.dsl.lower import PASSES, lower
from tilewright.dsl.rewrite import rewrite_body
from tilewright.dsl.schedule import Binding, LeafBinding, Schedule
from tilewright.dsl.tile import Gemm, Map, Mask, Reduce, TileProgram, TileStmt
from tilewright.dsl.verify import verify, verify_tile_program
from tilewright.ops.flash_attention import flash_attention

BINDING = Binding(
    (("dim", 8), ("head", 4), ("value_dim", 8)),
    (("out", f32), ("q", f32), ("sink", f32)),
    (("kv", LeafBinding(4, 2, f32)),),
)
SPEC = flash_attention.trace(mask=mask("sliding_window_causal", 5))
SCHEDULES = (Schedule(rows=2, keys=8), Schedule(rows=2, heads=1, keys=8, partitions=2, masks="split"))
KEYS = KeyField(0, "k", ("key", "dim"))
Edit = Callable[[Stmt], tuple[Stmt, ...]]


def mutated(program: Program, edit: Edit) -> Program:
    """Every statement replaced by what `edit` makes of it; at least one must change."""
    kernels = tuple(replace(k, body=rewrite_body(k.body, edit)) for k in program.kernels)
    assert kernels != program.kernels
    return replace(program, kernels=kernels)


def dropping(kind: type[Stmt], name: str) -> Edit:
    """Without the statement that defines a name."""

    def edit(s: Stmt) -> tuple[Stmt, ...]:
        defined = s.name if isinstance(s, Let | Search) else s.dst.name if isinstance(s, Map | Gemm | Reduce) else ""
        return () if isinstance(s, kind) and defined == name else (s,)

    return edit


def gemm_into(name: str, change: Callable[[Gemm], Gemm]) -> Edit:
    return lambda s: (change(s),) if isinstance(s, Gemm) and s.dst.name == name else (s,)


def map_into(name: str, change: Callable[[Map], Map]) -> Edit:
    return lambda s: (change(s),) if isinstance(s, Map) and s.dst.name == name else (s,)


def swapped(t: Tile) -> Tile:
    return replace(t, axes=(t.axes[1], t.axes[0], *t.axes[2:]))


def narrow(t: Tile) -> Tile:
    return replace(t, axes=t.axes[1:])


def reduction(change: Callable[[Reduce], Reduce]) -> Edit:
    return lambda s: (change(s),) if isinstance(s, Reduce) and s.dst.name == "red0" else (s,)


def stores(change: Callable[[Store], Store]) -> Edit:
    return lambda s: (change(s),) if isinstance(s, Store) and s.tensor == "out" else (s,)


def loops(change: Callable[[For], tuple[Stmt, ...]]) -> Edit:
    return lambda s: change(s) if isinstance(s, For) and s.var == "kt0" else (s,)


MUTATIONS: dict[str, tuple[Edit, str]] = {
    "a tile without its Map": (dropping(Map, "t1"), "tile t1 read before"),
    "a product dropped": (dropping(Gemm, "g0"), "tile g0 read before"),
    "a reduction dropped": (dropping(Reduce, "red0"), "tile red0 read before"),
    "a state without its start": (dropping(Map, "l"), "tile l read before"),
    "page numbers not looked up": (dropping(Map, "page0"), "tile page0 read before"),
    "a scalar without its Let": (dropping(Let, "row0"), "scalar row0 is not defined"),
    "a bound without its Let": (dropping(Let, "hi0"), "scalar hi0 is not defined"),
    "no search for the sequence": (dropping(Search, "seq"), "scalar seq is not defined"),
    "a loop dropped but for its body": (loops(lambda s: s.body), "scalar kt0 is not defined"),
    "a step under a branch": (
        lambda s: (If(Var("batch"), (s,)),) if isinstance(s, Map) and s.dst.name == "t1" else (s,),
        "tile t1 read before",
    ),
    "statements in reverse": (loops(lambda s: (replace(s, body=s.body[::-1]),)), "read before"),
    "a product over another axis": (gemm_into("g0", lambda s: replace(s, over="row")), "no row axis to contract"),
    "a product's axes swapped": (gemm_into("g0", lambda s: replace(s, dst=swapped(s.dst))), "tile g0 has two shapes"),
    "a product without an axis": (gemm_into("g0", lambda s: replace(s, dst=narrow(s.dst))), "do not follow"),
    "an operand's axes swapped": (gemm_into("g0", lambda s: replace(s, a=swapped(s.a))), "tile q has two shapes"),
    "a reduction over another axis": (reduction(lambda s: replace(s, over="head")), "do not follow"),
    "an unknown reduction": (reduction(lambda s: replace(s, kind="median")), "do not follow"),
    "a Map into fewer axes": (map_into("t3", lambda s: replace(s, dst=narrow(s.dst))), "axes its tile does not have"),
    "a Map of a tile's swapped axes": (
        map_into("t1", lambda s: replace(s, expr=Tile("t0", ("head", "row")))),
        "tile t0 has two shapes",
    ),
    "a store to no argument": (stores(lambda s: replace(s, tensor="nowhere")), "nowhere is not an argument"),
    "a store over fewer axes": (stores(lambda s: replace(s, axes=s.axes[1:])), "axes that are not stored"),
    "a read of no argument": (
        map_into("sink", lambda s: replace(s, expr=Elem("sunk", (Iota("head"),), f32))),
        "sunk is not an argument",
    ),
    "a coordinate left over": (
        map_into("t1", lambda s: replace(s, expr=Coord("pos", ("row",)))),
        "Coord should be gone",
    ),
    "a parameter left over": (
        map_into("sink", lambda s: replace(s, expr=Param("sink", ("head",), f32))),
        "Param should be gone",
    ),
    "a mask left over": (
        lambda s: (s, Mask(s.dst, 0.0)) if isinstance(s, Map) and s.dst.name == "t3" else (s,),
        "Mask should be gone",
    ),
    "a fetch left over": (
        lambda s: (Fetch("kv", ((KEYS, Tile("keys0_k", ("key", "dim"))),)), s) if isinstance(s, Gemm) else (s,),
        "Fetch should be gone",
    ),
    "a branch that differs in a tile": (
        lambda s: (If(Tile("q", ("row",)), (s,)),) if isinstance(s, Store) else (s,),
        "a branch must be uniform",
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["one kernel", "partitions"])
def test_what_is_lowered_is_well_formed(schedule: Schedule) -> None:
    """After every pass, and once more at the end."""
    verify(lower(SPEC, BINDING, schedule), "allocate_tiles")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_program_is_refused(name: str) -> None:
    """One statement dropped, moved or changed; the message shows the first place that no longer makes sense."""
    edit, message = MUTATIONS[name]
    broken = mutated(lower(SPEC, BINDING, SCHEDULES[0]), edit)
    with pytest.raises(VerifyError, match=message):
        verify(broken, "allocate_tiles")


def test_a_pass_that_leaves_something_is_named() -> None:
    """What a pass should have lowered is looked for right after it, and the message says which pass that was."""
    context = Context.of(SPEC, build(SPEC), BINDING, SCHEDULES[0])
    program = Program(SPEC.name, (), (), ())
    for step in PASSES:
        before, program = program, step(program, context)
        if step.__name__ in ("bound_key_loops", "fetch_keys", "apply_masks", "bind_coordinates"):
            with pytest.raises(VerifyError, match=f"after {step.__name__}: .* should be gone"):
                verify(before, step.__name__)
        verify(program, step.__name__)


TILE_MUTATIONS: dict[str, Callable[[TileProgram], TileProgram]] = {
    "a statement dropped": lambda tp: step_of(tp, lambda body: body[1:]),
    "the last statement first": lambda tp: step_of(tp, lambda body: (body[-1], *body[:-1])),
    "a tile of two shapes": lambda tp: step_of(tp, lambda body: (*body, Map(Tile("g0", ("row",)), Const(0.0)))),
    "a state that nobody declared": lambda tp: replace(
        tp, passes=tuple(replace(p, states=p.states[1:]) for p in tp.passes)
    ),
    "a field that is not fetched": lambda tp: replace(tp, passes=tuple(replace(p, fields=()) for p in tp.passes)),
    "an operand that is not loaded": lambda tp: replace(tp, operands=tp.operands[1:]),
}


def step_of(tp: TileProgram, change: Callable[[tuple[TileStmt, ...]], tuple[TileStmt, ...]]) -> TileProgram:
    return replace(tp, passes=tuple(replace(p, step=change(p.step)) for p in tp.passes))


@pytest.mark.parametrize("name", TILE_MUTATIONS)
def test_a_broken_tile_program_is_refused(name: str) -> None:
    """Before there are loops, too."""
    good = build(SPEC)
    verify_tile_program(good)
    with pytest.raises(VerifyError, match="after build"):
        verify_tile_program(TILE_MUTATIONS[name](good))


def test_an_index_tile_is_an_integer() -> None:
    """Page numbers are kept as integers, everything else as floats."""
    (kernel,) = lower(SPEC, BINDING, SCHEDULES[0]).kernels
    assert {t.name: t.dtype for t in kernel.tiles if t.dtype != f32} == {"page0": i32}
    axes: list[Expr] = [Iota(a) for t in kernel.tiles for a, _ in t.axes]
    assert axes
