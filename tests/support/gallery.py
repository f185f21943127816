"""The gallery's attention in float64, from its definitions, and batches to compare it on.

A function `NAME` here is the reference of the operator `NAME`, called as `tilewright.references` says: once a sequence,
by name, with caches as `.k` and `.v` [heads, keys, width].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

import tilewright
from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Schedule
from tilewright.ops import (
    cascade,
    compressed,
    differential,
    fp8_scales,
    mixed_rows,
    mla,
    position_bias,
    sigmoid,
    sliding_sink,
    softcap,
    structured_masks,
)
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.random_inputs import Inputs, Sizes, random_inputs
from tilewright.references import compare, reference_outputs

FILES = (
    cascade, compressed, differential, fp8_scales, mixed_rows, mla, position_bias, sigmoid, sliding_sink, softcap,
    structured_masks,
)  # fmt: skip
OPERATORS: dict[str, Operator] = {
    x.name: x
    for module in FILES
    for x in vars(module).values()
    if isinstance(x, Operator) and x.fn.__module__ == module.__name__
}

ROWS, CACHED = (5, 1, 0, 7), (3, 21, 4, 0)
WIDTHS = {"dim": 8, "value_dim": 6}
LATENT = {"latent": 12, "rope": 4}


# ---- references ------------------------------------------------------------------------------------------------------


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, keys]"""
    return torch.einsum("rhd,hkd->hrk", q, k)


def attend(scores: Tensor, values: Tensor, sink: Tensor | None = None) -> dict[str, Tensor]:
    """Attention by scores [heads, rows, keys], -inf where unseen: out [rows, heads, width], lse without the sink."""
    logits = torch.full_like(scores[..., :1], -inf) if sink is None else sink[:, None, None].expand_as(scores[..., :1])
    weights = torch.cat([scores, logits], -1).softmax(-1).nan_to_num(0.0)[..., :-1]
    return {"out": torch.einsum("hrk,hkd->rhd", weights, values), "lse": scores.logsumexp(-1).T}


def distances(pos: Tensor, key: Tensor) -> Tensor:
    return pos[:, None] - key[None, :]


def unseen(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -inf)


def in_window(pos: Tensor, key: Tensor, window: int | None) -> Tensor:
    d = distances(pos, key)
    return (d >= 0) & (d < (len(key) if window is None else window))


def chosen(indices: Tensor, keys: int) -> Tensor:
    """How often each row lists each key [rows, keys], as a logarithm: what repeats add to a score."""
    counts = torch.zeros(len(indices), keys, dtype=torch.float64)
    for slots in indices.T:
        used = (slots >= 0) & (slots < keys)
        counts[used, slots[used]] += 1
    return counts.log()


def mla_attention(q_nope, q_rope, cache, scale, latent, with_lse, pos, key):  # type: ignore[no-untyped-def]
    c, rope = cache.k[..., :latent], cache.k[..., latent : latent + q_rope.shape[-1]]
    scores = (scores_of(q_nope, c) + scores_of(q_rope, rope)) * scale
    found = attend(unseen(scores, in_window(pos, key, None)), c)
    return found if with_lse else found["out"]


def mla_sparse_attention(q, indices, cache, scale, latent, with_lse):  # type: ignore[no-untyped-def]
    found = attend(scores_of(q, cache.k) * scale + chosen(indices, cache.k.shape[1]), cache.k[..., :latent])
    return found if with_lse else found["out"]


def heavily_compressed_attention(q, recent, entries, sink, scale, window, rate, with_lse, pos, key):  # type: ignore[no-untyped-def]
    closed = (torch.arange(entries.k.shape[1]) + 1) * rate <= pos[:, None] + 1
    rows = torch.cat([recent.k, entries.k], 1)
    found = attend(unseen(scores_of(q, rows) * scale, torch.cat([in_window(pos, key, window), closed], 1)), rows, sink)
    return found if with_lse else found["out"]


def mla_mixed_rows(q_nope, q_rope, latents, ropes, indices, scale, with_lse, pos, key):  # type: ignore[no-untyped-def]
    scores = (scores_of(q_nope, latents.k) + scores_of(q_rope, ropes.k)) * scale
    causal = indices is None
    scores = unseen(scores, in_window(pos, key, None)) if causal else scores + chosen(indices, latents.k.shape[1])
    found = attend(scores, latents.k)
    return found if with_lse else found["out"]


def mixed_rows_window_and_entries(  # type: ignore[no-untyped-def]
    q, q_rope, recent, recent_rope, entries, entries_rope, indices, sink, scale, window, pos, key
):
    rows = torch.cat([torch.cat([recent.k, recent_rope.k], -1), torch.cat([entries.k, entries_rope.k], -1)], 1)
    scores = scores_of(torch.cat([q, q_rope], -1), rows) * scale
    near, listed = in_window(pos, key, window), chosen(indices, entries.k.shape[1])
    out = attend(scores + torch.cat([torch.where(near, 0.0, -inf), listed], 1), rows, sink)["out"]
    return {"out": out[..., : q.shape[-1]], "out_rope": out[..., q.shape[-1] :]}


def sliding_sink_attention(q, cache, sink, scale, window, pos, key):  # type: ignore[no-untyped-def]
    return attend(unseen(scores_of(q, cache.k) * scale, in_window(pos, key, window)), cache.v, sink)["out"]


def first_keys_and_window_attention(q, cache, scale, first, window, pos, key):  # type: ignore[no-untyped-def]
    seen = in_window(pos, key, window) | in_window(pos, key, None) & (key < first)
    return attend(unseen(scores_of(q, cache.k) * scale, seen), cache.v)["out"]


def softcap_attention(q, cache, scale, cap, window, with_lse, pos, key):  # type: ignore[no-untyped-def]
    scores = cap * torch.tanh(scores_of(q, cache.k) * scale / cap)
    found = attend(unseen(scores, in_window(pos, key, window)), cache.v)
    return found if with_lse else found["out"]


def alibi_attention(q, cache, slopes, scale, pos, key):  # type: ignore[no-untyped-def]
    scores = scores_of(q, cache.k) * scale - slopes[:, None, None] * distances(pos, key)
    return attend(unseen(scores, in_window(pos, key, None)), cache.v)["out"]


def relative_bias_attention(q, cache, bias, scale, pos, key):  # type: ignore[no-untyped-def]
    table = torch.cat([bias, torch.zeros(len(bias), len(key), dtype=torch.float64)], 1)
    scores = scores_of(q, cache.k) * scale + table[:, distances(pos, key).clamp(min=0)]
    return attend(unseen(scores, in_window(pos, key, None)), cache.v)["out"]


def t5_attention(q, cache, weight, bucket_of, scale, max_distance, both_ways, pos, key):  # type: ignore[no-untyped-def]
    d = distances(pos, key)
    bucket = bucket_of[d.abs().clamp(max=max_distance)] + both_ways * (d < 0)
    scores = scores_of(q, cache.k) * scale + weight.T[:, bucket]
    return attend(scores if both_ways else unseen(scores, d >= 0), cache.v)["out"]


def prefix_lm_attention(q, cache, prefix, scale, pos, key):  # type: ignore[no-untyped-def]
    seen = in_window(pos, key, None) | (key < prefix)
    return attend(unseen(scores_of(q, cache.k) * scale, seen), cache.v)["out"]


def document_attention(q, cache, document, scale, pos, key):  # type: ignore[no-untyped-def]
    same = document[pos][:, None] == document[key]
    return attend(unseen(scores_of(q, cache.k) * scale, same & in_window(pos, key, None)), cache.v)["out"]


def tree_attention(q, cache, committed, tree, scale, key):  # type: ignore[no-untyped-def]
    seen = torch.ones(len(q), len(key), dtype=torch.bool)
    for row, words in enumerate(tree.tolist()):
        bits = "".join(f"{word % (1 << 32):032b}"[::-1] for word in words) + "0" * len(key)
        for draft in range(len(key) - int(committed)):
            seen[row, int(committed) + draft] = bits[draft] == "1"
    return attend(unseen(scores_of(q, cache.k) * scale, seen), cache.v)["out"]


def sigmoid_attention(q, cache, scale, bias, window, pos, key):  # type: ignore[no-untyped-def]
    weights = torch.sigmoid(scores_of(q, cache.k) * scale + bias) * in_window(pos, key, window)
    return torch.einsum("hrk,hkd->rhd", weights, cache.v)


def differential_attention(q_first, q_second, cache, weight, scale, half, pos, key):  # type: ignore[no-untyped-def]
    seen = in_window(pos, key, None)
    a, b = (
        attend(unseen(scores_of(q, k) * scale, seen), cache.v)["out"]
        for q, k in ((q_first, cache.k[..., :half]), (q_second, cache.k[..., half:]))
    )
    return a - weight[:, None] * b


def prefix_attention(q, prefix, length, scale, key):  # type: ignore[no-untyped-def]
    seen = (key < length).expand(len(q), -1)
    return attend(unseen(scores_of(q, prefix.k) * scale, seen), prefix.v)


def descaled_attention(q, cache, k_descale, v_descale, scale, pos, key):  # type: ignore[no-untyped-def]
    group = q.shape[1] // len(k_descale)
    of_keys, of_values = (d.repeat_interleave(group)[:, None, None] for d in (k_descale, v_descale))
    scores = scores_of(q, cache.k * of_keys) * scale
    return attend(unseen(scores, in_window(pos, key, None)), cache.v * of_values)["out"]


# ---- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call of an operator of the library: constants, extents, and what is not left to chance."""

    name: str
    constants: Mapping[str, object] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=lambda: WIDTHS)
    given: Mapping[str, object] = field(default_factory=dict)
    kv_heads: int = 2
    listed: bool = False  # a tile holds one row
    walks: int = 1  # over keys; partitions need one
    cache_dtype: str | None = None


def inputs_of(case: Case, seed: int, page_size: int = 3, **sizes: Any) -> Inputs:
    """The case's inputs. Two dtypes of caches are two sets of inputs, see `mixed`."""
    made = Sizes(**{
        "rows": ROWS, "cached": CACHED, "heads": 4, "kv_heads": case.kv_heads, "dims": case.dims,
        "page_size": page_size, "cache_dtype": case.cache_dtype, **sizes,
    })  # fmt: skip
    return random_inputs(OPERATORS[case.name], case.constants, made, seed, case.given)


def mixed(case: Case, seed: int, tails: tuple[str, ...], granularity: int, **sizes: Any) -> Inputs:
    """Inputs whose caches are float8 with scales, but for `tails`, which are bfloat16."""
    stored = inputs_of(replace(case, cache_dtype="float8_e4m3fn"), seed, granularity=granularity, **sizes)
    other = inputs_of(replace(case, cache_dtype="bfloat16"), seed, **sizes)
    return replace(stored, arguments={**stored.arguments, **{n: other.arguments[n] for n in tails}})


def run(inputs: Inputs, schedule: Schedule | None = None) -> dict[str, Tensor]:
    return tilewright.run(
        inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants, schedule=schedule
    )


def reference(inputs: Inputs) -> dict[str, Tensor]:
    return reference_outputs(globals()[inputs.operator.name], inputs)


def worst(inputs: Inputs, schedule: Schedule | None = None) -> float:
    """The largest error of all outputs against the reference, relative above 1."""
    return max(c.error for c in compare(run(inputs, schedule), reference(inputs)))


def leaf_of(
    keys: Sequence[Tensor], values: Sequence[Tensor] | None, rows: Sequence[int], page_size: int = 3
) -> PagedLeaf:
    """A cache of what each sequence has, [keys, kv_heads, width], pages in backward order, NaN in unused slots.

    rows: of this call, the last of each sequence's keys.
    """
    counts = [-(-len(k) // page_size) for k in keys]
    ends = [sum(counts[: b + 1]) for b in range(len(counts))]
    table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    for b, (end, count) in enumerate(zip(ends, counts, strict=True)):
        table[b, :count] = torch.arange(end - 1, end - count - 1, -1)

    def pages(stored: Sequence[Tensor]) -> Tensor:
        out = torch.full((ends[-1], page_size, *stored[0].shape[1:]), torch.nan).to(stored[0].dtype)
        for b, x in enumerate(stored):
            for j, row in enumerate(x):
                out[table[b, j // page_size], j % page_size] = row
        return out

    before = torch.tensor([len(k) - n for k, n in zip(keys, rows, strict=True)], dtype=torch.int32)
    v = None if values is None else pages(values)
    return PagedKVCache.from_block_table(pages(keys), v, table, before).layer(0)


def offsets_of(rows: Sequence[int]) -> Tensor:
    return torch.tensor([0, *rows]).cumsum(0, dtype=torch.int32)


def schedules_of(case: Case, schedules: tuple[Schedule, ...]) -> list[Schedule]:
    """The schedules that the case's operator can have, those that become the same once."""
    fitted = (
        replace(s, rows=1 if case.listed else s.rows, partitions=1 if case.walks > 1 else s.partitions)
        for s in schedules
    )
    return list(dict.fromkeys(fitted))
