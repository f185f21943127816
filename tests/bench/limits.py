"""What this machine can do at best, measured: matrix products in each dtype, and reading memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from timing import Clock

_SIDE, _READ, _TRIES = 2048, 256 << 20, 5


@dataclass(frozen=True)
class Limits:
    """Rates of torch's square matrix product and of its sum over memory that no cache holds; the best of some tries."""

    flops: dict[str, float]  # per second, by the operands' dtype
    bytes: float  # per second

    def seconds(self, flops: int, size: int, dtype: torch.dtype) -> float:
        """The least that a workload could take."""
        return max(flops / self.flops[_name(dtype)], size / self.bytes)


def measured(clock: Clock) -> Limits:
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(_SIDE, _SIDE).to(dtype), torch.randn(_SIDE, _SIDE).to(dtype)
        flops[_name(dtype)] = 2 * _SIDE**3 / min(_seconds(clock, a, b) for _ in range(_TRIES))
    memory = torch.ones(_READ // 4)
    return Limits(flops, _READ / min(_seconds(clock, memory) for _ in range(_TRIES)))


def _seconds(clock: Clock, a: torch.Tensor, b: torch.Tensor | None = None) -> float:
    start = clock()
    _ = a.sum() if b is None else a @ b
    return clock() - start


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
