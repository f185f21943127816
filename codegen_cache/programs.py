"""Lowered programs, kept in memory for the life of the process.

A program is looked up by what it was compiled from: the operator's meaning, its binding, the schedule and the target.
No run-time value is part of that, so changing lengths, tables, scales, sinks or scalars never compiles anything.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tilewright.dsl import knobs
from tilewright.dsl.errors import NoCompiler, NotOnTarget
from tilewright.dsl.interp import Interpreter
from tilewright.dsl.loops import Program
from tilewright.dsl.lower import lower
from tilewright.dsl.printer import show_program
from tilewright.dsl.scalars import Number
from tilewright.dsl.schedule import Binding, Schedule
from tilewright.dsl.source import Loc
from tilewright.dsl.spec import Spec
from tilewright.dsl.targets import Target
from tilewright.dsl.windows import DEFAULT_BUDGET

from .compilers import COMPILERS, find_compiler
from .native_program import NativeProgram


@dataclass(frozen=True)
class ProgramKey:
    """What a program was made from. `loc` keeps operators of one meaning apart: errors name the right source."""

    fingerprint: str
    loc: Loc
    binding: Binding
    schedule: Schedule
    target: Target
    check_finite: bool


class Runner(Protocol):
    """Runs a program on tensors. Outputs are written in place."""

    def run(
        self,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        threads: int | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> None: ...


@dataclass(frozen=True)
class Ready:
    """A program and what runs it."""

    program: Program
    runner: Runner


_PROGRAMS: dict[ProgramKey, Ready] = {}
_LOCK = threading.Lock()


def _new_lock() -> None:
    """A forked child may find the lock held by a thread that it does not have."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def program_for(
    spec: Spec, loc: Loc, binding: Binding, schedule: Schedule, target: Target, *, check_finite: bool
) -> Ready:
    """The lowered program, made at its first use. Threads that ask at once wait for one lowering."""
    key = ProgramKey(spec.fingerprint, loc, binding, schedule, target, check_finite)
    if key in _PROGRAMS:
        return _PROGRAMS[key]
    with _LOCK:
        if key not in _PROGRAMS:
            _PROGRAMS[key] = _make(spec, key)
        return _PROGRAMS[key]


def programs() -> tuple[tuple[ProgramKey, Ready], ...]:
    """Every program made so far, oldest first."""
    return tuple(_PROGRAMS.items())


def _runner(program: Program, key: ProgramKey) -> Runner:
    if key.target.gpu is not None:
        raise NotOnTarget(target=key.target.name, what="launcher here", expected="`tilewright emit`, or CPU tensors")
    if key.target.isa is None or key.check_finite:  # native code looks at no contents: the interpreter runs its nest
        return Interpreter(program, check_finite=key.check_finite)
    compiler = find_compiler()
    if compiler is None:
        raise NoCompiler(target=key.target.name, expected=COMPILERS)
    return NativeProgram(program, key.target.isa, compiler)


def _make(spec: Spec, key: ProgramKey) -> Ready:
    debug = knobs.DEBUG.get()
    start = time.perf_counter()
    previous = ""

    def watch(name: str, program: Program) -> None:
        nonlocal previous
        text = show_program(program)
        print(f"-- {spec.name} after {name}" + (" (unchanged)" if text == previous else f"\n{text}"), file=sys.stderr)
        previous = text

    program = lower(spec, key.binding, key.schedule, gpu=key.target.gpu, watch=watch if debug >= 5 else None)
    ready = Ready(program, _runner(program, key))
    if debug >= 1:
        print(f"-- {spec.name} for {key.target.name}: {key.schedule}", file=sys.stderr)
    if debug >= 2:
        print(f"-- {spec.name} lowered in {(time.perf_counter() - start) * 1e3:.1f} ms", file=sys.stderr)
    if debug == 4:
        print(show_program(program), file=sys.stderr)
    return ready
