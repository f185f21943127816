"""Timing methods against ours: interleaved, in an order that changes from round to round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

Clock = Callable[[], float]
Sampler = Callable[[int], float]  # calls the method so many times: seconds per call

_SAMPLE = 0.02  # seconds that a sample lasts at least, by repeating the call
_FEWEST, _MOST = 5, 400  # rounds
_LONG = 2.0  # seconds: a method whose call takes longer is timed in one round


@dataclass(frozen=True)
class Timing:
    """One method's seconds per call, and how many times as long as ours it takes."""

    median: float
    spread: float  # interquartile range / median
    least: float
    samples: int
    ratio: float  # its seconds / ours, median over its rounds: above 1, ours is the faster
    ratio_spread: float


@dataclass
class _Samples:
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def summary(self) -> Timing:
        s, r = self.seconds, self.ratios
        return Timing(statistics.median(s), spread(s), min(s), len(s), statistics.median(r), spread(r))


def spread(samples: Sequence[float]) -> float:
    """Interquartile range / median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def clock_for(threads: int) -> Clock:
    """One thread is timed by the process's CPU time, several by the wall."""
    return time.process_time if threads == 1 else time.perf_counter


def sampler(f: Callable[[], object], clock: Clock) -> Sampler:
    def sample(repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            f()
        return (clock() - start) / repeats

    return sample


def interleaved(
    samplers: Mapping[str, Sampler], *, ours: str, apart: Collection[str] = (), seconds: float
) -> dict[str, Timing]:
    """Time every method for about `seconds` in all, at least five rounds. Methods must have been called before.

    A round has one sample of ours and of every other method, whose ratio is theirs. Those `apart` run in processes of
    their own, so ours is timed right before and after each of them. A method much slower than ours sits out rounds, so
    that it does not eat up the time of the others.
    """
    once = {name: sample(1) for name, sample in samplers.items()}
    repeats = {name: max(1, int(_SAMPLE / max(t, 1e-7))) for name, t in once.items()}
    period = {name: max(1, round(t / (3 * max(once[ours], _SAMPLE)))) for name, t in once.items()}
    found = {name: _Samples() for name in samplers}
    order, shuffle = list(samplers), random.Random(0).shuffle
    start = time.perf_counter()
    for n in range(_MOST):
        if n >= _FEWEST and time.perf_counter() - start > seconds:
            break
        shuffle(order)
        times: dict[str, float] = {}
        beside: dict[str, float] = {}
        for name in order:
            if not _takes_part(n, once[name], period[name]):
                continue
            before = samplers[ours](repeats[ours]) if name in apart else 0.0
            times[name] = samplers[name](repeats[name])
            if name in apart:
                beside[name] = (before + samplers[ours](repeats[ours])) / 2
        for name, t in times.items():
            found[name].seconds.append(t)
            found[name].ratios.append(t / beside.get(name, times[ours]))
    return {name: s.summary() for name, s in found.items()}


def _takes_part(n: int, once: float, period: int) -> bool:
    """Whether a method is timed in round n; ours always is, as its period is 1 and rounds are its length."""
    if period == 1:
        return True
    return n == 0 if once > _LONG else n < 3 or n % period == 0
