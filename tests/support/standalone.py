"""Generated programs outside of this process: a driver in C, tensors that go there and come back in files."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from tilewright.codegen_cache.bind import bind
from tilewright.dsl.dtypes import DTYPES, Kind
from tilewright.dsl.emit_c import emit_c
from tilewright.dsl.isa import Isa
from tilewright.dsl.loops import Program
from tilewright.dsl.lower import lower
from tilewright.dsl.scalars import Number
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.windows import DEFAULT_BUDGET, bare_workspace, row_windows, sizes_named
from tilewright.random_inputs import Inputs, torch_dtype

from .cpu_runtime import HEADERS

DRIVER = Path(__file__).parent / "standalone.c"
Build: TypeAlias = Callable[[Sequence[str]], Sequence[str]]  # sources, includes and -lm -> a compiler's command


def run_alone(
    inputs: Inputs, schedule: Schedule, isa: Isa, output: str, folder: Path, build: Build, emulator: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The outputs of a program that `build` compiles in `folder`; its floating results as `output`."""
    spec, rows = inputs.spec, int(inputs.input_row_offsets[-1])
    dtypes = {n: DTYPES[output] if e.dtype.kind is Kind.FLOAT else e.dtype for n, e in spec.outputs}
    bound = bind(spec.name, spec, inputs.arguments, inputs.input_row_offsets, dtypes, {})
    program = lower(spec, bound.binding, schedule)
    shapes = {n: [rows if a == "row" else bound.binding.size(a) for a in e.axes] for n, e in spec.outputs}
    results = {n: torch.empty(shape, dtype=torch_dtype(dtypes[n])) for n, shape in shapes.items()}
    given = {**bound.tensors, **results, "offsets": inputs.input_row_offsets}
    tensors, sizes = _arguments(program, given, bound.scalars)
    source = emit_c(program, isa)
    taken = [tensors[a.name].contiguous() for a in source.tensors]
    numbers = [float(sizes[n]) for n in source.numbers]
    (folder / "in").write_bytes(_packed(taken, [int(sizes[n]) for n in source.sizes], numbers))
    (folder / "kernel.c").write_text(source.text, encoding="utf-8")
    command = build([str(folder / "kernel.c"), str(DRIVER), f"-I{HEADERS}", "-o", str(folder / "run"), "-lm"])
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run(
        [*emulator, str(folder / "run"), str(folder / "in"), str(folder / "out")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    found, start, out = (folder / "out").read_bytes(), 0, dict[str, Tensor]()
    for a, t in zip(source.tensors, taken, strict=True):
        if a.name in results:
            out[a.name] = torch.frombuffer(bytearray(found[start : start + t.nbytes]), dtype=t.dtype).view(t.shape)
        start += t.nbytes
    return out


def _arguments(
    program: Program, given: dict[str, Tensor], scalars: dict[str, int | float]
) -> tuple[dict[str, Tensor], dict[str, Number]]:
    """Every tensor the program takes, workspaces among them, and every number."""
    sizes: dict[str, Number] = dict(scalars)
    for a in program.args:
        sizes.update(sizes_named(a, given))
    counted = {a.name: given[a.name].numpy() for a in program.args if a.shape and a.dtype.kind is Kind.INT}
    (window,) = row_windows(program, sizes, counted, DEFAULT_BUDGET)
    return {**given, **{w.name: bare_workspace(w, window) for w in program.workspaces}}, window


def _packed(tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float]) -> bytes:
    """As the driver reads it."""
    raw = [t.flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in tensors]
    strides = [s for t in tensors for s in t.stride()]
    words = [len(tensors), len(strides), len(sizes), len(numbers), *map(len, raw), *strides, *sizes]
    return struct.pack(f"={len(words)}q{len(numbers)}d", *words, *numbers) + b"".join(raw)
