# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention in levels: to a prefix that several sequences share, then to what is each one's own, and merged."""

from torch import Tensor as TorchTensor

from tilewright.codegen_cache.checks import Array
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Paged, Rows, Scalar, Tensor
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import lse, softmax
from tilewright.dsl.value import dot

from .cache import PagedLeaf
from .flash_attention import flash_attention
from .masks import mask_named
from .merge import merge_states


@op
def prefix_attention(
    q: Rows["head", "dim"], prefix: Paged["dim", "value_dim"], length: Tensor["seq", i32], scale: Scalar[f32]
):
    """Attention of every row to all of a prefix, one level of a cascade (FlashInfer's cascades; Hydragen, 2402.05099).

    q       [rows, heads, dim]: rows of all sequences that share a prefix stand together, as one "sequence" of this call
    prefix  keys [.., kv_heads, dim] and values [.., kv_heads, value_dim], one table row per prefix; the rows' own keys
            are not in it. Its cache_lengths are `length`
    length  [prefixes] int32: tokens of each prefix; 0 is none
    scale   on scores
    Returns out [rows, heads, value_dim] and lse [rows, heads], natural log; 0 and -inf where the prefix is empty.
    Raises ArgumentShapeError where widths, heads or the number of prefixes differ.
    """
    keys = prefix.keys(where=lambda query, key: key < length)
    out = softmax(dot(q, keys) * scale) @ keys.v
    return {"out": out, "lse": lse(out)}


def cascade_attention(
    q: Array,
    input_row_offsets: Array,
    own: PagedLeaf,
    prefix_row_offsets: Array,
    prefix: PagedLeaf,
    scale: float,
    *,
    target: str | None = None,
) -> tuple[TorchTensor, TorchTensor]:
    """Causal attention of sequences whose first tokens are a prefix they share; a prefix is read once for all its rows.

    q                   [rows, heads, dim]
    input_row_offsets   [batch + 1]: rows of sequence b are offsets[b]..offsets[b + 1] - 1
    own                 one layer of a paged cache: what follows each sequence's prefix, positions counted from its end
    prefix_row_offsets  [prefixes + 1]: rows of the sequences that share prefix p, all together; [0, rows] for one
    prefix              one layer of a paged cache, one table row per prefix; lengths are the prefixes'. Another pool or
                        the same, any page size
    scale               on scores
    Returns out [rows, heads, value_dim], and lse [rows, heads], natural log: what one call over both gives. For more
    levels, run `prefix_attention` for each and `merge_states`. Raises the `Argument*` errors.
    """
    name = "cascade_attention"
    above = run(
        prefix_attention,
        {"q": q, "prefix": prefix, "length": prefix.cache_lengths, "scale": scale},
        prefix_row_offsets,
        target=target,
        op=name,
        names={"offsets": "prefix_row_offsets", "length": "prefix.cache_lengths"},
    )
    below = run(
        flash_attention,
        {"q": q, "kv": own, "scale": scale, "sink": None},
        input_row_offsets,
        constants={"mask": mask_named(name, "causal", None), "with_lse": True},
        target=target,
        op=name,
        names={"kv": "own"},
    )
    return merge_states(above["out"], above["lse"], below["out"], below["lse"])
