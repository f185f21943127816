"""Generated programs under AddressSanitizer and UBSan, their tensors in memory of exactly their size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.native import INTERPRETER, distance, fitted, inputs_of, run, tolerance
from support.standalone import run_alone

from tilewright.dsl.isa import ISAS, Isa
from tilewright.dsl.schedule import Schedule

pytestmark = pytest.mark.slow
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SCHEDULE = Schedule(rows=4, keys=40, strip=5, partitions=2)


def command(isa: Isa, rest: Sequence[str]) -> list[str]:
    return ["gcc", *FLAGS, *isa.flags, *rest]


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512bf16"])
@pytest.mark.parametrize("name", ["flash_attention", "latent_sparse_attention", "mla_indexer"])
def test_nothing_beside_what_is_given(name: str, isa: str, seed: int, tmp_path: Path) -> None:
    """No access beside a tensor or scratch, nothing undefined, and the interpreter's numbers."""
    if ISAS[isa].missing():
        pytest.skip(f"this processor has no {isa}")
    if sanitizers() is None:
        pytest.skip("gcc with its sanitizers is needed")
    stored = {"avx2": "float8_e4m3fn", "avx512": "float16", "avx512bf16": "bfloat16"}.get(isa, "float32")
    rounded = isa == "avx512bf16" and name != "mla_indexer"
    output = "bfloat16" if rounded else "float32"
    inputs = inputs_of(
        name, seed, cache_dtype=None if name == "mla_indexer" else stored, granularity=8, dtype=output, page_size=3
    )
    schedule = fitted(inputs, replace(SCHEDULE, products="bfloat16" if rounded else "float32"))
    got = run_alone(inputs, schedule, ISAS[isa], output, tmp_path, partial(command, ISAS[isa]))
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
