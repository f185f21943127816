"""Generated C to shared libraries, each compiled once per machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from pathlib import Path
from typing import Final

import tilewright.dsl
from tilewright.dsl.isa import Isa

from .building import Commands, Work, entry
from .compilers import Compiler, Runtime

HEADERS: Final = Path(tilewright.dsl.__file__).parent / "cpu"
RUNTIME_HEADER: Final = "tilewright.h"
PRIMITIVES_SOURCE: Final = "primitives.c"
SOURCE: Final = "kernel.c"
LIBRARY: Final = "kernel.so"


def build(source: str, name: str, isa: Isa, compiler: Compiler) -> Path:
    """The shared library of a C source, from the cache or compiled now. `name` is what messages call it.

    Raises CompileError, which keeps the source, and UnsafeCache. A cache that cannot be written is replaced by a
    temporary folder for this process, with one notice.
    """
    return entry("native", _library(source, name, isa, compiler)) / LIBRARY


def _library(source: str, name: str, isa: Isa, compiler: Compiler) -> Work:
    """Sources that do not include the runtime, such as the thread pool's, do not depend on it."""
    parts = _parts(source, isa, compiler)
    needs = _runtime(isa, compiler) if RUNTIME_HEADER in source else None
    if needs is not None:
        parts["runtime"] = needs.key

    def commands(runtime: Path | None) -> Commands:
        return compiler.steps(SOURCE, LIBRARY, isa, Runtime(HEADERS, runtime) if runtime else None)

    return Work(parts, SOURCE, source, name, shlex.join(compiler.command), commands, needs)


def _runtime(isa: Isa, compiler: Compiler) -> Work:
    source = (HEADERS / PRIMITIVES_SOURCE).read_text(encoding="utf-8")
    parts = _parts(source, isa, compiler)
    parts["headers"] = {p.name: _digest(p.read_bytes()) for p in sorted(HEADERS.glob("*.h"))}

    def commands(_: Path | None) -> Commands:
        return compiler.runtime_steps(PRIMITIVES_SOURCE, HEADERS, isa)

    return Work(parts, PRIMITIVES_SOURCE, source, "the primitives", shlex.join(compiler.command), commands)


def _parts(source: str, isa: Isa, compiler: Compiler) -> dict[str, object]:
    return {
        "source": _digest(source.encode()),
        "flags": (*compiler.flags, *isa.flags),
        "compiler": compiler.version,
        "isa": isa.name,
        "machine": platform.machine(),
        "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
