"""The worked cases with memory that ends where tensors end: what reads or writes beside one is killed."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
from collections.abc import Iterator, Mapping

import pytest
import torch
from support.native import needs_compiler
from support.reference import assert_same_bits
from test_bad_indices import test_a_table_that_is_too_short, test_blocks_far_past_the_end  # noqa: F401
from test_indexer import test_c7_published  # noqa: F401
from test_topk import test_c8, test_c8_equal_scores  # noqa: F401
from test_worked_cases import (  # noqa: F401
    test_c1_sink_enters_the_denominator_once,
    test_c1_split_by_the_caller,
    test_c1_three_heads_have_sinks_of_their_own,
    test_c2_a_key_for_the_last_row_only,
    test_c2_a_request_that_sees_nothing,
    test_c3_a_masked_key_beside_a_very_negative_one,
    test_c3_very_negative_scores_are_scores,
    test_c4_every_page_size,
    test_c4_page_of_192_in_reverse,
    test_c5_lengths_around_a_tile,
    test_c5_unused_slots_are_nan,
    test_c6_window_counts_its_own_key,
    test_c9_partitions_merge_like_merge_states,
)
from torch import Tensor

from tilewright.codegen_cache import prepared
from tilewright.codegen_cache.native_program import NativeProgram

pytestmark = [needs_compiler, pytest.mark.slow]
PAGE = mmap.PAGESIZE


def fenced(t: Tensor, *, at_end: bool) -> Tensor:
    """A copy, its last or first element beside a page that no process may touch; there is one at the other end, too."""
    t = t.contiguous()
    size = t.numel() * t.element_size()
    room = -(-max(size, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (start, start + PAGE + room):
        assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), 0) == 0
    first = PAGE + (room - size if at_end else 0)
    out = torch.frombuffer(memory, dtype=torch.uint8, count=size + (not size), offset=first)[:size]
    out = out.view(t.dtype).view(t.shape)
    out.copy_(t)
    return out


@pytest.mark.parametrize("at_end", [False, True])
def test_a_fence_kills(at_end: bool) -> None:
    """A process that reads the element before the first, or after the last."""
    t = fenced(torch.ones(3, 5), at_end=at_end)
    beside = t.data_ptr() + (t.nbytes if at_end else -4)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(beside, 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def bytes_of(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every program is run on fenced tensors, once at either end, and not again from memory. Which ones were run."""
    ran: list[str] = []
    run = NativeProgram.run

    def twice(self: NativeProgram, tensors: Mapping[str, Tensor], *args: object, **options: object) -> None:
        ran.append(self.program.name)
        first, second = ({n: fenced(t, at_end=end) for n, t in tensors.items()} for end in (False, True))
        run(self, first, *args, **options)  # type: ignore[arg-type]
        run(self, second, *args, **options)  # type: ignore[arg-type]
        for n, t in tensors.items():
            assert_same_bits(first[n], second[n])
            if not torch.equal(bytes_of(t), bytes_of(second[n])):
                t.copy_(second[n])  # an output

    monkeypatch.setenv("TILEWRIGHT_TARGET", "cpu")
    monkeypatch.setattr(NativeProgram, "run", twice)
    monkeypatch.setattr(prepared, "_CALLS", {})
    monkeypatch.setattr("tilewright.codegen_cache.launch.first", lambda *args: None)
    yield ran
    assert ran or request.function.__module__ == __name__
