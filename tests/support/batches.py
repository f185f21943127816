"""Random ragged batches in paged caches, with poison in everything that no row of the batch may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tilewright.ops.cache import PagedKVCache

from .reference import Bools, Floats, Ragged, Sees, needed

F8 = torch.float8_e4m3fn
FORMS = ("blocks", "slice", "NHD", "HND", "csr")


@dataclass(frozen=True)
class Content:
    """A batch without a place in memory: query rows, and per sequence the stored elements and their scales."""

    ragged: Ragged
    q: Tensor  # [rows, heads, dim]
    k: tuple[Tensor, ...]  # [num_keys, kv_heads, dim] per sequence, as stored
    v: tuple[Tensor, ...]
    k_scale: tuple[Tensor, ...] | None
    v_scale: tuple[Tensor, ...] | None
    granularity: int | None

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k[0].shape[1] if self.k else 1

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor(self.ragged.offsets, dtype=torch.int32)

    @property
    def q64(self) -> Floats:
        return self.q.to(torch.float64).numpy()

    @property
    def keys(self) -> list[Floats]:
        """What the stored keys mean, exactly."""
        return _meaning(self.k, self.k_scale, self.granularity)

    @property
    def values(self) -> list[Floats]:
        return _meaning(self.v, self.v_scale, self.granularity)

    def only(self, b: int) -> Content:
        """One sequence of the batch alone."""
        first, end = self.ragged.offsets[b], self.ragged.offsets[b + 1]

        def pick(fields: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
            return None if fields is None else fields[b : b + 1]

        return replace(
            self,
            ragged=Ragged((self.ragged.past[b],), (self.ragged.rows[b],)),
            q=self.q[first:end],
            k=self.k[b : b + 1],
            v=self.v[b : b + 1],
            k_scale=pick(self.k_scale),
            v_scale=pick(self.v_scale),
        )


def _meaning(stored: Sequence[Tensor], scale: Sequence[Tensor] | None, granularity: int | None) -> list[Floats]:
    wide = [x.to(torch.float64).numpy() for x in stored]
    if scale is None:
        return wide
    assert granularity is not None
    return [
        x * np.repeat(s.to(torch.float64).numpy(), granularity, 2)[..., : x.shape[2]]
        for x, s in zip(wide, scale, strict=True)
    ]


def normal(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def content(
    rng: np.random.Generator,
    past: Sequence[int],
    rows: Sequence[int],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    q_dtype: torch.dtype | None = None,
    granularity: int | None = None,
) -> Content:
    """A random batch. fp8 keys have scales: one per `granularity` elements, by default one per row."""
    ragged = Ragged(tuple(past), tuple(rows))
    lengths = [ragged.keys(b) for b in range(ragged.batch)]
    widths = dim, dim if value_dim is None else value_dim
    k, v = (tuple(normal(rng, n, kv_heads, w, dtype=dtype) for n in lengths) for w in widths)
    k_scale = v_scale = None
    if dtype == F8:
        granularity = granularity or max(widths)
        k_scale, v_scale = (_scales(rng, lengths, kv_heads, -(-w // granularity)) for w in widths)
    if q_dtype is None:
        q_dtype = torch.float32 if dtype == F8 else dtype
    q = normal(rng, sum(ragged.rows), heads, dim, dtype=q_dtype)
    return Content(ragged, q, k, v, k_scale, v_scale, granularity)


def _scales(rng: np.random.Generator, lengths: Sequence[int], *shape: int) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(rng.uniform(0.25, 2, (n, *shape))).float() for n in lengths)


# ---- places in memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pages:
    """Where each logical page went: physical page, or -1 where no row needs the page."""

    table: list[list[int]]
    count: int


def _pages(rng: np.random.Generator, lengths: list[int], need: list[Bools], page_size: int, spare: int) -> Pages:
    used = [
        [bool(n[p * page_size : (p + 1) * page_size].any()) for p in range(-(-length // page_size))]
        for length, n in zip(lengths, need, strict=True)
    ]
    total = sum(map(sum, used))
    free = iter(rng.permutation(total + spare).tolist())
    return Pages([[next(free) if u else -1 for u in row] for row in used], total + spare)


def _junk(rng: np.random.Generator, pages: Pages, dtype: torch.dtype) -> int:
    """An entry that nobody needs: negative, far outside, a page of poison, or a stale alias of a page in use."""
    taken = [p for row in pages.table for p in row if p >= 0]
    poison = sorted(set(range(pages.count)) - set(taken))
    outside = [(1 << 32) - 1] if dtype == torch.uint32 else [-1, -7, (1 << 31) - 1]
    return int(rng.choice([*outside, pages.count, *poison[:1], *taken[:2]]))


def _poisoned(shape: Sequence[int], dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
    """NaN, and infinities where the dtype has them."""
    filled = torch.full(tuple(shape), torch.nan).to(dtype)
    if dtype != F8 and filled.numel():
        flat = filled.view(-1)
        some = torch.from_numpy(rng.integers(0, flat.numel(), flat.numel() // 4))
        flat[some] = torch.inf
        flat[some[::2]] = -torch.inf
    return filled


def place(
    data: Content,
    rng: np.random.Generator,
    *,
    page_size: int = 4,
    sees: Sees | None = None,
    form: str = "blocks",
    layers: int = 1,
    layer: int = 0,
    index_dtype: torch.dtype = torch.int32,
    spare: int = 2,
) -> PagedKVCache:
    """The batch in a paged cache of the given form, on pages in random order.

    Keys that no row sees (`sees`: by default all are seen) are poison, as are other slots, pages and layers; table
    entries that no visible key needs hold anything.
    """
    ragged = data.ragged
    lengths = [ragged.keys(b) for b in range(ragged.batch)]
    if sees is None:
        need = [np.full(n, ragged.rows[b] > 0, np.bool_) for b, n in enumerate(lengths)]
    else:
        need = needed(ragged, data.heads, sees)
    if form == "csr":  # its page lists are dense: every page exists
        need = [np.full(n, True, np.bool_) for n in lengths]
    pages = _pages(rng, lengths, need, page_size, spare)
    fields = {"k": data.k, "v": data.v, "k_scale": data.k_scale, "v_scale": data.v_scale}
    stores = {
        name: _store(stored, pages, need, page_size, layers, layer, form, rng)
        for name, stored in fields.items()
        if stored is not None
    }
    past = torch.tensor(ragged.past, dtype=torch.int64).to(index_dtype)
    width = 1 + max([len(row) for row in pages.table], default=0)
    table = torch.tensor(
        [
            [p if p >= 0 else _junk(rng, pages, index_dtype) for p in row + [-1] * (width - len(row))]
            for row in pages.table
        ],
        dtype=torch.int64,
    )
    table = table.reshape(ragged.batch, width).to(index_dtype)
    if form in ("blocks", "slice"):
        return _of_blocks(stores, table, past, data.granularity, form == "slice")
    if form == "csr":
        return _of_lists(data, stores, pages, page_size)
    return PagedKVCache.from_block_table(
        stores["k"],
        stores["v"],
        table,
        past,
        layout=form,
        k_scales=stores.get("k_scale"),
        v_scales=stores.get("v_scale"),
        quantization_granularity=data.granularity,
    )


def _store(
    stored: tuple[Tensor, ...],
    pages: Pages,
    need: list[Bools],
    page_size: int,
    layers: int,
    layer: int,
    form: str,
    rng: np.random.Generator,
) -> list[Tensor]:
    """A field's pages by layer: [pages, page_size, kv_heads, width], or HND."""
    kv_heads, width = (stored[0].shape[1], stored[0].shape[2]) if stored else (1, 1)
    dtype = stored[0].dtype if stored else torch.float32
    out = [_poisoned((pages.count, page_size, kv_heads, width), dtype, rng) for _ in range(layers)]
    for b, x in enumerate(stored):
        for j in range(len(x)):
            if need[b][j]:
                out[layer][pages.table[b][j // page_size], j % page_size] = x[j]
    return [x.transpose(1, 2).contiguous() for x in out] if form == "HND" else out


def _of_blocks(
    stores: dict[str, list[Tensor]], table: Tensor, past: Tensor, granularity: int | None, sliced: bool
) -> PagedKVCache:
    """One tensor [pages, kv_dim, layers, page_size, kv_heads, width]; `sliced`: a slice of a larger buffer, in all."""

    def block(k: list[Tensor], v: list[Tensor]) -> Tensor:
        whole = torch.stack([torch.stack(k, 1), torch.stack(v, 1)], 1)
        if not sliced:
            return whole
        larger = torch.full([n + 1 if i < 5 else n + 3 for i, n in enumerate(whole.shape)], torch.nan).to(whole.dtype)
        view = larger[tuple(slice(1, n + 1) if i < 5 else slice(2, n + 2) for i, n in enumerate(whole.shape))]
        view.copy_(whole)
        return view

    scales = block(stores["k_scale"], stores["v_scale"]) if "k_scale" in stores else None
    return PagedKVCache(
        block(stores["k"], stores["v"]), table, past, scales=scales, quantization_granularity=granularity
    )


def _of_lists(data: Content, stores: dict[str, list[Tensor]], pages: Pages, page_size: int) -> PagedKVCache:
    lists = pages.table
    ends = np.cumsum([0, *map(len, lists)])
    lengths = [data.ragged.keys(b) for b in range(data.ragged.batch)]
    last = [(n - 1) % page_size + 1 if n else 0 for n in lengths]

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    return PagedKVCache.from_csr(
        stores["k"],
        stores["v"],
        ints(ends.tolist()),
        ints([p for row in lists for p in row]),
        ints(last),
        data.offsets,
        k_scales=stores.get("k_scale"),
        v_scales=stores.get("v_scale"),
        quantization_granularity=data.granularity,
    )
