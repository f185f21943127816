"""What benchmarked operators have in common: a workload ready to be timed, its result, and the loop between them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from limits import Limits
from timing import Timing, interleaved
from torch import Tensor

OURS = "tilewright"  # the public operator; names of our other schedules start with it

Method = Callable[[], Tensor]
Advance = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A workload with everything that is timed on it. One is in memory at a time."""

    name: str
    flops: int
    bytes: int
    dtype: torch.dtype  # the narrowest that holds the operands of its products exactly, whose rate is the limit
    methods: dict[str, Method]
    baseline: str
    goal: float  # times the baseline, for the interpreter
    error: Callable[[str, Tensor], float]  # of a method's result; raises ArithmeticError where it is too large
    beside: str | None = None  # another method to name the ratio to


@dataclass(frozen=True)
class Result:
    """One workload: each method's timing and its error relative to a reference."""

    workload: str
    flops: int
    bytes: int
    limit: float  # seconds
    baseline: str
    goal: float
    beside: str | None
    timings: dict[str, Timing]
    errors: dict[str, float]

    @property
    def met(self) -> bool:
        return self.timings[OURS].ratio <= self.goal

    @property
    def best(self) -> str:
        """Our fastest schedule, the default included."""
        return min((n for n in self.timings if n.startswith(OURS)), key=lambda n: self.timings[n].ratio)

    def document(self) -> dict[str, object]:
        fractions = {name: self.limit / t.median for name, t in self.timings.items()}
        return {**asdict(self), "met": self.met, "fraction_of_limit": fractions}


class Suite(Protocol):
    """An operator's workloads; modules are suites."""

    def weights(self) -> dict[str, float]:
        """Each workload's part of the time, by name."""

    def workloads(self, match: str, threads: int) -> Iterator[Prepared]:
        """Those whose name contains `match`, one at a time."""


def clock_for(threads: int) -> Callable[[], float]:
    """One thread is timed by the process's CPU time, several by the wall."""
    return time.process_time if threads == 1 else time.perf_counter


def total_weight(suite: Suite, match: str) -> float:
    return sum(w for name, w in suite.weights().items() if match in name)


def measure(
    suite: Suite, *, threads: int, seconds: float, match: str, limits: Limits, advance: Advance
) -> list[Result]:
    """Time the workloads whose name contains `match`, in about `seconds` of timing in all.

    Raises ArithmeticError for a wrong result.
    """
    weights, total = suite.weights(), total_weight(suite, match)
    out: list[Result] = []
    for w in suite.workloads(match, threads):
        advance(w.name)
        errors = {name: w.error(f"{name} on {w.name}", f()) for name, f in w.methods.items()}
        timings = interleaved(
            w.methods, clock=clock_for(threads), baseline=w.baseline, seconds=seconds * weights[w.name] / total
        )
        limit = limits.seconds(w.flops, w.bytes, w.dtype)
        out.append(Result(w.name, w.flops, w.bytes, limit, w.baseline, w.goal, w.beside, timings, errors))
        del w  # before the next is made
        gc.collect()
    return out
