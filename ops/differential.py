# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Differential attention: the difference of two softmaxes over the same keys."""

from tilewright.dsl.annotations import Const, Paged, PerHead, Rows, Scalar
from tilewright.dsl.dtypes import f32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import softmax
from tilewright.dsl.value import dot


@op
def differential_attention(
    q_first: Rows["head", "half"],
    q_second: Rows["head", "half"],
    cache: Paged["dim", "value_dim"],
    weight: PerHead[f32],
    scale: Scalar[f32],
    *,
    half: Const[int] = 64,
):
    """Causal softmax(q1 k1) v - weight * softmax(q2 k2) v (Differential Transformer, arXiv 2410.05258).

    q_first, q_second   [rows, heads, half]: the two queries of each head, q1 and q2
    cache               keys [.., kv_heads, 2 * half]: k1, then k2; values [.., kv_heads, value_dim]
    weight              [heads]: lambda of each head; the paper has one a layer, made of its learned vectors
    scale               on both scores; half ** -0.5 in the paper
    half                width of one query
    Returns out [rows, heads, value_dim], before the paper's norm per head and factor 1 - lambda_init.
    Raises ArgumentShapeError where a query is not `half` wide or heads differ, AxisMismatch for keys under 2 * half.
    """
    keys = cache.keys(where=lambda query, key: key <= query)
    first = softmax(dot(q_first, keys.k.slice("half", 0, half)) * scale) @ keys.v
    return first - weight * (softmax(dot(q_second, keys.k.slice("half", half, half)) * scale) @ keys.v)
