"""Programs for GPUs, checked on a CPU: schedules that cover every field, calls, the nest run by whoever can run one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.codegen_cache.bind import Bound, bind
from tilewright.dsl.build import build
from tilewright.dsl.dtypes import DTYPES, DType, Kind
from tilewright.dsl.errors import IllegalSchedule
from tilewright.dsl.gpu import GPUS, Gpu
from tilewright.dsl.legal_gpu import check_gpu
from tilewright.dsl.loops import Program
from tilewright.dsl.lower import lower
from tilewright.dsl.scalars import Number
from tilewright.dsl.schedule import Schedule, check_schedule
from tilewright.dsl.targets_gpu import product_type
from tilewright.dsl.windows import DEFAULT_BUDGET
from tilewright.random_inputs import Inputs

VALUES: dict[str, tuple[Any, ...]] = {
    "rows": (1, 4, 8, 3),
    "heads": (None, 1, 2),
    "keys": (16, 32, 64),
    "partitions": (1, 3),
    "start": ("aligned", "first"),
    "masks": ("branch", "split", "always"),
    "stages": (0, 1),
    "fetch": ("rows", "pages"),
    "threads": (0, 64, 256),
}


def spread(n: int) -> Schedule:
    """The n-th of schedules in which every value of a field meets every value of the others, sooner or later."""
    steps = (1, 5, 7, 3, 11, 13, 17, 19, 23)
    picked = {
        name: values[(n * step + n // len(values)) % len(values)]
        for step, (name, values) in zip(steps, VALUES.items(), strict=True)
    }
    return Schedule(**picked)


def bound_call(inputs: Inputs, output: str = "float32") -> tuple[Bound, dict[str, DType]]:
    """The arguments by the names that programs use, and the outputs' types."""
    dtypes = {n: DTYPES[output] if e.dtype.kind is Kind.FLOAT else e.dtype for n, e in inputs.spec.outputs}
    offsets = inputs.input_row_offsets
    return bind(inputs.operator.name, inputs.spec, inputs.arguments, offsets, dtypes, {}), dtypes


def fitted(inputs: Inputs, bound: Bound, schedule: Schedule, gpu: Gpu) -> Schedule:
    """The schedule with those fields changed that the operator or the architecture refuses."""
    program, binding = build(inputs.spec), bound.binding
    schedule = replace(schedule, products=product_type(inputs.spec, binding))
    defaults = Schedule()
    for _ in range(24):
        try:
            check_schedule(program, binding, schedule)
            check_gpu(program, binding, schedule, gpu)
            lower(inputs.spec, binding, schedule, gpu=gpu)
            return schedule
        except IllegalSchedule as e:
            name = str(e.fields["field"])
            value: Any = getattr(defaults, name)
            if name in ("rows", "partitions"):
                value = 1
            if name == "heads":
                value = binding.heads if "reduction" in str(e) else 1
            if name == "keys":
                value = max(16, schedule.keys // 2)
            if getattr(schedule, name) == value:  # nothing left to change there
                name, value = "rows", max(1, schedule.rows // 2)
            changed: dict[str, Any] = {name: value}
            schedule = replace(schedule, **changed)
    raise AssertionError(schedule)


class Runner(Protocol):
    """The interpreter, or an emulator."""

    def run(
        self,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        threads: int | None = None,
        budget_bytes: int = DEFAULT_BUDGET,
    ) -> None: ...


def outputs_of(
    inputs: Inputs, bound: Bound, dtypes: Mapping[str, DType], runner: Runner, budget: int = DEFAULT_BUDGET
) -> dict[str, Tensor]:
    """What a program writes; what it does not is NaN, or a number that nothing computes."""
    size = {**dict(bound.binding.sizes), "row": bound.rows}
    made = {
        n: torch.full(
            [size[a] for a in e.axes],
            torch.nan if e.dtype.kind is Kind.FLOAT else -77,
            dtype=getattr(torch, dtypes[n].name),
        )
        for n, e in inputs.spec.outputs
    }
    runner.run({**bound.tensors, "offsets": inputs.input_row_offsets, **made}, bound.scalars, budget_bytes=budget)
    return made


def nest_for(inputs: Inputs, bound: Bound, schedule: Schedule, target: str) -> Program:
    return lower(inputs.spec, bound.binding, schedule, gpu=GPUS[target])
