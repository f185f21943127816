"""HIP sources to AMD code objects by PyPI's ziglang, with a subset of the HIP device headers that is ours.

It shows that a source compiles and what it needs. ROCm's own compiler may take a few registers more or fewer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tilewright.codegen_cache.building import Commands

from . import toolkits
from .report import KernelResources

HEADERS: Final = Path(__file__).parent / "hip_include"
SOURCE: Final = "kernel.hip"
CODE_OBJECT: Final = "kernel.hsaco"
_ASSEMBLY: Final = "kernel.s"
_OBJECT: Final = "kernel.o"
_MATRIX: Final = re.compile(r"^\s+(v_s?mfmac?_\w+)", re.M)


def compiler(arch: str) -> tuple[str, Commands]:
    """What compiles for `arch`, and its commands: it cannot go from source to code object in one. MissingToolkit."""
    folder, version = toolkits.zig()
    templates, _ = toolkits.templates()
    zig = str(folder / "zig")
    device = ("-x", "hip", "--cuda-device-only", f"--offload-arch={arch}", "-nogpulib", "-nogpuinc", "-nostdinc")
    places = (HEADERS, folder / "lib" / "include", templates / "src")
    include = tuple(part for place in places for part in ("-isystem", str(place)))
    options = ("-std=c++17", "-O3", "-fno-color-diagnostics", "-gline-tables-only", "-S", "-o", _ASSEMBLY, SOURCE)
    assemble = ("-x", "assembler", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c", "-o", _OBJECT, _ASSEMBLY)
    link = ("ld.lld", "-shared", "--no-undefined", "-o", CODE_OBJECT, _OBJECT)
    return version, ((zig, "clang", *device, *include, *options), (zig, "clang", *assemble), (zig, *link))


def resources(folder: Path) -> tuple[KernelResources, ...]:
    """Of every kernel, from the metadata in its assembly."""
    assembly = (folder / _ASSEMBLY).read_text(errors="replace")
    metadata = assembly.split(".amdgpu_metadata")[1]
    blocks = re.split(r"^  - (?=\.)", metadata, flags=re.M)[1:]
    return tuple(_kernel(b, assembly) for b in blocks if ".kernarg_segment_size" in b)


def _kernel(block: str, assembly: str) -> KernelResources:
    def field(key: str) -> int:
        found = re.search(rf"\.{key}: +(\d+)", block)
        return int(found[1]) if found else 0

    name = re.search(r"^ *\.name: +'?([\w.$]+)'?$", block, re.M)
    assert name is not None
    body = re.search(rf"^{re.escape(name[1])}:.*?^\.Lfunc_end\d+:", assembly, re.M | re.S)
    counts: dict[str, int] = {}
    for m in _MATRIX.finditer(body[0] if body else ""):
        counts[m[1]] = counts.get(m[1], 0) + 1
    return KernelResources(
        name=name[1],
        registers=field("vgpr_count"),  # on these parts the total, accumulation registers included
        spill_bytes=4 * field("vgpr_spill_count"),
        stack_bytes=field("private_segment_fixed_size"),
        static_shared=field("group_segment_fixed_size"),
        matrix_instructions=dict(sorted(counts.items())),
        traps=len(re.findall(r"^\s+s_trap\b", body[0] if body else "", re.M)),
    )
