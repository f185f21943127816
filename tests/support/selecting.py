"""What choosing operators are tested on: batches, and caches whose unused parts are poison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.random_inputs import Inputs

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
