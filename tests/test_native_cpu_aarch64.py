"""Generated programs for another processor: compiled for aarch64 by ziglang, run by QEMU, with the numbers of x86."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.native import On, distance, fitted, inputs_of, needs_compiler, run, tolerance
from support.standalone import run_alone

from tilewright.codegen_cache.compilers import FLAGS
from tilewright.dsl.isa import ISAS
from tilewright.dsl.schedule import Schedule

QEMU = next((path for n in ("qemu-aarch64-static", "qemu-aarch64") if (path := shutil.which(n))), None)
pytestmark = [
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="needs qemu-aarch64 (Debian's qemu-user-static)"),
    pytest.mark.skipif(
        importlib.util.find_spec("ziglang") is None, reason="needs PyPI's ziglang, which cross-compiles"
    ),
]
SCHEDULES = {
    "tiles": Schedule(rows=4, keys=40, strip=5, partitions=2),
    "a row at a time": Schedule(rows=1, keys=16, start="first"),
}


@pytest.fixture
def zig_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where zig keeps the C library that it builds for the other processor, from run to run."""
    if "ZIG_GLOBAL_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(request.config.cache.mkdir("zig")))


def command(rest: Sequence[str]) -> list[str]:
    """As kernels are compiled, but for a processor whose vectors are NEON's, and whole."""
    flags = [f for f in FLAGS if f != "-fPIC"]
    return [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static", *flags, *rest]


CASES = [
    (name, stored)
    for name in ("flash_attention", "latent_sparse_attention")
    for stored in ("float32", "float16", "bfloat16", "float8_e4m3fn")
]


@pytest.mark.usefixtures("zig_cache")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "stored"), [*CASES, ("mla_indexer", None)])
def test_agrees_with_x86(name: str, schedule: str, stored: str | None, seed: int, tmp_path: Path) -> None:
    """Products, packing, conversions of every type stored, exponentials, selection, in the portable spelling; but for
    the rounding of products that only one of the two fuses with sums.
    """
    assert QEMU is not None
    inputs = inputs_of(name, seed, cache_dtype=stored, granularity=8 if stored else None, page_size=3)
    chosen = fitted(inputs, SCHEDULES[schedule])
    got = run_alone(inputs, chosen, ISAS["portable"], "float32", tmp_path, command, [QEMU])
    want = run(inputs, chosen, On("cpu", "portable"))
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert distance(got[key], x) <= tolerance("float32", chosen)
