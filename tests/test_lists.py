# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, index"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Key sources of the language: lists, blocks, pools and concatenations, in every reduction and in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import F8
from support.reference import Floats, Ragged, assert_close, assert_same_bits
from support.running import each
from support.selection import Layout, Stored, place, stored
from torch import Tensor

import tilewright
from tilewright.dsl import (
    Const,
    Paged,
    Rows,
    Scalar,
    boolean,
    concat,
    dot,
    f8e4m3,
    f32,
    i32,
    key,
    logsumexp,
    lse,
    max,
    op,
    pos,
    softmax,
    sum,
    to_float,
    weights,
)
from tilewright.dsl import Tensor as Captured
from tilewright.dsl.build import build
from tilewright.dsl.errors import (
    ArgumentDTypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentValueError,
    AuthorError,
    AxisMismatch,
    DTypeMismatch,
    IllegalSchedule,
    NotFinite,
    NotTraceable,
    OutOfBounds,
)
from tilewright.dsl.schedule import Schedule
from tilewright.ops.cache import PagedLeaf

pytestmark = pytest.mark.both_targets(slow=True)

LISTS = each(
    Schedule(rows=1, keys=3, partitions=2, masks="split"),
    Schedule(rows=1, keys=64),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=1, keys=4, partitions=5, start="first"),
    quick=2,
)
RANGES = each(
    Schedule(rows=2, keys=3, partitions=3, masks="split"),
    Schedule(rows=8, keys=64),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=3, keys=4, partitions=2, start="first"),
    quick=2,
)


class Batch:
    """Three sequences, one of no rows, with a cache of their tokens and one of 9, 4 and 12 entries."""

    ragged = Ragged((4, 6, 0), (3, 0, 5))

    def __init__(self, rng: np.random.Generator, heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float32):
        self.rng = rng
        self.q = torch.from_numpy(rng.standard_normal((8, heads, width))).float()
        self.near, self.far = stored(rng, [7, 6, 5], width, dtype), stored(rng, [9, 4, 12], width, dtype)

    @property
    def offsets(self) -> Tensor:
        return torch.tensor(self.ragged.offsets, dtype=torch.int32)

    def leaf(self, name: str = "near", page_size: int = 3, seen: Sequence[Sequence[int]] | None = None) -> PagedLeaf:
        """One of the two. seen: the entries of each sequence that are not poison, by default all that have rows."""
        data: Stored = getattr(self, name)
        need = [np.full(n, seen is None and self.ragged.rows[b] > 0) for b, n in enumerate(data.counts)]
        for b, entries in enumerate(seen or ()):
            need[b][list(entries)] = True
        lengths = self.ragged.past if name == "near" else data.counts
        return place(data, lengths, need, self.rng, Layout(page_size)).layer(0)

    def places(self) -> list[tuple[int, int, int]]:
        """(sequence, row, position) of every row."""
        return [(at.seq, at.row, at.pos) for at in self.ragged.places(1)]

    def lists(self, name: str, *shape: int, slots: int = 7, size: int = 1) -> Tensor:
        """Entries (or blocks) of the row's own sequence, unused slots among them, repeated ones too."""
        counts = [-(-n // size) for n in getattr(self, name).counts]
        made = [self.rng.integers(-2, counts[b], (*shape, slots)) for b, _, _ in self.places()]
        return torch.from_numpy(np.array(made)).to(torch.int32)

    def attended(self, keys: Callable[[int, int, int, int], Floats], scale: float = 1.0) -> tuple[Floats, Floats]:
        """(out, lse) of softmax attention to the rows `keys(sequence, row, position, head)`, in float64."""
        q = self.q.double().numpy()
        out, total = np.zeros(q.shape), np.full(q.shape[:2], -inf)
        for b, t, at in self.places():
            for h in range(q.shape[1]):
                rows = keys(b, t, at, h)
                if len(rows):
                    s = scale * rows @ q[t, h]
                    p = np.exp(s - s.max())
                    out[t, h], total[t, h] = p @ rows / p.sum(), s.max() + np.log(p.sum())
        return out, total


CONSTANTS = ("size", "pool", "mask", "order")


def run(operator: Any, data: Batch, schedule: Schedule | None = None, **arguments: Any) -> dict[str, Tensor]:
    """The operator's outputs; constants stand among the arguments."""
    constants = {n: x for n, x in arguments.items() if n in CONSTANTS}
    given = {n: x for n, x in arguments.items() if n not in CONSTANTS}
    return tilewright.run(operator, {"q": data.q, **given}, data.offsets, constants=constants, schedule=schedule)


# ---- entries ---------------------------------------------------------------------------------------------------------


@op
def own(q: Rows["head", "dim"], slots: Rows["slot", i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    out = softmax(dot(q, keys)) @ keys
    return {"out": out, "lse": lse(out)}


@LISTS
def test_lists_of_the_cache_that_defines_positions(schedule: Schedule, rng: np.random.Generator) -> None:
    """Entries are keys of the sequence, this call's rows among them."""
    data = Batch(rng)
    slots = data.lists("near")
    slots[0], slots[1, 2] = -3, 6
    seen = [[int(e) for b, t, _ in data.places() if b == s for e in slots[t] if e >= 0] for s in range(3)]
    found = run(own, data, schedule, slots=slots, cache=data.leaf(seen=seen))
    out, total = data.attended(lambda b, t, at, h: data.near.meaning[b][[int(e) for e in slots[t] if e >= 0]])
    assert_close(found["out"], out)
    assert_close(found["lse"], total)
    assert not bool(found["out"][0].any())


@LISTS
def test_a_list_of_all_keys_is_all_keys(schedule: Schedule, rng: np.random.Generator) -> None:
    """In any order, whatever else is a slot."""
    data = Batch(rng)
    slots = torch.full((8, 11), -1, dtype=torch.int32)
    for b, t, _ in data.places():
        n = data.ragged.keys(b)
        slots[t, rng.permutation(11)[:n]] = torch.arange(n, dtype=torch.int32)
    found = run(own, data, schedule, slots=slots, cache=data.leaf())
    assert_close(found["out"], data.attended(lambda b, t, at, h: data.near.meaning[b])[0])


@op(positions="near")
def sums(
    q: Rows["head", "dim"],
    slots: Rows["slot", i32],
    bias: Captured["distance"],
    near: Paged["dim"],
    far: Paged["dim"],
):
    entries = far.entries(slots)
    scores = dot(q, entries)
    one = scores * 0.0 + 1.0
    return {
        "total": sum(scores, over="key"),
        "top": max(scores, over="key"),
        "lse": logsumexp(scores),
        "rows": weights(scores) @ entries,
        "count": sum(one, over="key"),
        "keys": sum(one * to_float(key), over="key"),
        "biased": sum(one * bias[pos + key], over="key"),
    }


@LISTS
def test_every_reduction_over_a_list(schedule: Schedule, rng: np.random.Generator) -> None:
    """Sums, maxima, weights and logsumexp over what is listed; `key` is the entry, `pos` the row's position."""
    data = Batch(rng)
    slots, bias = data.lists("far"), torch.from_numpy(rng.standard_normal(40)).float()
    slots[5] = -1
    # five walks over the keys of one source would need partitions of their own
    found = run(
        sums, data, replace(schedule, partitions=1), slots=slots, bias=bias, near=data.leaf(), far=data.leaf("far", 2)
    )
    for b, t, at in data.places():
        entries = [int(e) for e in slots[t] if e >= 0]
        rows = data.far.meaning[b][entries]
        assert found["count"][t].tolist() == [len(entries)] * 2
        assert found["keys"][t].tolist() == [float(np.sum(entries))] * 2
        assert_close(found["biased"][t], [float(bias.double()[[at + e for e in entries]].sum())] * 2)
        for h in range(2):
            s = rows @ data.q[t, h].double().numpy()
            assert_close(found["total"][t, h], s.sum())
            assert_close(found["top"][t, h], s.max(initial=-inf))
            assert_close(found["lse"][t, h], np.logaddexp.reduce(s) if len(s) else -inf)
            assert_close(found["rows"][t, h], s @ rows)


@op
def where_seen(q: Rows["head", "dim"], slots: Rows["slot", i32], cache: Paged["dim"], *, mask: Const):
    keys = cache.entries(slots, where=mask)
    return softmax(dot(q, keys)) @ keys


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: k <= q,
        lambda q, k: (k <= q) & (q - k < 3),
        lambda q, k: (k == 0) | (k % 2 == 1),
        lambda q, k: k > q + 50,
    ],
    ids=["causal", "window", "odd", "none"],
)
@LISTS
def test_lists_under_a_predicate(mask: Any, schedule: Schedule, rng: np.random.Generator) -> None:
    """Of those listed, only what the predicate shows."""
    data = Batch(rng)
    slots = data.lists("near")

    def keys(b: int, t: int, at: int, h: int) -> Floats:
        return data.near.meaning[b][[int(e) for e in slots[t] if e >= 0 and mask(at, int(e))]]

    found = run(where_seen, data, schedule, slots=slots, cache=data.leaf(), mask=mask)
    assert_close(found["out"], data.attended(keys)[0])


@op
def by_heads(q: Rows["head", "dim"], slots: Rows["head", "slot", i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


@LISTS
def test_heads_with_lists_of_their_own(schedule: Schedule, rng: np.random.Generator) -> None:
    """[row, head, slot]: one head a tile."""
    data = Batch(rng)
    slots = data.lists("near", 2)
    found = run(by_heads, data, replace(schedule, heads=1), slots=slots, cache=data.leaf())
    expected = data.attended(lambda b, t, at, h: data.near.meaning[b][[int(e) for e in slots[t, h] if e >= 0]])
    assert_close(found["out"], expected[0])
    assert_close(run(by_heads, data, slots=slots, cache=data.leaf())["out"], expected[0])
    message = "schedule field heads=2: listed entries differ from head to head, so a tile holds one head"
    with pytest.raises(IllegalSchedule) as raised:
        run(by_heads, data, replace(schedule, heads=2), slots=slots, cache=data.leaf())
    assert str(raised.value) == message


# ---- blocks ----------------------------------------------------------------------------------------------------------


@op(positions="near")
def in_blocks(
    q: Rows["head", "dim"], slots: Rows["slot", i32], near: Paged["dim"], far: Paged["dim"], *, size: Const[int]
):
    keys = far.blocks(slots, size)
    return softmax(dot(q, keys)) @ keys


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@LISTS
def test_blocks_are_their_entries(page_size: int, size: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """A block that sticks out of the leaf is what it holds; one beyond it, and a negative one, is nothing."""
    data = Batch(rng)
    slots = data.lists("far", size=size)
    slots[2, 3], slots[6, 0] = 13, 100_000

    def keys(b: int, t: int, at: int, h: int) -> Floats:
        entries = [int(s) * size + i for s in slots[t] if s >= 0 for i in range(size)]
        return data.far.meaning[b][[e for e in entries if e < data.far.counts[b]]]

    far = data.leaf("far", page_size)
    found = run(in_blocks, data, schedule, slots=slots, near=data.leaf(), far=far, size=size) if size > 1 else None
    if found is not None:
        assert_close(found["out"], data.attended(keys)[0])
        return
    with pytest.raises(ArgumentValueError, match=r"slots\[2, 3\] \(row 2, slot 3\) is 13; expected below 9, "):
        run(in_blocks, data, schedule, slots=slots, near=data.leaf(), far=far, size=size)


# ---- pools -----------------------------------------------------------------------------------------------------------


@op
def pooled(q: Rows["head", "dim"], cache: Paged["dim"], *, pool: Const[int], mask: Const = None):
    keys = cache.keys(where=mask, pool=pool)
    one = dot(q, keys) * 0.0 + 1.0
    return {"out": softmax(dot(q, keys)) @ keys, "keys": sum(one * to_float(key), over="key")}


@pytest.mark.parametrize("pool", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("windowed", [False, True])
@RANGES
def test_pools_are_seen_by_their_last_token(
    windowed: bool, pool: int, schedule: Schedule, rng: np.random.Generator
) -> None:
    """Key n stands for tokens n * pool.. and is asked about as its last one; a pool that is not whole is no key."""
    data = Batch(rng)

    def mask(q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < 4) if windowed else k <= q

    def seen(at: int, n: int) -> list[int]:
        return [j for j in range(n // pool) if mask(at, j * pool + pool - 1)]

    whole = [range(n // pool) for n in data.near.counts]
    cache = data.leaf(seen=[list(w) if data.ragged.rows[b] else [] for b, w in enumerate(whole)])
    found = run(pooled, data, replace(schedule, partitions=1), cache=cache, pool=pool, mask=mask)
    expected = data.attended(lambda b, t, at, h: data.near.meaning[b][seen(at, data.near.counts[b])])
    assert_close(found["out"], expected[0])
    for b, t, at in data.places():
        assert found["keys"][t].tolist() == [float(np.sum(seen(at, data.near.counts[b])))] * 2


# ---- concatenations --------------------------------------------------------------------------------------------------


@op(positions="near")
def joined(
    q: Rows["head", "dim"],
    slots: Rows["slot", i32],
    near: Paged["dim"],
    far: Paged["dim"],
    scale: Scalar[f32],
    *,
    order: Const,
):
    causal = near.keys(where=lambda query, key: key <= query)
    window = near.keys(where=lambda query, key: (key <= query) & (query - key < 2))
    parts = {
        "causal": causal,
        "window": window,
        "pools": near.keys(where=lambda query, key: key <= query, pool=2),
        "all far": far.keys(),
        "list": far.entries(slots),
        "same list": far.entries(slots, where=lambda query, entry: entry > 2),
        "blocks": far.blocks(slots, 2),
    }
    keys = concat(*(parts[n] for n in order))
    out = softmax(dot(q, keys) * scale) @ keys
    return {"out": out, "lse": lse(out)}


def rows_of(data: Batch, part: str, slots: Tensor, b: int, t: int, at: int) -> Floats:
    """The key rows of a part of `joined`."""
    near, far = data.near.meaning[b], data.far.meaning[b]
    listed = [int(e) for e in slots[t] if e >= 0]
    return {
        "causal": near[: at + 1],
        "window": near[np.maximum(at - 1, 0) : at + 1],
        "pools": near[: (at + 1) // 2],
        "all far": far,
        "list": far[listed],
        "same list": far[[e for e in listed if e > 2]],
        "blocks": far[[e for s in listed for e in (2 * s, 2 * s + 1) if e < len(far)]],
    }[part]


ORDERS = [
    ("causal", "list"),
    ("list", "causal"),
    ("window", "list", "causal"),
    ("list", "list"),
    ("causal", "pools", "all far"),
    ("blocks", "window", "same list", "list"),
    ("all far",),
]


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
@LISTS
def test_concatenations(order: tuple[str, ...], schedule: Schedule, rng: np.random.Generator) -> None:
    """Ranges, lists, pools and blocks of two leaves, one of them twice, in any order: one reduction over all."""
    data = Batch(rng)
    slots = data.lists("far")
    arguments = {"slots": slots, "near": data.leaf(page_size=2), "far": data.leaf("far", 5), "scale": 0.5}
    found = run(joined, data, schedule, order=order, **arguments)
    out, total = data.attended(
        lambda b, t, at, h: np.concatenate([rows_of(data, n, slots, b, t, at) for n in order]), 0.5
    )
    assert_close(found["out"], out)
    assert_close(found["lse"], total)


@op
def cut(q: Rows["head", "dim"], cache: Paged["dim"], at: Scalar[i32]):
    keys = concat(
        cache.keys(where=lambda query, key: (key <= query) & (key < at)),
        cache.keys(where=lambda query, key: (key <= query) & (key >= at)),
    )
    out = softmax(dot(q, keys)) @ keys
    return {"out": out, "lse": lse(out), "top": max(dot(q, keys), over="key")}


@pytest.mark.parametrize("at", [-1, 0, 1, 3, 7, 100])
@RANGES
def test_a_range_in_two_pieces_is_the_range(at: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """Wherever it is cut, and where one of the pieces is empty."""
    data = Batch(rng)
    found = run(cut, data, replace(schedule, partitions=1), cache=data.leaf(), at=at)
    out, total = data.attended(lambda b, t, at, h: data.near.meaning[b][: at + 1])
    assert_close(found["out"], out)
    assert_close(found["lse"], total)
    for b, t, pos_ in data.places():
        s = data.near.meaning[b][: pos_ + 1] @ data.q[t].double().numpy().T
        assert_close(found["top"][t], s.max(0))


@op
def alone(q: Rows["head", "dim"], cache: Paged["dim"]):
    keys = concat(cache.keys())
    return softmax(dot(q, keys)) @ keys


@op
def plain(q: Rows["head", "dim"], cache: Paged["dim"]):
    keys = cache.keys()
    return softmax(dot(q, keys)) @ keys


@RANGES
def test_a_concatenation_of_one(schedule: Schedule, rng: np.random.Generator) -> None:
    """Is what it is of."""
    data = Batch(rng)
    cache = data.leaf()
    one, other = (run(f, data, schedule, cache=cache)["out"] for f in (alone, plain))
    assert_same_bits(one, other)


@op(positions="near")
def values_apart(
    q: Rows["head", "dim"], slots: Rows["slot", i32], near: Paged["dim", "wide"], far: Paged["dim", "wide"]
):
    keys = concat(near.keys(), far.entries(slots))
    return softmax(dot(q, keys)) @ keys.v


@LISTS
def test_values_of_another_width(schedule: Schedule, rng: np.random.Generator) -> None:
    """Lists and concatenations read values as well as keys."""
    data, values = Batch(rng), Batch(rng, width=5)
    slots = data.lists("far")
    leaves = {}
    for name in ("near", "far"):
        k = data.leaf(name)
        v = torch.full((*k.keys.shape[:3], 5), torch.nan)
        stored_: Stored = getattr(values, name)
        for b, rows in enumerate(stored_.rows):
            for j, row in enumerate(rows):
                if data.ragged.rows[b]:
                    v[int(k.lookup_table[b, j // 3]), j % 3, 0] = row
        leaves[name] = replace(k, values=v)
    found = run(values_apart, data, schedule, slots=slots, **leaves)["out"]
    for b, t, _ in data.places():
        entries = [int(e) for e in slots[t] if e >= 0]
        keys = np.concatenate([data.near.meaning[b], data.far.meaning[b][entries]])
        wide = np.concatenate([values.near.meaning[b], values.far.meaning[b][entries]])
        s = keys @ data.q[t].double().numpy().T
        p = np.exp(s - s.max(0))
        assert_close(found[t], (p / p.sum(0)).T @ wide)


@op(positions="near")
def mixed(q: Rows["head", "dim"], slots: Rows["slot", i32], near: Paged["dim"], far: Paged["dim"]):
    keys = concat(near.keys(where=lambda query, key: key <= query), far.entries(slots))
    return softmax(dot(q, keys)) @ keys


@LISTS
def test_formats_of_leaves_may_differ(schedule: Schedule, rng: np.random.Generator) -> None:
    """A float8 leaf with scales beside a bfloat16 one."""
    data, other = Batch(rng, dtype=F8), Batch(rng, dtype=torch.bfloat16)
    data.far = other.far
    slots = data.lists("far")
    found = run(mixed, data, schedule, slots=slots, near=data.leaf(), far=data.leaf("far"))["out"]

    def keys(b: int, t: int, at: int, h: int) -> Floats:
        return np.concatenate([rows_of(data, part, slots, b, t, at) for part in ("causal", "list")])

    assert_close(found, data.attended(keys)[0])


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_a_default_schedule_holds_one_row(rng: np.random.Generator) -> None:
    """Where rows list what they see, tiles of more are refused, and the default is of one."""
    data = Batch(rng)
    slots = data.lists("near")
    assert run(own, data, slots=slots, cache=data.leaf())["out"].shape == (8, 2, 8)
    with pytest.raises(IllegalSchedule) as raised:
        run(own, data, Schedule(rows=2), slots=slots, cache=data.leaf())
    assert str(raised.value) == (
        "schedule field rows=2: listed entries differ from row to row, so a tile holds one row"
    )


@pytest.mark.parametrize("operator", [where_seen, in_blocks], ids=["entries(where=)", "blocks"])
def test_buffers_are_untouched_when_the_nest_refuses(operator: Any, rng: np.random.Generator) -> None:
    """What only the running nest can know, such as a page that a block needs, is refused before anything is written."""
    data = Batch(rng)
    name = "cache" if operator is where_seen else "far"
    slots = torch.zeros(8, 3, dtype=torch.int32)
    slots[7, 2] = 4 if operator is where_seen else 1
    leaf = data.leaf("near" if operator is where_seen else "far")
    table = leaf.lookup_table.clone()
    table[2, 1] = 50
    arguments: dict[str, Any] = {"q": data.q, "slots": slots, name: replace(leaf, lookup_table=table)}
    constants: dict[str, Any] = {"mask": lambda q, k: k <= q}
    if operator is in_blocks:
        arguments["near"], constants = data.leaf(), {"size": 3}
    buffer = torch.full((8, 2, 8), 77.0)
    with pytest.raises(OutOfBounds, match=rf"read of {name}_k at index 50 of axis 0, which has {leaf.num_pages}"):
        tilewright.run(operator, arguments, data.offsets, constants=constants, outputs={"out": buffer})
    assert bool((buffer == 77).all())


def test_unchecked_indices_past_the_cache_are_unused(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the cache that defines positions, whose entries are this call's rows too."""
    data = Batch(rng)
    slots = data.lists("near")
    bad = slots.clone()
    slots[1, 2], slots[2, 0], slots[7, 6] = -1, -1, -1
    bad[1, 2], bad[2, 0], bad[7, 6] = 7, (1 << 31) - 1, 5
    cache = data.leaf()
    expected = run(own, data, slots=slots, cache=cache)["out"]
    with pytest.raises(ArgumentValueError, match=r"slots\[1, 2\] \(row 1, slot 2\) is 7; expected below 7, "):
        run(own, data, slots=bad, cache=cache)
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    assert_same_bits(run(own, data, slots=bad, cache=cache)["out"], expected)


def test_contents_of_listed_rows_are_checked(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """TILEWRIGHT_VALIDATE=1 names a listed row that is not finite, and minds no other."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    data = Batch(rng)
    slots = torch.tensor([[0, -1, 2, -1]] * 8, dtype=torch.int32)
    cache = data.leaf(seen=[[0, 2], [], [0, 2]])
    run(own, data, slots=slots, cache=cache)
    slots[4, 3] = 1
    with pytest.raises(NotFinite, match=r"cache_k of sequence 2, key 1: a visible slot holds NaN or infinity"):
        run(own, data, slots=slots, cache=cache)


@op
def as_stored(q: Rows["head", "dim"], cache: Paged["dim", f8e4m3]):
    keys = cache.keys()
    return max(dot(q, keys) * keys.scale, over="key")


@op
def with_scale(q: Rows["head", "dim"], cache: Paged["dim"]):
    keys = cache.keys()
    return max(dot(q, keys) * keys.scale, over="key")


@RANGES
def test_stored_rows_and_their_scale(schedule: Schedule, rng: np.random.Generator) -> None:
    """A cache declared by its stored dtype gives what is stored, and its scale apart."""
    data = Batch(rng, dtype=F8)
    found = run(as_stored, data, replace(schedule, partitions=1), cache=data.leaf())["out"]
    for b, t, _ in data.places():
        assert_close(found[t], (data.near.meaning[b] @ data.q[t].double().numpy().T).max(0))


def test_caches_of_another_format(rng: np.random.Generator) -> None:
    """A declared dtype and a row's one scale are checked against the cache, by name."""
    data = Batch(rng)
    with pytest.raises(ArgumentDTypeError) as dtype:
        run(as_stored, data, cache=data.leaf())
    assert str(dtype.value) == "as_stored: cache has dtype float32; expected float8_e4m3fn"
    with pytest.raises(ArgumentError) as none:
        run(with_scale, data, cache=data.leaf())
    assert str(none.value) == "with_scale: cache has no scales; expected one scale per key of 8"
    data.near = stored(rng, [7, 6, 5], 8, F8, granularity=4)
    for operator in (as_stored, with_scale):
        with pytest.raises(ArgumentError) as finer:
            run(operator, data, cache=data.leaf())
        assert str(finer.value) == f"{operator.name}: cache has a scale per 4 values; expected one scale per key of 8"


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1)])
def test_lengths_of_another_batch(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """One length for each sequence, of a leaf that was not made by a cache as well."""
    data = Batch(rng)
    slots = data.lists("near")
    bad = replace(data.leaf(), cache_lengths=torch.ones(shape, dtype=torch.int32))
    with pytest.raises(ArgumentError, match=r"^own: cache.cache_lengths has .*; expected .*\[seq=3\]$") as raised:
        run(own, data, slots=slots, cache=bad)
    assert isinstance(raised.value, ArgumentShapeError) == (len(shape) == 1)


# ---- errors at the author's line -------------------------------------------------------------------------------------


def refused(fn: Callable[..., Any], error: type[AuthorError], message: str, marked: str, **options: Any) -> None:
    """Tracing or lowering raises exactly this message, with carets under exactly this text of the author's."""
    positions = options.pop("positions", None)
    with pytest.raises(error) as raised:
        build(op(positions=positions)(fn).trace(**options))
    first, excerpt, carets = str(raised.value).split("\n")
    place_, _, said = first.partition(": ")
    assert said == message
    assert excerpt[carets.index("^") : carets.rindex("^") + 1] == marked
    assert place_.split(":")[0].endswith("test_lists.py")


def of_floats(q: Rows["dim"], slots: Rows["slot"], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


def of_conditions(q: Rows["dim"], slots: Rows["slot", boolean], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


@pytest.mark.parametrize(("fn", "got"), [(of_floats, "float32"), (of_conditions, "bool")])
def test_indices_are_integers(fn: Callable[..., Any], got: str) -> None:
    """By their declaration."""
    message = f"cache.entries does not take {got}; indices are integers"
    refused(fn, DTypeMismatch, message, "cache.entries(slots)")


def without_rows(q: Rows["dim"], slots: Captured["slot", i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


def of_rows_alone(q: Rows["dim"], slots: Rows[i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


def turned(q: Rows["dim"], slots: Captured["slot", "row", i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


def of_heads(q: Rows["head", "dim"], slots: Rows["head", i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


def of_groups(q: Rows["head", "dim"], slots: Rows["group", "slot", i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


def of_sums(q: Rows["dim"], slots: Rows["slot", i32], cache: Paged["dim"]):
    keys = cache.entries(slots + 1)
    return softmax(dot(q, keys)) @ keys


def of_one(q: Rows["dim"], slots: Rows["slot", i32], cache: Paged["dim"]):
    keys = cache.entries(slots[0])
    return softmax(dot(q, keys)) @ keys


def of_a_number(q: Rows["dim"], cache: Paged["dim"]):
    keys = cache.entries(3)
    return softmax(dot(q, keys)) @ keys


@pytest.mark.parametrize(
    ("fn", "got", "marked"),
    [
        (without_rows, "slots[slot]", "cache.entries(slots)"),
        (of_rows_alone, "slots[row]", "cache.entries(slots)"),
        (turned, "slots[slot, row]", "cache.entries(slots)"),
        (of_heads, "slots[row, head]", "cache.entries(slots)"),
        (of_groups, "slots[row, group, slot]", "cache.entries(slots)"),
        (of_sums, "(slots[row, slot] + 1)", "cache.entries(slots + 1)"),
        (of_one, "slots[row, slot=0]", "cache.entries(slots[0])"),
        (of_a_number, "3", "cache.entries(3)"),
    ],
    ids=lambda x: x.__name__ if callable(x) else None,
)
def test_lists_are_parameters(fn: Callable[..., Any], got: str, marked: str) -> None:
    """Whole ones, rows first and slots last."""
    refused(fn, AxisMismatch, f"cache.entries: expected a parameter [row, slot], got {got}", marked)


def slots_of_features(q: Rows["dim"], slots: Rows["dim", i32], cache: Paged["dim"]):
    keys = cache.entries(slots)
    return softmax(dot(q, keys)) @ keys


def test_slots_have_an_axis_of_their_own() -> None:
    """Their number is known when the operator runs, a tile's is not."""
    message = "cache.entries: 'slots' counts its slots by axis 'dim', which other values have too; rename it"
    refused(slots_of_features, AxisMismatch, message, "cache.entries(slots)")


def in_blocks_of(q: Rows["dim"], slots: Rows["slot", i32], cache: Paged["dim"], *, size: Const):
    keys = cache.blocks(slots, size)
    return softmax(dot(q, keys)) @ keys


def in_pools_of(q: Rows["dim"], cache: Paged["dim"], *, size: Const):
    keys = cache.keys(pool=size)
    return softmax(dot(q, keys)) @ keys


SIZES = [
    (0, "int 0"),
    (-1, "int -1"),
    (2.0, "float 2.0"),
    (True, "bool True"),
    (None, "NoneType None"),
    ("2", "str '2'"),
]


@pytest.mark.parametrize(("size", "got"), SIZES)
def test_sizes_are_whole_numbers(size: object, got: str) -> None:
    """Of pools and of blocks, at least 1."""
    message = f"pool: expected a whole number, at least 1, got {got}"
    refused(in_pools_of, NotTraceable, message, "cache.keys(pool=size)", size=size)
    message = f"blocks: expected a whole size, at least 1, got {got}"
    refused(in_blocks_of, NotTraceable, message, "cache.blocks(slots, size)", size=size)


def predicate_of_numbers(q: Rows["dim"], slots: Rows["slot", i32], cache: Paged["dim"]):
    keys = cache.entries(slots, where=lambda query, entry: entry)
    return softmax(dot(q, keys)) @ keys


def test_predicates_give_conditions() -> None:
    """Of lists as of ranges."""
    message = "cache.entries(where=...) does not take int32; a predicate gives a condition"
    refused(predicate_of_numbers, DTypeMismatch, message, "cache.entries(slots, where=lambda query, entry: entry)")


def other_keys(q: Rows["dim"], a: Paged["dim"], b: Paged["other"]):
    return max(dot(q, concat(a.keys(), b.keys())), over="key")


def other_values(q: Rows["dim"], a: Paged["dim"], b: Paged["dim", "wide"]):
    return max(dot(q, concat(a.keys(), b.keys())), over="key")


def beside_another(q: Rows["dim"], a: Paged["dim"], b: Paged["dim"]):
    return max(dot(q, concat(a.keys(), a.keys().beside(b))), over="key")


@pytest.mark.parametrize(
    ("fn", "problem", "marked"),
    [
        (other_keys, "key rows have axes [dim] and [other]", "concat(a.keys(), b.keys())"),
        (other_values, "value rows have axes [dim] and [wide]", "concat(a.keys(), b.keys())"),
        (
            beside_another,
            "rows of b that stand beside another cache's cannot be concatenated",
            "concat(a.keys(), a.keys().beside(b))",
        ),
    ],
)
def test_rows_that_cannot_be_concatenated(fn: Callable[..., Any], problem: str, marked: str) -> None:
    """Each with what keeps them apart."""
    refused(fn, AxisMismatch, f"concat: {problem}", marked, positions="a")


def concat_of_fields(q: Rows["dim"], cache: Paged["dim"]):
    return max(dot(q, concat(cache.keys(), cache.keys().k)), over="key")


def concat_of_a_cache(q: Rows["dim"], cache: Paged["dim"]):
    return max(dot(q, concat(cache)), over="key")


@pytest.mark.parametrize(
    ("fn", "got", "marked"),
    [
        (
            concat_of_fields,
            "Field <keys0.k[key, dim]: float32[key, dim]>",
            "concat(cache.keys(), cache.keys().k)",
        ),
        (concat_of_a_cache, "Leaf <paged cache cache; its rows are cache.keys(...)>", "concat(cache)"),
    ],
)
def test_what_is_concatenated_are_key_rows(fn: Callable[..., Any], got: str, marked: str) -> None:
    """Neither their fields nor the cache they come from."""
    message = f"concat: expected key rows of caches, such as cache.keys(), got {got}"
    refused(fn, NotTraceable, message, marked)


def test_every_operator_here_agrees_across_permutations(rng: np.random.Generator) -> None:
    """Slots of a list in another order change a result by rounding alone."""
    data = Batch(rng)
    slots = data.lists("far")
    arguments: Any = {"near": data.leaf(), "far": data.leaf("far"), "scale": 0.5, "order": ("causal", "list")}
    first = run(joined, data, slots=slots, **arguments)["out"]
    for permuted in itertools.islice(itertools.permutations(range(7)), 1, 5000, 1700):
        assert_close(run(joined, data, slots=slots[:, list(permuted)], **arguments)["out"], first.double().numpy())
