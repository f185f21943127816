"""`tilewright emit` and `tilewright verify`: an operator as source text for a target, and what becomes of it there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tilewright.codegen_cache.device_source import DeviceSource
from tilewright.codegen_cache.tilelang_program import DeviceProgram, device_program
from tilewright.dsl.emit_c import emit_c
from tilewright.dsl.loops import Program
from tilewright.dsl.lower import lower
from tilewright.dsl.printer import show_program
from tilewright.dsl.schedule import Binding, Schedule
from tilewright.dsl.spec import Spec
from tilewright.dsl.targets import Target

from .errors import BadOption
from .options import show_schedule


@dataclass(frozen=True)
class Emitted:
    """An operator under a schedule for a target: its nest, and files by name."""

    name: str
    target: Target
    schedule: Schedule
    program: Program
    files: dict[str, str]
    kernels: tuple[Kernel, ...] = ()

    def document(self) -> dict[str, object]:
        return {
            "operator": self.name,
            "target": self.target.name,
            "schedule": asdict(self.schedule),
            "files": list(self.files),
            "kernels": [asdict(k) for k in self.kernels],
        }

    def lines(self) -> list[str]:
        out = [f"{self.name} for {self.target.name}", f"schedule  {show_schedule(self.schedule)}"]
        return out + [f"{k.name:9} {k}" for k in self.kernels]


@dataclass(frozen=True)
class Kernel:
    """What a kernel of a GPU program needs, and what it was lowered to.

    shared_bytes: of a block, as TileLang laid its tiles out. seconds: of the processor, 0 where it had been lowered
    before. instructions: how often some kinds of them stand in the device source.
    """

    name: str
    grid: tuple[str, ...]
    threads: int
    shared_bytes: int
    seconds: float
    instructions: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        found = ", ".join(f"{n} {kind}" for kind, n in self.instructions.items()) or "none of the kinds counted"
        time = f"lowered in {self.seconds:.1f} s" if self.seconds else "lowered before"
        return f"{time}; {self.threads} threads, {self.shared_bytes} bytes of shared memory; {found}"


INSTRUCTIONS = {
    "mma_sync": "mma", "wgmma_": "wgmma", "__builtin_amdgcn_mfma": "mfma", "cp_async_gs": "cp.async",
    "tma_load": "tma loads", "__syncthreads": "barriers",
}  # fmt: skip


def emit(spec: Spec, binding: Binding, schedule: Schedule, target: Target, *, lowered: bool = True) -> Emitted:
    """The files of an operator for a target.

    lowered: GPU programs go through TileLang as well, to device sources and what a launch needs.

    Raises BadOption for a target that has no text, IllegalSchedule, NotOnTarget, LoweringError, NoRoom.
    """
    program = lower(spec, binding, schedule, gpu=target.gpu)
    files = {f"{spec.name}.loops.txt": show_program(program)}
    if target.isa is not None:
        files[f"{spec.name}.c"] = emit_c(program, target.isa).text
        return Emitted(spec.name, target, schedule, program, files)
    if target.gpu is None:
        raise BadOption(option="--target", value=target.name, problem="the interpreter runs the nest itself: see show")
    if not lowered:
        from tilewright.dsl.emit_tilelang import emit_tilelang

        files[f"{spec.name}.tilelang.py"] = emit_tilelang(program, target.gpu).text
        return Emitted(spec.name, target, schedule, program, files)
    device = device_program(program, target.gpu)
    files[f"{spec.name}.tilelang.py"] = device.tilelang.text
    suffix = "hip" if target.gpu.kind == "hip" else "cu"
    files |= {
        f"{spec.name}.{k.name}.{suffix}": d.text for k, d in zip(device.tilelang.kernels, device.kernels, strict=True)
    }
    files[f"{spec.name}.launch.json"] = json.dumps(launches(program, device), indent=1) + "\n"
    return Emitted(spec.name, target, schedule, program, files, kernels_of(device))


def kernels_of(device: DeviceProgram) -> tuple[Kernel, ...]:
    parts = zip(device.tilelang.kernels, device.kernels, device.seconds, strict=True)
    return tuple(
        Kernel(k.name, k.grid, k.threads, max(int(x.shared_bytes) for x in d.launches), s, _counted(d))
        for k, d, s in parts
    )


def _counted(d: DeviceSource) -> dict[str, int]:
    body = d.text[d.text.rfind("__launch_bounds__") :]
    counts = {kind: body.count(word) for word, kind in INSTRUCTIONS.items()}
    return {kind: n for kind, n in counts.items() if n}


def launches(program: Program, device: DeviceProgram) -> dict[str, object]:
    """What a host needs to run a program: kernels in order, for each window of rows, with workspaces of its own."""
    return {
        "arguments": [asdict(a) | {"dtype": a.dtype.name} for a in device.tilelang.args],
        "workspaces": [asdict(a) | {"dtype": a.dtype.name} for a in device.tilelang.workspaces],
        "strides": [{"tensor": n, "names": names, "multiple_of": unit} for n, names, unit in device.tilelang.strides],
        "windows": program.row_bytes is not None,
        "kernels": [_launch(d) for d in device.kernels],
    }


def _launch(d: DeviceSource) -> dict[str, object]:
    shown = json.loads(d.to_json())
    del shown["text"]
    return dict(shown)


def write(emitted: Emitted, folder: Path) -> list[Path]:
    """Write the files. Raises BadOption where the folder cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in emitted.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise BadOption(option="-o", value=str(folder), problem=f"cannot be written: {e.strerror or e}") from None
    return [folder / name for name in emitted.files]


# ---- verification ----------------------------------------------------------------------------------------------------


def verify(spec: Spec, binding: Binding, schedule: Schedule, target: Target, tier: str) -> Emitted:
    """Take an operator through a tier of checks, which raises what is wrong. Raises BadOption for an unknown tier."""
    if tier not in _CHECKS:
        raise BadOption(option="--tier", value=tier, problem=f"no such tier; known: {', '.join(_CHECKS)}")
    if target.gpu is None:
        raise BadOption(option="--target", value=target.name, problem="tiers are of GPU programs; see run --check")
    return _CHECKS[tier](spec, binding, schedule, target)


_CHECKS: dict[str, Callable[[Spec, Binding, Schedule, Target], Emitted]] = {"lower": emit}
