"""Device sources written by hand: a kernel's body, wrapped as TileLang wraps what it emits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tilewright.codegen_cache.device_source import DeviceSource, KernelArg, Launch, TensorMap, TensorParam

C_TYPES = {
    "float32": "float",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float8_e4m3fn": "fp8_e4_t",
    "float8_e4m3fnuz": "fp8_e4_t",
    "int32": "int",
    "uint8": "uchar",
    "float8_e5m2": "fp8_e5_t",
    "int64": "int64_t",
}


def one_kernel(
    arch: str,
    body: str,
    tensors: Mapping[str, Tensor],
    *,
    threads: int = 128,
    shared: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    maps: tuple[TensorMap, ...] = (),
) -> DeviceSource:
    """A source of one kernel, `kernel`, whose parameters are `tensors` in order, then `maps`.

    In the body, `shared` is the dynamic shared memory, as bytes, and `tid` the thread's index.
    """
    params = [TensorParam(n, _dtype(t), _texts(t.shape), _texts(t.stride())) for n, t in tensors.items()]
    args = [KernelArg("pointer", p.name, p.dtype) for p in params] + [KernelArg("map", m.name, "") for m in maps]
    parameters = [f"{C_TYPES[p.dtype]}* __restrict__ {p.name}" for p in params]
    parameters += [f"__grid_constant__ const CUtensorMap {m.name}" for m in maps]
    includes = HIP_HEADERS if arch.startswith("gfx") else CUDA_HEADERS
    text = f"""{includes}
extern "C" __global__ void __launch_bounds__({threads}) kernel({", ".join(parameters)}) {{
  extern __shared__ __align__(1024) uchar shared[];
  const int tid = (int)threadIdx.x;
{body}
}}
"""
    x, y, z = (str(n) for n in grid)
    launch = Launch("kernel", tuple(args), (x, y, z), (str(threads), "1", "1"), str(shared))
    return DeviceSource(text, arch, tuple(params), (launch,), maps)


CUDA_HEADERS = """#include <tl_templates/cuda/instruction/mma.h>
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/barrier.h>
#include <tl_templates/cuda/copy_sm90.h>
#include <tl_templates/cuda/ldsm.h>
#include <tl_templates/cuda/reduce.h>
#include <math_constants.h>"""
HIP_HEADERS = """#include <hip/hip_runtime.h>
#include <tl_templates/hip/gemm.h>
#include <tl_templates/hip/reduce.h>"""


def _texts(sizes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(str(int(n)) for n in sizes)


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def plain_map(name: str, tensor: str, t: Tensor, box: tuple[int, ...], *, swizzle: int = 0) -> TensorMap:
    """A tensor map over a whole tensor; `box` as the tensor's axes go, outermost first."""
    kinds = {"float32": 7, "float16": 6, "bfloat16": 9, "int32": 3, "uint8": 0}
    strides = [str(s * t.element_size()) for s in reversed(t.stride())]
    ones = tuple("1" for _ in box)
    dims, boxes = _texts(tuple(reversed(t.shape))), _texts(tuple(reversed(box)))
    return TensorMap(name, tensor, kinds[_dtype(t)], dims, tuple(strides), boxes, ones, 0, swizzle, 2, 0)
