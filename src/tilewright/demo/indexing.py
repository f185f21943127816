# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# ruff: noqa: F821
# Axis names stand in subscripts of annotations, which checkers take for types.
"""The keys that an indexer picks for each row: by the published operator in float8, by its like here in float32."""

import torch
from torch import Tensor

from tilewright.codegen_cache.launch import run
from tilewright.dsl import Const, Paged, Rows, dot, f32, op, sum, topk
from tilewright.dsl.value import relu
from tilewright.ops import quantize
from tilewright.ops.indexer import mla_indexer_ragged_float8_paged

from .page_pool import PagePool


@op
def float32_indexer(
    q: Rows["head", "depth"], q_s: Rows["head", f32], k: Paged["depth"], *, top_k: Const[int], kpool: Const[int] = 1
):
    keys = k.keys(where=lambda query, key: key <= query, pool=kpool)
    return topk(sum(relu(dot(q, keys)) * q_s, over="head"), top_k)


def best_keys(
    q: Tensor, q_s: Tensor, offsets: Tensor, keys: PagePool, layer: int, lengths: Tensor, *, top_k: int, kpool: int = 1
) -> Tensor:
    """int32 [rows, top_k]: the keys (pools of `kpool` tokens) of the best scores of each row, then -1.

    q           [rows, heads, depth], float32; quantised by row and head where the keys are float8
    q_s         [rows, heads]: a weight per head
    offsets     [requests + 1]: rows of each request
    lengths     [requests]: tokens before this call, whatever `keys` counts
    """
    cache = keys.before.with_lengths(lengths)
    if cache.dtype == torch.float8_e4m3fn:
        stored, scale = quantize(q, q.shape[2])
        q_s = q_s * scale[..., 0]
        return mla_indexer_ragged_float8_paged(stored, q_s, offsets, cache, layer, top_k=top_k, kpool=kpool)
    arguments = {"q": q, "q_s": q_s, "k": cache.layer(layer)}
    return run(float32_indexer, arguments, offsets, constants={"top_k": top_k, "kpool": kpool})["out"]


def as_float8(x: Tensor) -> Tensor:
    """What remains of rows [.., dim] that are stored in float8 with a scale each, in float32."""
    stored, scale = quantize(x, x.shape[-1])
    return stored.float() * scale
