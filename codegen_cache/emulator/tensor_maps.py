"""TMA descriptors as the emulator reads them, checked against the limits that cuTensorMapEncodeTiled documents."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

from tilewright.codegen_cache.device_source import Number, TensorMap, evaluate

_SIZES: Final = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)  # bytes of CUtensorMapDataType 0 to 12
_FIRST_FLOAT: Final = 6
_SPANS: Final = {1: 32, 2: 64, 3: 128}  # bytes of CUtensorMapSwizzle


class EncodedMap(ctypes.Structure):
    """CUtensorMap of runtime/interface.hpp."""

    _fields_ = [
        ("base", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint16 * 5),
        ("element_strides", ctypes.c_uint8 * 5),
        ("rank", ctypes.c_uint8),
        ("element_bytes", ctypes.c_uint8),
        ("swizzle", ctypes.c_uint8),
        ("nan_fill", ctypes.c_uint8),
        ("is_float", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 23),
    ]


def encode(spec: TensorMap, base: int, names: Mapping[str, Number]) -> EncodedMap:
    """The descriptor of a tensor at address `base`. Raises ValueError for what the driver would refuse."""
    lists = (spec.dims, spec.strides, spec.box, spec.element_strides)
    dims, strides, box, steps = ([int(evaluate(e, names)) for e in values] for values in lists)
    problem = _problem(spec, base, dims, strides, box, steps)
    if problem:
        raise ValueError(f"tensor map of {spec.tensor}: {problem}")
    m = EncodedMap(base=base, rank=len(dims), element_bytes=_SIZES[spec.dtype], swizzle=spec.swizzle)
    m.nan_fill, m.is_float = spec.oob_fill, spec.dtype >= _FIRST_FLOAT
    for d in range(len(dims)):
        m.dims[d], m.box[d], m.element_strides[d] = dims[d], box[d], steps[d]
        if d:
            m.strides[d - 1] = strides[d]
    return m


def _problem(
    spec: TensorMap, base: int, dims: list[int], strides: list[int], box: list[int], steps: list[int]
) -> str | None:
    inner, span = box[0] * _SIZES[spec.dtype], _SPANS.get(spec.swizzle)
    if not 1 <= len(dims) <= 5:
        return f"rank {len(dims)}, not 1 to 5"
    if spec.interleave:
        return "interleaved layouts are not emulated"
    if base % 16:
        return f"address {base:#x} is not a multiple of 16"
    if not all(1 <= d <= 2**32 for d in dims):
        return f"sizes {dims}, not 1 to 2**32"
    if not all(1 <= b <= 256 for b in box):
        return f"box {box}, not 1 to 256"
    if not all(1 <= s <= 8 for s in steps):
        return f"element strides {steps}, not 1 to 8"
    if not all(s % 16 == 0 and 0 <= s < 2**40 for s in strides[1:]):
        return f"byte strides {strides[1:]} are not multiples of 16 below 2**40"
    if inner % 16:
        return f"the inner box has {inner} bytes, not a multiple of 16"
    if span is not None and inner != span:
        return f"the inner box has {inner} bytes, the swizzle {span}"
    return None
