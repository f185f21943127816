"""The one table of scalar operations: arity, result type, meaning on numbers and on tiles, spelling.

A backend that needs another form adds a column; `tests/test_scalars.py` walks every row and every column.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .dtypes import DType, Kind, boolean, f32, i32

Number: TypeAlias = int | float | bool
TypeRule: TypeAlias = Callable[[tuple[DType, ...]], DType | None]


def _numbers(*types: DType) -> bool:
    return all(t.kind is not Kind.BOOL for t in types)


def _ints(*types: DType) -> bool:
    return all(t.kind is Kind.INT for t in types)


def arithmetic(args: tuple[DType, ...]) -> DType | None:
    """Integers stay integers; one float makes the result float."""
    if not _numbers(*args):
        return None
    return i32 if _ints(*args) else f32


def integer(args: tuple[DType, ...]) -> DType | None:
    return i32 if _ints(*args) else None


def floating(args: tuple[DType, ...]) -> DType | None:
    return f32 if _numbers(*args) else None


def comparison(args: tuple[DType, ...]) -> DType | None:
    return boolean if _numbers(*args) else None


def logical(args: tuple[DType, ...]) -> DType | None:
    return boolean if all(t.kind is Kind.BOOL for t in args) else None


def choice(args: tuple[DType, ...]) -> DType | None:
    cond, a, b = args
    if cond.kind is not Kind.BOOL:
        return None
    return boolean if a.kind is b.kind is Kind.BOOL else arithmetic((a, b))


def to_float(args: tuple[DType, ...]) -> DType | None:
    return f32


def to_int(args: tuple[DType, ...]) -> DType | None:
    return i32


# Numbers follow IEEE where Python would raise: a tile operation never does.
def _div(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _floordiv(a: int, b: int) -> int:
    return a // b if b else 0  # as numpy has it, and no target may trap


def _mod(a: int, b: int) -> int:
    return a % b if b else 0


def _exp(a: float) -> float:
    return math.inf if a > 709.0 else math.exp(a)


def _log(a: float) -> float:
    return math.log(a) if a > 0 else (-math.inf if a == 0 else math.nan)


def _sqrt(a: float) -> float:
    return math.sqrt(a) if a >= 0 else math.nan


def _max(a: float, b: float) -> float:
    return a if math.isnan(a) else b if math.isnan(b) else max(a, b)


def _min(a: float, b: float) -> float:
    return a if math.isnan(a) else b if math.isnan(b) else min(a, b)


def _bits(a: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", a))
    return int(bits)


def _from_bits(a: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<i", a))
    return float(value)


@dataclass(frozen=True)
class Row:
    """One scalar operation."""

    arity: int
    rule: TypeRule
    number: Callable[..., Number]  # on Python numbers
    torch: str  # function of the torch namespace, on tiles
    infix: str | None = None  # spelling between two operands; None: called by name


OPS: dict[str, Row] = {
    "add": Row(2, arithmetic, operator.add, "add", "+"),
    "sub": Row(2, arithmetic, operator.sub, "sub", "-"),
    "mul": Row(2, arithmetic, operator.mul, "mul", "*"),
    "div": Row(2, floating, _div, "div", "/"),
    "floordiv": Row(2, integer, _floordiv, "floor_divide", "//"),
    "mod": Row(2, integer, _mod, "remainder", "%"),
    "max": Row(2, arithmetic, _max, "maximum"),
    "min": Row(2, arithmetic, _min, "minimum"),
    "abs": Row(1, arithmetic, abs, "abs"),
    "le": Row(2, comparison, operator.le, "le", "<="),
    "lt": Row(2, comparison, operator.lt, "lt", "<"),
    "eq": Row(2, comparison, operator.eq, "eq", "=="),
    "ne": Row(2, comparison, operator.ne, "ne", "!="),
    "and": Row(2, logical, lambda a, b: bool(a and b), "logical_and", "and"),
    "or": Row(2, logical, lambda a, b: bool(a or b), "logical_or", "or"),
    "not": Row(1, logical, operator.not_, "logical_not"),
    "bitand": Row(2, integer, operator.and_, "bitwise_and", "&"),
    "bitor": Row(2, integer, operator.or_, "bitwise_or", "|"),
    "bitxor": Row(2, integer, operator.xor, "bitwise_xor", "^"),
    "shl": Row(2, integer, operator.lshift, "bitwise_left_shift", "<<"),
    "shr": Row(2, integer, operator.rshift, "bitwise_right_shift", ">>"),
    "where": Row(3, choice, lambda c, a, b: a if c else b, "where"),
    "exp": Row(1, floating, _exp, "exp"),
    "log": Row(1, floating, _log, "log"),
    "sqrt": Row(1, floating, _sqrt, "sqrt"),
    "tanh": Row(1, floating, math.tanh, "tanh"),
    "bits": Row(1, to_int, _bits, "bits"),  # a float32's bits as a signed integer
    "from_bits": Row(1, to_float, _from_bits, "from_bits"),
    "float": Row(1, to_float, float, "float"),
    "int": Row(1, to_int, int, "int"),
}
