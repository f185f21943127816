# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, no-untyped-call"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Latent rows in two formats: float8 elements with a scale per 64 or 128 of them, beside a bfloat16 tail.

Each format is a paged cache of its own, with one page table: views of the engine's bytes, made by the functions here.
"""

from math import inf

import torch
from torch import Tensor

from tilewright.codegen_cache.checks import (
    POSITIVE,
    Array,
    as_tensor,
    expect_contiguous_last,
    expect_dtype,
    expect_int,
    expect_shape,
)
from tilewright.dsl.annotations import Const, Paged, PerHead, Rows, Scalar
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.errors import ArgumentLayoutError
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import lse, softmax
from tilewright.dsl.value import dot, exp, maximum, where

from .cache import PagedKVCache, PagedLeaf

BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


@op(positions="latents")
def mla_mixed_rows(
    q_nope: Rows["head", "latent"],
    q_rope: Rows["head", "rope"],
    latents: Paged["latent"],
    ropes: Paged["rope"],
    indices: Rows["slot", i32] | None,
    scale: Scalar[f32],
    *,
    with_lse: Const[bool] = False,
):
    """MLA over rows of two formats, all of them (causal) or those listed (FlashMLA, DeepSeek-V3.2's float8 cache).

    q_nope      [rows, heads, latent]: absorbed queries; q_rope [rows, heads, rope]: their rotated part
    latents     keys alone, one head of latent (512): key and value; float8 with a scale per 128 in FlashMLA
    ropes       keys alone, one head of rope (64), at the same slots: key only; bfloat16 in FlashMLA
    indices     [rows, slots] int32: positions in the row's sequence, negative is unused; None: every position <= pos
    scale       on scores
    Returns out [rows, heads, latent], with_lse also lse [rows, heads], natural log. A row without keys: 0 and -inf.
    Raises ArgumentShapeError where widths differ; ArgumentValueError for a position past the cache (CPU tensors).
    """
    keys = latents.keys(where=lambda query, key: key <= query) if indices is None else latents.entries(indices)
    out = softmax((dot(q_nope, keys) + dot(q_rope, keys.beside(ropes))) * scale) @ keys
    return {"out": out, "lse": lse(out)} if with_lse else out


@op(positions="recent")
def mixed_rows_window_and_entries(
    q: Rows["head", "dim"],
    q_rope: Rows["head", "rope"],
    recent: Paged["dim"],
    recent_rope: Paged["rope"],
    entries: Paged["dim"],
    entries_rope: Paged["rope"],
    indices: Rows["slot", i32],
    sink: PerHead,
    scale: Scalar[f32],
    *,
    window: Const[int] = 128,
):
    """A window of tokens and listed entries, rows of two formats, key and value in full (DeepSeek-V4's float8 caches).

    q, q_rope               [rows, heads, dim] and [rows, heads, rope]; 448 and 64 in DeepSeek-V4
    recent, recent_rope     keys alone, one head, a row per token; `recent` defines positions
    entries, entries_rope   the same, a row per entry; lengths count all entries stored
    indices                 [rows, slots] int32: entries, negative is unused; not checked causally
    sink                    [heads]: a logit in the denominator; -inf is none. scale: on scores
    Returns out [rows, heads, dim] and out_rope [rows, heads, rope]: give views of one buffer as `outputs` to join them.
    Raises ArgumentShapeError where widths differ; ArgumentValueError for an entry past the cache (CPU tensors).
    """
    tokens = recent.keys(where=lambda query, key: (key <= query) & (query - key < window))
    near = _both_parts(q, q_rope, tokens, tokens.beside(recent_rope), scale)
    listed = entries.entries(indices)
    return _joined(near, _both_parts(q, q_rope, listed, listed.beside(entries_rope), scale), sink)


def _both_parts(q, q_rope, keys, rope, scale):
    """Attention to rows of two parts: either part's output, and their common lse."""
    weights = softmax((dot(q, keys) + dot(q_rope, rope)) * scale)
    out = weights @ keys
    return out, weights @ rope, lse(out)


def _joined(a, b, sink):
    """Attention to the keys of a and b and to the sink, from that to the keys of either."""
    most = maximum(maximum(a[2], b[2]), sink)
    base = where(most == -inf, 0.0, most)
    of_a, of_b = exp(a[2] - base), exp(b[2] - base)
    total = of_a + of_b + exp(sink - base)
    out, out_rope = (where(total == 0.0, 0.0, (x * of_a + y * of_b) / total) for x, y in zip(a[:2], b[:2], strict=True))
    return {"out": out, "out_rope": out_rope}


def flash_mla_leaves(pool: Array, lookup_table: Array, cache_lengths: Array) -> tuple[PagedLeaf, PagedLeaf]:
    """FlashMLA's float8 cache (DeepSeek-V3.2) as the `latents` and `ropes` of `mla_mixed_rows`. Nothing is copied.

    pool            [pages, page_size, 1, 656] bytes (uint8, int8 or float8_e4m3fn), contiguous last axis, other strides
                    multiples of 4. A token: 512 float8_e4m3fn, 4 float32 scales of 128 of them each, 64 bfloat16
    lookup_table    [batch, max_pages]; cache_lengths [batch]: as PagedKVCache takes them
    Returns latents [pages, page_size, 1, 512] with scales [pages, page_size, 1, 4], ropes [pages, page_size, 1, 64].

    FlashMLA's own lists hold physical slots, page * page_size + offset; ours hold positions in the sequence.
    Raises the `Argument*` errors: another shape or dtype, strides off by bytes.
    """
    name = "flash_mla_leaves"
    data = _bytes(name, pool)
    expect_shape(name, "pool", data, pages=None, page_size=POSITIVE, kv_heads=1, bytes=656)
    _expect_aligned(name, data, 4)
    latents = data[..., :512].view(torch.float8_e4m3fn)
    scales, ropes = data[..., 512:528].view(torch.float32), data[..., 528:].view(torch.bfloat16)
    return _leaves(latents, scales, 128, ropes, lookup_table, cache_lengths)


def deepseek_v4_leaves(
    pool: Array, page_size: int, lookup_table: Array, cache_lengths: Array
) -> tuple[PagedLeaf, PagedLeaf]:
    """FlashMLA's float8 cache of DeepSeek-V4 as two leaves of `mixed_rows_window_and_entries`: rows and their tails.

    pool            [pages, bytes] (uint8, int8 or float8_e4m3fn), at least 584 * page_size bytes a page, contiguous
                    last axis, the other stride even: first page_size rows of 448 float8_e4m3fn and 64 bfloat16, then
                    page_size times 7 scales of 64 elements each as exponents (float8_e8m0fnu) and a byte of padding
    lookup_table    [batch, max_pages]; cache_lengths [batch]: as PagedKVCache takes them
    Returns rows [pages, page_size, 1, 448] with scales [pages, page_size, 1, 7], tails [pages, page_size, 1, 64].

    Rows and tails are views. Scales are float32 in a leaf, so those 7 bytes of a token are converted to a copy.
    Raises the `Argument*` errors: another shape or dtype, too few bytes, an odd stride.
    """
    name = "deepseek_v4_leaves"
    data, page_size = _bytes(name, pool), expect_int(name, "page_size", page_size, POSITIVE)
    expect_shape(name, "pool", data, pages=None, bytes=range(584 * page_size, 1 << 62))
    _expect_aligned(name, data, 2)
    pages, end = len(data), 576 * page_size
    rows = data[:, :end].view(pages, page_size, 1, 576)
    exponents = data[:, end : 584 * page_size].view(pages, page_size, 1, 8)[..., :7]
    scales = exponents.view(torch.float8_e8m0fnu).to(torch.float32)
    latents, tails = rows[..., :448].view(torch.float8_e4m3fn), rows[..., 448:].view(torch.bfloat16)
    return _leaves(latents, scales, 64, tails, lookup_table, cache_lengths)


def _bytes(name: str, pool: Array) -> Tensor:
    data = as_tensor(name, "pool", pool)
    expect_dtype(name, "pool", data, BYTES)
    expect_contiguous_last(name, "pool", data)
    return data.view(torch.uint8)


def _expect_aligned(name: str, data: Tensor, to: int) -> None:
    """torch views bytes as wider elements only where every row starts at a multiple of them."""
    starts = [data.storage_offset(), *data.stride()[:-1]]
    if any(n % to for n in starts):
        expected = f"an offset and outer strides that are multiples of {to} bytes"
        raise ArgumentLayoutError(op=name, argument="pool", got=starts, expected=expected)


def _leaves(
    rows: Tensor, scales: Tensor, granularity: int, tails: Tensor, table: Array, lengths: Array
) -> tuple[PagedLeaf, PagedLeaf]:
    stored = PagedKVCache.from_block_table(
        rows, None, table, lengths, k_scales=scales, quantization_granularity=granularity
    )
    return stored.layer(0), PagedKVCache.from_block_table(tails, None, table, lengths).layer(0)
