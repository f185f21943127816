"""Native code against the interpreter, on the same nest: every operator of the library, every field of a schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from support.native import (
    INTERPRETER,
    ISAS,
    OPERATORS,
    VALUES,
    On,
    distance,
    fitted,
    inputs_of,
    needs_compiler,
    run,
    spread,
    tolerance,
)

from tilewright.dsl.build import build
from tilewright.dsl.isa import ISAS as ALL_ISAS
from tilewright.dsl.isa import supported
from tilewright.dsl.schedule import Schedule, check_schedule
from tilewright.dsl.targets_cpu import native_schedule
from tilewright.random_inputs import binding_of
from tilewright.references import LIBRARY, Candidates, compare, reference_outputs

pytestmark = [needs_compiler, pytest.mark.slow]
NAMES = sorted(OPERATORS)
STORED = (("float32", None), ("bfloat16", None), ("float8_e4m3fn", 8), ("float16", None))
VARIANTS = 3
CASES = [(name, VARIANTS * n + v) for n, name in enumerate(NAMES) for v in range(VARIANTS)]
NARROW = tuple(isa.name for isa in supported() if isa.bf16_dot)


def case(n: int) -> tuple[Schedule, str, str, str, int | None]:
    """(schedule, instruction set, output dtype, cache dtype, granularity) of the n-th case."""
    isa = ISAS[-1 - (n + n // len(ISAS)) % len(ISAS)]
    stored, granularity = STORED[(n + n // 4) % len(STORED)]
    narrow = stored != "float32" and isa in NARROW
    schedule = spread(n)
    if narrow:
        schedule = replace(schedule, products="bfloat16")
    return schedule, isa, "bfloat16" if narrow else "float32", stored, granularity


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(name, n, id=f"{name}-{n % VARIANTS}", marks=pytest.mark.slow if n % VARIANTS == 2 else ())
        for name, n in CASES
    ],
)
def test_native_code_is_the_nest(name: str, n: int) -> None:
    """The same numbers but for the order of sums, on a ragged batch in pages full of NaN wherever nobody may look.

    Picks of a selection are compared by score: of two that differ by rounding, either is right.
    """
    schedule, isa, output, stored, granularity = case(n)
    dtype = "bfloat16" if output == "bfloat16" else "float32"
    inputs = inputs_of(name, n, cache_dtype=stored, granularity=granularity, dtype=dtype)
    schedule = fitted(inputs, schedule)
    want = run(inputs, schedule, INTERPRETER, output)
    got = run(inputs, schedule, On("cpu", isa), output)
    assert got.keys() == want.keys()
    for key, x in want.items():
        if x.is_floating_point():
            assert distance(got[key], x) <= tolerance(output, schedule), (schedule, isa)
    reference = reference_outputs(LIBRARY[name], inputs)
    picks = {key for key, r in reference.items() if isinstance(r, Candidates)}
    for c in compare(got, reference):
        assert c.ok or c.output not in picks, (schedule, isa, c)


def test_every_value_meets_several_operators() -> None:
    """Of every field and instruction set."""
    made = {n: (name, case(n)) for name, n in CASES if n % VARIANTS < 2}
    for field, values in VALUES.items():
        for value in values:
            assert len({name for name, c in made.values() if getattr(c[0], field) == value}) >= 5, (field, value)
    for isa in ISAS:
        assert len({name for name, c in made.values() if c[1] == isa}) >= 10
        rounded = {name for name, c in made.values() if c[1] == isa and c[0].products == "bfloat16"}
        assert len(rounded) >= (5 if isa in NARROW else 0)


@pytest.mark.parametrize("name", NAMES)
def test_default_schedules_are_legal(name: str) -> None:
    """For every instruction set, type stored, and mean number of rows."""
    program = None
    for stored, granularity in STORED:
        inputs = inputs_of(name, 0, cache_dtype=stored, granularity=granularity, heads=8)
        binding, program = binding_of(inputs.spec, inputs.sizes), program or build(inputs.spec)
        for isa, rows, batch in product(ALL_ISAS.values(), (0, 1, 3, 17, 4000), (1, 16)):
            check_schedule(program, binding, native_schedule(isa, inputs.spec, binding, rows, batch))
