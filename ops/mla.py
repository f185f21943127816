# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Multi-head latent attention (MLA), absorbed: one cached row per token, its value narrower than its key."""

from tilewright.dsl.annotations import Const, Paged, Rows, Scalar
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import lse, softmax
from tilewright.dsl.value import dot


@op
def mla_attention(
    q_nope: Rows["head", "latent"],
    q_rope: Rows["head", "rope"],
    cache: Paged["dim"],
    scale: Scalar[f32],
    *,
    latent: Const[int] = 512,
    rope: Const[int] = 64,
    with_lse: Const[bool] = False,
):
    """Causal MLA, decode and chunks (DeepSeek-V2, arXiv 2405.04434; V3 and R1 have the same widths).

    q_nope          [rows, heads, latent]: queries without position, times the key up-projection
    q_rope          [rows, heads, rope]: their rotated part
    cache           keys alone, one head of latent + rope: the normed latent, which is the value, then the rotated key
    scale           on scores; usually (dimension before absorption + rope) ** -0.5
    latent, rope    widths of the two parts
    Returns out [rows, heads, latent], with_lse also lse [rows, heads], natural log.
    Raises ArgumentShapeError where a query is not as wide as its part, AxisMismatch for rows narrower than both parts.
    """
    keys = cache.keys(where=lambda query, key: key <= query)
    c = keys.k.slice("latent", 0, latent)
    out = softmax((dot(q_nope, c) + dot(q_rope, keys.k.slice("rope", latent, rope))) * scale) @ c
    return {"out": out, "lse": lse(out)} if with_lse else out


@op
def mla_sparse_attention(
    q: Rows["head", "dim"],
    indices: Rows["slot", i32],
    cache: Paged["dim"],
    scale: Scalar[f32],
    *,
    latent: Const[int] = 512,
    with_lse: Const[bool] = False,
):
    """MLA over the tokens that an indexer listed for each row (DeepSeek-V3.2, DeepSeek sparse attention).

    q           [rows, heads, dim]: the part without position, absorbed, then the rotated part; 576 in DeepSeek-V3.2
    indices     [rows, slots] int32: positions in the row's sequence, as the indexer gives them. Negative is unused,
                wherever it stands; a position listed twice counts twice; positions are not checked causally
    cache       keys alone, one head of dim, whose first `latent` elements are the value
    scale       on scores
    Returns out [rows, heads, latent], with_lse also lse [rows, heads], natural log. A row that lists nothing: 0, -inf.
    Raises ArgumentShapeError where widths differ, AxisMismatch for rows narrower than `latent`, ArgumentValueError for
    a position past the cache (CPU tensors).
    """
    keys = cache.entries(indices)
    out = softmax(dot(q, keys) * scale) @ keys.k.slice("latent", 0, latent)
    return {"out": out, "lse": lse(out)} if with_lse else out
