"""Making and rewriting expressions: operations are folded as they are made, so index arithmetic stays readable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from .dtypes import Kind, f32
from .expr import (
    Const,
    Coord,
    Dot,
    Elem,
    Expr,
    FoldResult,
    Iota,
    KeyField,
    Op,
    Param,
    Reduction,
    Selected,
    Tile,
    Var,
)
from .scalars import OPS, Number
from .source import Loc

_FOLDED = {"add", "sub", "mul", "floordiv", "mod", "max", "min", "le", "lt", "eq", "ne", "and", "or", "not"}


def op(name: str, *args: Expr, loc: Loc | None = None) -> Expr:
    """An operation, folded where the answer does not depend on rounding."""
    if name in _FOLDED and all(isinstance(a, Const) and a.dtype is not f32 for a in args):
        divides_by_zero = name in ("floordiv", "mod") and args[1] == Const(0)
        if not divides_by_zero:
            return Const(OPS[name].number(*(a.value for a in args if isinstance(a, Const))))
    match name, args:
        case ("add" | "sub", (a, b)) if a.dtype.kind is Kind.INT and b == Const(0):
            return a
        case ("add", (a, b)) if b.dtype.kind is Kind.INT and a == Const(0):
            return b
        case ("mul" | "floordiv", (a, b)) if a.dtype.kind is Kind.INT and b == Const(1):
            return a
        case ("mul", (a, b)) if b.dtype.kind is Kind.INT and a == Const(1):
            return b
        case ("add", (Op("add", (a, Const(x))), Const(y))) | ("add", (Op("add", (Const(x), a)), Const(y))) if (
            a.dtype.kind is Kind.INT and isinstance(x, int) and isinstance(y, int)
        ):
            return op("add", a, Const(x + y))
        case (
            ("and", (Const(True), a))
            | ("and", (a, Const(True)))
            | ("or", (Const(False), a))
            | ("or", (a, Const(False)))
        ):
            return a
        case ("and", (Const(False), _)) | ("and", (_, Const(False))):
            return Const(False)
        case ("or", (Const(True), _)) | ("or", (_, Const(True))):
            return Const(True)
        case ("and" | "or" | "max" | "min", (a, b)) if a == b:
            return a
        case ("where", (Const(True), a, _)) | ("where", (Const(False), _, a)):
            return a
        case ("where", (c, a, b)) if a == b and set(c.axes) <= set(a.axes):  # or it would lose axes
            return a
    return Op(name, args, loc)


def add(a: Expr, b: Expr | int) -> Expr:
    return op("add", a, lift(b))


def sub(a: Expr, b: Expr | int) -> Expr:
    return op("sub", a, lift(b))


def mul(a: Expr, b: Expr | int) -> Expr:
    return op("mul", a, lift(b))


def floordiv(a: Expr, b: Expr | int) -> Expr:
    return op("floordiv", a, lift(b))


def ceildiv(a: Expr, b: int) -> Expr:
    return floordiv(add(a, b - 1), b)


def minimum(a: Expr, b: Expr | int) -> Expr:
    return op("min", a, lift(b))


def maximum(a: Expr, b: Expr | int) -> Expr:
    return op("max", a, lift(b))


def less(a: Expr, b: Expr | int) -> Expr:
    return op("lt", a, lift(b))


def at_least(a: Expr, b: Expr | int) -> Expr:
    return op("le", lift(b), a)


def both(*conditions: Expr) -> Expr:
    out: Expr = Const(True)
    for c in conditions:
        out = op("and", out, c)
    return out


def either(*conditions: Expr) -> Expr:
    out: Expr = Const(False)
    for c in conditions:
        out = op("or", out, c)
    return out


def where(cond: Expr, a: Expr, b: Expr | Number) -> Expr:
    return op("where", cond, a, lift(b))


def lift(x: Expr | Number) -> Expr:
    return Const(x) if isinstance(x, bool | int | float) else x


def rebuild(e: Expr, f: Callable[[Expr], Expr]) -> Expr:
    """`e` with `f` applied to its children; operations are folded again."""
    match e:
        case Const() | Coord() | Var() | Iota() | KeyField() | Tile() | FoldResult() | Selected():
            return e
        case Param():
            return replace(e, index=tuple((a, f(x)) for a, x in e.index)) if e.index else e
        case Op():
            return op(e.name, *(f(a) for a in e.args), loc=e.loc)
        case Dot():
            return Dot(f(e.a), f(e.b), e.over, e.loc)
        case Reduction():
            return Reduction(e.kind, f(e.a), e.over, e.loc)
        case Elem():
            return Elem(e.tensor, tuple(f(i) for i in e.index), e.dtype, f(e.ok), e.loc)
        case _:
            assert_never(e)


def substitute(e: Expr, table: dict[Expr, Expr]) -> Expr:
    """`e` with every occurrence of a key of `table` replaced, outermost first."""
    done = dict(table)

    def replaced(x: Expr) -> Expr:
        if x not in done:
            done[x] = rebuild(x, replaced)
        return done[x]

    return replaced(e)


def linear(e: Expr, axis: str) -> Expr | None:
    """The rest of e where e = rest + i_axis; None where it is anything else."""
    match e:
        case Iota(a) if a == axis:
            return Const(0)
        case Op("add", (a, b)) if axis in a.axes and axis not in b.axes:
            rest = linear(a, axis)
            return None if rest is None else add(rest, b)
        case Op("add", (a, b)) if axis in b.axes and axis not in a.axes:
            rest = linear(b, axis)
            return None if rest is None else add(a, rest)
        case _:
            return None
