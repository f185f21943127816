"""Checks of a call's arguments, shared by the cache and every operator.

Each check takes the name of the call (`op`) and of the argument as its caller wrote it, returns or passes on what it
checked, and raises one of the `Argument*` errors of `dsl/errors.py`, which say what was found and what was expected.
Shapes, dtypes, devices and strides are checked everywhere; *values* only where reading them is free (`checks_values`).
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tilewright.dsl.errors import (
    ArgumentDeviceError,
    ArgumentDTypeError,
    ArgumentLayoutError,
    ArgumentRankError,
    ArgumentShapeError,
    ArgumentTypeError,
    ArgumentValueError,
)

Array: TypeAlias = Tensor | np.ndarray[Any, Any]
Extent: TypeAlias = int | range | None

ANY: Final[Extent] = None
POSITIVE: Final = range(1, sys.maxsize)
NON_NEGATIVE: Final = range(sys.maxsize)

INDEX_DTYPES: Final = (torch.int32, torch.int64, torch.uint32)
ROW_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES: Final = (*ROW_DTYPES, torch.float8_e4m3fn)
SCALE_DTYPES: Final = (torch.float32,)


def as_tensor(op: str, argument: str, value: object) -> Tensor:
    """`value` as a tensor on the same memory: a torch tensor as it is, a numpy array viewed, never copied.

    Raises ArgumentTypeError for anything else, ArgumentDTypeError for a numpy dtype that torch does not have (foreign
    byte order included), ArgumentLayoutError for numpy strides that torch cannot express (negative, or off elements).
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            got = f"{_name(value.layout)} tensor"
            raise ArgumentTypeError(op=op, argument=argument, got=got, expected="a dense tensor")
        return value
    if not isinstance(value, np.ndarray):
        expected = "a torch tensor or a numpy array"
        raise ArgumentTypeError(op=op, argument=argument, got=type(value).__name__, expected=expected)
    if not value.dtype.isnative:
        raise ArgumentDTypeError(op=op, argument=argument, got=value.dtype.str, expected="the machine's byte order")
    try:
        with warnings.catch_warnings():
            # Reading from a read-only array is sound, and whoever writes asks `is_writable`.
            warnings.filterwarnings("ignore", message=".*not writable")
            return torch.from_numpy(value)
    except TypeError:
        expected = "a numpy dtype that torch has too"
        raise ArgumentDTypeError(op=op, argument=argument, got=value.dtype, expected=expected) from None
    except ValueError:
        got, expected = f"{list(value.strides)} bytes", "non-negative multiples of the element size"
        raise ArgumentLayoutError(op=op, argument=argument, got=got, expected=expected) from None


def is_writable(value: object) -> bool:
    """False for a numpy array without the writeable flag, such as a read-only memory map; torch has no such flag."""
    return not isinstance(value, np.ndarray) or bool(value.flags.writeable)


def expect_rank(op: str, argument: str, tensor: Tensor, *axes: str) -> None:
    """One axis for each name in `axes`, else ArgumentRankError."""
    if tensor.dim() != len(axes):
        expected = f"{len(axes)}: [{', '.join(axes)}]"
        raise ArgumentRankError(op=op, argument=argument, got=tensor.dim(), expected=expected)


def expect_shape(op: str, argument: str, tensor: Tensor, /, **axes: Extent) -> None:
    """The rank and the extents of `axes`, in order: a number, a `range` of numbers (`POSITIVE`), or `ANY`.

    Raises ArgumentRankError or ArgumentShapeError; both show every axis by name with the extent it should have.
    """
    if tensor.dim() == len(axes) and all(map(_fits, tensor.shape, axes.values())):
        return
    shown = [name if extent is None else f"{name}{_extent(extent)}" for name, extent in axes.items()]
    expect_rank(op, argument, tensor, *shown)
    raise ArgumentShapeError(op=op, argument=argument, got=list(tensor.shape), expected=f"[{', '.join(shown)}]")


def expect_dtype(op: str, argument: str, tensor: Tensor, dtypes: Collection[torch.dtype], why: str = "") -> None:
    """A dtype out of `dtypes`, else ArgumentDTypeError; `why` ends the message where the choice needs a reason."""
    if tensor.dtype not in dtypes:
        expected = one_of([_name(dtype) for dtype in dtypes]) + (f", {why}" if why else "")
        raise ArgumentDTypeError(op=op, argument=argument, got=_name(tensor.dtype), expected=expected)


def expect_same_device(op: str, argument: str, tensor: Tensor, like_argument: str, like: Tensor) -> None:
    """The device of `like`, which the message calls `like_argument`; else ArgumentDeviceError."""
    if tensor.device != like.device:
        expected = f"{like.device}, where {like_argument} is"
        raise ArgumentDeviceError(op=op, argument=argument, got=tensor.device, expected=expected)


def expect_contiguous_last(op: str, argument: str, tensor: Tensor) -> None:
    """Stride 1 on the last axis, whatever the others are; else ArgumentLayoutError. An axis of one element passes."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        expected = "a contiguous last axis (stride 1)"
        raise ArgumentLayoutError(op=op, argument=argument, got=list(tensor.stride()), expected=expected)


def expect_distinct_elements(op: str, argument: str, tensor: Tensor) -> None:
    """No two elements in one place, as `expand` and overlapping strides make; else ArgumentLayoutError. For what is
    written.
    """
    reach = 0
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: axis[1]):
        if size > 1 and stride <= reach:
            expected = "elements that do not overlap, as it is written to"
            raise ArgumentLayoutError(op=op, argument=argument, got=list(tensor.stride()), expected=expected)
        reach += (size - 1) * stride


def expect_apart(op: str, argument: str, tensor: Tensor, others: Mapping[str, Tensor]) -> None:
    """No memory shared with tensors that are read while this one is written; the very same view counts as in place."""
    first, end = _bytes_of(tensor)
    for name, other in others.items():
        low, high = _bytes_of(other)
        same = (low, other.shape, other.stride()) == (first, tensor.shape, tensor.stride())
        if tensor.numel() and other.numel() and low < end and first < high and not same:
            raise ArgumentLayoutError(
                op=op, argument=argument, got=list(tensor.stride()), expected=f"memory that {name} does not share"
            )


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """First address, and the one past the last, that a tensor's elements lie between."""
    return tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor)


def extent_bytes(tensor: Tensor) -> int:
    """From the first byte of a tensor to the one past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def expect_int(op: str, argument: str, value: object, allowed: range) -> int:
    """`value` as an int out of `allowed`; numpy integers pass, bools do not. ArgumentTypeError, ArgumentValueError."""
    expected = f"an integer{_extent(allowed)}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the TypeError is what is asked for
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ArgumentTypeError(op=op, argument=argument, got=type(value).__name__, expected=expected)
    if number not in allowed:
        raise ArgumentValueError(op=op, argument=argument, got=number, expected=expected)
    return number


def expect_choice(op: str, argument: str, value: object, choices: Sequence[str]) -> None:
    """One of the names in `choices`, else ArgumentValueError, which lists them."""
    if value not in choices:
        expected = one_of([repr(choice) for choice in choices])
        raise ArgumentValueError(op=op, argument=argument, got=repr(value), expected=expected)


def checks_values(tensor: Tensor) -> bool:
    """Whether the values of `tensor` may be read to check them: on the CPU; elsewhere that waits for the device."""
    return tensor.device.type == "cpu"


def expect_non_negative(op: str, argument: str, tensor: Tensor) -> None:
    """No negative value in a 1-D index tensor, else ArgumentValueError naming the first. Where values are checked."""
    if checks_values(tensor) and (bad := first_true(widened(tensor) < 0)) is not None:
        (at,) = bad
        raise ArgumentValueError(op=op, argument=f"{argument}[{at}]", got=int(tensor[at]), expected="0 or more")


def expect_row_offsets(op: str, argument: str, offsets: Tensor, *, batch: int, rows: int | None = None) -> None:
    """Ragged offsets: [batch + 1] of an index dtype, from 0, non-decreasing and, where `rows` is given, ending at it.

    Raises the rank, shape and dtype errors anywhere, ArgumentValueError where values are checked.
    """
    expect_dtype(op, argument, offsets, INDEX_DTYPES)
    expect_shape(op, argument, offsets, **{"batch + 1": batch + 1})
    if not checks_values(offsets):
        return
    values = widened(offsets)
    if (first := int(values[0])) != 0:
        raise ArgumentValueError(op=op, argument=f"{argument}[0]", got=first, expected="0")
    if (bad := first_true(values.diff() < 0)) is not None:
        at = bad[0] + 1
        expected = f"at least {argument}[{at - 1}] = {int(values[at - 1])}"
        raise ArgumentValueError(op=op, argument=f"{argument}[{at}]", got=int(values[at]), expected=expected)
    if rows is not None and (last := int(values[batch])) != rows:
        expected = f"{rows}, the number of rows"
        raise ArgumentValueError(op=op, argument=f"{argument}[{batch}]", got=last, expected=expected)


def widened(index: Tensor) -> Tensor:
    """An index tensor in int64: torch has hardly any uint32 arithmetic, and addresses need 64 bits."""
    return index.to(torch.int64)


def first_true(mask: Tensor) -> tuple[int, ...] | None:
    """The index of the first true element of a host tensor, in row-major order."""
    return tuple(mask.nonzero()[0].tolist()) if bool(mask.any()) else None


def one_of(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _name(of: torch.dtype | torch.layout) -> str:
    return str(of).removeprefix("torch.")


def _fits(size: int, extent: Extent) -> bool:
    return extent is None or (size in extent if isinstance(extent, range) else size == extent)


def _extent(extent: int | range) -> str:
    if isinstance(extent, int):
        return f"={extent}"
    if extent.step > 1:
        return f" in multiples of {extent.step}"
    return f" >= {extent.start}" if extent.stop == sys.maxsize else f" in {extent.start}..{extent.stop - 1}"
