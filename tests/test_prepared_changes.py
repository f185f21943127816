"""Calls made again on the very same objects, whose memory, shapes, types and values have changed in between."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.prepared import (
    HEADS,
    Call,
    call,
    flash,
    indexer,
    indexer_call,
    latent,
    latent_call,
    ordinary,
    outcome,
    same,
)
from torch import Tensor

from tilewright.codegen_cache import prepared, workspaces
from tilewright.codegen_cache.compilers import find_compiler
from tilewright.codegen_cache.frames import WORTH_A_THREAD
from tilewright.codegen_cache.native import Program
from tilewright.codegen_cache.native_build import build
from tilewright.codegen_cache.programs import programs
from tilewright.ops import PagedKVCache

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWRIGHT_TARGET", "cpu")
    prepared._CALLS.clear()
    yield
    prepared._CALLS.clear()


# ---- the same objects ------------------------------------------------------------------------------------------------


def _other(c: Call, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(c["q"].shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def _data(t: Tensor, data: Tensor) -> None:
    t.data = data


def _table(last: int) -> Tensor:
    return torch.tensor([[0, 5], [3, last]], dtype=torch.int32)


def _apart(c: Call) -> None:
    """Other strides on the same shape."""
    wide = torch.randn(3, 2 * HEADS, 8, generator=torch.Generator().manual_seed(9))
    c["q"].set_(wide.untyped_storage(), 0, (3, HEADS, 8), (2 * HEADS * 8, 8, 1))


def _overlapping(c: Call) -> None:
    c["output"].set_(c["q"].untyped_storage(), 8, (2, HEADS, 8))


IN_PLACE: dict[str, Callable[[Call], object]] = {
    "values": lambda c: c["q"].mul_(2),
    "other memory": lambda c: c["q"].set_(_other(c)),
    "other data": lambda c: _data(c["q"], _other(c)),
    "another type": lambda c: _data(c["q"], _other(c, torch.bfloat16)),
    "a type of no rows": lambda c: _data(c["q"], torch.zeros(3, HEADS, 8, dtype=torch.int32)),
    "another rank": lambda c: _data(c["q"], torch.zeros(3, HEADS * 8)),
    "fewer rows": lambda c: c["q"].resize_(2, HEADS, 8),
    "fewer heads": lambda c: c["q"].resize_(3, HEADS // 2, 8),
    "other strides": _apart,
    "two axes exchanged": lambda c: c["q"].transpose_(1, 2),
    "a gradient": lambda c: c["q"].requires_grad_(),
    "wide offsets": lambda c: _data(c["input_row_offsets"], c["input_row_offsets"].long()),
    "fewer offsets": lambda c: c["input_row_offsets"].resize_(2),
    "wide lengths": lambda c: _data(c["kv_collection"].cache_lengths, torch.tensor([1, 2])),
    "fewer lengths": lambda c: c["kv_collection"].cache_lengths.resize_(1),
    "a narrow table": lambda c: c["kv_collection"].lookup_table.resize_(2, 1),
    "a bad table": lambda c: c["kv_collection"].lookup_table.set_(_table(9)),
    "another table": lambda c: c["kv_collection"].lookup_table.set_(_table(3)),
    "fewer pages": lambda c: c["kv_collection"].layer(1).keys.resize_(2, 4, 2, 8),
    "a smaller output": lambda c: c["output"].resize_(2, HEADS, 8),
    "a rounded output": lambda c: _data(c["output"], torch.zeros(3, HEADS, 8, dtype=torch.float16)),
    "an integer output": lambda c: _data(c["output"], torch.zeros(3, HEADS, 8, dtype=torch.int32)),
    "an output on q": lambda c: c["output"].set_(c["q"]),
    "an output across q": _overlapping,
}  # fmt: skip


@pytest.mark.parametrize("unchecked", [False, True])
@pytest.mark.parametrize("change", IN_PLACE)
def test_objects_changed_in_place(change: str, unchecked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call remembers is never an object: the changed one gives what it gives at first."""
    if unchecked:
        monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    c, fresh = ({**call(), "output": torch.zeros(3, HEADS, 8)} for _ in range(2))
    flash(c)
    flash(c)
    for each in (c, fresh):
        IN_PLACE[change](each)
    expected = ordinary(fresh)
    same(outcome(c), expected)
    if not isinstance(expected, str) and change != "an output on q":  # which has been overwritten by now
        same(outcome(c), expected)


def test_an_identity_used_again() -> None:
    """A tensor made where another one was has its own shape and values, whatever its id."""
    c, seen = call(), set()
    for n in range(60):
        rows = 1 + n % 4
        q = torch.randn(rows, HEADS, 8, generator=torch.Generator().manual_seed(n))
        seen.add(id(q))
        given = c | {"q": q, "input_row_offsets": torch.tensor([0, 1, rows], dtype=torch.int32)}
        same(outcome(given), ordinary(given))
        del q, given
        gc.collect(0)
    assert len(seen) < 60


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        c = call() | {"output": torch.zeros(3, HEADS, 8)}
        flash(c)
        expected = ordinary(c)
    same(outcome(c), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_between_calls(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = flash(call())
    monkeypatch.setenv("TILEWRIGHT_THREADS", str(threads))
    for _ in range(3):
        same(flash(call()), expected)


# ---- buffers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that were cloned since."""
    seen: list[Tensor] = []
    real = Tensor.clone

    def watched(self: Tensor, **options: Any) -> Tensor:
        seen.append(self)
        return real(self, **options)

    monkeypatch.setattr(Tensor, "clone", watched)
    return seen


BUFFERS: dict[str, tuple[Callable[[Call], Tensor], Callable[[], Call], str, tuple[int, ...]]] = {
    "flash": (flash, call, "output", (3, HEADS, 8)),
    "latent": (latent, latent_call, "output", (2, HEADS, 8)),
    "indexer": (indexer, indexer_call, "output_indices", (2, 3)),
}


@pytest.mark.parametrize("unchecked", [False, True])
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_written_in_place(
    name: str, unchecked: bool, copies: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values have been looked at, nothing is left to refuse, and nothing is copied."""
    if unchecked:
        monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    f, make, argument, shape = BUFFERS[name]
    expected = f(make())
    c = make()
    c[argument] = torch.zeros(shape, dtype=expected.dtype)
    f(c)
    copies.clear()
    assert f(c) is c[argument]
    assert not copies
    assert torch.equal(c[argument], expected)


@pytest.mark.parametrize("unchecked", [False, True])
def test_refused_lists_leave_buffers_alone(unchecked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of latent attention, which reads tables by what is listed: in the second row, so that the first could be done."""
    if unchecked:
        monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    c = latent_call() | {"output": torch.zeros(2, HEADS, 8)}
    for _ in range(2):
        latent(c)
    for page in (4, -1, 1 << 30):
        c["output"].fill_(7.0)
        c["comp_cache"].lookup_table[0, 0] = page
        assert isinstance(outcome(c, latent), str)
        assert (c["output"] == 7).all()


def test_unchecked_offsets_that_leave_rows_out(monkeypatch: pytest.MonkeyPatch, copies: list[Tensor]) -> None:
    """Padding of a captured graph: refused where values are checked; else rows of nobody stay as they are."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    c = call() | {"output": torch.full((3, HEADS, 8), 7.0)}
    flash(c)
    expected = flash(c)[:2].clone()
    c["output"].fill_(7.0)
    c["input_row_offsets"].copy_(torch.tensor([0, 1, 2], dtype=torch.int32))
    c["kv_collection"].cache_lengths[1] = 2
    out = flash(c)
    assert (out[2] == 7).all()
    same(out.clone(), ordinary(c))
    assert torch.equal(out[0], expected[0])


# ---- what new shapes cost --------------------------------------------------------------------------------------------


def test_new_shapes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, rows, tables, lengths and pools of any size within a class of shapes run the programs there are."""
    built: list[object] = []

    def counted(*args: Any) -> Any:
        built.append(args)
        return build(*args)

    monkeypatch.setattr("tilewright.codegen_cache.native_program.build", counted)

    def decode(batch: int, pages: int, spare: int) -> Call:
        gen = torch.Generator().manual_seed(batch)
        table = torch.randint(0, spare + 1, (batch, pages), generator=gen).to(torch.int32)
        lengths = torch.randint(0, 4 * pages, (batch,), generator=gen).to(torch.int32)
        return {
            "q": torch.randn(batch, HEADS, 8, generator=gen),
            "input_row_offsets": torch.arange(batch + 1, dtype=torch.int32),
            "kv_collection": PagedKVCache(torch.randn(spare + 1, 2, 1, 4, 2, 8, generator=gen), table, lengths),
            "layer_idx": 0,
            "scale": 0.5,
        }

    flash(decode(4, 3, 2))
    before = len(programs())
    built.clear()
    for batch in (4, 5, 6, 7, 9, 16, 33):
        for pages, spare in ((1, 0), (3, 9), (8, 4)):
            c = decode(batch, pages, spare)
            same(outcome(c), ordinary(c))
    assert len(programs()) == before
    assert not built


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_small_calls_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of a few keys runs on its caller alone; the same program on many keys takes all threads it may."""
    asked: list[int] = []
    real = Program.call

    def watched(self: Program, arguments: int, threads: int) -> None:
        asked.append(threads)
        real(self, arguments, threads)

    monkeypatch.setattr(Program, "call", watched)
    monkeypatch.setenv("TILEWRIGHT_THREADS", "6")
    pages = 1 + WORTH_A_THREAD // (4 * HEADS * 8)
    blocks = torch.zeros(1, 2, 1, 4, 2, 8)
    lengths = torch.zeros(1, dtype=torch.int32)
    c = call() | {
        "q": torch.ones(1, HEADS, 8),
        "input_row_offsets": torch.tensor([0, 1], dtype=torch.int32),
        "kv_collection": PagedKVCache(blocks, torch.zeros(1, 8 * pages, dtype=torch.int32), lengths),
        "layer_idx": 0,
    }
    for unchecked in (False, True):
        if unchecked:
            monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
        for cached, threads in ((0, 1), (pages, 1), (2 * pages, 2), (16 * pages, 6)):
            lengths.fill_(cached)
            flash(c)
            assert asked[-1] == threads, (cached, unchecked)


# ---- workspaces ------------------------------------------------------------------------------------------------------


def test_a_block_is_kept_and_grows() -> None:
    workspaces._SPARE.clear()
    a = workspaces.take(100)
    b = workspaces.take(10)  # while the first is in use
    assert a.data_ptr() != b.data_ptr()
    workspaces.give_back(b)
    workspaces.give_back(a)
    assert workspaces.take(50) is a
    assert len(workspaces.take(11)) >= 11
    large = workspaces.take(workspaces.KEPT + 1)
    workspaces.give_back(large)
    assert not workspaces._SPARE


def test_workspaces_of_many_shapes() -> None:
    """One block for calls that need more, less, and other columns in turn."""
    cases = [indexer_call() for _ in range(6)]
    for n, c in enumerate(cases):
        c["k_collection"].cache_lengths.fill_((7, 0, 3, 9, 1, 5)[n])
    split = call() | {"decode_dispatch_metadata": 3}
    expected = [indexer(c).clone() for c in cases], flash(split).clone()
    for _ in range(3):
        for c, e in zip(cases, expected[0], strict=True):
            assert torch.equal(indexer(c), e)
            assert torch.equal(flash(split), expected[1])
    assert len(workspaces._SPARE) == 1
