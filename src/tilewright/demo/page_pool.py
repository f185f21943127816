"""A page pool as a serving engine owns one: pages are handed out as rows come, in random order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.cache import PagedKVCache

JUNK = 2**31 - 1  # in table entries without a page


class PagePool:
    """Keys, and values of the same width or none, of layers that all store at the same pace, of every request.

    A call of the model is `begin`, an `append` for each layer, `end`. Slots without a key hold NaN, table entries
    without a page hold junk. float8 rows have a scale each.

    offsets     int32 [requests + 1]: this call's rows, by request
    positions   int64 [rows]: how many rows of its request stand before each
    before      the cache with the rows stored before this call counted
    after       the cache with this call's rows counted as well
    """

    def __init__(
        self, requests: int, most: int, layers: int, width: int, *, page_size: int, heads: int = 1,
        values: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """Room for `most` rows [heads, width] of each request in each of `layers`."""
        pages = -(-most // page_size)
        shape = (requests * pages, 2 if values else 1, layers, page_size, heads, width)
        scales = torch.full((*shape[:-1], 1), torch.nan) if dtype == torch.float8_e4m3fn else None
        self._table = torch.full((requests, pages), JUNK, dtype=torch.int32)
        self._free = torch.randperm(shape[0], generator=torch.Generator().manual_seed(width)).tolist()
        lengths = torch.zeros(requests, dtype=torch.int32)
        self.before = PagedKVCache(torch.full(shape, torch.nan).to(dtype), self._table, lengths, scales=scales)
        self.begin([0] * requests)

    def begin(self, counts: Sequence[int]) -> None:
        """A call that brings so many rows of each request: they get their pages."""
        ends = [s + n for s, n in zip(self.before.cache_lengths.tolist(), counts, strict=True)]
        for request, end in enumerate(ends):
            for page in range(-(-end // self.before.page_size)):
                if self._table[request, page] == JUNK:
                    self._table[request, page] = self._free.pop()
        places = [p for n, end in zip(counts, ends, strict=True) for p in range(end - n, end)]
        self.positions = torch.tensor(places, dtype=torch.int64)
        self.offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.after = self.before.advance(self.offsets)

    def append(self, layer: int, keys: Tensor, values: Tensor | None = None) -> None:
        """Store this call's rows [rows, heads, width] of one layer; `layer` counts the layers of this pool."""
        self.before.append(layer, keys, values, self.offsets)

    def end(self) -> None:
        self.before = self.after
