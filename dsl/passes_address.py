"""The pass that turns coordinates and captured tensors into addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .algebra import add, at_least, both, floordiv, less, maximum, minimum, mul, rebuild, sub
from .context import GLOBAL_HEAD, GLOBAL_ROW, KEY_POSITION, POSITION, ROW_OK, Context
from .dtypes import i32
from .expr import Const, Coord, Elem, Expr, Iota, Param, Var
from .loops import Kernel, Let, Program, Search, Stmt, Store
from .rewrite import map_expressions, rewrite_body
from .spec import ParamKind
from .value import LOOP_AXES

_COORDINATES: dict[str, Expr] = {
    "pos": POSITION,
    "row": GLOBAL_ROW,
    "head": GLOBAL_HEAD,
    "key": KEY_POSITION,
    "column": KEY_POSITION,
    "kv_head": Var("kv_head"),
    "seq": Var("seq"),
    "num_keys": Var("num_keys"),
}


def bind_coordinates(program: Program, cx: Context) -> Program:
    """Turn coordinates and captured tensors into addresses.

    before: kernel: q = q[row, head, dim]; .. pos .. head ..; out(row, head, dim) = ..
    after:  kernel: seq := ..; r0, r1 := ..; q = q(row0 + r0 + i_row, .. if r0 + i_row < r1); ..
    A tile's sequence is found in the offsets, rows past the sequence's end are guarded, and a captured tensor addressed
    outside its extent reads as zero.
    """

    def bind(e: Expr) -> Expr:
        match e:
            case Coord(name):
                return _COORDINATES[name]
            case Param(name, (), dtype) if cx.spec.param(name).kind is ParamKind.SCALAR:
                return Var(name, dtype)
            case Param():
                return _element(e, bind)
            case _:
                return rebuild(e, bind)

    def lower(s: Stmt) -> tuple[Stmt, ...]:
        bound = map_expressions(s, bind)
        if isinstance(bound, Store) and "row" in bound.axes:
            bound = replace(bound, ok=both(bound.ok, ROW_OK))
        return (bound,)

    kernels = tuple(replace(k, body=(*_prelude(k, cx), *rewrite_body(k.body, lower))) for k in program.kernels)
    return replace(program, kernels=kernels)


def _element(p: Param, bind: object) -> Elem:
    """A captured tensor's element: its own axes are coordinates, indexed axes are expressions."""
    assert callable(bind)
    at = {axis: bind(e) for axis, e in p.index}
    index: list[Expr] = []
    ok: list[Expr] = [ROW_OK] if "row" in p.own else []
    for axis in p.own:
        i = at.get(axis) or (_COORDINATES[axis] if axis in LOOP_AXES else Iota(axis))
        index.append(i)
        if axis in at or axis == "key":
            ok.append(both(at_least(i, 0), less(i, Var(f"{p.name}_{axis}"))))
    return Elem(p.name, tuple(index), p.dtype, both(*ok), p.loc)


def _prelude(k: Kernel, cx: Context) -> tuple[Stmt, ...]:
    """Which rows of which sequence, and which heads, this grid point owns.

    Row tiles are a flat list: sequence b owns the indices from offsets[b] // rows + b on, at least as many as it needs.
    """
    rows, seq, windowed = k.rows or cx.schedule.rows, Var("seq"), bool(cx.tp.selects)

    def offset(e: Expr) -> Elem:
        return Elem("offsets", (e,), i32)

    def first_row(e: Expr) -> Expr:
        """The first row of a sequence, counted from the start of the row window and kept inside it."""
        if not windowed:
            return offset(e)
        return sub(minimum(maximum(offset(e), Var("row_lo")), Var("row_hi")), Var("row_lo"))

    past: Expr = Const(0) if cx.spec.positions is None else Elem(f"{cx.spec.positions}_lengths", (seq,), i32)
    lets = {
        "row0": offset(seq),
        "n_rows": sub(offset(add(seq, 1)), Var("row0")),
        **_tile_rows(rows, windowed, first_row),
        "past": past,
        "num_keys": add(Var("past"), Var("n_rows")),
        "q0": add(Var("past"), Var("r0")),
        "q1": add(Var("past"), sub(Var("r1"), 1)),
        **_leaf_counts(cx),
        "head0": mul(Var("head_block"), k.heads or cx.heads),
        "kv_head": floordiv(Var("head0"), cx.binding.group),
    }
    owns = at_least(Var("tile"), add(floordiv(first_row(seq), rows), seq))
    return (Search("seq", Const(0), Var("batch"), owns), *(Let(n, e) for n, e in lets.items()))


def _leaf_counts(cx: Context) -> dict[str, Expr]:
    """Rows a sequence has in caches that do not define positions."""
    leaves = [p.name for p in cx.spec.params if p.kind is ParamKind.PAGED and p.name != cx.spec.positions]
    return {f"{n}_count": Elem(f"{n}_lengths", (Var("seq"),), i32) for n in leaves}


def _tile_rows(rows: int, windowed: bool, first_row: Callable[[Expr], Expr]) -> dict[str, Expr]:
    """The tile's rows r0..r1 within its sequence; with a row window, only rows of the window."""
    seq, tile, start = Var("seq"), Var("tile"), Var("row0")
    if not windowed:
        local = mul(sub(tile, add(floordiv(start, rows), seq)), rows)
        return {"r0": local, "r1": minimum(add(Var("r0"), rows), Var("n_rows"))}
    local = mul(sub(tile, add(floordiv(first_row(seq), rows), seq)), rows)
    skipped, end = maximum(sub(Var("row_lo"), start), 0), minimum(sub(Var("row_hi"), start), Var("n_rows"))
    return {"r0": add(minimum(skipped, Var("n_rows")), local), "r1": minimum(add(Var("r0"), rows), end)}
