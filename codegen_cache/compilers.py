"""Which C compiler builds native CPU code: the one asked for, the system's, else the one that PyPI has."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tilewright.dsl import knobs
from tilewright.dsl.errors import BadEnvironment
from tilewright.dsl.isa import Isa

FLAGS: Final = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-ffp-contract=off",  # fused only where the source says so: the same bits from every compiler
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-sanitize=undefined",  # zig turns it on
    "-pthread",
    "-fvisibility=hidden",
)
PRIMITIVES: Final = "primitives.o"
PRECOMPILED: Final = "tilewright.h.gch"
SYSTEM: Final = ("cc", "gcc", "clang")
C_LIBRARY: Final = ("-fsyntax-only", "-x", "c", "-include", "math.h", "/dev/null")  # headers come in another package
COMPILERS: Final = "cc, gcc or clang on PATH, a command in TILEWRIGHT_CC, or `pip install ziglang`"


@dataclass(frozen=True)
class Runtime:
    """What generated kernels include, and the folder with what was compiled of it: see `Compiler.runtime_steps`."""

    headers: Path
    compiled: Path

    @property
    def includes(self) -> tuple[str, ...]:
        """Compiled first: gcc looks there for a precompiled header, and goes on where it finds none that fits."""
        return ("-DTW_PRIMITIVES_APART", "-I", str(self.compiled), "-I", str(self.headers))

    @property
    def objects(self) -> tuple[str, ...]:
        return (str(self.compiled / PRIMITIVES),)


@dataclass(frozen=True)
class Compiler:
    """A command that takes gcc's options, and what it says it is."""

    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        return self.version.startswith("zig ")

    @property
    def flags(self) -> tuple[str, ...]:
        """Options for every source. Left alone, zig compiles for the processor it runs on and its newest libc."""
        return (*FLAGS, "-target", f"{platform.machine()}-linux-gnu.2.28") if self.is_zig else FLAGS

    @property
    def precompiles(self) -> bool:
        """Whether it finds precompiled headers by itself, as gcc does."""
        return "clang" not in self.version and not self.is_zig

    def steps(self, source: str, library: str, isa: Isa, runtime: Runtime | None) -> tuple[tuple[str, ...], ...]:
        """The commands that make a shared library of a source, which includes nothing of ours without `runtime`.

        zig builds its run-time library, for seconds, once for every instruction set that it links for; so it links for
        the portable one.
        """
        start = (*self.command, *self.flags)
        options = (*isa.flags, *(runtime.includes if runtime else ()))
        objects = runtime.objects if runtime else ()
        link = ("-shared", "-Wl,--gc-sections", "-o", library, "-lm")  # of the primitives, those that are called
        if not self.is_zig:
            return ((*start, *options, source, *objects, *link),)
        compiled = f"{source}.o"
        return (*start, *options, "-c", source, "-o", compiled), (*start, compiled, *objects, *link)

    def runtime_steps(self, source: str, headers: Path, isa: Isa) -> tuple[tuple[str, ...], ...]:
        """The commands that compile a folder of `Runtime`.

        Headers are precompiled where they include those of intrinsics, which take longer than most kernels.
        """
        start = (*self.command, *self.flags, *isa.flags, "-DTW_PRIMITIVES_APART", "-I", str(headers))
        bodies = (*start, "-ffunction-sections", "-c", source, "-o", PRIMITIVES)
        if not (self.precompiles and isa.flags):
            return (bodies,)
        header = (*start, "-x", "c-header", str(headers / "tilewright.h"), "-o", PRECOMPILED)
        return bodies, header


class Broken(Exception):
    """A command that cannot say its version, or compile."""


def find_compiler() -> Compiler | None:
    """TILEWRIGHT_CC, else cc, gcc or clang on PATH, else PyPI's ziglang, else None.

    Raises BadEnvironment where TILEWRIGHT_CC does not run. Any other compiler that does not is passed over, with a
    warning.
    """
    return _find(knobs.CC.get(), os.environ.get("PATH"))


class NoCompilerWarning(RuntimeWarning):
    """CPU tensors whose operators run in the interpreter, for want of a C compiler."""


NOTICE: Final = f"no C compiler found, so operators run in the interpreter, which is far slower; expected {COMPILERS}"
_NOTICES: Final = [NOTICE]


def has_compiler() -> bool:
    """Whether there is one. The first time that there is none, a NoCompilerWarning says what to install."""
    if find_compiler() is not None:
        return True
    with suppress(IndexError):  # of two threads one takes the notice
        warnings.warn(_NOTICES.pop(), NoCompilerWarning, stacklevel=2)
    return False


@functools.lru_cache(maxsize=16)
def _find(asked: str | None, path: str | None) -> Compiler | None:
    """`path` is there for the cache: another PATH has other compilers."""
    if asked is not None:
        try:
            return compiler_at(tuple(shlex.split(asked)))
        except (ValueError, Broken) as e:
            raise BadEnvironment(name=knobs.CC.name, value=asked, expected=f"a C compiler: {e}") from None
    for command in _candidates():
        try:
            found = compiler_at(command)
            if not found.is_zig:  # which brings its own
                _answer((*found.command, *C_LIBRARY), says=False)
            return found
        except Broken as e:
            warnings.warn(f"C compiler passed over: {e}", RuntimeWarning, stacklevel=3)
    return None


def _candidates() -> list[tuple[str, ...]]:
    found = [(path,) for name in SYSTEM if (path := shutil.which(name))]
    zig = [(sys.executable, "-m", "ziglang", "cc")] if importlib.util.find_spec("ziglang") else []
    return [*found, *zig]


def compiler_at(command: tuple[str, ...]) -> Compiler:
    """The compiler that a command runs. Raises Broken where it cannot say its version."""
    if not command or (program := shutil.which(command[0])) is None:
        raise Broken(f"{command[0] if command else 'nothing'} is not a program")
    command = (program, *command[1:])  # as found now, whatever PATH says later
    zig = command[-1] in ("cc", "c++") and "zig" in Path(command[-2:][0]).name
    answer = _answer((*command[:-1], "version") if zig else (*command, "--version"))
    return Compiler(command, f"zig {answer}" if zig else answer)


def _answer(command: tuple[str, ...], *, says: bool = True) -> str:
    """The first line that a command prints, which is not empty if it `says` anything."""
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Broken(f"{shown}: {e}") from None
    lines = done.stdout.split("\n")
    if done.returncode or (says and not lines[0]):
        said = (done.stderr.strip().split("\n")[0] or "nothing").strip()
        raise Broken(f"{shown} ended with status {done.returncode} and said {said}")
    return lines[0].strip()
