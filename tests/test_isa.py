"""Instruction sets: what this processor has, and what TILEWRIGHT_CPU_ISA may ask for."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright.dsl import isa
from tilewright.dsl.errors import BadEnvironment
from tilewright.dsl.isa import ISAS, best_isa, supported

DOCS = Path(__file__).parents[1] / "docs"
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[str]], None]]:
    """Pretend to run on an x86 processor with these features, or on another machine."""

    def pretend(features: set[str], machine: str = "x86_64") -> None:
        monkeypatch.setattr(isa, "processor_features", lambda: frozenset(features))
        monkeypatch.setattr(platform, "machine", lambda: machine)
        supported.cache_clear()

    yield pretend
    monkeypatch.undo()
    supported.cache_clear()


def test_this_processor_has_one() -> None:
    """The portable set comes first and is always there; the last is taken."""
    assert supported()[0].name == "portable"
    assert best_isa() is supported()[-1]


@pytest.mark.parametrize(
    ("features", "names"),
    [
        (set(), ["portable"]),
        (AVX2 - {"f16c"}, ["portable"]),
        (AVX2, ["portable", "avx2"]),
        (AVX512, ["portable", "avx2", "avx512"]),
        (AVX512 - {"avx512dq"} | {"avx512_bf16"}, ["portable", "avx2"]),
        (AVX512 | {"avx512_bf16", "amx_tile"}, ["portable", "avx2", "avx512", "avx512bf16"]),
    ],
)
def test_supported_sets(features: set[str], names: list[str], processor: Callable[[set[str]], None]) -> None:
    """All features of a set are there, or it is left out."""
    processor(features)
    assert [i.name for i in supported()] == names


def test_another_machine(processor: Callable[[set[str], str], None]) -> None:
    """Feature names of one machine mean nothing on another."""
    processor(AVX512, "aarch64")
    assert [i.name for i in supported()] == ["portable"]


@pytest.mark.parametrize("name", ["portable", "avx2"])
def test_forced(name: str, processor: Callable[[set[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrower set than the best."""
    processor(AVX512)
    monkeypatch.setenv("TILEWRIGHT_CPU_ISA", name)
    assert best_isa() is ISAS[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sse9", "one of portable, avx2, avx512, avx512bf16"),
        ("avx512bf16", "one of portable, avx2: this processor lacks avx512dq, avx512_bf16"),
    ],
)
def test_cannot_be_forced(
    name: str, expected: str, processor: Callable[[set[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set that is unknown, or that this processor lacks: the features are named."""
    processor(AVX512 - {"avx512dq"})
    monkeypatch.setenv("TILEWRIGHT_CPU_ISA", name)
    with pytest.raises(BadEnvironment) as caught:
        best_isa()
    assert str(caught.value) == f"environment variable TILEWRIGHT_CPU_ISA={name!r}; expected {expected}"


@pytest.mark.parametrize("name", ISAS)
def test_flags_are_the_features(name: str) -> None:
    """The compiler may use what was looked for, and nothing else."""
    assert list(ISAS[name].flags) == [f"-m{f.replace('_', '')}" for f in ISAS[name].features]


def test_sets_are_documented() -> None:
    """The list in the manual is the table."""
    text = (DOCS / "targets.md").read_text()
    assert re.findall(r"^\* `(\w+)`: ", text, re.M) == list(ISAS)


@pytest.mark.parametrize(
    "module", ["dsl.isa", "codegen_cache.compilers", "codegen_cache.native_build", "codegen_cache.threads"]
)
def test_import_is_light(module: str, tmp_path: Path) -> None:
    """Looking for instruction sets, compilers and libraries needs no tensors."""
    heavy = {"sympy", "tilelang", "torch"}
    program = f"import sys, tilewright.{module}; print(*sorted(set(sys.modules) & {heavy}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")
