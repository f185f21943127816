"""What choosing operators are compared with: literal float64 references, batches, caches whose unused parts are poison.

A function `NAME` here is the reference of the operator `NAME`, called as `tilewright.references` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.random_inputs import Inputs

from .selection import best

JUNK = (-1, 2**31 - 1, -7)

# ---- caches and batches ----------------------------------------------------------------------------------------------


def leaf(
    rng: np.random.Generator,
    keys: Sequence[Tensor],
    values: Sequence[Tensor] | None,
    lengths: Sequence[int],
    page_size: int,
    need: Sequence[Tensor] | None = None,
) -> PagedLeaf:
    """One layer of a cache that holds [count, kv_heads, width] for each sequence, on pages in random order.

    lengths: what the cache says, in its own unit. need: which rows some query sees. All other slots are NaN, and table
    entries that no needed row uses are junk.
    """
    need = [torch.ones(len(k), dtype=torch.bool) for k in keys] if need is None else need
    used = [[bool(n[p : p + page_size].any()) for p in range(0, len(n), page_size)] for n in need]
    free = iter(rng.permutation(sum(map(sum, used)) + 2).tolist())
    width = 2 + max(map(len, used), default=0)
    table = torch.from_numpy(rng.choice(JUNK, (len(keys), width))).to(torch.int32)
    for b, row in enumerate(used):
        for p, owned in enumerate(row):
            table[b, p] = next(free) if owned else table[b, p]

    def pages(stored: Sequence[Tensor]) -> Tensor:
        out = torch.full((sum(map(sum, used)) + 2, page_size, *stored[0].shape[1:]), torch.nan).to(stored[0].dtype)
        for b, x in enumerate(stored):
            for j in need[b].nonzero().flatten().tolist():
                out[table[b, j // page_size], j % page_size] = x[j]
        return out

    counts = torch.tensor(list(lengths), dtype=torch.int32)
    return PagedKVCache.from_block_table(pages(keys), values and pages(values), table, counts).layer(0)


@dataclass(frozen=True)
class Batch:
    """Queries, and the keys and values of all tokens, by sequence [tokens, kv_heads, width]."""

    past: tuple[int, ...]
    rows: tuple[int, ...]
    q: Tensor  # [rows, heads, width]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *self.rows]).cumsum(0, dtype=torch.int32)

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, row, position) of every row."""
        row = 0
        for b, count in enumerate(self.rows):
            for i in range(count):
                yield b, row, self.past[b] + i
                row += 1

    def tokens(self, rng: np.random.Generator, page_size: int, need: Sequence[Tensor] | None = None) -> PagedLeaf:
        return leaf(rng, self.keys, self.values, self.past, page_size, need)

    def of_blocks(self, block: int) -> list[list[Tensor]]:
        """The keys of every whole block, by sequence."""
        return [[k[n : n + block] for n in range(0, len(k) // block * block, block)] for k in self.keys]

    def attend(self, lists: Tensor, block: int, local: int, scale: float) -> Tensor:
        """Attention of every head to its listed blocks and the last `local`. lists [rows, lists, slots]"""
        out = torch.zeros(*self.q.shape[:2], self.values[0].shape[2], dtype=torch.float64)
        for b, r, pos in self.places():
            for h in range(self.q.shape[1]):
                chosen = lists[r, h * lists.shape[1] // self.q.shape[1]].tolist()
                seen = self.seen(chosen, pos, block, local)
                group = self.q.shape[1] // self.keys[b].shape[1]
                k, v = (x[b][seen, h // group].double() for x in (self.keys, self.values))
                out[r, h] = (k @ self.q[r, h].double() * scale).softmax(0) @ v
        return out

    @staticmethod
    def seen(chosen: Sequence[int], pos: int, block: int, local: int) -> list[int]:
        first = max(0, (pos // block - local + 1) * block)
        return [*range(first, pos + 1), *(c * block + i for c in chosen if c >= 0 for i in range(block))]

    def need(self, lists: Tensor, block: int, local: int) -> list[Tensor]:
        """Which tokens some row sees through its lists and its last blocks."""
        out = [torch.zeros(len(k), dtype=torch.bool) for k in self.keys]
        for b, r, pos in self.places():
            for chosen in lists[r].tolist():
                out[b][self.seen(chosen, pos, block, local)] = True
        return out


def batch(
    rng: np.random.Generator, past: Sequence[int], rows: Sequence[int], *, heads: int = 4, kv_heads: int = 2,
    width: int = 8, exact: bool = False,
) -> Batch:  # fmt: skip
    """A random batch; `exact`: of small whole numbers, so that products tie and float32 holds them all."""

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.integers(-2, 3, shape) if exact else rng.standard_normal(shape)).float()

    counts = [p + n for p, n in zip(past, rows, strict=True)]
    keys, values = (tuple(draw(n, kv_heads, width) for n in counts) for _ in range(2))
    return Batch(tuple(past), tuple(rows), draw(sum(rows), heads, width), keys, values)


def made_exact(inputs: Inputs) -> Inputs:
    """The inputs with every float replaced by a small whole number, in place: scores tie, and float32 holds them."""
    for value in inputs.arguments.values():
        found = (
            [value] if isinstance(value, Tensor) else [value.keys, value.values] if isinstance(value, PagedLeaf) else []
        )
        for t in found:
            if t is not None and t.dtype.is_floating_point:
                t.mul_(1.5).round_()
    return inputs


# ---- references ------------------------------------------------------------------------------------------------------


def listed(scores: Tensor, counts: Sequence[int], k: int) -> Tensor:
    """The k best of the first `counts[row]` of scores [rows, .., candidates]."""
    rows = [[best(s[:n].numpy(), k) for s in scores[r].reshape(-1, scores.shape[-1])] for r, n in enumerate(counts)]
    return torch.tensor(rows).reshape(*scores.shape[:-1], k)


def before_the_last(pos: Tensor, block: int, local: int) -> list[int]:
    """How many blocks a row may choose from."""
    return (pos // block - local + 1).clamp(min=0).tolist()


def compressed_attention(q, blocks, scale, block, pos):  # type: ignore[no-untyped-def]
    seen = (torch.arange(blocks.k.shape[1]) + 1) * block - 1 <= pos[:, None]
    scores = (torch.einsum("rhd,hkd->hrk", q, blocks.k) * scale).masked_fill(~seen, -inf)
    out = torch.einsum("hrk,hkd->rhd", scores.softmax(-1).nan_to_num(0.0), blocks.v)
    return {"out": out, "lse": scores.logsumexp(-1).T}


def choose_by_weight(q, total, blocks, scale, block, top_k, local, pos):  # type: ignore[no-untyped-def]
    weight = (torch.einsum("rhgd,hkd->rhgk", q, blocks.k) * scale - total[..., None]).exp().sum(2)
    weight[..., :1] = inf
    return listed(weight, before_the_last(pos, block, local), top_k)


def choose_by_mean(q, means, block, top_k, local, pos):  # type: ignore[no-untyped-def]
    return listed(torch.einsum("rhd,hkd->rhk", q, means.k), before_the_last(pos, block, local), top_k)


def choose_pages(q, bounds, block, top_k, local, pos):  # type: ignore[no-untyped-def]
    q, most, least = q[:, :, None], bounds.k[None], bounds.v[None]
    return listed(torch.maximum(q * most, q * least).sum(-1), before_the_last(pos, block, local), top_k)


def attend_by_head(q, chosen, kv, scale, block, local, pos):  # type: ignore[no-untyped-def]
    out = torch.zeros(*q.shape[:2], kv.v.shape[-1], dtype=torch.float64)
    for r, p in enumerate(pos.tolist()):
        for h in range(q.shape[1]):
            held = chosen[r, h * chosen.shape[1] // q.shape[1]].tolist()
            seen = Batch.seen([c for c in held if c <= p // block - local], p, block, local)
            out[r, h] = (kv.k[h, seen] @ q[r, h] * scale).softmax(0) @ kv.v[h, seen]
    return out


attend_by_group = attend_by_head


def indexer_scores(q: Tensor, weights: Tensor | None, k: Tensor, rectify: bool) -> Tensor:
    """[rows, keys], of k [keys, depth]."""
    products = torch.einsum("rhd,kd->rhk", q, k)
    products = products.clamp(min=0) if rectify else products
    return (products if weights is None else products * weights[..., None]).sum(1)


def indexer(q, weights, keys, top_k, kpool, rectify, pos):  # type: ignore[no-untyped-def]
    return listed(indexer_scores(q, weights, keys.k[0], rectify), ((pos + 1) // kpool).tolist(), top_k)


def indexer_in_blocks(q, weights, chosen, keys, top_k, block, kpool, rectify, pos):  # type: ignore[no-untyped-def]
    scores = indexer_scores(q, weights, keys.k[0], rectify)
    rows = []
    for r, p in enumerate(pos.tolist()):
        held = [c * block + i for c in chosen[r].tolist() if c >= 0 for i in range(block)]
        held = [j for j in held if (j + 1) * kpool - 1 <= p]
        rows.append([held[n] if n >= 0 else -1 for n in best(scores[r, held].numpy(), top_k)])
    return torch.tensor(rows).reshape(len(pos), top_k)
