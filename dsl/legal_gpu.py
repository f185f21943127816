"""Whether an architecture has room for a schedule. TileLang does not check it."""

from __future__ import annotations

from math import prod

from .dtypes import DTYPES, f32
from .errors import IllegalSchedule
from .gpu import MATRIX, Gpu
from .loops import For, Program
from .passes_gpu import is_load
from .rewrite import statements
from .schedule import Binding, Schedule
from .tile import Map, TileProgram


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
    for t in k.tiles:
        if t.scope == "shared":
            points = {"row", "head"} & {a for a, _ in t.axes}
            elements = prod(n for a, n in t.axes if a not in points)
            elements *= k.points if len(points) == 2 else prod(n for a, n in t.axes if a in points)
            out[t.name] = elements * t.dtype.bits // 8 * copies.get(t.name, 1)
    return out
