"""What comes before and around the arithmetic: imports, compiling, a call's overhead, memory; in fresh processes.

As a script, `startup.py PROBE` runs one probe and prints its figures as JSON; `measure` starts such processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a probe of imports must not find them already done
    from rich.console import Console

MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """One measured quantity: the median over processes."""

    name: str
    unit: str
    median: float
    spread: float  # interquartile range / median
    samples: int


# ---- probes: run in a process of their own ---------------------------------------------------------------------------

Figures = dict[str, float]  # by "name [unit]"


def _milliseconds(f: Callable[[], object]) -> float:
    start = time.process_time()
    f()
    return (time.process_time() - start) * 1e3


# Run bare: this file's own imports would hide what a package imports of the standard library.
_IMPORTS = """
from time import process_time
figures = {}
for name in "tilewright", "tilewright.dsl", "torch", "tilewright.ops", "sympy":
    start = process_time()
    __import__(name)
    figures[f"import {name}{', after that' * bool(figures)} [ms]"] = (process_time() - start) * 1e3
import json
print(json.dumps(figures))
"""


def compile_cold() -> Figures:
    """From the operator to something that runs, in a process that has not loaded SymPy."""
    assert "sympy" not in sys.modules
    return {f"{name}, SymPy not loaded [ms]": t for name, t in _compile().items()}


def compile_warm() -> Figures:
    """The same with SymPy loaded."""
    import sympy  # noqa: F401  loaded beforehand, which is the point

    return {f"{name}, SymPy loaded [ms]": t for name, t in _compile().items()}


def _compile() -> Figures:
    import torch
    from workloads import SCALE, SHAPES, make

    from tilewright.codegen_cache.bind import bind
    from tilewright.dsl.dtypes import DTYPES
    from tilewright.dsl.interp import Interpreter
    from tilewright.dsl.lower import lower
    from tilewright.dsl.schedule import Schedule
    from tilewright.ops.flash_attention import flash_attention
    from tilewright.ops.masks import mask_named

    w = make(next(s for s in SHAPES if s.sinks), torch.float32)
    mask = mask_named("bench", "causal", -1)
    start = time.process_time()
    spec = flash_attention.trace(mask=mask, with_lse=False)
    traced = time.process_time()
    arguments = {"q": w.q, "kv": w.cache().layer(0), "scale": SCALE, "sink": w.sinks}
    binding = bind("bench", spec, arguments, w.offsets, {"out": DTYPES["float32"]}, {}).binding
    bound = time.process_time()
    program = lower(spec, binding, Schedule(rows=128, keys=256))
    lowered = time.process_time()
    Interpreter(program)
    compiled = time.process_time()
    again = _milliseconds(lambda: lower(spec, binding, Schedule(rows=1, keys=512)))
    phases = {
        "tracing": traced - start,
        "lowering": lowered - bound,
        "closures": compiled - lowered,
        "tracing to closures": compiled - start - (bound - traced),
    }
    return {**{name: t * 1e3 for name, t in phases.items()}, "lowering under another schedule": again}


def calls() -> Figures:
    """The first call and later ones, for one row that sees one key: all of it is overhead."""
    import torch
    from peers import BASELINE, torch_heads
    from workloads import Shape, make, public_operator

    one = make(Shape("one row", (1,), (0,)), torch.float32)
    call = public_operator(one)
    out = {"first call, torch and tilewright.ops loaded, SymPy not [ms]": _milliseconds(call)}
    out["first call under another schedule (128 rows) [ms]"] = _milliseconds(
        public_operator(make(Shape("128 rows", (128,), (0,)), torch.float32))
    )
    out["one-row call [us]"] = _per_call(call)
    out["call of 8 one-row sequences [us]"] = _per_call(
        public_operator(make(Shape("8 rows", (1,) * 8, (0,) * 8), torch.float32))
    )
    for name, each in _one_row_calls().items():
        out[f"one-row call, {name} [us]"] = _per_call(each)
        if kernel := _kernel(each):
            out[f"its kernel, {name} [us]"] = kernel
    out["call of a new shape [us]"] = _new_shapes()
    out[f"one-row call of {BASELINE}, which checks nothing [us]"] = _per_call(torch_heads(one))
    os.environ["TILEWRIGHT_VALIDATE"] = "0"
    out["one-row call, TILEWRIGHT_VALIDATE=0 [us]"] = _per_call(call)
    return out


def _one_row_calls() -> dict[str, Callable[[], object]]:
    """Every published operator, with and without a buffer, and one run from its declaration; small heads."""
    import torch

    from tilewright import run
    from tilewright.ops import (
        PagedKVCache,
        generic_flash_attention_kv_cache_ragged_sink,
        latent_sparse_attention_ragged_paged,
        mla_indexer_ragged_float8_paged,
    )
    from tilewright.ops.flash_attention import flash_attention
    from tilewright.ops.masks import mask_named

    offsets, table = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[2, 0]], dtype=torch.int32)
    empty, four = torch.zeros(1, dtype=torch.int32), torch.full((1,), 4, dtype=torch.int32)
    kv = PagedKVCache(torch.randn(4, 2, 1, 16, 2, 64), table, empty)
    recent = PagedKVCache(torch.randn(4, 1, 1, 16, 1, 64), table, empty).layer(0)
    entries = PagedKVCache(torch.randn(4, 1, 1, 16, 1, 64), table, four).layer(0)
    listed = torch.tensor([[0, 1, -1, -1]], dtype=torch.int32)
    keys = torch.randn(4, 1, 1, 16, 1, 64).to(torch.float8_e4m3fn)
    scored = PagedKVCache(keys, table, empty, scales=torch.ones(4, 1, 1, 16, 1, 1))
    q, buffer = torch.randn(1, 8, 64), torch.empty(1, 8, 64)
    q8, q_s = q.to(torch.float8_e4m3fn), torch.ones(1, 8)
    declared = {"q": q, "kv": kv.layer(0), "scale": 0.125, "sink": None}
    constants = {"mask": mask_named("bench", "causal", None)}
    return {
        "attention": lambda: generic_flash_attention_kv_cache_ragged_sink(q, offsets, kv, 0, 0.125),
        "attention into a buffer": lambda: generic_flash_attention_kv_cache_ragged_sink(
            q, offsets, kv, 0, 0.125, output=buffer
        ),
        "latent attention": lambda: latent_sparse_attention_ragged_paged(
            q, offsets, listed, None, recent, entries, 0.125, window=8
        ),
        "indexer": lambda: mla_indexer_ragged_float8_paged(q8, q_s, offsets, scored, 0, top_k=4),
        "attention from its declaration": lambda: run(flash_attention, declared, offsets, constants=constants),
    }


def _new_shapes() -> float:
    """Median microseconds of calls whose table has a width of their own."""
    import torch

    from tilewright.ops import PagedKVCache, generic_flash_attention_kv_cache_ragged_sink

    pool, q, offsets = torch.zeros(4, 2, 1, 16, 2, 64), torch.zeros(1, 8, 64), torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.zeros(1, dtype=torch.int32)
    times = []
    for width in range(1, 101):
        cache = PagedKVCache(pool, torch.zeros(1, width, dtype=torch.int32), lengths)
        times.append(_milliseconds(partial(generic_flash_attention_kv_cache_ragged_sink, q, offsets, cache, 0, 0.1)))
    return statistics.median(times) * 1e3


def _per_call(call: Callable[[], object]) -> float:
    """Microseconds of CPU time: of several medians of short samples the smallest, for neighbours only ever add."""
    call()
    samples = max(15, min(200, int(20 / max(1e-3, _milliseconds(call)))))
    return min(
        statistics.median(_milliseconds(lambda: [call() for _ in range(10)]) / 10 * 1e3 for _ in range(samples))
        for _ in range(3)
    )


def _kernel(call: Callable[[], object]) -> float | None:
    """Microseconds that the native program takes in such a call; None where none runs."""
    from tilewright.codegen_cache.native import Program

    times: list[int] = []
    real = Program.call

    def timed(self: Program, arguments: int, threads: int) -> None:
        start = time.perf_counter_ns()
        real(self, arguments, threads)
        times.append(time.perf_counter_ns() - start)

    Program.call = timed  # type: ignore[method-assign]
    try:
        for _ in range(2000):
            call()
            if not times:
                return None
    finally:
        Program.call = real  # type: ignore[method-assign]
    return statistics.median(times) / 1e3


def memory() -> Figures:
    """Peak growth of resident memory over one call on a pool of a GiB, of which the call sees a quarter."""
    import torch
    from workloads import DIM, KV_HEADS, PAGE, Shape, make, public_operator

    out: Figures = {}
    pages = (1 << 30) // (2 * KV_HEADS * PAGE * DIM * 2)
    pool = [torch.empty(pages, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16).fill_(0.25) for _ in range(2)]
    for name, rows in {"decode": (1,) * 8, "prefill": (64,) * 8}.items():
        cached = tuple(pages // 4 // 8 * PAGE - r for r in rows)
        small = make(Shape(name, rows, (0,) * 8), torch.bfloat16)
        table = torch.randperm(pages)[: pages // 4].view(8, -1).to(torch.int32)
        lengths = torch.zeros(8, dtype=torch.int32)
        w = replace(small, k_pages=pool[0], v_pages=pool[1], table=table, cached=lengths)
        call = public_operator(w)
        call()  # compiles, and allocates what any call does, while next to no key is cached
        lengths.copy_(torch.tensor(cached))
        before = _resident(reset=True)
        result = call()
        shown = f"{name} of {sum(rows)} rows, {result.nbytes / MIB:.2g} MiB of them its result"
        out[f"peak growth, {shown} [MiB]"] = (_peak() - before) / MIB
        assert bool((result == 0.25).all()), "a mean of equal values is that value"
    out["keys and values that each of the two sees [MiB]"] = sum(p.nbytes for p in pool) / 4 / MIB
    return out


def _status(field: str) -> int:
    """Bytes, from /proc/self/status."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def _resident(*, reset: bool) -> int:
    """Resident bytes now; `reset` makes them the peak so far."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


PROBES: dict[str, Callable[[], Figures]] = {p.__name__: p for p in (compile_cold, compile_warm, calls, memory)}
_ALL = ("imports", *PROBES)
_FEWEST = {"memory": 1}  # processes; three for the others
_MOST = 25


# ---- the parent ------------------------------------------------------------------------------------------------------


def measure(*, threads: int, seconds: float, advance: Callable[[str], None] = lambda name: None) -> list[Figure]:
    """Every probe's figures, each probe in at least three processes (memory: one) and for its share of `seconds`.

    Raises RuntimeError with the output of a probe that fails.
    """
    out: list[Figure] = []
    for name in _ALL:
        runs: list[Figures] = []
        start = time.perf_counter()
        share = seconds / len(_ALL)
        while len(runs) < _FEWEST.get(name, 3) or (time.perf_counter() - start < share and len(runs) < _MOST):
            advance(f"{name}, process {len(runs) + 1}")
            runs.append(_process(name, threads))
        for label in runs[0]:
            quantity, _, unit = label.rstrip("]").rpartition(" [")
            samples = [r[label] for r in runs]
            out.append(Figure(quantity, unit, statistics.median(samples), _spread(samples), len(samples)))
    return out


def _spread(samples: list[float]) -> float:
    from timing import spread

    return spread(samples)


def _process(probe: str, threads: int) -> Figures:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    arguments = [__file__, probe] if probe in PROBES else ["-c", _IMPORTS]
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"probe {probe} failed:\n{done.stdout}{done.stderr}")
    figures: Figures = json.loads(done.stdout)
    return figures


def show(figures: list[Figure], console: Console) -> None:
    from rich.table import Table

    table = Table(title="startup: CPU time and memory, in fresh processes", title_justify="left", header_style="bold")
    table.add_column("what", no_wrap=True)
    for heading in ("median", "", "spread", "processes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for f in figures:
        table.add_row(
            f.name,
            f"{f.median:.0f}" if f.median >= 100 else f"{f.median:.3g}",
            f.unit,
            f"{f.spread:.0%}",
            str(f.samples),
        )
    console.print(table)


def as_json(figures: list[Figure]) -> list[dict[str, object]]:
    return [asdict(f) for f in figures]


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
