"""What operators that list or select entries are tested with: leaves of key rows alone, and literal references.

Leaves hold poison wherever no row of the batch may look; references are loops written from sections 4 and 5 of the
semantics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import tilewright
from tilewright.dsl.dtypes import DTYPES
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.windows import DEFAULT_BUDGET
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.ops.indexer import mla_indexer, mla_indexer_ragged_float8_paged
from tilewright.ops.latent_attention import latent_sparse_attention, latent_sparse_attention_ragged_paged
from tilewright.ops.masks import mask_named

from .batches import F8
from .reference import Bools, Floats, Ints, Ragged, attend, log_sum_exp

# ---- leaves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Key rows of one leaf, by sequence: [entries, width] as stored, and their scales [entries, granules]."""

    rows: tuple[Tensor, ...]
    scales: tuple[Tensor, ...] | None = None
    granularity: int | None = None

    @property
    def counts(self) -> list[int]:
        return [len(x) for x in self.rows]

    @property
    def meaning(self) -> list[Floats]:
        """What the rows mean, exactly."""
        wide = [x.to(torch.float64).numpy() for x in self.rows]
        if self.scales is None:
            return wide
        assert self.granularity is not None
        factors = [np.repeat(s.to(torch.float64).numpy(), self.granularity, 1) for s in self.scales]
        return [x * f[:, : x.shape[1]] for x, f in zip(wide, factors, strict=True)]

    def only(self, b: int) -> Stored:
        """One sequence alone."""
        scales = None if self.scales is None else self.scales[b : b + 1]
        return replace(self, rows=self.rows[b : b + 1], scales=scales)


def stored(
    rng: np.random.Generator, counts: Sequence[int], width: int, dtype: torch.dtype, granularity: int | None = None
) -> Stored:
    """Random rows. fp8 rows have scales: one per `granularity` elements, by default one a row."""
    rows = tuple(torch.from_numpy(rng.standard_normal((n, width))).to(dtype) for n in counts)
    if dtype != F8:
        return Stored(rows)
    granularity = granularity or width
    granules = -(-width // granularity)
    scales = tuple(torch.from_numpy(rng.uniform(0.25, 2, (n, granules))).float() for n in counts)
    return Stored(rows, scales, granularity)


@dataclass(frozen=True)
class Layout:
    """How a leaf lies in memory."""

    page_size: int = 4
    layers: int = 1
    layer: int = 0
    index_dtype: torch.dtype = torch.int32
    sliced: bool = False  # the pool is a slice of a larger buffer, in every axis
    spare: int = 2  # pages that nobody uses, one of them all poison


def place(
    data: Stored, lengths: Sequence[int], need: Sequence[Bools], rng: np.random.Generator, layout: Layout | None = None
) -> PagedKVCache:
    """The rows in a paged cache of keys alone, on pages in random order.

    need: per sequence, which rows some query sees. All other slots, pages and layers are NaN, in elements and scales,
    and table entries that no needed row uses hold anything: negative, far outside, a stale alias.
    """
    at = layout or Layout()
    width = data.rows[0].shape[1] if data.rows else 8
    dtype = data.rows[0].dtype if data.rows else torch.float32
    granules = -(-width // data.granularity) if data.granularity is not None else 1
    used = [[bool(n[p : p + at.page_size].any()) for p in range(0, len(n), at.page_size)] for n in need]
    count = sum(map(sum, used)) + at.spare
    free = iter(rng.permutation(count).tolist())
    owned = [[next(free) if u else None for u in row] for row in used]
    taken = [p for row in owned for p in row if p is not None]
    keys = torch.full((count, 1, at.layers, at.page_size, 1, width), torch.nan).to(dtype)
    scales = torch.full((count, 1, at.layers, at.page_size, 1, granules), torch.nan)
    for b, row in enumerate(owned):
        for j in np.flatnonzero(need[b]):
            page, slot = row[j // at.page_size], j % at.page_size
            keys[page, 0, at.layer, slot, 0] = data.rows[b][j]
            if data.scales is not None:
                scales[page, 0, at.layer, slot, 0] = data.scales[b][j]
    outside = [(1 << 32) - 1] if at.index_dtype == torch.uint32 else [-1, -7, (1 << 31) - 1]
    junk = [*outside, count, *taken[:2]]
    columns = 1 + max((len(row) for row in owned), default=0)
    table = rng.choice(junk, (len(owned), columns)).astype(np.int64)
    for b, row in enumerate(owned):
        for c, page in enumerate(row):
            table[b, c] = table[b, c] if page is None else page
    return PagedKVCache(
        _sliced(keys) if at.sliced else keys,
        torch.from_numpy(table).to(at.index_dtype),
        torch.tensor(list(lengths), dtype=torch.int64).to(at.index_dtype),
        scales=None if data.scales is None else _sliced(scales) if at.sliced else scales,
        quantization_granularity=data.granularity,
    )


def _sliced(whole: Tensor) -> Tensor:
    """The same values as a slice of a larger buffer of NaN."""
    larger = torch.full([n + 2 for n in whole.shape], torch.nan).to(whole.dtype)
    view = larger[tuple(slice(1, n + 1) for n in whole.shape)]
    view.copy_(whole)
    return view


# ---- latent attention ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latent:
    """A batch of latent sparse attention without a place in memory."""

    ragged: Ragged  # of the window leaf; positions count from its lengths
    q: Tensor  # [rows, heads, width]
    indices: Tensor  # [rows, slots]
    recent: Stored | None
    listed: Stored
    window: int
    scale: float
    sink: Tensor | None = None

    @property
    def offsets(self) -> Tensor:
        return torch.tensor(self.ragged.offsets, dtype=torch.int32)

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def only(self, b: int) -> Latent:
        """One sequence of the batch alone."""
        first, end = self.ragged.offsets[b], self.ragged.offsets[b + 1]
        return replace(
            self,
            ragged=Ragged((self.ragged.past[b],), (self.ragged.rows[b],)),
            q=self.q[first:end],
            indices=self.indices[first:end],
            recent=None if self.recent is None else self.recent.only(b),
            listed=self.listed.only(b),
        )

    def leaves(
        self, rng: np.random.Generator, recent: Layout | None = None, listed: Layout | None = None
    ) -> tuple[PagedLeaf | None, PagedLeaf]:
        """The window leaf and the compressed leaf, each with poison in whatever no row sees."""
        at, other = recent or Layout(), listed or Layout()
        swa = None
        if self.recent is not None:
            swa = place(self.recent, self.ragged.past, self._recently_needed(), rng, at).layer(at.layer)
        counts = self.listed.counts
        need = [np.zeros(n, np.bool_) for n in counts]
        for b, t, _ in self.rows():
            row = self.indices[t].to(torch.int64).numpy()
            need[b][row[row >= 0]] = True
        return swa, place(self.listed, counts, need, rng, other).layer(other.layer)

    def rows(self) -> list[tuple[int, int, int]]:
        """(sequence, row, position) of every row."""
        return [(at.seq, at.row, at.pos) for at in self.ragged.places(1)]

    def _recently_needed(self) -> list[Bools]:
        need = [np.zeros(self.ragged.keys(b), np.bool_) for b in range(self.ragged.batch)]
        for b, _, pos in self.rows():
            need[b][max(0, pos - self.window + 1) : pos + 1] = True
        return need


def latent(
    rng: np.random.Generator,
    past: Sequence[int],
    rows: Sequence[int],
    entries: Sequence[int],
    *,
    slots: int = 6,
    window: int = 5,
    heads: int = 2,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    q_dtype: torch.dtype | None = None,
    granularity: int | None = None,
    index_dtype: torch.dtype = torch.int32,
    sink: Sequence[float] | None = None,
    unused: float = 0.3,
) -> Latent:
    """A random batch; indices repeat, and about `unused` of them are negative, wherever they stand."""
    ragged = Ragged(tuple(past), tuple(rows))
    total = sum(ragged.rows)
    limit = np.repeat(np.asarray(entries, np.int64), ragged.rows)[:, None]
    indices = rng.integers(0, np.maximum(limit, 1), (total, slots))
    junk = rng.choice([-1, -1, -2, -(1 << 31)], indices.shape)
    indices = np.where((rng.random(indices.shape) < unused) | (limit == 0), junk, indices)
    if q_dtype is None:
        q_dtype = torch.float32 if dtype == F8 else dtype
    q = torch.from_numpy(rng.standard_normal((total, heads, width))).to(q_dtype)
    keys = [ragged.keys(b) for b in range(ragged.batch)]
    return Latent(
        ragged,
        q,
        torch.from_numpy(indices).to(index_dtype),
        stored(rng, keys, width, dtype, granularity) if window else None,
        stored(rng, entries, width, dtype, granularity),
        window,
        float(width) ** -0.5,
        None if sink is None else torch.tensor(sink),
    )


def latent_reference(data: Latent) -> tuple[Floats, Floats]:
    """(out [rows, heads, width], lse [rows, heads]) in float64."""
    q, listed = data.q.to(torch.float64).numpy(), data.listed.meaning
    recent = None if data.recent is None else data.recent.meaning
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b, t, pos in data.rows():
        keys = [listed[b][int(e)] for e in data.indices[t].to(torch.int64) if e >= 0]
        if recent is not None:
            keys = [*recent[b][max(0, pos - data.window + 1) : pos + 1], *keys]
        key = np.array(keys).reshape(len(keys), q.shape[2])
        for h in range(data.heads):
            s = data.scale * (key @ q[t, h])
            out[t, h] = attend(s, key, None if data.sink is None else float(data.sink[h]))
            lse[t, h] = log_sum_exp(s)
    return out, lse


def run_latent(
    data: Latent,
    leaves: tuple[PagedLeaf | None, PagedLeaf],
    schedule: Schedule | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator under a schedule."""
    found = tilewright.run(
        latent_sparse_attention,
        {
            "q": data.q,
            "comp_indices": data.indices,
            "attn_sink": data.sink,
            "swa_cache": leaves[0],
            "comp_cache": leaves[1],
            "scale": data.scale,
        },
        data.offsets,
        constants={"window": data.window, "with_lse": True},
        output_dtypes={"out": DTYPES[str(dtype or data.q.dtype).removeprefix("torch.")]},
        schedule=schedule,
    )
    return found["out"], found["lse"]


def public_latent(data: Latent, leaves: tuple[PagedLeaf | None, PagedLeaf], **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the published operator; `options` replace or add arguments."""
    given: dict[str, Any] = {
        "q": data.q,
        "input_row_offsets": data.offsets,
        "comp_indices": data.indices,
        "attn_sink": data.sink,
        "swa_cache": leaves[0],
        "comp_cache": leaves[1],
        "scale": data.scale,
        "window": data.window,
        "return_lse": True,
    }
    found = latent_sparse_attention_ragged_paged(**{**given, **options})
    assert isinstance(found, tuple)
    return found


# ---- the indexer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """A batch of the indexer without a place in memory. One key per pool of `pool` tokens."""

    ragged: Ragged
    q: Tensor  # [rows, heads, depth], fp8
    q_s: Tensor  # [rows, heads]
    keys: Stored  # fp8, one scale a row
    mask: str = "causal"
    pool: int = 1

    @property
    def offsets(self) -> Tensor:
        return torch.tensor(self.ragged.offsets, dtype=torch.int32)

    def candidates(self, b: int, pos: int) -> int:
        """How many keys (or pools) a row may return."""
        return (pos + 1 if self.mask == "causal" else self.ragged.keys(b)) // self.pool

    def cache(self, rng: np.random.Generator, layout: Layout | None = None) -> PagedKVCache:
        """The keys in a paged cache, NaN in what no row sees: pools that are not whole among it."""
        need = [np.zeros(n, np.bool_) for n in self.keys.counts]
        for at in self.ragged.places(1):
            need[at.seq][: self.candidates(at.seq, at.pos)] = True
        return place(self.keys, self.ragged.past, need, rng, layout)

    def only(self, b: int) -> Scored:
        """One sequence of the batch alone."""
        first, end = self.ragged.offsets[b], self.ragged.offsets[b + 1]
        ragged = Ragged((self.ragged.past[b],), (self.ragged.rows[b],))
        return replace(self, ragged=ragged, q=self.q[first:end], q_s=self.q_s[first:end], keys=self.keys.only(b))


def scored(
    rng: np.random.Generator,
    past: Sequence[int],
    rows: Sequence[int],
    *,
    heads: int = 2,
    depth: int = 8,
    mask: str = "causal",
    pool: int = 1,
    largest: int = 2,
) -> Scored:
    """A random batch whose scores float32 holds exactly, in any order of summation, with many ties among them.

    Elements are whole numbers up to `largest`, q_s are quarters of either sign, scales are powers of two.
    """
    ragged = Ragged(tuple(past), tuple(rows))
    total, counts = sum(ragged.rows), [-(-ragged.keys(b) // pool) for b in range(ragged.batch)]
    q = torch.from_numpy(rng.integers(-largest, largest + 1, (total, heads, depth))).float().to(F8)
    q_s = torch.from_numpy(rng.integers(-6, 7, (total, heads)) / 4).float()
    keys = tuple(torch.from_numpy(rng.integers(-largest, largest + 1, (n, depth))).float().to(F8) for n in counts)
    scales = tuple(torch.from_numpy(2.0 ** rng.integers(-2, 3, (n, 1))).float() for n in counts)
    return Scored(ragged, q, q_s, Stored(keys, scales, depth), mask, pool)


def scores_of(data: Scored) -> list[Floats]:
    """The scores of every row over the keys it may return, in float64, in row order."""
    q, q_s = data.q.to(torch.float64).numpy(), data.q_s.to(torch.float64).numpy()
    out = []
    for at in data.ragged.places(1):
        n = data.candidates(at.seq, at.pos)
        key = data.keys.rows[at.seq][:n].to(torch.float64).numpy()
        assert data.keys.scales is not None
        scale = data.keys.scales[at.seq][:n, 0].to(torch.float64).numpy()
        with np.errstate(invalid="ignore"):
            total = np.zeros(n)
            for h in range(q.shape[1]):
                total += np.maximum(key @ q[at.row, h], 0) * q_s[at.row, h]
            out.append(total * scale)
    return out


def best(scores: Floats, k: int) -> list[int]:
    """Indices by descending score, equal scores by ascending index, NaN last, then -1."""
    order = sorted(range(len(scores)), key=lambda j: (1, 0.0, j) if math.isnan(scores[j]) else (0, -scores[j], j))
    return [*order[:k], *[-1] * (k - len(order))]


def indexer_reference(data: Scored, k: int) -> Ints:
    """int [rows, k]."""
    return np.array([best(s, k) for s in scores_of(data)], np.int64).reshape(len(data.q), k)


def run_indexer(
    data: Scored,
    cache: PagedKVCache,
    k: int,
    schedule: Schedule | None = None,
    *,
    layer: int = 0,
    budget: int = DEFAULT_BUDGET,
) -> Tensor:
    """The operator under a schedule."""
    found = tilewright.run(
        mla_indexer,
        {"q": data.q, "q_s": data.q_s, "k": cache.layer(layer)},
        data.offsets,
        constants={"top_k": k, "mask": mask_named("test", data.mask, None), "kpool": data.pool},
        schedule=schedule,
        budget_bytes=budget,
    )
    return found["out"]


def public_indexer(data: Scored, cache: PagedKVCache, k: int, **options: Any) -> Tensor:
    """The published operator; `options` replace or add arguments."""
    given: dict[str, Any] = {
        "q": data.q,
        "q_s": data.q_s,
        "input_row_offsets": data.offsets,
        "k_collection": cache,
        "layer_idx": 0,
        "top_k": k,
        "mask_str": data.mask,
        "kpool": data.pool,
    }
    return mla_indexer_ragged_float8_paged(**{**given, **options})


def assert_indices(actual: Tensor, expected: npt.ArrayLike) -> None:
    """int32, and equal one by one."""
    assert actual.dtype == torch.int32
    np.testing.assert_array_equal(actual.numpy(), np.asarray(expected))
