# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Softmax attention over a paged key-value cache, ragged rows, grouped heads, attention sinks."""

from dataclasses import dataclass

from torch import Tensor

from tilewright.codegen_cache.bind import dtype_of
from tilewright.codegen_cache.calls import facts_of
from tilewright.codegen_cache.checks import ROW_DTYPES, Array, as_tensor, expect_dtype, expect_int, expect_shape
from tilewright.codegen_cache.launch import run
from tilewright.codegen_cache.prepared import again
from tilewright.dsl.annotations import Const, Paged, PerHead, Rows, Scalar
from tilewright.dsl.dtypes import f32
from tilewright.dsl.errors import ArgumentError, ArgumentTypeError
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import lse, softmax
from tilewright.dsl.value import dot
from tilewright.dsl.windows import DEFAULT_BUDGET

from .cache import PagedKVCache, leaf_of
from .masks import mask_named
from .options import output_dtype_of


@op
def flash_attention(
    q: Rows["head", "dim"],
    kv: Paged["dim", "value_dim"],
    sink: PerHead | None,
    scale: Scalar[f32],
    *,
    mask: Const,
    with_lse: Const[bool] = False,
):
    """Softmax attention over a paged cache under any predicate, with a logit per head in the denominator."""
    keys = kv.keys(where=mask)
    out = softmax(dot(q, keys) * scale, sink=sink) @ keys.v
    return {"out": out, "lse": lse(out)} if with_lse else out


@dataclass(frozen=True)
class DecodeDispatchMetadata:
    """Hints for decode batches. They change cost, never the result beyond rounding.

    num_partitions: parts that a sequence's keys are cut into, run independently and merged; None: as the
        default schedule has it.
    """

    num_partitions: int | None = None


def generic_flash_attention_kv_cache_ragged_sink(
    q: Array,
    input_row_offsets: Array,
    kv_collection: PagedKVCache,
    layer_idx: int,
    scale: float,
    sink_weights: Array | None = None,
    *,
    mask_str: str = "causal",
    local_window_size: int | None = -1,
    output: Array | None = None,
    output_dtype: object = None,
    return_lse: bool = False,
    decode_dispatch_metadata: DecodeDispatchMetadata | int | None = None,
    target: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged query rows over a paged cache, with one optional sink logit per query head.

    q                   [rows, num_heads, head_dim], float32, float16 or bfloat16
    input_row_offsets   [batch + 1], int32, int64 or uint32: rows of sequence b are offsets[b]..offsets[b + 1] - 1, at
                        positions cache_lengths[b] + 0, 1, ..; the rows' own keys and values are in the cache already
    kv_collection       a PagedKVCache with keys and values; num_heads is a multiple of its key-value heads
    layer_idx           the layer whose keys and values are read
    scale               factor on scores, usually head_dim ** -0.5
    sink_weights        [num_heads]: a logit per head, not scaled, without a value row, in the denominator once; -inf is
                        no sink, +inf gives 0
    mask_str            causal, null, sliding_window_causal, sliding_window_noncausal, chunked or chunked_causal
    local_window_size   keys in a window, the query's own included; -1 or None for masks without one
    output              buffer [rows, num_heads, value_dim] to write into; otherwise a new tensor
    output_dtype        float32, float16 or bfloat16; default: q's. Sums are float32, rounded once
    return_lse          also return lse [rows, num_heads], float32: natural log of sum(exp(scores)), without the sink
    decode_dispatch_metadata    number of key partitions, alone or as DecodeDispatchMetadata

    A row that sees no key gives 0, and an lse of -inf. Returns output, or (output, lse).

    Raises the `Argument*` errors, which name the argument, what it was and what was expected; output is untouched then.
    """
    name = "generic_flash_attention_kv_cache_ragged_sink"
    partitions = _partitions_of(decode_dispatch_metadata)
    settings = (name, mask_str, local_window_size, output_dtype, return_lse, partitions, target)
    tensors = {"offsets": input_row_offsets, "q": q, "sink": sink_weights}
    leaves = {"kv": leaf_of(kv_collection, layer_idx)}
    facts = facts_of(settings, (tensors, leaves, {"scale": scale}, {"out": output}))
    if (found := again(facts, DEFAULT_BUDGET)) is not None:
        return (found["out"], found["lse"]) if return_lse else found["out"]
    q = as_tensor(name, "q", q)
    expect_dtype(name, "q", q, ROW_DTYPES)
    expect_shape(name, "q", q, rows=None, num_heads=range(1, 1 << 31), head_dim=range(1, 1 << 31))
    mask = mask_named(name, mask_str, local_window_size)
    if not isinstance(kv_collection, PagedKVCache):
        raise ArgumentTypeError(
            op=name, argument="kv_collection", got=type(kv_collection).__name__, expected="a PagedKVCache"
        )
    layer_idx = expect_int(name, "layer_idx", layer_idx, range(kv_collection.num_layers))
    leaf = kv_collection.layer(layer_idx)
    if leaf.values is None:
        raise ArgumentError(
            op=name, argument="kv_collection", got="holds keys only (kv_dim 1)", expected="keys and values"
        )
    arguments: dict[str, object] = {"q": q, "kv": leaf, "scale": scale, "sink": None}
    if sink_weights is not None:
        sink = arguments["sink"] = as_tensor(name, "sink_weights", sink_weights)
        expect_dtype(name, "sink_weights", sink, ROW_DTYPES)
        expect_shape(name, "sink_weights", sink, num_heads=q.shape[1])
    results = run(
        flash_attention,
        arguments,
        input_row_offsets,
        constants={"mask": mask, "with_lse": bool(return_lse)},
        outputs={"out": output},
        output_dtypes={"out": output_dtype_of(name, dtype_of(q), output_dtype)},
        partitions=None
        if partitions is None
        else expect_int(name, "decode_dispatch_metadata", partitions, range(1, 1025)),
        target=target,
        op=name,
        names={"kv": "kv_collection", "sink": "sink_weights", "out": "output"},
        facts=facts,
    )
    return (results["out"], results["lse"]) if return_lse else results["out"]


def _partitions_of(metadata: DecodeDispatchMetadata | int | None) -> int | None:
    return metadata.num_partitions if isinstance(metadata, DecodeDispatchMetadata) else metadata
