"""Paged caches: every constructor views the same memory, and refuses bad arguments with messages that name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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
from tilewright.ops.cache import PagedKVCache, PagedLeaf

F8 = torch.float8_e4m3fn
PAGES, LAYERS, PAGE, HEADS, DIM = 6, 3, 4, 2, 8
INDEX_DTYPES = (torch.int32, torch.int64, torch.uint32)


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64).to(dtype)


def blocks(kv_dim: int = 2, dtype: torch.dtype = torch.float32, dim: int = DIM) -> Tensor:
    made = torch.randn(PAGES, kv_dim, LAYERS, PAGE, HEADS, dim, generator=torch.Generator().manual_seed(1))
    return made.to(dtype)


def scales(kv_dim: int = 2, granules: int = 1) -> Tensor:
    return torch.rand(PAGES, kv_dim, LAYERS, PAGE, HEADS, granules, generator=torch.Generator().manual_seed(2))


TABLE, LENGTHS = ints([1, 4, 0], [3, -1, -1]), ints(5, 2)


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    return torch.equal(one, other)


# ---- the same leaf from every form -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, F8])
@pytest.mark.parametrize("form", ["NHD", "HND", "csr"])
def test_every_form_gives_the_same_leaf(form: str, dtype: torch.dtype, kv_dim: int) -> None:
    pool = blocks(kv_dim, dtype)
    scale = scales(kv_dim, 3) if dtype == F8 else None
    granularity = 3 if dtype == F8 else None
    reference = PagedKVCache(pool, TABLE, LENGTHS, scales=scale, quantization_granularity=granularity)

    def field(of: Tensor | None, at: int) -> list[Tensor] | None:
        if of is None or at >= kv_dim:
            return None
        layers = [of[:, at, i] for i in range(LAYERS)]
        return [layer.transpose(1, 2) for layer in layers] if form == "HND" else layers

    pages: tuple[Any, Any] = (field(pool, 0), field(pool, 1))
    named: dict[str, Any] = {"k_scales": field(scale, 0), "v_scales": field(scale, 1)}
    if form == "csr":  # 5 + 2 keys of sequence 0 in two pages, 2 + 1 of sequence 1 in one
        lists = ints(0, 2, 3), ints(1, 4, 3), ints(3, 3), ints(0, 2, 3)
        cache = PagedKVCache.from_csr(*pages, *lists, quantization_granularity=granularity, **named)
        assert cache.lookup_table.tolist() == [[1, 4], [3, -1]]
    else:
        cache = PagedKVCache.from_block_table(
            *pages, TABLE, LENGTHS, layout=form, quantization_granularity=granularity, **named
        )
        assert cache.lookup_table is TABLE
    assert cache.cache_lengths.tolist() == [5, 2]
    for layer in range(LAYERS):
        one, other = cache.layer(layer), reference.layer(layer)
        assert same_bits(one.keys, other.keys)
        assert same_bits(one.values, other.values)
        assert same_bits(one.key_scales, other.key_scales)
        assert same_bits(one.value_scales, other.value_scales)
        assert one.quantization_granularity == other.quantization_granularity == granularity
        assert one.keys.data_ptr() == other.keys.data_ptr()
        assert one.keys.stride() == other.keys.stride()


def test_what_a_cache_says_of_itself() -> None:
    cache = PagedKVCache(blocks(2, F8), TABLE, LENGTHS, scales=scales())
    assert (cache.num_layers, cache.kv_dim, cache.num_pages, cache.page_size, cache.num_kv_heads) == (3, 2, 6, 4, 2)
    assert (cache.head_dim, cache.value_dim, cache.batch, cache.dtype) == (8, 8, 2, F8)
    assert (cache.device, cache.quantization_granularity) == (torch.device("cpu"), 8)
    assert repr(cache) == (
        "PagedKVCache(float8_e4m3fn on cpu: 3 layers, 6 pages of 4, 2 kv heads, keys x 8, values x 8, batch 2)"
    )
    leaf = cache.layer(np.int64(2))  # type: ignore[arg-type]  # numpy integers count as integers
    assert isinstance(leaf, PagedLeaf)
    assert (leaf.num_pages, leaf.page_size, leaf.num_kv_heads, leaf.head_dim, leaf.batch) == (6, 4, 2, 8, 2)
    assert (leaf.value_dim, leaf.dtype, leaf.device) == (8, F8, torch.device("cpu"))
    assert leaf == leaf
    assert leaf != cache.layer(2)
    latent = PagedKVCache(blocks(1), TABLE, LENGTHS)
    assert (latent.kv_dim, latent.value_dim, latent.layer(0).values, latent.layer(0).value_dim) == (1, None, None, None)
    assert "no values" in repr(latent)


def test_values_may_be_narrower_than_keys() -> None:
    k, v = torch.zeros(PAGES, PAGE, 1, 12, dtype=F8), torch.zeros(PAGES, PAGE, 1, 5, dtype=F8)
    k_scales, v_scales = torch.ones(PAGES, PAGE, 1, 3), torch.ones(PAGES, PAGE, 1, 2)
    cache = PagedKVCache.from_block_table(
        k, v, TABLE, LENGTHS, k_scales=k_scales, v_scales=v_scales, quantization_granularity=4
    )
    assert (cache.num_layers, cache.head_dim, cache.value_dim) == (1, 12, 5)
    whole = PagedKVCache.from_block_table(k, v, TABLE, LENGTHS, k_scales=k_scales[..., :1], v_scales=v_scales[..., :1])
    assert whole.quantization_granularity == 12
    wider = PagedKVCache.from_block_table(v, k, TABLE, LENGTHS, k_scales=v_scales[..., :1], v_scales=k_scales[..., :1])
    assert wider.quantization_granularity == 12


# ---- views, never copies -----------------------------------------------------------------------------------------


def test_pages_of_a_larger_buffer_are_viewed() -> None:
    """A pool whose pages lie apart, as when layers and other state share a page (the classic dense-stride bug)."""
    buffer = torch.zeros(PAGES, 2 * LAYERS * PAGE * HEADS * DIM + 40)
    pool = buffer[:, 8:-32].view(PAGES, 2, LAYERS, PAGE, HEADS, DIM)
    leaf = PagedKVCache(pool, TABLE, LENGTHS).layer(1)
    assert leaf.values is not None
    assert leaf.keys.stride(0) == buffer.shape[1]
    assert leaf.keys.data_ptr() == pool[0, 0, 1].data_ptr()
    assert leaf.values.data_ptr() == pool[0, 1, 1].data_ptr()
    buffer[5, 8 + LAYERS * PAGE * HEADS * DIM] = 7.0
    assert PagedKVCache(pool, TABLE, LENGTHS).layer(0).values[5, 0, 0, 0] == 7.0  # type: ignore[index]


def test_vllm_pages_are_viewed() -> None:
    """K and V interleaved in the last axis, heads before slots: vLLM's own allocation, seen as blocks, not copied."""
    kv_cache = torch.zeros(PAGES, HEADS, PAGE, 2 * DIM)
    view = torch.unflatten(kv_cache, -1, (2, DIM)).permute(0, 3, 2, 1, 4).unsqueeze(2)
    cache = PagedKVCache(view, TABLE, LENGTHS)
    k, v = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, DIM)
    cache.append(0, k, v, ints(0, 2, 3))
    assert torch.equal(kv_cache[4, :, 1], torch.cat([k[0], v[0]], -1))
    assert torch.equal(kv_cache[4, :, 2], torch.cat([k[1], v[1]], -1))
    assert torch.equal(kv_cache[3, :, 2], torch.cat([k[2], v[2]], -1))
    assert int(kv_cache.count_nonzero()) == 3 * HEADS * 2 * DIM


def test_numpy_arrays_are_viewed() -> None:
    pool = np.zeros((PAGES, 2, LAYERS, PAGE, HEADS, DIM), np.float16)
    table, lengths = np.array([[1, 4], [3, 2**32 - 1]], np.uint32), np.array([5, 2], np.uint32)
    cache = PagedKVCache(pool, table, lengths)
    assert cache.layer(0).keys.data_ptr() == pool.ctypes.data
    assert cache.lookup_table.data_ptr() == table.ctypes.data
    assert cache.lookup_table.dtype == torch.uint32
    rows = np.ones((3, HEADS, DIM), np.float32)
    cache.append(2, rows, 2 * rows, np.array([0, 2, 3], np.uint32))
    assert pool[4, 0, 2, 1:3].min() == 1
    assert pool[3, 1, 2, 2].min() == 2
    lengths += 1  # the engine's own array, seen by the cache
    assert cache.cache_lengths.to(torch.int64).tolist() == [6, 3]


def test_a_read_only_array_is_read_but_not_written(recwarn: pytest.WarningsRecorder) -> None:
    pool = np.zeros((PAGES, 2, LAYERS, PAGE, HEADS, DIM), np.float32)
    pool.flags.writeable = False
    table = np.broadcast_to(np.array([0, 1], np.int32), (2, 2))
    cache = PagedKVCache(pool, table, LENGTHS)
    assert cache.layer(0).keys.data_ptr() == pool.ctypes.data
    rows = torch.zeros(0, HEADS, DIM)
    with pytest.raises(ArgumentError, match=r"^PagedKVCache.append: cache is read-only: its pages are in a numpy"):
        cache.append(0, rows, rows, ints(0, 0, 0))
    one = PagedKVCache.from_block_table([torch.zeros(PAGES, PAGE, HEADS, DIM)], [pool[:, 0, 0]], table, LENGTHS)
    with pytest.raises(ArgumentError, match="cache is read-only"):
        one.append(0, rows, rows, ints(0, 0, 0))
    assert not recwarn.list


def test_a_cache_takes_no_memory() -> None:
    """4 GiB of pages that nobody touches stay untouched: neither the cache nor its layers copy or read them."""
    pool = torch.empty(1 << 16, 2, 4, 16, 1, 256, dtype=torch.float16)

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    cache = PagedKVCache(pool, TABLE, LENGTHS)
    leaves = [cache.layer(layer) for layer in range(4)]
    k_pages = [leaf.keys for leaf in leaves]
    PagedKVCache.from_block_table([k.transpose(1, 2) for k in k_pages], None, TABLE, LENGTHS, layout="HND").layer(3)
    assert resident() - before < 1 << 24  # one layer alone would be 1 << 29


def test_lengths_may_exceed_the_table() -> None:
    """A cache of pooled keys (kpool > 1) counts tokens, its table pools."""
    assert PagedKVCache(blocks(1), TABLE, ints(1000, 0)).batch == 2


def test_an_empty_batch_and_an_empty_pool() -> None:
    cache = PagedKVCache(blocks()[:0], torch.zeros(0, 0, dtype=torch.int32), ints())
    cache.append(0, torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM), ints(0))
    assert (cache.batch, cache.num_pages, cache.advance(ints(0)).cache_lengths.tolist()) == (0, 0, [])


# ---- page lists --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_page_lists_mean_what_they_say(data: st.DataObject) -> None:
    """Against a literal reading: key j of sequence b is in page indices[indptr[b] + j // page_size]."""
    page_size = data.draw(st.integers(1, 4))
    keys = data.draw(st.lists(st.integers(0, 9), max_size=4))
    rows = [data.draw(st.integers(0, n)) for n in keys]
    pages = [-(-n // page_size) for n in keys]
    listed = data.draw(st.lists(st.integers(0, 99), min_size=sum(pages), max_size=sum(pages) + 3))
    last = [n - (p - 1) * page_size if p else data.draw(st.integers(0, 9)) for n, p in zip(keys, pages, strict=True)]
    dtype = data.draw(st.sampled_from(INDEX_DTYPES))
    indptr, offsets = np.cumsum([0, *pages]).tolist(), np.cumsum([0, *rows]).tolist()
    index = [ints(*values, dtype=dtype) for values in (indptr, listed, last, offsets)]
    cache = PagedKVCache.from_csr(torch.zeros(1, page_size, 1, 1), None, *index)
    signed = torch.int64 if dtype == torch.uint32 else dtype
    assert cache.lookup_table.dtype == cache.cache_lengths.dtype == signed
    assert cache.cache_lengths.tolist() == [n - r for n, r in zip(keys, rows, strict=True)]
    assert cache.lookup_table.shape == (len(keys), max(pages, default=0))
    for b, n in enumerate(keys):
        for j in range(n):
            assert cache.lookup_table[b, j // page_size] == listed[indptr[b] + j // page_size]
        assert (cache.lookup_table[b, pages[b] :] == -1).all()


# ---- after a step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_advance_leaves_the_old_lengths_alone(dtype: torch.dtype) -> None:
    lengths = ints(5, 2, dtype=dtype)
    cache = PagedKVCache(blocks(), TABLE, lengths)
    other = PagedKVCache(blocks(1), TABLE, lengths)  # a second cache on the same lengths, advanced by the same step
    after = cache.advance(np.array([0, 3, 3], np.int32))
    assert other.advance(ints(0, 3, 3)).cache_lengths.to(torch.int64).tolist() == [8, 2]
    assert after.cache_lengths.to(torch.int64).tolist() == [8, 2]
    assert after.cache_lengths.dtype == dtype
    assert cache.cache_lengths is lengths
    assert lengths.to(torch.int64).tolist() == [5, 2]
    assert after.lookup_table is TABLE
    assert after.layer(1).keys.data_ptr() == cache.layer(1).keys.data_ptr()


# ---- refusals ----------------------------------------------------------------------------------------------------


def make(pool: Any = None, table: Any = TABLE, lengths: Any = LENGTHS, **named: Any) -> PagedKVCache:
    return PagedKVCache(blocks() if pool is None else pool, table, lengths, **named)


def pages(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (PAGES, PAGE, HEADS, DIM), dtype=dtype)


def by_table(k: Any = None, v: Any = None, table: Any = TABLE, lengths: Any = LENGTHS, **named: Any) -> PagedKVCache:
    return PagedKVCache.from_block_table(pages() if k is None else k, v, table, lengths, **named)


def by_lists(
    indptr: Any = (0, 2, 3), indices: Any = (1, 4, 3), last: Any = (3, 3), offsets: Any = (0, 2, 3), **named: Any
) -> PagedKVCache:
    lists = [ints(*x) if isinstance(x, tuple) else x for x in (indptr, indices, last, offsets)]
    return PagedKVCache.from_csr(pages(), None, *lists, **named)


Refusal = tuple[Callable[[], object], type[ArgumentError], str]
BLOCK_AXES = "[pages, kv_dim in 1..2, layers >= 1, page_size >= 1, kv_heads >= 1, head_dim >= 1]"
REFUSALS: dict[str, Refusal] = {
    "blocks: a list": (
        lambda: make([1.0]),
        ArgumentTypeError,
        "PagedKVCache: blocks is a list; expected a torch tensor or a numpy array",
    ),
    "blocks: sparse": (
        lambda: make(torch.zeros(3, 3).to_sparse()),
        ArgumentTypeError,
        "PagedKVCache: blocks is a sparse_coo tensor; expected a dense tensor",
    ),
    "blocks: rank": (
        lambda: make(blocks()[0]),
        ArgumentRankError,
        f"PagedKVCache: blocks has rank 5; expected 6: {BLOCK_AXES}",
    ),
    "blocks: dtype": (
        lambda: make(blocks().double()),
        ArgumentDTypeError,
        "PagedKVCache: blocks has dtype float64; expected float32, float16, bfloat16 or float8_e4m3fn",
    ),
    "blocks: numpy dtype": (
        lambda: make(np.zeros((1, 2), "U3")),
        ArgumentDTypeError,
        "PagedKVCache: blocks has dtype <U3; expected a numpy dtype that torch has too",
    ),
    "blocks: byte order": (
        lambda: make(np.zeros((1, 2), ">f4")),
        ArgumentDTypeError,
        "PagedKVCache: blocks has dtype >f4; expected the machine's byte order",
    ),
    "blocks: kv_dim": (
        lambda: make(pages(6, 3, 1, 4, 2, 8)),
        ArgumentShapeError,
        f"PagedKVCache: blocks has shape [6, 3, 1, 4, 2, 8]; expected {BLOCK_AXES}",
    ),
    "blocks: no slots": (
        lambda: make(pages(6, 2, 1, 0, 2, 8)),
        ArgumentShapeError,
        f"PagedKVCache: blocks has shape [6, 2, 1, 0, 2, 8]; expected {BLOCK_AXES}",
    ),
    "blocks: strides": (
        lambda: make(pages(6, 2, 1, 4, 8, 2).transpose(-1, -2)),
        ArgumentLayoutError,
        "PagedKVCache: blocks has strides [128, 64, 64, 16, 1, 2]; expected a contiguous last axis (stride 1)",
    ),
    "blocks: negative numpy strides": (
        lambda: make(np.zeros((1, 2, 1, 1, 1, 4), np.float32)[..., ::-1]),
        ArgumentLayoutError,
        "PagedKVCache: blocks has strides [32, 16, 16, 16, 16, -4] bytes; "
        "expected non-negative multiples of the element size",
    ),
    "scales: missing": (
        lambda: make(blocks(2, F8)),
        ArgumentValueError,
        "PagedKVCache: scales is None; "
        "expected float32 scales, as blocks is float8_e4m3fn: a stored element means stored * scale",
    ),
    "scales: needless": (
        lambda: make(blocks(2, torch.float16), scales=scales()),
        ArgumentDTypeError,
        "PagedKVCache: blocks has dtype float16; expected float8_e4m3fn, as scales is given",
    ),
    "scales: dtype": (
        lambda: make(blocks(2, F8), scales=scales().half()),
        ArgumentDTypeError,
        "PagedKVCache: scales has dtype float16; expected float32",
    ),
    "scales: last axis": (
        lambda: make(blocks(2, F8), scales=scales(2, 3), quantization_granularity=4),
        ArgumentShapeError,
        "PagedKVCache: scales has shape [6, 2, 3, 4, 2, 3]; expected [pages=6, kv_dim=2, layers=3, page_size=4, "
        "kv_heads=2, ceil(head_dim 8 / quantization_granularity 4)=2]",
    ),
    "scales: kv_dim": (
        lambda: make(blocks(2, F8), scales=scales(1)),
        ArgumentShapeError,
        "PagedKVCache: scales has shape [6, 1, 3, 4, 2, 1]; expected [pages=6, kv_dim=2, layers=3, page_size=4, "
        "kv_heads=2, ceil(head_dim 8 / quantization_granularity 8)=1]",
    ),
    "scales: device": (
        lambda: make(blocks(2, F8), scales=scales().to("meta")),
        ArgumentDeviceError,
        "PagedKVCache: scales is on meta; expected cpu, where blocks is",
    ),
    "granularity: zero": (
        lambda: make(blocks(2, F8), scales=scales(), quantization_granularity=0),
        ArgumentValueError,
        "PagedKVCache: quantization_granularity is 0; expected an integer >= 1",
    ),
    "granularity: float": (
        lambda: make(blocks(2, F8), scales=scales(), quantization_granularity=4.0),
        ArgumentTypeError,
        "PagedKVCache: quantization_granularity is a float; expected an integer >= 1",
    ),
    "granularity: without scales": (
        lambda: make(quantization_granularity=8),
        ArgumentValueError,
        "PagedKVCache: quantization_granularity is 8; expected None without scales",
    ),
    "table: rank": (
        lambda: make(table=LENGTHS),
        ArgumentRankError,
        "PagedKVCache: lookup_table has rank 1; expected 2: [batch, max_pages]",
    ),
    "table: dtype": (
        lambda: make(table=TABLE.float()),
        ArgumentDTypeError,
        "PagedKVCache: lookup_table has dtype float32; expected int32, int64 or uint32",
    ),
    "table: device": (
        lambda: make(table=TABLE.to("meta")),
        ArgumentDeviceError,
        "PagedKVCache: lookup_table is on meta; expected cpu, where the cache is",
    ),
    "lengths: batch": (
        lambda: make(lengths=ints(1, 2, 3)),
        ArgumentShapeError,
        "PagedKVCache: cache_lengths has shape [3]; expected [batch=2]",
    ),
    "lengths: dtype": (
        lambda: make(lengths=LENGTHS.to(torch.int16)),
        ArgumentDTypeError,
        "PagedKVCache: cache_lengths has dtype int16; expected int32, int64 or uint32",
    ),
    "lengths: negative": (
        lambda: make(lengths=ints(5, -2)),
        ArgumentValueError,
        "PagedKVCache: cache_lengths[1] is -2; expected 0 or more",
    ),
    "lengths: device": (
        lambda: make(lengths=LENGTHS.to("meta")),
        ArgumentDeviceError,
        "PagedKVCache: cache_lengths is on meta; expected cpu, where the cache is",
    ),
    "layer: too large": (
        lambda: make().layer(3),
        ArgumentValueError,
        "PagedKVCache.layer: layer is 3; expected an integer in 0..2",
    ),
    "layer: negative": (
        lambda: make().layer(-1),
        ArgumentValueError,
        "PagedKVCache.layer: layer is -1; expected an integer in 0..2",
    ),
    "layer: bool": (
        lambda: make().layer(True),
        ArgumentTypeError,
        "PagedKVCache.layer: layer is a bool; expected an integer in 0..2",
    ),
    "advance: batch": (
        lambda: make().advance(ints(0, 1)),
        ArgumentShapeError,
        "PagedKVCache.advance: row_offsets has shape [2]; expected [batch + 1=3]",
    ),
    "pages: layout": (
        lambda: by_table(layout="NDH"),
        ArgumentValueError,
        "PagedKVCache.from_block_table: layout is 'NDH'; expected 'NHD' or 'HND'",
    ),
    "pages: rank": (
        lambda: by_table(pages(6, 2, 4, 2, 8)),
        ArgumentRankError,
        "PagedKVCache.from_block_table: k_pages has rank 5; "
        "expected 4: [pages, page_size >= 1, kv_heads >= 1, head_dim >= 1]",
    ),
    "pages: no layers": (
        lambda: by_table([]),
        ArgumentValueError,
        "PagedKVCache.from_block_table: k_pages is empty; expected at least one layer",
    ),
    "pages: one layer differs": (
        lambda: by_table([pages(), pages(5, PAGE, HEADS, DIM)]),
        ArgumentShapeError,
        "PagedKVCache.from_block_table: k_pages[1] has shape [5, 4, 2, 8]; "
        "expected [pages=6, page_size=4, kv_heads=2, head_dim=8]",
    ),
    "pages: layer counts": (
        lambda: by_table([pages(), pages()], [pages()]),
        ArgumentError,
        "PagedKVCache.from_block_table: v_pages has 1 layer; expected 2, as many as k_pages",
    ),
    "pages: k and v": (
        lambda: by_table(v=pages(PAGES, HEADS, PAGE, DIM)),
        ArgumentShapeError,
        "PagedKVCache.from_block_table: v_pages has shape [6, 2, 4, 8]; "
        "expected [pages=6, page_size=4, kv_heads=2, head_dim >= 1]",
    ),
    "pages: v widths": (
        lambda: by_table([pages(), pages()], [pages(), pages(PAGES, PAGE, HEADS, 4)]),
        ArgumentShapeError,
        "PagedKVCache.from_block_table: v_pages[1] has shape [6, 4, 2, 4]; "
        "expected [pages=6, page_size=4, kv_heads=2, head_dim=8]",
    ),
    "pages: HND": (
        lambda: by_table(pages(6, 2, 4, 8), pages(6, 4, 2, 8), layout="HND"),
        ArgumentShapeError,
        "PagedKVCache.from_block_table: v_pages has shape [6, 4, 2, 8]; "
        "expected [pages=6, kv_heads=2, page_size=4, head_dim >= 1]",
    ),
    "pages: k and v dtypes": (
        lambda: by_table(v=pages(dtype=torch.float16)),
        ArgumentDTypeError,
        "PagedKVCache.from_block_table: v_pages has dtype float16; expected float32, as k_pages has",
    ),
    "pages: k and v devices": (
        lambda: by_table(v=pages().to("meta")),
        ArgumentDeviceError,
        "PagedKVCache.from_block_table: v_pages is on meta; expected cpu, where k_pages is",
    ),
    "pages: strides": (
        lambda: by_table(v=pages(PAGES, PAGE, DIM, HEADS).transpose(2, 3)),
        ArgumentLayoutError,
        "PagedKVCache.from_block_table: v_pages has strides [64, 16, 1, 2]; expected a contiguous last axis (stride 1)",
    ),
    "pages: scales for K alone": (
        lambda: by_table(pages(dtype=F8), pages(dtype=F8), k_scales=torch.ones(PAGES, PAGE, HEADS, 1)),
        ArgumentValueError,
        "PagedKVCache.from_block_table: v_scales is None; "
        "expected float32 scales, as v_pages is float8_e4m3fn: a stored element means stored * scale",
    ),
    "pages: scales without V": (
        lambda: by_table(v_scales=torch.ones(PAGES, PAGE, HEADS, 1)),
        ArgumentTypeError,
        "PagedKVCache.from_block_table: v_scales is a Tensor; expected None without v_pages",
    ),
    "pages: scales layout": (
        lambda: by_table(pages(6, 2, 4, 8, dtype=F8), k_scales=torch.ones(6, 4, 2, 1), layout="HND"),
        ArgumentShapeError,
        "PagedKVCache.from_block_table: k_scales has shape [6, 4, 2, 1]; expected [pages=6, kv_heads=2, page_size=4, "
        "ceil(head_dim 8 / quantization_granularity 8)=1]",
    ),
    "pages: table": (
        lambda: by_table(table=LENGTHS),
        ArgumentRankError,
        "PagedKVCache.from_block_table: block_table has rank 1; expected 2: [batch, max_pages]",
    ),
    "lists: empty indptr": (
        lambda: by_lists(()),
        ArgumentShapeError,
        "PagedKVCache.from_csr: indptr has shape [0]; expected [batch + 1 >= 1]",
    ),
    "lists: indptr start": (
        lambda: by_lists((1, 2, 3)),
        ArgumentValueError,
        "PagedKVCache.from_csr: indptr[0] is 1; expected 0",
    ),
    "lists: indptr order": (
        lambda: by_lists((0, 3, 2)),
        ArgumentValueError,
        "PagedKVCache.from_csr: indptr[2] is 2; expected at least indptr[1] = 3",
    ),
    "lists: indptr end": (
        lambda: by_lists((0, 2, 4)),
        ArgumentValueError,
        "PagedKVCache.from_csr: indptr[2] is 4; expected at most 3, the length of indices",
    ),
    "lists: indices dtype": (
        lambda: by_lists(indices=torch.zeros(3)),
        ArgumentDTypeError,
        "PagedKVCache.from_csr: indices has dtype float32; expected int32, int64 or uint32",
    ),
    "lists: indices rank": (
        lambda: by_lists(indices=ints([1, 4, 3])),
        ArgumentRankError,
        "PagedKVCache.from_csr: indices has rank 2; expected 1: [listed_pages]",
    ),
    "lists: last_page_len zero": (
        lambda: by_lists(last=(3, 0)),
        ArgumentValueError,
        "PagedKVCache.from_csr: last_page_len[1] is 0; expected 1..4 (the page size), as the sequence has pages",
    ),
    "lists: last_page_len past the page": (
        lambda: by_lists(last=(5, 3)),
        ArgumentValueError,
        "PagedKVCache.from_csr: last_page_len[0] is 5; expected 1..4 (the page size), as the sequence has pages",
    ),
    "lists: last_page_len shape": (
        lambda: by_lists(last=(3,)),
        ArgumentShapeError,
        "PagedKVCache.from_csr: last_page_len has shape [1]; expected [batch=2]",
    ),
    "lists: more rows than keys": (
        lambda: by_lists(offsets=(0, 2, 6)),
        ArgumentError,
        "PagedKVCache.from_csr: row_offsets gives sequence 1 4 new rows; "
        "expected at most its 3 keys, as last_page_len counts the new rows too",
    ),
    "lists: rows without pages": (
        lambda: by_lists((0, 3, 3), last=(3, 4)),
        ArgumentError,
        "PagedKVCache.from_csr: row_offsets gives sequence 1 1 new rows; "
        "expected at most its 0 keys, as last_page_len counts the new rows too",
    ),
    "lists: device": (
        lambda: by_lists(indices=ints(1, 4, 3).to("meta")),
        ArgumentDeviceError,
        "PagedKVCache.from_csr: indices is on meta; expected cpu, where k_pages is",
    ),
    "lists: layout": (
        lambda: by_lists(layout="hnd"),
        ArgumentValueError,
        "PagedKVCache.from_csr: layout is 'hnd'; expected 'NHD' or 'HND'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_bad_argument_is_named(case: str) -> None:
    call, error, message = REFUSALS[case]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
    assert type(caught.value) is error
