# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, index"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention whose scores have a bias by the distance between query and key, of its own for each head."""

from math import floor, log, log2

import torch
from torch import Tensor as TorchTensor

from tilewright.codegen_cache.checks import POSITIVE, expect_int
from tilewright.dsl.annotations import Const, Paged, PerHead, Rows, Scalar, Tensor
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import softmax
from tilewright.dsl.value import dot, key, minimum, pos, where


@op
def alibi_attention(q: Rows["head", "dim"], cache: Paged["dim", "value_dim"], slopes: PerHead[f32], scale: Scalar[f32]):
    """Causal attention with a penalty linear in distance (ALiBi, arXiv 2108.12409; BLOOM, MPT).

    q       [rows, heads, dim]
    cache   keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    slopes  [heads]: subtracted from a score, not scaled, for each key further back; see `alibi_slopes`
    scale   on q . k
    Returns out [rows, heads, value_dim]. Raises ArgumentShapeError where widths or heads of q, cache and slopes differ.
    """
    keys = cache.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys) * scale - slopes * (pos - key)) @ keys.v


@op
def relative_bias_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim"],
    bias: Tensor["head", "distance"],
    scale: Scalar[f32],
):
    """Causal attention with a bias per head and distance, as a table (KERPLE, arXiv 2205.09921; FIRE, 2310.04418).

    q       [rows, heads, dim]
    cache   keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    bias    [heads, distances]: added to the scaled score at distance pos - key; 0 at distances past the table
    scale   on q . k
    Returns out [rows, heads, value_dim]. Raises ArgumentShapeError where widths or heads of q, cache and bias differ.
    """
    keys = cache.keys(where=lambda query, key: key <= query)
    return softmax(dot(q, keys) * scale + bias[pos - key]) @ keys.v


@op
def t5_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim"],
    weight: Tensor["bucket", "head"],
    bucket_of: Tensor["distance", i32],
    scale: Scalar[f32],
    *,
    max_distance: Const[int] = 128,
    both_ways: Const[int] = 0,
):
    """Attention with a learned bias per head and bucket of distances (T5, arXiv 1910.10683).

    q           [rows, heads, dim]
    cache       keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    weight      [buckets, heads]: the model's `relative_attention_bias.weight`, added to scores, not scaled
    bucket_of   [max_distance + 1] int32: the bucket of each distance, the last of all beyond; see `t5_buckets`
    scale       on q . k; 1 in T5
    both_ways   0: causal (the decoder). Otherwise every key is seen (the encoder), and buckets of later keys start here
    Returns out [rows, heads, value_dim]. Raises ArgumentShapeError where widths or heads differ.
    """
    keys = cache.keys(where=None if both_ways else lambda query, key: key <= query)
    bucket = bucket_of[minimum(abs(pos - key), max_distance)]
    return softmax(dot(q, keys) * scale + weight[bucket + where(key > pos, both_ways, 0)]) @ keys.v


def alibi_slopes(heads: int) -> TorchTensor:
    """The slopes of ALiBi, [heads] float32: 2 ** (-8 i / heads) for i = 1.. where heads is a power of two.

    Otherwise those of the power of two below, then every other one of the power above, as the paper's code has it.
    Raises the `Argument*` errors unless heads is a whole number, at least 1.
    """
    heads = expect_int("alibi_slopes", "heads", heads, POSITIVE)
    below = 1 << floor(log2(heads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2 ** (-4 * (i + 1) / below) for i in range(0, 2 * below, 2)]
    return torch.tensor((slopes + between)[:heads])


def t5_buckets(buckets: int = 32, max_distance: int = 128) -> TorchTensor:
    """The bucket of every distance, [max_distance + 1] int32: one each up to half the buckets, then log-spaced.

    buckets: of one direction: all of a decoder's, half of an encoder's. Distances from max_distance on share the last.
    Raises the `Argument*` errors unless 2 <= buckets <= max_distance.
    """
    max_distance = expect_int("t5_buckets", "max_distance", max_distance, range(2, 1 << 31))
    buckets = expect_int("t5_buckets", "buckets", buckets, range(2, max_distance + 1))
    exact = buckets // 2
    far = torch.arange(exact, max_distance + 1).float()  # the formula of the model, in its float32
    steps = torch.log(far / exact) / log(max_distance / exact) * (buckets - exact)
    last = (exact + steps.to(torch.int32)).clamp(max=buckets - 1)
    return torch.cat([torch.arange(exact, dtype=torch.int32), last])
