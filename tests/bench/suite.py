"""What benchmarked operators have in common: a workload ready to be timed, its result, and the loop between them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from limits import Limits
from names import OURS, Method
from protocol import Apart, Asked, Failed
from timing import Sampler, Timing, clock_for, interleaved, sampler
from torch import Tensor

Advance = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Setting:
    """How a run times: in one process for each peer's environment."""

    threads: int
    target: str = "cpu"
    layout: str = "HND"  # of attention's pages
    has_vllm: bool = False  # loaded into this process
    apart: Mapping[str, Apart] = field(default_factory=dict)  # peers in processes of their own, by name
    missing: Mapping[str, str] = field(default_factory=dict)  # peers that are not there, and why


@dataclass(frozen=True, eq=False)
class Prepared:
    """A workload with everything that is timed on it. One is in memory at a time.

    dtype: the narrowest that holds the operands of its products exactly, whose rates are the limits. error: of a
    method's result; raises ArithmeticError where it is too large. makers: calls and compiles nothing until called, as
    a peer may not be able to. apart: what to ask of other processes, and how to read their answers.
    """

    name: str
    flops: int
    bytes: int
    dtype: torch.dtype
    makers: Mapping[str, Callable[[], Method]]
    error: Callable[[str, Tensor], float]
    apart: Mapping[str, Asked] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)  # peers without such an operator, and what they lack


@dataclass(frozen=True)
class Result:
    """One workload on some threads: each method's timing and its error relative to a reference."""

    workload: str
    kind: str
    dtype: str
    threads: int
    flops: int
    bytes: int
    peak: str  # the limit that its products go by
    least: dict[str, float]  # seconds, by what limits it
    timings: dict[str, Timing]
    errors: dict[str, float]
    absent: dict[str, str]  # peers that were not timed, and why

    @property
    def best_peer(self) -> str | None:
        """The fastest, round for round against ours."""
        peers = [n for n in self.timings if n != OURS]
        return min(peers, key=lambda n: self.timings[n].ratio, default=None)

    def fractions(self, method: str) -> dict[str, float]:
        """Of each limit, what a method reaches."""
        return {name: t / self.timings[method].median for name, t in self.least.items()}

    def document(self) -> dict[str, object]:
        fractions = {name: self.fractions(name) for name in self.timings}
        return {**asdict(self), "best_peer": self.best_peer, "fractions": fractions}


@dataclass(frozen=True)
class Planned:
    """What is known of a workload before it is made."""

    kind: str  # of names.py
    weight: float = 1.0  # its part of the time


class Suite(Protocol):
    """An operator's workloads; modules are suites."""

    def planned(self, layout: str) -> dict[str, Planned]:
        """All of them by name."""

    def workloads(self, match: str, setting: Setting) -> Iterator[Prepared]:
        """Those whose name contains `match`, one at a time."""


def total_weight(suite: Suite, match: str, layout: str) -> float:
    return sum(p.weight for name, p in suite.planned(layout).items() if match in name)


def measure(
    suite: Suite, setting: Setting, *, seconds: float, match: str, limits: Limits, advance: Advance
) -> list[Result]:
    """Time the workloads whose name contains `match`, in about `seconds` of timing in all.

    Raises ArithmeticError where ours is wrong. A peer that fails or is wrong is left out, and the result says why.
    """
    planned, total = suite.planned(setting.layout), total_weight(suite, match, setting.layout)
    out: list[Result] = []
    for w in suite.workloads(match, setting):
        advance(f"{w.name}, {setting.threads} threads")
        samplers, errors, absent = _ready(w, setting, advance)
        share = seconds * planned[w.name].weight / total
        try:
            timings = interleaved(samplers, ours=OURS, apart=set(w.apart), seconds=share)
        except Failed as e:
            absent |= {name: str(e) for name in w.apart if samplers.pop(name, None)}
            timings = interleaved(samplers, ours=OURS, seconds=share)
        out.append(
            Result(
                workload=w.name,
                kind=planned[w.name].kind,
                dtype=str(w.dtype).removeprefix("torch."),
                threads=setting.threads,
                flops=w.flops,
                bytes=w.bytes,
                peak=limits.peak(w.dtype),
                least=limits.seconds(w.flops, w.bytes, w.dtype),
                timings=timings,
                errors=errors,
                absent=absent,
            )
        )
        del w, samplers  # before the next is made
        gc.collect()
    return out


def _ready(
    w: Prepared, setting: Setting, advance: Advance
) -> tuple[dict[str, Sampler], dict[str, float], dict[str, str]]:
    """Every method called once: samplers and errors of those that can be timed, and why the others cannot."""
    samplers: dict[str, Sampler] = {}
    errors: dict[str, float] = {}
    absent = {**setting.missing, **w.absent}
    clock = clock_for(setting.threads)
    for name in (*w.makers, *w.apart):
        advance(f"{w.name}, {setting.threads} threads: {name}")
        try:
            if name in w.apart:
                result, sample = w.apart[name].ready(setting.threads)
            else:
                method = w.makers[name]()
                result, sample = method(), sampler(method, clock)
            errors[name], samplers[name] = w.error(f"{name} on {w.name}", result), sample
        except Exception as e:  # peers fail in ways of their own: compilers, assertions, missing instructions
            if name == OURS:
                raise
            absent[name] = " ".join(str(e).split())[:300] or type(e).__name__
    return samplers, errors, absent
