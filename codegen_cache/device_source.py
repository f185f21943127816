"""A generated GPU source with all that the host must know to launch it, as plain data.

Sizes that are known only when tensors are there are expressions over the names of dynamic sizes, in a small part of
Python's syntax: see `evaluate`.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

from tilewright.dsl.gpu import GPUS, Gpu

Number = int | float
ARCHS: Final[dict[str, Gpu]] = {g.name: g for g in GPUS.values()}  # by the name in `DeviceSource.arch`


@dataclass(frozen=True)
class TensorParam:
    """A tensor the caller passes. A size or stride that is a bare name takes its value from the tensor."""

    name: str
    dtype: str  # torch's spelling
    shape: tuple[str, ...]
    strides: tuple[str, ...]  # in elements


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor, as cuTensorMapEncodeTiled takes it: innermost dimension first, strides in bytes.

    dtype, interleave, swizzle, l2_promotion and oob_fill are values of the driver's enumerations.
    """

    name: str
    tensor: str
    dtype: int
    dims: tuple[str, ...]
    strides: tuple[str, ...]  # of every dimension, the first included
    box: tuple[str, ...]
    element_strides: tuple[str, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int


@dataclass(frozen=True)
class KernelArg:
    """One argument of a kernel, in the kernel's order."""

    kind: str  # "pointer", "map" or "scalar"
    value: str  # the tensor, the tensor map, or an expression
    dtype: str  # of what is pointed at, or of the scalar; torch's spelling. Empty for a map


@dataclass(frozen=True)
class Launch:
    """One kernel launch. A grid with no block is not launched."""

    kernel: str
    args: tuple[KernelArg, ...]
    grid: tuple[str, str, str]
    block: tuple[str, str, str]
    shared_bytes: str  # dynamic shared memory


@dataclass(frozen=True)
class DeviceSource:
    """Source text for one architecture, and its launches in the order they run in."""

    text: str
    arch: str
    tensors: tuple[TensorParam, ...]
    launches: tuple[Launch, ...]
    tensor_maps: tuple[TensorMap, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> DeviceSource:
        data = json.loads(text)
        tensors = tuple(TensorParam(**_tupled(d)) for d in data["tensors"])
        maps = tuple(TensorMap(**_tupled(d)) for d in data["tensor_maps"])
        launches = []
        for d in data["launches"]:
            args = tuple(KernelArg(**a) for a in d.pop("args"))
            launches.append(Launch(args=args, **_tupled(d)))
        return cls(data["text"], data["arch"], tensors, tuple(launches), maps)


def _tupled(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


# ---- sizes -----------------------------------------------------------------------------------------------------------

_BINARY: Final[dict[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: lambda a, b: int(a) << int(b),
    ast.RShift: lambda a, b: int(a) >> int(b),
    ast.BitAnd: lambda a, b: int(a) & int(b),
}
_COMPARE: Final[dict[type[ast.cmpop], Callable[[Number, Number], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def evaluate(expression: str, names: Mapping[str, Number]) -> Number:
    """The value of a size: numbers, names, + - * // % << >> &, comparisons, and, or, min, max, `a if c else b`.

    Raises KeyError for a name that is not there, ValueError for anything else in the text.
    """
    return _value(_parsed(expression), names)


@cache
def _parsed(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise ValueError(f"not a size: {expression!r}") from None


def _value(e: ast.expr, names: Mapping[str, Number]) -> Number:
    match e:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return -_value(a, names)
        case ast.BinOp(left=a, op=op, right=b) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(a, names), _value(b, names))
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_value(a, names), _value(b, names))
        case ast.BoolOp(op=op, values=values):
            join = all if isinstance(op, ast.And) else any
            return join(bool(_value(v, names)) for v in values)
        case ast.IfExp(test=c, body=a, orelse=b):
            return _value(a, names) if _value(c, names) else _value(b, names)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=[]):
            return (min if name == "min" else max)(_value(a, names) for a in args)
    raise ValueError(f"not a size: {ast.unparse(e)!r}")
