# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""The indexer of sparse latent attention: scores over float8 keys, summed over heads, and the best keys of each row."""

import torch
from torch import Tensor

from tilewright.codegen_cache.calls import facts_of
from tilewright.codegen_cache.checks import Array, as_tensor, expect_choice, expect_dtype, expect_int, expect_shape
from tilewright.codegen_cache.launch import run
from tilewright.codegen_cache.prepared import again
from tilewright.dsl.annotations import Const, Paged, Rows
from tilewright.dsl.dtypes import f8e4m3, f32, i32
from tilewright.dsl.errors import ArgumentError, ArgumentTypeError
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import sum, topk
from tilewright.dsl.value import dot, relu
from tilewright.dsl.windows import DEFAULT_BUDGET

from .cache import PagedKVCache, PagedLeaf, leaf_of
from .masks import mask_named


@op
def mla_indexer(
    q: Rows["head", "depth", f8e4m3],
    q_s: Rows["head", f32],
    k: Paged["depth", f8e4m3],
    *,
    top_k: Const[int],
    mask: Const,
    kpool: Const[int] = 1,
):
    """The float8 keys with the largest k_scale * sum over heads of relu(<q, k>) * q_s (DeepSeek-V3.2, -V4)."""
    keys = k.keys(where=mask, pool=kpool)
    per_head = relu(dot(q, keys)) * q_s
    return topk(sum(per_head, over="head") * keys.scale, top_k)


def mla_indexer_ragged_float8_paged(
    q: Array,
    q_s: Array,
    input_row_offsets: Array,
    k_collection: PagedKVCache,
    layer_idx: int,
    *,
    top_k: int,
    mask_str: str = "causal",
    scores_budget_bytes: int = DEFAULT_BUDGET,
    kpool: int = 1,
    output_indices: Array | None = None,
    target: str | None = None,
) -> Tensor:
    """The top_k keys of each row by k_scale * sum over heads of relu(<q, k>) * q_s.

    q                   [rows, num_heads, depth], float8_e4m3fn; heads 1..128, depth a multiple of 8
    q_s                 [rows, num_heads], float32, any sign
    input_row_offsets   [batch + 1], int32, int64 or uint32
    k_collection        a PagedKVCache of keys alone, float8_e4m3fn, one head, one scale per key
    layer_idx           the layer whose keys are read
    top_k               entries of the result, at least 1; may exceed every length
    mask_str            causal or null
    scores_budget_bytes what the scores of a window of rows may take; rows are scored a window at a time, one row at
                        least. Never changes the result
    kpool               tokens per cached key: the cache holds one key per pool, `cache_lengths` still counts tokens,
                        and a pool counts once its last token is visible
    output_indices      buffer [rows, top_k], int32

    Returns int32 [rows, top_k]: key (or pool) indices within the sequence by descending score, equal scores by
    ascending index, then -1. -0 equals +0, NaN scores come last.

    Raises the `Argument*` errors.
    """
    name = "mla_indexer_ragged_float8_paged"
    settings = (name, top_k, mask_str, scores_budget_bytes, kpool, target)
    tensors = {"offsets": input_row_offsets, "q": q, "q_s": q_s}
    facts = facts_of(settings, (tensors, {"k": leaf_of(k_collection, layer_idx)}, {}, {"out": output_indices}))
    if (found := again(facts, scores_budget_bytes)) is not None:
        return found["out"]
    q, q_s = as_tensor(name, "q", q), as_tensor(name, "q_s", q_s)
    expect_dtype(name, "q", q, (torch.float8_e4m3fn,))
    expect_shape(name, "q", q, rows=None, num_heads=range(1, 129), depth=range(8, 1 << 31, 8))
    expect_dtype(name, "q_s", q_s, (torch.float32,))
    expect_shape(name, "q_s", q_s, rows=q.shape[0], num_heads=q.shape[1])
    expect_choice(name, "mask_str", mask_str, ("causal", "null"))
    top_k = expect_int(name, "top_k", top_k, range(1, 1 << 31))
    kpool = expect_int(name, "kpool", kpool, range(1, 1 << 31))
    budget = expect_int(name, "scores_budget_bytes", scores_budget_bytes, range(1, 1 << 63))
    leaf = _leaf(name, k_collection, layer_idx, q.shape[2])
    results = run(
        mla_indexer,
        {"q": q, "q_s": q_s, "k": leaf},
        input_row_offsets,
        constants={"top_k": top_k, "mask": mask_named(name, mask_str, None), "kpool": kpool},
        outputs={"out": output_indices},
        output_dtypes={"out": i32},
        budget_bytes=budget,
        target=target,
        op=name,
        names={"k": "k_collection", "out": "output_indices"},
        facts=facts,
    )
    return results["out"]


def _leaf(name: str, collection: PagedKVCache, layer_idx: int, depth: int) -> PagedLeaf:
    if not isinstance(collection, PagedKVCache):
        raise ArgumentTypeError(
            op=name, argument="k_collection", got=type(collection).__name__, expected="a PagedKVCache"
        )
    leaf = collection.layer(expect_int(name, "layer_idx", layer_idx, range(collection.num_layers)))
    expect_dtype(name, "k_collection", leaf.keys, (torch.float8_e4m3fn,))
    expect_shape(name, "k_collection.keys", leaf.keys, pages=None, page_size=None, kv_heads=1, depth=depth)
    if leaf.quantization_granularity is None or leaf.quantization_granularity < depth:
        got = f"has a scale per {leaf.quantization_granularity} values"
        raise ArgumentError(op=name, argument="k_collection", got=got, expected=f"one scale per key of {depth}")
    return leaf
