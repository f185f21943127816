"""`tilewright run`: an operator on generated inputs, timed, or traced statement by statement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.codegen_cache.bind import Bound, bind
from tilewright.codegen_cache.launch import choose_target, run
from tilewright.dsl.dtypes import DType, Kind
from tilewright.dsl.interp import Interpreter
from tilewright.dsl.interp_values import Frame
from tilewright.dsl.loops import For, If, Let, Search, Stmt, Strip
from tilewright.dsl.lower import lower
from tilewright.dsl.printer import show_stmt
from tilewright.dsl.rewrite import written
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.targets import Target, default_schedule
from tilewright.random_inputs import Inputs, torch_dtype

from .options import schedule as read_schedule


@dataclass(frozen=True)
class Plan:
    """What a run was decided to be: arguments bound, a target, a schedule."""

    inputs: Inputs
    bound: Bound
    target: Target
    schedule: Schedule


@dataclass(frozen=True)
class Ran:
    """Outputs of a run, its wall-clock time, and what kind of time that is."""

    outputs: dict[str, Tensor]
    milliseconds: float
    timing: str


def plan(inputs: Inputs, schedule_text: str | None, target: str | None) -> Plan:
    """Bind the inputs and choose the schedule: the target's default for the batch, with the fields given changed.

    Raises BadOption, UnknownTarget and the `Argument*` errors.
    """
    spec, name = inputs.spec, inputs.operator.name
    dtypes = {n: e.dtype for n, e in spec.outputs}
    bound = bind(name, spec, inputs.arguments, inputs.input_row_offsets, dtypes, {})
    chosen = choose_target(name, target, bound.device, spec)
    default = default_schedule(chosen, spec, bound.binding, bound.rows, bound.batch)
    return Plan(inputs, bound, chosen, read_schedule(schedule_text, default))


def execute(p: Plan, repeat: int = 5) -> Ran:
    """Run through `tilewright.run`: once to compile, then `repeat` times; once in all if the author's code prints."""

    def call() -> dict[str, Tensor]:
        return run(
            p.inputs.operator, p.inputs.arguments, p.inputs.input_row_offsets,
            constants=p.inputs.constants, schedule=p.schedule, target=p.target.name,
        )  # fmt: skip

    outputs, first = timed(call)
    if p.inputs.spec.probes:
        return Ran(outputs, first, "one run, compiling included")
    return Ran(outputs, statistics.median(timed(call)[1] for _ in range(repeat)), f"median of {repeat} runs")


def timed(call: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], float]:
    """A call's result and its milliseconds."""
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e3


# ---- trace -----------------------------------------------------------------------------------------------------------


def trace(p: Plan, emit: Callable[[str], None], limit: int) -> tuple[Ran, int]:
    """Run the target's nest once in the interpreter, showing the first `limit` statements; and how many there were.

    A line has the author's place, the statement, and of the tile it made the extremes of its finite elements and how
    many are NaN. Loops, strips and branches themselves are left out: they would stand after their bodies.
    """
    count = 0

    def tell(s: Stmt, f: Frame) -> None:
        nonlocal count
        if isinstance(s, For | If | Strip):
            return
        count += 1
        if count <= limit:
            emit(_trace_line(s, f))

    interpreter = Interpreter(lower(p.inputs.spec, p.bound.binding, p.schedule), on_statement=tell)
    size = {**dict(p.bound.binding.sizes), "row": p.bound.rows}
    results = {n: _unwritten([size[a] for a in e.axes], e.dtype) for n, e in p.inputs.spec.outputs}

    def call() -> dict[str, Tensor]:
        if p.bound.rows:
            interpreter.run({**p.bound.tensors, "offsets": p.inputs.input_row_offsets, **results}, p.bound.scalars)
        return results

    return Ran(*timed(call), "one run, traced"), count


def _unwritten(shape: list[int], dtype: DType) -> Tensor:
    """An output before the run: NaN, or an integer that nothing computes."""
    value = torch.nan if dtype.kind is Kind.FLOAT else torch.iinfo(torch_dtype(dtype)).min
    return torch.full(shape, value, dtype=torch_dtype(dtype))


def _trace_line(s: Stmt, f: Frame) -> str:
    text = f"{getattr(s, 'loc', None) or '-'}: {show_stmt(s)[0]}"
    if isinstance(s, Let | Search):
        return f"{text}   {f.scalars[s.name]}"
    return "   ".join([text, *(_numbers(f, n) for n in written(s))])


def _numbers(f: Frame, tile: str) -> str:
    x = torch.as_tensor(f.tiles[tile]).to(torch.float64)
    finite, nans = x[x.isfinite()], int(x.isnan().sum())
    if finite.numel() == 0:
        return f"no finite element, nan {nans}"
    return f"min {float(finite.min()):.6g} max {float(finite.max()):.6g} nan {nans}"
