"""Batches on which the gallery's attention is compared with its references, `tilewright.references.LIBRARY`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import tilewright
from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Schedule
from tilewright.ops import (
    cascade,
    compressed,
    differential,
    fp8_scales,
    mixed_rows,
    mla,
    position_bias,
    sigmoid,
    sliding_sink,
    softcap,
    structured_masks,
)
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.random_inputs import Inputs, Sizes, random_inputs
from tilewright.references import LIBRARY, Candidates, compare, reference_outputs

FILES = (
    cascade, compressed, differential, fp8_scales, mixed_rows, mla, position_bias, sigmoid, sliding_sink, softcap,
    structured_masks,
)  # fmt: skip
OPERATORS: dict[str, Operator] = {
    x.name: x
    for module in FILES
    for x in vars(module).values()
    if isinstance(x, Operator) and x.fn.__module__ == module.__name__
}

ROWS, CACHED = (5, 1, 0, 7), (3, 21, 4, 0)
WIDTHS = {"dim": 8, "value_dim": 6}
LATENT = {"latent": 12, "rope": 4}


# ---- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call of an operator of the library: constants, extents, and what is not left to chance."""

    name: str
    constants: Mapping[str, object] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=lambda: WIDTHS)
    given: Mapping[str, object] = field(default_factory=dict)
    kv_heads: int = 2
    listed: bool = False  # a tile holds one row
    walks: int = 1  # over keys; partitions need one
    cache_dtype: str | None = None


def inputs_of(case: Case, seed: int, page_size: int = 3, **sizes: Any) -> Inputs:
    """The case's inputs. Two dtypes of caches are two sets of inputs, see `mixed`."""
    made = Sizes(**{
        "rows": ROWS, "cached": CACHED, "heads": 4, "kv_heads": case.kv_heads, "dims": case.dims,
        "page_size": page_size, "cache_dtype": case.cache_dtype, **sizes,
    })  # fmt: skip
    return random_inputs(OPERATORS[case.name], case.constants, made, seed, case.given)


def mixed(case: Case, seed: int, tails: tuple[str, ...], granularity: int, **sizes: Any) -> Inputs:
    """Inputs whose caches are float8 with scales, but for `tails`, which are bfloat16."""
    stored = inputs_of(replace(case, cache_dtype="float8_e4m3fn"), seed, granularity=granularity, **sizes)
    other = inputs_of(replace(case, cache_dtype="bfloat16"), seed, **sizes)
    return replace(stored, arguments={**stored.arguments, **{n: other.arguments[n] for n in tails}})


def run(inputs: Inputs, schedule: Schedule | None = None) -> dict[str, Tensor]:
    return tilewright.run(
        inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants, schedule=schedule
    )


def reference(inputs: Inputs) -> dict[str, Tensor | Candidates]:
    return reference_outputs(LIBRARY[inputs.operator.name], inputs)


def worst(inputs: Inputs, schedule: Schedule | None = None) -> float:
    """The largest error of all outputs against the reference, relative above 1."""
    return max(c.error for c in compare(run(inputs, schedule), reference(inputs)))


def leaf_of(
    keys: Sequence[Tensor], values: Sequence[Tensor] | None, rows: Sequence[int], page_size: int = 3
) -> PagedLeaf:
    """A cache of what each sequence has, [keys, kv_heads, width], pages in backward order, NaN in unused slots.

    rows: of this call, the last of each sequence's keys.
    """
    counts = [-(-len(k) // page_size) for k in keys]
    ends = [sum(counts[: b + 1]) for b in range(len(counts))]
    table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    for b, (end, count) in enumerate(zip(ends, counts, strict=True)):
        table[b, :count] = torch.arange(end - 1, end - count - 1, -1)

    def pages(stored: Sequence[Tensor]) -> Tensor:
        out = torch.full((ends[-1], page_size, *stored[0].shape[1:]), torch.nan).to(stored[0].dtype)
        for b, x in enumerate(stored):
            for j, row in enumerate(x):
                out[table[b, j // page_size], j % page_size] = row
        return out

    before = torch.tensor([len(k) - n for k, n in zip(keys, rows, strict=True)], dtype=torch.int32)
    v = None if values is None else pages(values)
    return PagedKVCache.from_block_table(pages(keys), v, table, before).layer(0)


def offsets_of(rows: Sequence[int]) -> Tensor:
    return torch.tensor([0, *rows]).cumsum(0, dtype=torch.int32)


def schedules_of(case: Case, schedules: tuple[Schedule, ...]) -> list[Schedule]:
    """The schedules that the case's operator can have, those that become the same once."""
    fitted = (
        replace(s, rows=1 if case.listed else s.rows, partitions=1 if case.walks > 1 else s.partitions)
        for s in schedules
    )
    return list(dict.fromkeys(fitted))
