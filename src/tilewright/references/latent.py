"""References of attention to latent rows, which are keys and values, from the definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.random_inputs import DenseLeaf

from .parts import attend, in_window, listed, outputs, scores_of, unseen

__all__ = [
    "heavily_compressed_attention",
    "latent_sparse_attention",
    "mixed_rows_window_and_entries",
    "mla_attention",
    "mla_mixed_rows",
    "mla_sparse_attention",
]


def mla_attention(
    q_nope: Tensor, q_rope: Tensor, cache: DenseLeaf, scale: float, latent: int, rope: int, with_lse: bool,
    pos: Tensor, key: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    c = cache.k[..., :latent]
    scores = (scores_of(q_nope, c) + scores_of(q_rope, cache.k[..., latent : latent + rope])) * scale
    return outputs(attend(unseen(scores, in_window(pos, key, None)), c), with_lse)


def mla_sparse_attention(
    q: Tensor, indices: Tensor, cache: DenseLeaf, scale: float, latent: int, with_lse: bool
) -> dict[str, Tensor]:
    scores = scores_of(q, cache.k) * scale + listed(indices, cache.k.shape[1])
    return outputs(attend(scores, cache.k[..., :latent]), with_lse)


def mla_mixed_rows(
    q_nope: Tensor, q_rope: Tensor, latents: DenseLeaf, ropes: DenseLeaf, indices: Tensor | None, scale: float,
    with_lse: bool, pos: Tensor, key: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    scores = (scores_of(q_nope, latents.k) + scores_of(q_rope, ropes.k)) * scale
    if indices is None:
        scores = unseen(scores, in_window(pos, key, None))
    else:
        scores = scores + listed(indices, latents.k.shape[1])
    return outputs(attend(scores, latents.k), with_lse)


def latent_sparse_attention(
    q: Tensor, comp_indices: Tensor | None, attn_sink: Tensor | None, swa_cache: DenseLeaf | None,
    comp_cache: DenseLeaf | None, scale: float, window: int, with_lse: bool, pos: Tensor, key: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    rows, counts = [], []
    if swa_cache is not None:
        rows.append(swa_cache.k)
        counts.append(torch.where(in_window(pos, key, window), 0.0, -torch.inf))
    if comp_cache is not None and comp_indices is not None:
        rows.append(comp_cache.k)
        counts.append(listed(comp_indices, comp_cache.k.shape[1]))
    keys = torch.cat(rows, 1)
    return outputs(attend(scores_of(q, keys) * scale + torch.cat(counts, 1), keys, attn_sink), with_lse)


def mixed_rows_window_and_entries(
    q: Tensor, q_rope: Tensor, recent: DenseLeaf, recent_rope: DenseLeaf, entries: DenseLeaf, entries_rope: DenseLeaf,
    indices: Tensor, sink: Tensor, scale: float, window: int, pos: Tensor, key: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    pairs = (recent, recent_rope), (entries, entries_rope)
    near, far = (DenseLeaf(torch.cat([a.k, b.k], -1), None) for a, b in pairs)
    both = torch.cat([q, q_rope], -1)
    out = latent_sparse_attention(both, indices, sink, near, far, scale, window, False, pos, key)["out"]
    return {"out": out[..., : q.shape[-1]], "out_rope": out[..., q.shape[-1] :]}


def heavily_compressed_attention(
    q: Tensor, recent: DenseLeaf, entries: DenseLeaf, sink: Tensor | None, scale: float, window: int, rate: int,
    with_lse: bool, pos: Tensor, key: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    closed = (torch.arange(entries.k.shape[1]) + 1) * rate <= pos[:, None] + 1
    rows, seen = torch.cat([recent.k, entries.k], 1), torch.cat([in_window(pos, key, window), closed], 1)
    return outputs(attend(unseen(scores_of(q, rows) * scale, seen), rows, sink), with_lse)
