"""The interpreter's expressions: each becomes a closure over a `Frame`, compiled once, run per tile.

A tile is an array [lanes, *axes]; lanes are grid points run in lockstep (1, or all points of one grid axis). Floats are
float32 torch tensors. Integers, which are positions and page numbers, are small and are int64 numpy arrays, whose
operations cost half as much to start. A value that varies over neither tile axes nor lanes is a Python number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import torch

from .dtypes import DType, Kind
from .expr import (
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
    occurrences,
    walk,
)
from .loops import Arg, Kernel
from .scalars import OPS, Number

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = torch.Tensor | Ints | Bools
Scalar: TypeAlias = Number | Array  # an array [lanes] where lanes differ
Run: TypeAlias = Callable[["Frame"], Scalar]


@dataclass
class Frame:
    """What one grid point (or all lanes of it) computes with."""

    tensors: Mapping[str, torch.Tensor]  # float arguments
    indices: Mapping[str, Ints | Bools]  # integer arguments, and conditions
    lists: Mapping[str, list[int]]  # one-dimensional integer arguments, for reading single elements
    scalars: dict[str, Scalar] = field(default_factory=dict)
    tiles: dict[str, Array] = field(default_factory=dict)
    kept: dict[int, Scalar] = field(default_factory=dict)  # what the expression being evaluated needs again


@dataclass(frozen=True)
class Code:
    """A compiled expression. A number has no axes and is the same in every lane."""

    run: Run
    axes: Axes
    lanes: bool
    number: bool = False
    fresh: bool = False  # the result is a temporary of full shape that its user may overwrite


@dataclass(frozen=True)
class Repeats:
    """Parts of an expression that it has more than once, and the code of those compiled so far."""

    parts: frozenset[Expr]
    codes: dict[tuple[Expr, Axes], Code] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """What is known about a kernel when its expressions are compiled."""

    kernel: Kernel
    args: Mapping[str, Arg]
    sizes: Mapping[str, int]  # of tile axes
    varying: frozenset[str]  # scalars and tiles that differ between lanes
    lane_count: int = 1
    check_finite: bool = False
    repeats: Repeats | None = None  # of the expression being compiled

    def lanes(self, e: Expr) -> bool:
        return any(isinstance(x, Var | Tile) and x.name in self.varying for x in walk(e))


def torch_dtype(d: DType) -> torch.dtype:
    found = getattr(torch, d.name)
    assert isinstance(found, torch.dtype)
    return found


def as_torch(x: Array) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(x))


def as_numpy(x: Scalar) -> Scalar:
    return x.numpy() if isinstance(x, torch.Tensor) else x


def as_number(x: Scalar) -> Number:
    assert isinstance(x, bool | int | float)
    return x


def as_ints(x: Scalar) -> Ints:
    assert isinstance(x, np.ndarray)
    return x.astype(np.int64, copy=False)


def compile_value(e: Expr, axes: Axes, scope: Scope, consumed: frozenset[str] = frozenset()) -> Code:
    """`e` for use over `axes`: its array has one dimension per axis, of size 1 where it does not vary.

    Tiles in `consumed` are read for the last time here and may be overwritten. What an expression has twice is computed
    once: guards and page numbers stand in several places of it.
    """
    if scope.repeats is None:
        counts = {x: n for x, n in occurrences(e).items() if isinstance(x, Op | Elem)}
        repeats = Repeats(frozenset(x for x, n in counts.items() if n > 1))
        code = _compiled(e, axes, replace(scope, repeats=repeats), consumed)
        return replace(code, run=_forgetting(code.run)) if repeats.codes else code
    if e not in scope.repeats.parts:
        return _compiled(e, axes, scope, consumed)
    codes = scope.repeats.codes
    if (e, axes) not in codes:
        code = _compiled(e, axes, scope, consumed)
        if code.number:
            return code
        codes[e, axes] = replace(code, run=_once(code.run, len(codes)), fresh=False)
    return codes[e, axes]


def _once(run: Run, slot: int) -> Run:
    def kept(f: Frame) -> Scalar:
        if slot not in f.kept:
            f.kept[slot] = run(f)
        return f.kept[slot]

    return kept


def _forgetting(run: Run) -> Run:
    def forgetting(f: Frame) -> Scalar:
        out = run(f)
        f.kept.clear()
        return out

    return forgetting


def _compiled(e: Expr, axes: Axes, scope: Scope, consumed: frozenset[str]) -> Code:
    match e:
        case Const(value):
            return Code(lambda f: value, (), False, number=True)
        case Var(name):
            return _variable(name, axes, scope)
        case Iota(axis):
            shape = [1, *(scope.sizes[axis] if a == axis else 1 for a in axes)]
            index = np.arange(scope.sizes[axis]).reshape(shape)
            return Code(lambda f: index, (axis,), False)
        case Tile(name, own):
            return _tile(name, own, axes, scope, name in consumed)
        case Op():
            return _operation(e, axes, scope, consumed)
        case Elem():
            from .interp_loads import compile_load

            return compile_load(e, axes, scope)
        case Coord() | Param() | KeyField() | Dot() | Reduction() | FoldResult() | Selected():
            raise AssertionError(f"{type(e).__name__} in a finished loop nest")
        case _:
            assert_never(e)


def _variable(name: str, axes: Axes, scope: Scope) -> Code:
    if name not in scope.varying:
        return Code(lambda f: f.scalars[name], (), False, number=True)
    shape = [-1] + [1] * len(axes)
    return Code(lambda f: as_ints(f.scalars[name]).reshape(shape), (), True)


def _tile(name: str, own: Axes, axes: Axes, scope: Scope, consumed: bool) -> Code:
    lanes = name in scope.varying
    if own == axes:
        return Code(lambda f: f.tiles[name], own, lanes, fresh=consumed)
    index = (slice(None), *(slice(None) if a in own else None for a in axes))
    return Code(lambda f: f.tiles[name][index], own, lanes)


# ---- operations ------------------------------------------------------------------------------------------------------

_OPERATORS: dict[str, Callable[..., Scalar]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "le": operator.le,
    "lt": operator.lt,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
}
# Forms that overwrite their first argument.
_IN_PLACE = {n: n + "_" for n in ("add", "sub", "mul", "div", "exp", "log", "sqrt", "tanh", "abs")}


def _operation(e: Op, axes: Axes, scope: Scope, consumed: frozenset[str]) -> Code:
    args = [compile_value(a, axes, scope, consumed) for a in e.args]
    lanes, varies = any(a.lanes for a in args), e.axes
    if all(a.number for a in args):
        return Code(_on_numbers(e.name, [a.run for a in args]), (), False, number=True)
    for n, (a, x) in enumerate(zip(args, e.args, strict=True)):
        full = a.fresh and a.axes == varies and a.lanes == lanes and x.dtype.kind is Kind.FLOAT
        if full and e.dtype.kind is Kind.FLOAT and (overwriting := _overwriting(e, args, n)) is not None:
            return Code(overwriting, varies, lanes, fresh=True)
    runs = [_converted(x, c, e) for x, c in zip(e.args, args, strict=True)]
    return Code(_on_arrays(e, runs), varies, lanes, fresh=varies == axes)


def _on_numbers(name: str, runs: list[Run]) -> Run:
    number: Callable[..., Number] = OPS[name].number
    match runs:
        case [a]:
            return lambda f: number(a(f))
        case [a, b]:
            return lambda f: number(a(f), b(f))
        case _:
            return lambda f: number(*(r(f) for r in runs))


def _in_torch(e: Op) -> bool:
    """Whether an operation runs on tensors: it makes floats, or compares them."""
    compares = OPS[e.name].rule.__name__ == "comparison"
    return e.dtype.kind is Kind.FLOAT or (compares and any(x.dtype.kind is Kind.FLOAT for x in e.args))


def _converted(x: Expr, code: Code, user: Op) -> Run:
    """An argument as its user's operation takes it: numpy arrays for integers and conditions, tensors for floats."""
    run = code.run
    if code.number:
        return run
    if not _in_torch(user) or user.name == "from_bits":
        return lambda f: as_numpy(run(f))
    if x.dtype.kind is Kind.INT:
        return lambda f: as_torch(run(f)).to(torch.float32)  # type: ignore[arg-type]  # not a number
    return run if x.dtype.kind is Kind.FLOAT else lambda f: as_torch(run(f))  # type: ignore[arg-type]  # not a number


def _on_arrays(e: Op, runs: list[Run]) -> Run:
    name, tensors = e.name, _in_torch(e)
    if name in _OPERATORS:
        infix = _OPERATORS[name]
        a, b = runs
        return lambda f: infix(a(f), b(f))
    if name == "where":
        c, a, b = runs
        select: Callable[..., Scalar] = torch.where if tensors else np.where
        if tensors:  # one operand as a tensor: two numbers would take torch's default dtype
            return lambda f: select(_tensor(c(f)), a(f), _operand(b(f), tensors))
        return lambda f: select(c(f), a(f), b(f))
    if name == "bits":
        (only,) = runs
        return lambda f: as_ints(as_numpy(_tensor(only(f)).to(torch.float32).contiguous().view(torch.int32)))
    if name == "from_bits":
        (only,) = runs
        return lambda f: torch.from_numpy(as_ints(only(f)).astype(np.int32).view(np.float32))
    if name == "float":
        (only,) = runs
        return lambda f: _tensor(only(f)).to(torch.float32)
    if name == "int":
        (only,) = runs
        return lambda f: as_ints(only(f))
    namespace = torch if tensors else np
    function: Callable[..., Scalar] = getattr(namespace, OPS[name].torch)
    if len(runs) == 1:
        (only,) = runs
        return lambda f: function(only(f))
    a, b = runs
    return lambda f: function(_operand(a(f), tensors), _operand(b(f), tensors))


def _operand(x: Scalar, tensors: bool) -> Scalar:
    """torch's named functions take tensors only; numpy's take numbers too."""
    return torch.tensor(x, dtype=torch.float32) if tensors and not isinstance(x, torch.Tensor) else x


def _tensor(x: Scalar) -> torch.Tensor:
    return as_torch(x) if isinstance(x, torch.Tensor | np.ndarray) else torch.tensor(x)


def _overwriting(e: Op, args: list[Code], full: int) -> Run | None:
    """The operation written over its argument number `full`, where there is such a form."""
    runs = [_converted(x, c, e) for x, c in zip(e.args, args, strict=True)]
    name, mine = e.name, runs[full]
    if name == "where" and full > 0 and args[3 - full].number:
        return _filling(runs[0], mine, runs[3 - full], where=full == 2)
    if name in ("max", "min") and args[1 - full].number:
        limit, clamp = runs[1 - full], torch.Tensor.clamp_min_ if name == "max" else torch.Tensor.clamp_max_
        return lambda f: clamp(_tensor(mine(f)), float(as_number(limit(f))))  # NaN stays NaN, as in maximum
    if name in ("max", "min"):
        other, function = runs[1 - full], torch.maximum if name == "max" else torch.minimum

        def extreme(f: Frame) -> torch.Tensor:
            x = _tensor(mine(f))
            return function(x, _tensor(other(f)), out=x)

        return extreme
    if name not in _IN_PLACE or (full > 0 and name not in ("add", "mul")):
        return None
    method: Callable[..., torch.Tensor] = getattr(torch.Tensor, _IN_PLACE[name])
    if len(args) == 1:
        return lambda f: method(mine(f))
    other = runs[1 - full]
    return lambda f: method(mine(f), other(f))


def _filling(condition: Run, x: Run, number: Run, *, where: bool) -> Run:
    """`x` with a number in place of what the condition, or its opposite, picks; often that is nothing."""

    def fill(f: Frame) -> torch.Tensor:
        out, picked = _tensor(x(f)), _tensor(condition(f))
        if not where:
            picked = picked.logical_not()
        return out.masked_fill_(picked, as_number(number(f))) if bool(picked.any()) else out

    return fill


def blank(kind: Kind) -> float | int:
    """What a tile holds before anything is written to it: NaN, or an index no tensor has."""
    return math.nan if kind is Kind.FLOAT else -(1 << 40)
