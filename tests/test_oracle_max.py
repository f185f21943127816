"""Our operators against those of the MAX wheels, whose contracts they follow. docs/oracles.md says how to get them.

Left out: the float8 indexer, as MAX 26.7 has no float8 on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import pytest
import torch
from support.batches import Content, content, place
from support.peer_calls import Bits, Call
from support.peers import MAX, answer, assert_best, call, difference, finite
from support.reference import NAMED, Ragged
from support.running import public
from support.selection import Latent, latent, public_latent, stored
from support.selection import place as place_keys
from torch import Tensor

import tilewright
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.ops.indexers import indexer

pytestmark = [pytest.mark.both_targets, pytest.mark.slow, MAX.needed]

# ---- flash attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flash:
    """A batch of attention. Every other dtype, mask, window, page size or head count is another graph to compile."""

    past: tuple[int, ...] = (3, 70, 0, 31)
    rows: tuple[int, ...] = (5, 1, 16, 2)
    mask: str = "causal"
    window: int | None = None
    sinks: bool = True
    dtype: torch.dtype = torch.float32
    scale: float = 0.125


# MAX does not compile windows below its vector width of 128 for a CPU.
FLASH = {
    "sinks": Flash(),
    "sinks-128-keys": Flash(past=(127, 100, 64), rows=(1, 28, 64)),
    "sinks-empty-sequence": Flash(past=(3, 9, 40), rows=(4, 0, 2)),
    "sinks-sharp": Flash(scale=0.5),
    "plain": Flash(sinks=False, past=(3, 300, 0, 127), rows=(5, 1, 140, 2)),
    "null": Flash(sinks=False, mask="null", past=(3, 300, 0), rows=(5, 1, 140)),
    "window": Flash(sinks=False, mask="sliding_window_causal", window=150, past=(3, 300, 0, 149), rows=(5, 9, 170, 2)),
    "bf16": Flash(dtype=torch.bfloat16),
    "sinks-300-keys": Flash(past=(3, 299), rows=(5, 1)),
}
# Semantics, section 3: the sink enters the denominator once, however the keys are split.
KNOWN = {"sinks-300-keys": "MAX's CPU path counts the sink once for each block of 128 keys"}
HEADS, KV_HEADS, DIM, PAGE_SIZE, LAYERS, LAYER = 7, 1, 64, 5, 2, 1

# Absolute, of outputs up to 4. float32: both add float32 in orders of their own. bfloat16: MAX rounds between steps,
# and is up to 0.034 off the float64 reference, where ours is within half a step of the output (0.004 for 1..2).
FLASH_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-4}


def made(name: str) -> tuple[Content, PagedKVCache, Tensor]:
    """The batch on pages, with poison where no row looks, and sinks in its dtype, as MAX has them."""
    case, rng = FLASH[name], np.random.default_rng(crc32(name.encode()))
    data = content(rng, case.past, case.rows, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, dtype=case.dtype)
    sees = NAMED[case.mask](case.window or 0)
    cache = place(data, rng, page_size=PAGE_SIZE, sees=sees, layers=LAYERS, layer=LAYER)
    return data, cache, torch.from_numpy(rng.normal(1, 2, HEADS)).to(case.dtype)


def ours(name: str, case: Flash | None = None) -> Tensor:
    """The published operator, as `case` says."""
    data, cache, sinks = made(name)
    case = case or FLASH[name]
    options = {"mask_str": case.mask, "local_window_size": case.window, "scale": case.scale, "layer_idx": LAYER}
    return public(data.q, data.offsets, cache, sink_weights=sinks if case.sinks else None, **options)


def asked(name: str) -> Call:
    """The same call of MAX's operator."""
    (data, cache, sinks), case = made(name), FLASH[name]
    blocks = torch.stack([torch.stack([x.keys, values_of(x)], 1) for x in map(cache.layer, range(LAYERS))], 2)
    table = cache.lookup_table
    if case.window is not None:
        # MAX reads the pages of keys before the window, which are gone here, and multiplies their values by 0.
        table, blocks = torch.where((table >= 0) & (table < len(blocks)), table, 0), finite(blocks)
    tensors = {"q": data.q, "blocks": blocks, "sinks": sinks if case.sinks else None}
    given = call("attention", tensors, layer=LAYER, scale=case.scale, mask=case.mask, window=case.window or -1)
    return with_indices(given, offsets=data.offsets, table=table, lengths=cache.cache_lengths)


def values_of(leaf: PagedLeaf) -> Tensor:
    assert leaf.values is not None
    return leaf.values


def with_indices(given: Call, **indices: Tensor) -> Call:
    """MAX's indices are uint32."""
    return replace(given, arrays={**given.arrays, **{n: x.numpy().astype(np.uint32) for n, x in indices.items()}})


# ---- latent attention ------------------------------------------------------------------------------------------------

LATENT = {
    "window-and-entries": ((3, 40, 0, 9), (5, 1, 12, 2), (4, 20, 3, 1), 6),
    "no-entries": ((3, 40), (2, 3), (4, 20), 0),
    "long": ((300, 0), (3, 150), (90, 40), 64),
}


def listing(name: str) -> Latent:
    past, rows, entries, slots = LATENT[name]
    rng = np.random.default_rng(crc32(name.encode()))
    sink = rng.normal(1, 2, 3).tolist()
    return latent(rng, past, rows, entries, slots=slots, window=17, heads=3, width=64, sink=sink)


def leaves(data: Latent) -> tuple[PagedLeaf, PagedLeaf]:
    recent, listed = data.leaves(np.random.default_rng(0))
    assert recent is not None
    return recent, listed


def asked_latent(name: str) -> Call:
    data = listing(name)
    near, far = leaves(data)
    tensors = {"q": data.q, "indices": data.indices, "sinks": data.sink}
    blocks = {n: leaf.keys[:, None, None] for n, leaf in (("recent", near), ("entries", far))}
    given = call("latent", {**tensors, **blocks}, scale=data.scale, window=data.window)
    return with_indices(
        given,
        offsets=data.offsets,
        recent_table=near.lookup_table,
        recent_lengths=near.cache_lengths,
        entries_table=far.lookup_table,
        entries_lengths=far.cache_lengths,
    )


# ---- indexer ---------------------------------------------------------------------------------------------------------

RATE = 4  # tokens of an entry, of DeepSeek-V4's indexer


class Scored:
    """Queries and pooled keys in float32, and how many entries are closed before the call and visible to each row."""

    def __init__(self) -> None:
        rng, self.ragged = np.random.default_rng(4), Ragged((3, 270, 0, 41), (5, 1, 16, 2))
        self.places = self.ragged.places(1)
        self.counts = [self.ragged.keys(b) // RATE for b in range(self.ragged.batch)]
        self.q = torch.from_numpy(rng.standard_normal((len(self.places), 3, 64))).float()
        self.weights = torch.from_numpy(rng.standard_normal((len(self.places), 3))).float()
        self.offsets = torch.tensor(self.ragged.offsets, dtype=torch.int32)
        self.closed = [past // RATE for past in self.ragged.past]
        self.visible = [(at.pos + 1) // RATE for at in self.places]
        every = [np.ones(n, np.bool_) for n in self.counts]
        self.cache = place_keys(stored(rng, self.counts, 64, torch.float32), self.ragged.past, every, rng)

    def call(self) -> Call:
        leaf, bounds = self.cache.layer(0), {"closed": self.closed, "visible": self.visible}
        tensors = {n: torch.tensor(x, dtype=torch.int32) for n, x in bounds.items()}
        tensors |= {"q": self.q, "weights": self.weights, "blocks": leaf.keys[:, None, None]}
        given = call("scores", tensors, width=2 * max(self.counts))
        return with_indices(given, offsets=self.offsets, table=leaf.lookup_table, lengths=torch.tensor(self.counts))

    def by_entry(self, found: Tensor) -> list[Tensor]:
        """The scores that each row may pick from; MAX has those of entries that the call closes in the second half."""
        half, out = found.shape[1] // 2, []
        for at, visible in zip(self.places, self.visible, strict=True):
            closed = min(self.closed[at.seq], visible)
            out.append(torch.cat([found[at.row, :closed], found[at.row, half : half + visible - closed]]))
        return out


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs() -> dict[str, Bits]:
    calls = {f"flash-{n}": asked(n) for n in FLASH} | {f"latent-{n}": asked_latent(n) for n in LATENT}
    return MAX.answers({**calls, "scores": Scored().call()})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.xfail(reason=KNOWN[n])) if n in KNOWN else n for n in FLASH]
)
def test_flash_attention(name: str, theirs: dict[str, Bits]) -> None:
    """Ragged rows over pages of an odd size, in the second layer, by mask, sinks and dtype."""
    found = difference(ours(name), answer(theirs, f"flash-{name}"))
    assert found <= FLASH_TOLERANCE[FLASH[name].dtype]


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name: str, theirs: dict[str, Bits]) -> None:
    """Recent rows and listed entries, with holes and repeats among them."""
    data = listing(name)
    assert difference(public_latent(data, leaves(data))[0], answer(theirs, f"latent-{name}")) <= 1e-5


@pytest.mark.parametrize("top_k", [5, 100])
def test_indexer(top_k: int, theirs: dict[str, Bits]) -> None:
    """Our picks are the best by MAX's scores of pooled keys, some of them closed by the call itself."""
    data = Scored()
    arguments = {"q": data.q, "weights": data.weights, "keys": data.cache.layer(0)}
    picks = tilewright.run(indexer, arguments, data.offsets, constants={"top_k": top_k, "kpool": RATE})["out"]
    for row, scores in zip(picks, data.by_entry(answer(theirs, "scores")), strict=True):
        assert_best(row, scores)


@pytest.mark.parametrize("name", ["sinks", "window"])
def test_a_difference_is_noticed(name: str, theirs: dict[str, Bits]) -> None:
    """Other sinks, a key less in the window and a scale 1 in 10 off are each far outside the tolerance."""
    case = FLASH[name]
    wrong = [replace(case, sinks=not case.sinks), replace(case, scale=case.scale * 1.1)]
    if case.window is not None:
        wrong.append(replace(case, window=case.window - 1))
    for other in wrong:
        assert difference(ours(name, other), answer(theirs, f"flash-{name}")) > 1e-3
