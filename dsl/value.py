"""What an author computes with: traced values, and the functions of values. Mistakes are reported where they stand."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn, TypeAlias

from . import errors
from .algebra import op as make_op
from .dtypes import DType, Kind
from .expr import Axes, Const, Coord, Dot, Expr, Param, Reduction
from .printer import show
from .scalars import OPS, Number
from .source import here

LOOP_AXES = ("row", "head", "key", "seq", "kv_head")  # every other axis is a feature axis


class Value:
    """What an author computes with: a traced expression. Python operators build larger ones."""

    __slots__ = ("expr",)
    __array_ufunc__ = None  # numpy leaves its operators to ours
    __hash__ = None  # type: ignore[assignment]  # == builds an expression, so a Value cannot be a dict key

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    @property
    def axes(self) -> Axes:
        return self.expr.axes

    @property
    def dtype(self) -> DType:
        return self.expr.dtype

    def __repr__(self) -> str:
        return f"<{show(self.expr)}: {self.dtype.name}[{', '.join(self.axes)}]>"

    def __add__(self, other: Operand) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return apply("div", other, self)

    def __floordiv__(self, other: Operand) -> Value:
        return apply("floordiv", self, other)

    def __rfloordiv__(self, other: Operand) -> Value:
        return apply("floordiv", other, self)

    def __mod__(self, other: Operand) -> Value:
        return apply("mod", self, other)

    def __rmod__(self, other: Operand) -> Value:
        return apply("mod", other, self)

    def __neg__(self) -> Value:
        return apply("sub", 0 if self.dtype.kind is Kind.INT else 0.0, self)

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __le__(self, other: Operand) -> Value:
        return apply("le", self, other)

    def __lt__(self, other: Operand) -> Value:
        return apply("lt", self, other)

    def __ge__(self, other: Operand) -> Value:
        return apply("le", other, self)

    def __gt__(self, other: Operand) -> Value:
        return apply("lt", other, self)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]  # == traces a comparison
        return apply("eq", self, other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return apply("ne", self, other)

    def __and__(self, other: Operand) -> Value:
        return _logic("bitand", self, other)

    def __rand__(self, other: Operand) -> Value:
        return _logic("bitand", other, self)

    def __or__(self, other: Operand) -> Value:
        return _logic("bitor", self, other)

    def __ror__(self, other: Operand) -> Value:
        return _logic("bitor", other, self)

    def __xor__(self, other: Operand) -> Value:
        return _logic("bitxor", self, other)

    def __rxor__(self, other: Operand) -> Value:
        return _logic("bitxor", other, self)

    def __invert__(self) -> Value:
        if self.dtype.kind is Kind.FLOAT:
            expected = "it is an operation on a condition or an integer"
            raise errors.DTypeMismatch(loc=here(), what="'~'", got=self.dtype.name, expected=expected)
        return apply("not", self) if self.dtype.kind is Kind.BOOL else apply("bitxor", self, -1)

    def __lshift__(self, other: Operand) -> Value:
        return apply("shl", self, other)

    def __rlshift__(self, other: Operand) -> Value:
        return apply("shl", other, self)

    def __rshift__(self, other: Operand) -> Value:
        return apply("shr", self, other)

    def __rrshift__(self, other: Operand) -> Value:
        return apply("shr", other, self)

    def __getitem__(self, index: Operand | tuple[Operand, ...]) -> Value:
        return _address(self, index if isinstance(index, tuple) else (index,))

    def _no_truth(self) -> NoReturn:
        raise errors.BranchOnTraced(loc=here(), what=repr(self))

    def __bool__(self) -> bool:
        self._no_truth()

    def __iter__(self) -> Iterator[Value]:
        self._no_truth()

    def __contains__(self, item: object) -> bool:
        self._no_truth()

    def __int__(self) -> int:
        self._no_truth()

    def __float__(self) -> float:
        self._no_truth()

    def __index__(self) -> int:
        self._no_truth()


class HasValue(ABC):
    """Something that stands for a value where one is expected, as key rows stand for their keys."""

    @abstractmethod
    def value(self) -> Value: ...


Operand: TypeAlias = Value | HasValue | Number


def as_expr(x: object, what: str) -> Expr:
    """The expression of an operand, or an error at the author's line."""
    match x:
        case Value():
            return x.expr
        case HasValue():
            return x.value().expr
        case bool() | int() | float():
            return Const(x)
        case numbers.Integral():  # numpy's scalars among them
            return Const(int(x))
        case numbers.Real():
            return Const(float(x))
        case _:
            raise errors.NotTraceable(loc=here(), what=what, expected="a traced value or a number", got=describe(x))


def describe(x: object) -> str:
    return f"{type(x).__name__} {x!r}"[:80]


def apply(name: str, *args: Operand) -> Value:
    """A scalar operation on every element; axes broadcast by name."""
    exprs = tuple(as_expr(a, OPS[name].infix or name) for a in args)
    if OPS[name].rule(tuple(e.dtype for e in exprs)) is None:
        got = " and ".join(e.dtype.name for e in exprs)
        raise errors.DTypeMismatch(
            loc=here(), what=repr(OPS[name].infix or name), got=got, expected=f"it is an operation on {_taken_by(name)}"
        )
    return Value(make_op(name, *exprs, loc=here()))


def _taken_by(name: str) -> str:
    return {
        "integer": "integers",
        "arithmetic": "numbers",
        "floating": "numbers",
        "comparison": "numbers",
        "logical": "conditions",
        "choice": "a condition and two values of one kind",
    }[OPS[name].rule.__name__]


def _logic(on_int: str, a: Operand, b: Operand) -> Value:
    """`&`, `|` or `^`: of two conditions, or of the bits of two integers."""
    spelled = OPS[on_int].infix or on_int
    x, y = as_expr(a, spelled), as_expr(b, spelled)
    if x.dtype.kind is y.dtype.kind is Kind.INT:
        return apply(on_int, a, b)
    if not x.dtype.kind is y.dtype.kind is Kind.BOOL:
        got, expected = f"{x.dtype.name} and {y.dtype.name}", "it is an operation on two conditions or two integers"
        raise errors.DTypeMismatch(loc=here(), what=repr(spelled), got=got, expected=expected)
    if spelled == "^":
        return apply("or", apply("and", a, apply("not", b)), apply("and", apply("not", a), b))
    return apply("and" if spelled == "&" else "or", a, b)


def _address(tensor: Value, index: tuple[Operand, ...]) -> Value:
    """`bias[pos - key]`: the feature axes of a captured tensor, in order, addressed by integer expressions."""
    e = tensor.expr
    if not isinstance(e, Param) or e.index:
        raise errors.AxisMismatch(loc=here(), what=show(e), problem="only a captured tensor can be indexed")
    free = [a for a in e.own if a not in LOOP_AXES]
    if len(index) > len(free):
        problem = f"{len(index)} index expressions for its {len(free)} feature axes ({', '.join(free) or 'none'})"
        raise errors.AxisMismatch(loc=here(), what=e.name, problem=problem)
    pairs = []
    for axis, i in zip(free, index, strict=False):
        x = as_expr(i, "an index")
        if x.dtype.kind is not Kind.INT:
            raise errors.DTypeMismatch(
                loc=here(), what=f"index of {e.name}", got=x.dtype.name, expected="indices are integers"
            )
        pairs.append((axis, x))
    return Value(replace(e, index=tuple(pairs), loc=here()))


# ---- functions of values ---------------------------------------------------------------------------------------------


def exp(x: Operand) -> Value:
    return apply("exp", x)


def log(x: Operand) -> Value:
    return apply("log", x)


def sqrt(x: Operand) -> Value:
    return apply("sqrt", x)


def tanh(x: Operand) -> Value:
    return apply("tanh", x)


def sigmoid(x: Operand) -> Value:
    return 1.0 / (1.0 + exp(-as_value(x)))


def relu(x: Operand) -> Value:
    return maximum(x, 0.0)


def maximum(a: Operand, b: Operand) -> Value:
    return apply("max", a, b)


def minimum(a: Operand, b: Operand) -> Value:
    return apply("min", a, b)


def where(cond: Operand, a: Operand, b: Operand) -> Value:
    return apply("where", cond, a, b)


def to_float(x: Operand) -> Value:
    return apply("float", x)


def to_int(x: Operand) -> Value:
    return apply("int", x)


def as_value(x: Operand) -> Value:
    return x if isinstance(x, Value) else Value(as_expr(x, "a value"))


def dot(a: Operand, b: Operand, *, over: str | None = None) -> Value:
    """Sum of a * b over the one feature axis they share (or the named axis), accumulated in float32."""
    x, y = _as_float(a, "dot"), _as_float(b, "dot")
    shared = [n for n in x.axes if n in y.axes and n not in LOOP_AXES]
    axis = over or (shared[0] if len(shared) == 1 else None)
    if axis is None or axis not in x.axes or axis not in y.axes:
        problem = f"{show(x)} has axes [{', '.join(x.axes)}] and {show(y)} has [{', '.join(y.axes)}]; "
        problem += f"both need {axis!r}" if axis else "they must share exactly one feature axis, or name it with over="
        raise errors.AxisMismatch(loc=here(), what="dot", problem=problem)
    _not_over_rows("dot", axis)
    return Value(Dot(x, y, axis, here()))


def _as_float(x: Operand, what: str) -> Expr:
    """An operand of a sum of products, which floats make."""
    e = as_expr(x, what)
    if e.dtype.kind is Kind.BOOL:
        raise errors.DTypeMismatch(loc=here(), what=what, got="bool", expected="write where(cond, 1.0, 0.0)")
    return make_op("float", e) if e.dtype.kind is Kind.INT else e


def _not_over_rows(what: str, axis: str) -> None:
    if axis == "row":
        problem = "cannot reduce over 'row': rows are computed independently, and no tile need hold them all"
        raise errors.AxisMismatch(loc=here(), what=what, problem=problem)


def reduce_over(kind: str, x: Operand, axis: str) -> Value:
    """ "sum" or "max" over one axis of a tile; the key axis is folded, see `reducers`."""
    e = as_expr(x, kind)
    if axis not in e.axes:
        problem = f"cannot reduce over {axis!r}: {show(e)} has axes [{', '.join(e.axes)}]"
        raise errors.AxisMismatch(loc=here(), what=kind, problem=problem)
    if e.dtype.kind is Kind.BOOL:
        raise errors.DTypeMismatch(loc=here(), what=kind, got="bool", expected="write where(cond, 1.0, 0.0)")
    _not_over_rows(kind, axis)
    return Value(Reduction(kind, e, axis, here()))


pos = Value(Coord("pos", ("row",)))
key = Value(Coord("key", ("key",)))
head = Value(Coord("head", ("head",)))
kv_head = Value(Coord("kv_head"))
seq = Value(Coord("seq"))
num_keys = Value(Coord("num_keys"))

Predicate: TypeAlias = "Callable[[Value, Value], Value | bool]"
