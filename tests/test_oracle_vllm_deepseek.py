"""Our DeepSeek-V4 operators against vLLM's compiled CPU ones. docs/oracles.md says how to get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import pytest
import torch
from support.batches import F8
from support.peer_calls import Bits, Call
from support.peers import VLLM, answer, assert_best, call, difference
from support.reference import Ragged
from support.selection import Layout, Scored, Stored, public_indexer
from torch import Tensor

import tilewright
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.ops.compressor import closed_windows, compress
from tilewright.ops.latent_attention import latent_sparse_attention_ragged_paged
from tilewright.ops.mixed_rows import deepseek_v4_leaves, mixed_rows_window_and_entries

pytestmark = [pytest.mark.both_targets, pytest.mark.slow, VLLM.needed]

LATENT, ROPE, BYTES = 448, 64, 584  # of a cached row: float8 elements, bfloat16 ones, all bytes with its exponents


def generator(name: str) -> np.random.Generator:
    return np.random.default_rng(crc32(name.encode()))


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).float()


def table_of(rng: np.random.Generator, counts: Sequence[int], page_size: int) -> tuple[Tensor, int]:
    """Pages in random order, two to spare; and how many there are. What no sequence needs is 2^31-1."""
    pages = [-(-n // page_size) for n in counts]
    free = rng.permutation(sum(pages) + 2)
    table = np.full((len(counts), max(pages) + 1), 2**31 - 1)
    for b, n in enumerate(pages):
        table[b, :n] = free[sum(pages[:b]) : sum(pages[: b + 1])]
    return torch.from_numpy(table).int(), len(free)


def slots_of(table: Tensor, b: int, at: Tensor, page_size: int) -> Tensor:
    """Physical slots of positions of a sequence; -1 for negative ones."""
    found = table[b].long()[at.clamp(min=0) // page_size] * page_size + at.clamp(min=0) % page_size
    return torch.where(at < 0, -1, found)


# ---- latent attention ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latent:
    """A batch of it, over caches of two page sizes."""

    past: tuple[int, ...] = (3, 70, 0, 150)
    rows: tuple[int, ...] = (5, 1, 14, 2)
    entries: tuple[int, ...] = (2, 17, 3, 38)
    heads: int = 16
    window: int = 8
    listed: int = 6
    sizes: tuple[int, int] = (64, 16)


LATENTS = {
    "short": Latent(),
    "window-128": Latent(window=128, listed=40, heads=8),
    "heads-64": Latent(heads=64, sizes=(16, 4), rows=(2, 1, 3, 1)),
    "no-entries": Latent(listed=0, sizes=(256, 64)),
    "odd-pages": Latent(sizes=(5, 3), heads=3, window=1),
}


@dataclass(frozen=True)
class Pool:
    """Bytes of a DeepSeek-V4 cache, and where its rows are."""

    data: Tensor
    page_size: int
    table: Tensor

    def leaves(self, lengths: Sequence[int]) -> tuple[PagedLeaf, PagedLeaf]:
        return deepseek_v4_leaves(self.data, self.page_size, self.table, torch.tensor(lengths, dtype=torch.int32))

    def plain(self, lengths: Sequence[int]) -> PagedLeaf:
        """The same rows in float32."""
        near, tails = self.leaves(lengths)
        assert near.key_scales is not None
        rows = torch.cat([near.keys.float() * near.key_scales.repeat_interleave(64, -1), tails.keys.float()], -1)
        return PagedKVCache.from_block_table(rows, None, self.table, near.cache_lengths).layer(0)


def pool(rng: np.random.Generator, counts: Sequence[int], page_size: int) -> Pool:
    """Random rows, and NaN wherever there is none."""
    table, pages = table_of(rng, counts, page_size)
    data = torch.full((pages, BYTES * page_size), 255, dtype=torch.uint8)
    rows, exponents = data[:, : 576 * page_size].view(pages, page_size, 576), data[:, 576 * page_size :]
    for b, n in enumerate(counts):
        slots = slots_of(table, b, torch.arange(n), page_size)
        power = torch.from_numpy(rng.integers(120, 128, (n, 7)))
        made = (normal(rng, n, 7, 64) * 0.5 / 2.0 ** (power - 127)[..., None]).to(F8).view(n, LATENT).view(torch.uint8)
        tail = normal(rng, n, ROPE).bfloat16().view(torch.uint8)
        rows[slots // page_size, slots % page_size] = torch.cat([made, tail], 1)
        exponents.view(pages, page_size, 8)[slots // page_size, slots % page_size, :7] = power.to(torch.uint8)
    return Pool(data, page_size, table)


class Sparse:
    """A batch of `Latent`: queries, caches, lists with holes and repeats."""

    def __init__(self, name: str) -> None:
        self.case, rng = LATENTS[name], generator(name)
        case = self.case
        self.ragged = Ragged(case.past, case.rows)
        counts = [self.ragged.keys(b) for b in range(self.ragged.batch)]
        self.recent, self.entries = (
            pool(rng, n, size) for n, size in zip((counts, case.entries), case.sizes, strict=True)
        )
        self.q = normal(rng, sum(case.rows), case.heads, 512).bfloat16()
        limit = np.repeat(case.entries, case.rows)[:, None]
        indices = rng.integers(0, limit, (len(self.q), case.listed))
        self.indices = torch.from_numpy(np.where(rng.random(indices.shape) < 0.3, -1, indices)).int()
        self.sinks = torch.from_numpy(rng.normal(1, 2, case.heads)).float()
        self.sinks[0] = -torch.inf
        self.offsets = torch.tensor(self.ragged.offsets, dtype=torch.int32)

    def call(self) -> Call:
        case, near, far = self.case, self.recent, self.entries
        window = []
        entries = []
        for at in self.ragged.places(1):
            seen = at.pos - torch.arange(case.window)  # negative before the sequence begins
            window.append(slots_of(near.table, at.seq, seen, near.page_size))
            entries.append(slots_of(far.table, at.seq, self.indices[at.row].long(), far.page_size))
        tensors = {
            "q": self.q,
            "recent": near.data,
            "recent_slots": torch.stack(window),
            "entries": far.data,
            "entry_slots": torch.stack(entries),
            "sinks": self.sinks,
        }
        return call("latent", tensors, sizes=f"{near.page_size} {far.page_size}", scale=512**-0.5)

    def of_bytes(self) -> Tensor:
        """The gallery's operator, on the same bytes."""
        recent, recent_rope = self.recent.leaves(self.case.past)
        entries, entries_rope = self.entries.leaves(self.case.entries)
        found = tilewright.run(
            mixed_rows_window_and_entries,
            {
                "q": self.q[..., :LATENT], "q_rope": self.q[..., LATENT:], "recent": recent, "recent_rope": recent_rope,
                "entries": entries, "entries_rope": entries_rope, "indices": self.indices, "sink": self.sinks,
                "scale": 512**-0.5,
            },
            self.offsets,
            constants={"window": self.case.window},
        )  # fmt: skip
        return torch.cat([found["out"], found["out_rope"]], -1)

    def of_rows(self, window: int = 0) -> Tensor:
        """The published operator, on the same rows in float32."""
        case = self.case
        recent, entries = self.recent.plain(case.past), self.entries.plain(case.entries)
        found = latent_sparse_attention_ragged_paged(
            self.q.float(), self.offsets, self.indices, self.sinks, recent, entries, 512**-0.5,
            window=window or case.window,
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found


# ---- indexer ---------------------------------------------------------------------------------------------------------

# Heads, page size, tokens before and rows of each sequence, mask, tokens of a pool.
SCORES: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...], str, int]] = {
    "heads-64": (64, 64, (3, 70, 0, 190), (5, 1, 16, 9), "causal", 1),
    "heads-7": (7, 48, (3, 70, 0, 190), (5, 1, 16, 9), "causal", 1),
    "null": (16, 32, (3, 70, 0), (5, 1, 16), "null", 1),
    "pools-of-4": (16, 64, (3, 470, 1, 2), (5, 1, 16, 9), "causal", 4),
    "past-512": (16, 64, (900, 511, 1400), (2, 3, 1), "causal", 1),
}


def scored(name: str) -> Scored:
    """Random keys and queries of depth 128, the only one vLLM's operator takes."""
    heads, _, past, rows, mask, width = SCORES[name]
    rng, ragged = generator(name), Ragged(past, rows)
    counts = [ragged.keys(b) // width for b in range(ragged.batch)]
    keys = tuple(normal(rng, n, 128).to(F8) for n in counts)
    scales = tuple(torch.from_numpy(rng.uniform(0.25, 2, (n, 1))).float() for n in counts)
    total = sum(rows)
    q = normal(rng, total, heads, 128).to(F8)
    return Scored(ragged, q, normal(rng, total, heads), Stored(keys, scales, 128), mask, width)


def asked(name: str, function: str) -> Call:
    """The same keys in vLLM's pages: elements of a page, then its scales."""
    data, page_size = scored(name), SCORES[name][1]
    table, pages = table_of(generator(f"{name}/pages"), data.keys.counts, page_size)
    cache = torch.full((pages, 132 * page_size), 255, dtype=torch.uint8)  # NaN
    assert data.keys.scales is not None
    for b, (keys, scales) in enumerate(zip(data.keys.rows, data.keys.scales, strict=True)):
        slots = slots_of(table, b, torch.arange(len(keys)), page_size)
        page, slot = slots // page_size, slots % page_size
        cache[:, : 128 * page_size].view(pages, page_size, 128)[page, slot] = keys.view(torch.uint8)
        cache[:, 128 * page_size :].view(pages, page_size, 4)[page, slot] = scales.view(torch.uint8)
    places = data.ragged.places(1)
    tensors = {
        "q": data.q,
        "cache": cache,
        "weights": data.q_s,
        "visible": torch.tensor([data.candidates(at.seq, at.pos) for at in places], dtype=torch.int32),
        "table": table[[at.seq for at in places]],
    }
    return call(function, tensors, page_size=page_size)


# ---- compressor ------------------------------------------------------------------------------------------------------

EPS = 1e-6


class Windows:
    """Tokens of every sequence, the last ones this call's, and the windows that those close."""

    def __init__(self, rate: int) -> None:
        rng, width = generator(f"compress-{rate}"), 1024 if rate == 4 else 512  # windows of 4 overlap
        past, rows = ((3, 0, 9, 22, 8), (8, 3, 11, 1, 0)) if rate == 4 else ((3, 0, 250), (150, 60, 140))
        self.rate, self.ragged = rate, Ragged(past, rows)
        self.counts = [self.ragged.keys(b) for b in range(self.ragged.batch)]
        self.gates, self.rows = ([normal(rng, n, width) for n in self.counts] for _ in range(2))
        self.bias, self.norm = normal(rng, rate, width), normal(rng, 512)
        angles = torch.from_numpy(rng.uniform(0, 7, (max(self.counts), 32))).float()
        self.turns = torch.cat([angles.cos(), angles.sin()], 1)
        self.places = [(b, e) for b, n in enumerate(self.counts) for e in range(past[b] // rate, n // rate)]
        self.table, self.pages = table_of(rng, self.counts, 8)
        self.entry_table, self.entry_pages = table_of(rng, [n // rate for n in self.counts], 6)

    def call(self) -> Call:
        rate, span = self.rate, self.rate * self.bias.shape[1] // 512
        ends = torch.tensor([e * rate + rate - 1 for _, e in self.places])
        where = [b for b, _ in self.places]
        positions = [torch.arange(n) for n in self.counts]
        windows = [
            slots_of(self.table, b, end - torch.arange(span).flip(0), 8) for b, end in zip(where, ends, strict=True)
        ]
        made = [slots_of(self.entry_table, b, end[None] // rate, 6) for b, end in zip(where, ends, strict=True)]
        tensors = {
            "rows": torch.cat(self.rows), "gates": torch.cat(self.gates), "bias": self.bias,
            "positions": torch.cat(positions),
            "slots": torch.cat([slots_of(self.table, b, at, 8) for b, at in enumerate(positions)]),
            "windows": torch.stack(windows), "ends": ends, "entry_slots": torch.cat(made),
            "norm": self.norm, "turns": self.turns,
        }  # fmt: skip
        pages = {"pages": self.pages, "page_size": 8, "entry_pages": self.entry_pages, "entry_page_size": 6}
        return call("compress", tensors, rate=rate, eps=EPS, **pages)

    def read(self, data: Tensor) -> Tensor:
        """The entries in vLLM's bytes."""
        plain = Pool(data, 6, self.entry_table).plain([0] * len(self.counts)).keys.flatten(0, 2)
        return torch.stack([plain[slots_of(self.entry_table, b, torch.tensor([e]), 6)[0]] for b, e in self.places])

    def ours(self, bias: Tensor) -> Tensor:
        """The entries, with the norm and rotation that follow."""
        past = torch.tensor(self.ragged.past, dtype=torch.int32)
        closed = closed_windows(past, torch.tensor(self.ragged.offsets), self.rate)
        gates, rows = (torch.full((self.pages, 8, 1, len(bias[0])), torch.nan) for _ in range(2))
        for stored, each in ((gates, self.gates), (rows, self.rows)):
            for b, x in enumerate(each):
                slots = slots_of(self.table, b, torch.arange(len(x)), 8)
                stored[slots // 8, slots % 8, 0] = x
        counts = torch.tensor(self.counts, dtype=torch.int32)
        tokens = PagedKVCache.from_block_table(gates, rows, self.table, counts).layer(0)
        room = torch.empty(self.entry_pages, 6, 1, 512)
        entries = PagedKVCache.from_block_table(room, None, self.entry_table, past // self.rate).layer(0)
        made = compress(tokens, entries, closed, bias)
        made = made * (made.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm
        cos, sin = self.turns[[e * self.rate for _, e in self.places]].chunk(2, 1)
        even, odd = made[:, LATENT::2], made[:, LATENT + 1 :: 2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(1)
        return torch.cat([made[:, :LATENT], turned], 1)


# ---- tests -----------------------------------------------------------------------------------------------------------

RATES = (4, 128)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Bits]:
    calls = {f"latent-{n}": Sparse(n).call() for n in LATENTS}
    calls |= {f"scores-{n}": asked(n, "scores") for n in SCORES}
    calls |= {"best512": asked("past-512", "best512")}
    calls |= {f"compress-{rate}": Windows(rate).call() for rate in RATES}
    return VLLM.answers(calls)


@pytest.mark.parametrize("name", LATENTS)
def test_latent_attention(name: str, theirs: dict[str, Bits]) -> None:
    """Window and listed entries of float8 caches: as the same bytes in two leaves, and as float32 rows.

    Only vLLM rounds here: outputs, up to 4, to bfloat16, by half a step of 2**-6.
    """
    data, found = Sparse(name), answer(theirs, f"latent-{name}")
    assert difference(data.of_bytes(), found) <= 1e-2
    assert difference(data.of_rows(), found) <= 1e-2


def test_latent_attention_would_differ(theirs: dict[str, Bits]) -> None:
    """By a key more in the window."""
    data = Sparse("short")
    assert difference(data.of_rows(data.case.window + 1), answer(theirs, "latent-short")) > 0.1


@pytest.mark.parametrize("top_k", [6, 2000])
@pytest.mark.parametrize("name", SCORES)
def test_indexer(name: str, top_k: int, theirs: dict[str, Bits]) -> None:
    """Our picks are the best by vLLM's scores, over heads, masks and pools."""
    data, found = scored(name), answer(theirs, f"scores-{name}")
    picks = public_indexer(data, data.cache(generator(name), Layout(page_size=5)), top_k)
    for at in data.ragged.places(1):
        assert_best(picks[at.row], found[at.row, : data.candidates(at.seq, at.pos)])


def test_indexer_picks_512(theirs: dict[str, Bits]) -> None:
    """The same sets: no two scores at the border are within rounding of each other."""
    data, found = scored("past-512"), answer(theirs, "best512")
    picks = public_indexer(data, data.cache(generator("past-512")), 512)
    assert torch.equal(picks.sort(1).values, found.sort(1).values)


@pytest.mark.parametrize("rate", RATES)
def test_compressor(rate: int, theirs: dict[str, Bits]) -> None:
    """Entries of windows, overlapping (4) or not (128), some begun before the call, after norm and rotation.

    vLLM stores them rounded: 448 to float8 with a power of two for 64 of them (3 bits, and an absolute step below the
    smallest normal one), by way of bfloat16, and 64 to bfloat16.
    """
    data = Windows(rate)
    mine, found = data.ours(data.bias), data.read(answer(theirs, f"compress-{rate}"))
    assert len(mine) > rate % 7
    off = (mine - found).abs()
    step = mine[:, :LATENT].view(-1, 7, 64).abs().amax(-1, keepdim=True).expand(-1, 7, 64).reshape(-1, LATENT) * 2**-16
    assert (off[:, :LATENT] <= mine[:, :LATENT].abs() * (2**-4 + 2**-8) + step).all()
    assert (off[:, LATENT:] <= mine[:, LATENT:].abs() * 2**-8 + 1e-6).all()
    wrong = data.ours(data.bias.roll(1, 0))
    assert ((wrong - found).abs() > wrong.abs() * 2**-3).float().mean() > 0.5
