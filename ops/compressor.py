# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, index"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Compressors: windows of tokens become one entry each as they close (DeepSeek-V4, block keys, indexers' pooled keys).

Rows are entries here, not tokens: row i of a sequence is the i-th window that the tokens of this call close, and
positions count entries. `closed_windows` says how many there are; `compress` runs DeepSeek-V4's two compressors.
"""

import torch
from torch import Tensor as Torch

from tilewright.codegen_cache.checks import (
    INDEX_DTYPES,
    Array,
    as_tensor,
    expect_dtype,
    expect_int,
    expect_row_offsets,
    expect_shape,
    widened,
)
from tilewright.codegen_cache.launch import run
from tilewright.dsl.annotations import Const, Paged, Rows, Tensor
from tilewright.dsl.dtypes import f32
from tilewright.dsl.errors import ArgumentShapeError
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
    Raises ArgumentShapeError where widths or batches differ, ArgumentError where tokens' heads do not divide each's.
    """
    rows = tokens.keys(where=lambda entry, token: token // rate == entry)
    return weights(where(key // rate == pos, each, 0.0)) @ rows.k


# ---- DeepSeek-V4's ---------------------------------------------------------------------------------------------------


def closed_windows(cache_lengths: Array, input_row_offsets: Array, rate: int) -> Torch:
    """Offsets [batch + 1] int32 of the windows of `rate` tokens that this call's tokens close, as rows of a compressor.

    cache_lengths       [batch]: tokens before this call; `// rate` they are the entries before it
    input_row_offsets   [batch + 1]: tokens of this call
    """
    name = "closed_windows"
    before, offsets = as_tensor(name, "cache_lengths", cache_lengths), as_tensor(name, "offsets", input_row_offsets)
    expect_dtype(name, "cache_lengths", before, INDEX_DTYPES)
    expect_shape(name, "cache_lengths", before, batch=None)
    expect_row_offsets(name, "input_row_offsets", offsets, batch=len(before))
    rate, before = expect_int(name, "rate", rate, range(1, 1 << 31)), widened(before)
    closed = (before + widened(offsets).diff()) // rate - before // rate
    return torch.cat([closed.new_zeros(1), closed.cumsum(0)]).to(torch.int32)


def compress(
    tokens: PagedLeaf,
    entries: PagedLeaf,
    entry_offsets: Array,
    position_bias: Array,
    *,
    output: Array | None = None,
    target: str | None = None,
) -> Torch:
    """The entries that this call's tokens close, before their norm and rotation (DeepSeek-V4).

        closed = closed_windows(tokens.cache_lengths, input_row_offsets, rate)
        tokens.append(layer, gates, rows, input_row_offsets)
        made = compress(tokens.advance(input_row_offsets).layer(layer), entries.layer(layer), closed, position_bias)
        entries.append(layer, rotated_as_token(norm(made), entry * rate), None, closed)

    tokens          what tokens leave to be compressed: gates as keys and rows as values, one head; its lengths count
                    all tokens, this call's among them. Pages before the windows being closed, and with overlap the one
                    before those, may be gone
    entries         where entries are stored, one head of dim; its lengths count those before this call
    entry_offsets   [batch + 1], of `closed_windows`
    position_bias   [rate, dim]; [rate, 2 * dim] for windows that overlap, whose gates and rows are as wide: first the
                    half for the entry of the next window, then the half for their own
    output          buffer [entries, dim]; without one, entry_offsets are read, which waits for a device

    An indexer reads its keys from `entries.advance(closed).with_lengths(tokens.cache_lengths)`, with kpool rate.

    Returns [entries, dim], float32 unless the buffer is not. Raises the `Argument*` errors.
    """
    name, dim = "compress", entries.keys.shape[3]
    offsets, bias = as_tensor(name, "entry_offsets", entry_offsets), as_tensor(name, "position_bias", position_bias)
    expect_row_offsets(name, "entry_offsets", offsets, batch=len(entries.cache_lengths))
    expect_shape(name, "position_bias", bias, rate=range(1, 1 << 31), width=None)
    rate, width = bias.shape
    if width not in (dim, 2 * dim):
        expected = f"[rate, {dim}] or, where windows overlap, [rate, {2 * dim}], as entries have dim {dim}"
        raise ArgumentShapeError(op=name, argument="position_bias", got=list(bias.shape), expected=expected)
    made = None if output is None else as_tensor(name, "output", output)
    count = torch.empty(int(offsets[-1]) if made is None else len(made), 0, device=offsets.device)
    arguments = {"count": count, "bias": bias, "entries": entries, "tokens": tokens}
    operator, constants = compress_windows, {"rate": rate}
    if width == 2 * dim:
        operator, constants["dim"] = compress_overlapping, dim
        arguments["bias"] = bias.view(rate, 2, dim).transpose(0, 1)
    return run(
        operator,
        arguments,
        offsets,
        constants=constants,
        outputs={"out": made},
        target=target,
        op=name,
        names={"offsets": "entry_offsets", "bias": "position_bias", "out": "output"},
    )["out"]
