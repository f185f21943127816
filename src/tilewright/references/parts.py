"""What the references are made of: scores, masks and softmax, dense, in float64, one sequence at a time."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """[heads, rows, keys], of q [rows, heads, width] and k [heads, keys, width]."""
    return torch.einsum("rhd,hkd->hrk", q, k)


def attend(scores: Tensor, values: Tensor, sink: Tensor | None = None) -> dict[str, Tensor]:
    """Attention by scores [heads, rows, keys], -inf where unseen: out [rows, heads, width], lse without the sink.

    A row that sees no key gives 0, and an lse of -inf.
    """
    # The sink takes part as one more key, whose value row is 0.
    logits = torch.full_like(scores[..., :1], -inf) if sink is None else sink[:, None, None].expand_as(scores[..., :1])
    weights = torch.cat([scores, logits], -1).softmax(-1).nan_to_num(0.0)[..., :-1]
    return {"out": torch.einsum("hrk,hkd->rhd", weights, values), "lse": scores.logsumexp(-1).T}


def outputs(found: dict[str, Tensor], with_lse: bool) -> dict[str, Tensor]:
    return found if with_lse else {"out": found["out"]}


def unseen(scores: Tensor, seen: Tensor) -> Tensor:
    """The scores, -inf where a row does not see the key."""
    return scores.masked_fill(~seen, -inf)


def distances(pos: Tensor, key: Tensor) -> Tensor:
    """[rows, keys]: how far back each key is."""
    return pos[:, None] - key[None, :]


def in_window(pos: Tensor, key: Tensor, window: int | None) -> Tensor:
    """[rows, keys]: up to the row, the last `window` or all."""
    d = distances(pos, key)
    return (d >= 0) & (d < (len(key) if window is None else window))


def by_mask(mask: object, pos: Tensor, key: Tensor) -> Tensor:
    """[rows, keys]: what a mask, a function of positions or None, lets each row see."""
    seen = mask(pos[:, None], key[None, :]) if callable(mask) else True
    return torch.as_tensor(seen).expand(len(pos), len(key))


def listed(indices: Tensor, keys: int) -> Tensor:
    """How often each row lists each key [.., keys], as a logarithm: what repeats add to a score."""
    slots = torch.where((indices >= 0) & (indices < keys), indices, keys)  # unused ones count for one past the end
    counts = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.float64)
    return counts.scatter_add_(-1, slots, torch.ones_like(slots, dtype=torch.float64))[..., :keys].log()


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]` along the first axis, 0 past its end: [*index, ..]."""
    inside = (index >= 0) & (index < len(table))
    found = table[index.where(inside, 0)] if len(table) else torch.zeros(*index.shape, *table.shape[1:])
    return found.where(inside.view(*inside.shape, *[1] * (table.ndim - 1)), 0)
