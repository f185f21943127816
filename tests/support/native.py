"""Native code against the interpreter: inputs of any library operator, schedules that cover every field, distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.codegen_cache.compilers import find_compiler
from tilewright.commands.operators import library
from tilewright.dsl.build import build
from tilewright.dsl.dtypes import DTYPES, Kind
from tilewright.dsl.errors import IllegalSchedule
from tilewright.dsl.isa import supported
from tilewright.dsl.schedule import Schedule, check_schedule
from tilewright.ops.cache import PagedLeaf
from tilewright.ops.masks import mask_named
from tilewright.random_inputs import Inputs, Sizes, binding_of, extents
from tilewright.references import SAMPLES, Sample

OPERATORS = library()
ISAS = tuple(isa.name for isa in supported())
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")

# Constants with no default, and small widths for those that have large ones.
CONSTANTS: dict[str, dict[str, object]] = {
    "flash_attention": {"mask": mask_named("test", "sliding_window_causal", 11), "with_lse": True},
    "mla_indexer": {"mask": mask_named("test", "causal", None)},
    "mla_attention": {"latent": 40, "rope": 8},
    "mla_sparse_attention": {"latent": 40},
    "indexer_blocks": {"depth": 24},
    "compress_overlapping": {"dim": 24},
    "differential_attention": {"half": 12},
}
FIXED = frozenset(CONSTANTS) - {"flash_attention", "mla_indexer"} | {"compress_windows"}
NARROW = {"dim": 24, "value_dim": 20}  # no vector's length divides these

# ---- schedules -------------------------------------------------------------------------------------------------------

VALUES: dict[str, tuple[Any, ...]] = {
    "rows": (1, 4, 16, 3),
    "heads": (None, 1, 2),
    "keys": (16, 40, 128, 6),
    "partitions": (1, 3),
    "start": ("aligned", "first"),
    "strip": (5, 12, 32, 0),
    "masks": ("branch", "split", "always"),
}


def spread(n: int) -> Schedule:
    """The n-th of schedules in which every value of a field meets every value of the others, sooner or later."""
    picked: dict[str, Any] = {}
    for step, (name, values) in zip((1, 5, 7, 3, 11, 13, 17), VALUES.items(), strict=True):
        picked[name] = values[(n * step + n // len(values)) % len(values)]
    return Schedule(**picked)


def fitted(inputs: Inputs, schedule: Schedule) -> Schedule:
    """The schedule with those fields changed that the operator refuses."""
    program, binding = build(inputs.spec), binding_of(inputs.spec, inputs.sizes)
    for _ in range(8):
        try:
            check_schedule(program, binding, schedule)
            return schedule
        except IllegalSchedule as e:
            name = str(e.fields["field"])
            whole = binding.heads if "reduction" in str(e) else 1
            changed: dict[str, Any] = {name: whole if name == "heads" else 1}
            schedule = replace(schedule, **changed)
    raise AssertionError(schedule)


# ---- inputs and calls ------------------------------------------------------------------------------------------------


@cache
def _known(name: str) -> frozenset[str]:
    operator, sample = OPERATORS[name], SAMPLES.get(name, Sample())
    spec = operator.trace(**{**sample.constants, **CONSTANTS.get(name, {})})
    return frozenset(extents(spec, Sizes()))


def inputs_of(name: str, seed: int, **sizes: Any) -> Inputs:
    """A ragged batch of a library operator: many rows, one row, none, a long and an empty past."""
    made: dict[str, Any] = {"rows": (5, 1, 0, 18), "cached": (3, 70, 9, 0), "heads": 4, "page_size": 5, **sizes}
    sample, narrow = SAMPLES.get(name, Sample()), {} if name in FIXED else NARROW
    dims = {a: n for a, n in {**narrow, **made.pop("dims", {})}.items() if a in _known(name)}
    constants = {**sample.constants, **CONSTANTS.get(name, {})}
    return sample.inputs(OPERATORS[name], constants, Sizes(dims=dims, **made), seed)


def of_sequences(inputs: Inputs, order: Sequence[int]) -> tuple[Inputs, list[int]]:
    """A batch of some of the sequences, in any order, on the same pages; and which rows those are."""
    offsets = inputs.input_row_offsets.tolist()
    taken = [r for b in order for r in range(offsets[b], offsets[b + 1])]
    arguments = dict(inputs.arguments)
    for p in inputs.spec.params:
        x = arguments[p.name]
        if isinstance(x, PagedLeaf):
            table, lengths = x.lookup_table[list(order)], x.cache_lengths[list(order)]
            arguments[p.name] = replace(x, lookup_table=table, cache_lengths=lengths)
        elif "row" in p.axes:
            assert isinstance(x, Tensor)
            arguments[p.name] = x[taken]
    counts = [0, *(offsets[b + 1] - offsets[b] for b in order)]
    return replace(inputs, arguments=arguments, input_row_offsets=torch.tensor(counts).cumsum(0).int()), taken


@dataclass(frozen=True)
class On:
    """Where a call runs."""

    target: str
    isa: str | None = None
    threads: int | None = None


INTERPRETER = On("interpret")


def run(
    inputs: Inputs, schedule: Schedule | None, on: On, output: str = "float32", **options: Any
) -> dict[str, Tensor]:
    """The outputs, floating ones as `output`."""
    dtypes = {n: DTYPES[output] for n, e in inputs.spec.outputs if e.dtype.kind is Kind.FLOAT}
    with pytest.MonkeyPatch.context() as m:
        if on.isa is not None:
            m.setenv("TILEWRIGHT_CPU_ISA", on.isa)
        if on.threads is not None:
            m.setenv("TILEWRIGHT_THREADS", str(on.threads))
        return tilewright.run(
            inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants,
            schedule=schedule, output_dtypes=dtypes, target=on.target, **options,
        )  # fmt: skip


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest finite value above 1; inf where only one is finite."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else torch.inf
    a, b = got.double(), want.double()
    finite = b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(7e7), b[~finite].nan_to_num(7e7)) or not a[finite].isfinite().all():
        return torch.inf
    largest = max(1.0, float(b[finite].abs().amax())) if finite.any() else 1.0
    return float((a[finite] - b[finite]).abs().amax()) / largest if finite.any() else 0.0


def tolerance(output: str, schedule: Schedule) -> float:
    """Sums in another order; of rounded weights, which may round apart, and one step of a narrow output."""
    return 3e-6 if output == "float32" and schedule.products == "float32" else 2.0**-8
