# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, no-untyped-def"
"""Attention under any schedule and any mask is the float64 reference, and depends on nothing that it should not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.batches import FORMS, Content, content, place
from support.properties import property_test
from support.reference import NAMED, WINDOWED, At, Sees, assert_close, assert_same_bits, flash
from support.running import SCHEDULES, Predicate, attend, attention, each, mask

import tilewright
from tilewright.dsl import Paged, PerHead, Rows, Scalar, Tensor, dot, head, i32, kv_head, num_keys, op, seq, softmax
from tilewright.dsl.schedule import Schedule

pytestmark = pytest.mark.both_targets(slow=True)

PAST, ROWS = (7, 0, 0, 21, 3), (5, 6, 0, 1, 2)


def named_mask(name: str, window: int) -> tuple[Predicate | None, Sees]:
    return mask(name, window if name in WINDOWED else None), NAMED[name](window)


# ---- named masks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "window"), [(n, w) for n in NAMED for w in ((1, 4, 8) if n in WINDOWED else (1,))])
@each(quick=1)
def test_named_masks(name: str, window: int, schedule: Schedule, rng: np.random.Generator) -> None:
    """Every named mask, windows of one key and of whole tiles among them; what no row sees is poison."""
    where, sees = named_mask(name, window)
    data = content(rng, PAST, ROWS, heads=6, kv_heads=2)
    sinks = torch.tensor([-inf, 0.0, 3.0, inf, -2.0, 0.5])
    out, lse = attend(
        data, page_size=3, sees=sees, where=where, schedule=schedule, scale=0.4, sink=sinks, seed=int(rng.integers(99))
    )
    expected, lse_expected = flash(data.ragged, data.q64, data.keys, data.values, sees, 0.4, sinks.tolist())
    assert_close(out, expected)
    assert_close(lse, lse_expected)


@st.composite
def schedules(draw: st.DrawFn, group: int) -> Schedule:
    return Schedule(
        rows=draw(st.sampled_from([1, 2, 3, 5, 16])),
        heads=draw(st.sampled_from([None, *(h for h in range(1, group + 1) if group % h == 0)])),
        keys=draw(st.sampled_from([1, 3, 4, 8, 33])),
        partitions=draw(st.sampled_from([1, 1, 2, 5])),
        masks=draw(st.sampled_from(["branch", "split", "always"])),
    )


LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), min_size=1, max_size=4)


@pytest.mark.slow
@property_test(st.data(), interpreted=250, native=80)
def test_any_schedule_and_batch(data: st.DataObject) -> None:
    """Any legal schedule, page size, grouping and raggedness, with and without sinks."""
    name = data.draw(st.sampled_from(sorted(NAMED)), "mask")
    where, sees = named_mask(name, data.draw(st.sampled_from([1, 2, 5, 16]), "window"))
    heads, kv_heads = data.draw(st.sampled_from([(1, 1), (4, 4), (6, 2), (7, 1)]), "heads")
    schedule = data.draw(schedules(heads // kv_heads), "schedule")
    lengths = data.draw(LENGTHS, "lengths")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    batch = content(rng, *zip(*lengths, strict=True), heads=heads, kv_heads=kv_heads)
    sinks = torch.from_numpy(rng.choice([-inf, inf, 0.0, 1.5, -40.0], heads)).float()
    sink = data.draw(st.sampled_from([None, sinks]), "sink")
    out, lse = attend(
        batch,
        page_size=data.draw(st.sampled_from([1, 4, 7]), "page size"),
        sees=sees,
        where=where,
        schedule=schedule,
        scale=0.5,
        sink=sink,
    )
    given_sinks = None if sink is None else sink.tolist()
    expected, lse_expected = flash(batch.ragged, batch.q64, batch.keys, batch.values, sees, 0.5, given_sinks)
    assert_close(out, expected)
    assert_close(lse, lse_expected)


# ---- predicates of the author's own ----------------------------------------------------------------------------------


@op
def prefix_lm(q: Rows["head", "dim"], kv: Paged["dim"], prefix: Scalar[i32]):
    keys = kv.keys(where=lambda query, key: (key <= query) | (key < prefix))
    return softmax(dot(q, keys)) @ keys.v


@op
def window_per_head(q: Rows["head", "dim"], kv: Paged["dim"], window: PerHead[i32]):
    keys = kv.keys(where=lambda query, key: (key <= query) & (query - key < window))
    return softmax(dot(q, keys)) @ keys.v


@op
def tree(q: Rows["head", "dim"], kv: Paged["dim"], bits: Rows["word", i32]):
    keys = kv.keys(where=lambda query, key: (bits[key // 32] >> (key % 32)) & 1 == 1)
    return softmax(dot(q, keys)) @ keys.v


@op
def documents(q: Rows["head", "dim"], kv: Paged["dim"], ids: Tensor["seq", "token", i32]):
    keys = kv.keys(where=lambda query, key: (key <= query) & (ids[query] == ids[key]))
    return softmax(dot(q, keys)) @ keys.v


@op
def one_limit_per_row(q: Rows["head", "dim"], kv: Paged["dim"], low: Rows[i32], high: Rows[i32]):
    keys = kv.keys(where=lambda query, key: (low <= key) & (key < high))
    return softmax(dot(q, keys)) @ keys.v


def plain(predicate: Predicate) -> Any:
    @op
    def masked(q: Rows["head", "dim"], kv: Paged["dim"]):
        keys = kv.keys(where=predicate)
        return softmax(dot(q, keys)) @ keys.v

    return masked


@dataclass(frozen=True)
class Case:
    """An operator with a mask, what it captures, and what it shows."""

    operator: Any
    sees: Sees
    captured: dict[str, object] = field(default_factory=dict)


WINDOWS = torch.tensor([1, 4, 9, 100], dtype=torch.int32)
LIMITS = torch.tensor([[3, 0, 9, 0, 2, 5, 0, 0, 1, 4, 0, 21, 2, 2], [8, 9, 4, 12, 99, 0, 1, 1, 6, 5, 6, 22, 5, 2]])
MASK_BITS = torch.randint(0, 2, (14, 64), generator=torch.Generator().manual_seed(5)).bool()
DOCUMENTS = torch.arange(5 * 26).reshape(5, 26) // 7 % 3


def packed(bits: torch.Tensor) -> torch.Tensor:
    """32 bits a word, the 32nd as the sign."""
    weights = torch.tensor([1 << n for n in range(32)], dtype=torch.int64)
    words = (bits.reshape(len(bits), -1, 32).to(torch.int64) * weights).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def parity(at: At) -> Any:
    return (at.key + at.head + at.seq + at.head // 2) % 2 == 0


CASES: dict[str, Case] = {
    "sinks and window": Case(
        plain(lambda q, k: (k <= q) & ((k < 2) | (q - k < 5))),
        lambda at: (at.key <= at.pos) & ((at.key < 2) | (at.pos - at.key < 5)),
    ),
    "dilated": Case(
        plain(lambda q, k: (k <= q) & ((q - k) % 3 == 0)),
        lambda at: (at.key <= at.pos) & ((at.pos - at.key) % 3 == 0),
    ),
    "every third key": Case(plain(lambda q, k: k % 3 == 0), lambda at: at.key % 3 == 0),
    "all but a band": Case(
        plain(lambda q, k: (k < q - 4) | (k > q + 1)), lambda at: (at.key < at.pos - 4) | (at.key > at.pos + 1)
    ),
    "last keys": Case(plain(lambda q, k: k >= num_keys - 3), lambda at: at.key >= at.num_keys - 3),
    "never": Case(plain(lambda q, k: (k < q) & (k > q)), lambda at: False),
    "never, as a constant": Case(plain(lambda q, k: False), lambda at: False),
    "one row": Case(plain(lambda q, k: (k <= q) & (q == 9)), lambda at: (at.key <= at.pos) & (at.pos == 9)),
    "a negated union": Case(
        plain(lambda q, k: ~((k > q) | (q - k >= 6) | (k == 4))),
        lambda at: ~((at.key > at.pos) | (at.pos - at.key >= 6) | (at.key == 4)),
    ),
    "by head, sequence and kv head": Case(plain(lambda q, k: (k + head + seq + kv_head) % 2 == 0), parity),
    "prefix": Case(prefix_lm, lambda at: (at.key <= at.pos) | (at.key < 9), {"prefix": 9}),
    "no prefix": Case(prefix_lm, lambda at: at.key <= at.pos, {"prefix": -3}),
    "window per head": Case(
        window_per_head,
        lambda at: (at.key <= at.pos) & (at.pos - at.key < int(WINDOWS[at.head])),
        {"window": WINDOWS},
    ),
    "packed tree": Case(tree, lambda at: MASK_BITS[at.row, : at.num_keys].numpy(), {"bits": packed(MASK_BITS)}),
    "documents": Case(
        documents,
        lambda at: (at.key <= at.pos) & (DOCUMENTS[at.seq].numpy()[at.key] == int(DOCUMENTS[at.seq, at.pos])),
        {"ids": DOCUMENTS.to(torch.int32)},
    ),
    "limits per row": Case(
        one_limit_per_row,
        lambda at: (int(LIMITS[0, at.row]) <= at.key) & (at.key < int(LIMITS[1, at.row])),
        {"low": LIMITS[0].to(torch.int32), "high": LIMITS[1]},
    ),
}


@pytest.mark.parametrize("name", CASES)
@each(quick=2)
def test_predicates_of_the_authors_own(name: str, schedule: Schedule, rng: np.random.Generator) -> None:
    """Unions, opaque predicates, captured tensors, predicates that show nothing: equal, with all they hide poisoned."""
    case = CASES[name]
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2)
    cache = place(data, rng, page_size=3, sees=case.sees)
    given_args = {"q": data.q, "kv": cache.layer(0), **case.captured}
    found = tilewright.run(case.operator, given_args, data.offsets, schedule=schedule)
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, case.sees, 1.0)
    assert_close(found["out"], expected)


# ---- three ways of calling -------------------------------------------------------------------------------------------


def in_calls(whole: Content, calls: Sequence[int], run: Callable[[Content], torch.Tensor]) -> torch.Tensor:
    """The rows of a batch of one sequence, a few at a time."""
    found = []
    for n, rows in enumerate(calls):
        past, q = sum(calls[:n]), whole.q[sum(calls[:n]) :][:rows]
        ragged = type(whole.ragged)((past,), (rows,))
        k, v = (tuple(x[: past + rows] for x in xs) for xs in (whole.k, whole.v))
        found.append(run(Content(ragged, q, k, v, None, None, None)))
    return torch.cat(found)


@pytest.mark.parametrize("name", [n for n in NAMED if n not in ("null", "sliding_window_noncausal", "chunked")])
@each(quick=1)
def test_prefill_is_decode_is_chunks(name: str, schedule: Schedule, rng: np.random.Generator) -> None:
    """For masks that show no later key, how rows are spread over calls changes nothing."""
    where, sees = named_mask(name, 4)
    data = content(rng, [0], [17], heads=4, kv_heads=2)

    def run(part: Content) -> torch.Tensor:
        return attend(part, page_size=3, sees=sees, where=where, schedule=schedule)[0]

    prefill = run(data)
    for calls in ([1] * 17, [6, 4, 7], [16, 1], [0, 17]):
        assert_close(in_calls(data, calls, run), prefill.double().numpy())


# ---- what must not matter --------------------------------------------------------------------------------------------


@each(quick=2)
def test_pages_in_any_order(schedule: Schedule, rng: np.random.Generator) -> None:
    """Where pages lie, and what unused table entries hold, changes no bit."""
    where, sees = named_mask("sliding_window_causal", 6)
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2)
    first, *others = (
        attend(data, page_size=3, sees=sees, where=where, schedule=schedule, seed=seed) for seed in range(4)
    )
    for out, lse in others:
        assert_same_bits(out, first[0])
        assert_same_bits(lse, first[1])


@each(quick=2)
def test_other_sequences_change_nothing(schedule: Schedule, rng: np.random.Generator) -> None:
    """A sequence gives in a batch, bit for bit, what it gives alone."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2)
    out, lse = attend(data, where=mask("causal"), schedule=schedule)
    for b in range(data.ragged.batch):
        first, end = data.ragged.offsets[b : b + 2]
        alone = attend(data.only(b), where=mask("causal"), schedule=schedule)
        assert_same_bits(out[first:end], alone[0])
        assert_same_bits(lse[first:end], alone[1])


@pytest.mark.parametrize(
    ("dtype", "granularity"), [(torch.float32, None), (torch.bfloat16, None), (torch.float8_e4m3fn, 5)]
)
@pytest.mark.parametrize("form", [f for f in FORMS if f != "blocks"])
def test_memory_layout_changes_no_bit(
    form: str, dtype: torch.dtype, granularity: int | None, rng: np.random.Generator
) -> None:
    """Pools that are slices of larger buffers, heads before slots, page lists: the same bits as contiguous blocks."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2, dtype=dtype, granularity=granularity)
    for schedule in (SCHEDULES[0], SCHEDULES[2]):
        results = [
            attention(
                data.q,
                data.offsets,
                place(data, rng, page_size=3, form=f, layers=3, layer=1),
                layer=1,
                where=mask("causal"),
                schedule=schedule,
            )
            for f in ("blocks", form)
        ]
        assert_same_bits(results[0][0], results[1][0])
        assert_same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("threads", ["2", "4"])
@each(quick=2)
def test_threads_change_no_bit(
    threads: str, schedule: Schedule, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker or several, each with its own share of tiles: the same bits."""
    data = content(rng, [64, 0, 130], [33, 70, 1], heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16)
    cache = place(data, rng, page_size=16)
    schedule = Schedule(rows=schedule.rows * 8, heads=schedule.heads, keys=64, partitions=schedule.partitions)

    def run(count: str) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setenv("TILEWRIGHT_THREADS", count)
        return attention(data.q, data.offsets, cache, where=mask("causal"), schedule=schedule)

    one, several = run("1"), run(threads)
    assert_same_bits(one[0], several[0])
    assert_same_bits(one[1], several[1])
