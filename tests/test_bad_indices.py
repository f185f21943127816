# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, operator, no-untyped-def"
"""Tables that are too short, pages and blocks that are not there: refused or unused, never read, on both targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batches import content, place
from support.native import inputs_of
from support.reference import assert_same_bits
from torch import Tensor

import tilewright
from tilewright.dsl import Const, Paged, Rows, dot, i32, op, softmax
from tilewright.dsl.errors import ArgumentValueError, OutOfBounds
from tilewright.dsl.schedule import Schedule
from tilewright.ops.cache import PagedLeaf
from tilewright.random_inputs import Inputs

pytestmark = pytest.mark.both_targets
OPERATORS = [("flash_attention", "kv"), ("latent_sparse_attention", "swa_cache"), ("mla_indexer", "k")]
SCHEDULES = (None, Schedule(rows=1, keys=16, start="first", strip=5), Schedule(rows=1, keys=3, masks="always"))


def leaf_of(inputs: Inputs, name: str) -> PagedLeaf:
    found = inputs.arguments[name]
    assert isinstance(found, PagedLeaf)
    return found


def run(inputs: Inputs, schedule: Schedule | None = None, **changed: PagedLeaf) -> dict[str, Tensor]:
    given = {**inputs.arguments, **changed}
    offsets, constants = inputs.input_row_offsets, inputs.constants
    return tilewright.run(inputs.operator, given, offsets, constants=constants, schedule=schedule)


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["default", "strips", "single"])
@pytest.mark.parametrize(("name", "leaf"), OPERATORS, ids=[n for n, _ in OPERATORS])
def test_a_table_that_is_too_short(
    name: str, leaf: str, schedule: Schedule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a page, for the longest sequence: its name and length; without checks, the table and the column. The table is
    followed by pages of the pool, so that reading on would give numbers.
    """
    inputs = inputs_of(name, 1)
    kv = leaf_of(inputs, leaf)
    pages = -(-(70 + 1) // kv.page_size)  # of sequence 1, see inputs_of
    wide = torch.zeros(len(kv.lookup_table), pages + 40, dtype=torch.int32)
    wide[:, : kv.lookup_table.shape[1]] = kv.lookup_table
    short = replace(kv, lookup_table=wide[:, : pages - 1])
    with pytest.raises(
        ArgumentValueError, match=rf"{leaf} sequence 1 is 71 keys long; expected at most {5 * (pages - 1)},"
    ):
        run(inputs, schedule, **{leaf: short})
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    with pytest.raises(OutOfBounds, match=rf"{leaf}_table at index {pages - 1} of axis 1, which has {pages - 1}$"):
        run(inputs, schedule, **{leaf: short})
    run(inputs, schedule)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@op
def in_blocks(q: Rows["head", "dim"], slots: Rows["slot", i32], kv: Paged["dim"], *, size: Const):
    keys = kv.blocks(slots, size)
    return softmax(dot(q, keys)) @ keys.v


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [2, 3, 64])
def test_blocks_far_past_the_end(size: int, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Nothing, as unused slots are: a block's first entry is counted in 64 bits, past 2**31 and 2**32."""
    data = content(rng, (9, 0), (2, 3), heads=4, kv_heads=2)
    leaf = place(data, rng).layer(0)
    far = [(1 << 31) - 1, (1 << 31) // size, (1 << 31) - size, (1 << 32) // size, (1 << 32) // size + 1]
    far += [1 << 32, (1 << 32) + 1, (1 << 62) // size, (1 << 63) - 1]
    far = [i for i in far if i <= torch.iinfo(dtype).max]
    slots = torch.tensor([[0] + [-1] * len(far)] * 5, dtype=dtype)
    bad = torch.tensor([[0, *far]] * 5, dtype=dtype)
    for schedule in (None, Schedule(rows=1, keys=4, start="first", partitions=2)):
        one, other = (
            tilewright.run(
                in_blocks,
                {"q": data.q, "slots": s, "kv": leaf},
                data.offsets,
                constants={"size": size},
                schedule=schedule,
            )["out"]
            for s in (slots, bad)
        )
        assert one.abs().min() > 0
        assert_same_bits(other, one)
