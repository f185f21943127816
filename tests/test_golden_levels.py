# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""The text of every level for a few small operators: what a change to the compiler changes is seen line by line."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from support.running import mask

from tilewright.dsl import Paged, Rows, dot, max, op, softmax, where
from tilewright.dsl.build import build
from tilewright.dsl.dtypes import bf16, f8e4m3, f32
from tilewright.dsl.lower import PASSES, lower
from tilewright.dsl.printer import show_program, show_spec, show_tile_program
from tilewright.dsl.schedule import Binding, LeafBinding, Schedule
from tilewright.dsl.spec import Spec
from tilewright.ops.flash_attention import flash_attention

Golden = Callable[[str, str], None]


def binding(dtype: str = "float32", granularity: int | None = None) -> Binding:
    """4 query heads, 2 key-value heads, 8 wide, in pages of 4."""
    stored = {"float32": f32, "bfloat16": bf16, "float8": f8e4m3}[dtype]
    leaf = LeafBinding(4, 2, stored, granularity=granularity)
    tensors = ("out", f32), ("q", bf16 if dtype == "bfloat16" else f32), ("sink", f32)
    return Binding((("dim", 8), ("head", 4), ("value_dim", 8)), tensors, (("kv", leaf),))


def after_passes(spec: Spec, schedule: Schedule, bound: Binding | None = None) -> dict[str, str]:
    """The nest after every pass, and that of the last by the name "final"."""
    found: dict[str, str] = {}
    program = lower(
        spec, bound or binding(), schedule, watch=lambda name, program: found.update({name: show_program(program)})
    )
    assert list(found) == [p.__name__ for p in PASSES]
    assert found["allocate_tiles"] == show_program(program)
    return found | {"final": show_program(program)}


CAUSAL = flash_attention.trace(mask=mask("causal"))


def test_causal_spec(golden: Golden) -> None:
    """Causal attention with a sink, traced."""
    golden("level_causal_spec", show_spec(CAUSAL))


def test_causal_tile_program(golden: Golden) -> None:
    """The same as statements over tiles."""
    golden("level_causal_tiles", show_tile_program(build(CAUSAL)))


@pytest.mark.parametrize("stage", ["form_kernel", "bound_key_loops", "final"])
def test_causal_nest(stage: str, golden: Golden) -> None:
    """The same as a loop nest: first, with its key ranges, and finished."""
    golden(f"level_causal_{stage}", after_passes(CAUSAL, Schedule(rows=2, keys=8))[stage])


def test_window_split_and_partitioned(golden: Golden) -> None:
    """A sliding window, edges and middle in loops of their own, keys cut in two and merged, float8 with scales."""
    spec = flash_attention.trace(mask=mask("sliding_window_causal", 5), sink=None)
    schedule = Schedule(rows=2, heads=1, keys=8, partitions=2, masks="split")
    golden("level_window_final", after_passes(spec, schedule, binding("float8", 4))["final"])


@pytest.mark.parametrize("stage", ["bound_key_loops", "final"])
def test_sinks_and_window(stage: str, golden: Golden) -> None:
    """A union of two ranges: a loop for each, over the same states, no tile twice."""
    spec = flash_attention.trace(mask=lambda q, k: (k <= q) & ((k < 4) | (q - k < 6)), sink=None)
    golden(f"level_union_{stage}", after_passes(spec, Schedule(rows=2, keys=8))[stage])


def test_inexact_predicate(golden: Golden) -> None:
    """Keys that no row of a tile sees lie between those that some row sees: found out before they are fetched."""
    spec = flash_attention.trace(mask=lambda q, k: (k <= q) & ((q - k) % 3 == 0), sink=None)
    golden("level_inexact_final", after_passes(spec, Schedule(rows=2, keys=8), binding("bfloat16"))["final"])


@op
def close_to_the_best(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, key: key <= query)
    s = dot(q, keys)
    out = softmax(where(s > max(s, over="key") - 1.0, s, -inf)) @ keys.v
    print(out)
    return out


@pytest.mark.parametrize("level", ["spec", "tiles"])
def test_two_walks_and_a_print(level: str, golden: Golden) -> None:
    """A reduction that needs another's result, and a print of the author's."""
    spec = close_to_the_best.trace()
    golden(f"level_walks_{level}", show_spec(spec) if level == "spec" else show_tile_program(build(spec)))
