# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention to a window of recent keys, with something to fall back on: a learned logit, or the first keys of all."""

from tilewright.dsl.annotations import Const, Paged, PerHead, Rows, Scalar
from tilewright.dsl.dtypes import f32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import softmax
from tilewright.dsl.value import dot


@op
def sliding_sink_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim"],
    sink: PerHead,
    scale: Scalar[f32],
    *,
    window: Const[int] | None = 128,
):
    """Causal attention in a window, with a learned logit per head in the denominator (gpt-oss, OpenAI 2025).

    q       [rows, heads, dim]
    cache   keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    sink    [heads]: natural-log logits, not scaled, without a value; -inf is none, +inf gives 0
    scale   on scores
    window  keys that a row sees, its own included; None: all, as every other layer of gpt-oss
    Returns out [rows, heads, value_dim]; weights sum to less than 1, the sink takes the rest.
    Raises ArgumentShapeError where widths or heads of q, cache and sink differ.
    """
    keys = cache.keys(where=lambda query, key: (key <= query) & (True if window is None else query - key < window))
    return softmax(dot(q, keys) * scale, sink=sink) @ keys.v


@op
def first_keys_and_window_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim"],
    scale: Scalar[f32],
    *,
    first: Const[int] = 4,
    window: Const[int] = 1024,
):
    """Causal attention to the first few keys of the sequence and to a window (StreamingLLM, arXiv 2309.17453).

    q       [rows, heads, dim]
    cache   keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    scale   on scores
    first   keys at the start that every row sees; no key counts twice
    window  keys that a row sees besides, its own included. Pages between the two are never read
    Returns out [rows, heads, value_dim]. Rotation by place in the cache, as the paper has it, is the caller's.
    Raises ArgumentShapeError where widths or heads of q and cache differ.
    """
    keys = cache.keys(where=lambda query, key: (key <= query) & ((key < first) | (query - key < window)))
    return softmax(dot(q, keys) * scale) @ keys.v
