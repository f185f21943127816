"""What memory native code takes beside its arguments: as stated in docs/targets.md, whatever the lengths."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.native import On, inputs_of, needs_compiler, run
from support.reference import assert_same_bits

from tilewright.codegen_cache import native_program, prepared, workspaces
from tilewright.codegen_cache.programs import programs
from tilewright.dsl.schedule import Schedule
from tilewright.ops import (
    PagedKVCache,
    generic_flash_attention_kv_cache_ragged_sink,
    latent_sparse_attention_ragged_paged,
    mla_indexer_ragged_float8_paged,
)

_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int
)
GUARD, LINE = 4096, 64
MIB = 1 << 20


class Guarded:
    """tw_parallel on one thread, with scratch of exactly the bytes asked for between two guards."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.intact = True
        self._function = _PARALLEL(self._parallel)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _parallel(self, run: int, context: int, items: int, scratch_bytes: int, _threads: int) -> int:
        self.asked.append(scratch_bytes)
        memory = torch.full((scratch_bytes + 2 * GUARD + LINE,), 0xA5, dtype=torch.uint8)
        start = -(-(memory.data_ptr() + GUARD) // LINE) * LINE
        for item in range(items):
            _RUN(run)(context, item, start)
        at = start - memory.data_ptr()
        beside = torch.cat([memory[:at], memory[at + scratch_bytes :]])
        self.intact = self.intact and bool((beside == 0xA5).all())
        return 0


@needs_compiler
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("flash_attention", Schedule(rows=4, keys=16, partitions=3, strip=12)),
        ("latent_sparse_attention", Schedule(rows=1, keys=16, start="first", strip=5)),
        ("mla_indexer", Schedule(rows=4, keys=16, strip=5)),
    ],
)
def test_programs_write_no_scratch_but_what_they_state(
    name: str, schedule: Schedule, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded()
    monkeypatch.setattr(native_program, "parallel_address", lambda _: guarded.address)
    monkeypatch.setattr("tilewright.codegen_cache.programs._PROGRAMS", {})
    prepared._CALLS.clear()
    inputs = inputs_of(name, seed, rows=(5, 1, 0, 18, 7, 2), cached=(3, 70, 9, 0, 33, 100))
    found = run(inputs, schedule, On("cpu"))
    ((_, ready),) = programs()
    assert isinstance(ready.runner, native_program.NativeProgram)
    assert guarded.asked
    assert max(guarded.asked) == ready.runner.source.scratch_bytes
    assert guarded.intact
    prepared._CALLS.clear()
    monkeypatch.undo()
    for key, x in run(inputs, schedule, On("cpu")).items():
        assert_same_bits(found[key], x)


# ---- what a process grows by -----------------------------------------------------------------------------------------

HEADS, DIM, PAGE, PAGES = 16, 64, 16, 2048
Make = Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]


def _flash(table: torch.Tensor, lengths: torch.Tensor) -> Callable[[], object]:
    cache = PagedKVCache(torch.zeros(PAGES, 2, 1, PAGE, 2, DIM), table, lengths)
    q, offsets = torch.ones(8, HEADS, DIM), torch.tensor([0, 1, 8], dtype=torch.int32)
    return lambda: generic_flash_attention_kv_cache_ragged_sink(q, offsets, cache, 0, 0.5, target="cpu")


def _latent(table: torch.Tensor, lengths: torch.Tensor) -> Callable[[], object]:
    leaf = PagedKVCache(torch.zeros(PAGES, 1, 1, PAGE, 1, DIM), table, lengths).layer(0)
    q, offsets = torch.ones(8, HEADS, DIM), torch.tensor([0, 1, 8], dtype=torch.int32)
    listed = torch.full((8, 64), 3, dtype=torch.int32)
    return lambda: latent_sparse_attention_ragged_paged(
        q, offsets, listed, None, leaf, leaf, 0.5, window=1 << 20, target="cpu"
    )


def _indexer(table: torch.Tensor, lengths: torch.Tensor) -> Callable[[], object]:
    keys = torch.zeros(PAGES, 1, 1, PAGE, 1, DIM).to(torch.float8_e4m3fn)
    cache = PagedKVCache(keys, table, lengths, scales=torch.ones(PAGES, 1, 1, PAGE, 1, 1))
    q, q_s = torch.ones(8, HEADS, DIM).to(torch.float8_e4m3fn), torch.ones(8, HEADS)
    offsets = torch.tensor([0, 1, 8], dtype=torch.int32)
    return lambda: mla_indexer_ragged_float8_paged(
        q, q_s, offsets, cache, 0, top_k=64, scores_budget_bytes=MIB, target="cpu"
    )


def _peak(call: Callable[[], object]) -> int:
    """Bytes that resident memory grows by, at most, while it runs."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith(f"{field}:")).split()[1]) << 10

    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as e:
        pytest.skip(f"the peak of resident memory cannot be set back here: {e}")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


@needs_compiler
@pytest.mark.parametrize("make", [_flash, _latent, _indexer])
def test_memory_does_not_grow_with_keys(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 8 keys to 32768: a gathered copy of them in float32 would be 8 MiB, the scores of all heads 16 MiB."""
    monkeypatch.setenv("TILEWRIGHT_THREADS", "2")
    lengths = torch.tensor([4, 5], dtype=torch.int32)
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    call = make(table.expand(2, -1), lengths)
    call()
    call()  # scratch of both threads is there by now
    workspaces._SPARE.clear()
    lengths.fill_(PAGES * PAGE - 8)
    most = 2 * MIB  # the budget of scores, and as much again for what Python and the allocator round up
    assert _peak(call) < most
