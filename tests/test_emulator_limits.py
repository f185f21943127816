"""Accesses outside of tensors and shared memory, and what is refused before anything runs."""

from __future__ import annotations

import pytest
import torch
from support.device_sources import one_kernel
from support.emulated_faults import fault, numbers
from torch import Tensor

from tilewright.codegen_cache.emulator import emulate
from tilewright.dsl.errors import CompileError, EmulationError, TilewrightError

# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("O[tid] = A[tid + 1];", "out of bounds: read of 4 bytes at byte 512 of A, which has 512"),
        ("O[tid] = A[tid - 1];", "out of bounds: read of 4 bytes at byte -4 of A, which has 512"),
        ("O[tid + (tid == 127)] = A[tid];", "out of bounds: write of 4 bytes at byte 512 of O, which has 512"),
        ("O[tid] = A[tid - (1 << 30)];", "out of bounds: read of 4 bytes at byte -4294967296 of A, which has 512"),
        (
            "O[tid] = ((float*)shared)[tid + 1];",
            "out of bounds: read of 4 bytes at byte 512 of shared memory, which has 512",
        ),
        ("tl::cp_async_gs<4>(shared, A + 128);", "out of bounds: read of 4 bytes at byte 512 of A, which has 512"),
        (
            "tl::cp_async_gs<4>((float*)shared + 128, A);",
            "out of bounds: cp.async of 4 bytes at byte 512 of shared memory, which has 512",
        ),
        (
            "*(uint4*)(O + tid % 8) = *(uint4*)A;",
            "misaligned: write of 16 bytes at an address that is not a multiple of it",
        ),
        ("AtomicAdd(O + 128, 1.f);", "out of bounds: atomic operation of 4 bytes at byte 512 of O, which has 512"),
    ],
)
def test_accesses_outside_are_named(body: str, text: str) -> None:
    """With the parameter, the byte and the size of the tensor, wherever the access lands."""
    tensors = numbers()
    assert fault(one_kernel("sm_80", f"  {body}", tensors, shared=512), tensors) == text
    assert (tensors["O"] == -1).all()  # as it was


def test_stride_gaps_hold_nan() -> None:
    """Between the elements of a strided tensor there is memory, and no value to rely on."""
    whole = torch.zeros(128, 2)
    tensors = {"A": whole[:, 0], "O": torch.zeros(128)}
    source = one_kernel("sm_80", "  O[tid] = A[2 * tid + (tid > 0 ? -1 : 0)];", tensors)
    emulate(source, tensors)
    assert tensors["O"][0] == 0
    assert tensors["O"][1:].isnan().all()


def test_unwritten_shared_memory_is_nan() -> None:
    tensors = numbers()
    emulate(one_kernel("sm_80", "  O[tid] = ((float*)shared)[tid];", tensors, shared=512), tensors)
    assert tensors["O"].isnan().all()


# ---- what is refused before anything runs ----------------------------------------------------------------------------


def test_fp8_products_on_sm_80() -> None:
    """The device compiler takes them and makes traps of them."""
    tensors = numbers()
    body = """
  float c[4] = {0, 0, 0, 0};
  unsigned a[4] = {0, 0, 0, 0};
  constexpr tl::DataType E4M3 = tl::DataType::kFloat8_e4m3;
  tl::mma_sync<E4M3, E4M3, tl::DataType::kFloat32, 16, 8, 32, false, true>(c, a, a);
  O[tid] = c[0];"""
    with pytest.raises(CompileError, match="no products of fp8"):
        emulate(one_kernel("sm_80", body, tensors), tensors)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shared": 163 * 1024 + 16}, "166928 bytes of shared memory; sm_80 has 166912"),
        ({"threads": 48}, "48 threads a block, not a multiple of 32 up to 1024"),
    ],
)
def test_launches_no_device_takes(change: dict[str, int], text: str) -> None:
    tensors = numbers()
    with pytest.raises(EmulationError, match=text):
        emulate(one_kernel("sm_80", "  O[tid] = A[tid];", tensors, **change), tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"A": torch.zeros(128)}, "no tensor O"),
        ({"A": torch.zeros(128), "O": torch.zeros(128, 1)}, "O has rank 2, expected 1"),
        ({"A": torch.zeros(128), "O": torch.zeros(128).half()}, "O has dtype torch.float16, expected float32"),
        ({"A": torch.zeros(64), "O": torch.zeros(128)}, r"A has shape \[64\], expected \[128\]"),
        ({"A": torch.zeros(128, 2)[:, 0], "O": torch.zeros(128)}, r"A has strides \[2\], expected \[1\]"),
    ],
)
def test_tensors_the_source_does_not_take(tensors: dict[str, Tensor], text: str) -> None:
    source = one_kernel("sm_80", "  O[tid] = A[tid];", numbers())
    with pytest.raises(TilewrightError, match=text):
        emulate(source, tensors)
