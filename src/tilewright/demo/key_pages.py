"""A page pool of keys alone, as a serving engine owns one: pages are handed out as rows come, in random order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.cache import PagedKVCache

from .model import JUNK


class KeyPages:
    """Key rows of layers that all store at the same pace, of every request: one head, no values.

    A call of the model is `begin`, an `append` for each layer, `end`. Slots without a key hold NaN, table entries
    without a page hold junk. float8 rows have a scale each.

    offsets     int32 [requests + 1]: this call's rows, by request
    positions   [rows]: how many rows of its request stand before each
    """

    def __init__(
        self, requests: int, most: int, layers: int, width: int, *, page_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Room for `most` rows [width] of each request in each of `layers`."""
        pages = -(-most // page_size)
        shape = (requests * pages, 1, layers, page_size, 1, width)
        self._blocks = torch.full(shape, torch.nan).to(dtype)
        self._scales = torch.full((*shape[:-1], 1), torch.nan) if dtype == torch.float8_e4m3fn else None
        self._table = torch.full((requests, pages), JUNK, dtype=torch.int32)
        self._free = torch.randperm(shape[0], generator=torch.Generator().manual_seed(width)).tolist()
        self._before = self.counting(torch.zeros(requests, dtype=torch.int32))
        self.begin([0] * requests)

    @property
    def float8(self) -> bool:
        return self._scales is not None

    @property
    def before(self) -> PagedKVCache:
        """The cache with the rows stored before this call counted."""
        return self._before

    @property
    def after(self) -> PagedKVCache:
        """The cache with this call's rows counted as well."""
        return self._after

    def counting(self, lengths: Tensor) -> PagedKVCache:
        """The cache with lengths [requests] in another unit: a cache of pooled keys counts tokens."""
        return PagedKVCache(self._blocks, self._table, lengths, scales=self._scales)

    def begin(self, counts: Sequence[int]) -> None:
        """A call that brings so many rows of each request: they get their pages."""
        ends = [s + n for s, n in zip(self._before.cache_lengths.tolist(), counts, strict=True)]
        for request, end in enumerate(ends):
            for page in range(-(-end // self._before.page_size)):
                if self._table[request, page] == JUNK:
                    self._table[request, page] = self._free.pop()
        places = [p for n, end in zip(counts, ends, strict=True) for p in range(end - n, end)]
        self.positions = torch.tensor(places, dtype=torch.int64)
        self.offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._after = self._before.advance(self.offsets)

    def append(self, layer: int, rows: Tensor) -> None:
        """Store this call's rows [rows, width] of one layer; `layer` counts the layers of this pool."""
        self._before.append(layer, rows[:, None], None, self.offsets)

    def end(self) -> None:
        self._before = self._after
