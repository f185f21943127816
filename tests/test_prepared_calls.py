"""Calls made again on native code: the same results and refusals as the first, whatever has changed between."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.prepared import (
    DIM,
    HEADS,
    Call,
    call,
    flash,
    indexer,
    indexer_call,
    ints,
    latent,
    latent_call,
    ordinary,
    outcome,
    same,
)
from torch import Tensor

from tilewright import run
from tilewright.codegen_cache import calls, prepared
from tilewright.codegen_cache import launch as cached_launch
from tilewright.codegen_cache.compilers import find_compiler
from tilewright.codegen_cache.programs import programs
from tilewright.dsl.schedule import Schedule
from tilewright.ops import (
    PagedKVCache,
)
from tilewright.ops import flash_attention as flash_module
from tilewright.ops import indexer as indexer_module
from tilewright.ops import latent_attention as latent_module
from tilewright.ops.flash_attention import flash_attention

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWRIGHT_TARGET", "cpu")
    prepared._CALLS.clear()
    yield
    prepared._CALLS.clear()


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call so far was made the fast way; not those that are the first of their kind."""
    seen: list[bool] = []
    real = prepared.again

    def watched(facts: Any, budget_bytes: int) -> Any:
        was_known = facts is not None and facts[0] in prepared._CALLS
        found = real(facts, budget_bytes)
        if was_known:
            seen.append(found is not None)
        return found

    for module in (cached_launch, flash_module, latent_module, indexer_module):
        monkeypatch.setattr(module, "again", watched)
    return seen


# ---- hits and misses -------------------------------------------------------------------------------------------------


def test_new_values_are_a_hit(hits: list[bool]) -> None:
    """Other rows, offsets, lengths, tables, scales, layers: the same as a first call, and nothing is compiled."""
    c = call()
    flash(c)
    before = len(programs())
    other = call(1)
    other["kv_collection"].lookup_table.copy_(torch.tensor([[0, 3, 7], [5, 4, -9]]))
    other["kv_collection"].cache_lengths.copy_(ints(3, 6))
    changes: list[Call] = [other, c | {"scale": 0.25}, c | {"layer_idx": 0}, c | {"input_row_offsets": ints(0, 2, 3)}]
    for n, changed in enumerate(changes, 1):
        found = flash(changed)
        assert hits == [True] * n
        same(found, ordinary(changed))
    assert len(programs()) == before


FAULTS: dict[str, Callable[[Call], None]] = {
    "offsets from 1": lambda c: c["input_row_offsets"].copy_(ints(1, 1, 3)),
    "offsets out of order": lambda c: c["input_row_offsets"].copy_(ints(0, 4, 3)),
    "offsets that end early": lambda c: c["input_row_offsets"].copy_(ints(0, 1, 2)),
    "a negative length": lambda c: c["kv_collection"].cache_lengths.copy_(ints(5, -1)),
    "a length beyond the table": lambda c: c["kv_collection"].cache_lengths.copy_(ints(12, 2)),
    "a huge length": lambda c: c["kv_collection"].cache_lengths.copy_(ints(5, 2**31 - 1)),
    "a negative page": lambda c: c["kv_collection"].lookup_table[1, 0].fill_(-1),
    "a page past the pool": lambda c: c["kv_collection"].lookup_table[0, 1].fill_(6),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_values_are_refused_as_at_first(fault: str, hits: list[bool]) -> None:
    c = call() | {"output": torch.zeros(3, HEADS, DIM)}
    flash(c)
    c["output"].fill_(7.0)
    FAULTS[fault](c)
    found = outcome(c)
    assert isinstance(found, str)
    assert hits == [False]
    assert (c["output"] == 7.0).all()
    same(found, ordinary(c))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_integer_types_and_strides(dtype: torch.dtype, hits: list[bool]) -> None:
    """Index tensors of each type, every second element of a larger one."""
    c = call()
    table = c["kv_collection"].lookup_table.clamp(min=0).repeat_interleave(2, 1).to(dtype)[:, ::2]
    lengths = ints(5, 0, 2, 0).to(dtype)[::2]
    blocks = torch.randn(6, 2, 2, 4, 2, DIM, generator=torch.Generator().manual_seed(0))
    c |= {"kv_collection": PagedKVCache(blocks, table, lengths), "input_row_offsets": ints(0, 1, 3).to(dtype)}
    expected = ordinary(c)
    flash(c)
    same(outcome(c), expected)
    assert hits == [True]
    bad = ints(5, 0, 40, 0).to(dtype)[::2]
    wrong = c | {"kv_collection": PagedKVCache(blocks, table, bad)}
    same(outcome(wrong), ordinary(wrong))
    assert hits == [True, False]


CHANGES: dict[str, Call] = {
    "strides": {"q": torch.randn(3, 2 * HEADS, DIM)[:, ::2]},
    "a dtype": {"q": torch.randn(3, HEADS, DIM).bfloat16()},
    "rows": {"q": torch.randn(4, HEADS, DIM), "input_row_offsets": ints(0, 1, 4)},
    "wide offsets": {"input_row_offsets": ints(0, 1, 3, dtype=torch.int64)},
    "a sink": {"sink_weights": torch.zeros(HEADS)},
    "a mask": {"mask_str": "null"},
    "a window": {"mask_str": "sliding_window_causal", "local_window_size": 2},
    "an output": {"output": torch.empty(3, HEADS, DIM)},
    "a rounded output": {"output_dtype": torch.float16},
    "partitions": {"decode_dispatch_metadata": 2},
    "an array": {"q": np.zeros((3, HEADS, DIM), np.float64)},
    "a list": {"q": [1.0]},
    "a whole scale": {"scale": 1},
    "a scale of text": {"scale": "1"},
    "the interpreter": {"target": "interpret"},
    "no target": {"target": "nonsense"},
    "a sparse q": {"q": torch.zeros(3, HEADS, DIM).to_sparse()},
    "q elsewhere": {"q": torch.zeros(3, HEADS, DIM, device="meta")},
    "True for a window": {"local_window_size": True},
    "a float for a window": {"local_window_size": -1.0},
    "True for partitions": {"decode_dispatch_metadata": True},
    "a layer too many": {"layer_idx": 2},
    "True for a layer": {"layer_idx": True},
    "numpy's layer": {"layer_idx": np.int64(1)},
    "a leaf that needs a gradient": {"q": torch.zeros(3, HEADS, DIM, requires_grad=True)},
    "no rows": {"q": torch.zeros(0, HEADS, DIM), "input_row_offsets": ints(0, 0, 0)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_checks_or_code_depend_on_is_told_apart(change: str) -> None:
    """After a call, and again after itself, a changed call gives what it gives at first."""
    expected = ordinary(call() | CHANGES[change])
    flash(call())
    for _ in range(3):
        same(outcome(call() | CHANGES[change]), expected)
    same(outcome(call()), ordinary(call()))


@pytest.mark.parametrize("name", ["TARGET", "INTERPRET", "VALIDATE", "DEBUG", "THREADS", "CPU_ISA"])
def test_variables_are_read_at_each_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flash(call())
    monkeypatch.setenv(f"TILEWRIGHT_{name}", "nonsense")
    same(outcome(call()), ordinary(call()))
    assert isinstance(outcome(call()), str)


def test_without_checks_of_values(monkeypatch: pytest.MonkeyPatch, hits: list[bool]) -> None:
    """TILEWRIGHT_VALIDATE=0 after a checked call: the nest refuses the page, and the buffer stays as it was."""
    c = call() | {"output": torch.zeros(3, HEADS, DIM)}
    flash(c)
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    flash(c)
    expected = flash(c).clone()
    assert hits == [True]
    c["kv_collection"].lookup_table[1, 0] = 99
    refused = outcome(c)
    assert isinstance(refused, str)
    assert refused.startswith("OutOfBounds")
    assert torch.equal(c["output"], expected)
    same(refused, ordinary(c))


def test_an_output_that_overlaps_an_input_the_second_time(hits: list[bool]) -> None:
    """Addresses are looked at in each call; the very same view is written in place."""
    memory = torch.randn(4, HEADS, DIM)
    c = call() | {"q": memory[:3]}
    flash(c | {"output": torch.empty(3, HEADS, DIM)})
    refused = outcome(c | {"output": memory[1:]})
    assert isinstance(refused, str)
    assert "memory that q does not share" in refused
    expected = ordinary(c)
    same(outcome(c | {"output": memory[:3]}), expected)
    assert hits == [False, True]


def test_a_read_only_output_the_second_time() -> None:
    buffer = np.zeros((3, HEADS, DIM), np.float32)
    flash(call() | {"output": buffer})
    flash(call() | {"output": buffer})
    buffer.flags.writeable = False
    refused = outcome(call() | {"output": buffer})
    assert isinstance(refused, str)
    assert "read-only" in refused


def test_metadata_changed_in_place() -> None:
    """The same tensor objects under other shapes."""
    c = call()
    flash(c)
    c["kv_collection"].cache_lengths.resize_(1)
    same(outcome(c), ordinary(c))
    assert isinstance(outcome(c), str)


def test_another_schedule() -> None:
    """A schedule is part of what is remembered; an illegal one is refused after a legal one."""
    c = call()
    arguments = {"q": c["q"], "kv": c["kv_collection"].layer(1), "sink": None, "scale": 0.5}

    def under(schedule: Schedule | None) -> Callable[[Call], Tensor]:
        constants = {"mask": None}
        return lambda _: run(
            flash_attention, arguments, c["input_row_offsets"], constants=constants, schedule=schedule
        )["out"]

    schedules = (None, Schedule(rows=1, keys=4), Schedule(rows=2, keys=8), Schedule(rows=0))
    expected = [ordinary(c, under(s)) for s in schedules]
    for _ in range(2):
        for s, e in zip(schedules, expected, strict=True):
            same(outcome(c, under(s)), e)


@pytest.mark.parametrize("entry", [0, 5, 6, 2**31 - 1, -1, -(2**31)])
def test_listed_entries(entry: int, hits: list[bool]) -> None:
    c = latent_call()
    latent(c)
    c["comp_indices"][1, 2] = entry
    same(outcome(c, latent), ordinary(c, latent))
    assert hits[0] is (entry < 6)
    c["comp_cache"].lookup_table[0, 1] = 4  # of entries 4 and 5
    same(outcome(c, latent), ordinary(c, latent))


def test_a_selection_in_one_window_and_in_several(hits: list[bool]) -> None:
    """64 bytes hold two rows of 8 scores."""
    c = indexer_call() | {"scores_budget_bytes": 64}
    c["k_collection"].cache_lengths.fill_(3)
    indexer(c)
    for length in (4, 0, 7, 6):
        c["k_collection"].cache_lengths.fill_(length)
        same(outcome(c, indexer), ordinary(c, indexer))
    assert hits == [True, True, False, True]


def test_inference_mode_in_any_order(hits: list[bool]) -> None:
    """What is kept between calls may be used inside and outside of it."""
    for f, c in ((indexer, indexer_call()), (flash, call() | {"decode_dispatch_metadata": 2})):
        expected = ordinary(c, f)
        for inside in (True, True, False, True, False):
            with torch.inference_mode(inside):
                same(outcome(c, f), expected)
                assert f(c).is_inference() is inside
    assert hits == [True] * 18


# ---- many calls ------------------------------------------------------------------------------------------------------


def test_random_calls_are_as_without_the_memory(rng: np.random.Generator) -> None:
    """Valid and invalid calls in any order."""
    for _ in range(200):
        c = call(int(rng.integers(3)))
        c["input_row_offsets"].copy_(torch.from_numpy(rng.choice([0, 1, 1, 3, 3], 3)))
        c["kv_collection"].cache_lengths.copy_(torch.from_numpy(rng.integers(-1, 13, 2)))
        c["kv_collection"].lookup_table.copy_(
            torch.from_numpy(rng.integers(-1, 7, (2, 3)).clip(0 if rng.random() < 0.5 else -1))
        )
        if rng.random() < 0.7:
            c["input_row_offsets"].copy_(ints(0, int(rng.integers(4)), 3))
            c["kv_collection"].cache_lengths.copy_(torch.from_numpy(rng.integers(0, 9, 2)))
            c["kv_collection"].lookup_table.copy_(torch.from_numpy(rng.integers(0, 6, (2, 3))))
        if rng.random() < 0.4:
            c |= {"mask_str": "sliding_window_causal", "local_window_size": int(rng.integers(1, 4))}
        if rng.random() < 0.2:
            c |= CHANGES[str(rng.choice(list(CHANGES)))]
        same(outcome(c), ordinary(c))


def test_arguments_are_not_kept_alive() -> None:
    c = call() | {"output": torch.empty(3, HEADS, DIM), "sink_weights": torch.zeros(HEADS)}
    flash(c)
    found = flash(c)
    assert len(prepared._CALLS) == 1
    leaf = c["kv_collection"].layer(1)
    tensors = [c["q"], c["input_row_offsets"], c["sink_weights"], found, leaf.keys, leaf.lookup_table]
    refs = [weakref.ref(t) for t in tensors]
    del c, found, leaf, tensors
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST", 3)
    for rows in range(1, 9):
        c = call() | {"q": torch.zeros(rows, HEADS, DIM), "input_row_offsets": ints(0, 1, rows)}
        same(outcome(c), ordinary(c))
        assert len(prepared._CALLS) <= 3


def test_threads_share_a_prepared_call() -> None:
    cases = [call(seed) for seed in range(4)]
    expected = [flash(c) for c in cases]

    def many(i: int) -> bool:
        return all(torch.equal(flash(cases[i % 4]), expected[i % 4]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(8)))


def test_a_forked_child_makes_calls_again() -> None:
    c = call()
    expected = flash(c)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(flash(c), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_cannot_be_asked_for_its_facts_has_none() -> None:
    """Subclasses, and settings that may change, take the ordinary way."""

    class Own(Tensor):
        pass

    rows = torch.zeros(3, HEADS, DIM).as_subclass(Own)
    assert calls.facts_of((), ({"q": rows}, {}, {}, {})) is None
    assert calls.facts_of(([],), ({}, {}, {}, {})) is None
