# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, operator"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Indexers beside the published float8 one: 16- and 32-bit, with and without relu or weights, and in two levels."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.codegen_cache.checks import Array, as_tensor, expect_int, expect_shape, widened
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Const, Paged, Rows
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.errors import ArgumentLayoutError, ArgumentValueError
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import sum, topk
from tilewright.dsl.value import Value, dot, maximum, relu

from .cache import PagedLeaf


def _score(q: Value, weights: Value | None, k: Value, rectify: bool) -> Value:
    product = relu(dot(q, k)) if rectify else dot(q, k)
    return sum(product if weights is None else product * weights, over="head")


@op
def indexer(
    q: Rows["head", "depth"],
    weights: Rows["head", f32] | None,
    keys: Paged["depth"],
    *,
    top_k: Const[int],
    kpool: Const[int] = 1,
    rectify: Const[bool] = True,
):
    """The keys with the largest sum over heads of weight * relu(<q, k>), or of weight * <q, k>.

    With relu: DeepSeek-V3.2 and V4 in 16 or 32 bits (weights times the scales), and Qwen4's over the means of blocks
    (no weights, `pool_means`). Without: Qwen's as attention-gym's pull request 449 tells it.

    q           [rows, heads, depth]
    weights     [rows, heads], float32, any sign; None weighs all heads alike
    keys        keys alone, one head of depth, of any cache dtype; its lengths count tokens before this call
    top_k       entries of the result
    kpool       tokens of a key, which is a candidate once its last token is visible
    rectify     False leaves out the relu
    Returns out [rows, top_k] int32: best first, equal ones by position, then -1.
    Raises ArgumentShapeError where widths, heads or batches differ, ArgumentError for keys of several heads.
    """
    found = keys.keys(where=lambda query, key: key <= query, pool=kpool)
    return topk(_score(q, weights, found.k, rectify), top_k)


# ---- two levels ------------------------------------------------------------------------------------------------------


@op
def indexer_blocks(
    q: Rows["head", "depth"],
    weights: Rows["head", f32] | None,
    keys: Paged["wide"],
    *,
    depth: Const[int],
    top_k: Const[int],
    block: Const[int],
    kpool: Const[int] = 1,
    rectify: Const[bool] = True,
):
    """First level: the blocks whose best key scores best, of those with all keys visible (DeepSeek-V4.1).

    q, weights, kpool, rectify      as `indexer` says
    keys        a row of [block * depth] for every block: the keys' cache, viewed so
    top_k       blocks of the result
    block       keys of a block
    Returns out [rows, top_k] int32: best first, equal ones by position, then -1.
    Raises as indexer.
    """
    rows = keys.keys(where=lambda query, key: key <= query, pool=block * kpool)
    each = [_score(q, weights, rows.k.slice("depth", n * depth, depth), rectify) for n in range(block)]
    best = each[0]
    for score in each[1:]:
        best = maximum(best, score)
    return topk(best, top_k)


@op
def indexer_in_blocks(
    q: Rows["head", "depth"],
    weights: Rows["head", f32] | None,
    chosen: Rows["slot", i32],
    keys: Paged["depth"],
    *,
    top_k: Const[int],
    block: Const[int],
    kpool: Const[int] = 1,
    rectify: Const[bool] = True,
):
    """Second level: `indexer` over the keys of listed blocks.

    q, weights, keys, top_k, kpool, rectify     as there
    chosen      [rows, slots] int32: blocks, of any layer's first level. Negative is unused, wherever it stands; a block
                listed twice gives its keys twice
    block       keys of a block
    Returns out [rows, top_k] int32: best first, equal ones as the list has them, then -1.
    Raises as indexer.
    """
    found = keys.blocks(chosen, block, where=lambda query, key: key * kpool + kpool - 1 <= query)
    return topk(_score(q, weights, found.k, rectify), top_k)


class Picked(NamedTuple):
    """The keys, and the blocks they were picked from."""

    keys: Tensor  # [rows, top_k] int32, best first, equal ones by position, then -1
    blocks: Tensor  # [rows, top_blocks + 1] int32, ascending, -1 first where there are fewer


def two_level_indexer(
    q: Array,
    weights: Array | None,
    input_row_offsets: Array,
    keys: PagedLeaf,
    *,
    top_k: int,
    top_blocks: int,
    block: int,
    kpool: int = 1,
    rectify: bool = True,
    target: str | None = None,
) -> Picked:
    """The best keys of each row in its best blocks, and in the block that is being filled, which is always among them.

    DeepSeek-V4.1 scores all keys in one layer and shares the blocks: later layers run `indexer_in_blocks` on them.

    q, weights, keys, top_k, block, kpool, rectify      as in `indexer` and `indexer_blocks`
    input_row_offsets   [batch + 1], int32, int64 or uint32
    keys                a page holds whole blocks, its slots are contiguous, and scales, if any, do not straddle keys
    top_blocks          blocks chosen besides the one being filled

    Raises the `Argument*` errors.
    """
    name = "two_level_indexer"
    q, offsets = as_tensor(name, "q", q), as_tensor(name, "input_row_offsets", input_row_offsets)
    expect_shape(name, "q", q, rows=None, heads=range(1, 1 << 31), depth=range(1, 1 << 31))
    top_k, top_blocks, block, kpool = (
        expect_int(name, n, size, range(1, 1 << 31))
        for n, size in (("top_k", top_k), ("top_blocks", top_blocks), ("block", block), ("kpool", kpool))
    )
    shared = {"block": block, "kpool": kpool, "rectify": bool(rectify)}
    chosen = run(
        indexer_blocks, {"q": q, "weights": weights, "keys": _rows_of_blocks(name, keys, block)}, offsets,
        constants={**shared, "depth": q.shape[2], "top_k": top_blocks}, target=target, op=name,
    )["out"]  # fmt: skip
    # The block being filled has no row yet, so the first level cannot list it. In order, equal keys go by position.
    chosen = torch.cat([chosen, _filling(q.shape[0], offsets, keys, block, kpool)], 1).sort(1).values
    found = run(
        indexer_in_blocks, {"q": q, "weights": weights, "chosen": chosen, "keys": keys}, offsets,
        constants={**shared, "top_k": top_k}, target=target, op=name,
    )  # fmt: skip
    return Picked(found["out"], chosen)


def _filling(rows: int, offsets: Tensor, keys: PagedLeaf, block: int, kpool: int) -> Tensor:
    """[rows, 1] int32: the block of which a row sees some keys and not all, -1 where there is none."""
    starts, row = widened(offsets), torch.arange(rows, device=offsets.device)
    sequence = torch.bucketize(row, starts[1:-1], right=True)
    visible = (widened(keys.cache_lengths)[sequence] + row - starts[sequence] + 1) // kpool
    return torch.where(visible % block == 0, -1, visible // block)[:, None].to(torch.int32)


def _rows_of_blocks(name: str, keys: PagedLeaf, block: int) -> PagedLeaf:
    """The cache with a row [block * depth] for each block of keys: the same memory under other axes."""
    if keys.page_size % block:
        expected = f"a divisor of the page size {keys.page_size}, as a page holds whole blocks"
        raise ArgumentValueError(op=name, argument="block", got=block, expected=expected)

    def wide(pages: Tensor) -> Tensor:
        shape = pages.shape[0], pages.shape[1] // block, 1, block * pages.shape[3]
        try:
            return pages.view(shape)
        except RuntimeError:
            expected = "pages whose slots follow each other without a gap"
            raise ArgumentLayoutError(op=name, argument="keys", got=list(pages.stride()), expected=expected) from None

    expect_shape(name, "keys", keys.keys, pages=None, page_size=None, kv_heads=1, depth=range(1, 1 << 31))
    granularity = keys.quantization_granularity
    if granularity is not None and (granularity := min(granularity, keys.head_dim)) and keys.head_dim % granularity:
        expected = f"a divisor of the depth {keys.head_dim}"
        raise ArgumentValueError(op=name, argument="keys granularity", got=granularity, expected=expected)
    scales = None if keys.key_scales is None else wide(keys.key_scales)
    return replace(keys, keys=wide(keys.keys), key_scales=scales, quantization_granularity=granularity)
