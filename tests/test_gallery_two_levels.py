"""Two-level indexing: blocks by their best key, then the keys inside them, and never a key outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.selecting import batch, leaf
from support.selection import best

import tilewright
from tilewright.dsl.errors import ArgumentLayoutError, ArgumentShapeError, ArgumentValueError
from tilewright.ops import indexers
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.references.selection import indexer_scores

pytestmark = pytest.mark.both_targets(slow=True)


@pytest.mark.parametrize("rectify", [True, False])
@pytest.mark.parametrize(("kpool", "block", "top_blocks"), [(1, 4, 2), (3, 2, 3), (2, 4, 1)])
def test_two_levels(kpool: int, block: int, top_blocks: int, rectify: bool, rng: np.random.Generator) -> None:
    """Blocks by their best key, then keys by score among theirs and the block being filled; nothing else is read."""
    data = batch(rng, (31, 0, 6), (4, 13, 1), heads=3, kv_heads=1, exact=True)
    pools = [k[: len(k) // kpool] for k in data.keys]  # any rows will do as keys of pools
    weights = torch.from_numpy(rng.integers(-2, 5, data.q.shape[:2])).float()
    keys = leaf(rng, pools, None, data.past, 2 * block)
    found = indexers.two_level_indexer(
        data.q, weights, data.offsets, keys, top_k=5, top_blocks=top_blocks, block=block, kpool=kpool, rectify=rectify
    )
    assert (found.keys.dtype, found.blocks.dtype) == (torch.int32, torch.int32)
    for b, r, pos in data.places():
        closed = (pos + 1) // kpool
        row = data.q[r : r + 1].double(), weights[r : r + 1].double()
        scores = indexer_scores(*row, pools[b][:, 0].double(), rectify)[0][:closed]
        whole = [float(scores[n * block : (n + 1) * block].max()) for n in range(closed // block)]
        blocks = sorted([*best(np.array(whole), top_blocks), closed // block if closed % block else -1])
        assert found.blocks[r].tolist() == blocks
        held = [j for c in blocks if c >= 0 for j in range(c * block, min((c + 1) * block, closed))]
        assert found.keys[r].tolist() == [held[n] if n >= 0 else -1 for n in best(scores[held].numpy(), 5)]


def test_blocks_of_another_layer(rng: np.random.Generator) -> None:
    """A later layer picks its own keys inside the blocks of the first."""
    data, other = (batch(rng, (20,), (6,), heads=2, kv_heads=1, exact=True) for _ in range(2))
    keys = [leaf(rng, x.keys, None, x.past, 4) for x in (data, other)]
    sizes: dict[str, Any] = {"top_k": 4, "block": 2}
    picked = indexers.two_level_indexer(data.q, None, data.offsets, keys[0], top_blocks=3, **sizes)
    found = tilewright.run(
        indexers.indexer_in_blocks,
        {"q": other.q, "chosen": picked.blocks, "keys": keys[1]},
        other.offsets,
        constants=sizes,
    )["out"]
    for _, r, pos in other.places():
        scores = indexer_scores(other.q[r : r + 1], None, other.keys[0][:, 0], True)[0]
        held = [j for c in picked.blocks[r].tolist() if c >= 0 for j in (2 * c, 2 * c + 1) if j <= pos]
        assert found[r].tolist() == [held[n] if n >= 0 else -1 for n in best(scores[held].double().numpy(), 4)]


def test_two_levels_in_float8(rng: np.random.Generator) -> None:
    """Blocks of scaled keys are viewed with their scales: one a key, or several that do not straddle keys."""
    pages = torch.from_numpy(rng.integers(-3, 4, (3, 1, 1, 8, 1, 6))).float()
    table, before = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([18], dtype=torch.int32)
    q, offsets = torch.from_numpy(rng.integers(-2, 3, (4, 2, 6))).float(), torch.tensor([0, 4])
    for granularity in (3, 6, 100):
        granules = -(-6 // min(granularity, 6))
        scales = torch.from_numpy(2.0 ** rng.integers(-1, 2, (3, 1, 1, 8, 1, granules))).float()
        stored = PagedKVCache(
            pages.to(torch.float8_e4m3fn), table, before, scales=scales, quantization_granularity=granularity
        )
        plain = PagedKVCache(pages * scales.repeat_interleave(6 // granules, -1), table, before)
        found, want = (
            indexers.two_level_indexer(q, None, offsets, c.layer(0), top_k=6, top_blocks=2, block=4)
            for c in (stored, plain)
        )
        assert torch.equal(found.keys, want.keys)
        assert torch.equal(found.blocks, want.blocks)


def test_two_levels_refuse(rng: np.random.Generator) -> None:
    """Pages that cut blocks, slots with gaps, scales that straddle keys."""
    data = batch(rng, (9,), (3,), kv_heads=1)

    def call(keys: PagedLeaf, block: int = 2, **change: Any) -> None:
        given = {"q": data.q, "weights": None, "input_row_offsets": data.offsets, "top_k": 1, "top_blocks": 1, **change}
        indexers.two_level_indexer(**given, keys=keys, block=block)

    keys = leaf(rng, data.keys, None, data.past, 4)
    call(keys)
    with pytest.raises(ArgumentValueError, match="block is 3; expected a divisor of the page size 4"):
        call(keys, 3)
    with pytest.raises(ArgumentLayoutError, match="slots follow each other"):
        call(replace(keys, keys=torch.zeros(9, 4, 2, 8)[:, :, :1]))
    with pytest.raises(ArgumentShapeError, match="kv_heads=1"):
        call(leaf(rng, batch(rng, (9,), (3,)).keys, None, data.past, 4))
    scales = torch.ones(*keys.keys.shape[:3], 3)
    with pytest.raises(ArgumentValueError, match="granularity is 3; expected a divisor of the depth 8"):
        call(replace(keys, keys=keys.keys.to(torch.float8_e4m3fn), key_scales=scales, quantization_granularity=3))
    with pytest.raises(ArgumentValueError, match="top_blocks"):
        call(keys, top_blocks=0)
