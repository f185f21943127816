"""References of what makes one entry of a window of tokens, from the definitions. Rows and `pos` count entries."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from tilewright.random_inputs import DenseLeaf

from .parts import looked_up

__all__ = ["compress_overlapping", "compress_windows", "page_bounds", "pool_means"]


def window_of(leaf: DenseLeaf, rate: int) -> Tensor:
    """[tokens]: the window that each token is in."""
    return torch.arange(leaf.k.shape[1]) // rate


def gated(gates: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """[entries, dim]: sum of rows [tokens, dim] by the softmax of the gates seen [entries, tokens], by feature."""
    return (gates.masked_fill(~seen[..., None], -inf).softmax(1).nan_to_num(0.0) * rows).sum(1)


def compress_windows(bias: Tensor, tokens: DenseLeaf, rate: int, pos: Tensor) -> Tensor:
    assert tokens.v is not None
    window = window_of(tokens, rate)
    gates = tokens.k[0] + looked_up(bias, torch.arange(len(window)) % rate)
    return gated(gates, tokens.v[0], window == pos[:, None])


def compress_overlapping(bias: Tensor, tokens: DenseLeaf, rate: int, dim: int, pos: Tensor) -> Tensor:
    assert tokens.v is not None
    window = window_of(tokens, rate)
    halves = slice(dim), slice(dim, 2 * dim)  # for the entry of the next window, for the entry of their own
    by_place = (looked_up(looked_up(bias, torch.tensor(n)), torch.arange(len(window)) % rate) for n in (0, 1))
    gates = torch.cat([tokens.k[0][:, h] + b for h, b in zip(halves, by_place, strict=True)])
    rows = torch.cat([tokens.v[0][:, h] for h in halves])
    seen = torch.cat([window == pos[:, None] - 1, window == pos[:, None]], 1)
    return gated(gates, rows, seen)


def pool_means(each: Tensor, tokens: DenseLeaf, rate: int, pos: Tensor) -> Tensor:
    own = (window_of(tokens, rate) == pos[:, None]).to(each.dtype)
    return each[..., None] * torch.einsum("rk,hkd->rhd", own, tokens.k)


def page_bounds(one: Tensor, kv: DenseLeaf, block: int, pos: Tensor) -> dict[str, Tensor]:
    other = (window_of(kv, block) != pos[:, None])[:, None, :, None]
    keys = kv.k * one[..., None, None]  # [pages, heads, tokens, dim]
    return {"greatest": keys.masked_fill(other, -inf).amax(2), "least": keys.masked_fill(other, inf).amin(2)}
