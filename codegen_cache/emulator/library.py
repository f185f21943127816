"""An emulation library in this process."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from tilewright.codegen_cache.native import load

from .schedules import Policy


class Dim3(ctypes.Structure):
    """dim3 of runtime/interface.hpp."""

    _fields_ = [(c, ctypes.c_uint32) for c in "xyz"]


class LaunchRecord(ctypes.Structure):
    """struct Launch of runtime/runtime.cpp."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", Dim3),
        ("block", Dim3),
        ("shared_bytes", ctypes.c_uint64),
        ("policy", Policy),
        ("error", ctypes.c_char_p),
        ("overtaken_waits", ctypes.c_int64),
        ("stack", ctypes.c_int64 * 24),
        ("depth", ctypes.c_int32),
    ]


def _function(address: int, result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)(address)


class EmulationLibrary:
    """The runtime's functions, in one translated source's library. Not for several threads at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        at = load(path).address
        self._open = _function(at("tw_open_tensor"), ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)
        self._written = _function(at("tw_written"), ctypes.c_int, ctypes.c_int)
        self._close = _function(at("tw_close_tensors"), None)
        self._launch = _function(at("tw_launch"), ctypes.c_int, ctypes.POINTER(LaunchRecord))

    def open_tensor(self, name: str, size: int, offset: int) -> int:
        """Address of `size` bytes with nothing near them, `offset` behind a multiple of 1024. Raises MemoryError."""
        address = self._open(name.encode(), size, offset)
        if not address:
            raise MemoryError(f"no room for {name} in emulated device memory")
        return int(address)

    def written(self, index: int) -> bool:
        """Whether the tensor that was opened as the index-th has been written to."""
        return bool(self._written(index))

    def close_tensors(self) -> None:
        self._close()

    def launch(self, record: LaunchRecord) -> bool:
        """Run a kernel; whether it failed."""
        return bool(self._launch(ctypes.byref(record)))


_LIBRARIES: dict[Path, EmulationLibrary] = {}


def library_at(path: Path) -> EmulationLibrary:
    """The library, loaded once."""
    if path not in _LIBRARIES:
        _LIBRARIES[path] = EmulationLibrary(path)
    return _LIBRARIES[path]
