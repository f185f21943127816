"""What a call is known by when it is made again: all that its checks and its code depend on, but for values in tensors.

Two calls of equal keys have equal settings (operator, constants, options, target, schedule) of equal types, the same
environment, and arguments of the same dtypes, shapes and strides, on the CPU or not, present or absent. So whatever was
concluded from these for one holds for the other. (Calls elsewhere than on the CPU are never prepared.)
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import FunctionType, NoneType
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tilewright.dsl import knobs
from tilewright.dsl.constants import identity
from tilewright.dsl.dtypes import DType
from tilewright.dsl.errors import ArgumentError
from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.spec import ParamKind

from .bind import LEAF_TENSORS
from .checks import as_tensor, is_writable

Named: TypeAlias = Mapping[str, object]
Key: TypeAlias = tuple[object, ...]
Given: TypeAlias = tuple[Named, Named, Named, Named]  # tensors, leaves, numbers, and buffers that are written
Facts: TypeAlias = tuple[Key, list[Tensor], list[object], Given]  # the key, the call's tensors, its numbers

# Immutable, and of one type, equal ones are the same. (A tuple is what `identity` makes of a constant.)
_SETTINGS: Final = frozenset(
    {NoneType, bool, int, str, type, tuple, torch.dtype, FunctionType, DType, Schedule, Operator}
)
_CONSTANTS: Final = frozenset({NoneType, bool, int, str, FunctionType})
_of_tensor = attrgetter("is_cpu", "dtype", "shape")
_leaf_tensors = attrgetter(*LEAF_TENSORS.values())
_NOTHING: Final[Named] = {}


def facts_of(settings: Key, given: Given) -> Facts | None:
    """What a call is known by; its tensors and numbers are in the order of `names_of`. An argument of None is absent.

    settings: what decides, beside the arguments, how they are checked and what is run; and the arguments' names, where
    these are not always the same.

    None for what is refused on sight, and for settings that might change under the same key.
    """
    types = tuple(map(type, settings))
    if not _SETTINGS.issuperset(types):
        return None
    tensors, leaves, numbers, buffers = given
    key: list[object] = [settings, types, knobs.environment()]
    own: list[Tensor] = []
    values: list[object] = []
    try:
        for n, t in tensors.items():
            if type(t) is Tensor:
                own.append(t)
            else:
                _add(n, t, key, own)
        for n, leaf in leaves.items():
            if leaf is None:
                key.append(n)
                continue
            key += (type(leaf), leaf.quantization_granularity)  # type: ignore[attr-defined]  # or AttributeError
            for n, t in zip(LEAF_TENSORS, _leaf_tensors(leaf), strict=True):
                if type(t) is Tensor:
                    own.append(t)
                elif isinstance(t, np.ndarray):  # of a leaf made by hand
                    return None
                else:
                    _add(n, t, key, own)
        for n, t in buffers.items():
            if not is_writable(t):
                return None
            _add(n, t, key, own)
        for v in numbers.values():
            if v is None:
                key.append(None)
                continue
            number = v if type(v) is float else _number(v)
            key.append(type(number))  # decides whether it is a number; which one is a matter of the call
            values.append(number)
        key += map(_of_tensor, own)
        key += map(Tensor.stride, own)
    except (ArgumentError, AttributeError, RuntimeError):  # not a tensor, not a leaf, a tensor without strides
        return None
    return tuple(key), own, values, given


def _add(name: str, t: object, key: list[object], own: list[Tensor]) -> None:
    if type(t) is Tensor:
        own.append(t)
    elif t is None:
        key.append(name)
    elif type(t) is torch.nn.Parameter:  # any other class of tensors may do as it likes
        own.append(t)
    elif isinstance(t, np.ndarray):
        own.append(as_tensor("", name, t))
    else:
        raise AttributeError(name)


def _number(v: object) -> object:
    """As `bind` takes it: a tensor of one element is that element."""
    return v.item() if isinstance(v, Tensor | np.ndarray) and len(v.reshape(-1)) == 1 else v


def facts_of_run(
    operator: Operator,
    arguments: Named,
    offsets: object,
    constants: Named | None,
    outputs: Named | None,
    output_dtypes: Mapping[str, DType] | None,
    schedule: Schedule | None,
    partitions: int | None,
    target: str | None,
) -> Facts | None:
    """What a call of `run` is known by."""
    constants, outputs, dtypes = constants or _NOTHING, outputs or _NOTHING, output_dtypes or _NOTHING
    try:
        values = [v if type(v) in _CONSTANTS else identity(v) for v in constants.values()]
    except TypeError:
        return None
    counts = len(constants), len(dtypes), len(arguments)
    named = (*constants, *values, *dtypes, *dtypes.values(), *arguments, *outputs)
    kinds = operator.kinds
    if not kinds.keys() >= arguments.keys():
        return None
    tensors = {n: v for n, v in arguments.items() if kinds[n] is ParamKind.TENSOR}
    leaves = {n: v for n, v in arguments.items() if kinds[n] is ParamKind.PAGED}
    numbers = {n: v for n, v in arguments.items() if kinds[n] is ParamKind.SCALAR}
    settings = (operator, schedule, partitions, target, *counts, *named)
    return facts_of(settings, ({"offsets": offsets, **tensors}, leaves, numbers, outputs))


def names_of(given: Given) -> tuple[list[str], list[str]]:
    """What kernels call a call's tensors, and its numbers."""
    tensors, leaves, numbers, buffers = given
    names = [n for n, t in tensors.items() if t is not None]
    for n, leaf in leaves.items():
        if leaf is not None:
            names += (f"{n}_{x}" for x, a in LEAF_TENSORS.items() if getattr(leaf, a) is not None)
    return [*names, *(n for n, t in buffers.items() if t is not None)], [n for n, v in numbers.items() if v is not None]
