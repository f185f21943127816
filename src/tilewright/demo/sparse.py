"""The reference of the published indexer by the scores of its picks, written from its definition.

The calling convention is that of tilewright.references.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.random_inputs import DenseLeaf, Inputs


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
