"""The pool of worker threads that all native code of a process shares (dsl/cpu/threads.c), and how many may work."""

from __future__ import annotations

import os
import threading
from functools import cache

from tilewright.dsl import knobs
from tilewright.dsl.isa import ISAS

from .compilers import Compiler
from .native import NativeLibrary, load
from .native_build import HEADERS, build

_LOCK = threading.Lock()
_LIBRARY: NativeLibrary | None = None


def threads_library(compiler: Compiler) -> NativeLibrary:
    """The one pool of this process, whichever compiler comes later."""
    global _LIBRARY
    if _LIBRARY is None:
        with _LOCK:
            if _LIBRARY is None:
                _LIBRARY = load(build(pool_source(), "the thread pool", ISAS["portable"], compiler))
    return _LIBRARY


def parallel_address(compiler: Compiler) -> int:
    """tw_parallel, which programs are given."""
    return threads_library(compiler).address("tw_parallel")


@cache
def pool_source() -> str:
    return (HEADERS / "threads.c").read_text(encoding="utf-8")


def thread_count() -> int:
    """TILEWRIGHT_THREADS, else as many as torch uses. The pool takes no more than the processors it may run on."""
    if (asked := knobs.THREADS.get()) is not None:
        return asked
    import torch

    return torch.get_num_threads()


def _new_lock() -> None:
    """A forked child may find the lock held by a thread that it does not have."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
