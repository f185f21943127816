# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention to blocks of tokens that another operator chose: natively sparse attention (NSA) and MoBA.

Choosing and attending are operators of their own, `native_sparse_attention` and `block_routed_attention` run them in
order. A row's last blocks are attended in any case, by a range: its own is not complete, so there is nothing to choose
it by. Only blocks before those are candidates.
"""

from math import inf
from typing import NamedTuple

from torch import Tensor

from tilewright.codegen_cache.bind import dtype_of
from tilewright.codegen_cache.checks import ROW_DTYPES, Array, as_tensor, expect_dtype, expect_int, expect_shape
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Const, Paged, Rows, Scalar
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.lang import Leaf, Operator, concat, op
from tilewright.dsl.reducers import lse, softmax, sum, topk
from tilewright.dsl.value import Value, dot, exp, key, where

from .cache import PagedLeaf


@op
def compressed_attention(q: Rows["head", "dim"], blocks: Paged["dim"], scale: Scalar[f32], *, block: Const[int]):
    """NSA's attention to compressed blocks, whose weights also say which blocks matter (arXiv 2502.11089, eq. 7, 8).

    q           [rows, heads, dim]
    blocks      a key row and a value row for every complete block; its lengths count tokens before this call
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
    """NSA's choice: blocks by the weight that the heads of a group give them together (eq. 9 to 12, l = d = l').

    q, total    [rows, kv_heads, group, dim], [rows, kv_heads, group]: queries, and lse of `compressed_attention`. Here
                "head" counts key-value heads, each of which gets a list
    blocks, scale, block    as there
    top_k       blocks listed: the first of the sequence, then those of most weight, equal ones by position, then -1
    local       blocks at the end that are no candidates, as they are attended in any case
    Returns out [rows, kv_heads, top_k] int32.
    Raises as compressed_attention.
    """
    keys = blocks.keys(where=lambda query, key: key // block <= query // block - local, pool=block)
    weight = sum(exp(dot(q, keys) * scale - total), over="group")
    return topk(where(key == 0, inf, weight), top_k)


@op
def choose_by_mean(
    q: Rows["head", "dim"], means: Paged["dim"], *, block: Const[int], top_k: Const[int], local: Const[int] = 1
):
    """MoBA's routing: the blocks whose mean key has the largest product with the query, by head (arXiv 2502.13189).

    q           [rows, heads, dim]
    means       the mean key of every complete block (`pool_means`); its lengths count tokens before this call
    block       tokens of a block
    top_k       blocks listed: best first, equal ones by position, then -1. MoBA's k counts the row's own block too
    local       blocks at the end that are no candidates, as they are attended in any case
    Returns out [rows, heads, top_k] int32.
    Raises ArgumentShapeError where widths or batches differ, ArgumentError where kv heads do not divide heads.
    """
    keys = means.keys(where=lambda query, key: key // block <= query // block - local, pool=block)
    return topk(dot(q, keys), top_k)


def _attend(q: Value, chosen: Value, kv: Leaf, scale: Value, block: int, local: int) -> Value:
    listed = kv.blocks(chosen, block, where=lambda query, key: key // block <= query // block - local)
    last = kv.keys(where=lambda query, key: (key <= query) & (key // block > query // block - local))
    keys = concat(last, listed)
    return softmax(dot(q, keys) * scale) @ keys.v


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
    """Causal attention to a row's last blocks, and to those that each key-value head lists (NSA's selected branch).

    q           [rows, heads, dim]
    chosen      [rows, kv_heads, slots] int32: blocks. Negative is unused, wherever it stands; one of the last blocks
                or a later one is passed over; a block listed twice counts twice
    kv          keys and values of tokens; its lengths count tokens before this call
    scale       on scores
    block       tokens of a block; any number, whatever the page size
    local       blocks attended without being listed: the row's own, up to the row, and those just before it
    Returns out [rows, heads, value_dim].
    Raises ArgumentShapeError where widths, batches or head counts differ, ArgumentError where kv heads do not divide
    heads.
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
    """As `attend_by_group`, with a list for each query head (MoBA, Quest).

    chosen      [rows, heads, slots] int32
    q, kv, scale, block, local      as there
    Returns out [rows, heads, value_dim]. Raises as there.
    """
    return _attend(q, chosen, kv, scale, block, local)


# ---- choosing, then attending ----------------------------------------------------------------------------------------


class Selected(NamedTuple):
    """The result, and the blocks it came from beside each row's last ones."""

    out: Tensor  # [rows, heads, value_dim], in q's dtype
    chosen: Tensor  # [rows, lists, top_k] int32; a list for each query head, or for each key-value head


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
    """Two branches of NSA: attention to compressed blocks, and to the blocks that it finds important.

    q           [rows, heads, dim], float32, float16 or bfloat16
    input_row_offsets   [batch + 1], int32, int64 or uint32
    kv, blocks, scale, block, top_k, local      as in `attend_by_group` and `choose_by_weight`, at least 1 each

    The third branch, a window, is generic_flash_attention_kv_cache_ragged_sink. What makes a block's rows of its tokens
    and the gates that weigh the branches belong to the model.

    Returns (Selected, the compressed branch [rows, heads, dim]). Raises the `Argument*` errors.
    """
    name = "native_sparse_attention"
    q, kv_heads = queries(name, q), blocks.keys.shape[2]
    sizes = sizes_of(name, block=block, top_k=top_k, local=local)
    seen = run(
        compressed_attention,
        {"q": q, "blocks": blocks, "scale": scale},
        input_row_offsets,
        constants={"block": sizes["block"]},
        output_dtypes={"out": dtype_of(q)},
        target=target,
        op=name,
    )
    rows, heads, dim = q.shape
    chosen = run(
        choose_by_weight,
        {
            "q": q.view(rows, kv_heads, heads // kv_heads, dim),
            "total": seen["lse"].view(rows, kv_heads, heads // kv_heads),
            "blocks": blocks,
            "scale": scale,
        },
        input_row_offsets,
        constants=sizes,
        target=target,
        op=name,
    )["out"]
    return attend_to_choice(name, attend_by_group, q, chosen, input_row_offsets, kv, scale, sizes, target), seen["out"]


def block_routed_attention(
    q: Array,
    input_row_offsets: Array,
    kv: PagedLeaf,
    means: PagedLeaf,
    scale: float,
    *,
    block: int,
    top_k: int,
    local: int = 1,
    target: str | None = None,
) -> Selected:
    """MoBA: every head of a row attends to its own block and to the `top_k` before it whose mean key it likes best.

    q           [rows, heads, dim], float32, float16 or bfloat16
    input_row_offsets   [batch + 1], int32, int64 or uint32
    kv, means, scale, block, top_k, local       as in `attend_by_head` and `choose_by_mean`, at least 1 each

    Raises the `Argument*` errors.
    """
    name = "block_routed_attention"
    q, sizes = queries(name, q), sizes_of(name, block=block, top_k=top_k, local=local)
    found = run(choose_by_mean, {"q": q, "means": means}, input_row_offsets, constants=sizes, target=target, op=name)
    return attend_to_choice(name, attend_by_head, q, found["out"], input_row_offsets, kv, scale, sizes, target)


def attend_to_choice(
    name: str,
    attend: Operator,
    q: Tensor,
    chosen: Tensor,
    offsets: Array,
    kv: PagedLeaf,
    scale: float,
    sizes: dict[str, int],
    target: str | None,
) -> Selected:
    """The second step: exactly the list of the first one, and the last blocks."""
    out = run(
        attend,
        {"q": q, "chosen": chosen, "kv": kv, "scale": scale},
        offsets,
        constants={n: sizes[n] for n in ("block", "local")},
        output_dtypes={"out": dtype_of(q)},
        target=target,
        op=name,
    )["out"]
    return Selected(out, chosen)


def queries(name: str, q: Array) -> Tensor:
    q = as_tensor(name, "q", q)
    expect_dtype(name, "q", q, ROW_DTYPES)
    expect_shape(name, "q", q, rows=None, heads=range(1, 1 << 31), dim=range(1, 1 << 31))
    return q


def sizes_of(name: str, **sizes: int) -> dict[str, int]:
    return {n: expect_int(name, n, size, range(1, 1 << 31)) for n, size in sizes.items()}
