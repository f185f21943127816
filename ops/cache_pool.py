"""What a paged cache is made of: checks the pages an engine hands over and views them one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from tilewright.codegen_cache.checks import (
    ANY,
    CACHE_DTYPES,
    INDEX_DTYPES,
    POSITIVE,
    SCALE_DTYPES,
    Array,
    Extent,
    as_tensor,
    checks_values,
    expect_choice,
    expect_contiguous_last,
    expect_dtype,
    expect_int,
    expect_row_offsets,
    expect_same_device,
    expect_shape,
    first_true,
    is_writable,
    widened,
)
from tilewright.dsl.errors import ArgumentError, ArgumentTypeError, ArgumentValueError

Pages: TypeAlias = Array | Sequence[Array]
DTypes: TypeAlias = tuple[torch.dtype, ...]
Named: TypeAlias = list[tuple[str, Tensor]]

LAYOUTS: Final = {
    "NHD": ("pages", "page_size", "kv_heads", "head_dim"),
    "HND": ("pages", "kv_heads", "page_size", "head_dim"),
}
_BLOCKS: Final[dict[str, Extent]] = {
    "pages": ANY,
    "kv_dim": range(1, 3),
    "layers": POSITIVE,
    "page_size": POSITIVE,
    "kv_heads": POSITIVE,
    "head_dim": POSITIVE,
}


@dataclass(frozen=True, eq=False)
class Pool:
    """Keys, values and scales of every layer, each a view [pages, page_size, kv_heads, width] of the engine's memory.

    A tuple of layers, not one tensor, because engines often allocate each layer by itself.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...] | None
    key_scales: tuple[Tensor, ...] | None
    value_scales: tuple[Tensor, ...] | None
    granularity: int | None
    writable: bool


def pool_of_blocks(op: str, blocks: Array, scales: Array | None, granularity: int | None) -> Pool:
    """Views of `blocks` and `scales` as `PagedKVCache` documents them."""
    stored = as_tensor(op, "blocks", blocks)
    expect_dtype(op, "blocks", stored, CACHE_DTYPES)
    expect_shape(op, "blocks", stored, **_BLOCKS)
    expect_contiguous_last(op, "blocks", stored)
    width = stored.shape[-1]
    granularity = _granularity(op, "blocks", stored, "scales", scales, granularity, default=width)
    scale: Tensor | None = None
    if scales is not None and granularity is not None:
        scale = as_tensor(op, "scales", scales)
        axis, count = _granules(width, granularity)
        extents = dict(zip(_BLOCKS, stored.shape[:-1], strict=False)) | {axis: count}
        _expect_field(op, "scales", scale, "blocks", stored, SCALE_DTYPES, **extents)
    return Pool(
        keys=stored[:, 0].unbind(1),
        values=_field(stored, 1),
        key_scales=_field(scale, 0),
        value_scales=_field(scale, 1),
        granularity=granularity,
        writable=is_writable(blocks) and is_writable(scales),
    )


def pool_of_pages(
    op: str,
    k_pages: Pages,
    v_pages: Pages | None,
    k_scales: Pages | None,
    v_scales: Pages | None,
    granularity: int | None,
    layout: str,
) -> Pool:
    """Views of separate K and V pages as `PagedKVCache.from_block_table` documents them, turned to NHD."""
    expect_choice(op, "layout", layout, tuple(LAYOUTS))
    axes = LAYOUTS[layout]
    named_keys = _named_layers(op, "k_pages", k_pages)
    k_name, first = named_keys[0]
    expect_dtype(op, k_name, first, CACHE_DTYPES)
    expect_shape(op, k_name, first, **{axis: ANY if axis == "pages" else POSITIVE for axis in axes})
    outer = dict(zip(axes[:-1], first.shape, strict=False))

    def field(argument: str, pages: Pages, dtypes: DTypes, axis: str, width: Extent) -> tuple[Tensor, ...]:
        """The layers of one argument in NHD, each like the first layer's keys but for dtype and width."""
        layers = []
        for name, layer in _named_layers(op, argument, pages, of=("k_pages", len(named_keys))):
            _expect_field(op, name, layer, k_name, first, dtypes, **outer, **{axis: width})
            width = layer.shape[-1]  # later layers are as wide as the first
            layers.append(layer.transpose(1, 2) if layout == "HND" else layer)
        return tuple(layers)

    keys = field("k_pages", k_pages, (first.dtype,), "head_dim", first.shape[-1])
    values = None if v_pages is None else field("v_pages", v_pages, (first.dtype,), "head_dim", POSITIVE)
    k_width, v_width = first.shape[-1], values[0].shape[-1] if values else 0
    granularity = _granularity(op, "k_pages", first, "k_scales", k_scales, granularity, default=max(k_width, v_width))
    if values is not None:
        _granularity(op, "v_pages", values[0], "v_scales", v_scales, granularity, default=v_width)
    elif v_scales is not None:
        got, expected = type(v_scales).__name__, "None without v_pages"
        raise ArgumentTypeError(op=op, argument="v_scales", got=got, expected=expected)

    def scale_field(argument: str, scales: Pages | None, width: int) -> tuple[Tensor, ...] | None:
        if scales is None or granularity is None:
            return None
        return field(argument, scales, SCALE_DTYPES, *_granules(width, granularity))

    return Pool(
        keys=keys,
        values=values,
        key_scales=scale_field("k_scales", k_scales, k_width),
        value_scales=scale_field("v_scales", v_scales, v_width),
        granularity=granularity,
        writable=all(_is_writable(pages) for pages in (k_pages, v_pages, k_scales, v_scales)),
    )


def table_of_lists(
    op: str, pages: Tensor, page_indptr: Array, page_indices: Array, last_lengths: Array, new_row_offsets: Array
) -> tuple[Tensor, Tensor]:
    """The lookup table and cache lengths of page lists, as `PagedKVCache.from_csr` documents them.

    pages   one layer's keys [pages, page_size, kv_heads, head_dim]
    """
    indptr = as_tensor(op, "indptr", page_indptr)
    expect_dtype(op, "indptr", indptr, INDEX_DTYPES)
    expect_shape(op, "indptr", indptr, **{"batch + 1": POSITIVE})
    batch, page_size = indptr.shape[0] - 1, pages.shape[1]
    expect_row_offsets(op, "indptr", indptr, batch=batch)
    indices = as_tensor(op, "indices", page_indices)
    expect_dtype(op, "indices", indices, INDEX_DTYPES)
    expect_shape(op, "indices", indices, listed_pages=ANY)
    last_page_len = as_tensor(op, "last_page_len", last_lengths)
    expect_dtype(op, "last_page_len", last_page_len, INDEX_DTYPES)
    expect_shape(op, "last_page_len", last_page_len, batch=batch)
    row_offsets = as_tensor(op, "row_offsets", new_row_offsets)
    expect_row_offsets(op, "row_offsets", row_offsets, batch=batch)
    named = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len, "row_offsets": row_offsets}
    for argument, tensor in named.items():
        expect_same_device(op, argument, tensor, "k_pages", pages)

    starts, rows, last = widened(indptr), widened(row_offsets).diff(), widened(last_page_len)
    counts = starts.diff()
    keys = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
    if checks_values(pages):
        if (end := int(starts[batch])) > indices.shape[0]:
            expected = f"at most {indices.shape[0]}, the length of indices"
            raise ArgumentValueError(op=op, argument=f"indptr[{batch}]", got=end, expected=expected)
        if (bad := first_true((counts > 0) & ((last < 1) | (last > page_size)))) is not None:
            name, expected = f"last_page_len[{bad[0]}]", f"1..{page_size} (the page size), as the sequence has pages"
            raise ArgumentValueError(op=op, argument=name, got=int(last[bad]), expected=expected)
        if (bad := first_true(rows > keys)) is not None:
            got = f"gives sequence {bad[0]} {int(rows[bad])} new rows"
            expected = f"at most its {int(keys[bad])} keys, as last_page_len counts the new rows too"
            raise ArgumentError(op=op, argument="row_offsets", got=got, expected=expected)

    max_pages = int(counts.max()) if batch else 0
    column = torch.arange(max_pages, device=pages.device)
    used = column < counts[:, None]
    listed = widened(indices)[torch.where(used, starts[:-1, None] + column, 0)] if max_pages else used.long()
    table = torch.where(used, listed, -1)
    return table.to(_signed(indices.dtype)), (keys - rows).to(_signed(last_page_len.dtype))


def _field(blocks: Tensor | None, at: int) -> tuple[Tensor, ...] | None:
    return None if blocks is None or at >= blocks.shape[1] else blocks[:, at].unbind(1)


def _named_layers(op: str, argument: str, pages: Pages, of: tuple[str, int] | None = None) -> Named:
    """The tensors of `pages`, each under the name that messages give it; as many as the argument `of` has."""
    if isinstance(pages, (list, tuple)):
        layers = [(f"{argument}[{i}]", as_tensor(op, f"{argument}[{i}]", layer)) for i, layer in enumerate(pages)]
    else:
        layers = [(argument, as_tensor(op, argument, pages))]
    if not layers:
        raise ArgumentValueError(op=op, argument=argument, got="empty", expected="at least one layer")
    if of is not None and len(layers) != of[1]:
        got, expected = f"has {len(layers)} layer{'s'[: len(layers) != 1]}", f"{of[1]}, as many as {of[0]}"
        raise ArgumentError(op=op, argument=argument, got=got, expected=expected)
    return layers


def _expect_field(
    op: str,
    argument: str,
    tensor: Tensor,
    like_argument: str,
    like: Tensor,
    dtypes: DTypes,
    **axes: Extent,
) -> None:
    why = f"as {like_argument} has" if dtypes == (like.dtype,) else ""
    expect_dtype(op, argument, tensor, dtypes, why)
    expect_shape(op, argument, tensor, **axes)
    expect_contiguous_last(op, argument, tensor)
    expect_same_device(op, argument, tensor, like_argument, like)


def _granularity(
    op: str,
    argument: str,
    pages: Tensor,
    scales_argument: str,
    scales: Pages | None,
    granularity: int | None,
    *,
    default: int,
) -> int | None:
    """The granularity in force, or None without scales. float8 pages must have scales, and no others may."""
    if scales is None:
        if pages.dtype == torch.float8_e4m3fn:
            expected = f"float32 scales, as {argument} is float8_e4m3fn: a stored element means stored * scale"
            raise ArgumentValueError(op=op, argument=scales_argument, got="None", expected=expected)
        if granularity is not None:
            expected = "None without scales"
            raise ArgumentValueError(op=op, argument="quantization_granularity", got=granularity, expected=expected)
        return None
    expect_dtype(op, argument, pages, (torch.float8_e4m3fn,), f"as {scales_argument} is given")
    return default if granularity is None else expect_int(op, "quantization_granularity", granularity, POSITIVE)


def _granules(width: int, granularity: int) -> tuple[str, int]:
    """The last axis of a scales tensor: its extent, and a name that shows where that comes from."""
    return f"ceil(head_dim {width} / quantization_granularity {granularity})", -(-width // granularity)


def _is_writable(pages: Pages | None) -> bool:
    return all(map(is_writable, pages)) if isinstance(pages, (list, tuple)) else is_writable(pages)


def _signed(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or int64 for uint32, in which neither torch computes nor an unused -1 can be written."""
    return torch.int64 if dtype == torch.uint32 else dtype
