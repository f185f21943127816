"""Storing rows in a paged cache: each row in its slot and nothing anywhere else, or an error and nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilewright.codegen_cache import checks
from tilewright.dsl.errors import (
    ArgumentDeviceError,
    ArgumentDTypeError,
    ArgumentError,
    ArgumentLayoutError,
    ArgumentRankError,
    ArgumentShapeError,
    ArgumentTypeError,
    ArgumentValueError,
)
from tilewright.ops import cache_append
from tilewright.ops.cache import PagedKVCache
from tilewright.ops.cache_append import quantize

F8 = torch.float8_e4m3fn
UNUSED = 0xFF  # a byte that makes a NaN of every dtype
JUNK = (-1, 2**31 - 1, 0, 3)  # what engines leave in entries that nobody needs: null, sentinel, stale and aliased pages


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64).to(dtype)


def unused(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.empty(shape, dtype=dtype)
    made.view(torch.uint8).fill_(UNUSED)
    return made


def bits(tensor: Tensor) -> Tensor:
    """Every byte of a tensor's storage, gaps between pages included: NaN junk compares equal to itself."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


# ---- against a literal loop --------------------------------------------------------------------------------------


@dataclass
class Step:
    """A batch of new rows for a pool in some layout, and the slot that a literal reading gives each row."""

    blocks: Tensor
    scales: Tensor | None
    granularity: int | None
    table: Tensor
    lengths: Tensor
    offsets: Tensor
    slots: list[tuple[int, int]]
    seed: int

    def cache(self) -> PagedKVCache:
        return PagedKVCache(
            self.blocks, self.table, self.lengths, scales=self.scales, quantization_granularity=self.granularity
        )


def pool(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Blocks [pages, kv_dim, layers, page_size, kv_heads, dim] of a kind that engines allocate, every byte `UNUSED`."""
    pages, kv_dim, layers, page_size, heads, dim = shape
    match draw(st.sampled_from(["dense", "sliced", "interleaved"])):
        case "dense":
            return unused(shape, dtype)
        case "sliced":
            return unused((pages, kv_dim, layers + 1, page_size, heads, dim + 3), dtype)[:, :, 1:, :, :, 2:-1]
        case _:
            made = unused((layers, pages, heads, page_size, kv_dim * dim), dtype)
            return torch.unflatten(made, -1, (kv_dim, dim)).permute(1, 4, 0, 3, 2, 5)


@st.composite
def steps(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Step:
    dtype = draw(st.sampled_from(dtypes))
    page_size, layers, heads, dim = (draw(st.integers(1, n)) for n in (5, 2, 3, 7))
    lengths = draw(st.lists(st.integers(0, 9), max_size=4))
    counts = [draw(st.integers(0, 6)) for _ in lengths]
    spare = draw(st.integers(0, 2))
    ends = [-(-(old + new) // page_size) for old, new in zip(lengths, counts, strict=True)]
    max_pages = max(ends, default=0) + spare
    order = draw(st.permutations(range(sum(ends) + 4)))
    free = iter(order)
    table, slots = [], []
    for old, new, end in zip(lengths, counts, ends, strict=True):
        row = [draw(st.sampled_from(JUNK)) for _ in range(max_pages)]
        for page in range(old // page_size, end if new else 0):
            row[page] = next(free)
        table.append(row)
        slots += [(row[position // page_size], position % page_size) for position in range(old, old + new)]
    kv_dim = draw(st.integers(1, 2))
    shape = (len(order), kv_dim, layers, page_size, heads, dim)
    granularity = draw(st.integers(1, dim + 1)) if dtype == F8 else None
    scales = None
    if granularity is not None:
        scales = pool(draw, (*shape[:-1], -(-dim // granularity)), torch.float32)
    index = draw(st.sampled_from([torch.int32, torch.int64, torch.uint32]))
    return Step(
        blocks=pool(draw, shape, dtype),
        scales=scales,
        granularity=granularity,
        table=torch.tensor(table, dtype=torch.int64).reshape(len(lengths), max_pages).to(index),
        lengths=ints(*lengths, dtype=index),
        offsets=ints(*np.cumsum([0, *counts]).tolist(), dtype=index),
        slots=slots,
        seed=draw(st.integers(0, 2**32)),
    )


def rows_for(step: Step, dtype: torch.dtype, spread: float = 1.0) -> list[Tensor]:
    """New rows for each field; `spread` sets magnitudes apart by powers of ten."""
    _, kv_dim, _, _, heads, dim = step.blocks.shape
    generator = torch.Generator().manual_seed(step.seed)
    normal, power = torch.randn(2, kv_dim, len(step.slots), heads, dim, generator=generator)
    return list((normal * 10 ** (spread * power)).to(dtype))


@settings(max_examples=150, deadline=None)
@given(
    steps((torch.float32, torch.float16, torch.bfloat16)),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
)
def test_rows_land_in_their_slots_and_nothing_else_changes(step: Step, given_dtype: torch.dtype, device: bool) -> None:
    """Read back through the table by a literal loop; every other byte of the buffer is as it was.

    With `device`, by the road that rows on a device take.
    """
    fields, layer = rows_for(step, given_dtype), step.blocks.shape[2] - 1
    before, lengths = bits(step.blocks), step.lengths.clone()
    with pytest.MonkeyPatch.context() as patch:
        if device:
            values_are_unread(patch)
        step.cache().append(layer, fields[0], fields[1] if len(fields) == 2 else None, step.offsets)
    for field, rows in enumerate(fields):
        for row, (page, slot) in zip(rows, step.slots, strict=True):
            stored = step.blocks[page, field, layer, slot]
            assert torch.equal(stored, row.to(step.blocks.dtype))
            stored.view(torch.uint8).fill_(UNUSED)  # as it was
    assert torch.equal(bits(step.blocks), before)
    assert torch.equal(step.lengths, lengths)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(steps((F8,)), st.floats(0, 6))
def test_quantized_rows_are_within_half_an_ulp(step: Step, spread: float) -> None:
    fields, layer = rows_for(step, torch.float32, spread), step.blocks.shape[2] - 1
    assert step.scales is not None
    assert step.granularity is not None
    before = bits(step.blocks), bits(step.scales)
    step.cache().append(layer, fields[0], fields[1] if len(fields) == 2 else None, step.offsets)
    for field, rows in enumerate(fields):
        for row, (page, slot) in zip(rows, step.slots, strict=True):
            stored, scale = step.blocks[page, field, layer, slot], step.scales[page, field, layer, slot]
            of_element = scale.repeat_interleave(step.granularity, -1)[:, : row.shape[-1]].double()
            exact = row.double().abs() / of_element
            ulp = 2.0 ** (exact.log2().floor().clamp(min=-6) - 3)
            error = (row.double() - stored.double() * of_element).abs() / of_element
            assert bool((error <= ulp * (0.5 + 2**-19)).all())  # the division in float32 may move a tie
            amax = torch.stack([part.abs().amax(-1) for part in row.split(step.granularity, -1)], -1)
            assert torch.equal(scale, amax / 448)
            stored.view(torch.uint8).fill_(UNUSED)
            scale.view(torch.uint8).fill_(UNUSED)
    assert torch.equal(bits(step.blocks), before[0])
    assert torch.equal(bits(step.scales), before[1])


# ---- quantising --------------------------------------------------------------------------------------------------


def quantized(*row: float, granularity: int = 8) -> tuple[list[float], list[float]]:
    stored, scale = quantize(torch.tensor([[row]]), granularity)
    assert (stored.dtype, scale.dtype) == (F8, torch.float32)
    return stored.float().flatten().tolist(), scale.flatten().tolist()


def test_granules_have_scales_of_their_own() -> None:
    assert quantized(448, 0, 0, 0, 896, granularity=2) == ([448, 0, 0, 0, 448], [1, 1, 2])
    assert quantized(-448, 1, granularity=2**62) == ([-448, 1], [1])  # never padded to the granularity


def test_rounding_is_to_nearest_even() -> None:
    assert quantized(448, 17, 19, 432, 431.9)[0] == [448, 16, 20, 448, 416]


def test_elements_that_are_not_finite() -> None:
    stored, scale = quantized(torch.inf, 224, -torch.inf, torch.nan)
    assert (stored[:3], np.isnan(stored[3]), scale) == ([448, 448, -448], True, [0.5])
    stored, scale = quantized(torch.inf, torch.nan, granularity=1)
    assert (stored[0], np.isnan(stored[1]), scale) == (448, True, [1, 1])


def test_extreme_magnitudes() -> None:
    largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    stored, scale = quantized(largest, -largest)
    assert stored == [448, -448]
    assert scale[0] * 448 == pytest.approx(largest)
    stored, scale = quantized(1e-40, 0)  # below 448 subnormal scales: kept at the smallest normal, still half an ulp
    assert scale == [smallest]
    assert abs(stored[0] * smallest - 1e-40) <= smallest * 2**-10


# ---- addresses ---------------------------------------------------------------------------------------------------


def test_an_address_past_2_31_elements() -> None:
    """SEMANTICS C10: page 131072 of stride 16384 elements. The pool is 4 GiB of which a few pages are ever touched."""
    blocks = torch.empty(131073, 1, 1, 128, 1, 128, dtype=torch.float16)
    assert blocks.stride(0) == 16384
    blocks[0] = 0
    cache = PagedKVCache(blocks, ints([131072]), ints(127))
    cache.append(0, torch.full((1, 1, 128), 3.0), None, ints(0, 1))
    assert bool((blocks[131072, 0, 0, 127] == 3).all())
    assert not bool(blocks[0].any())


def test_sequences_may_share_pages_that_are_not_written() -> None:
    blocks = torch.zeros(4, 1, 1, 2, 1, 1)
    cache = PagedKVCache(blocks, ints([1, 2], [1, 3]), ints(2, 2))
    cache.append(0, torch.tensor([5.0, 6.0]).reshape(2, 1, 1), None, ints(0, 1, 2))
    assert blocks.flatten().tolist() == [0, 0, 0, 0, 5, 0, 6, 0]


def test_rows_may_be_views_of_the_cache() -> None:
    blocks = torch.zeros(3, 2, 1, 2, 1, 1)
    blocks[0, 0, 0, :, 0, 0] = torch.tensor([1.0, 2.0])
    leaf = PagedKVCache(blocks, ints([0, 1]), ints(1)).layer(0)
    PagedKVCache(blocks, ints([0, 1]), ints(1)).append(0, leaf.keys[0], leaf.keys[0], ints(0, 2))
    assert leaf.keys[:2].flatten().tolist() == [1, 1, 2, 0]
    assert leaf.values is not None
    assert leaf.values[:2].flatten().tolist() == [0, 1, 2, 0]


def test_appending_across_inference_mode_and_to_a_parameter() -> None:
    with torch.inference_mode():
        made_inside = torch.zeros(2, 2, 1, 2, 1, 1)
    rows = torch.ones(1, 1, 1, requires_grad=True)
    for blocks in (made_inside, torch.nn.Parameter(torch.zeros(2, 2, 1, 2, 1, 1))):
        PagedKVCache(blocks, ints([1]), ints(1)).append(0, rows, rows, ints(0, 1))
        assert blocks[1, :, 0, 1].flatten().tolist() == [1, 1]


# ---- where values are not read (a device) ------------------------------------------------------------------------


def values_are_unread(patch: pytest.MonkeyPatch) -> None:
    for module in (cache_append, checks):
        patch.setattr(module, "checks_values", lambda tensor: False)


@pytest.mark.parametrize(
    ("offsets", "lengths", "table", "stored"),
    [
        ((0, 2, 3), (1, 0), [[1, 2], [3, -1]], {(1, 1): 0, (2, 0): 1, (3, 0): 2}),
        ((0, 1, 2), (1, 0), [[1, 2], [3, -1]], {(1, 1): 0, (3, 0): 1}),  # the last row is padding
        ((0, 0, 0), (1, 0), [[1, 2], [3, -1]], {}),
        ((0, 2, 3), (1, 0), [[1, -1], [3, -1]], {(1, 1): 0, (3, 0): 2}),  # a skipped page, not the last of the pool
        ((0, 2, 3), (3, 0), [[1, 2], [4, -1]], {(2, 1): 0}),  # past the table, past the pool
        ((0, 2, 3), (9, 9), [[1, 2], [3, -1]], {}),
        ((0, 2, 3), (-3, 0), [[1, 2], [3, -1]], {(3, 0): 2}),
        ((0, 2, 3), (0, 0), [[], []], {}),
    ],
)
def test_rows_without_a_place_are_not_stored(
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    table: list[list[int]],
    stored: dict[tuple[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values_are_unread(monkeypatch)
    blocks = torch.full((4, 2, 1, 2, 1, 1), 9.0)
    rows = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    PagedKVCache(blocks, ints(*table), ints(*lengths)).append(0, rows, -rows, ints(*offsets))
    expected = torch.full((4, 2, 2), 9.0)
    for (page, slot), row in stored.items():
        expected[page, :, slot] = torch.tensor([row + 1.0, -row - 1.0])
    assert torch.equal(blocks.reshape(4, 2, 2), expected)


def test_nothing_to_store_into(monkeypatch: pytest.MonkeyPatch) -> None:
    values_are_unread(monkeypatch)
    rows = torch.ones(2, 1, 1)
    PagedKVCache(torch.zeros(0, 1, 1, 2, 1, 1), ints([0]), ints(0)).append(0, rows, None, ints(0, 2))
    blocks = torch.zeros(1, 1, 1, 2, 1, 1)
    PagedKVCache(blocks, torch.zeros(0, 1, dtype=torch.int32), ints()).append(0, rows, None, ints(0))
    assert not blocks.any()


# ---- refusals ----------------------------------------------------------------------------------------------------

HEADS, DIM = 2, 8
K, V, OFFSETS = torch.ones(3, HEADS, DIM), torch.ones(3, HEADS, DIM), ints(0, 2, 3)


def append(
    blocks: Tensor,
    *,
    layer: int = 0,
    k: Any = K,
    v: Any = V,
    offsets: Any = OFFSETS,
    table: Any = ([1, 2], [0, -1]),
    lengths: tuple[int, ...] = (3, 0),
) -> None:
    scales = torch.zeros(*blocks.shape[:-1], 1) if blocks.dtype == F8 else None
    PagedKVCache(blocks, ints(*table), ints(*lengths), scales=scales).append(layer, k, v, offsets)


Refusal = tuple[dict[str, Any], type[ArgumentError], str]
REFUSALS: dict[str, Refusal] = {
    "layer": ({"layer": 2}, ArgumentValueError, "layer is 2; expected an integer in 0..1"),
    "k_rows: rank": ({"k": K[0]}, ArgumentRankError, "k_rows has rank 2; expected 3: [rows, kv_heads=2, head_dim=8]"),
    "k_rows: heads": (
        {"k": torch.ones(3, 1, DIM)},
        ArgumentShapeError,
        "k_rows has shape [3, 1, 8]; expected [rows, kv_heads=2, head_dim=8]",
    ),
    "k_rows: dtype": (
        {"k": K.double()},
        ArgumentDTypeError,
        "k_rows has dtype float64; expected float32, float16 or bfloat16",
    ),
    "k_rows: device": ({"k": K.to("meta")}, ArgumentDeviceError, "k_rows is on meta; expected cpu, where the cache is"),
    "v_rows: missing": (
        {"v": None},
        ArgumentTypeError,
        "v_rows is a NoneType; expected a torch tensor or a numpy array",
    ),
    "v_rows: too few": (
        {"v": V[:2]},
        ArgumentShapeError,
        "v_rows has shape [2, 2, 8]; expected [rows=3, kv_heads=2, head_dim=8]",
    ),
    "offsets: shape": (
        {"offsets": ints(0, 3)},
        ArgumentShapeError,
        "row_offsets has shape [2]; expected [batch + 1=3]",
    ),
    "offsets: dtype": (
        {"offsets": OFFSETS.float()},
        ArgumentDTypeError,
        "row_offsets has dtype float32; expected int32, int64 or uint32",
    ),
    "offsets: start": ({"offsets": ints(1, 2, 3)}, ArgumentValueError, "row_offsets[0] is 1; expected 0"),
    "offsets: order": (
        {"offsets": ints(0, 4, 3)},
        ArgumentValueError,
        "row_offsets[2] is 3; expected at least row_offsets[1] = 4",
    ),
    "offsets: rows of nobody": (
        {"offsets": ints(0, 1, 2)},
        ArgumentValueError,
        "row_offsets[2] is 2; expected 3, the number of rows",
    ),
    "offsets: too many": (
        {"offsets": ints(0, 1, 4)},
        ArgumentValueError,
        "row_offsets[2] is 4; expected 3, the number of rows",
    ),
    "offsets: device": (
        {"offsets": OFFSETS.to("meta")},
        ArgumentDeviceError,
        "row_offsets is on meta; expected cpu, where the cache is",
    ),
    "position past the table": (
        {"lengths": (7, 0)},
        ArgumentError,
        "lookup_table has 2 pages a sequence; "
        "expected at least 3 of 4 slots, as row 1 goes to position 8 of sequence 0",
    ),
    "a table without pages": (
        {"table": [[], []]},
        ArgumentError,
        "lookup_table has 0 pages a sequence; "
        "expected at least 1 of 4 slots, as row 0 goes to position 3 of sequence 0",
    ),
    "page past the pool": (
        {"table": [[1, 2], [4, 0]]},
        ArgumentValueError,
        "lookup_table[1, 0] is 4; expected one of the pool's 4 pages, as row 2 goes to position 0 of sequence 1",
    ),
    "negative page": (
        {"table": [[1, -1], [0, 0]]},
        ArgumentValueError,
        "lookup_table[0, 1] is -1; expected one of the pool's 4 pages, as row 1 goes to position 4 of sequence 0",
    ),
    "two rows in one slot": (
        {"table": [[1, 2], [2, 0]]},
        ArgumentError,
        "lookup_table sends rows 1 and 2 to slot 0 of page 2; expected a slot of its own for every new row",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, F8])
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_leaves_the_cache_untouched(case: str, dtype: torch.dtype) -> None:
    arguments, error, message = REFUSALS[case]
    blocks = torch.full((4, 2, 2, 4, HEADS, DIM), torch.nan).to(dtype)
    before = bits(blocks)
    with pytest.raises(error) as caught:
        append(blocks, **arguments)
    assert str(caught.value) == f"PagedKVCache.append: {message}"
    assert torch.equal(bits(blocks), before)


def refused(call: Callable[[], object], error: type[ArgumentError]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_values_for_a_cache_of_keys_alone() -> None:
    assert refused(lambda: append(torch.zeros(4, 1, 1, 4, HEADS, DIM)), ArgumentTypeError) == (
        "PagedKVCache.append: v_rows is a Tensor; expected None, as the cache holds keys alone"
    )


def test_lengths_that_went_negative_since() -> None:
    lengths = ints(0, 0)
    cache = PagedKVCache(torch.zeros(4, 2, 1, 4, HEADS, DIM), ints([1, 2], [0, -1]), lengths)
    lengths[1] = -1
    assert refused(lambda: cache.append(0, K, V, OFFSETS), ArgumentValueError) == (
        "PagedKVCache.append: cache_lengths[1] is -1; expected 0 or more"
    )


def test_expanded_pages_and_scales_are_not_written() -> None:
    blocks = torch.zeros(4, 2, 1, 1, HEADS, DIM).expand(-1, -1, -1, 4, -1, -1)
    assert refused(lambda: append(blocks), ArgumentLayoutError) == (
        "PagedKVCache.append: keys has strides [32, 0, 8, 1]; "
        "expected elements that do not overlap, as it is written to"
    )
    stored = torch.zeros(4, 2, 1, 4, HEADS, DIM, dtype=F8)
    per_tensor = torch.ones(1).expand(4, 2, 1, 4, HEADS, 1)  # one scale for all, which a kernel may read
    cache = PagedKVCache(stored, ints([1, 2], [0, -1]), ints(3, 0), scales=per_tensor)
    assert refused(lambda: cache.append(0, K, V, OFFSETS), ArgumentLayoutError).startswith(
        "PagedKVCache.append: key_scales has strides [0, 0, 0, 1]"
    )
