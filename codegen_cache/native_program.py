"""A lowered program as native code: printed, compiled once, called with the addresses of its arguments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tilewright.dsl.dtypes import Kind
from tilewright.dsl.emit_c import CSource, emit_c
from tilewright.dsl.errors import OutOfBounds
from tilewright.dsl.isa import Isa
from tilewright.dsl.loops import Arg, Program
from tilewright.dsl.scalars import Number
from tilewright.dsl.windows import DEFAULT_BUDGET, bare_workspace, row_windows, sizes_named

from .compilers import Compiler
from .native import Program as NativeCall
from .native import load
from .native_build import build
from .threads import parallel_address, thread_count

FAULT_WORDS = 5  # as enumerated in dsl/cpu/program.h


def as_listed(t: Tensor, arg: Arg) -> Tensor:
    """The tensor as native code reads it: neighbours along the last axis stand side by side, and integers have the type
    that the program was compiled for; what that cannot hold stays out of range.
    """
    if t.ndim and t.shape[-1] > 1 and t.stride(-1) != 1:
        t = t.contiguous()
    if arg.dtype.kind is not Kind.INT or str(t.dtype) == f"torch.{arg.dtype}":
        return t
    limits = torch.iinfo(getattr(torch, arg.dtype.name))
    return t.to(torch.int64).clamp(limits.min, limits.max).to(getattr(torch, arg.dtype.name))


class NativeProgram:
    """A program ready to run. Running allocates workspaces and each thread's scratch memory, nothing else."""

    def __init__(self, program: Program, isa: Isa, compiler: Compiler) -> None:
        self.program = program
        self.source: CSource = emit_c(program, isa)
        self.compiler = compiler
        library = load(build(self.source.text, program.name, isa, compiler))
        self.native = NativeCall(
            library,
            parallel_address(compiler),
            pointers=len(self.source.tensors) + 1,
            strides=sum(len(a.shape) for a in self.source.tensors),
            sizes=len(self.source.sizes),
            numbers=len(self.source.numbers),
        )

    def run(
        self,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        threads: int | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> None:
        """Run every kernel on these arguments; outputs are written in place. As `Interpreter.run`.

        Raises OutOfBounds where a table or list held an index that its tensor does not have; nothing was read there.
        """
        sizes: dict[str, Number] = dict(scalars)
        for a in self.program.args:
            sizes.update(sizes_named(a, tensors))
        indices = {
            a.name: tensors[a.name].numpy()
            for a in self.program.args
            if a.shape and a.dtype.kind is Kind.INT and self.program.row_bytes is not None
        }
        count = threads or thread_count()
        for window in row_windows(self.program, sizes, indices, budget_bytes):
            work = {w.name: bare_workspace(w, window) for w in self.program.workspaces}
            self._run_window({**tensors, **work}, window, count)

    def _run_window(self, tensors: Mapping[str, Tensor], sizes: Mapping[str, Number], threads: int) -> None:
        fault = np.zeros(FAULT_WORDS, np.int64)
        given = [as_listed(tensors[a.name], a) for a in self.source.tensors]
        self.native.run(
            [*(t.data_ptr() for t in given), fault.ctypes.data],
            [s for t in given for s in t.stride()],
            [int(sizes[n]) for n in self.source.sizes],
            [float(sizes[n]) for n in self.source.numbers],
            threads,
        )
        if fault[0]:
            raise self.out_of_bounds(fault.tolist())

    def out_of_bounds(self, fault: list[int]) -> OutOfBounds:
        """The error that a program's fault words describe."""
        _, tensor, axis, index, extent = fault
        return OutOfBounds(
            loc=None,
            kernel=self.program.kernels[0].name,
            access="read of",
            tensor=self.source.tensors[tensor].name,
            axis=axis,
            index=index,
            extent=extent,
        )
