"""Compiled libraries in this process, and calls into them."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from struct import Struct
from typing import Final

from tilewright.dsl.errors import LoadError

ENTRY: Final = "tw_program"


class NativeLibrary:
    """A shared library, loaded for the life of the process: code that a thread may be running is never unloaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as e:
            raise LoadError(path=path, problem=str(e).removeprefix(f"{path}: ")) from None

    def address(self, name: str) -> int:
        """Where a function is."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise LoadError(path=self.path, problem=f"it has no function {name}") from None
        return ctypes.cast(function, ctypes.c_void_p).value or 0


_LIBRARIES: dict[Path, NativeLibrary] = {}
_LOCK = threading.Lock()


def load(path: Path) -> NativeLibrary:
    """The library at `path`, loaded once. Raises LoadError."""
    if path in _LIBRARIES:
        return _LIBRARIES[path]
    with _LOCK:
        if path not in _LIBRARIES:
            _LIBRARIES[path] = NativeLibrary(path)
        return _LIBRARIES[path]


def _new_lock() -> None:
    """A forked child may find the lock held by a thread that it does not have."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)

# ---- calls -----------------------------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    """struct tw_args { void **data; const int64_t *strides; const int64_t *sizes; const double *numbers; }"""

    _fields_ = [(n, ctypes.c_void_p) for n in ("data", "strides", "sizes", "numbers")]


class _Frame:
    """Memory for the arguments of one call: the four arrays of a tw_args in a row, and the tw_args."""

    def __init__(self, pointers: int, strides: int, sizes: int, numbers: int) -> None:
        ends = [0, pointers, pointers + strides, pointers + strides + sizes]
        self.words = (ctypes.c_int64 * max(1, ends[3] + numbers))()
        first = ctypes.addressof(self.words)
        self.arguments = Arguments(*(first + 8 * end for end in ends))
        self.address = ctypes.addressof(self.arguments)


_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class Program:
    """`int tw_program(const struct tw_args *, parallel, int threads)` of a library, with as many arguments as it takes.

    Several threads may run one at once: each call has a frame of its own, and frames are used again.
    """

    def __init__(
        self,
        library: NativeLibrary,
        parallel: int,
        *,
        pointers: int,
        strides: int,
        sizes: int,
        numbers: int,
        entry: str = ENTRY,
    ) -> None:
        """parallel: the address of tw_parallel. The others say how many of each argument there are."""
        self.library = library
        self._counts = (pointers, strides, sizes, numbers)
        self._parallel = parallel
        self._call = _PROTOTYPE(library.address(entry))
        self._pack = Struct(f"={pointers}Q{strides}q{sizes}q{numbers}d").pack_into
        self._frames: list[_Frame] = []

    def run(
        self, pointers: list[int], strides: list[int], sizes: list[int], numbers: list[float], threads: int
    ) -> None:
        """Call it, without the interpreter's lock. The caller keeps what `pointers` point to alive.

        Raises MemoryError where scratch memory was missing; outputs are partly written then.
        """
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(*self._counts)
        self._pack(frame.words, 0, *pointers, *strides, *sizes, *numbers)
        try:
            self.call(frame.address, threads)
        finally:
            self._frames.append(frame)

    def call(self, arguments: int, threads: int) -> None:
        """The same with the address of an `Arguments`."""
        status: int = self._call(arguments, self._parallel, threads)
        if status:
            text = f"no memory for the scratch of native code on {threads} threads ({os.strerror(status)})"
            raise MemoryError(text)
