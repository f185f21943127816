# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention whose scores are capped smoothly."""

from tilewright.dsl.annotations import Const, Paged, Rows, Scalar
from tilewright.dsl.dtypes import f32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import lse, softmax
from tilewright.dsl.value import dot, tanh


@op
def softcap_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim"],
    scale: Scalar[f32],
    *,
    cap: Const[float] = 50.0,
    window: Const[int] | None = None,
    with_lse: Const[bool] = False,
):
    """Causal attention with scores cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118; Grok-1 has cap 30).

    q       [rows, heads, dim]
    cache   keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    scale   on scores, before the cap
    cap     scores stay within -cap..cap; above 0
    window  keys that a row sees, its own included; None: all. Gemma 2 has 4096 in every other layer
    Returns out [rows, heads, value_dim], with_lse also lse [rows, heads], natural log of capped scores.
    Raises ArgumentShapeError where widths or heads of q and cache differ.
    """
    keys = cache.keys(where=lambda query, key: (key <= query) & (True if window is None else query - key < window))
    out = softmax(tanh(dot(q, keys) * scale / cap) * cap) @ keys.v
    return {"out": out, "lse": lse(out)} if with_lse else out
