"""Compile-time constants of operators: what tells them apart."""

from __future__ import annotations

from types import FunctionType

from .dtypes import DType


def identity(value: object) -> object:
    """What tells constants apart: 1 is not 1.0 nor True, inside tuples either. Raises TypeError for any other kind."""
    match value:
        case tuple():
            return (type(value), *map(identity, value))
        case bool() | int() | float() | str() | None:
            return (type(value), repr(value))
        case FunctionType() | DType():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} constants are read anew at each trace")
