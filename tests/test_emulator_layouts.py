"""Which lane holds which element: the emulated matrix instructions against the closed forms of the PTX ISA and of AMD's
instruction set manuals, written here a second time and in another way.
"""

from __future__ import annotations

import pytest
import torch
from support.device_sources import C_TYPES, one_kernel
from torch import Tensor

from tilewright.codegen_cache.emulator import emulate

TYPES = {
    torch.float16: "kFloat16",
    torch.bfloat16: "kBFloat16",
    torch.float8_e4m3fn: "kFloat8_e4m3",
    torch.float8_e5m2: "kFloat8_e5m2",
}


def c_type(dtype: torch.dtype) -> str:
    return C_TYPES[str(dtype).removeprefix("torch.")]


def small_integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values whose products and sums are exact in every type here."""
    torch.manual_seed(0)
    return torch.randint(-4, 5, shape).float().to(dtype)


# ---- ldmatrix and stmatrix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count: int, transposed: bool) -> None:
    """PTX ISA, ldmatrix: thread t holds elements (t / 4, 2 (t % 4)) and the next of each matrix, or of its mirror."""
    matrices = torch.arange(count * 64, dtype=torch.float32).half().view(count, 8, 8)
    got = torch.zeros(32, count, 2).half()
    call = f"tl::ptx_ldmatrix_x{count}{'_trans' if transposed else ''}"
    body = f"""
  for (int i = tid; i < {count * 64}; i += 32) ((half_t*)shared)[i] = A[i];
  __syncthreads();
  half_t registers[{2 * count}];
  {call}((half_t*)shared + tid % {8 * count} * 8, registers);
  for (int i = 0; i < {2 * count}; ++i) O[tid * {2 * count} + i] = registers[i];"""
    tensors = {"A": matrices, "O": got}
    emulate(one_kernel("sm_80", body, tensors, threads=32, shared=count * 128), tensors)
    lane = torch.arange(32)
    source = matrices.transpose(1, 2) if transposed else matrices
    for e in range(2):
        assert torch.equal(got[:, :, e], source[:, lane // 4, 2 * (lane % 4) + e].T)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_is_the_inverse(transposed: bool) -> None:
    """What ldmatrix reads, stmatrix writes back."""
    matrices = torch.arange(256, dtype=torch.float32).half().view(4, 8, 8)
    got = torch.zeros_like(matrices)
    suffix = "_trans" if transposed else ""
    body = f"""
  for (int i = tid; i < 256; i += 32) ((half_t*)shared)[i] = A[i];
  __syncthreads();
  uint r[4];
  tl::ptx_ldmatrix_x4{suffix}((half_t*)shared + tid * 8, r);
  __syncthreads();
  tl::ptx_stmatrix_m8n8_x4{suffix}((half_t*)shared + 256 + tid * 8, r[0], r[1], r[2], r[3]);
  __syncthreads();
  for (int i = tid; i < 256; i += 32) O[i] = ((half_t*)shared)[256 + i];"""
    tensors = {"A": matrices, "O": got}
    emulate(one_kernel("sm_90a", body, tensors, threads=32, shared=1024), tensors)
    assert torch.equal(got, matrices)


# ---- mma.sync --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "k"),
    [(torch.float16, 16), (torch.float16, 8), (torch.bfloat16, 16), (torch.float8_e4m3fn, 32)],
)
def test_mma(dtype: torch.dtype, k: int) -> None:
    """PTX ISA, m16n8k8, k16 and k32: a_i is in row g or g + 8, its column goes by i; b_i in column g; c_i as a_i."""
    a, b, c = small_integers(16, k, dtype=dtype), small_integers(k, 8, dtype=dtype), small_integers(16, 8)
    got = torch.zeros(16, 8)
    per = 4 // dtype.itemsize  # elements of a register
    kind = TYPES[dtype]
    body = f"""
  const int g = tid / 4, t = tid % 4;
  {c_type(dtype)} a[{k // 2}], b[{k // 4}];
  float c[4];
  for (int i = 0; i < {k // 2}; ++i) {{
    const int row = i / {per} % 2 == 0 ? g : g + 8, column = t * {per} + i % {per} + (i < {2 * per} ? 0 : {4 * per});
    a[i] = A[row * {k} + column];
  }}
  for (int i = 0; i < {k // 4}; ++i) b[i] = B[(t * {per} + i % {per} + (i < {per} ? 0 : {4 * per})) * 8 + g];
  for (int i = 0; i < 4; ++i) c[i] = C[(i < 2 ? g : g + 8) * 8 + t * 2 + i % 2];
  tl::mma_sync<tl::DataType::{kind}, tl::DataType::{kind}, tl::DataType::kFloat32, 16, 8, {k}, false, true>(
      c, (const unsigned*)a, (const unsigned*)b);
  for (int i = 0; i < 4; ++i) O[(i < 2 ? g : g + 8) * 8 + t * 2 + i % 2] = c[i];"""
    tensors = {"A": a, "B": b, "C": c, "O": got}
    arch = "sm_80" if dtype.itemsize > 1 else "sm_90a"
    emulate(one_kernel(arch, body, tensors, threads=32), tensors)
    assert torch.equal(got, a.float() @ b.float() + c)


# ---- mfma ------------------------------------------------------------------------------------------------------------

MFMA = {
    "f32_16x16x16f16": (torch.float16, 16, 16, "float16x4"),
    "f32_32x32x8f16": (torch.float16, 32, 8, "float16x4"),
    "f32_16x16x16bf16_1k": (torch.bfloat16, 16, 16, "bfloat16x4_vec"),
    "f32_16x16x32_fp8_fp8": (torch.float8_e4m3fnuz, 16, 32, "long"),
    "f32_16x16x4f32": (torch.float32, 16, 4, "float"),
}


@pytest.mark.parametrize("name", MFMA)
def test_mfma(name: str) -> None:
    """AMD matrix instruction calculator: A[i][k] is in lane i + m (k / per), register k % per; B mirrors it."""
    dtype, m, k, vector = MFMA[name]
    a, b, c = small_integers(m, k, dtype=dtype), small_integers(k, m, dtype=dtype), small_integers(m, m)
    got = torch.zeros(m, m)
    per, registers = k * m // 64, m * m // 64
    row = "4 * (tid / 16) + i" if m == 16 else "8 * (i / 4) + 4 * (tid / 32) + i % 4"
    body = f"""
  {c_type(dtype)} a[{per}], b[{per}];
  float c[{registers}];
  for (int i = 0; i < {per}; ++i) {{
    a[i] = A[tid % {m} * {k} + tid / {m} * {per} + i];
    b[i] = B[(tid / {m} * {per} + i) * {m} + tid % {m}];
  }}
  for (int i = 0; i < {registers}; ++i) c[i] = C[({row}) * {m} + tid % {m}];
  typedef float32x{registers} Result;
  *(Result*)c = __builtin_amdgcn_mfma_{name}(*({vector}*)a, *({vector}*)b, *(Result*)c, 0, 0, 0);
  for (int i = 0; i < {registers}; ++i) O[({row}) * {m} + tid % {m}] = c[i];"""
    tensors = {"A": a, "B": b, "C": c, "O": got}
    emulate(one_kernel("gfx942", body, tensors, threads=64), tensors)
    assert torch.equal(got, a.float() @ b.float() + c)


# ---- wgmma -----------------------------------------------------------------------------------------------------------


def swizzled_tile(tile: Tensor, span: int) -> Tensor:
    """Bytes of a tile whose rows are `span` bytes wide, 16-byte chunks permuted by the row: chunk c of row r stands at
    c ^ (r % 8) for 128 bytes, by the upper bits of r % 8 for narrower ones.
    """
    rows = tile.contiguous().view(torch.uint8).view(-1, span // 16, 16)
    out = torch.empty_like(rows)
    shift = {128: 0, 64: 1, 32: 2, 16: 3}[span]
    for r in range(rows.shape[0]):
        for c in range(span // 16):
            out[r, c ^ ((r % 8) >> shift)] = rows[r, c]
    return out.view(-1)


@pytest.mark.parametrize("span", [128, 64, 32])
@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_wgmma(span: int, from_registers: bool, b_transposed: bool) -> None:
    """m64nNk16: A is 64 x 16, B is N x 16 (or 16 x N, transposed), in rows of `span` bytes; C as of mma.sync, each warp
    has 16 rows of it.
    """
    width = span // 2  # elements of a row
    n = width if b_transposed else 16
    a, b = small_integers(64, 16, dtype=torch.float16), small_integers(16, n, dtype=torch.float16)
    padded = torch.zeros(64, width).half()
    padded[:, :16] = a
    rows_of_b = torch.zeros(16, width).half() if b_transposed else torch.zeros(n, width).half()
    rows_of_b[:, : b.shape[1] if b_transposed else 16] = b if b_transposed else b.T
    got = torch.zeros(64, n)
    images = torch.cat([swizzled_tile(padded, span), swizzled_tile(rows_of_b, span)])
    layout = {128: 1, 64: 2, 32: 3}[span]
    stride = 8 * span // 16
    operand = "ra," if from_registers else "da,"
    kinds = "tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32"
    call = (
        f"tl::wgmma_{'rs' if from_registers else 'ss'}<{kinds}, 64, {n}, 16, false, {str(b_transposed).lower()}, 1, 1>"
    )
    body = f"""
  for (int i = tid; i < {images.numel()}; i += 128) ((uchar*)shared)[i] = Images[i];
  tl::fence_proxy_async();
  __syncthreads();
  const int g = tid % 32 / 4 + tid / 32 * 16, t = tid % 4;
  half_t a[8];
  for (int i = 0; i < 8; ++i) a[i] = A[(g + i / 2 % 2 * 8) * 16 + t * 2 + i % 2 + i / 4 * 8];
  float c[{n // 2}];
  for (int i = 0; i < {n // 2}; ++i) c[i] = 100.f;
  tl::GmmaDescriptor da, db;
  tl::initialize_wgmma_descriptor<{layout}, 1, {stride}>(da, (half_t*)shared);
  tl::initialize_wgmma_descriptor<{layout}, 1, {stride}>(db, (half_t*)shared + {64 * width});
  const uint32_t* ra = (const uint32_t*)a;
  tl::warpgroup_arrive();
  {call}({operand} db, (uint32_t*)c, true);
  tl::warpgroup_commit_batch();
  tl::warpgroup_wait<0>();
  for (int i = 0; i < {n // 2}; ++i) O[(g + i / 2 % 2 * 8) * {n} + i / 4 * 8 + t * 2 + i % 2] = c[i];"""
    tensors = {"A": a, "Images": images, "O": got}
    emulate(one_kernel("sm_90a", body, tensors, shared=images.numel()), tensors)
    assert torch.equal(got, a.float() @ b.float() + 100)


# ---- conversions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "dtype", "name"),
    [
        ("sm_90a", torch.float8_e4m3fn, "fp8_e4_t"),
        ("sm_90a", torch.float8_e5m2, "fp8_e5_t"),
        ("gfx942", torch.float8_e4m3fnuz, "fp8_e4_t"),
        ("gfx942", torch.float8_e5m2fnuz, "fp8_e5_t"),
    ],
)
def test_fp8_conversions(arch: str, dtype: torch.dtype, name: str) -> None:
    """Every byte to float as torch has it; floats to bytes to the nearest, ties to even, saturating."""
    every = torch.arange(256, dtype=torch.uint8)
    values = every.view(dtype).float()
    finite = values[values.isfinite()].sort().values
    halfway = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, halfway, halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(torch.tensor(-1e9))])
    x = torch.cat([x, torch.tensor([1e9, -1e9, 0.0])])
    wide, narrow = torch.zeros(256), torch.zeros(x.numel(), dtype=torch.uint8)
    body = f"""
  for (int i = tid; i < 256; i += 64) Wide[i] = float((({name}*)Bytes)[i]);
  for (int i = tid; i < {x.numel()}; i += 64) (({name}*)Narrow)[i] = {name}(X[i]);"""
    tensors = {"Bytes": every, "Wide": wide, "X": x, "Narrow": narrow}
    emulate(one_kernel(arch, body, tensors, threads=64), tensors)
    assert torch.equal(wide.nan_to_num(1e9), values.nan_to_num(1e9))
    expected = x.clamp(finite[0], finite[-1]).to(dtype)
    assert torch.equal(narrow.view(dtype).float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_conversions(dtype: torch.dtype) -> None:
    """Every 16-bit value to float and back, and floats between them to the nearest."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.randn(4096) * torch.logspace(-8, 4, 4096)
    wide, narrow = torch.zeros(1 << 16), torch.zeros(4096, dtype=dtype)
    body = f"""
  for (int i = tid; i < 65536; i += 128) Wide[i] = float(Every[i]);
  for (int i = tid; i < 4096; i += 128) Narrow[i] = {c_type(dtype)}(X[i]);"""
    tensors = {"Every": every, "Wide": wide, "X": x, "Narrow": narrow}
    emulate(one_kernel("sm_80", body, tensors), tensors)
    assert torch.equal(wide.nan_to_num(1e9), every.float().nan_to_num(1e9))
    assert torch.equal(narrow, x.to(dtype))
