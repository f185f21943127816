"""Storing a call's new rows in a paged cache: where each row goes, and what is stored there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tilewright.codegen_cache.checks import (
    ANY,
    ROW_DTYPES,
    Array,
    Extent,
    as_tensor,
    checks_values,
    expect_distinct_elements,
    expect_dtype,
    expect_non_negative,
    expect_row_offsets,
    expect_same_device,
    expect_shape,
    first_true,
    widened,
)
from tilewright.dsl.errors import ArgumentError, ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from .cache import PagedLeaf

FLOAT8_MAX: Final = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_NORMAL: Final = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class _Field:
    """Keys or values: where they are stored, and the new rows [rows, kv_heads, width]."""

    argument: str
    pages: Tensor
    scales_argument: str
    scales: Tensor | None
    rows: Tensor


@dataclass(frozen=True, eq=False)
class _Places:
    """Where each row goes, all int64 [rows]: row t to `slot[t]` of `page[t]`, if `stored[t]`.

    `stored` is false for a row that belongs to no sequence, whose position lies past the table, or whose page lies
    outside the pool; its other fields are then in bounds and mean nothing.
    """

    sequence: Tensor
    position: Tensor
    page: Tensor
    slot: Tensor
    stored: Tensor


def append_rows(op: str, leaf: PagedLeaf, k_rows: Array, v_rows: Array | None, row_offsets: Array) -> None:
    """`PagedKVCache.append` for one layer. Checks everything, then computes what to store, then stores it."""
    given = _checked_rows(op, "k_rows", k_rows, leaf.keys, ANY)
    rows = given.shape[0]
    fields = [_Field("keys", leaf.keys, "key_scales", leaf.key_scales, given)]
    if leaf.values is not None:
        given = _checked_rows(op, "v_rows", v_rows, leaf.values, rows)
        fields.append(_Field("values", leaf.values, "value_scales", leaf.value_scales, given))
    elif v_rows is not None:
        expected = "None, as the cache holds keys alone"
        raise ArgumentTypeError(op=op, argument="v_rows", got=type(v_rows).__name__, expected=expected)
    offsets = as_tensor(op, "row_offsets", row_offsets)
    expect_row_offsets(op, "row_offsets", offsets, batch=leaf.batch, rows=rows)
    expect_same_device(op, "row_offsets", offsets, "the cache", leaf.keys)
    for field in fields:
        expect_distinct_elements(op, field.argument, field.pages)
        if field.scales is not None:
            expect_distinct_elements(op, field.scales_argument, field.scales)
    expect_non_negative(op, "cache_lengths", leaf.cache_lengths)
    if rows == 0:
        return
    # Engines make their caches in inference mode and may append outside it, which torch refuses without this.
    with torch.inference_mode():
        checked = checks_values(leaf.keys)
        if not checked and not (leaf.batch and leaf.num_pages):
            return
        places = _places(leaf, widened(offsets), rows)
        if checked:
            _expect_stored(op, leaf, places)
        writes: list[tuple[Tensor, Tensor]] = []
        for field in fields:
            if field.scales is not None and leaf.quantization_granularity is not None:
                stored, scale = quantize(field.rows, leaf.quantization_granularity)
                writes += [(field.pages, stored), (field.scales, scale)]
            else:
                # A copy where the rows are themselves views of the pool, which the first write would change.
                copy = any(_share(field.rows, other.pages) for other in fields)
                writes.append((field.pages, field.rows.to(field.pages.dtype, copy=copy)))
        if checked:
            for pages, stored in writes:
                pages[places.page, places.slot] = stored
        else:
            _store_without_reading(places, writes)


def quantize(rows: Tensor, granularity: int) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn rows and float32 scales [rows, heads, ceil(dim / granularity)], so that rows = stored * scale.

    The rules are those of `PagedKVCache.append`. The floor on scales keeps them normal: subnormal scales have too few
    bits to divide by, and are flushed to zero on devices.
    """
    dim = rows.shape[-1]
    size = min(granularity, dim)
    granules = -(-dim // size)
    padded = torch.nn.functional.pad(rows.to(torch.float32), (0, granules * size - dim))
    padded = padded.reshape(*rows.shape[:-1], granules, size)
    largest = torch.where(padded.isfinite(), padded.abs(), 0).amax(-1)
    scale = torch.where(largest > 0, (largest / FLOAT8_MAX).clamp(min=_SMALLEST_NORMAL), 1)
    # The clamp is for infinities and for quotients rounded above 448, which not every cast to float8 saturates.
    stored = (padded / scale.unsqueeze(-1)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return stored.flatten(-2)[..., :dim], scale


def _checked_rows(op: str, argument: str, value: Array | None, pages: Tensor, rows: Extent) -> Tensor:
    tensor = as_tensor(op, argument, value)
    expect_dtype(op, argument, tensor, ROW_DTYPES)
    expect_shape(op, argument, tensor, rows=rows, kv_heads=pages.shape[2], head_dim=pages.shape[3])
    expect_same_device(op, argument, tensor, "the cache", pages)
    return tensor


def _places(leaf: PagedLeaf, offsets: Tensor, rows: int) -> _Places:
    """Addresses in int64 throughout: page ids and positions times their strides pass 2^31."""
    table, max_pages = leaf.lookup_table, leaf.lookup_table.shape[1]
    row = torch.arange(rows, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True)  # ends at or before the row
    owned = sequence < leaf.batch
    sequence = sequence.clamp(max=leaf.batch - 1)
    position = widened(leaf.cache_lengths)[sequence] + row - offsets[sequence]
    column = position.div(leaf.page_size, rounding_mode="floor")
    tabled = owned & (column >= 0) & (column < max_pages)
    if table.dtype == torch.uint32:  # not indexable on every device; a page id past 2^31 stays out of any pool
        table = table.view(torch.int32)
    page = widened(table[sequence, column.clamp(0, max_pages - 1)]) if max_pages else torch.zeros_like(row)
    stored = tabled & (page >= 0) & (page < leaf.num_pages)
    return _Places(sequence, position, torch.where(stored, page, 0), position.remainder(leaf.page_size), stored)


def _expect_stored(op: str, leaf: PagedLeaf, places: _Places) -> None:
    """Every row has a slot of the pool, and no two rows the same one."""
    if (bad := first_true(~places.stored)) is not None:
        (row,) = bad
        sequence, position = int(places.sequence[row]), int(places.position[row])
        column = position // leaf.page_size
        where = f"row {row} goes to position {position} of sequence {sequence}"
        if column >= leaf.lookup_table.shape[1]:
            got = f"has {leaf.lookup_table.shape[1]} pages a sequence"
            expected = f"at least {column + 1} of {leaf.page_size} slots, as {where}"
            raise ArgumentError(op=op, argument="lookup_table", got=got, expected=expected)
        name, page = f"lookup_table[{sequence}, {column}]", int(leaf.lookup_table[sequence, column])
        expected = f"one of the pool's {leaf.num_pages} pages, as {where}"
        raise ArgumentValueError(op=op, argument=name, got=page, expected=expected)
    taken, order = torch.sort(places.page * leaf.page_size + places.slot, stable=True)
    if (bad := first_true(taken.diff() == 0)) is not None:
        first, second = int(order[bad]), int(order[bad[0] + 1])
        got = f"sends rows {first} and {second} to slot {int(places.slot[first])} of page {int(places.page[first])}"
        raise ArgumentError(op=op, argument="lookup_table", got=got, expected="a slot of its own for every new row")


def _store_without_reading(places: _Places, writes: list[tuple[Tensor, Tensor]]) -> None:
    """Stores the rows that have a place, without waiting for the device to say which those are.

    The number of rows written cannot depend on values, so a row without a place repeats the write of one that has
    one; where none has, all write back what they find.
    """
    anchor = places.stored.to(torch.uint8).argmax()
    some = places.stored[anchor]
    row = torch.where(places.stored, torch.arange(places.stored.shape[0], device=anchor.device), anchor)
    page, slot = places.page[row], places.slot[row]
    for pages, stored in writes:
        pages[page, slot] = torch.where(some, stored[row], pages[page, slot])


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
