"""Whether an architecture has room for a schedule. TileLang does not check it."""

from __future__ import annotations

from math import prod

from .dtypes import DTYPES, f32
from .errors import IllegalSchedule
from .gpu import MATRIX, Gpu
from .loops import Best, For, Program
from .passes_gpu import POINTS, is_load
from .rewrite import statements
from .schedule import Binding, Schedule
from .tile import Map, TileProgram

BINS = 256  # of a digit of a selection


def selection_slots(k: int) -> int:
    """Keys that a selection of k sorts: a power of two."""
    return 1 << max(0, k - 1).bit_length()


def selection_bytes(k: int) -> int:
    """Shared memory of a selection beside its result: a histogram, five numbers, and keys and columns that it sorts."""
    return 4 * BINS + 4 * 5 + 8 * selection_slots(k)


def _refuse(schedule: Schedule, field: str, problem: str) -> None:
    raise IllegalSchedule(field=field, value=repr(getattr(schedule, field)), problem=problem)


def check_gpu(tp: TileProgram, binding: Binding, schedule: Schedule, gpu: Gpu) -> None:
    """Raise IllegalSchedule, naming the field, for what the architecture cannot do under any sizes."""
    threads = schedule.threads or 4 * gpu.warp
    if threads % gpu.warp or threads > gpu.threads:
        _refuse(schedule, "threads", f"{gpu.name} takes a multiple of {gpu.warp} threads, {gpu.threads} at most")
    if schedule.strip:
        _refuse(schedule, "strip", f"{gpu.name} has no strips: a block's threads share a whole tile; expected 0")
    if DTYPES[schedule.products] is not f32 and schedule.keys % MATRIX:
        _refuse(schedule, "keys", f"matrix units of {gpu.name} take a multiple of {MATRIX}")
    if schedule.stages > 1 and schedule.fetch == "rows":
        _refuse(
            schedule, "stages", "rows gathered one by one are loaded one tile ahead; expected 0 or 1, or fetch=pages"
        )


def check_room(program: Program, gpu: Gpu) -> None:
    """Raise IllegalSchedule where tiles that all threads share do not fit in shared memory."""
    for k in program.kernels:
        taken = shared_bytes(program, k.name)
        total = sum(taken.values())
        if total > gpu.shared_bytes:
            largest = max(taken, key=lambda n: taken[n])
            axes = {a: n for t in k.tiles if t.name == largest for a, n in t.axes}
            field = "keys" if "key" in axes else "rows" if axes.get("row", 1) > 1 else "heads"
            value = axes.get("key", axes.get("row", axes.get("head", 1)))
            problem = (
                f"tiles of kernel {k.name!r} take {total} bytes of shared memory, and {gpu.name} has "
                f"{gpu.shared_bytes}; the largest is {largest!r} with {taken[largest]}"
            )
            raise IllegalSchedule(field=field, value=value, problem=problem)


def shared_bytes(program: Program, kernel: str) -> dict[str, int]:
    """Bytes of shared memory that each tile of a kernel takes, copies of tiles loaded ahead included."""
    (k,) = (k for k in program.kernels if k.name == kernel)
    copies = {
        s.dst.name: 1 + loop.stages
        for loop in statements(k.body)
        if isinstance(loop, For) and loop.stages
        for s in loop.body
        if isinstance(s, Map) and is_load(s)
    }
    out: dict[str, int] = {}
    if any(isinstance(s, Best) for s in statements(k.body)):
        ranks = max(n for t in k.tiles for a, n in t.axes if a not in POINTS)
        out["a selection's slots"] = selection_bytes(ranks)
    for t in k.tiles:
        if t.scope == "shared":
            points = set(POINTS) & {a for a, _ in t.axes}
            elements = prod(n for a, n in t.axes if a not in points)
            elements *= k.points if len(points) == 2 else prod(n for a, n in t.axes if a in points)
            out[t.name] = elements * t.dtype.bits // 8 * copies.get(t.name, 1)
    return out
