"""Running an operator on tensors: check the call, find its program, run it on its target."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from tilewright.dsl import knobs
from tilewright.dsl.dtypes import DTYPES, DType, Kind
from tilewright.dsl.errors import ArgumentDeviceError, ArgumentDTypeError, ArgumentError
from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.spec import Spec
from tilewright.dsl.targets import TARGETS, Target, default_schedule, target_named
from tilewright.dsl.windows import DEFAULT_BUDGET

from .bind import Bound, bind, dtype_of
from .calls import Facts, facts_of_run
from .checks import (
    INDEX_DTYPES,
    as_tensor,
    expect_apart,
    expect_contiguous_last,
    expect_distinct_elements,
    expect_dtype,
    expect_rank,
    expect_row_offsets,
    expect_same_device,
    expect_shape,
    is_writable,
    one_of,
)
from .compilers import has_compiler
from .prepared import again, first
from .programs import Ready, program_for
from .validate import validate


def choose_target(op: str, target: str | None, device: torch.device, spec: Spec) -> Target:
    """The target a call runs on: TILEWRIGHT_INTERPRET, else `target`, else TILEWRIGHT_TARGET, else by device.

    By device it is the first that can run the operator on this machine. One that is named is never replaced.
    """
    named = "interpret" if knobs.INTERPRET.get() else target or knobs.TARGET.get()
    if named is not None:
        chosen = target_named(named)
        if chosen.device != device.type:
            expected = f"{chosen.device}, where target {chosen.name!r} runs"
            raise ArgumentDeviceError(op=op, argument="every tensor of the call", got=device, expected=expected)
        return chosen
    for t in TARGETS.values():
        if t.device == device.type and t.gpu is None and not (t.compiled and (spec.probes or not has_compiler())):
            return target_named(t.name)
    known = ", ".join(sorted({t.device for t in TARGETS.values() if t.gpu is None}))
    raise ArgumentDeviceError(
        op=op, argument="every tensor of the call", got=device, expected=f"a device with a target: {known}"
    )


def run(
    operator: Operator,
    arguments: Mapping[str, object],
    input_row_offsets: object,
    *,
    constants: Mapping[str, object] | None = None,
    outputs: Mapping[str, object] | None = None,
    output_dtypes: Mapping[str, DType] | None = None,
    schedule: Schedule | None = None,
    partitions: int | None = None,
    budget_bytes: int = DEFAULT_BUDGET,
    target: str | None = None,
    op: str | None = None,
    names: Mapping[str, str] | None = None,
    facts: Facts | None = None,
) -> dict[str, Tensor]:
    """Run an operator; its named outputs.

    arguments: a value per parameter: tensors or numpy arrays, one layer of a paged cache, numbers; None for an optional
        operand left out.
    input_row_offsets: [batch + 1] int32, int64 or uint32, from 0, non-decreasing; rows of sequence b are
        offsets[b]..offsets[b + 1] - 1.
    constants: values of the operator's compile-time constants.
    outputs: buffers to write some or all outputs into; the others are allocated, in `output_dtypes` (default: float32).
    schedule: tile sizes; default by the batch. partitions: parts the keys are cut into, in place of
        the default schedule's.
    budget_bytes: what scores kept for a selection may take at once; rows are run a window at a time.
    names, op: what error messages call parameters and the call.
    facts: what the caller knows such calls by, who has found that this one cannot be made `again`.

    Raises the `Argument*` errors, IllegalSchedule, UnknownTarget; outputs are untouched by then.
    """
    if facts is None:
        facts = facts_of_run(
            operator, arguments, input_row_offsets, constants, outputs, output_dtypes, schedule, partitions, target
        )
        if (found := again(facts, budget_bytes)) is not None:
            return found
    op, names = op or operator.name, {"offsets": "input_row_offsets", **(names or {})}
    offsets = as_tensor(op, names["offsets"], input_row_offsets)
    expect_rank(op, names["offsets"], offsets, "batch + 1")
    expect_dtype(op, names["offsets"], offsets, INDEX_DTYPES)
    if len(offsets) == 0:
        raise ArgumentError(
            op=op, argument=names["offsets"], got="is empty", expected="[batch + 1] offsets, the first 0"
        )
    spec = _trace(op, operator, arguments, constants or {})
    for n in (*(outputs or {}), *(output_dtypes or {})):
        if n not in dict(spec.outputs):
            known = ", ".join(n for n, _ in spec.outputs)
            raise ArgumentError(op=op, argument=names.get(n, n), got="is not an output", expected=f"one of {known}")
    given = {n: as_tensor(op, names.get(n, n), t) for n, t in (outputs or {}).items() if t is not None}
    dtypes = {n: _output_dtype(op, names.get(n, n), n, e.dtype, given, output_dtypes or {}) for n, e in spec.outputs}
    bound = bind(op, spec, arguments, offsets, dtypes, names)
    chosen = choose_target(op, target, bound.device, spec)
    results = _results(op, spec, bound, given, outputs or {}, dtypes, names)
    checked = knobs.VALIDATE.get()
    if checked is not False:
        expect_row_offsets(op, names["offsets"], offsets, batch=bound.batch, rows=bound.rows)
    default = default_schedule(chosen, spec, bound.binding, bound.rows, bound.batch)
    if partitions is not None:
        default = replace(default, partitions=partitions)
    ready = program_for(spec, operator.loc, bound.binding, schedule or default, chosen, check_finite=checked is True)
    if (found := first(facts, spec, ready.runner, bound, results, budget_bytes)) is not None:
        return found
    if checked is not False:
        validate(op, spec, ready.program, bound, offsets.to(torch.int64).numpy(), names)
    if bound.rows:
        _execute(op, ready, bound, offsets, results, set(given), checked, budget_bytes)
    return results


def _execute(
    op: str,
    ready: Ready,
    bound: Bound,
    offsets: Tensor,
    results: dict[str, Tensor],
    given: set[str],
    checked: bool | None,
    budget_bytes: int,
) -> None:
    """Run the program. One that may yet refuse a value leaves the caller's buffers alone until it has finished.

    checked: what TILEWRIGHT_VALIDATE says; by default (None) everything that could be refused has been looked at.
    """
    start = time.perf_counter()
    may_fail = checked is not None or ready.program.checks_reads
    made = {n: t.clone() if may_fail and n in given else t for n, t in results.items()}  # rows of nobody stay
    tensors = {**bound.tensors, "offsets": offsets, **made}
    ready.runner.run(tensors, bound.scalars, threads=knobs.THREADS.get(), budget_bytes=budget_bytes)
    for n, t in results.items():
        if made[n] is not t:
            with torch.inference_mode():
                t.copy_(made[n])
    if knobs.DEBUG.get() >= 2:
        print(f"-- {op} ran in {(time.perf_counter() - start) * 1e3:.2f} ms", file=sys.stderr)


def _trace(op: str, operator: Operator, arguments: Mapping[str, object], constants: Mapping[str, object]) -> Spec:
    runtime = [n for n, (a, _) in operator.parameters.items() if a.kind is not None]
    optional = {n for n in runtime if operator.parameters[n][0].optional}
    for n in runtime:
        if n not in optional and arguments.get(n) is None:
            raise ArgumentError(op=op, argument=n, got="is missing", expected="a value")
    for n in constants:
        if n in runtime:
            raise ArgumentError(op=op, argument=n, got="is given as a constant", expected="a run-time argument")
    for n in arguments:
        if n not in runtime:
            raise ArgumentError(op=op, argument=n, got="is not a parameter", expected=f"one of {', '.join(runtime)}")
    absent = {n: None for n in optional if arguments.get(n) is None}
    return operator.trace(**constants, **absent)


# What results may be rounded to: never to a kind that cannot hold them.
STORED: Final = {
    Kind.FLOAT: (torch.float32, torch.float16, torch.bfloat16),
    Kind.INT: (torch.int32, torch.int64),
    Kind.BOOL: (torch.bool,),
}


def _output_dtype(
    op: str, shown: str, name: str, computed: DType, given: Mapping[str, Tensor], wanted: Mapping[str, DType]
) -> DType:
    """As asked for, else as the buffer given has it, else as it is computed: float32 or int32."""
    if name in given and name not in wanted:
        expect_dtype(op, shown, given[name], STORED[computed.kind])
        return dtype_of(given[name])
    dtype = wanted.get(name, computed)
    if dtype not in {DTYPES[str(d).removeprefix("torch.")] for d in STORED[computed.kind]}:
        expected = one_of([str(d).removeprefix("torch.") for d in STORED[computed.kind]])
        raise ArgumentDTypeError(op=op, argument=f"output_dtypes[{name!r}]", got=dtype, expected=expected)
    return dtype


def _results(
    op: str,
    spec: Spec,
    bound: Bound,
    given: Mapping[str, Tensor],
    as_given: Mapping[str, object],
    dtypes: Mapping[str, DType],
    names: Mapping[str, str],
) -> dict[str, Tensor]:
    """The tensors that outputs are written to: the caller's, checked, or new ones."""
    out: dict[str, Tensor] = {}
    for name, e in spec.outputs:
        shape = {a: bound.rows if a == "row" else bound.binding.size(a) for a in e.axes}
        dtype = getattr(torch, dtypes[name].name)
        if name not in given:
            out[name] = torch.empty(tuple(shape.values()), dtype=dtype, device=bound.device)
            continue
        t, shown = given[name], names.get(name, name)
        expect_shape(op, shown, t, **{("rows" if a == "row" else a): n for a, n in shape.items()})
        expect_dtype(op, shown, t, (dtype,))
        expect_same_device(op, shown, t, names["offsets"], torch.empty(0, device=bound.device))
        expect_contiguous_last(op, shown, t)
        expect_distinct_elements(op, shown, t)
        expect_apart(op, shown, t, {names.get(n, n): x for n, x in bound.tensors.items()})
        if not is_writable(as_given[name]):
            raise ArgumentError(op=op, argument=shown, got="is read-only", expected="a buffer that can be written")
        out[name] = t
    return out
