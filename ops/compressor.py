# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Compressors: windows of tokens become one entry each, as they close (DeepSeek-V4, MoBA, indexers with pooled keys).

A compressor's rows are entries, not tokens: row i of a sequence is the i-th window that this call's tokens close, and
positions count entries. `closed_windows` says how many those are, `compress` runs DeepSeek-V4's two compressors.
"""

import torch
from torch import Tensor as Array

from tilewright.codegen_cache.checks import as_tensor, expect_int, expect_row_offsets, expect_shape
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Const, Paged, Rows, Tensor
from tilewright.dsl.dtypes import f32
from tilewright.dsl.errors import ArgumentError, ArgumentShapeError
from tilewright.dsl.lang import op
from tilewright.dsl.reducers import softmax, weights
from tilewright.dsl.value import key, pos, where

from .cache import PagedLeaf


@op(positions="entries")
def compress_windows(
    count: Rows["nothing"],
    bias: Tensor["token", "dim"],
    entries: Paged["dim"],
    tokens: Paged["dim"],
    *,
    rate: Const[int],
):
    """Entries of heavily compressed layers (DeepSeek-V4, equations 20 to 23), before their norm and rotation.

    Entry e is sum_t softmax_t(gate_t + bias_t) * row_t, for each feature, over tokens e * rate .. e * rate + rate - 1.

    count       [entries, 0]: says how many there are
    bias        [rate, dim], float32: the position bias
    entries     where they will be stored, one head of dim: only its lengths (entries before this call) are read
    tokens      keys are gates, values are rows, one head of dim; its lengths count all tokens, this call's among them
    rate        tokens of a window
    Returns out [entries, dim].
    Raises ArgumentShapeError where widths or batches differ.
    """
    rows = tokens.keys(where=lambda entry, token: token // rate == entry)
    return softmax(rows.k + bias[key - pos * rate]) @ rows.v


@op(positions="entries")
def compress_overlapping(
    count: Rows["nothing"],
    bias: Tensor["half", "token", "dim"],
    entries: Paged["dim"],
    tokens: Paged["both"],
    *,
    rate: Const[int],
    dim: Const[int],
):
    """Entries of compressed-sparse layers and of their indexer (DeepSeek-V4, equations 9 to 12), before norm, rotation.

    As `compress_windows`, over the window before as well: its tokens enter with the first half of their gates and rows,
    the window's own with the second. Entry 0 has no window before.

    count, entries, rate    as there
    bias        [2, rate, dim], float32: of the window before, of its own
    tokens      keys are gates, values are rows, one head of 2 * dim
    Returns out [entries, dim].
    Raises ArgumentShapeError where widths or batches differ.
    """
    rows = tokens.keys(where=lambda entry, token: (token // rate >= entry - 1) & (token // rate <= entry))
    own = key // rate == pos
    gate, row = (where(own, x.slice("dim", dim, dim), x.slice("dim", 0, dim)) for x in (rows.k, rows.v))
    return softmax(gate + bias[where(own, 1, 0), key % rate]) @ row


@op(positions="entries")
def pool_means(each: Rows["head", f32], entries: Paged["dim"], tokens: Paged["dim"], *, rate: Const[int]):
    """One key per `rate` tokens: the mean of their keys (MoBA's block keys; an indexer's kpool).

    each        [entries, kv_heads]: the weight of a token, 1 / rate
    entries     where they will be stored: only its lengths (entries before this call) are read
    tokens      keys [.., kv_heads, dim]; its lengths count all tokens, this call's among them
    rate        tokens of an entry
    Returns out [entries, kv_heads, dim].
    Raises ArgumentShapeError where widths, head counts or batches differ.
    """
    rows = tokens.keys(where=lambda entry, token: token // rate == entry)
    return weights(where(key // rate == pos, each, 0.0)) @ rows.k
