"""Generated programs under AddressSanitizer and UBSan, their tensors in memory of exactly their size."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cpu_runtime import HEADERS
from support.native import INTERPRETER, distance, fitted, inputs_of, needs_compiler, run, tolerance
from torch import Tensor

from tilewright.codegen_cache.bind import bind
from tilewright.codegen_cache.compilers import find_compiler
from tilewright.dsl.dtypes import DTYPES, Kind
from tilewright.dsl.emit_c import CSource, emit_c
from tilewright.dsl.isa import ISAS, Isa
from tilewright.dsl.loops import Program
from tilewright.dsl.lower import lower
from tilewright.dsl.scalars import Number
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.windows import DEFAULT_BUDGET, bare_workspace, row_windows, sizes_named
from tilewright.random_inputs import Inputs, torch_dtype

pytestmark = [needs_compiler, pytest.mark.slow]
DRIVER = Path(__file__).parent / "support" / "native_sanitized.c"
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SCHEDULE = Schedule(rows=4, keys=40, strip=5, partitions=2)


def executable(source: CSource, isa: Isa, folder: Path) -> Path:
    """The program with its driver."""
    compiler = find_compiler()
    assert compiler is not None
    (folder / "kernel.c").write_text(source.text, encoding="utf-8")
    command = [*compiler.command, *FLAGS, *isa.flags, f"-I{HEADERS}", str(folder / "kernel.c"), str(DRIVER)]
    built = subprocess.run([*command, "-o", str(folder / "run"), "-lm"], capture_output=True, text=True, timeout=300)
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return folder / "run"


def arguments(inputs: Inputs, program: Program, bound: dict[str, Tensor], scalars: dict[str, int | float]) -> tuple[
    dict[str, Tensor], dict[str, Number]
]:  # fmt: skip
    """Every tensor the program takes, workspaces among them, and every number."""
    sizes: dict[str, Number] = dict(scalars)
    for a in program.args:
        sizes.update(sizes_named(a, bound))
    counted = {a.name: bound[a.name].numpy() for a in program.args if a.shape and a.dtype.kind is Kind.INT}
    (window,) = row_windows(program, sizes, counted, DEFAULT_BUDGET)
    return {**bound, **{w.name: bare_workspace(w, window) for w in program.workspaces}}, window


def sanitized(inputs: Inputs, schedule: Schedule, isa: Isa, output: str, folder: Path) -> dict[str, Tensor]:
    """The outputs of the program run under sanitizers."""
    spec, rows = inputs.spec, int(inputs.input_row_offsets[-1])
    dtypes = {n: DTYPES[output] if e.dtype.kind is Kind.FLOAT else e.dtype for n, e in spec.outputs}
    bound = bind(spec.name, spec, inputs.arguments, inputs.input_row_offsets, dtypes, {})
    program = lower(spec, bound.binding, schedule)
    shapes = {n: [rows if a == "row" else bound.binding.size(a) for a in e.axes] for n, e in spec.outputs}
    results = {n: torch.empty(shape, dtype=torch_dtype(dtypes[n])) for n, shape in shapes.items()}
    tensors, sizes = arguments(
        inputs, program, {**bound.tensors, **results, "offsets": inputs.input_row_offsets}, bound.scalars
    )
    source = emit_c(program, isa)
    given = [tensors[a.name].contiguous() for a in source.tensors]
    raw = [t.flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in given]
    strides = [s for t in given for s in t.stride()]
    words = [len(given), len(strides), len(source.sizes), len(source.numbers), *map(len, raw), *strides]
    words += [int(sizes[n]) for n in source.sizes]
    numbers = [float(sizes[n]) for n in source.numbers]
    packed = struct.pack(f"={len(words)}q{len(numbers)}d", *words, *numbers)
    (folder / "in").write_bytes(packed + b"".join(raw))
    program_path = executable(source, isa, folder)
    ran = subprocess.run(
        [str(program_path), str(folder / "in"), str(folder / "out")], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    found, start, out = (folder / "out").read_bytes(), 0, dict[str, Tensor]()
    for a, t in zip(source.tensors, given, strict=True):
        size = t.numel() * t.element_size()
        if a.name in results:
            out[a.name] = torch.frombuffer(bytearray(found[start : start + size]), dtype=t.dtype).view(t.shape)
        start += size
    return out


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512bf16"])
@pytest.mark.parametrize("name", ["flash_attention", "latent_sparse_attention", "mla_indexer"])
def test_nothing_beside_what_is_given(name: str, isa: str, seed: int, tmp_path: Path) -> None:
    """No access beside a tensor or scratch, nothing undefined, and the interpreter's numbers."""
    if ISAS[isa].missing():
        pytest.skip(f"this processor has no {isa}")
    stored = {"avx2": "float8_e4m3fn", "avx512": "float16", "avx512bf16": "bfloat16"}.get(isa, "float32")
    rounded = isa == "avx512bf16" and name != "mla_indexer"
    output = "bfloat16" if rounded else "float32"
    inputs = inputs_of(
        name, seed, cache_dtype=None if name == "mla_indexer" else stored, granularity=8, dtype=output, page_size=3
    )
    schedule = fitted(inputs, replace(SCHEDULE, products="bfloat16" if rounded else "float32"))
    got = sanitized(inputs, schedule, ISAS[isa], output, tmp_path)
    want = run(inputs, schedule, INTERPRETER, output)
    for key, x in want.items():
        if x.is_floating_point():
            assert distance(got[key], x) <= tolerance(output, schedule)


# ---- whole calls -----------------------------------------------------------------------------------------------------

SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
CASES = "(test_c and not far_pages and not c4) or test_bad_indices"
FILES = ("test_worked_cases.py", "test_bad_indices.py", "test_indexer.py", "test_topk.py")


def sanitizers() -> str | None:
    """What gcc's sanitizers need in a process before all else; None where there are none."""
    gcc = shutil.which("gcc")
    names = [f"-print-file-name=lib{n}.so" for n in ("asan", "ubsan")]
    found = [subprocess.run([gcc, n], capture_output=True, text=True).stdout.strip() for n in names] if gcc else []
    return " ".join(found) if found and all(map(os.path.isabs, found)) else None


def test_worked_cases_under_sanitizers(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Calls with torch's own tensors, whose memory has fences in such a process; tables and lists that say too much."""
    libraries = sanitizers()
    if libraries is None:
        pytest.skip("gcc with its sanitizers is needed")
    compiler = tmp_path / "cc"
    compiler.write_text(
        f"#!/bin/sh\nunset LD_PRELOAD\n"
        f'[ "$1" = --version ] && {{ echo "$({shutil.which("gcc")} --version | head -n 1) {SANITIZED}"; exit; }}\n'
        f'exec {shutil.which("gcc")} "$@" {SANITIZED}\n'
    )
    compiler.chmod(0o700)
    kept = Path(request.config.cache.mkdir("sanitized"))
    tests = Path(__file__).parent
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "--capture=sys", "-n", "0", "-o", f"cache_dir={kept}",
        "--target", "cpu", "-m", "not slow", "-k", CASES, *(str(tests / f) for f in FILES),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python never frees all
    }
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment, cwd=tests.parent)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert int(ran.stdout.split(" passed")[0].split()[-1]) > 100
    built = list(kept.glob("d/tilewright/native/*/kernel.so"))
    assert built
    assert all(b"__asan_report" in path.read_bytes() for path in built)
