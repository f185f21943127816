"""Tensors in emulated device memory, each alone in a large stretch of addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import TracebackType
from typing import Final

import torch
from torch import Tensor

from tilewright.codegen_cache.device_source import DeviceSource, Number, TensorParam, evaluate

from .library import EmulationLibrary

_OFFSETS: Final = 512  # an allocation on a device starts at a multiple of this


def bound_names(
    source: DeviceSource, tensors: Mapping[str, Tensor], scalars: Mapping[str, Number]
) -> dict[str, Number]:
    """Values of all names in the sizes of `source`. Raises ValueError where a tensor is not what the source takes."""
    names = dict(scalars)
    for p in source.tensors:
        if p.name not in tensors:
            raise ValueError(f"no tensor {p.name}")
        _bind(p, tensors[p.name], names)
    for p in source.tensors:
        t = tensors[p.name]
        for what, expected, found in (("shape", p.shape, t.shape), ("strides", p.strides, t.stride())):
            try:
                wanted = [int(evaluate(e, names)) for e in expected]
            except KeyError as e:
                raise ValueError(f"{p.name}: no value for {e.args[0]}") from None
            if what == "strides":  # of an axis of one, any will do
                wanted = [s if n > 1 else f for s, n, f in zip(wanted, t.shape, found, strict=True)]
            if t.numel() and wanted != list(found):
                raise ValueError(f"{p.name} has {what} {list(found)}, expected {wanted}")
    return names


def _bind(p: TensorParam, t: Tensor, names: dict[str, Number]) -> None:
    if t.device.type != "cpu":
        raise ValueError(f"{p.name} is on {t.device}, expected the CPU")
    if len(p.shape) != t.ndim:
        raise ValueError(f"{p.name} has rank {t.ndim}, expected {len(p.shape)}")
    if str(t.dtype) != f"torch.{p.dtype}":
        raise ValueError(f"{p.name} has dtype {t.dtype}, expected {p.dtype}")
    for e, n in (*zip(p.shape, t.shape, strict=True), *zip(p.strides, t.stride(), strict=True)):
        if e.isidentifier():
            names.setdefault(e, n)


class DeviceTensors:
    """Copies of tensors in device memory, with their strides; what lies between their elements holds NaN bits."""

    def __init__(self, library: EmulationLibrary, source: DeviceSource, tensors: Mapping[str, Tensor]) -> None:
        self._library = library
        self._host = {p.name: tensors[p.name] for p in source.tensors}
        self._device: dict[str, Tensor] = {}

    def __enter__(self) -> DeviceTensors:
        try:
            for name, t in self._host.items():
                self._device[name] = self._place(name, t)
        except BaseException:
            self._library.close_tensors()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._device.clear()
        self._library.close_tensors()

    def _place(self, name: str, t: Tensor) -> Tensor:
        elements = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        size = elements * t.element_size()
        start = int(t.storage_offset()) * t.element_size() % _OFFSETS  # alignment is what it would be on a device
        address = self._library.open_tensor(name, size, start)
        if not size:
            return t.new_empty(t.shape)
        raw = (ctypes.c_uint8 * size).from_address(address)
        memory = torch.frombuffer(raw, dtype=torch.uint8)
        memory.fill_(0xFF)
        view = memory.view(t.dtype).as_strided(t.shape, t.stride())
        return view.copy_(t)

    def address(self, name: str) -> int:
        return self._device[name].data_ptr()

    def copy_back(self) -> frozenset[str]:
        """What was written goes to the caller's tensors. Returns their names."""
        written = [name for i, name in enumerate(self._host) if self._library.written(i)]
        for name in written:
            self._host[name].copy_(self._device[name])
        return frozenset(written)
