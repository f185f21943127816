"""The keys that an indexer picks for each row: the published operator in float8, another of the library in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.codegen_cache.launch import run
from tilewright.ops import mla_indexer_ragged_float8_paged, quantize
from tilewright.ops.indexers import indexer

from .page_pool import PagePool


def best_keys(
    q: Tensor, weights: Tensor, offsets: Tensor, keys: PagePool, layer: int, lengths: Tensor, *, top_k: int,
    kpool: int = 1,
) -> Tensor:  # fmt: skip
    """int32 [rows, top_k]: the keys (pools of `kpool` tokens) of the best scores of each row, then -1.

    q           [rows, heads, depth], float32; quantised by row and head where the keys are float8
    weights     [rows, heads]
    offsets     [requests + 1]: rows of each request
    lengths     [requests]: tokens before this call, whatever `keys` counts
    """
    cache = keys.before.with_lengths(lengths)
    if cache.dtype == torch.float8_e4m3fn:
        stored, scale = quantize(q, q.shape[2])
        weights = weights * scale[..., 0]
        return mla_indexer_ragged_float8_paged(stored, weights, offsets, cache, layer, top_k=top_k, kpool=kpool)
    arguments = {"q": q, "weights": weights, "keys": cache.layer(layer)}
    return run(indexer, arguments, offsets, constants={"top_k": top_k, "kpool": kpool})["out"]


def as_float8(x: Tensor) -> Tensor:
    """What remains of rows [.., dim] that are stored in float8 with a scale each, in float32."""
    stored, scale = quantize(x, x.shape[-1])
    return stored.float() * scale
