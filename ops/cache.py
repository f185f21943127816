"""Paged key-value caches: views of page pools that a serving engine owns, never copies of them.

`PagedKVCache` is made from MAX-style blocks, from separate K and V pages with a block table, or from FlashInfer-style
page lists, checks what it is given, and hands one layer to a kernel as a `PagedLeaf`. Terms and contracts:
docs/semantics, section 1. Everything that may be large stays where it is: pages are only viewed, and page tables and
lengths are kept by reference (so an engine that updates them in place sees its update take effect).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.codegen_cache.checks import (
    ANY,
    INDEX_DTYPES,
    Array,
    as_tensor,
    expect_dtype,
    expect_int,
    expect_non_negative,
    expect_row_offsets,
    expect_same_device,
    expect_shape,
    widened,
)
from tilewright.dsl.errors import ArgumentError

from .cache_append import append_rows
from .cache_pool import Pages, Pool, pool_of_blocks, pool_of_pages, table_of_lists


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no truth value to compare by
class PagedLeaf:
    """One layer of a paged cache, as a kernel reads it. Strided views of the engine's memory, never copies.

    keys            [pages, page_size, kv_heads, head_dim], contiguous last axis, any other strides
    values          the same with its own last extent; None where the key row is the value row or there is none
    lookup_table    [batch, max_pages], int32, int64 or uint32: the page of logical page `j // page_size`. Entries that
                    no visible key needs may hold anything. Any strides
    cache_lengths   [batch], int32, int64 or uint32: tokens cached before this call
    key_scales      [pages, page_size, kv_heads, ceil(head_dim / quantization_granularity)], float32, contiguous last
                    axis: a stored key element means `stored * scale`. None unless the pages are float8_e4m3fn
    value_scales    the same for the values
    quantization_granularity    consecutive elements of a row that share a scale; None without scales
    """

    keys: Tensor
    values: Tensor | None
    lookup_table: Tensor
    cache_lengths: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    quantization_granularity: int | None

    @property
    def num_pages(self) -> int:
        return self.keys.shape[0]

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def value_dim(self) -> int | None:
        return None if self.values is None else self.values.shape[3]

    @property
    def batch(self) -> int:
        return self.lookup_table.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device


class PagedKVCache:
    """A paged cache of all layers: K and V, or K alone (latent and indexer caches).

    blocks          [pages, kv_dim, layers, page_size, kv_heads, head_dim]; kv_dim 2 is (K, V), 1 is K alone. float32,
                    float16, bfloat16, or float8_e4m3fn with scales. Any strides with a contiguous last axis
    lookup_table    [batch, max_pages], int32, int64 or uint32: physical page of each logical page; entries that no
                    visible key needs may hold anything
    cache_lengths   [batch], int32, int64 or uint32: tokens cached before this call (the call's own rows are stored by
                    `append` or by the engine, and are not counted here)
    scales          [pages, kv_dim, layers, page_size, kv_heads, ceil(head_dim / quantization_granularity)], float32,
                    contiguous last axis: the value is `stored * scale`. Coarser scales are expanded views (stride 0),
                    which can be read but not appended to
    quantization_granularity    consecutive elements that share a scale; by default a whole row

    numpy arrays are taken wherever tensors are, on their own memory. Lengths are compared with the table by `append`
    and by the operators, not here: a cache of pooled keys counts tokens, of which its table holds fewer.

    Raises the `Argument*` errors: wrong rank, shape, dtype, device or strides, float8 without scales, and on CPU
    tensors negative lengths.
    """

    def __init__(
        self,
        blocks: Array,
        lookup_table: Array,
        cache_lengths: Array,
        *,
        scales: Array | None = None,
        quantization_granularity: int | None = None,
    ) -> None:
        op = "PagedKVCache"
        pool = pool_of_blocks(op, blocks, scales, quantization_granularity)
        self._adopt(op, pool, "lookup_table", lookup_table, cache_lengths)

    @classmethod
    def from_block_table(
        cls,
        k_pages: Pages,
        v_pages: Pages | None,
        block_table: Array,
        cache_lengths: Array,
        *,
        layout: str = "NHD",
        k_scales: Pages | None = None,
        v_scales: Pages | None = None,
        quantization_granularity: int | None = None,
    ) -> PagedKVCache:
        """A cache from K and V pages in separate tensors (vLLM, FlashAttention, SGLang).

        k_pages     [pages, page_size, kv_heads, head_dim] for layout "NHD", [pages, kv_heads, page_size, head_dim] for
                    "HND"; a list or tuple holds one such tensor a layer, all of one shape (strides may differ)
        v_pages     the same, its last extent may differ; None for a cache of keys alone
        block_table, cache_lengths      the `lookup_table` and `cache_lengths` of the class. Engines that count this
                    call's rows in (`seq_lens`) subtract them first
        k_scales, v_scales      float32 in the same layout, last extent ceil(width / quantization_granularity)
        quantization_granularity        by default the wider of the two rows: one scale for each

        Raises as the class does, and ArgumentValueError for an unknown layout.
        """
        op = "PagedKVCache.from_block_table"
        pool = pool_of_pages(op, k_pages, v_pages, k_scales, v_scales, quantization_granularity, layout)
        return cls._of(op, pool, "block_table", block_table, cache_lengths)

    @classmethod
    def from_csr(
        cls,
        k_pages: Pages,
        v_pages: Pages | None,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        row_offsets: Array,
        *,
        layout: str = "NHD",
        k_scales: Pages | None = None,
        v_scales: Pages | None = None,
        quantization_granularity: int | None = None,
    ) -> PagedKVCache:
        """A cache from page lists (FlashInfer): sequence b has the pages `indices[indptr[b]:indptr[b + 1]]`.

        k_pages, v_pages, layout and the scales are those of `from_block_table`. All index tensors are int32, int64 or
        uint32:

        indptr          [batch + 1], from 0, non-decreasing
        indices         [at least indptr[batch]]; what lies past that is ignored
        last_page_len   [batch], 1..page_size: keys in the last page, **this call's rows included**; ignored for a
                        sequence without pages, which has no keys (engines leave 0 or page_size there)
        row_offsets     [batch + 1], this call's ragged rows, so that `cache_lengths` = keys - new rows

        The page lists become a lookup table (-1 in unused entries), in the dtype of `indices`, int64 for uint32; on a
        device this waits for the longest list's length, so it does not belong in a captured graph.

        Raises as `from_block_table` does; on CPU tensors also ArgumentValueError for offsets out of order or past
        `indices` and a last_page_len out of range, ArgumentError for a sequence with more new rows than keys.
        """
        op = "PagedKVCache.from_csr"
        pool = pool_of_pages(op, k_pages, v_pages, k_scales, v_scales, quantization_granularity, layout)
        table, lengths = table_of_lists(op, pool.keys[0], indptr, indices, last_page_len, row_offsets)
        return cls._of(op, pool, "indices", table, lengths)

    @property
    def num_layers(self) -> int:
        return len(self._pool.keys)

    @property
    def kv_dim(self) -> int:
        """2 where the cache holds keys and values, 1 where it holds keys alone."""
        return 1 if self._pool.values is None else 2

    @property
    def num_pages(self) -> int:
        return self.layer(0).num_pages

    @property
    def page_size(self) -> int:
        return self.layer(0).page_size

    @property
    def num_kv_heads(self) -> int:
        return self.layer(0).num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layer(0).head_dim

    @property
    def value_dim(self) -> int | None:
        """Width of a value row; None for a cache of keys alone."""
        return self.layer(0).value_dim

    @property
    def batch(self) -> int:
        return self.layer(0).batch

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored elements."""
        return self.layer(0).dtype

    @property
    def device(self) -> torch.device:
        return self.layer(0).device

    @property
    def quantization_granularity(self) -> int | None:
        """Consecutive elements of a row that share a scale; None without scales."""
        return self._pool.granularity

    @property
    def lookup_table(self) -> Tensor:
        """[batch, max_pages], the tensor given (`from_csr`: the one made)."""
        return self._lookup_table

    @property
    def cache_lengths(self) -> Tensor:
        """[batch], the tensor given (`from_csr` and `advance`: the one made)."""
        return self._cache_lengths

    def layer(self, layer: int) -> PagedLeaf:
        """Views of one layer, what a kernel reads. Raises ArgumentValueError outside 0..num_layers - 1."""
        return self._leaf("PagedKVCache.layer", layer)

    def append(self, layer: int, k_rows: Array, v_rows: Array | None, row_offsets: Array) -> None:
        """Stores the call's new rows: row i of sequence b goes to position `cache_lengths[b] + i`, through the table.

        k_rows          [total_rows, kv_heads, head_dim], float32, float16 or bfloat16
        v_rows          [total_rows, kv_heads, value_dim], the same dtypes; None where the cache holds keys alone
        row_offsets     [batch + 1], int32, int64 or uint32; sequences without rows are fine

        Rows are cast to the cache's dtype. A cache with scales is quantised by granule: scale = amax / 448 in float32,
        elements rounded to nearest, saturating. A granule of zeros gets scale 1; a scale is never below the smallest
        normal float32; infinities saturate at the granule's largest finite magnitude and NaN stays NaN, neither
        touching the scale. `cache_lengths` does not change: it counts what was there before this call (see `advance`).

        Raises the `Argument*` errors before anything is written. On CPU tensors that includes values: row_offsets
        sorted and ending at total_rows, positions within the table, page ids within the pool, no two rows in one slot.
        On a device these are not read: a row of no sequence (padding of a captured graph), past the table or of a page
        outside the pool is not stored, and nothing waits for the device.
        """
        op = "PagedKVCache.append"
        leaf = self._leaf(op, layer)
        if not self._pool.writable:
            got = "is read-only: its pages are in a numpy array that is not writeable"
            raise ArgumentError(op=op, argument="cache", got=got, expected="pages that can be written to")
        append_rows(op, leaf, k_rows, v_rows, row_offsets)

    def advance(self, row_offsets: Array) -> PagedKVCache:
        """The cache after this call: the same pages and table, `cache_lengths` grown by each sequence's new rows.

        row_offsets     [batch + 1], int32, int64 or uint32

        A new cache with a new lengths tensor of the same dtype; the old one is untouched. Not in place, because caches
        of one model share a lengths tensor (window and full layers, latent and indexer), which a second in-place
        advance would count twice. Captured graphs read the old tensor: copy into it when all caches have advanced.

        Raises the `Argument*` errors.
        """
        op = "PagedKVCache.advance"
        offsets = as_tensor(op, "row_offsets", row_offsets)
        expect_row_offsets(op, "row_offsets", offsets, batch=self.batch)
        expect_same_device(op, "row_offsets", offsets, "cache_lengths", self._cache_lengths)
        lengths = (widened(self._cache_lengths) + widened(offsets).diff()).to(self._cache_lengths.dtype)
        return self._of(op, self._pool, "lookup_table", self._lookup_table, lengths)

    def with_lengths(self, cache_lengths: Array) -> PagedKVCache:
        """The same pages and table under other lengths: of pooled keys, whose readers count tokens and writers pools.

        cache_lengths   [batch], int32, int64 or uint32, kept by reference

        Raises the `Argument*` errors.
        """
        op = "PagedKVCache.with_lengths"
        return self._of(op, self._pool, "lookup_table", self._lookup_table, cache_lengths)

    def __repr__(self) -> str:
        values = "no values" if self.value_dim is None else f"values x {self.value_dim}"
        return (
            f"PagedKVCache({str(self.dtype).removeprefix('torch.')} on {self.device}: {self.num_layers} layers, "
            f"{self.num_pages} pages of {self.page_size}, {self.num_kv_heads} kv heads, keys x {self.head_dim}, "
            f"{values}, batch {self.batch})"
        )

    @classmethod
    def _of(cls, op: str, pool: Pool, table_argument: str, table: Array, cache_lengths: Array) -> PagedKVCache:
        cache = cls.__new__(cls)
        cache._adopt(op, pool, table_argument, table, cache_lengths)
        return cache

    def _adopt(self, op: str, pool: Pool, table_argument: str, table: Array, cache_lengths: Array) -> None:
        lookup_table = as_tensor(op, table_argument, table)
        expect_dtype(op, table_argument, lookup_table, INDEX_DTYPES)
        expect_shape(op, table_argument, lookup_table, batch=ANY, max_pages=ANY)
        expect_same_device(op, table_argument, lookup_table, "the cache", pool.keys[0])
        lengths = as_tensor(op, "cache_lengths", cache_lengths)
        expect_dtype(op, "cache_lengths", lengths, INDEX_DTYPES)
        expect_shape(op, "cache_lengths", lengths, batch=lookup_table.shape[0])
        expect_same_device(op, "cache_lengths", lengths, "the cache", pool.keys[0])
        expect_non_negative(op, "cache_lengths", lengths)
        self._pool, self._lookup_table, self._cache_lengths = pool, lookup_table, lengths
        self._leaves: dict[int, PagedLeaf] = {}  # of `leaf_of`: views of tensors that stay the same

    def _leaf(self, op: str, layer: int) -> PagedLeaf:
        at = expect_int(op, "layer", layer, range(self.num_layers))
        pool = self._pool
        return PagedLeaf(
            keys=pool.keys[at],
            values=pool.values[at] if pool.values is not None else None,
            lookup_table=self._lookup_table,
            cache_lengths=self._cache_lengths,
            key_scales=pool.key_scales[at] if pool.key_scales is not None else None,
            value_scales=pool.value_scales[at] if pool.value_scales is not None else None,
            quantization_granularity=pool.granularity,
        )


def leaf_of(collection: object, layer: object) -> PagedLeaf | None:
    """The layer of a cache, made once; None for whatever is none, which is for checks to refuse."""
    if not isinstance(collection, PagedKVCache) or type(layer) is not int:
        return None
    known = collection._leaves.get(layer)
    if known is None and layer in range(collection.num_layers):
        known = collection._leaves[layer] = collection.layer(layer)
    return known
