# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Latent attention of every row to its recent keys and to the compressed entries it lists (DeepSeek-V4)."""

from torch import Tensor

from tilewright.codegen_cache.bind import dtype_of
from tilewright.codegen_cache.calls import facts_of
from tilewright.codegen_cache.checks import (
    INDEX_DTYPES,
    ROW_DTYPES,
    Array,
    as_tensor,
    expect_dtype,
    expect_int,
    expect_shape,
)
from tilewright.codegen_cache.launch import run
from tilewright.codegen_cache.prepared import again
from tilewright.dsl.annotations import Const, Paged, PerHead, Rows, Scalar
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.errors import ArgumentError, ArgumentTypeError
from tilewright.dsl.lang import Keys, concat, op
from tilewright.dsl.reducers import lse, softmax
from tilewright.dsl.value import dot
from tilewright.dsl.windows import DEFAULT_BUDGET

from .cache import PagedLeaf
from .options import output_dtype_of


@op(positions="swa_cache")
def latent_sparse_attention(
    q: Rows["head", "dim"],
    comp_indices: Rows["slot", i32] | None,
    attn_sink: PerHead | None,
    swa_cache: Paged["dim"] | None,
    comp_cache: Paged["dim"] | None,
    scale: Scalar[f32],
    *,
    window: Const[int],
    with_lse: Const[bool] = False,
):
    """Attention to recent rows and to listed entries of another cache, rows being keys and values (DeepSeek-V4)."""
    parts: list[Keys] = []
    if swa_cache is not None:
        parts.append(swa_cache.keys(where=lambda query, key: (key <= query) & (query - key < window)))
    if comp_cache is not None:
        parts.append(comp_cache.entries(comp_indices))
    keys = concat(*parts)
    out = softmax(dot(q, keys) * scale, sink=attn_sink) @ keys
    return {"out": out, "lse": lse(out)} if with_lse else out


def latent_sparse_attention_ragged_paged(
    q: Array,
    input_row_offsets: Array,
    comp_indices: Array | None,
    attn_sink: Array | None,
    swa_cache: PagedLeaf | None,
    comp_cache: PagedLeaf | None,
    scale: float,
    *,
    window: int,
    output: Array | None = None,
    output_dtype: object = None,
    return_lse: bool = False,
    target: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose key rows are also its value rows: recent positions, then listed entries.

    q                   [rows, num_heads, head_dim], float32, float16 or bfloat16
    input_row_offsets   [batch + 1], int32, int64 or uint32: rows of sequence b are offsets[b]..offsets[b + 1] - 1
    comp_indices        [rows, slots], int32 or int64: entries of comp_cache; negative is an unused slot, duplicates
                        count once each; entries are not checked causally. None without comp_cache
    attn_sink           [num_heads]: a logit per head in the denominator, as in flash attention; None is no sink
    swa_cache           one layer of the sliding-window leaf, paged by token, one latent head; its lengths (tokens
                        before this call) define positions. Not read, and may be None, with window 0
    comp_cache          one layer of the compressed leaf, paged by entry, one latent head; its lengths count all entries
                        stored. Page sizes of the two are free. None where a layer has no such leaf
    window              tokens: a query at pos sees max(0, pos - window + 1)..pos; 0 is no window
    output, output_dtype, return_lse, target    as generic_flash_attention_kv_cache_ragged_sink

    A row that sees nothing gives 0. Returns output [rows, num_heads, head_dim], or (output, lse [rows, num_heads]).

    Raises the `Argument*` errors; on CPU tensors an index past the leaf's entries names row, slot, index and bound.
    """
    name = "latent_sparse_attention_ragged_paged"
    settings = (name, window, output_dtype, return_lse, target)
    tensors = {"offsets": input_row_offsets, "q": q, "comp_indices": comp_indices, "attn_sink": attn_sink}
    caches = {"swa_cache": swa_cache, "comp_cache": comp_cache}
    facts = facts_of(settings, (tensors, caches, {"scale": scale}, {"out": output}))
    if (found := again(facts, DEFAULT_BUDGET)) is not None:
        return (found["out"], found["lse"]) if return_lse else found["out"]
    q = as_tensor(name, "q", q)
    expect_dtype(name, "q", q, ROW_DTYPES)
    expect_shape(name, "q", q, rows=None, num_heads=range(1, 1 << 31), head_dim=range(1, 1 << 31))
    window = expect_int(name, "window", window, range(1 << 31))
    if window and swa_cache is None:
        expected = f"the window leaf, as window is {window}"
        raise ArgumentError(op=name, argument="swa_cache", got="is None", expected=expected)
    if attn_sink is not None:
        attn_sink = as_tensor(name, "attn_sink", attn_sink)
        expect_dtype(name, "attn_sink", attn_sink, ROW_DTYPES)
        expect_shape(name, "attn_sink", attn_sink, num_heads=q.shape[1])
    if (comp_indices is None) != (comp_cache is None) or (comp_cache is None and window == 0):
        expected = "both or neither, and one leaf at least"
        raise ArgumentError(op=name, argument="comp_indices or comp_cache", got="is None", expected=expected)
    if comp_indices is not None:
        comp_indices = as_tensor(name, "comp_indices", comp_indices)
        expect_dtype(name, "comp_indices", comp_indices, INDEX_DTYPES)
    leaves = {"comp_cache": comp_cache, "swa_cache": swa_cache if window else None}
    for argument, leaf in leaves.items():
        if leaf is not None:
            _check_leaf(name, argument, leaf, q.shape[2])
    arguments = {"q": q, "comp_indices": comp_indices, "attn_sink": attn_sink, "scale": scale}
    results = run(
        latent_sparse_attention,
        {**arguments, **leaves},
        input_row_offsets,
        constants={"window": window, "with_lse": bool(return_lse)},
        outputs={"out": output},
        output_dtypes={"out": output_dtype_of(name, dtype_of(q), output_dtype)},
        target=target,
        op=name,
        names={"out": "output"},
        facts=facts,
    )
    return (results["out"], results["lse"]) if return_lse else results["out"]


def _check_leaf(name: str, argument: str, leaf: object, head_dim: int) -> None:
    if not isinstance(leaf, PagedLeaf):
        expected = "one layer of a paged cache: cache.layer(i)"
        raise ArgumentTypeError(op=name, argument=argument, got=type(leaf).__name__, expected=expected)
    expect_shape(name, f"{argument}.keys", leaf.keys, pages=None, page_size=None, kv_heads=1, head_dim=head_dim)
