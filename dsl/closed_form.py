"""Closed forms of run-time lengths, evaluated for many sequences at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .expr import Const, Expr, Op, Param, Var
from .printer import show
from .scalars import OPS

Ints: TypeAlias = npt.NDArray[np.int64]

# The table's torch names are numpy's names too, for integer operations, but for these.
_NUMPY = {"sub": "subtract", "mul": "multiply", "le": "less_equal", "lt": "less", "eq": "equal", "ne": "not_equal"}


def evaluate(e: Expr, known: Mapping[str, Ints]) -> Ints:
    """An integer expression over scalars, elementwise over arrays of their values."""
    match e:
        case Const(value):
            return np.asarray(int(value), np.int64)
        case Var(name) | Param(name, (), _, ()):
            return known[name]
        case Op(name, args):
            result: Ints = getattr(np, _NUMPY.get(name, OPS[name].torch))(*(evaluate(a, known) for a in args))
            return result
        case _:
            raise ValueError(f"not a closed form: {show(e)}")
