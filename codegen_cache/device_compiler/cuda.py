"""CUDA sources to cubins, by nvcc or, where there is none, by NVRTC."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tilewright.codegen_cache.building import OUTPUT, Commands
from tilewright.dsl.errors import MissingToolkit

from . import toolkits
from .report import KernelResources

SOURCE: Final = "kernel.cu"
CUBIN: Final = "kernel.cubin"
_PTX: Final = "kernel.ptx"
_LANGUAGE: Final = "-std=c++20"

_RESOURCES: Final = re.compile(
    r"Compiling entry function '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.S,
)
_MATRIX: Final = re.compile(r"\b(?:[HIQODB]MMA|[HQIB]GMMA|UTC[A-Z]*MMA)(?:\.[\w.]+)?")  # in SASS
_MATRIX_PTX: Final = re.compile(r"^\s*(?:@!?%?\w+ )?(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", re.M)


def compiler(arch: str) -> tuple[str, Commands]:
    """What would compile for `arch`, and its commands. Raises MissingToolkit."""
    folder, _ = toolkits.templates()
    includes = (f"-I{folder / 'src'}", f"-I{folder / '3rdparty' / 'cutlass' / 'include'}")
    if nvcc := toolkits.find_program("nvcc"):
        start = (str(nvcc), f"-arch={arch}", "-O3", "-w", "-lineinfo")
        to_ptx = (*start, _LANGUAGE, *includes, "-ptx", SOURCE, "-o", _PTX)
        to_cubin = (*start, "-Xptxas", "-v", "-cubin", _PTX, "-o", CUBIN)
        return toolkits.nvcc_version(nvcc), (to_ptx, to_cubin)
    if found := toolkits.nvrtc():
        module = "tilewright.codegen_cache.device_compiler.nvrtc"
        own = (toolkits.nvidia_folder() or Path()) / "include"
        flags = (f"--gpu-architecture={arch}", _LANGUAGE, "-default-device", "-lineinfo", "--ptxas-options=-v")
        headers = (*includes, f"-I{own}", f"-I{own / 'cccl'}")
        return found[1], ((sys.executable, "-m", module, str(found[0]), SOURCE, "-o", CUBIN, *flags, *headers),)
    raise MissingToolkit(what=f"compiling for {arch}", needed="nvcc or NVRTC", advice=toolkits.EXTRA)


def resources(folder: Path) -> tuple[KernelResources, ...]:
    """Of every kernel of a compiled entry, from what ptxas said and from the code."""
    said = (folder / OUTPUT).read_text(errors="replace")
    matrix, traps = _instructions(folder)
    kernels = []
    for m in _RESOURCES.finditer(said):
        shared = re.search(r"(\d+) bytes smem", m[6])
        kernels.append(
            KernelResources(
                name=m[1],
                registers=int(m[5]),
                spill_bytes=int(m[3]),
                stack_bytes=int(m[2]),
                static_shared=int(shared[1]) if shared else 0,
                matrix_instructions=None if matrix is None else dict(sorted(matrix.get(m[1], Counter()).items())),
                traps=traps.get(m[1], 0),
            )
        )
    return tuple(kernels)


def _instructions(folder: Path) -> tuple[dict[str, Counter[str]] | None, Counter[str]]:
    """Matrix instructions by kernel and name, and traps by kernel: of SASS, else matrix instructions of PTX."""
    matrix: dict[str, Counter[str]] = {}
    traps: Counter[str] = Counter()
    if disassembler := toolkits.find_program("nvdisasm"):
        done = subprocess.run([disassembler, "-c", folder / CUBIN], capture_output=True, text=True)
        for name, body in _functions(done.stdout, r"^\.text\.(\w+):$"):
            matrix[name] = Counter(m[0] for m in _MATRIX.finditer(body))
            traps[name] = len(re.findall(r"\bBPT\.TRAP\b", body))
        if matrix:
            return matrix, traps
    if (ptx := folder / _PTX).is_file():
        for name, body in _functions(ptx.read_text(errors="replace"), r"^\.(?:visible )?\.?entry (\w+)\("):
            matrix[name] = Counter(m[1] for m in _MATRIX_PTX.finditer(body))
        return matrix, traps
    return None, traps


def _functions(text: str, heading: str) -> Iterator[tuple[str, str]]:
    """Names and bodies: what follows each heading."""
    parts = re.split(heading, text, flags=re.M)
    yield from zip(parts[1::2], parts[2::2], strict=True)
