"""Caches as engines hold them: bytes of mixed formats, coarse float8 scales, prefixes shared in a cascade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from support.gallery import OPERATORS, leaf_of, offsets_of
from torch import Tensor

import tilewright
from tilewright.dsl.errors import (
    ArgumentDTypeError,
    ArgumentError,
    ArgumentLayoutError,
    ArgumentRankError,
    ArgumentShapeError,
    ArgumentTypeError,
)
from tilewright.dsl.schedule import Schedule
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.ops.cascade import cascade_attention
from tilewright.ops.flash_attention import generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.fp8_scales import scales_of
from tilewright.ops.mixed_rows import deepseek_v4_leaves, flash_mla_leaves
from tilewright.references.parts import attend, in_window, scores_of, unseen

pytestmark = pytest.mark.both_targets(slow=True)

F8 = torch.float8_e4m3fn
Leaves = tuple[PagedLeaf, PagedLeaf]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- bytes -----------------------------------------------------------------------------------------------------------

PAGE, PAGES, KEYS, NEW = 4, 6, 10, 2  # one sequence: KEYS tokens in 3 of 6 pages, NEW of them rows of this call
TABLE = torch.tensor([[5, 0, 3, -1]], dtype=torch.int32)
BEFORE = torch.tensor([KEYS - NEW], dtype=torch.int32)
SLOTS = [(int(TABLE[0, j // PAGE]), j % PAGE) for j in range(KEYS)]


def quantised(rows: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """float8 elements, scales that are powers of two, and what the two mean in float64."""
    tiles = rows.view(len(rows), -1, tile)
    scales = torch.pow(2, (tiles.abs().amax(-1) / 448).log2().ceil())
    stored = (tiles / scales[..., None]).to(F8)
    return stored.flatten(-2), scales, (stored.double() * scales[..., None].double()).flatten(-2)


def flash_mla_pool(rows: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    """656 bytes a token, written where the table says, in a pool with a spare slot a page; and what they mean."""
    stored, scales, meaning = quantised(rows, 128)
    pool = torch.full((PAGES, PAGE + 1, 1, 656), 0xFF, dtype=torch.uint8)[:, :PAGE]  # 0xFF is NaN in every format
    for j, (page, slot) in enumerate(SLOTS):
        parts = (stored[j].view(torch.uint8), scales[j].view(torch.uint8), tails[j].view(torch.uint8))
        pool[page, slot, 0] = torch.cat(parts)
    return pool, meaning


def v4_pool(rows: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of pages: rows of 448 + 128 bytes, then 8 a token for exponents, padded to a multiple of 576."""
    stored, scales, meaning = quantised(rows, 64)
    pool = torch.full((PAGES, -(-584 * PAGE // 576) * 576), 0xFF, dtype=torch.uint8)
    for j, (page, slot) in enumerate(SLOTS):
        pool[page, 576 * slot : 576 * (slot + 1)] = torch.cat([stored[j].view(torch.uint8), tails[j].view(torch.uint8)])
        exponents = scales[j].log2().int() + 127
        pool[page, 576 * PAGE + 8 * slot :][:7] = exponents.to(torch.uint8)
    return pool, meaning


def dense(q: Tensor, rows: Tensor, seen: Tensor, scale: float, values: Tensor, sink: Tensor | None = None) -> Tensor:
    """Attention of q [rows, heads, width] to rows [keys, width] in float64."""
    k, v = (x.double().expand(q.shape[1], -1, -1) for x in (rows, values))
    return attend(unseen(scores_of(q.double(), k) * scale, seen), v, None if sink is None else sink.double())["out"]


POSITIONS, CAUSAL = torch.arange(KEYS - NEW, KEYS), in_window(torch.arange(KEYS - NEW, KEYS), torch.arange(KEYS), None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, F8])
def test_flash_mla_pool_is_read_in_place(dtype: torch.dtype) -> None:
    """656 bytes a token, dense and listed: the operator reads the bytes that were written, and those written later."""
    rows, tails, q = normal(KEYS, 512) * 3, normal(KEYS, 64, seed=1).bfloat16(), normal(NEW, 4, 576, seed=2)
    pool, meaning = flash_mla_pool(rows, tails)
    latents, ropes = flash_mla_leaves(pool.view(dtype), TABLE, BEFORE)
    inside = range(pool.data_ptr(), pool.data_ptr() + pool.untyped_storage().nbytes())
    assert latents.key_scales is not None
    assert all(t.data_ptr() in inside for t in (latents.keys, latents.key_scales, ropes.keys))
    arguments: dict[str, Any] = {
        "q_nope": q[..., :512].contiguous(), "q_rope": q[..., 512:].contiguous(), "latents": latents, "ropes": ropes,
        "scale": 576**-0.5,
    }  # fmt: skip

    def agrees(seen: Tensor, indices: Tensor | None = None) -> None:
        found = tilewright.run(OPERATORS["mla_mixed_rows"], {**arguments, "indices": indices}, offsets_of([NEW]))
        whole = torch.cat([meaning, tails.double()], -1)
        assert torch.allclose(found["out"].double(), dense(q, whole, seen, 576**-0.5, meaning), atol=1e-5)

    agrees(CAUSAL)
    listed = torch.tensor([[7, -1, 2, 0], [-3, 9, 8, 1]], dtype=torch.int32)
    agrees(torch.stack([torch.isin(torch.arange(KEYS), row) for row in listed]), listed)
    pool[SLOTS[2][0], SLOTS[2][1], 0, :512], meaning[2] = 0, 0.0
    agrees(CAUSAL)


def test_deepseek_v4_pool(seed: int) -> None:
    """584 bytes a token, scales at the end of the page: window and entries, both parts into one buffer of 512."""
    q, sink, scale = normal(NEW, 4, 512, seed=2), torch.tensor([-inf, 0.0, 1.0, 30.0]), 512**-0.5
    stored = [(normal(KEYS, 448, seed=n) * 3, normal(KEYS, 64, seed=n + 9).bfloat16()) for n in (0, 1)]
    pools = [v4_pool(*s) for s in stored]
    recent = deepseek_v4_leaves(pools[0][0], PAGE, TABLE, BEFORE)
    entries = deepseek_v4_leaves(pools[1][0], PAGE, TABLE, torch.tensor([KEYS], dtype=torch.int32))
    listed = torch.tensor([[4, 9, -1], [0, -1, -1]], dtype=torch.int32)
    out = torch.full((NEW, 4, 512), torch.nan)
    tilewright.run(
        OPERATORS["mixed_rows_window_and_entries"],
        {
            "q": q[..., :448].contiguous(), "q_rope": q[..., 448:].contiguous(), "recent": recent[0],
            "recent_rope": recent[1], "entries": entries[0], "entries_rope": entries[1], "indices": listed,
            "sink": sink, "scale": scale,
        },
        offsets_of([NEW]),
        constants={"window": 3},
        outputs={"out": out[..., :448], "out_rope": out[..., 448:]},
    )  # fmt: skip
    rows = torch.cat([torch.cat([p[1], s[1].double()], -1) for p, s in zip(pools, stored, strict=True)])
    near = in_window(POSITIONS, torch.arange(KEYS), 3)
    seen = torch.cat([near, torch.stack([torch.isin(torch.arange(KEYS), row) for row in listed])], 1)
    assert torch.allclose(out.double(), dense(q, rows, seen, scale, rows, sink), atol=1e-5)
    assert recent[0].keys.data_ptr() == pools[0][0].data_ptr()
    assert recent[1].keys.data_ptr() == pools[0][0].data_ptr() + 448


def pool_of(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("pool", "error", "match"),
    [
        (pool_of(2, 3, 1, 655), ArgumentShapeError, "bytes=656"),
        (pool_of(2, 3, 2, 656), ArgumentShapeError, "kv_heads=1"),
        (pool_of(2, 3, 656), ArgumentRankError, "pool"),
        (pool_of(2, 3, 1, 656, dtype=torch.float32), ArgumentDTypeError, "uint8, int8 or float8"),
        (pool_of(2, 3, 1, 1312)[..., ::2], ArgumentLayoutError, "contiguous last axis"),
        (pool_of(2, 3, 1, 658)[..., :656], ArgumentLayoutError, "multiples of 4 bytes"),
        (pool_of(2, 3, 1, 660)[..., 2:658], ArgumentLayoutError, "multiples of 4 bytes"),
        ([0] * 656, ArgumentTypeError, "a torch tensor or a numpy array"),
    ],
)
def test_pools_that_are_none(pool: Any, error: type[Exception], match: str) -> None:
    """Bytes are viewed as wider elements only where every token starts at a multiple of them."""
    with pytest.raises(error, match=match):
        flash_mla_leaves(pool, TABLE, BEFORE)


@pytest.mark.parametrize(
    ("pool", "page_size", "error", "match"),
    [
        (pool_of(2, 583), 1, ArgumentShapeError, "bytes"),
        (pool_of(2, 584), 2, ArgumentShapeError, "bytes"),
        (pool_of(2, 585), 1, ArgumentLayoutError, "multiples of 2 bytes"),
        (pool_of(2, 584), 0, ArgumentError, "page_size"),
    ],
)
def test_v4_pools_that_are_none(pool: Tensor, page_size: int, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        deepseek_v4_leaves(pool, page_size, TABLE, BEFORE)


# ---- scales ----------------------------------------------------------------------------------------------------------


def float8_cache(rows: tuple[int, ...], keys: tuple[int, ...], scale: Callable[[Tensor], Tensor]) -> Leaves:
    """A float8 cache whose scales are `scale(pages)`, and a float32 cache of what its rows mean."""
    stored = [(normal(n, 2, 8, seed=n).to(F8), normal(n, 2, 6, seed=n + 1).to(F8)) for n in keys]
    plain = leaf_of([k.float() for k, _ in stored], [v.float() for _, v in stored], rows)
    assert plain.values is not None
    k, v = plain.keys.to(F8), plain.values.to(F8)
    k_scales, v_scales = scale(k), scale(v) * 2
    made = PagedKVCache.from_block_table(
        k, v, plain.lookup_table, plain.cache_lengths, k_scales=k_scales, v_scales=v_scales
    ).layer(0)
    return made, replace(plain, keys=plain.keys * k_scales, values=plain.values * v_scales)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "one in all": lambda pages: scales_of(pages, 0.25),
    "per head": lambda pages: scales_of(pages, torch.tensor([0.5, 2.0])),
    "per token": lambda pages: scales_of(pages, normal(*pages.shape[:2]).abs()),
    "per token and head": lambda pages: scales_of(pages, normal(*pages.shape[:3]).abs().numpy()),
}


@pytest.mark.parametrize("name", SCALES)
def test_float8_scales(name: str) -> None:
    """Scales of any coarseness, as views: what a cache of the products gives."""
    rows, keys = (3, 1), (7, 4)
    made, meant = float8_cache(rows, keys, SCALES[name])
    q, found = normal(4, 4, 8), []
    for leaf in (made, meant):
        arguments = {"q": q, "cache": leaf, "slopes": torch.zeros(4), "scale": 0.3}
        schedule = Schedule(rows=2, keys=3, partitions=2)
        found.append(
            tilewright.run(OPERATORS["alibi_attention"], arguments, offsets_of(rows), schedule=schedule)["out"]
        )
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_scales_are_views_and_descales_scale() -> None:
    """A scale per head in the cache is the same number as a descale of every sequence."""
    per_head = torch.tensor([0.5, 2.0])
    pages = torch.zeros(3, 4, 2, 8).to(F8)
    assert scales_of(pages, per_head).data_ptr() == per_head.data_ptr()
    assert scales_of(pages, per_head).shape == (3, 4, 2, 1)
    made, _ = float8_cache((3, 1), (7, 4), SCALES["per head"])
    arguments = {"q": normal(4, 4, 8), "cache": made, "scale": 0.3}
    with_scales = tilewright.run(
        OPERATORS["alibi_attention"], {**arguments, "slopes": torch.zeros(4)}, offsets_of((3, 1))
    )
    descales = {"k_descale": per_head.expand(2, 2), "v_descale": 2 * per_head.expand(2, 2)}
    descaled = tilewright.run(OPERATORS["descaled_attention"], {**arguments, **descales}, offsets_of((3, 1)))
    assert torch.allclose(with_scales["out"], descaled["out"], atol=1e-5)


@pytest.mark.parametrize(
    ("scales", "error"),
    [
        (torch.ones(3), ArgumentShapeError),
        (torch.ones(4, 3), ArgumentShapeError),
        (torch.ones(3, 4, 2, 1), ArgumentRankError),
        (torch.ones(2).double(), ArgumentDTypeError),
    ],
)
def test_scales_that_are_none(scales: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="scales"):
        scales_of(torch.zeros(3, 4, 2, 8).to(F8), scales)


# ---- cascades --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [(6,), (5, 9), (0, 4), (3, 0, 7)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_cascade_is_one_call(prefixes: tuple[int, ...], kv_heads: int) -> None:
    """Sequences that share prefixes, in two caches of two page sizes: as if each had its prefix in its own cache."""
    own, rows = ((7, 2, 4), (3, 5, 1), (9, 6, 2))[: len(prefixes)], ((2, 0, 4), (3, 1, 1), (1, 5, 2))[: len(prefixes)]
    shared = [(normal(n, kv_heads, 8, seed=n), normal(n, kv_heads, 6, seed=n + 1)) for n in prefixes]
    own_keys = [normal(n, kv_heads, 8, seed=n + 20) for group in own for n in group]
    own_values = [normal(n, kv_heads, 6, seed=n + 40) for group in own for n in group]
    flat = [n for group in rows for n in group]
    prefix_of = [p for p, group in enumerate(own) for _ in group]
    q, offsets = normal(sum(flat), 4, 8, seed=3), offsets_of(flat)
    prefix = leaf_of([k for k, _ in shared], [v for _, v in shared], [0] * len(prefixes), page_size=2)
    tails = leaf_of(own_keys, own_values, flat)
    out, lse = cascade_attention(q, offsets, tails, offsets_of([sum(group) for group in rows]), prefix, 0.4)
    whole = leaf_of(
        [torch.cat([shared[p][0], k]) for p, k in zip(prefix_of, own_keys, strict=True)],
        [torch.cat([shared[p][1], v]) for p, v in zip(prefix_of, own_values, strict=True)],
        flat,
    )
    assert whole.values is not None
    one = PagedKVCache.from_block_table(whole.keys, whole.values, whole.lookup_table, whole.cache_lengths)
    expected = generic_flash_attention_kv_cache_ragged_sink(q, offsets, one, 0, 0.4, return_lse=True)
    assert torch.allclose(out, expected[0], atol=1e-5)
    assert torch.allclose(lse, expected[1], atol=1e-5)


def test_a_cascade_in_one_pool() -> None:
    """One pool, as radix caches have it: a table of the prefix's pages, a table of what follows, a table of both."""
    k, v, q = normal(6, 4, 2, 8), normal(6, 4, 2, 8, seed=1), normal(3, 4, 8, seed=2)
    both = torch.tensor([[5, 2, 0], [5, 2, 4]], dtype=torch.int32)  # two pages shared, then one each
    offsets, before = offsets_of([1, 2]), torch.tensor([2, 1], dtype=torch.int32)
    prefix = PagedKVCache.from_block_table(k, v, both[:1, :2], torch.tensor([8], dtype=torch.int32)).layer(0)
    own = PagedKVCache.from_block_table(k, v, both[:, 2:], before).layer(0)
    out, lse = cascade_attention(q, offsets, own, torch.tensor([0, 3]), prefix, 0.4)
    one = PagedKVCache.from_block_table(k, v, both, before + 8)
    expected = generic_flash_attention_kv_cache_ragged_sink(q, offsets, one, 0, 0.4, return_lse=True)
    assert torch.allclose(out, expected[0], atol=1e-5)
    assert torch.allclose(lse, expected[1], atol=1e-5)


def test_mistakes_in_a_cascade() -> None:
    """Names are those of the call."""
    leaf = leaf_of([normal(4, 2, 8)], [normal(4, 2, 8)], [1])
    q, offsets = normal(1, 4, 8), offsets_of([1])
    with pytest.raises(ArgumentShapeError, match="cascade_attention: prefix"):
        cascade_attention(q, offsets, leaf, offsets_of([1, 0]), leaf, 1.0)
    with pytest.raises(ArgumentError, match="own"):
        cascade_attention(q, offsets, leaf_of([normal(4, 2, 9)], [normal(4, 2, 8)], [1]), offsets, leaf, 1.0)
    with pytest.raises(ArgumentError, match="prefix_row_offsets"):
        cascade_attention(q, offsets, leaf, torch.tensor([0, 2]), leaf, 1.0)
