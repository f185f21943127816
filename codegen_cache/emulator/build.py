"""Translated sources to shared libraries: compiled with access hooks, linked with the runtime, compiled once."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from tilewright.codegen_cache.building import Commands, Work, entry
from tilewright.codegen_cache.compilers import Broken, Compiler, compiler_at
from tilewright.dsl.errors import MissingToolkit

RUNTIME: Final = Path(__file__).parent / "runtime"
LIBRARY: Final = "emulation.so"
_OBJECT: Final = "runtime.o"
SOURCE: Final = "source.cpp"
_COMMON: Final = (
    "-std=c++20",
    "-fPIC",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-sanitize=undefined",  # zig turns it on
)
_OPTIMISED: Final = ("-O3", "-w")
# Every load and store calls a hook of ours; what a vectoriser makes of them, gathers and scatters, would call none.
_HOOKED: Final = ("-O1", "-g1", "-w", "-fsanitize=thread", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")


def build(text: str, name: str, arch: str) -> Path:
    """The shared library of a translated source.

    Raises CompileError, where the source uses something that is not emulated among others, and MissingToolkit.
    """
    compiler = cxx_compiler(os.environ.get("PATH"))
    flags = (*_COMMON, *target_flags(arch))
    runtime = _runtime(compiler, (*_COMMON, *(f for f in target_flags(arch) if f == "-DTW_WAVE64")))
    parts = _parts(text, compiler, (*flags, *_HOOKED))
    parts["runtime"] = runtime.key

    def commands(folder: Path | None) -> Commands:
        start = (*compiler.command, *flags)
        compiled = (*start, *_HOOKED, "-I", str(RUNTIME), "-c", SOURCE, "-o", f"{SOURCE}.o")
        linked = (*compiler.command, "-shared", f"{SOURCE}.o", str((folder or Path()) / _OBJECT), "-o", LIBRARY)
        return compiled, linked

    work = Work(parts, SOURCE, text, name, shlex.join(compiler.command), commands, runtime)
    return entry("emulation", work) / LIBRARY


def target_flags(arch: str) -> tuple[str, ...]:
    """How the headers are told what is emulated."""
    if not arch.startswith("gfx"):
        return (f"-DTW_SM={arch.removeprefix('sm_').rstrip('a')}",)
    return ("-DTW_HIP", "-DTW_WAVE64", "-DTW_FNUZ") if arch == "gfx942" else ("-DTW_HIP", "-DTW_WAVE64")


def _runtime(compiler: Compiler, flags: tuple[str, ...]) -> Work:
    source = '#include "runtime.cpp"\n'
    parts = _parts(source, compiler, (*flags, *_OPTIMISED))
    files = sorted(p for p in RUNTIME.iterdir() if p.suffix in {".hpp", ".cpp"})
    parts["headers"] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    def commands(_: Path | None) -> Commands:
        return ((*compiler.command, *flags, *_OPTIMISED, "-I", str(RUNTIME), "-c", "all.cpp", "-o", _OBJECT),)

    return Work(parts, "all.cpp", source, "the emulation runtime", shlex.join(compiler.command), commands)


def _parts(source: str, compiler: Compiler, flags: tuple[str, ...]) -> dict[str, object]:
    return {
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "compiler": compiler.version,
        "flags": flags,
        "processor": _processor(),  # -march=native
    }


@functools.cache
def _processor() -> str:
    """What this processor can do, as a hash."""
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith(("flags", "model name"))]
    return hashlib.sha256("\n".join(lines[:2]).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def cxx_compiler(path: str | None) -> Compiler:
    """g++ or clang++ on PATH, else PyPI's ziglang. `path` is there for the cache. Raises MissingToolkit."""
    found = [(p,) for name in ("g++", "clang++", "c++") if (p := shutil.which(name, path=path))]
    zig = [(sys.executable, "-m", "ziglang", "c++")] if importlib.util.find_spec("ziglang") else []
    for command in [*found, *zig]:
        try:
            return compiler_at(command)
        except Broken:
            continue
    raise MissingToolkit(what="emulation", needed="a C++ compiler (C++20)", advice="install g++, or PyPI's ziglang")
