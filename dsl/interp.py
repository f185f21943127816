"""The interpreter: runs any finished loop nest on CPU tensors, and is the definition of what a nest means.

Tiles start as NaN, reads and writes are bounds-checked, arithmetic is float32, independent grid points run on threads.
`print` and `breakpoint()` of the author's source happen when their place in the nest is reached.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np
import torch

from .dtypes import Kind
from .expr import Expr
from .interp_kernel import CompiledKernel, compile_kernel
from .interp_outputs import Hooks, OnStatement
from .interp_show import show_values
from .interp_values import Bools, Frame, Ints, Scalar, compile_value
from .loops import Arg, Program
from .scalars import Number
from .windows import DEFAULT_BUDGET, row_windows, sizes_named, workspace

_SMALL = 1 << 16  # integer tensors up to this many elements are also kept as lists


class Interpreter:
    """A program ready to run. Running allocates tiles and workspaces only, never a copy of a cache."""

    def __init__(
        self, program: Program, *, check_finite: bool = False, on_statement: OnStatement | None = None
    ) -> None:
        self.program = program
        hooks = Hooks(show_values, on_statement)
        args = {a.name: a for a in (*program.args, *program.workspaces)}
        self._kernels = [compile_kernel(k, args, hooks, check_finite) for k in program.kernels]
        self._serial = on_statement is not None or any(_shows(k) for k in self._kernels)

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Number],
        *,
        threads: int | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> None:
        """Run every kernel on these arguments; outputs are written in place.

        tensors: one per tensor argument, of the shape the program lists. scalars: one per scalar argument.
        threads: workers over grid points; None: as many as torch uses.
        budget_bytes: what score windows may take; rows are run a window at a time to stay under it, one row at least.
        """
        sizes: dict[str, Number] = dict(scalars)
        for a in self.program.args:
            sizes.update(sizes_named(a, tensors))
        bound = {a.name: tensors[a.name] for a in self.program.args if a.shape or a.name in tensors}
        indices, lists = _indices(bound, {a.name: a for a in self.program.args})
        count = 1 if self._serial else threads or torch.get_num_threads()
        counted = {n: x for n, x in indices.items() if x.dtype != np.bool_}
        for window in row_windows(self.program, sizes, counted, budget_bytes):
            self._run_window(window, bound, indices, lists, count)

    def _run_window(
        self,
        window: Mapping[str, Number],
        bound: Mapping[str, torch.Tensor],
        indices: Mapping[str, Ints | Bools],
        lists: Mapping[str, list[int]],
        threads: int,
    ) -> None:
        """Every kernel for a window of rows, whose workspaces are gone before those of the next are made."""
        work = {w.name: workspace(w, window) for w in self.program.workspaces}
        whole = {**indices, **{n: t.numpy() for n, t in work.items() if not t.is_floating_point()}}
        frame = partial(_frame, {**bound, **work}, whole, lists, window)
        for k in self._kernels:
            self._run_kernel(k, frame, threads)

    def _run_kernel(self, k: CompiledKernel, frame: Callable[[], Frame], threads: int) -> None:
        outside = frame()
        extents = [_count(e, k, outside) for _, e in k.grid]
        points, total = itertools.product(*(range(n) for n in extents)), math.prod(extents)
        names = [name for name, _ in k.grid]
        if threads == 1 or total < 2:
            _work(k, outside, names, points)
            return
        shared, pool = _Shared(points), _pool(threads)
        futures = [pool.submit(_work, k, frame(), names, shared) for _ in range(min(threads, total))]
        wait(futures)  # all of them, so that nothing is written once an error has been raised
        for done in futures:
            done.result()


def _frame(
    tensors: Mapping[str, torch.Tensor],
    indices: Mapping[str, Ints | Bools],
    lists: Mapping[str, list[int]],
    scalars: Mapping[str, Scalar],
) -> Frame:
    return Frame(tensors, indices, lists, dict(scalars))


def _shows(k: CompiledKernel) -> bool:
    from .rewrite import statements
    from .tile import Show

    return any(isinstance(s, Show) for s in statements(k.kernel.body))


def _work(k: CompiledKernel, f: Frame, names: list[str], points: Iterator[tuple[int, ...]]) -> None:
    # Per thread. Operators have no derivative; a caller in inference mode passes tensors that only this mode may write.
    with torch.inference_mode(), np.errstate(all="ignore"):
        for point in points:
            f.scalars.update(zip(names, point, strict=True))
            k.run(f)


def _count(e: Expr, k: CompiledKernel, f: Frame) -> int:
    n = compile_value(e, (), k.scope).run(f)
    assert isinstance(n, int)
    return n


def _indices(
    bound: Mapping[str, torch.Tensor], args: Mapping[str, Arg]
) -> tuple[dict[str, Ints | Bools], dict[str, list[int]]]:
    """Integer arguments as int64 (tables and offsets are small), and as lists where one-dimensional; conditions."""
    out: dict[str, Ints | Bools] = {}
    lists: dict[str, list[int]] = {}
    for name, t in bound.items():
        if args[name].dtype.kind is Kind.BOOL:
            out[name] = t.numpy()
        if args[name].dtype.kind is Kind.INT:
            out[name] = t.to(torch.int64).numpy()
            if t.ndim == 1 and t.numel() <= _SMALL:
                lists[name] = out[name].tolist()
    return out, lists


# ---- threads ---------------------------------------------------------------------------------------------------------


class _Shared(Iterator[tuple[int, ...]]):
    """Grid points handed out to workers one at a time, so that a long sequence leaves no worker idle."""

    def __init__(self, points: Iterator[tuple[int, ...]]) -> None:
        self._points, self._lock = points, threading.Lock()

    def __next__(self) -> tuple[int, ...]:
        with self._lock:
            return next(self._points)


_POOLS: dict[int, ThreadPoolExecutor] = {}
_POOLS_LOCK = threading.Lock()


def _forget_pools() -> None:
    """A forked child has the parent's pools without their threads."""
    global _POOLS_LOCK
    _POOLS.clear()
    _POOLS_LOCK = threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)


def _pool(threads: int) -> ThreadPoolExecutor:
    """Workers whose own torch calls are single-threaded, kept for the life of the process."""
    with _POOLS_LOCK:
        if threads not in _POOLS:
            before = torch.get_num_threads()
            ready = threading.Barrier(threads + 1)

            def start() -> None:
                torch.set_num_threads(1)
                ready.wait()

            pool = ThreadPoolExecutor(threads, thread_name_prefix="tilewright", initializer=start)
            for _ in range(threads):
                pool.submit(lambda: None)
            ready.wait()
            torch.set_num_threads(before)
            _POOLS[threads] = pool
        return _POOLS[threads]
