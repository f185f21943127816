"""Times the public attention operator, and the same declaration under other schedules, against baselines."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from peers import Method, check, eager, reference, sdpa, torch_heads
from rich.console import Console
from rich.table import Table
from timing import Timing, interleaved
from torch import Tensor
from workloads import LAYOUTS, SCALE, SHAPES, Shape, Workload, make, name_of

from tilewright import run
from tilewright.dsl.dtypes import DTYPES
from tilewright.dsl.schedule import Schedule
from tilewright.ops import generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.flash_attention import flash_attention
from tilewright.ops.masks import mask_named

OURS, BASELINE = "tilewright", "torch heads t128"
GOAL = 2.0  # times the baseline, for the interpreter

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """One workload: each method's timing and its error relative to a float32 reference."""

    workload: str
    flops: int
    bytes: int
    timings: dict[str, Timing]
    errors: dict[str, float]

    @property
    def met(self) -> bool:
        return self.timings[OURS].ratio <= GOAL

    @property
    def best(self) -> str:
        """Our fastest schedule, the default included."""
        return min((n for n in self.timings if n.startswith(OURS)), key=lambda n: self.timings[n].ratio)


def measure(*, threads: int, seconds: float, match: str = "", advance: Advance = lambda name: None) -> list[Result]:
    """Time every workload whose name contains `match`, in about `seconds` of timing in all.

    One thread is timed by the process's CPU time, several by the wall. Raises ArithmeticError for a wrong result.
    """
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    total = sum(_weight(s, layout) for s, _, layout, name in _cases() if match in name)
    out: list[Result] = []
    for w, expected in _workloads(match):
        advance(w.name)
        methods = _methods(w, threads)
        errors = {name: check(f"{name} on {w.name}", f(), expected) for name, f in methods.items()}
        timings = interleaved(
            methods, clock=clock, baseline=BASELINE, seconds=seconds * _weight(w.shape, w.layout) / total
        )
        out.append(Result(w.name, w.shape.flops, w.bytes, timings, errors))
        del methods
        gc.collect()
    return out


def names() -> list[str]:
    return [name for *_, name in _cases()]


def _cases() -> Iterator[tuple[Shape, torch.dtype, str, str]]:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for layout in LAYOUTS:
                yield shape, dtype, layout, name_of(shape, dtype, layout)


def _weight(shape: Shape, layout: str) -> float:
    """A workload's part of the budget: more where calls take longer, and where more methods are timed."""
    return (1 + shape.flops / 1e10) * (3 if layout == "HND" else 1)


def _workloads(match: str) -> Iterator[tuple[Workload, Tensor]]:
    """Workloads, one in memory at a time, with their results."""
    for (shape, dtype), cases in itertools.groupby(_cases(), lambda case: case[:2]):
        wanted = [layout for _, _, layout, name in cases if match in name]
        if wanted:
            w = make(shape, dtype)
            expected = reference(w)
            for layout in wanted:
                w = w.in_layout(layout)
                yield w, expected


# ---- methods ---------------------------------------------------------------------------------------------------------


def _methods(w: Workload, threads: int) -> dict[str, Method]:
    """What is timed on a workload; schedules and slow baselines on one page order only."""
    methods = {OURS: public_operator(w), BASELINE: torch_heads(w)}
    if threads > 1:
        methods[f"{BASELINE}, {threads} workers"] = torch_heads(w, workers=threads)
    if w.layout == "HND":
        methods |= {f"{OURS} {_spelled(s)}": _scheduled(w, s) for s in _schedules(w.shape, threads)}
        methods |= {"torch heads t512": torch_heads(w, keys=512), "eager": eager(w)}
    return {**methods, "torch SDPA": sdpa(w)}


def _mask(w: Workload) -> tuple[str, int]:
    return ("causal", -1) if w.shape.window is None else ("sliding_window_causal", w.shape.window)


def public_operator(w: Workload) -> Method:
    """The public operator, as a model calls it."""
    cache, (mask, window) = w.cache(), _mask(w)

    def call() -> Tensor:
        out = generic_flash_attention_kv_cache_ragged_sink(
            w.q, w.offsets, cache, 0, SCALE, w.sinks, mask_str=mask, local_window_size=window
        )
        assert isinstance(out, Tensor)
        return out

    return call


def _schedules(shape: Shape, threads: int) -> list[Schedule]:
    """Schedules besides the default."""
    if max(shape.rows) == 1:
        out = [Schedule(rows=1, keys=keys) for keys in (128, 512, 1024)]
        return out if threads == 1 else [*out, Schedule(rows=1, keys=512, partitions=threads)]
    return [
        Schedule(rows=32, keys=128),
        Schedule(rows=64, keys=256),
        Schedule(rows=128, keys=128),
        Schedule(rows=128, keys=512),
        Schedule(rows=128, keys=128, masks="split"),
        Schedule(rows=128, keys=128, masks="always"),
    ]


def _spelled(s: Schedule) -> str:
    parts = f" p{s.partitions}" if s.partitions > 1 else ""
    return f"r{s.rows} k{s.keys}{parts}" + (f" {s.masks}" if s.masks != Schedule().masks else "")


def _scheduled(w: Workload, schedule: Schedule) -> Method:
    """The same operator under a schedule of our choice."""
    leaf, mask = w.cache().layer(0), mask_named("bench", *_mask(w))

    def call() -> Tensor:
        results = run(
            flash_attention,
            {"q": w.q, "kv": leaf, "scale": SCALE, "sink": w.sinks},
            w.offsets,
            constants={"mask": mask, "with_lse": False},
            output_dtypes={"out": DTYPES[w.dtype_name]},
            schedule=schedule,
        )
        return results["out"]

    return call


# ---- report ----------------------------------------------------------------------------------------------------------


def show(results: list[Result], console: Console, clock: str) -> None:
    """A table of all methods on all workloads, then which workloads miss the goal."""
    table = Table(title=f"attention: {clock} per call", title_justify="left", header_style="bold")
    table.add_column("workload / method", no_wrap=True)
    for heading in ("ms", "spread", f"x {BASELINE}", "GFLOP/s", "GB/s", "error", "rounds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        table.add_section()
        table.add_row(f"[bold]{r.workload}[/]: {r.flops / 1e9:.2f} GFLOP, {r.bytes / 1e6:.0f} MB")
        for name, t in sorted(r.timings.items(), key=lambda item: item[1].ratio):
            style = ("green" if r.met else "red") if name == OURS else "dim" if name.startswith(OURS) else ""
            rates = f"{r.flops / t.median / 1e9:.1f}", f"{r.bytes / t.median / 1e9:.2f}"
            figures = f"{t.median * 1e3:.2f}", f"{t.spread:.0%}", f"{t.ratio:.2f}", *rates
            table.add_row(f"  {name}", *figures, f"{r.errors[name]:.0e}", str(t.samples), style=style)
    console.print(table)
    for r in results:
        ratio, best = r.timings[OURS].ratio, r.best
        verdict = "[green]meets[/]" if r.met else "[red]misses[/]"
        hint = "" if best == OURS else f"; best of its schedules {r.timings[best].ratio:.2f}x ({best})"
        console.print(f"{r.workload}: {ratio:.2f}x {BASELINE}, {verdict} {GOAL:g}x{hint}", highlight=False)


def as_json(results: list[Result]) -> list[dict[str, object]]:
    return [{**asdict(r), "met": r.met} for r in results]
