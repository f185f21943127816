"""Compressors are their float64 references and DeepSeek-V4's own modules, and a layer of it is served by them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import assert_same_bits
from support.running import each
from support.selecting import leaf
from torch import Tensor

import tilewright
from tilewright import references
from tilewright.demo.compressor import rotated
from tilewright.demo.deepseek_v4 import HEAVY, SPARSE, tiny_deepseek_v4
from tilewright.dsl.errors import ArgumentDTypeError, ArgumentError, ArgumentShapeError, ArgumentValueError
from tilewright.dsl.schedule import Schedule
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.ops.compressed import heavily_compressed_attention
from tilewright.ops.compressor import closed_windows, compress, compress_overlapping, compress_windows, pool_means
from tilewright.ops.indexers import indexer
from tilewright.ops.latent_attention import latent_sparse_attention_ragged_paged
from tilewright.ops.page_selection import page_bounds
from tilewright.random_inputs import DenseLeaf

pytestmark = pytest.mark.both_targets(slow=True)

PAST, ROWS = (3, 0, 9, 22, 8), (8, 3, 11, 1, 0)
SCHEDULES = (
    Schedule(rows=2, keys=3, masks="split"),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=4, keys=16, partitions=2),
    Schedule(rows=16, keys=128),
)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'tilewright[models]'"
)


class Windows:
    """Tokens of every sequence, of which the last ones are this call's, and the windows that those close."""

    def __init__(
        self, rng: np.random.Generator, rate: int, width: int, page_size: int, *, kv_heads: int = 1, before: int = 1
    ) -> None:
        """before: windows that an entry looks back."""
        counts = [p + n for p, n in zip(PAST, ROWS, strict=True)]
        self.keys, self.values = (
            [torch.from_numpy(rng.standard_normal((n, kv_heads, width))).float() for n in counts] for _ in range(2)
        )
        offsets = torch.tensor([0, *ROWS]).cumsum(0)
        self.offsets = closed_windows(torch.tensor(PAST, dtype=torch.int32), offsets, rate)
        self.places = [(b, e) for b, n in enumerate(counts) for e in range(PAST[b] // rate, n // rate)]
        need = [torch.zeros(n, dtype=torch.bool) for n in counts]
        for b, e in self.places:
            need[b][max(0, e - before) * rate : (e + 1) * rate] = True
        self.tokens = leaf(rng, self.keys, self.values, counts, page_size, need)
        self._rng, self._page_size, self._rate = rng, page_size, rate

    def entries(self, dim: int, kv_heads: int = 1) -> PagedLeaf:
        """Where they go: only how many there are before is known of it."""
        rows = [torch.empty(p // self._rate, kv_heads, dim) for p in PAST]
        return leaf(
            self._rng, rows, None, [len(r) for r in rows], self._page_size, [torch.zeros(len(r)).bool() for r in rows]
        )


def expected(data: Windows, bias: Tensor, rate: int, dim: int, overlap: bool) -> Tensor:
    """Entries [entries, dim] in float64, by the reference, a sequence at a time."""
    out = []
    for b, (keys, values) in enumerate(zip(data.keys, data.values, strict=True)):
        pos = torch.tensor([e for s, e in data.places if s == b], dtype=torch.int64)
        tokens = DenseLeaf(keys.double().transpose(0, 1), values.double().transpose(0, 1))
        if overlap:
            halves = bias.double().view(rate, 2, dim).transpose(0, 1)
            out.append(references.compressor.compress_overlapping(halves, tokens, rate, dim, pos))
        else:
            out.append(references.compressor.compress_windows(bias.double(), tokens, rate, pos))
    return torch.cat(out)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("rate", [1, 4, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_is_its_reference(overlap: bool, rate: int, page_size: int, rng: np.random.Generator) -> None:
    """Entry 0 has no window before; windows further back are poison, their pages junk."""
    dim = 5
    data = Windows(rng, rate, dim * (1 + overlap), page_size, before=int(overlap))
    bias = torch.from_numpy(rng.standard_normal((rate, dim * (1 + overlap)))).float()
    out = compress(data.tokens, data.entries(dim), data.offsets, bias)
    torch.testing.assert_close(out.double(), expected(data, bias, rate, dim, overlap), rtol=1e-5, atol=1e-6)


@each(*SCHEDULES)
@pytest.mark.parametrize("overlap", [False, True])
def test_schedules(overlap: bool, schedule: Schedule, rng: np.random.Generator) -> None:
    """Entries, tokens and partitions in any way."""
    rate, dim = 3, 4
    data = Windows(rng, rate, dim * (1 + overlap), 4, before=int(overlap))
    bias = torch.from_numpy(rng.standard_normal((rate, dim * (1 + overlap)))).float()
    count, entries = torch.empty(len(data.places), 0), data.entries(dim)
    halves = bias.view(rate, 2, dim).transpose(0, 1) if overlap else bias
    out = tilewright.run(
        compress_overlapping if overlap else compress_windows,
        {"count": count, "bias": halves, "entries": entries, "tokens": data.tokens},
        data.offsets,
        constants={"rate": rate, **({"dim": dim} if overlap else {})},
        schedule=schedule,
    )["out"]
    torch.testing.assert_close(out.double(), expected(data, bias, rate, dim, overlap), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@each(*SCHEDULES, quick=2)
def test_pooled_keys(schedule: Schedule, rng: np.random.Generator) -> None:
    """The mean of each window, and its bounds, by key-value head."""
    rate, dim, heads = 4, 6, 3
    data = Windows(rng, rate, dim, 3, kv_heads=heads, before=0)
    windows = torch.stack([data.keys[b][e * rate : (e + 1) * rate] for b, e in data.places])
    one, entries = torch.ones(len(windows), heads), data.entries(dim, heads)
    means = {"each": one / rate, "entries": entries, "tokens": data.tokens}
    found = tilewright.run(pool_means, means, data.offsets, constants={"rate": rate}, schedule=schedule)["out"]
    torch.testing.assert_close(found, windows.mean(1), rtol=1e-5, atol=1e-6)
    bounds = tilewright.run(
        page_bounds,
        {"one": one, "pages": entries, "kv": data.tokens},
        data.offsets,
        constants={"block": rate},
        schedule=schedule,
    )
    assert torch.equal(bounds["greatest"], windows.amax(1))
    assert torch.equal(bounds["least"], windows.amin(1))


def test_closed_windows() -> None:
    """What a call's tokens close: none, one that began before it, several."""
    before, offsets = (
        torch.tensor([0, 3, 7, 5], dtype=torch.uint32),
        torch.tensor([0, 3, 4, 14, 14], dtype=torch.uint32),
    )
    assert closed_windows(before, offsets, 4).tolist() == [0, 0, 1, 4, 4]
    assert closed_windows(before, offsets, 1).tolist() == offsets.tolist()
    assert closed_windows(np.zeros(0, np.int32), np.zeros(1, np.int64), 4).tolist() == [0]
    with pytest.raises(ArgumentValueError, match="rate is 0"):
        closed_windows(before, offsets, 0)
    with pytest.raises(ArgumentShapeError, match="input_row_offsets"):
        closed_windows(before, offsets[:-1], 4)
    with pytest.raises(ArgumentDTypeError, match="cache_lengths"):
        closed_windows(before.float(), offsets, 4)


def test_nothing_closes(rng: np.random.Generator) -> None:
    """A call without a new entry gives none, and buffers are written in place."""
    data = Windows(rng, 4, 6, 4)
    bias, entries = torch.zeros(4, 3), data.entries(3)
    assert compress(data.tokens, entries, torch.zeros(6, dtype=torch.int32), torch.zeros(4, 6)).shape == (0, 3)
    bias = torch.from_numpy(rng.standard_normal((4, 6))).float()
    buffer = torch.full((len(data.places), 3), torch.nan, dtype=torch.bfloat16)
    assert compress(data.tokens, entries, data.offsets, bias, output=buffer) is buffer
    assert_same_bits(buffer, compress(data.tokens, entries, data.offsets, bias).to(torch.bfloat16))


def test_mistakes_are_named(rng: np.random.Generator) -> None:
    """Widths that are neither, offsets of other batches, tokens without gates."""
    data = Windows(rng, 4, 6, 4)
    entries, bias = data.entries(3), torch.zeros(4, 6)

    def refused(error: type[Exception], match: str, **change: Any) -> None:
        given = {"tokens": data.tokens, "entries": entries, "entry_offsets": data.offsets, "position_bias": bias}
        with pytest.raises(error, match=match):
            compress(**{**given, **change})

    refused(
        ArgumentShapeError,
        r"position_bias has shape \[4, 5\]; expected \[rate, 3\] or",
        position_bias=torch.zeros(4, 5),
    )
    refused(ArgumentError, "position_bias", position_bias=torch.zeros(4, 6, dtype=torch.int32))
    refused(ArgumentShapeError, "tokens", position_bias=torch.zeros(4, 3))
    refused(ArgumentShapeError, "entry_offsets", entry_offsets=data.offsets[:-1])
    refused(ArgumentValueError, r"entry_offsets\[5\]", output=torch.zeros(2, 3))
    refused(ArgumentShapeError, "entries", entries=leaf(rng, [torch.zeros(1, 2, 3)] * 5, None, [0] * 5, 4))

    def pooled(weights: Tensor, kv_heads: int) -> None:
        tokens, entries = (leaf(rng, [torch.zeros(4, kv_heads, 3)] * 5, None, [4] * 5, 4) for _ in range(2))
        arguments = {"each": weights, "entries": entries, "tokens": tokens}
        tilewright.run(pool_means, arguments, data.offsets, constants={"rate": 4})

    count = len(data.places)
    pooled(torch.zeros(count, 2), 2)
    with pytest.raises(ArgumentError, match="2 key-value heads; expected a divisor of the 3 query heads"):
        pooled(torch.zeros(count, 3), 2)
    with pytest.raises(ArgumentValueError, match=f"is {count}; expected {count + 1}, the number of rows"):
        pooled(torch.zeros(count + 1, 2), 2)


# ---- DeepSeek-V4 -----------------------------------------------------------------------------------------------------

LENGTHS, CHUNK = (37, 5, 20), 7


@cache
def model() -> Any:
    return tiny_deepseek_v4()


def attention_of(kind: str) -> Any:
    return next(x.self_attn for x in model().model.layers if x.self_attn.layer_type == kind)


class Pages:
    """A cache of one layer under construction: every call stores rows and counts them. Slots start as NaN."""

    def __init__(self, rng: np.random.Generator, widths: Sequence[int], page_size: int) -> None:
        count = -(-max(LENGTHS) // page_size) * len(LENGTHS)
        pages = [torch.full((count, page_size, 1, w), torch.nan) for w in widths]
        table = torch.from_numpy(rng.permutation(count).reshape(len(LENGTHS), -1)).to(torch.int32)
        none = torch.zeros(len(LENGTHS), dtype=torch.int32)
        self.before = PagedKVCache.from_block_table(pages[0], pages[1] if len(pages) > 1 else None, table, none)
        self.after = self.before

    def store(self, offsets: Tensor, *rows: Tensor) -> None:
        """Rows [rows, width] of this call: keys and, where the cache has them, values."""
        self.before = self.after
        self.before.append(0, rows[0][:, None], rows[1][:, None] if len(rows) > 1 else None, offsets)
        self.after = self.before.advance(offsets)


class Entries:
    """The compressed entries of one compressor module, through our caches and our compressor."""

    def __init__(self, module: Any, rng: np.random.Generator) -> None:
        self.module, self.rate = module, int(module.compress_rate)
        width = module.kv_proj.out_features
        self.waiting, self.stored = Pages(rng, (width, width), 3), Pages(rng, (int(module.head_dim),), 2)

    def add(self, hidden: Tensor, offsets: Tensor) -> None:
        """Tokens' states [rows, hidden_size]; the entries that they close are stored."""
        m = self.module
        self.waiting.store(offsets, m.gate_proj(hidden), m.kv_proj(hidden))
        closed = closed_windows(self.waiting.before.cache_lengths, offsets, self.rate)
        entries = self.stored.after.layer(0)
        made = m.kv_norm(compress(self.waiting.after.layer(0), entries, closed, m.position_bias.data))
        count = closed.diff()
        own = torch.arange(len(made)) - closed[:-1].repeat_interleave(count)
        token = (entries.cache_lengths.repeat_interleave(count) + own) * self.rate
        cos, sin = m.rotary_emb(made, position_ids=token[None], layer_type=m.rope_layer_type)
        self.stored.store(closed, rotated(made[None, None], cos, sin)[0, 0])

    def rows(self, b: int) -> Tensor:
        """What is stored for a sequence, [entries, dim]."""
        at = self.stored.after.layer(0)
        n = int(at.cache_lengths[b])
        return at.keys[at.lookup_table[b].long()].flatten(0, 1)[:n, 0]


def calls() -> list[list[tuple[int, int]]]:
    """Chunks of each sequence, call by call: the longest sequence alone in the end."""
    return [[(min(n, c * CHUNK), min(n, (c + 1) * CHUNK)) for n in LENGTHS] for c in range(-(-max(LENGTHS) // CHUNK))]


def served(hidden: Sequence[Tensor], step: Callable[[Tensor, Tensor, Tensor], Tensor | None]) -> list[Tensor]:
    """`step(states, positions, offsets)` for every call; what it returns for rows, by sequence."""
    out: list[list[Tensor]] = [[] for _ in hidden]
    for spans in calls():
        offsets = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0, dtype=torch.int32)
        rows = torch.cat([h[a:b] for h, (a, b) in zip(hidden, spans, strict=True)])
        made = step(rows, torch.cat([torch.arange(a, b) for a, b in spans]), offsets)
        if made is not None:
            for b, rows_of in enumerate(out):
                rows_of.append(made[offsets[b] : offsets[b + 1]])
    return [torch.cat(o) for o in out if o]


@pytest.fixture
def hidden(rng: np.random.Generator) -> list[Tensor]:
    return [torch.from_numpy(rng.standard_normal((n, model().config.hidden_size))).float() for n in LENGTHS]


def compressed_by(m: Any, h: Tensor) -> Tensor:
    """The entries [entries, dim] of a whole sequence, by the model's own compressor."""
    low = torch.zeros(1, len(h), model().config.q_lora_rank)
    entries: Tensor = m(h[None], low, torch.arange(len(h))[None], None, 0)[0][0, 0]
    return entries


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("kind", [SPARSE, HEAVY])
def test_compressor_of_the_model(kind: str, hidden: list[Tensor], rng: np.random.Generator) -> None:
    """Chunks of a ragged batch give the entries that the model's own module gives for whole sequences."""
    module = attention_of(kind).compressor
    entries = Entries(module, rng)
    with torch.no_grad():
        served(hidden, lambda rows, _, offsets: entries.add(rows, offsets))
        for b, h in enumerate(hidden):
            want = compressed_by(module, h)
            assert len(want) == len(h) // module.compress_rate
            torch.testing.assert_close(entries.rows(b), want, rtol=1e-5, atol=1e-5)


def picked(m: Any, keys: Entries, rows: Tensor, low: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """The indexer's list for each row. low: [rows, q_lora_rank]."""
    keys.add(rows, offsets)
    cos, sin = m.rotary_emb(rows[None], position_ids=positions[None], layer_type=m.rope_layer_type)
    q = m.q_b_proj(low).view(1, len(rows), -1, m.head_dim).transpose(1, 2)
    scorer = m.scorer
    arguments = {
        "q": rotated(q, cos, sin)[0].transpose(0, 1),
        "weights": scorer.weights_proj(rows) * (scorer.weights_scaling * scorer.softmax_scale),
        "keys": keys.stored.after.with_lengths(keys.waiting.before.cache_lengths).layer(0),
    }
    constants = {"top_k": int(m.index_topk), "kpool": keys.rate}
    return tilewright.run(indexer, arguments, offsets, constants=constants)["out"]


@pytest.mark.slow
@needs_transformers
def test_indexer_of_the_model(hidden: list[Tensor], rng: np.random.Generator) -> None:
    """The entries that the model's own indexer picks."""
    m = attention_of(SPARSE).compressor.indexer
    keys, config = Entries(m, rng), model().config
    low = torch.from_numpy(rng.standard_normal((max(LENGTHS), config.q_lora_rank))).float()
    with torch.no_grad():
        lists = served(hidden, lambda rows, at, offsets: picked(m, keys, rows, low[at], at, offsets))
        for h, got in zip(hidden, lists, strict=True):
            want = m(h[None], low[None, : len(h)], torch.arange(len(h))[None], None, 0)[0]
            for mine, own in zip(got.tolist(), want.tolist(), strict=True):
                assert [e for e in mine if e >= 0] == [e for e in own if e >= 0]


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("kind", [SPARSE, HEAVY])
def test_layer_of_the_model(kind: str, hidden: list[Tensor], rng: np.random.Generator) -> None:
    """A whole attention layer: compressor, indexer, window and entries are the library's, in chunks."""
    m, config = attention_of(kind), model().config
    tokens, entries = Pages(rng, (config.head_dim,), 4), Entries(m.compressor, rng)
    keys = Entries(m.compressor.indexer, rng) if kind == SPARSE else None
    angles = {k: model().model.rotary_emb for k in ("main", "compress")}

    def step(rows: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        cos, sin = angles[m.rope_layer_type](rows[None], position_ids=positions[None], layer_type=m.rope_layer_type)
        low = m.q_a_norm(m.q_a_proj(rows))
        q = m.q_b_norm(m.q_b_proj(low).view(1, len(rows), -1, m.head_dim).transpose(1, 2))
        q = rotated(q, cos, sin)[0].transpose(0, 1)
        tokens.store(offsets, rotated(m.kv_norm(m.kv_proj(rows))[None, None], cos, sin)[0, 0])
        entries.add(rows, offsets)
        window, compressed = tokens.before.layer(0), entries.stored.after.layer(0)
        if keys is not None:
            lists = picked(m.compressor.indexer, keys, rows, low, positions, offsets)
            out = latent_sparse_attention_ragged_paged(
                q, offsets, lists, m.sinks, window, compressed, m.scaling, window=m.sliding_window
            )
        else:
            arguments = {"q": q, "recent": window, "entries": compressed, "sink": m.sinks.data, "scale": m.scaling}
            constants = {"window": m.sliding_window, "rate": entries.rate}
            out = tilewright.run(heavily_compressed_attention, arguments, offsets, constants=constants)["out"]
        assert isinstance(out, Tensor)
        out = rotated(out.transpose(0, 1)[None], cos, -sin).transpose(1, 2)
        groups = out.reshape(1, len(rows), config.o_groups, -1)
        projected: Tensor = m.o_b_proj(m.o_a_proj(groups).flatten(2))[0]
        return projected

    with torch.no_grad():
        for h, got in zip(hidden, served(hidden, step), strict=True):
            at = torch.arange(len(h))
            distance = at[:, None] - at
            mask = torch.where((distance >= 0) & (distance < m.sliding_window), 0.0, -torch.inf)[None, None]
            both = {k: f(h[None], position_ids=at[None], layer_type=k) for k, f in angles.items()}
            want = m(h[None], both, at[None], mask)[0][0]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
            assert want.abs().max() > 0.1
