"""What a program can be lowered for. A target is one frozen row; adding one touches its row and its emitter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import UnknownTarget
from .gpu import GPUS, Gpu
from .isa import Isa, best_isa
from .schedule import Binding, Schedule
from .spec import Listed, Spec
from .targets_cpu import native_schedule, score_width
from .targets_gpu import gpu_schedule


@dataclass(frozen=True)
class Target:
    name: str
    device: str  # device type of the tensors it takes
    compiled: bool = False  # needs a C compiler, and has no form for print() and breakpoint()
    isa: Isa | None = None  # what native code may use of this processor
    gpu: Gpu | None = None  # what its programs are for


# In the order in which they are tried for tensors on a device: the last one takes everything.
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("cpu", "cpu", compiled=True),
        Target("interpret", "cpu"),
        *(Target(name, "cuda", gpu=gpu) for name, gpu in GPUS.items()),  # torch calls AMD's devices cuda as well
    )
}


def target_named(name: str) -> Target:
    """The target, for this machine. Raises UnknownTarget, and BadEnvironment for a TILEWRIGHT_CPU_ISA it has not."""
    if name not in TARGETS:
        raise UnknownTarget(target=name, known=", ".join(TARGETS))
    found = TARGETS[name]
    return replace(found, isa=best_isa()) if found.compiled else found


def default_schedule(target: Target, spec: Spec, binding: Binding, rows: int, batch: int) -> Schedule:
    """The schedule used where none was tuned, by the mean number of query rows of a sequence."""
    if target.gpu is not None:
        return gpu_schedule(target.gpu, spec, binding, rows, batch)
    if target.isa is not None:
        return native_schedule(target.isa, spec, binding, rows, batch)
    mean = 1 << (-(-rows // max(1, batch)) - 1).bit_length() if rows else 1  # rounded up: few schedules, compiled once
    lists = [part for source in spec.sources for part in source.parts if isinstance(part, Listed)]
    if lists:
        heads = 1 if any("head" in part.axes for part in lists) else None
        return Schedule(rows=1, heads=heads, keys=512, start="first")
    if spec.selects:  # a tile holds scores of all heads, and keys are decoded once per row tile
        few = min(32, mean)
        most = max(512, min(4096, (1 << 21) // (few * binding.heads)))
        return Schedule(rows=few, keys=1 << (most.bit_length() - 1))  # a power of two, as page sizes are
    if (width := score_width(spec, binding)) > 16:  # a score for each feature: far fewer points make a tile
        few = min(4, mean)
        return Schedule(rows=few, keys=max(8, min(128, (1 << 18) // (few * width))))
    if mean <= 4:
        return Schedule(rows=mean, keys=512)
    return Schedule(rows=min(128, mean))
