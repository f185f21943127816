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
_KNOWN: Final = _SETTINGS | {Tensor, torch.nn.Parameter}  # any other class of tensors may do as it likes
_TENSOR, _PAGED = ParamKind.TENSOR, ParamKind.PAGED  # members of an Enum are slow to get at
_of_tensor = attrgetter("is_cpu", "dtype", "shape")
_of_leaf = attrgetter(*LEAF_TENSORS.values())
_granularity = attrgetter("quantization_granularity")
_NOTHING: Final[Named] = {}


def facts_of(settings: Key, given: Given) -> Facts | None:
    """What a call is known by; its tensors and numbers are in the order of `names_of`. An argument of None is absent.

    settings: what decides, beside the arguments, how they are checked and what is run; and the arguments' names, where
    these are not always the same.

    None for what is refused on sight, and for some settings that might change under the same key (`may_be_kept`).

    Every call pays for this: it asks each tensor once, for what may change under the same object. Tensors are resized
    and given other memory in place, so that all of it may.
    """
    tensors, leaves, numbers, buffers = given
    objects = [*tensors.values(), *buffers.values()]
    kinds: list[object] = []  # of leaves and of numbers
    values: list[object] = []
    try:
        for leaf in leaves.values():
            kinds.append(type(leaf))
            if leaf is not None:
                objects += _of_leaf(leaf)
                settings += (_granularity(leaf),)
        types = (*map(type, settings), *map(type, objects))
        if not _KNOWN.issuperset(types):
            _take_arrays(objects, given)
            types = (*map(type, settings), *map(type, objects))
            if not _KNOWN.issuperset(types):
                return None
        for v in numbers.values():
            number = v if type(v) is float else _number(v)
            kinds.append(type(number))  # decides whether it is a number; which one is a matter of the call
            if number is not None:
                values.append(number)
        own: list[Tensor] = [t for t in objects if t is not None]  # type: ignore[misc]  # or AttributeError
        metadata = (*map(_of_tensor, own), *map(Tensor.stride, own))
    except (ArgumentError, AttributeError, RuntimeError, TypeError):  # no leaf, no tensor, a tensor without strides
        return None
    return (types, settings, knobs.environment(), *kinds, *metadata), own, values, given


def may_be_kept(facts: Facts) -> bool:
    """Whether settings are of types that stay as they are. Types stand first in a key, so that none is compared with
    settings of others.
    """
    _, settings, *_ = facts[0]
    return isinstance(settings, tuple) and _SETTINGS.issuperset(map(type, settings))


def _take_arrays(objects: list[object], given: Given) -> None:
    """Arrays become tensors on the same memory, but those of leaves, and none where a buffer is read-only."""
    tensors, _, _, buffers = given
    if all(map(is_writable, buffers.values())):
        for i, v in enumerate(objects[: len(tensors) + len(buffers)]):
            if isinstance(v, np.ndarray):
                objects[i] = as_tensor("", "", v)


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
    tensors: dict[str, object] = {"offsets": offsets}
    leaves: dict[str, object] = {}
    numbers: dict[str, object] = {}
    for n, v in arguments.items():
        kind = kinds[n]
        (tensors if kind is _TENSOR else leaves if kind is _PAGED else numbers)[n] = v
    settings = (operator, schedule, partitions, target, *counts, *named)
    return facts_of(settings, (tensors, leaves, numbers, outputs))


def names_of(given: Given) -> tuple[list[str], list[str]]:
    """What kernels call a call's tensors, and its numbers."""
    tensors, leaves, numbers, buffers = given
    names = [n for n, t in (*tensors.items(), *buffers.items()) if t is not None]
    for n, leaf in leaves.items():
        if leaf is not None:
            names += (f"{n}_{x}" for x, a in LEAF_TENSORS.items() if getattr(leaf, a) is not None)
    return names, [n for n, v in numbers.items() if v is not None]
