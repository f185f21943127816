"""A GPU program run on CPU tensors by the emulator: windows of rows, workspaces and arguments as on a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.dsl.emit_tilelang_values import ELEMENTS
from tilewright.dsl.loops import Program
from tilewright.dsl.scalars import Number
from tilewright.dsl.windows import DEFAULT_BUDGET, row_windows, sizes_named, workspace

from .emulator import Schedule, emulate
from .tilelang_program import DeviceProgram


class EmulatedProgram:
    """Takes what the interpreter takes. Raises EmulationError for every fault of synchronisation that a run shows."""

    def __init__(self, program: Program, device: DeviceProgram, *, schedule: int | Schedule = 0) -> None:
        self.program, self.device, self.schedule = program, device, schedule

    def run(
        self,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        threads: int | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> None:
        """Run every kernel; outputs are written in place. `threads` is the interpreter's: a run here has one."""
        given = {a.name: tensors[a.name] for a in self.program.args if a.shape}
        sizes: dict[str, Number] = dict(scalars)
        for a in self.program.args:
            sizes.update(sizes_named(a, given))
        indices = {n: t.to(torch.int64).numpy() for n, t in given.items() if _is_index(t)}
        for window in row_windows(self.program, sizes, indices, budget_bytes):
            work = {w.name: workspace(w, window) for w in self.program.workspaces}
            stored = {n: as_stored(t) for n, t in (given | work).items()}
            for kernel in self.device.kernels:
                emulate(kernel, stored, window, schedule=self.schedule)


def _is_index(t: Tensor) -> bool:
    return not t.is_floating_point() and t.dtype is not torch.bool


def as_stored(t: Tensor) -> Tensor:
    """A tensor as programs declare it: float8 and conditions are bytes. No copy."""
    declared = getattr(torch, ELEMENTS[str(t.dtype).removeprefix("torch.")])
    return t if t.dtype is declared else t.view(declared)
