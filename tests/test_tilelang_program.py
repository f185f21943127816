"""Nests through TileLang to device sources: what is kept, and what TileLang's failures are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.gpu import bound_call, nest_for
from support.native import inputs_of

from tilewright.codegen_cache import tilelang_program
from tilewright.codegen_cache.tilelang_program import device_program
from tilewright.dsl.emit_tilelang import TileLangSource, emit_tilelang
from tilewright.dsl.errors import LoweringError, NoRoom
from tilewright.dsl.gpu import GPUS, Gpu
from tilewright.dsl.loops import Program
from tilewright.dsl.schedule import Schedule

TARGET = "cuda:sm_80"
GPU = GPUS[TARGET]


@pytest.fixture
def nest() -> Program:
    inputs = inputs_of(
        "flash_attention", 0, cache_dtype="bfloat16", dtype="bfloat16", heads=8, dims={"dim": 32, "value_dim": 32}
    )
    bound, _ = bound_call(inputs)
    return nest_for(inputs, bound, Schedule(rows=8, keys=32, products="bfloat16"), TARGET)


def test_a_kernel_is_lowered_once(nest: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is read from the cache, and TileLang is not asked."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    first = device_program(nest, GPU)
    assert all(s > 0 for s in first.seconds)
    monkeypatch.setattr(tilelang_program, "_lower", None)
    again = device_program(nest, GPU)
    assert again.kernels == first.kernels
    assert set(again.seconds) == {0.0}
    assert [k.arch for k in again.kernels] == ["sm_80"] * len(again.kernels)


def test_errors(
    nest: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    """A text that TileLang cannot take, and a kernel that its layout makes too large."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(NoRoom) as large:
        device_program(nest, replace(GPU, shared_bytes=1024))

    def broken(program: Program, gpu: Gpu, *, aligned: bool = True) -> TileLangSource:
        source = emit_tilelang(program, gpu, aligned=aligned)
        return replace(source, text=source.text.replace("T.exp2(", "T.no_such_function(").replace("T.exp(", "T.none("))

    monkeypatch.setattr(tilelang_program, "emit_tilelang", broken)
    with pytest.raises(LoweringError) as failed:
        device_program(nest, GPU)
    golden(
        "errors_tilelang", f"-- NoRoom: a small block\n{large.value}\n\n-- LoweringError: no such name\n{failed.value}"
    )
