# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention to recent tokens and to every compressed entry that is closed, by a predicate: no list is made."""

from tilewright.dsl.annotations import Const, Paged, PerHead, Rows, Scalar
from tilewright.dsl.dtypes import f32
from tilewright.dsl.lang import concat, op
from tilewright.dsl.reducers import lse, softmax
from tilewright.dsl.value import dot


@op(positions="recent")
def heavily_compressed_attention(
    q: Rows["head", "dim"],
    recent: Paged["dim"],
    entries: Paged["dim"],
    sink: PerHead | None,
    scale: Scalar[f32],
    *,
    window: Const[int] = 128,
    rate: Const[int] = 128,
    with_lse: Const[bool] = False,
):
    """A window of tokens and all closed entries, keys being values (DeepSeek-V4's heavily compressed layers).

    q           [rows, heads, dim]
    recent      keys alone, one head of dim, a row per token; its lengths (tokens before this call) define positions
    entries     the same, a row per entry; its lengths count all entries stored, this call's among them
    sink        [heads]: a logit per head in the denominator, without a value; None is none. scale: on scores
    window      tokens that a row sees, its own included
    rate        tokens of an entry, which is seen from its last token on: entry < (pos + 1) // rate
    Returns out [rows, heads, dim], with_lse also lse [rows, heads], natural log, without the sink.
    Raises ArgumentShapeError where widths, batches or heads of q, the caches and sink differ.
    """
    tokens = recent.keys(where=lambda query, key: (key <= query) & (query - key < window))
    keys = concat(tokens, entries.keys(where=lambda query, entry: entry < (query + 1) // rate))
    out = softmax(dot(q, keys) * scale, sink=sink) @ keys
    return {"out": out, "lse": lse(out)} if with_lse else out
