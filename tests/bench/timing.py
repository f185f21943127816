"""Timing methods against each other: interleaved in one process, in an order that changes from round to round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]

_SAMPLE = 0.02  # seconds that a sample lasts at least, by repeating the call
_FEWEST, _MOST = 5, 400  # rounds


@dataclass(frozen=True)
class Timing:
    """One method's seconds per call."""

    median: float
    spread: float  # interquartile range / median
    least: float
    samples: int
    ratio: float  # to the baseline: median over the rounds that timed both


def spread(samples: Sequence[float]) -> float:
    """Interquartile range / median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def interleaved(
    methods: Mapping[str, Callable[[], object]], *, clock: Clock, baseline: str, seconds: float
) -> dict[str, Timing]:
    """Time every method for about `seconds` in all, at least five rounds. Methods must have been called before.

    A method much slower than the baseline sits out rounds, so that it does not eat up the time of the others.
    """
    once = {name: _timed(f, clock, 1) for name, f in methods.items()}
    repeats = {name: max(1, int(_SAMPLE / max(t, 1e-7))) for name, t in once.items()}
    period = {name: max(1, round(t / (3 * max(once[baseline], _SAMPLE)))) for name, t in once.items()}
    samples: dict[str, dict[int, float]] = {name: {} for name in methods}
    order, shuffle = list(methods), random.Random(0).shuffle
    start = time.perf_counter()
    for n in range(_MOST):
        if n >= _FEWEST and time.perf_counter() - start > seconds:
            break
        shuffle(order)
        for name in order:
            if n < 3 or n % period[name] == 0:
                samples[name][n] = _timed(methods[name], clock, repeats[name])
    return {name: _summary(s, samples[baseline]) for name, s in samples.items()}


def _timed(f: Callable[[], object], clock: Clock, repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        f()
    return (clock() - start) / repeats


def _summary(samples: dict[int, float], baseline: dict[int, float]) -> Timing:
    values = list(samples.values())
    ratios = [t / baseline[n] for n, t in samples.items() if n in baseline]
    return Timing(statistics.median(values), spread(values), min(values), len(values), statistics.median(ratios))
