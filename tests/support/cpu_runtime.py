"""The CPU runtime's headers, built as a library for each instruction set that this machine can run."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from tilewright.dsl.isa import tiles_permitted

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "dsl" / "cpu"
PRIMITIVES = HEADERS / "primitives.c"
DRIVER = ROOT / "tests" / "support" / "cpu_runtime.c"
COMPILE = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
STRICT = ("-Wall", "-Wextra", "-Werror", f"-I{HEADERS}")

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Level:
    """An instruction set: the compiler's flags, and what /proc/cpuinfo says of a machine that has it."""

    name: str
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2)
_NEEDS_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
LEVELS = (
    Level("portable"),
    Level("avx2", _AVX2, ("avx2", "fma", "f16c")),
    Level("avx512", _AVX512, _NEEDS_AVX512),
    Level("avx512_bf16", (*_AVX512, "-mavx512bf16"), (*_NEEDS_AVX512, "avx512_bf16")),
    AMX := Level(
        "amx_bf16",
        (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        (*_NEEDS_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
)


def why_not(level: Level) -> str | None:
    """Why the level cannot run here, if so."""
    if compiler() is None:
        return "no C compiler"
    if missing := set(level.needs) - _processor():
        return f"this processor has no {', '.join(sorted(missing))}"
    return None if "amx_tile" not in level.needs or tiles_permitted() else "Linux permits no tiles"


@functools.cache
def compiler() -> str | None:
    return next((path for name in ("gcc", "cc", "clang") if (path := shutil.which(name))), None)


@functools.cache
def _processor() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return frozenset(word for line in lines if line.startswith("flags") for word in line.split())


def build(level: Level, cache: Path, apart: bool = False) -> Path:
    """The library of a level, kept under a name that changes with its sources; processes may build it at once.

    `apart`: the primitives compiled on their own, as generated kernels have them.
    """
    command = [compiler() or "cc", *COMPILE, *level.flags, *STRICT, "-fPIC", "-shared", str(DRIVER)]
    if apart:
        command += ["-DTW_PRIMITIVES_APART", str(PRIMITIVES), "-Wl,-z,defs"]
    sources = (*sorted(HEADERS.glob("*.h")), PRIMITIVES, DRIVER)
    text = "\n".join(command) + "".join(p.read_text(encoding="utf-8") for p in sources)
    library = cache / f"{level}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / library.name
            run = subprocess.run([*command, "-o", str(made), "-lm"], capture_output=True, text=True, timeout=300)
            assert run.returncode == 0, run.stderr
            os.replace(made, library)
    return library


class Runtime:
    """Calls of a level's library, by the headers' names without tw_; arrays are passed by address."""

    def __init__(self, level: Level, library: Path) -> None:
        self.level = level
        self._library = ctypes.CDLL(str(library))
        self._library.t_best_scratch.restype = ctypes.c_long
        self.lanes: int = self._library.t_lanes()
        self.panel = 2 * self.lanes
        self.micro_rows: int = self._library.t_micro_rows()
        self.has_bf16_dot = bool(self._library.t_has_bf16_dot())

    def call(self, name: str, *args: Array | int) -> int:
        passed = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_long(a) for a in args]
        return int(getattr(self._library, f"t_{name}")(*passed) or 0)


def fenced(values: Array) -> Array:
    """A copy whose end is the end of a page that no process may read past: what does is killed."""
    values = np.ascontiguousarray(values)
    page = mmap.PAGESIZE
    room = -(-max(values.nbytes, 1) // page) * page
    pages = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), 0) == 0
    out: Array = np.frombuffer(pages, np.uint8, values.nbytes, room - values.nbytes).view(values.dtype)
    out = out.reshape(values.shape)
    out[...] = values
    return out


def pointers(rows: Sequence[Array]) -> Array:
    """The array of row pointers that the runtime takes; the rows must be kept."""
    return fenced(np.array([row.ctypes.data for row in rows], np.uint64))


STORED: dict[str, tuple[torch.dtype, type[np.generic]]] = {
    "float32": (torch.float32, np.float32),
    "float16": (torch.float16, np.uint16),
    "bfloat16": (torch.bfloat16, np.uint16),
    "float8_e4m3fn": (torch.float8_e4m3fn, np.uint8),
}


def rounded(values: Array, dtype: str) -> tuple[Array, Array]:
    """What torch stores for float32 values, as numpy can hold it, and what that means."""
    kind, raw = STORED[dtype]
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(kind)
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.float32}[tensor.element_size()]).numpy().view(raw)
    return bits.copy(), tensor.float().numpy()
