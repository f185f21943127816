"""In which order threads run, and when asynchronous operations take effect."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

ASCENDING, DESCENDING, RANDOM_PRIORITY, RANDOM_STEP = range(4)
LATE, EAGER, RANDOM = range(3)
EVERY: Final = 12  # schedules that a kernel should pass


@dataclass(frozen=True)
class Schedule:
    """One way a launch may go.

    `elected` is the lane that elect.sync picks. `hang_overtaken`: a wait that two phases of its mbarrier have passed by
    hangs, as on the hardware.
    """

    warp_order: int
    async_mode: int
    elected: int
    seed: int
    hang_overtaken: bool = False

    @classmethod
    def number(cls, n: int) -> Schedule:
        """The first six are the extremes; all further ones are random, each with its own seed."""
        extremes = [
            (ASCENDING, LATE),
            (DESCENDING, LATE),
            (ASCENDING, EAGER),
            (DESCENDING, EAGER),
            (RANDOM_PRIORITY, LATE),
            (RANDOM_STEP, RANDOM),
        ]
        if n < len(extremes):
            return cls(*extremes[n], 0, n)
        return cls((RANDOM_PRIORITY, RANDOM_STEP)[n % 2], (RANDOM, LATE, RANDOM, EAGER)[n // 2 % 4], n * 5 % 32, n)


class Policy(ctypes.Structure):
    """struct Policy of runtime/state.hpp."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("warp_order", "async_mode", "elected", "races", "proxies", "hang_overtaken")),
        ("seed", ctypes.c_uint64),
    ]

    @classmethod
    def of(cls, s: Schedule, *, races: bool, proxies: bool) -> Policy:
        return cls(s.warp_order, s.async_mode, s.elected, races, proxies, s.hang_overtaken, s.seed)
