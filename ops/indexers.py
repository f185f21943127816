# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Indexers beside the published float8 one: 16- and 32-bit, with and without relu or weights, and in two levels."""

from dataclasses import replace

import torch
from torch import Tensor

from tilewright.codegen_cache.checks import Array, as_tensor, expect_int, widened
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Const, Paged, Rows
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.errors import ArgumentError, ArgumentLayoutError
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

    With relu: DeepSeek-V3.2 and V4 in 16 or 32 bits (weights times their scales), Qwen's over mean keys (no weights,
    `pool_means`). Without: Qwen's in attention-gym.

    q           [rows, heads, depth]
    weights     [rows, heads], float32, any sign; None weighs all heads alike
    keys        keys alone, one head of depth, of any cache dtype; its lengths count tokens before this call
    top_k       entries of the result
    kpool       tokens of a key, which is a candidate once its last token is visible
    rectify     False leaves out the relu
    Returns out [rows, top_k] int32: best first, equal ones by position, then -1.
    Raises ArgumentShapeError where widths, head counts or batches differ.
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
    chosen      [rows, slots] int32: blocks, of any layer's first level; negative is unused, wherever it stands
    block       keys of a block
    Returns out [rows, top_k] int32: best first, equal ones as the list has them, then -1.
    Raises as indexer.
    """
    found = keys.blocks(chosen, block, where=lambda query, key: key * kpool + kpool - 1 <= query)
    return topk(_score(q, weights, found.k, rectify), top_k)
