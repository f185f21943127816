"""Which C compiler is taken, and that each one builds the same vector code."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilewright.codegen_cache import compilers
from tilewright.codegen_cache.compilers import Compiler, find_compiler
from tilewright.codegen_cache.native_build import HEADERS, build
from tilewright.codegen_cache.threads import pool_source
from tilewright.dsl.errors import BadEnvironment
from tilewright.dsl.isa import ISAS, Isa, supported

ZIG = (sys.executable, "-m", "ziglang", "cc")


@pytest.fixture(autouse=True)
def _looked_for_anew() -> None:
    compilers._find.cache_clear()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """`programs(name, script)` puts a program on a PATH that has no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return path

    return put


def test_first_on_path(programs: Callable[[str, str], Path]) -> None:
    """cc before gcc before clang, each asked for its version."""
    programs("clang", "echo clang 18")
    gcc = programs("gcc", "echo gcc 12; echo Copyright")
    assert find_compiler() == Compiler((str(gcc),), "gcc 12")
    compilers._find.cache_clear()
    cc = programs("cc", "echo cc 12")
    assert find_compiler() == Compiler((str(cc),), "cc 12")


@pytest.mark.usefixtures("programs")
def test_ziglang_where_the_system_has_none() -> None:
    """The package from PyPI, run by this Python."""
    found = find_compiler()
    assert found is not None
    assert found.command == ZIG
    assert found.is_zig


@pytest.mark.usefixtures("programs")
def test_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is an answer, not an error."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_compiler() is None


def test_asked_for(programs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command with arguments, quoted as for a shell, goes before what PATH has."""
    programs("cc", "echo cc 12")
    own = tmp_path / "my compiler"
    own.write_text('#!/bin/sh\necho "$1 of mine"\n')
    own.chmod(0o700)
    monkeypatch.setenv("TILEWRIGHT_CC", f"'{own}' -q")
    assert find_compiler() == Compiler((str(own), "-q"), "-q of mine")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("nowhere/cc", "nowhere/cc is not a program"),
        ("'", "No closing quotation"),
        ("broken -O1", "broken -O1 --version ended with status 3 and said no license"),
        ("silent", "silent --version ended with status 0 and said nothing"),
    ],
)
def test_asked_for_and_broken(
    asked: str, problem: str, programs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user names must run: no other compiler is taken in its place."""
    programs("cc", "echo cc 12")
    programs("silent", "true")
    folder = programs("broken", "echo no license >&2; exit 3").parent
    monkeypatch.setenv("TILEWRIGHT_CC", asked)
    for _ in range(2):
        with pytest.raises(BadEnvironment) as caught:
            find_compiler()
        text = f"environment variable TILEWRIGHT_CC={asked!r}; expected a C compiler: {problem}"
        assert str(caught.value).replace(f"{folder}/", "") == text


def test_one_without_a_c_library_is_passed_over(programs: Callable[[str, str], Path]) -> None:
    """As a system has it where the compiler's package does not bring the headers."""
    missing = "math.h: No such file or directory"
    cc = programs("cc", f'[ "$1" = --version ] && {{ echo cc 12; exit; }}; echo "{missing}" >&2; exit 1')
    gcc = programs("gcc", '[ "$1" = --version ] && echo gcc 12; true')
    with pytest.warns(RuntimeWarning) as seen:
        assert find_compiler() == Compiler((str(gcc),), "gcc 12")
    (text,) = (str(w.message) for w in seen)
    assert text.startswith(f"C compiler passed over: {cc} -fsyntax-only")
    assert text.endswith(f"ended with status 1 and said {missing}")


def test_broken_one_is_passed_over(programs: Callable[[str, str], Path]) -> None:
    """With a warning, once."""
    cc = programs("cc", "echo install the developer tools >&2; exit 1")
    gcc = programs("gcc", "echo gcc 12")
    text = f"C compiler passed over: {cc} --version ended with status 1 and said install the developer tools"
    with pytest.warns(RuntimeWarning) as seen:
        assert find_compiler() == Compiler((str(gcc),), "gcc 12")
    assert [str(w.message) for w in seen] == [text]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_compiler()


def test_found_again_after_path_changes(programs: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is remembered, for the environment it was given in."""
    counter = programs("cc", 'echo >> "$0.runs"; echo cc 12')
    with ThreadPoolExecutor(4) as threads:
        assert len({f.result() for f in [threads.submit(find_compiler) for _ in range(20)]}) == 1
    once = (counter.parent / "cc.runs").read_text()
    find_compiler()
    assert (counter.parent / "cc.runs").read_text() == once
    monkeypatch.setenv("PATH", os.devnull)
    found = find_compiler()
    assert found is not None
    assert found.is_zig


VECTORS = """
#include <stdint.h>
#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#define LANES %d
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));

__attribute__((visibility("default"))) void sweep(float *x, const float *a, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) {
    vector v, w;
    memcpy(&v, x + i, sizeof v);
    memcpy(&w, a + i, sizeof w);
    v = v * w + w;                    /* rounded twice: no contraction */
    mask big = v > 1.0f;
    v = (vector)(((mask)v & big) | ((mask)(-v) & ~big));
    memcpy(x + i, &v, sizeof v);
  }
  x[0] = fmaxf(x[0], 0.5f) * sqrtf(x[1] * x[1]) + (float)(1 << (n & 7));
}

__attribute__((visibility("default"))) int width(void) {
#if defined(__AVX512BF16__)
  return 516;
#elif defined(__AVX512F__)
  return 512;
#elif defined(__AVX2__)
  return 256;
#else
  return 0;
#endif
}
"""


@pytest.fixture(scope="session")
def zig_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """zig builds its C library at the first use, for seconds."""
    return str(tmp_path_factory.mktemp("zig"))


def swept(isa: Isa, compiler: Compiler) -> list[float]:
    import numpy as np

    library = ctypes.CDLL(str(build(VECTORS % isa.lanes, "vectors", isa, compiler)))
    widths = {"portable": 0, "avx2": 256, "avx512": 512, "avx512bf16": 516, "amxbf16": 516}
    assert library.width() == widths[isa.name]
    rng = np.random.default_rng(0)
    x, a = rng.standard_normal((2, 256)).astype(np.float32)
    library.sweep(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(a.ctypes.data), ctypes.c_int64(256))
    return list(x)


@pytest.mark.slow
def test_compilers_agree(tmp_path: Path, zig_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's compiler and zig, on every instruction set here: the same bits, and only what the set may use."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", zig_cache)
    system = find_compiler()
    assert system is not None
    results = [swept(isa, system) for isa in supported()]
    results += [swept(isa, compilers.compiler_at(ZIG)) for isa in {supported()[0], supported()[-1]}]
    assert all(r == results[0] for r in results)


@pytest.mark.parametrize("name", ISAS)
def test_headers_know_the_instruction_set(name: str) -> None:
    """They and the table say the same of vectors and register blocks."""
    system, isa = find_compiler(), ISAS[name]
    assert system is not None
    if isa.machine not in ("any", os.uname().machine):
        pytest.skip("another machine")
    options = [*system.flags, *isa.flags, "-I", str(HEADERS), "-include", "tilewright.h", "-xc", os.devnull]
    done = subprocess.run([*system.command, *options, "-E", "-dM"], capture_output=True, text=True, check=True)
    macros = dict(line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if len(line.split()) == 3)
    rows = macros.get("TW_TILE_ROWS", macros["TW_MICRO_ROWS"])
    assert (macros["TW_LANES"], rows) == (str(isa.lanes), str(isa.micro_rows))


@pytest.mark.slow
def test_zig_builds_the_thread_pool(tmp_path: Path, zig_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no OpenMP, and no headers of the system's."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", zig_cache)
    source = f"#define TW_ALLOWED_CPUS 3\n{pool_source()}"
    library = ctypes.CDLL(str(build(source, "the thread pool", ISAS["portable"], compilers.compiler_at(ZIG))))
    seen: list[int] = []
    item = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    append = item(lambda context, i, scratch: seen.append(i))
    assert library.tw_parallel(append, None, ctypes.c_int64(50), ctypes.c_int64(3 << 20), 8) == 0
    assert sorted(seen) == list(range(50))
    assert library.tw_workers() == 2


@pytest.mark.parametrize("name", [n for n in ISAS if n not in {i.name for i in supported()}])
def test_sets_of_other_processors_compile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the compiler knows the machine, what this processor cannot run can be built."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    compiler = find_compiler()
    assert compiler is not None
    if ISAS[name].machine != os.uname().machine:
        pytest.skip("another machine")
    assert build(VECTORS % ISAS[name].lanes, "vectors", ISAS[name], compiler).is_file()
