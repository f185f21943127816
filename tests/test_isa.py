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
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[str]], None]]:
    """Pretend to run on an x86 processor with these features, or on another machine; Linux permits tiles."""

    def pretend(features: set[str], machine: str = "x86_64") -> None:
        monkeypatch.setattr(isa, "processor_features", lambda: frozenset(features))
        monkeypatch.setattr(isa, "tiles_permitted", lambda: True)
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
        (AMX, ["portable", "avx2", "avx512", "avx512bf16", "amxbf16"]),
        (AMX - {"avx512_bf16"}, ["portable", "avx2", "avx512"]),
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
        ("sse9", "one of portable, avx2, avx512, avx512bf16, amxbf16"),
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


def test_tiles_refused(processor: Callable[[set[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Linux refuses AMX, everything else is left, and asking for it says why not."""
    processor(AMX)
    monkeypatch.setattr(isa, "tiles_permitted", lambda: False)
    assert best_isa().name == "avx512bf16"
    monkeypatch.setenv("TILEWRIGHT_CPU_ISA", "amxbf16")
    with pytest.raises(BadEnvironment, match="this processor lacks permission for amx_tile"):
        best_isa()


def test_tiles_are_asked_for_where_they_are(
    processor: Callable[[set[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission makes signal frames larger: a processor without AMX is not asked."""
    processor(AMX - {"amx_bf16"})
    monkeypatch.setattr(isa, "tiles_permitted", lambda: pytest.fail("asked"))
    assert best_isa().name == "avx512bf16"


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="tiles are of Linux on x86_64")
def test_small_signal_stack() -> None:
    """Linux refuses a thread whose signal stack tiles do not fit on: no failure, only narrower."""
    program = """
import ctypes
from tilewright.dsl.isa import best_isa

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(6000)
print(ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 6000)), None), best_isa().name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    code, name = done.stdout.split()
    if code != "0":
        pytest.skip("this system's signal stacks are larger anyway")
    assert name in set(ISAS) - {"amxbf16"}


@pytest.mark.parametrize("name", ISAS)
def test_flags_are_the_features(name: str) -> None:
    """The compiler may use what was looked for, and nothing else."""
    spelled = [f.replace("amx_", "amx-").replace("_", "") for f in ISAS[name].features]
    assert list(ISAS[name].flags) == [f"-m{f}" for f in spelled]


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
