"""Tile program x schedule x binding -> loop nest. Every pass, in order, is in `PASSES`: pure functions of a Program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .build import build
from .context import Context
from .gpu import Gpu
from .legal_gpu import check_gpu, check_room
from .loops import Program
from .passes_address import bind_coordinates
from .passes_clean import allocate_tiles, hoist_invariants, remove_unused
from .passes_gpu import pad_features, place_tiles, share_reads, stage_loads
from .passes_kernel import form_kernel, partition_keys
from .passes_keys import apply_masks, bound_key_loops, fetch_keys
from .passes_strip import cut_strips, round_operands
from .schedule import Binding, Schedule, check_schedule
from .spec import Spec
from .verify import verify, verify_tile_program

Pass: TypeAlias = Callable[[Program, Context], Program]

PASSES: tuple[Pass, ...] = (
    form_kernel,  #       one kernel: operands, initial states, a loop over each part's keys, finish, stores
    partition_keys,  #    split keys over grid points: states to workspaces, and a kernel that merges them
    bound_key_loops,  #   key loops get the ranges that SymPy proves, as closed forms of run-time lengths
    fetch_keys,  #        key rows through the page table, only those that some row sees
    apply_masks,  #       unseen keys become what the reduction calls absent
    bind_coordinates,  #  positions, heads and captured tensors become addresses; rows past the end are guarded
    share_reads,  #       on GPUs: elements that many points of a tile need are read once
    hoist_invariants,  #  what does not change from key tile to key tile moves out of the loop
    remove_unused,  #     scalars and tiles that nothing reads
    round_operands,  #    what matrix products multiply, in the type they multiply in
    cut_strips,  #        a key tile some points at a time, over the keys that those see
    allocate_tiles,  #    storage for tiles, arguments of kernels
)

GPU_PASSES: tuple[Pass, ...] = (
    pad_features,  #      sizes that matrix units take; nothing reaches a result from past the end
    place_tiles,  #       which tiles all threads share, how many threads, how many points storage is given
    stage_loads,  #       key tiles loaded ahead of what is computed
)

Watch: TypeAlias = Callable[[str, Program], None]


def passes_for(gpu: Gpu | None) -> tuple[Pass, ...]:
    """The passes of a target family, in order."""
    return PASSES if gpu is None else (*PASSES, *GPU_PASSES)


def lower(
    spec: Spec, binding: Binding, schedule: Schedule, *, gpu: Gpu | None = None, watch: Watch | None = None
) -> Program:
    """The loop nest of an operator under a schedule; `watch` is shown the program after every pass.

    gpu: the architecture that the nest is shaped for; None: processors with caches, or the interpreter.

    Raises IllegalSchedule before anything is lowered, where the schedule has no meaning for the operator, or the
    architecture no room for it.
    """
    tile_program = build(spec)
    verify_tile_program(tile_program)
    check_schedule(tile_program, binding, schedule)
    if gpu is not None:
        check_gpu(tile_program, binding, schedule, gpu)
    context = Context.of(spec, tile_program, binding, schedule, gpu)
    program = Program(spec.name, (), (), ())
    for step in passes_for(gpu):
        program = step(program, context)
        verify(program, step.__name__)
        if watch is not None:
            watch(step.__name__, program)
    if gpu is not None:
        check_room(program, gpu)
    return program
