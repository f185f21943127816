"""TileLang programs for the emulator: copies, products, attention, gathers and a selection, with answers by torch."""

# TileLang reads annotations as values: they are not put off, and mean nothing to mypy.
# mypy: disable-error-code="no-untyped-def, valid-type, untyped-decorator"

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.codegen_cache.device_source import DeviceSource
from tilewright.codegen_cache.read_tilelang import read_tilelang

ARCHS = ("sm_80", "sm_90a", "gfx942")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A program, its arguments and their expected results; `bound` is the largest relative error."""

    program: Callable[[str], Any]  # of the architecture
    inputs: Callable[[str], Tensors]
    expected: Callable[[Tensors], Tensors]
    bound: float
    archs: tuple[str, ...] = ARCHS
    unfenced: tuple[str, ...] = ()  # where TileLang leaves out a proxy fence

    def error(self, tensors: Tensors) -> float:
        worst = 0.0
        for name, want in self.expected(tensors).items():
            got = tensors[name].double()
            if got.isnan().any():
                return float("inf")
            worst = max(worst, float((got - want).abs().max() / want.abs().max().clamp(min=1e-30)))
        return worst


def target_of(arch: str) -> Any:
    from tilelang import tvm

    return tvm.target.Target({"kind": "cuda", "arch": arch} if arch.startswith("sm") else {"kind": "hip", "mcpu": arch})


@functools.cache
def lowered(name: str, arch: str) -> DeviceSource:
    """The device source of CASES[name]."""
    import tilelang

    tilelang.set_log_level("ERROR")
    target, program = target_of(arch), CASES[name].program(arch)
    with target:
        return read_tilelang(program, tilelang.lower(program, target=target), arch)


def unset(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan")).to(dtype)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copy_program(arch: str) -> Any:
    """A matrix through shared memory, tiles of 32 x 32 hanging over both edges."""
    import tilelang.language as T

    @T.prim_func
    def copy(A: T.Tensor((100, 72), "float16"), Out: T.Tensor((100, 72), "float16")):
        with T.Kernel(T.ceildiv(100, 32), T.ceildiv(72, 32), threads=128) as (bx, by):
            tile = T.alloc_shared((32, 32), "float16")
            T.copy(A[bx * 32, by * 32], tile)
            T.copy(tile, Out[bx * 32, by * 32])

    return copy


def copy_inputs(arch: str) -> Tensors:
    return {"A": torch.randn(100, 72).half(), "Out": unset(100, 72, dtype=torch.float16)}


# ---- products --------------------------------------------------------------------------------------------------------


def gemm_program(
    m: int,
    n: int,
    k: int,
    *,
    tile_k: int = 32,
    dtype: str = "float16",
    transposed_a: bool = False,
    transposed_b: bool = False,
    stages: int = 2,
    through_shared: bool = True,
    by_element: bool = False,
) -> Any:
    """C = A @ B in tiles of 64 x 64 x tile_k. by_element: tiles are loaded element by element, not copied."""
    import tilelang.language as T

    shape_a, shape_b = (k, m) if transposed_a else (m, k), (n, k) if transposed_b else (k, n)
    tile_a = (tile_k, 64) if transposed_a else (64, tile_k)
    tile_b = (64, tile_k) if transposed_b else (tile_k, 64)
    out = "float16" if through_shared else "float32"

    @T.prim_func
    def gemm(A: T.Tensor(shape_a, dtype), B: T.Tensor(shape_b, dtype), C: T.Tensor((m, n), out)):
        with T.Kernel(T.ceildiv(m, 64), T.ceildiv(n, 64), threads=128) as (bx, by):
            As = T.alloc_shared(tile_a, dtype)
            Bs = T.alloc_shared(tile_b, dtype)
            Cs = T.alloc_shared((64, 64), out)
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for i in T.Pipelined(T.ceildiv(k, tile_k), num_stages=stages):
                if by_element:
                    for r, c in T.Parallel(*tile_a):
                        As[r, c] = A[i * tile_k + r, bx * 64 + c] if transposed_a else A[bx * 64 + r, i * tile_k + c]
                    for r, c in T.Parallel(*tile_b):
                        Bs[r, c] = B[by * 64 + r, i * tile_k + c] if transposed_b else B[i * tile_k + r, by * 64 + c]
                else:
                    if transposed_a:
                        T.copy(A[i * tile_k, bx * 64], As)
                    else:
                        T.copy(A[bx * 64, i * tile_k], As)
                    if transposed_b:
                        T.copy(B[by * 64, i * tile_k], Bs)
                    else:
                        T.copy(B[i * tile_k, by * 64], Bs)
                rows = T.GemmWarpPolicy.FullRow
                T.gemm(As, Bs, acc, transpose_A=transposed_a, transpose_B=transposed_b, policy=rows)
            if through_shared:
                T.copy(acc, Cs)
                T.copy(Cs, C[bx * 64, by * 64])
            else:
                T.copy(acc, C[bx * 64, by * 64])

    return gemm


def gemm_case(
    m: int, n: int, k: int, *, archs: tuple[str, ...] = ARCHS, unfenced: tuple[str, ...] = (), **options: Any
) -> Case:
    transposed_a, transposed_b = options.get("transposed_a", False), options.get("transposed_b", False)
    out = torch.float16 if options.get("through_shared", True) else torch.float32

    def program(arch: str) -> Any:
        fnuz = options.get("dtype") == "float8_e4m3fn" and arch == "gfx942"
        return gemm_program(m, n, k, **(options | {"dtype": "float8_e4m3fnuz"} if fnuz else options))

    def inputs(arch: str) -> Tensors:
        name = options.get("dtype", "float16")
        dtype = torch.float8_e4m3fnuz if name == "float8_e4m3fn" and arch == "gfx942" else getattr(torch, name)
        a, b = torch.randn((k, m) if transposed_a else (m, k)), torch.randn((n, k) if transposed_b else (k, n))
        return {"A": a.to(dtype), "B": b.to(dtype), "C": unset(m, n, dtype=out)}

    def expected(t: Tensors) -> Tensors:
        a, b = t["A"].double(), t["B"].double()
        return {"C": (a.T if transposed_a else a) @ (b.T if transposed_b else b)}

    return Case(program, inputs, expected, 1e-3 if out == torch.float16 else 1e-5, archs, unfenced)


# ---- attention -------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, ROWS, DEPTH = 4, 2, 128, 64


def attention_program(arch: str) -> Any:
    """Causal flash attention, two query heads to a key head. cp.async has one stage: the trip count is not constant."""
    import tilelang.language as T

    scale = DEPTH**-0.5 * 1.44269504
    stages = 1 if arch in ("sm_80", "gfx950") else 2
    queries, keys = (ROWS, HEADS, DEPTH), (ROWS, KV_HEADS, DEPTH)

    @T.prim_func
    def attention(
        Q: T.Tensor(queries, "float16"),
        K: T.Tensor(keys, "float16"),
        V: T.Tensor(keys, "float16"),
        Out: T.Tensor(queries, "float16"),
    ):
        with T.Kernel(ROWS // 64, HEADS, threads=128) as (bx, head):
            Qs = T.alloc_shared((64, DEPTH), "float16")
            Ks = T.alloc_shared((32, DEPTH), "float16")
            Vs = T.alloc_shared((32, DEPTH), "float16")
            scores = T.alloc_fragment((64, 32), "float32")
            weights = T.alloc_fragment((64, 32), "float16")
            acc = T.alloc_fragment((64, DEPTH), "float32")
            top = T.alloc_fragment((64,), "float32")
            old = T.alloc_fragment((64,), "float32")
            shrink = T.alloc_fragment((64,), "float32")
            part = T.alloc_fragment((64,), "float32")
            total = T.alloc_fragment((64,), "float32")
            T.copy(Q[bx * 64 : bx * 64 + 64, head, :], Qs)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            for k in T.Pipelined((bx + 1) * 2, num_stages=stages):
                T.copy(K[k * 32 : k * 32 + 32, head // 2, :], Ks)
                for i, j in T.Parallel(64, 32):
                    scores[i, j] = T.if_then_else(bx * 64 + i >= k * 32 + j, 0, -T.infinity("float32"))
                T.gemm(Qs, Ks, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(top, old)
                T.reduce_max(scores, top, dim=1, clear=False)
                for i in T.Parallel(64):
                    shrink[i] = T.exp2((old[i] - top[i]) * scale)
                for i, j in T.Parallel(64, 32):
                    scores[i, j] = T.exp2((scores[i, j] - top[i]) * scale)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(64):
                    total[i] = total[i] * shrink[i] + part[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(64, DEPTH):
                    acc[i, j] *= shrink[i]
                T.copy(V[k * 32 : k * 32 + 32, head // 2, :], Vs)
                T.gemm(weights, Vs, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(64, DEPTH):
                acc[i, j] /= total[i]
            T.copy(acc, Out[bx * 64 : bx * 64 + 64, head, :])

    return attention


def attention_inputs(arch: str) -> Tensors:
    q, k, v = (torch.randn(ROWS, h, DEPTH).half() for h in (HEADS, KV_HEADS, KV_HEADS))
    return {"Q": q, "K": k, "V": v, "Out": unset(ROWS, HEADS, DEPTH, dtype=torch.float16)}


def attention_expected(t: Tensors) -> Tensors:
    q, k, v = (t[n].double().transpose(0, 1)[None] for n in "QKV")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return {"Out": o[0].transpose(0, 1)}


# ---- gathers ---------------------------------------------------------------------------------------------------------


def gather_program(arch: str) -> Any:
    """Products with rows of pages of 16 that a table names; all sizes are dynamic. -1 in the table: a page of zeros."""
    import tilelang.language as T

    pages, used = T.dynamic("pages"), T.dynamic("used")

    @T.prim_func
    def gather(
        Q: T.Tensor((64, 64), "float16"),
        KV: T.Tensor((pages, 16, 64), "float16"),
        Table: T.Tensor((used,), "int32"),
        Out: T.Tensor((used, 64, 16), "float32"),
    ):
        with T.Kernel(1, threads=128) as _:
            Qs = T.alloc_shared((64, 64), "float16")
            Ks = T.alloc_shared((16, 64), "float16")
            scores = T.alloc_fragment((64, 16), "float32")
            T.copy(Q, Qs)
            for p in T.Pipelined(used, num_stages=1):
                for i, d in T.Parallel(16, 64):
                    Ks[i, d] = KV[Table[p], i, d]
                T.gemm(Qs, Ks, scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(scores, Out[p, :, :])

    return gather


def gather_inputs(arch: str) -> Tensors:
    table = torch.tensor([3, 0, -1, 6, 3], dtype=torch.int32)
    return {
        "Q": torch.randn(64, 64).half(),
        "KV": torch.randn(7, 16, 64).half(),
        "Table": table,
        "Out": unset(5, 64, 16),
    }


def gather_expected(t: Tensors) -> Tensors:
    rows = t["KV"].double()[t["Table"].clamp(min=0).long()] * (t["Table"] >= 0).view(-1, 1, 1)
    return {"Out": t["Q"].double() @ rows.transpose(1, 2)}


# ---- selection -------------------------------------------------------------------------------------------------------

SCORES, BEST = 300, 17


def topk_program(arch: str) -> Any:
    """The indices of the best scores of a row, found by rank, and their number above zero, counted by atomics."""
    import tilelang.language as T

    @T.prim_func
    def topk(
        S: T.Tensor((4, SCORES), "float32"),
        Index: T.Tensor((4, BEST), "int32"),
        Count: T.Tensor((4,), "int32"),
    ):
        with T.Kernel(4, threads=128) as row:
            scores = T.alloc_shared((SCORES,), "float32")
            count = T.alloc_shared((1,), "int32")
            rank = T.alloc_var("int32")
            tid = T.get_thread_binding(0)
            T.copy(S[row, :], scores)
            if tid == 0:
                count[0] = 0
            T.sync_threads()
            for part in T.serial(T.ceildiv(SCORES, 128)):
                i = part * 128 + tid
                if i < SCORES:
                    rank = 0
                    for j in T.serial(SCORES):
                        if scores[j] > scores[i] or (scores[j] == scores[i] and j < i):
                            rank = rank + 1
                    if rank < BEST:
                        Index[row, rank] = i
                    if scores[i] > 0:
                        T.atomic_add(count[0], 1)
            T.sync_threads()
            if tid == 0:
                Count[row] = count[0]

    return topk


def topk_inputs(arch: str) -> Tensors:
    scores = torch.randn(4, SCORES)
    scores[0, ::3] = 1.5  # ties
    return {"S": scores, "Index": torch.full((4, BEST), -1).int(), "Count": torch.full((4,), -1).int()}


def topk_expected(t: Tensors) -> Tensors:
    order = t["S"].sort(dim=1, descending=True, stable=True).indices[:, :BEST]
    return {"Index": order, "Count": (t["S"] > 0).sum(dim=1)}


CASES: dict[str, Case] = {
    "copy": Case(copy_program, copy_inputs, lambda t: {"Out": t["A"].double()}, 0),
    "gemm": gemm_case(100, 72, 128, stages=0),
    "gemm_pipelined": gemm_case(64, 64, 256, stages=3, through_shared=False),
    "gemm_by_element": gemm_case(64, 64, 128, by_element=True, through_shared=False, unfenced=("sm_90a",)),
    "gemm_bf16_tn": gemm_case(64, 64, 128, tile_k=64, dtype="bfloat16", transposed_a=True, through_shared=False),
    "gemm_nt": gemm_case(64, 128, 128, tile_k=64, transposed_b=True),
    "gemm_fp8": gemm_case(
        64,
        64,
        128,
        tile_k=64,
        dtype="float8_e4m3fn",
        transposed_b=True,
        through_shared=False,
        archs=("sm_90a", "gfx942"),
    ),
    "attention": Case(attention_program, attention_inputs, attention_expected, 1e-3),
    "gather": Case(gather_program, gather_inputs, gather_expected, 1e-5),
    "topk": Case(topk_program, topk_inputs, topk_expected, 0),
}
