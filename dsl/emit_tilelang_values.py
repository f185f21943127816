"""Expressions of a loop nest as TileLang text: positions in tiles, guarded reads, arithmetic as the nest defines it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from .dtypes import DType, Kind, bf16, boolean, f8e4m3, f16, f32
from .errors import NotOnTarget
from .expr import (
    ALWAYS,
    Axes,
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
from .loops import Alloc, Arg
from .passes_gpu import POINTS, has_points

# How a tensor's elements are declared. What no unit computes with is passed as bytes and decoded by its bits.
ELEMENTS: Mapping[str, str] = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "float8_e4m3fn": "uint8",
    "int32": "int32", "int64": "int64", "uint32": "uint32", "uint8": "uint8", "bool": "uint8",
}  # fmt: skip
HELPERS = {"float8_e4m3fn": "decode_e4m3"}

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "le": "<=", "lt": "<", "eq": "==", "ne": "!=", "bitand": "&",
    "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>", "floordiv": "//", "mod": "%",
}  # fmt: skip
_CALLS = {
    "abs": "T.abs({})", "exp": "T.exp({})", "log": "T.log({})", "sqrt": "T.sqrt({})", "tanh": "T.tanh({})",
    "not": "T.Not({})", "and": "T.And({}, {})", "or": "T.Or({}, {})", "bits": 'T.reinterpret({}, "int32")',
    "from_bits": 'T.reinterpret({}, "float32")', "float": 'T.cast({}, "float32")', "int": 'T.cast({}, "int32")',
    "where": "T.if_then_else({}, {}, {})",
}  # fmt: skip
_EXTREME = {"max": (">", "T.max"), "min": ("<", "T.min")}


@dataclass(frozen=True)
class Layout:
    """How tiles of a kernel lie: all (row, head) points fused into one axis "point", which has room for `points`."""

    sizes: Mapping[str, int]
    points: int

    @property
    def rows(self) -> int:
        return self.sizes.get("row", 1)

    @property
    def heads(self) -> int:
        return self.sizes.get("head", 1)

    @property
    def padded(self) -> bool:
        return self.points > self.rows * self.heads

    def dims(self, axes: Axes) -> Axes:
        """The axes of storage of a tile with these axes. A row or head axis of one point needs none."""
        if has_points(axes, dict(self.sizes)):
            return ("point", *(a for a in axes if a not in POINTS))
        return tuple(a for a in axes if a not in POINTS or self.sizes[a] > 1)

    def extent(self, dim: str) -> int:
        return self.points if dim == "point" else self.sizes[dim]

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self.extent(d) for d in self.dims(axes)) or (1,)


@dataclass(frozen=True)
class Values:
    """What expressions of one kernel are printed with. `at` has the loop variable of each axis of storage around."""

    layout: Layout
    tiles: Mapping[str, Alloc]
    args: Mapping[str, Arg]
    target: str
    names: Mapping[str, str]  # of scalars
    at: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[Expr] = frozenset()  # conditions that hold wherever this is evaluated

    # ---- places ------------------------------------------------------------------------------------------------------

    def coordinate(self, axis: str) -> str:
        """The index of a point along an axis of the nest."""
        if axis in self.at:
            return self.at[axis]
        if "point" in self.at and axis in POINTS:
            lay, i = self.layout, self.at["point"]
            if not lay.padded and (lay.rows if axis == "head" else lay.heads) == 1:
                return i
            if lay.heads == 1:
                return i if axis == "row" else "0"
            return f"{i} // {lay.heads}" if axis == "row" else f"{i} % {lay.heads}"
        assert self.layout.sizes.get(axis, 1) == 1, axis
        return "0"

    def place(self, axes: Axes) -> str:
        """The index of a tile's element, inside brackets."""
        return ", ".join(self._dim(d) for d in self.layout.dims(axes)) or "0"

    def _dim(self, d: str) -> str:
        lay = self.layout
        if d in self.at:
            return self.at[d]
        if d == "point":
            row, head = self.coordinate("row"), self.coordinate("head")
            if lay.heads == 1:
                return row
            return head if lay.rows == 1 else f"({row}) * {lay.heads} + {head}"
        i = self.coordinate(d)
        return f"T.min({i}, {lay.rows - 1})" if d == "row" and lay.padded and "point" in self.at else i

    # ---- expressions -------------------------------------------------------------------------------------------------

    def text(self, e: Expr) -> str:
        """In the type the nest computes it in: float32, int32 or a condition."""
        match e:
            case Const(value):
                return _constant(value)
            case Var(name):
                return self.names.get(name, name)
            case Iota(axis):
                i = self.coordinate(axis)
                return f"({i})" if " " in i else i
            case Tile(name, axes, _):
                stored = f"t_{name}[{self.place(axes)}]"
                dtype = self.tiles[name].dtype
                return f'T.cast({stored}, "float32")' if dtype in (bf16, f16) else stored
            case Elem():
                return self._element(e, self.args[e.tensor].dtype.compute)
            case Op("where", (cond, a, b)):
                inside = replace(self, known=self.known | set(conjuncts(cond)))
                other = _as(b, e.dtype, self.text(b))
                return f"T.if_then_else({self.text(cond)}, {_as(a, e.dtype, inside.text(a))}, {other})"
            case Op():
                return self._operation(e)
            case Coord() | Param() | KeyField() | Dot() | Reduction() | FoldResult() | Selected():
                raise AssertionError(f"{type(e).__name__} in a finished loop nest")
            case _:
                assert_never(e)

    def _operation(self, e: Op) -> str:
        args = [self.text(a) for a in e.args]
        kind = e.args[0].dtype.kind if e.name in ("le", "lt", "eq", "ne") else e.dtype.kind
        if any(a.dtype.kind is Kind.FLOAT for a in e.args) and e.name not in ("int", "bits"):
            args = [_as(a, f32, t) for a, t in zip(e.args, args, strict=True)]
            kind = Kind.FLOAT
        match e.name:
            case "floordiv" | "mod" if not isinstance(e.args[1], Const):
                return f"T.if_then_else({args[1]} != 0, {args[0]} {_INFIX[e.name]} {args[1]}, 0)"  # as the nest has it
            case "div" | "exp" | "log" | "sqrt" | "tanh":
                args = [_as(a, f32, t) for a, t in zip(e.args, args, strict=True)]
            case "max" | "min" if kind is Kind.FLOAT:
                return self._extreme(e, args)
            case "max" | "min":
                return f"{_EXTREME[e.name][1]}({args[0]}, {args[1]})"
            case _:
                pass
        if e.name in _INFIX:
            return f"({args[0]} {_INFIX[e.name]} {args[1]})"
        if e.name in _CALLS:
            return _CALLS[e.name].format(*args)
        raise NotOnTarget(loc=e.loc, target=self.target, what=f"operation {e.name}", expected="another expression")

    def _extreme(self, e: Op, args: list[str]) -> str:
        """NaN where either is: a comparison with NaN is false, so the operand tested last is kept."""
        sign = _EXTREME[e.name][0]
        a, b = args
        if isinstance(e.args[0], Const):
            a, b = b, a
        nan = "" if any(isinstance(x, Const) for x in e.args) else f"{b} != {b}"
        beats = f"{b} {sign} {a}"
        return f"T.if_then_else({f'T.Or({beats}, {nan})' if nan else beats}, {b}, {a})"

    # ---- reads of tensors --------------------------------------------------------------------------------------------

    def stored(self, e: Elem, dtype: DType) -> str:
        """An element as a tile of a narrow type holds it, not by way of float32 where that changes nothing."""
        own = self.args[e.tensor].dtype
        return self._element(e, dtype if own in (dtype, f8e4m3) else f32)

    def _element(self, e: Elem, dtype: DType) -> str:
        own = self.args[e.tensor].dtype
        inside = replace(self, known=self.known | set(conjuncts(e.ok)))
        if own.name not in ELEMENTS:
            raise NotOnTarget(loc=e.loc, target=self.target, what=f"tensors of {own}", expected="another dtype")
        raw = f"{e.tensor}[{', '.join(inside.text(i) for i in e.index)}]"
        value = self._decoded(raw, own, dtype)
        needed = [c for c in conjuncts(e.ok) if c not in self.known and not _checked_by_index(c, e)]
        if not needed:
            return value
        return f"T.if_then_else({self.condition(needed)}, {value}, {_zero(dtype)})"

    def condition(self, conditions: list[Expr]) -> str:
        out = self.text(conditions[0])
        for c in conditions[1:]:
            out = f"T.And({out}, {self.text(c)})"
        return out

    def _decoded(self, raw: str, own: DType, dtype: DType) -> str:
        if own is f8e4m3:
            value = f"{HELPERS[own.name]}({raw})"
            return value if dtype is f32 else f'T.cast({value}, "{dtype.name}")'
        if own is boolean:
            return f"({raw} != 0)"
        if own.kind is Kind.INT:
            return raw if own.name == "int32" else f'T.cast({raw}, "int32")'
        return raw if own is dtype else f'T.cast({raw}, "{dtype.name}")'

    def rounded(self, e: Expr, dtype: DType) -> str:
        """An expression in the type that a tile or tensor holds."""
        if dtype in (bf16, f16) and isinstance(e, Elem):
            return self.stored(e, dtype)
        if dtype in (bf16, f16) and isinstance(e, Tile) and self.tiles[e.name].dtype is dtype:
            return f"t_{e.name}[{self.place(e.axes)}]"
        text = _as(e, dtype.compute, self.text(e))
        return text if dtype in (f32, boolean) or dtype.name == "int32" else f'T.cast({text}, "{ELEMENTS[dtype.name]}")'


def conjuncts(e: Expr) -> list[Expr]:
    """The conditions that all hold where e does."""
    match e:
        case Op("and", (a, b)):
            return [*conjuncts(a), *conjuncts(b)]
        case _:
            return [] if e == ALWAYS else [e]


def _checked_by_index(c: Expr, e: Elem) -> bool:
    """TileLang reads zero where an index read from memory is negative: with a select the load would be waited for."""
    match c:
        case Op("le", (Const(0), Tile() as t)):
            return t in e.index
        case _:
            return False


def _zero(dtype: DType) -> str:
    match dtype.kind:
        case Kind.INT:
            return "0"
        case Kind.BOOL:
            return "T.bool(False)"
        case Kind.FLOAT:
            return f"T.{dtype.name}(0)"


def _as(e: Expr, dtype: DType, text: str) -> str:
    """Integers among floats become floats, conditions are left alone."""
    if dtype.kind is not Kind.FLOAT or e.dtype.kind is Kind.FLOAT:
        return text
    return f"T.float32({e.value})" if isinstance(e, Const) else f'T.cast({text}, "float32")'


def _constant(value: float | int | bool) -> str:
    match value:
        case bool():
            return f"T.bool({value})"
        case int():
            return str(value) if value >= -(1 << 31) + 1 else f"T.int32({value})"
        case float() if math.isnan(value):
            return 'T.reinterpret(T.int32(0x7FC00000), "float32")'
        case float() if math.isinf(value):
            return 'T.infinity("float32")' if value > 0 else '-T.infinity("float32")'
        case float():
            return f"T.float32({value!r})"
