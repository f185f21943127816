"""Expressions over named axes: the one value type of the declaration, the tile program and the loop nest.

All nodes are frozen and compare by structure. An expression has `axes` (which it varies over) and a `dtype`; the
author's operators live in `value.Value`, so `==` here means "the same expression".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, assert_never

from .dtypes import DType, boolean, f32, i32
from .scalars import OPS, Number
from .source import Loc

if TYPE_CHECKING:
    from .spec import Fold, Select

Axes = tuple[str, ...]
_RANK = {"row": 0, "head": 1, "key": 2}


def ordered(axes: Iterable[str]) -> Axes:
    """Axes in the one order that tiles use: row, head, key, then feature axes by name."""
    return tuple(sorted(set(axes), key=lambda a: (_RANK.get(a, 3), a)))


_COMPARED: dict[type[object], tuple[str, ...]] = {}


def _compared(kind: type[object]) -> tuple[str, ...]:
    """Names of the fields that make two nodes of a kind the same."""
    if kind not in _COMPARED:
        _COMPARED[kind] = tuple(f.name for f in fields(kind) if f.compare)  # type: ignore[arg-type]  # nodes are dataclasses
    return _COMPARED[kind]


class Node:
    """Parts of an expression are shared, so that written out it may be exponentially long. Hashes are kept, and nodes
    found equal know it from then on: hashing and comparing look at every node once.
    """

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            kind = type(self)
            found = hash((kind.__name__, *(getattr(self, n) for n in _compared(kind))))
            self.__dict__["_hash"] = found
        return found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or hash(self) != hash(other):
            return False
        mine, theirs = self.__dict__.get("_first", self), other.__dict__.get("_first", other)
        if mine is theirs:
            return True
        same = all(getattr(self, n) == getattr(other, n) for n in _compared(type(self)))
        if same:
            other.__dict__["_first"] = mine
        return same


@dataclass(frozen=True, eq=False)
class Const:
    """A number. 1, 1.0 and True are three, 0.0 and -0.0 are two; NaN is one."""

    value: Number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[str, str]:
        return type(self.value).__name__, repr(self.value)

    @property
    def axes(self) -> Axes:
        return ()

    @property
    def dtype(self) -> DType:
        match self.value:
            case bool():
                return boolean
            case int():
                return i32
            case float():
                return f32


ALWAYS = Const(True)


@dataclass(frozen=True)
class Coord:
    """An exact position or id: pos, key, head, kv_head, seq, num_keys. Gone once the loop nest knows its tiles."""

    name: str
    axes: Axes = ()

    @property
    def dtype(self) -> DType:
        return i32


@dataclass(frozen=True)
class Var:
    """A scalar of the loop nest: a grid index, a loop variable, a `Let`, or a scalar argument."""

    name: str
    dtype: DType = i32

    @property
    def axes(self) -> Axes:
        return ()


@dataclass(frozen=True)
class Iota:
    """The index of a point inside its tile, along one axis."""

    axis: str

    @property
    def axes(self) -> Axes:
        return (self.axis,)

    @property
    def dtype(self) -> DType:
        return i32


@dataclass(frozen=True, eq=False)
class Param(Node):
    """A captured tensor read at its own named axes, some replaced by `index` expressions; or a scalar argument.

    `index` pairs an axis of the tensor with the expression that addresses it: `bias[pos - key]`.
    """

    name: str
    own: Axes
    dtype: DType
    index: tuple[tuple[str, Expr], ...] = ()
    loc: Loc | None = field(default=None, compare=False)

    @cached_property
    def axes(self) -> Axes:
        replaced = dict(self.index)
        return ordered(a for x in self.own for a in (replaced[x].axes if x in replaced else _visible(x)))


def _visible(axis: str) -> Axes:
    """A tile has one sequence and one key-value head, so those axes of a tensor add nothing to its tiles."""
    return () if axis in ("seq", "kv_head") else (axis,)


@dataclass(frozen=True)
class KeyField:
    """A field of the key rows of source number `source`: "k", "v" or "scale".

    `leaf` is another paged cache whose rows stand at the same positions, None for the source's own. With `size`, the
    field is elements start..start + size - 1 of its row, along a feature axis of their own.
    """

    source: int
    name: str
    axes: Axes
    leaf: str | None = None
    start: int = 0
    size: int | None = None

    @property
    def dtype(self) -> DType:
        return f32


@dataclass(frozen=True, eq=False)
class Op(Node):
    name: str
    args: tuple[Expr, ...]
    loc: Loc | None = field(default=None, compare=False)

    @cached_property
    def axes(self) -> Axes:
        return ordered(a for x in self.args for a in x.axes)

    @cached_property
    def dtype(self) -> DType:
        found = OPS[self.name].rule(tuple(a.dtype for a in self.args))
        assert found is not None, f"{self.name} of {[a.dtype.name for a in self.args]}"
        return found


@dataclass(frozen=True, eq=False)
class Dot(Node):
    """Sum over one axis of a product, accumulated in float32."""

    a: Expr
    b: Expr
    over: str
    loc: Loc | None = field(default=None, compare=False)

    @cached_property
    def axes(self) -> Axes:
        return ordered({*self.a.axes, *self.b.axes} - {self.over})

    @property
    def dtype(self) -> DType:
        return f32


@dataclass(frozen=True, eq=False)
class Reduction(Node):
    """ "sum" or "max" over one axis."""

    kind: str
    a: Expr
    over: str
    loc: Loc | None = field(default=None, compare=False)

    @cached_property
    def axes(self) -> Axes:
        return ordered(x for x in self.a.axes if x != self.over)

    @property
    def dtype(self) -> DType:
        return self.a.dtype


@dataclass(frozen=True)
class FoldResult:
    """A named result of folding a reducer over keys."""

    fold: Fold
    name: str
    loc: Loc | None = field(default=None, compare=False)

    @property
    def axes(self) -> Axes:
        return dict(self.fold.finish)[self.name].axes

    @property
    def dtype(self) -> DType:
        return f32


@dataclass(frozen=True)
class Selected:
    """A named result of selecting the best keys: "indices" or "values", one per row-side point and rank."""

    select: Select
    name: str
    loc: Loc | None = field(default=None, compare=False)

    @property
    def axes(self) -> Axes:
        return ordered({*self.select.score.axes, self.select.rank} - {"key"})

    @property
    def dtype(self) -> DType:
        return i32 if self.name == "indices" else f32


@dataclass(frozen=True)
class Tile:
    """A tile, read at its axes: in a Spec a reducer's state or input, from the tile program on a buffer."""

    name: str
    axes: Axes
    dtype: DType = f32


@dataclass(frozen=True, eq=False)
class Elem(Node):
    """One element of a tensor argument. Where `ok` is false it reads as zero and touches no memory."""

    tensor: str
    index: tuple[Expr, ...]
    dtype: DType
    ok: Expr = ALWAYS
    loc: Loc | None = field(default=None, compare=False)

    @cached_property
    def axes(self) -> Axes:
        return ordered(a for x in (*self.index, self.ok) for a in x.axes)


Expr = Const | Coord | Var | Iota | Param | KeyField | Op | Dot | Reduction | FoldResult | Selected | Tile | Elem


def children(e: Expr) -> tuple[Expr, ...]:
    match e:
        case Const() | Coord() | Var() | Iota() | KeyField() | Tile():
            return ()
        case Param():
            return tuple(x for _, x in e.index)
        case Op():
            return e.args
        case Dot():
            return (e.a, e.b)
        case Reduction():
            return (e.a,)
        case FoldResult():
            return e.fold.inputs
        case Selected():
            return (e.select.score,)
        case Elem():
            return (*e.index, e.ok)
        case _:
            assert_never(e)


def walk(e: Expr) -> Iterator[Expr]:
    """`e` and everything below it, each once, users before what they use."""
    return _below(e, ())


def walk_open(e: Expr) -> list[Expr]:
    """`e` and what is below it, not looking into results of reductions: those have no keys any more."""
    return list(_below(e, (FoldResult, Selected)))


def _below(e: Expr, closed: tuple[type, ...]) -> Iterator[Expr]:
    """Reached by depth first from the last child, in reverse: an order in which no node stands before its users."""
    found: dict[Expr, None] = {}

    def visit(x: Expr) -> None:
        if x not in found:
            for c in () if isinstance(x, closed) else reversed(children(x)):
                visit(c)
            found[x] = None

    visit(e)
    return reversed(found)


def occurrences(e: Expr) -> Counter[Expr]:
    """How often each part stands in e when it is written out."""
    counts = Counter({e: 1})
    for x in walk(e):
        for c in children(x):
            counts[c] += counts[x]
    return counts


def reads(e: Expr, tile: str) -> int:
    """How often e reads a tile."""
    return sum(n for x, n in occurrences(e).items() if isinstance(x, Tile) and x.name == tile)


def loc_of(e: Expr) -> Loc | None:
    match e:
        case Op() | Dot() | Reduction() | FoldResult() | Selected() | Param() | Elem():
            return e.loc
        case _:
            return None
