"""Where native code keeps its tiles, and how it writes its results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from support.native import OPERATORS, fitted, inputs_of, needs_compiler, spread

from tilewright.dsl.emit_c_plan import Block, Group, Node, tiles_of
from tilewright.dsl.emit_c_storage import Plan, plan_kernel
from tilewright.dsl.loops import Strip
from tilewright.dsl.lower import lower
from tilewright.ops import PagedKVCache, generic_flash_attention_kv_cache_ragged_sink
from tilewright.random_inputs import binding_of

LANES = 16


def plans(name: str, n: int) -> Iterator[Plan]:
    inputs = inputs_of(name, n)
    program = lower(inputs.spec, binding_of(inputs.spec, inputs.sizes), fitted(inputs, spread(n)))
    args = {a.name: a for a in (*program.args, *program.workspaces)}
    for kernel in program.kernels:
        yield plan_kernel(kernel, args, LANES, 2 * LANES)


def accesses(nodes: list[Node]) -> Iterator[tuple[str, bool, bool]]:
    """(tile, whether it is written, whether a strip begins), in the order in which a strip's code has them."""
    for n in nodes:
        match n:
            case Block(stmt, body):
                if isinstance(stmt, Strip):
                    yield "", False, True
                yield from accesses(body)
            case Group():
                for i in n.items:
                    reads, writes = tiles_of(Group(n.axes, [i], n.over))
                    yield from ((t, False, False) for t in reads)
                    yield from ((t, True, False) for t in writes)
            case _:
                reads, writes = tiles_of(n)
                yield from ((t, False, False) for t in reads)
                yield from ((t, True, False) for t in writes)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_no_tile_is_read_after_another_took_its_memory(name: str) -> None:
    """Played through statement by statement: whoever writes owns the memory, and readers must be owners."""
    for n in range(4):
        for plan in plans(name, n):
            owner: dict[int, str] = {}
            for tile, written, begins in accesses(plan.nodes):
                if begins:
                    owner = {at: t for at, t in owner.items() if not plan.storage[t].local}
                elif tile in plan.storage:
                    at = plan.storage[tile].offset
                    if written:
                        owner[at] = tile
                    assert owner[at] == tile, f"{tile} is read where {owner[at]} lies"


def test_tiles_that_take_turns_have_room() -> None:
    """Of every operator some do; what lies elsewhere does not overlap."""
    shared = 0
    for name in OPERATORS:
        for plan in plans(name, 1):
            spans = sorted((t.offset, t.offset + t.bytes) for t in plan.storage.values())
            shared += len(spans) - len({start for start, _ in spans})
            for (start, end), (later, _) in pairwise(spans):
                assert start == later or end <= later
            assert max(end for _, end in spans) <= plan.scratch_bytes
    assert shared > 2 * len(OPERATORS)


def test_the_player_sees_a_wrong_share() -> None:
    """With all of a strip's tiles in one place, readers are not owners."""
    plan = next(plans("flash_attention", 1))
    local = [t for t in plan.storage.values() if t.local]
    assert len(local) > 2
    wrong = 0
    owner = ""
    for tile, written, _ in accesses(plan.nodes):
        if tile in {t.name for t in local}:
            owner = tile if written else owner
            wrong += owner != tile
    assert wrong


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_large_results_are_those_of_small_ones(dtype: torch.dtype, shift: int) -> None:
    """Bit for bit, at every alignment of the buffer: large ones are streamed past the caches."""
    g = torch.Generator().manual_seed(0)
    rows, heads, dim = 96, 64, 192
    per_call = 4  # sequences, each of `rows` rows: 4.7 MiB of float32 and 4.7 MiB of bfloat16 for the large call
    batch = per_call if dtype is torch.float32 else 2 * per_call
    q = torch.randn(batch * rows, heads, dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, 2, rows, dim, generator=g).to(dtype) for _ in "kv")
    table = torch.arange(batch, dtype=torch.int32)[:, None]

    def run(first: int, end: int, out: torch.Tensor) -> torch.Tensor:
        n = end - first
        cache = PagedKVCache.from_block_table(k, v, table[first:end], torch.zeros(n, dtype=torch.int32), layout="HND")
        offsets = torch.arange(n + 1, dtype=torch.int32) * rows
        generic_flash_attention_kv_cache_ragged_sink(
            q[first * rows : end * rows], offsets, cache, 0, 0.1, target="cpu", output=out
        )
        return out

    memory = torch.full((q.numel() + shift,), float("nan"), dtype=dtype)
    whole = run(0, batch, memory[shift:].view(q.shape))
    assert whole.numel() * whole.element_size() >= 4 << 20
    for b in range(batch):
        alone = run(b, b + 1, torch.empty(rows, heads, dim, dtype=dtype))
        assert torch.equal(alone, whole[b * rows : (b + 1) * rows])
