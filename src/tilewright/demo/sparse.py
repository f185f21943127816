"""References of the two published sparse operators, written from their definitions.

The calling convention is that of tilewright.references.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.random_inputs import DenseLeaf, Inputs


def latent_attention(
    q: Tensor, comp_indices: Tensor, attn_sink: Tensor, swa_cache: DenseLeaf, comp_cache: DenseLeaf, scale: float,
    window: int, pos: Tensor, key: Tensor,
) -> Tensor:  # fmt: skip
    """Keys that are values too: those of the window, those listed, and the sink as one more whose value is 0."""
    recent, listed = swa_cache.k[0], comp_cache.k[0][comp_indices.clamp(min=0)]  # [keys, dim], [rows, slots, dim]
    seen = (key <= pos[:, None]) & (pos[:, None] - key < window)
    scores = [
        torch.einsum("rhd,kd->rhk", q, recent).mul(scale).masked_fill(~seen[:, None], -torch.inf),
        torch.einsum("rhd,rsd->rhs", q, listed).mul(scale).masked_fill(comp_indices[:, None] < 0, -torch.inf),
        attn_sink[None, :, None].expand(len(q), -1, 1),
    ]
    p = torch.softmax(torch.cat(scores, -1), -1)
    n = len(recent)
    return torch.einsum("rhk,kd->rhd", p[..., :n], recent) + torch.einsum("rhs,rsd->rhd", p[..., n:-1], listed)


def indexer_scores(q: Tensor, q_s: Tensor, k: DenseLeaf, pos: Tensor, key: Tensor) -> Tensor:
    """[rows, keys]: of every key, -inf for one that a row does not see."""
    assert k.scale is not None
    products = torch.einsum("rhd,kd->rhk", q, k.k[0]).relu()
    scores = torch.einsum("rh,rhk->rk", q_s, products) * k.scale[0]
    return scores.masked_fill(key > pos[:, None], -torch.inf)


def best_scores(q: Tensor, q_s: Tensor, k: DenseLeaf, top_k: int, pos: Tensor, key: Tensor) -> Tensor:
    """[rows, top_k]: the largest, descending, then -inf."""
    scores = indexer_scores(q, q_s, k, pos, key)
    return pad(scores, (0, top_k), value=-torch.inf).sort(-1, descending=True).values[:, :top_k]


def scores_of_picked(inputs: Inputs, picked: Tensor) -> Tensor:
    """[rows, top_k]: scores of the keys that an indexer picked for each row; -inf for none and for one picked twice.

    Picks are compared by these: where two scores are as good as equal, either order is right.
    """
    out: list[Tensor] = []
    for seq, rows in enumerate(torch.split(picked.long(), list(inputs.sizes.rows))):
        dense = inputs.dense(seq)
        scores = indexer_scores(**{n: dense[n] for n in ("q", "q_s", "k", "pos", "key")})  # type: ignore[arg-type]
        inside = (rows >= 0) & (rows < scores.shape[1])
        at = rows.where(inside, 0)
        times = torch.zeros_like(scores).scatter_add_(1, at, inside.to(scores.dtype))
        out.append(scores.gather(1, at).where(inside & (times.gather(1, at) == 1), -torch.inf))
    return torch.cat(out)
