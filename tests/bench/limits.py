"""What this machine can do at best, measured in the run that it is compared with.

Peaks are those of instructions on registers, in C; torch's matrix product says what a library reaches of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from native import library
from timing import Clock

FMA, DOT, AMX, DRAM = "FMA", "vdpbf16ps", "AMX", "DRAM"
GEMM = "torch GEMM"
_SAMPLE, _SECONDS = 0.01, 0.5  # of a sample at least, and of all: the best counts, which others disturb the least
_SIDE = 2048
_CACHES = 4  # times the largest cache are read
_SMALL = 64 << 20


@dataclass(frozen=True)
class Limits:
    """Rates: operations by name, GEMM for each dtype; bytes read. Of all threads together.

    peaks: of FMA in float32; vdpbf16ps and AMX in bfloat16, where the instruction set in use has them.
    """

    peaks: dict[str, float]
    gemm: dict[str, float]
    dram: float
    small: float  # bytes read of a buffer that large caches hold, as they may hold a workload

    def peak(self, dtype: torch.dtype) -> str:
        """The vector instruction with the higher rate: bfloat16 pairs are added at half of FMA's on some processors."""
        names = (FMA, DOT) if dtype == torch.bfloat16 else (FMA,)
        return max((n for n in names if n in self.peaks), key=self.peaks.__getitem__)

    def seconds(self, flops: int, size: int, dtype: torch.dtype) -> dict[str, float]:
        """The least that a workload could take, by what limits it; without `flops`, memory alone."""
        out = {}
        if flops:
            names = [self.peak(dtype), *([AMX] if dtype == torch.bfloat16 and AMX in self.peaks else [])]
            out = {name: flops / self.peaks[name] for name in names}
            out[GEMM] = flops / self.gemm[name_of(dtype)]
        return {**out, DRAM: size / self.dram}

    def spelled(self) -> str:
        peaks = [f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in self.peaks.items()]
        products = [f"{GEMM} in {dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in self.gemm.items()]
        read = f"{DRAM} read at {self.dram / 1e9:.1f} GB/s, {_SMALL >> 20} MiB over and over at {self.small / 1e9:.1f}"
        return ", ".join([*peaks, *products, read])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measured(threads: int, clock: Clock) -> Limits:
    """With torch at `threads` threads, which is up to the caller. Each rate takes about half a second."""
    lib = library()
    with ThreadPoolExecutor(threads) as pool:
        loops = {FMA: lib.bench_fma, DOT: lib.bench_bf16_dot, AMX: lib.bench_amx}
        peaks = {name: _peak(loop, threads, pool, clock) for name, loop in loops.items() if loop(1)}
        gemm = {name_of(d): _gemm(d, clock) for d in (torch.float32, torch.bfloat16)}
        sizes = buffer_size(_largest_cache(), _available()), _SMALL
        return Limits(peaks, gemm, *(_reading(size, threads, pool, clock) for size in sizes))


def _on_all(f: Callable[[int], object], threads: int, pool: ThreadPoolExecutor) -> None:
    """f(0), ..., f(threads - 1), each on its own thread; one runs on this thread."""
    for _ in [f(0)] if threads == 1 else pool.map(f, range(threads)):
        pass


def _least(f: Callable[[], object], clock: Clock) -> float:
    """The least seconds of a call, of all calls in about half a second."""
    f()
    samples: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not samples or time.perf_counter() < end:
        start = clock()
        f()
        samples.append(clock() - start)
    return min(samples)


def _peak(loop: Callable[[int], int], threads: int, pool: ThreadPoolExecutor, clock: Clock) -> float:
    rounds = 1 << 12
    while _once(loop, rounds) < _SAMPLE:
        rounds *= 2
    return threads * loop(rounds) / _least(lambda: _on_all(lambda _: loop(rounds), threads, pool), clock)


def _once(loop: Callable[[int], int], rounds: int) -> float:
    start = time.perf_counter()
    loop(rounds)
    return time.perf_counter() - start


def _gemm(dtype: torch.dtype, clock: Clock) -> float:
    a, b = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
    return 2 * _SIDE**3 / _least(lambda: a @ b, clock)


def _reading(size: int, threads: int, pool: ThreadPoolExecutor, clock: Clock) -> float:
    """Bytes a second, from a buffer of about that size read over and over."""
    count = size // 4 // threads
    memory, lib = torch.ones(threads, count), library()
    part = [row.data_ptr() for row in memory]
    return memory.nbytes / _least(lambda: _on_all(lambda n: lib.bench_read(part[n], count), threads, pool), clock)


def buffer_size(cache: int, available: int) -> int:
    """Bytes to read: some times the largest cache, and no more than a quarter of what memory is free."""
    return min(max(_CACHES * cache, 256 << 20), available // 4)


def _largest_cache() -> int:
    """Bytes; 0 where Linux does not say."""
    sizes = (p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(s[:-1]) << {"K": 10, "M": 20}[s[-1]] for s in sizes), default=0)


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 30
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
