# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, index"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Attention under masks that data decides: prefixes, packed documents, trees of drafted tokens."""

import torch
from torch import Tensor as TorchTensor

from tilewright.codegen_cache.checks import Array, as_tensor, expect_dtype, expect_row_offsets, expect_shape, widened
from tilewright.dsl.annotations import Paged, Rows, Scalar, Tensor
from tilewright.dsl.dtypes import f32, i32
from tilewright.dsl.errors import ArgumentValueError
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import softmax
from tilewright.dsl.value import dot


@op
def prefix_lm_attention(
    q: Rows["head", "dim"], cache: Paged["dim", "value_dim"], prefix: Tensor["seq", i32], scale: Scalar[f32]
):
    """Every row sees its sequence's prefix in full, and what follows causally (T5's prefix LM; PaliGemma; UL2).

    q       [rows, heads, dim]
    cache   keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    prefix  [batch] int32: tokens of each prefix; 0 (or less) is plain causal attention. Rows inside the prefix see all
            of it that is stored, so a prefix comes in one call, or in chunks that each see what came before
    scale   on scores
    Returns out [rows, heads, value_dim]. Raises ArgumentShapeError where widths, heads or batches differ.
    """
    keys = cache.keys(where=lambda query, key: (key <= query) | (key < prefix))
    return softmax(dot(q, keys) * scale) @ keys.v


@op
def document_attention(
    q: Rows["head", "dim"], cache: Paged["dim", "value_dim"], document: Tensor["seq", "token", i32], scale: Scalar[f32]
):
    """Causal attention within documents packed into one sequence (intra-document masking, arXiv 2402.13991; Llama 3).

    q           [rows, heads, dim]
    cache       keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    document    [batch, tokens] int32: the document of each position of each sequence, cached ones first; any numbers,
                what lies past a sequence's keys is ignored. Equal numbers are one document, even with others between
    scale       on scores
    Returns out [rows, heads, value_dim]. Raises ArgumentShapeError where widths, heads or batches differ.
    A position past the table reads 0, which is the number of a document: make the table as long as the sequences.
    """
    keys = cache.keys(where=lambda query, key: (key <= query) & (document[query] == document[key]))
    return softmax(dot(q, keys) * scale) @ keys.v


@op
def tree_attention(
    q: Rows["head", "dim"],
    cache: Paged["dim", "value_dim"],
    committed: Tensor["seq", i32],
    tree: Rows["word", i32],
    scale: Scalar[f32],
):
    """Every row sees the committed tokens and its own ancestors in a tree of drafts (SpecInfer, arXiv 2305.09781).

    q           [rows, heads, dim]
    cache       keys [.., kv_heads, dim] and values [.., kv_heads, value_dim]; heads is a multiple of kv_heads
    committed   [batch] int32: tokens before the drafts, seen by all; cache_lengths where this call has all drafts
    tree        [rows, words] int32: bit i % 32 of word i // 32 is set where the row sees draft i of its sequence (the
                key at committed + i), itself too; bits past the words are 0. See `tree_words`
    scale       on scores
    Returns out [rows, heads, value_dim]. Rows may differ in any way: trees, orders and sizes are free.
    Raises ArgumentShapeError where widths, heads, rows or batches differ.
    """

    def sees(query, key):
        draft = key - committed
        return (draft < 0) | ((tree[draft // 32] >> draft % 32) & 1 == 1)

    keys = cache.keys(where=sees)
    return softmax(dot(q, keys) * scale) @ keys.v


def tree_words(parents: Array, row_offsets: Array) -> TorchTensor:
    """The `tree` of `tree_attention` from parents, [rows, ceil(drafts of the largest tree / 32)] int32.

    parents         [rows], int32 or int64: the draft that each one continues, numbered within its sequence, an earlier
                    one; negative: the committed text
    row_offsets     [batch + 1], int32, int64 or uint32: each row of sequence b is a draft: offsets[b]..offsets[b + 1]
    Made on the host, row by row. Raises the `Argument*` errors: another shape or dtype, offsets out of order, a parent
    that is not an earlier draft.
    """
    name = "tree_words"
    of, offsets = as_tensor(name, "parents", parents), as_tensor(name, "row_offsets", row_offsets)
    expect_dtype(name, "parents", of, (torch.int32, torch.int64))
    expect_shape(name, "parents", of, rows=None)
    expect_row_offsets(name, "row_offsets", offsets, batch=max(0, offsets.numel() - 1), rows=len(of))
    starts, counts = widened(offsets).cpu()[:-1], widened(offsets).cpu().diff()
    first = starts.repeat_interleave(counts).tolist()  # row of each row's first draft
    width = -(-int(counts.max() if len(counts) else 0) // 32)
    sees = torch.zeros(len(of), 32 * width, dtype=torch.int64)
    for row, parent in enumerate(of.tolist()):
        draft = row - first[row]
        if parent >= draft:
            expected = f"an earlier draft, below {draft}, or negative"
            raise ArgumentValueError(op=name, argument=f"parents[{row}]", got=parent, expected=expected)
        if parent >= 0:
            sees[row] = sees[first[row] + parent]
        sees[row, draft] = 1
    words: TorchTensor = (sees.view(len(of), width, 32) << torch.arange(32)).sum(-1)
    return (words - (words >> 31 << 32)).to(device=of.device, dtype=torch.int32)  # the 32nd bit is the sign
