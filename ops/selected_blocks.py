# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention to blocks of tokens that a first operator chose: natively sparse attention (NSA) and MoBA.

Choosing and attending are two operators; `native_sparse_attention` and `block_routed_attention` run them in order.
Blocks start at multiples of their size. The row's own block, which is not complete, is never listed: it is a range.
"""

from math import inf

import torch

from tilewright.codegen_cache.checks import Array, as_tensor, expect_int, expect_shape
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Const, Paged, Rows, Scalar
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.lang import Leaf, concat, op
from tilewright.dsl.reducers import lse, softmax, sum, topk
from tilewright.dsl.value import Value, dot, exp, key, where

from .cache import PagedLeaf


@op
def compressed_attention(q: Rows["head", "dim"], blocks: Paged["dim"], scale: Scalar[f32], *, block: Const[int]):
    """NSA's attention to compressed blocks, whose weights also say which blocks matter (arXiv 2502.11089, eq. 7, 8).

    q           [rows, heads, dim]
    blocks      a key and a value row for every complete block; its lengths count tokens before this call
    scale       on scores
    block       tokens of a block, which is seen from its last token on
    Returns out [rows, heads, dim] and lse [rows, heads], natural log. A row that sees no block: 0 and -inf.
    Raises ArgumentShapeError where widths or batches differ, ArgumentError where kv heads do not divide heads.
    """
    keys = blocks.keys(where=lambda query, key: key <= query, pool=block)
    out = softmax(dot(q, keys) * scale) @ keys.v
    return {"out": out, "lse": lse(out)}


@op
def choose_by_weight(
    q: Rows["head", "group", "dim"],
    total: Rows["head", "group", f32],
    blocks: Paged["dim"],
    scale: Scalar[f32],
    *,
    block: Const[int],
    top_k: Const[int],
    local: Const[int] = 2,
):
    """NSA's choice: blocks by the weight that a group's heads give them in `compressed_attention` (eq. 9 to 12).

    q, total    [rows, kv_heads, group, dim], [rows, kv_heads, group]: queries and lse of compressed_attention; here
                "head" counts key-value heads, each of which has one list
    blocks, scale, block    as there
    top_k       blocks listed: block 0, where it is a candidate, then those of most weight, equal ones by position
    local       blocks that are no candidates, as they are attended in any case: the row's own and those just before
    Returns out [rows, kv_heads, top_k] int32, then -1.
    Raises as compressed_attention.
    """
    keys = blocks.keys(where=lambda query, key: key // block <= query // block - local, pool=block)
    weight = sum(exp(dot(q, keys) * scale - total), over="group")
    return topk(where(key == 0, inf, weight), top_k)


@op
def choose_by_mean(q: Rows["head", "dim"], means: Paged["dim"], *, block: Const[int], top_k: Const[int]):
    """MoBA's routing: the complete blocks whose mean key scores best, for each head (arXiv 2502.13189, eq. 5 and 6).

    q           [rows, heads, dim]
    means       the mean key of every complete block (`pool_means`); its lengths count tokens before this call
    block       tokens of a block; the row's own block is no candidate, as it is attended in any case
    Returns out [rows, heads, top_k] int32: best first, equal ones by position, then -1.
    Raises ArgumentShapeError where widths or batches differ, ArgumentError where kv heads do not divide heads.
    """
    keys = means.keys(where=lambda query, key: key // block < query // block, pool=block)
    return topk(dot(q, keys), top_k)


@op
def attend_by_group(
    q: Rows["head", "dim"],
    chosen: Rows["kv_head", "slot", i32],
    kv: Paged["dim", "value_dim"],
    scale: Scalar[f32],
    *,
    block: Const[int],
    local: Const[int] = 2,
):
    """Causal attention to the blocks that each key-value head lists, and to the last ones (NSA's selected branch).

    q           [rows, heads, dim]
    chosen      [rows, kv_heads, slots]: blocks; negative is unused, wherever it stands, and so is one of the last
                `local`. A block listed twice counts twice
    kv          keys and values of tokens; its lengths count tokens before this call
    scale       on scores
    block       tokens of a block
    local       blocks attended without being listed: the row's own, up to the row, and those just before
    Returns out [rows, heads, value_dim].
    Raises ArgumentShapeError where widths, batches or head counts differ, ArgumentError where kv heads do not divide heads.
    """
    return _attend(q, chosen, kv, scale, block, local)


@op
def attend_by_head(
    q: Rows["head", "dim"],
    chosen: Rows["head", "slot", i32],
    kv: Paged["dim", "value_dim"],
    scale: Scalar[f32],
    *,
    block: Const[int],
    local: Const[int] = 1,
):
    """As `attend_by_group`, with a list [rows, heads, slots] for each query head (MoBA, Quest)."""
    return _attend(q, chosen, kv, scale, block, local)


def _attend(q: Value, chosen: Value, kv: Leaf, scale: Value, block: int, local: int) -> Value:
    listed = kv.blocks(chosen, block, where=lambda query, key: key // block <= query // block - local)
    recent = kv.keys(where=lambda query, key: (key <= query) & (key // block > query // block - local))
    keys = concat(recent, listed)
    return softmax(dot(q, keys) * scale) @ keys.v


# ---- choosing, then attending ----------------------------------------------------------------------------------------


class Selected(NamedTuple):
    """What a row attended to, and the result."""

    out: Tensor  # [rows, heads, value_dim], in q's dtype
    chosen: Tensor  # int32 [rows, kv_heads or heads, top_k]


def native_sparse_attention(
    q: Array,
    input_row_offsets: Array,
    kv: PagedLeaf,
    blocks: PagedLeaf,
    scale: float,
    *,
    block: int,
    top_k: int,
    local: int = 2,
    target: str | None = None,
) -> tuple[Selected, Tensor]:
    """Two of NSA's branches: attention to selected blocks, and to compressed blocks, which selects them.

    q, kv, blocks, scale, block, top_k, local   as `compressed_attention`, `choose_by_weight` and `attend_by_group` say;
                q is float32, float16 or bfloat16, block and top_k at least 1, local at least 1
    input_row_offsets   [batch + 1], int32, int64 or uint32
    target      as generic_flash_attention_kv_cache_ragged_sink, which is the third branch (a sliding window). The gates
                that weigh the branches are the model's, as is what makes a block's key and value of its tokens

    Returns (Selected(out, chosen [rows, kv_heads, top_k]), compressed [rows, heads, dim]).
    Raises the `Argument*` errors.
    """
    name = "native_sparse_attention"
    q, options = _checked(name, q, block, top_k, local, target)
    compressed = run(
        compressed_attention,
        {"q": q, "blocks": blocks, "scale": scale},
        input_row_offsets,
        constants={"block": block},
        output_dtypes={"out": dtype_of(q)},
        **options,
    )
    kv_heads = blocks.keys.shape[2]
    chosen = run(
        choose_by_weight,
        {"q": q.unflatten(1, (kv_heads, -1)), "total": compressed["lse"].unflatten(1, (kv_heads, -1)), "blocks": blocks,
         "scale": scale},
        input_row_offsets,
        constants={"block": block, "top_k": top_k, "local": local},
        **options,
    )["out"]
    ...
