# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention whose weights are sigmoids: no normalisation, so no row statistics."""

from tilewright.dsl.annotations import Const, Paged, Rows, Scalar
from tilewright.dsl.dtypes import f32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import weights
from tilewright.dsl.value import dot, sigmoid


@op
def sigmoid_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim"],
    scale: Scalar[f32],
    bias: Scalar[f32],
    *,
    window: Const[int] | None = None,
):
    """Causal attention with weights sigmoid(score + bias) (Ramapuram et al., arXiv 2409.04431).

    q       [rows, heads, dim]
    cache   keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    scale   on q . k
    bias    added to every scaled score; -log(n) in the paper, n the length trained with
    window  keys that a row sees, its own included; None: all
    Returns out [rows, heads, value_dim]; weights do not sum to 1. A row that sees no key gives 0.
    Raises ArgumentShapeError where widths or heads of q and cache differ.
    """
    keys = cache.keys(where=lambda query, key: (key <= query) & (True if window is None else query - key < window))
    return weights(sigmoid(dot(q, keys) * scale + bias)) @ keys.v
