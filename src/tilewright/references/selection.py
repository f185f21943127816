"""References of choosing blocks and keys, and of attending to what was chosen, from the definitions."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from tilewright.random_inputs import DenseLeaf

from .comparing import Candidates
from .parts import attend, by_mask, listed, scores_of, unseen

__all__ = [
    "attend_by_group",
    "attend_by_head",
    "choose_by_mean",
    "choose_by_weight",
    "choose_pages",
    "compressed_attention",
    "indexer",
    "indexer_blocks",
    "indexer_in_blocks",
    "mla_indexer",
]


# ---- blocks ----------------------------------------------------------------------------------------------------------


def before_the_last(scores: Tensor, pos: Tensor, block: int, local: int, top_k: int) -> Candidates:
    """Blocks by scores [rows, heads, blocks]; the last `local` are no candidates, nor is what comes later."""
    seen = torch.arange(scores.shape[-1]) <= pos[:, None] // block - local
    return Candidates(unseen(scores, seen[:, None]), top_k)


def choose_by_weight(
    q: Tensor, total: Tensor, blocks: DenseLeaf, scale: float, block: int, top_k: int, local: int, pos: Tensor
) -> Candidates:
    weight = (torch.einsum("rhgd,hkd->rhgk", q, blocks.k) * scale - total[..., None]).exp().sum(2)
    weight[..., :1] = inf
    return before_the_last(weight, pos, block, local, top_k)


def choose_by_mean(q: Tensor, means: DenseLeaf, block: int, top_k: int, local: int, pos: Tensor) -> Candidates:
    return before_the_last(torch.einsum("rhd,hkd->rhk", q, means.k), pos, block, local, top_k)


def choose_pages(q: Tensor, bounds: DenseLeaf, block: int, top_k: int, local: int, pos: Tensor) -> Candidates:
    assert bounds.v is not None
    bound = torch.maximum(q[:, :, None] * bounds.k, q[:, :, None] * bounds.v).sum(-1)
    return before_the_last(bound, pos, block, local, top_k)


def compressed_attention(q: Tensor, blocks: DenseLeaf, scale: float, block: int, pos: Tensor) -> dict[str, Tensor]:
    assert blocks.v is not None
    complete = (torch.arange(blocks.k.shape[1]) + 1) * block - 1 <= pos[:, None]
    return attend(unseen(scores_of(q, blocks.k) * scale, complete), blocks.v)


def attend_by_head(
    q: Tensor, chosen: Tensor, kv: DenseLeaf, scale: float, block: int, local: int, pos: Tensor, key: Tensor
) -> Tensor:
    assert kv.v is not None
    last = pos[:, None] // block - local  # of the blocks that count when they are listed
    counts = listed(chosen, -(-len(key) // block))[..., key // block]  # [rows, lists, keys]
    by_list = unseen(counts, (key // block <= last)[:, None])
    by_range = ((key <= pos[:, None]) & (key // block > last))[:, None]
    added = torch.where(by_range, 0.0, by_list).repeat_interleave(q.shape[1] // chosen.shape[1], 1)
    return attend(scores_of(q, kv.k) * scale + added.transpose(0, 1), kv.v)["out"]


def attend_by_group(
    q: Tensor, chosen: Tensor, kv: DenseLeaf, scale: float, block: int, local: int, pos: Tensor, key: Tensor
) -> Tensor:
    return attend_by_head(q, chosen, kv, scale, block, local, pos, key)


# ---- keys ------------------------------------------------------------------------------------------------------------


def indexer_scores(q: Tensor, weights: Tensor | None, k: Tensor, rectify: bool) -> Tensor:
    """[rows, keys], of k [keys, depth]."""
    products = torch.einsum("rhd,kd->rhk", q, k)
    products = products.clamp(min=0) if rectify else products
    return (products if weights is None else products * weights[..., None]).sum(1)


def complete(keys: int, tokens: int, pos: Tensor) -> Tensor:
    """[rows, keys]: keys of several tokens whose last one a row sees."""
    return (torch.arange(keys) + 1) * tokens - 1 <= pos[:, None]


def mla_indexer(q: Tensor, q_s: Tensor, k: DenseLeaf, top_k: int, mask: object, kpool: int, pos: Tensor) -> Candidates:
    assert k.scale is not None
    last_tokens = (torch.arange(k.k.shape[1]) + 1) * kpool - 1
    scores = indexer_scores(q, q_s, k.k[0], True) * k.scale[0]
    return Candidates(unseen(scores, by_mask(mask, pos, last_tokens)), top_k)


def indexer(
    q: Tensor, weights: Tensor | None, keys: DenseLeaf, top_k: int, kpool: int, rectify: bool, pos: Tensor
) -> Candidates:
    scores = indexer_scores(q, weights, keys.k[0], rectify)
    return Candidates(unseen(scores, complete(keys.k.shape[1], kpool, pos)), top_k)


def indexer_blocks(
    q: Tensor, weights: Tensor | None, keys: DenseLeaf, depth: int, top_k: int, block: int, kpool: int, rectify: bool,
    pos: Tensor,
) -> Candidates:  # fmt: skip
    each = keys.k[0][:, : block * depth].reshape(-1, depth)
    best = indexer_scores(q, weights, each, rectify).view(len(q), -1, block).amax(-1)
    return Candidates(unseen(best, complete(keys.k.shape[1], block * kpool, pos)), top_k)


def indexer_in_blocks(
    q: Tensor, weights: Tensor | None, chosen: Tensor, keys: DenseLeaf, top_k: int, block: int, kpool: int,
    rectify: bool, pos: Tensor,
) -> Candidates:  # fmt: skip
    names = (chosen[..., None] * block + torch.arange(block)).flatten(1)  # in the order of the list
    seen = (names >= 0) & (names < keys.k.shape[1]) & ((names + 1) * kpool - 1 <= pos[:, None])
    scores = indexer_scores(q, weights, keys.k[0], rectify).gather(1, names.where(seen, 0))
    return Candidates(unseen(scores, seen), top_k, names)
