"""`native.c`, compiled for this processor as kernels are: loops at its limits, and the selection primitive."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from tilewright.codegen_cache.compilers import find_compiler
from tilewright.codegen_cache.native_build import HEADERS
from tilewright.dsl.isa import best_isa

_SOURCE = Path(__file__).with_name("native.c")


@functools.cache
def library() -> ctypes.CDLL:
    """Compiled now: it takes a second. Raises RuntimeError without a C compiler, or with what it says."""
    compiler, isa = find_compiler(), best_isa()
    if compiler is None:
        raise RuntimeError("the machine's limits are measured in C, and no C compiler was found")
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder, "native.so"))
        for step in compiler.steps(str(_SOURCE), made, isa, None):
            done = subprocess.run([*step, "-I", str(HEADERS)], capture_output=True, text=True, cwd=folder)
            if done.returncode:
                raise RuntimeError(f"{' '.join(step)} failed:\n{done.stderr}")
        lib = ctypes.CDLL(made)
    for name in ("bench_fma", "bench_bf16_dot", "bench_amx"):
        function = getattr(lib, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64]
    lib.bench_read.restype, lib.bench_read.argtypes = ctypes.c_float, [ctypes.c_void_p, ctypes.c_int64]
    lib.bench_best.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p]
    lib.bench_best.restype = None
    lib.bench_best_scratch.restype, lib.bench_best_scratch.argtypes = ctypes.c_int64, [ctypes.c_int64] * 2
    return lib


def best_of_rows(scores: Tensor, k: int, threads: int) -> Callable[[], Tensor]:
    """The k best columns [row, k] of float32 scores [row, column], best first, rows shared out among threads."""
    lib, (rows, count) = library(), scores.shape
    parts = [range(rows * n // threads, rows * (n + 1) // threads) for n in range(threads)]
    scratch = [torch.empty(lib.bench_best_scratch(count, k), dtype=torch.uint8) for _ in parts]
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def call() -> Tensor:
        out = torch.empty(rows, k, dtype=torch.int32)

        def part(n: int) -> None:
            own = parts[n]
            data, result = scores[own.start :].data_ptr(), out[own.start :].data_ptr()
            lib.bench_best(data, len(own), count, k, result, scratch[n].data_ptr())

        for _ in map(part, range(threads)) if pool is None else pool.map(part, range(threads)):
            pass
        return out

    return call
