"""Device code without a device: what compiles, what it is said to need, and what is said where something is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.device_programs import lowered
from support.device_sources import one_kernel

from tilewright.codegen_cache import building
from tilewright.codegen_cache.device_compiler import DeviceCode, compile_device, cuda, hip, toolkits
from tilewright.codegen_cache.device_source import ARCHS, DeviceSource
from tilewright.dsl.errors import CompileError, MissingToolkit, UnknownTarget

has_cuda = toolkits.find_program("nvcc") is not None or toolkits.nvrtc() is not None
needs_cuda = pytest.mark.skipif(not has_cuda, reason="neither nvcc nor NVRTC is installed")
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
needs_disassembler = pytest.mark.skipif(toolkits.find_program("nvdisasm") is None, reason="nvdisasm is not installed")
EVERY_ARCH = [pytest.param(name, marks=needs_zig if gpu.kind == "hip" else needs_cuda) for name, gpu in ARCHS.items()]


def small(arch: str, body: str, threads: int = 128) -> DeviceSource:
    return one_kernel(arch, body, {"A": torch.zeros(128), "O": torch.zeros(128)}, threads=threads)


@pytest.mark.slow
@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_attention(arch: str) -> None:
    """Code for the matrix units, without spills, and a binary of the right kind."""
    code = compile_device(lowered("attention", arch))
    (kernel,) = code.kernels
    assert code.kernel("attention_kernel") is kernel
    assert 32 < kernel.registers <= 512
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.traps) == (0, 0, 0)
    assert kernel.matrix_instructions is None or kernel.matrix_total >= 4
    assert code.path.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_errors_name_the_line(arch: str) -> None:
    with pytest.raises(CompileError, match=r"kernel\.\w+[:(]\d+.*no_such_function"):
        compile_device(small(arch, "  O[tid] = no_such_function(A[tid]);"))


@pytest.mark.parametrize("arch", EVERY_ARCH[:1] + EVERY_ARCH[3:4])
def test_spills_are_seen(arch: str) -> None:
    """A block of 1024 leaves a thread too few registers for 160 live values."""
    register = "v" if arch.startswith("gfx") else "f"
    body = f"""
  float v[160];
  #pragma unroll
  for (int i = 0; i < 160; ++i) {{
    v[i] = A[(tid * 7 + i) % 128];
    asm volatile("" : "+{register}"(v[i]));
  }}
  __syncthreads();
  float sum = 0;
  #pragma unroll
  for (int i = 0; i < 160; ++i) sum = sum * v[159 - i] + v[i];
  O[tid] = sum;"""
    kernel = compile_device(small(arch, body, threads=1024)).kernel("kernel")
    assert kernel.spill_bytes > 0
    assert kernel.stack_bytes > 0


@pytest.mark.parametrize("arch", EVERY_ARCH[:1] + EVERY_ARCH[3:4])
def test_static_shared_memory_is_seen(arch: str) -> None:
    body = """
  __shared__ float scratch[1024];
  scratch[tid] = A[tid];
  __syncthreads();
  O[tid] = scratch[tid ^ 1];"""
    assert compile_device(small(arch, body)).kernel("kernel").static_shared >= 4096


FP8_PRODUCT = """
  constexpr tl::DataType E4M3 = tl::DataType::kFloat8_e4m3;
  float c[4] = {0, 0, 0, 0};
  unsigned a[4] = {0, 0, 0, (unsigned)tid};
  tl::mma_sync<E4M3, E4M3, tl::DataType::kFloat32, 16, 8, 32, false, true>(c, a, a);
  O[tid] = c[0];"""


@needs_cuda
@needs_disassembler
def test_traps_are_seen() -> None:
    """For an instruction that sm_80 has not, the compiler says nothing and puts a trap."""
    assert compile_device(small("sm_80", FP8_PRODUCT)).kernel("kernel").traps > 0
    assert compile_device(small("sm_90a", FP8_PRODUCT)).kernel("kernel").traps == 0


@pytest.mark.parametrize("arch", EVERY_ARCH[:1] + EVERY_ARCH[3:4])
def test_compiled_once(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has it the second time; another text or architecture is another entry."""
    source = small(arch, "  O[tid] = A[tid] + 1.f;")
    first = compile_device(source)
    with monkeypatch.context() as m:
        m.setattr(building, "_run", lambda *_: pytest.fail("compiled again"))
        assert compile_device(source) == first
    other = compile_device(replace(source, text=source.text.replace("1.f", "2.f")))
    assert other.path != first.path


@needs_cuda
def test_nvrtc_makes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no nvcc."""
    if toolkits.nvrtc() is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    find = toolkits.find_program
    monkeypatch.setattr(toolkits, "find_program", lambda name: None if name == "nvcc" else find(name))
    code = compile_device(lowered("attention", "sm_90a"))
    assert code.compiler.startswith("nvrtc ")
    assert code.kernels[0].spill_bytes == 0


def test_nothing_to_compile_with(monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]) -> None:
    """Each says what to install."""
    monkeypatch.setattr(toolkits, "find_program", lambda name: None)
    monkeypatch.setattr(toolkits, "nvrtc", lambda: None)
    package = toolkits.package_folder
    lacking: set[str] = set()
    monkeypatch.setattr(toolkits, "package_folder", lambda name: None if name in lacking else package(name))

    def section(title: str, arch: str) -> str:
        with pytest.raises(MissingToolkit) as caught:
            compile_device(small(arch, ""))
        return f"-- MissingToolkit: {title}\n{caught.value}\n"

    texts = [section("CUDA", "sm_90a")]
    lacking.add("ziglang")
    texts.append(section("HIP", "gfx942"))
    lacking.add("tilelang")
    texts.append(section("headers", "sm_80"))
    golden("errors_toolkits", "\n".join(texts))


def test_architecture_nobody_knows() -> None:
    with pytest.raises(UnknownTarget, match="unknown target 'sm_70'; known: sm_80, sm_90a, sm_100a, gfx942, gfx950"):
        compile_device(replace(small("sm_80", ""), arch="sm_70"))


def test_reports(tmp_path: Path) -> None:
    """What the compilers say, read without one of them: several kernels, spills, no matrix instruction."""
    said = """ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 2048 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
    (tmp_path / building.OUTPUT).write_text(said)
    ptx = ".visible .entry one(\n)\n{\n\tmma.sync.aligned.m16n8k16 {%f1};\n\t@%p1 wgmma.mma_async.sync {%f1};\n}\n"
    (tmp_path / "kernel.ptx").write_text(ptx)
    one, two = cuda.resources(tmp_path)
    assert (one.registers, one.stack_bytes, one.spill_bytes, one.static_shared) == (255, 8, 16, 2048)
    assert one.matrix_instructions == {"mma.sync": 1, "wgmma.mma_async": 1}
    assert (two.registers, two.static_shared, two.matrix_instructions) == (40, 0, {})
    report = DeviceCode("sm_80", "nvcc 13.0.88", tmp_path, (one, two)).as_dict()
    assert report["arch"] == "sm_80"


def test_header_subset_is_complete() -> None:
    """The HIP headers that TileLang's templates include are ours or clang's."""
    folder, _ = toolkits.templates()
    included = {
        line.split()[1].strip("<>")
        for path in (folder / "src" / "tl_templates" / "hip").glob("*.h")
        for line in path.read_text().splitlines()
        if line.startswith("#include <")
    }
    clang = {"stdint.h", "cstdint"}
    ours = {str(p.relative_to(hip.HEADERS)) for p in hip.HEADERS.rglob("*") if p.is_file()}
    assert included - clang - ours == set()
