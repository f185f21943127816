"""Every kind of fault has a small source that shows it, next to the same source without the fault."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.device_sources import one_kernel, plain_map
from torch import Tensor

from tilewright.codegen_cache.device_source import DeviceSource
from tilewright.codegen_cache.emulator import EVERY, Schedule, emulate
from tilewright.dsl.errors import CompileError, EmulationError, TilewrightError


def fault(source: DeviceSource, tensors: dict[str, Tensor], schedule: int = 0) -> str:
    """The message, without the place it begins with."""
    with pytest.raises(EmulationError) as caught:
        emulate(source, tensors, schedule=schedule)
    return re.sub(r"^.*?block \([^)]*\)(, thread \d+)?: ", "", str(caught.value).partition("\n")[0])


def kind_under_every_schedule(source: DeviceSource, tensors: dict[str, Tensor]) -> str:
    """The first word of the message: races are found whatever the order."""
    (kind,) = {fault(source, tensors, n).partition(":")[0] for n in range(EVERY)}
    return kind


def passes(source: DeviceSource, tensors: dict[str, Tensor]) -> None:
    for n in range(EVERY):
        emulate(source, tensors, schedule=n)


def numbers(n: int = 128) -> dict[str, Tensor]:
    return {"A": torch.arange(n, dtype=torch.float32), "O": torch.full((n,), -1.0)}


# ---- races -----------------------------------------------------------------------------------------------------------

BARRIER = "  __syncthreads();\n"
EXCHANGE = """
  ((float*)shared)[tid] = A[tid];
  __syncthreads();
  O[tid] = ((float*)shared)[tid ^ 64];
  __syncthreads();
  ((float*)shared)[tid] = 0.f;"""


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
@pytest.mark.parametrize("barrier", [0, 1])
def test_missing_barrier(arch: str, barrier: int) -> None:
    """A read after another thread's write, and a write after another thread's read."""
    tensors = numbers()
    passes(one_kernel(arch, EXCHANGE, tensors, shared=512), tensors)
    assert torch.equal(tensors["O"], tensors["A"].roll(64))
    first, second, third = EXCHANGE.split(BARRIER)
    broken = first + second + BARRIER + third if barrier == 0 else first + BARRIER + second + third
    assert kind_under_every_schedule(one_kernel(arch, broken, tensors, shared=512), tensors) == "race"


def test_lanes_of_a_warp_are_not_ordered_without_a_barrier() -> None:
    """Within a warp as well; __syncwarp is enough there."""
    tensors = numbers(32)
    body = """
  ((float*)shared)[tid] = A[tid];
  {}
  O[tid] = ((float*)shared)[tid ^ 1];"""
    fenced = one_kernel("sm_80", body.format("__syncwarp();"), tensors, threads=32, shared=128)
    passes(fenced, tensors)
    bare = one_kernel("sm_80", body.format(""), tensors, threads=32, shared=128)
    assert kind_under_every_schedule(bare, tensors) == "race"


def test_threads_that_write_the_same_do_no_harm() -> None:
    """Replicated values are stored by several threads; each may read them without a barrier, others may not."""
    tensors = numbers()
    body = """
  ((float*)shared)[0] = A[7];
  O[tid] = ((float*)shared)[0];"""
    passes(one_kernel("sm_80", body, tensors, shared=16), tensors)
    assert (tensors["O"] == 7).all()
    differing = body.replace("A[7]", "A[tid / 64]")
    assert kind_under_every_schedule(one_kernel("sm_80", differing, tensors, shared=16), tensors) == "race"
    other = body.replace("  ((float*)shared)[0] =", "  if (tid < 64) ((float*)shared)[0] =")
    assert kind_under_every_schedule(one_kernel("sm_80", other, tensors, shared=16), tensors) == "race"


def test_atomics_are_ordered_among_themselves_only() -> None:
    """A plain read of a counter needs a barrier, even in a thread that has counted itself."""
    tensors = {"A": torch.zeros(1), "O": torch.zeros(128, dtype=torch.int32)}
    body = """
  if (tid == 0) *(int*)shared = 0;
  __syncthreads();
  AtomicAdd((int*)shared, 1);
  {}
  O[tid] = *(int*)shared;"""
    passes(one_kernel("sm_80", body.format("__syncthreads();"), tensors, shared=16), tensors)
    assert (tensors["O"] == 128).all()
    assert kind_under_every_schedule(one_kernel("sm_80", body.format(""), tensors, shared=16), tensors) == "race"


def test_blocks_that_write_the_same_place() -> None:
    """Nothing orders blocks of a launch."""
    tensors = numbers()
    body = "\n  O[tid] = A[tid] + (float)((int)blockIdx.x * {});"
    passes(one_kernel("sm_80", body.format(0), tensors, grid=(2, 1, 1)), tensors)
    source = one_kernel("sm_80", body.format(1), tensors, grid=(2, 1, 1))
    assert kind_under_every_schedule(source, tensors) == "race"


def test_races_can_be_left_alone() -> None:
    tensors = numbers()
    source = one_kernel("sm_80", EXCHANGE.replace(BARRIER, ""), tensors, shared=512)
    emulate(source, tensors, races=False)


# ---- cp.async --------------------------------------------------------------------------------------------------------

COPY = """
  tl::cp_async_gs<4>((float*)shared + tid, A + tid);
  tl::cp_async_commit();
  tl::cp_async_wait<0>();
  {}
  O[tid] = ((float*)shared)[{}];"""


def test_copy_that_is_not_waited_for() -> None:
    tensors = numbers()
    own = one_kernel("sm_80", COPY.format("", "tid"), tensors, shared=512)
    passes(own, tensors)
    assert (
        kind_under_every_schedule(replace(own, text=own.text.replace("tl::cp_async_wait<0>();", "")), tensors) == "race"
    )
    assert kind_under_every_schedule(replace(own, text=own.text.replace("wait<0>", "wait<1>")), tensors) == "race"


def test_copy_that_is_waited_for_by_another_thread() -> None:
    """A wait is for the thread's own copies: the others learn of it at a barrier."""
    tensors = numbers()
    passes(one_kernel("sm_80", COPY.format("__syncthreads();", "tid ^ 64"), tensors, shared=512), tensors)
    assert (
        kind_under_every_schedule(one_kernel("sm_80", COPY.format("", "tid ^ 64"), tensors, shared=512), tensors)
        == "race"
    )


def test_copy_over_what_is_still_read() -> None:
    tensors = numbers()
    body = """
  ((float*)shared)[tid] = 1.f;
  __syncthreads();
  O[tid] = ((float*)shared)[tid ^ 64];
  {}
  tl::cp_async_gs<4>((float*)shared + tid, A + tid);
  tl::cp_async_wait<0>();"""
    passes(one_kernel("sm_80", body.format("__syncthreads();"), tensors, shared=512), tensors)
    assert kind_under_every_schedule(one_kernel("sm_80", body.format(""), tensors, shared=512), tensors) == "race"


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


# ---- barriers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("if (tid < 32) tl::__sync_thread_partial(3, 64);", "thread 0 waits for barrier 3, where 32 of 64 have come"),
        ("if (tid < 16) __syncwarp();", "thread 0 waits for the other lanes of its warp"),
    ],
)
def test_deadlock_names_the_barrier(body: str, text: str) -> None:
    tensors = numbers()
    source = one_kernel("sm_80", f"  {body}\n  __syncthreads();\n  O[tid] = A[tid];", tensors)
    assert text in fault(source, tensors)


def test_barrier_of_another_number_of_threads() -> None:
    tensors = numbers()
    body = "  tl::__sync_thread_partial(1, tid < 32 ? 64 : 96);"
    assert fault(one_kernel("sm_80", body, tensors), tensors) == "barrier 1: some come with 64 threads, some with 96"


# ---- mbarriers, TMA, wgmma -------------------------------------------------------------------------------------------

TMA = """
  __shared__ __align__(16) uint64_t mbarrier_mem[1];
  auto mbarrier = reinterpret_cast<Barrier*>(mbarrier_mem);
  if (tl::tl_shuffle_elect<0>()) mbarrier[0].init(1);
  tl::fence_barrier_init();
  __syncthreads();
  if (tl::tl_shuffle_elect<0>()) {
    mbarrier[0].arrive_and_expect_tx(2048);
    tl::tma_load(map, mbarrier[0], shared, 0, 0);
  }
  mbarrier[0].wait(0);
  for (int i = tid; i < 512; i += 128) O[i] = ((float*)shared)[i];"""


def tma_source(body: str = TMA) -> tuple[DeviceSource, dict[str, Tensor]]:
    """One box of 32 rows by 16 columns, of a matrix of 20 by 16: the last rows are outside."""
    tensors = {"A": torch.arange(320, dtype=torch.float32).view(20, 16), "O": torch.full((512,), -1.0)}
    return one_kernel(
        "sm_90a", body, tensors, shared=2048, maps=(plain_map("map", "A", tensors["A"], (32, 16)),)
    ), tensors


def test_tma_fills_with_zeros() -> None:
    source, tensors = tma_source()
    passes(source, tensors)
    assert torch.equal(tensors["O"], torch.cat([tensors["A"].flatten(), torch.zeros(192)]))


@pytest.mark.parametrize(
    ("what", "by", "kind"),
    [
        ("mbarrier[0].wait(0);", "", "race"),
        ("mbarrier[0].wait(0);", "mbarrier[0].wait(1);", "race"),  # the phase before the first: passes at once
        ("tl::fence_barrier_init();", "", "mbarrier"),
        ("init(1)", "init(2)", "deadlock"),
        ("expect_tx(2048)", "expect_tx(1024)", "deadlock"),
        ("expect_tx(2048)", "expect_tx(4096)", "deadlock"),
        ("mbarrier[0].wait(0);", "mbarrier[0].wait(0); mbarrier[0].wait(1);", "deadlock"),
    ],
)
def test_tma_faults(what: str, by: str, kind: str) -> None:
    assert TMA.count(what) == 1
    source, tensors = tma_source(TMA.replace(what, by))
    assert kind_under_every_schedule(source, tensors) == kind


def test_mbarrier_used_before_others_know_of_it() -> None:
    """Found where the initialisation came first as well."""
    assert TMA.count("  __syncthreads();\n") == 1
    source, tensors = tma_source(TMA.replace("  __syncthreads();\n", ""))
    assert {fault(source, tensors, n).partition(":")[0] for n in range(EVERY)} == {"race", "mbarrier"}


def test_box_of_a_wrong_map() -> None:
    source, tensors = tma_source()
    (map_,) = source.tensor_maps
    odd = replace(source, tensor_maps=(replace(map_, strides=("4", "68")),))
    with pytest.raises(EmulationError, match="tensor map of A: byte strides"):
        emulate(odd, tensors)


STORE = """
  ((float*)shared)[tid] = A[tid];
  tl::fence_proxy_async();
  __syncthreads();
  if (tid == 0) {
    tl::tma_store(O, shared, 512);
    tl::tma_store_arrive();
    tl::tma_store_wait<0>();
  }
  __syncthreads();
  ((float*)shared)[tid] = 0.f;"""


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("tl::fence_proxy_async();", "proxy"),
        ("__syncthreads();\n  if", "race"),
        ("tl::tma_store_arrive();", "bulk store"),
        ("tl::tma_store_wait<0>();", "bulk store"),
        ("__syncthreads();\n  ((float*)shared)[tid] = 0", "race"),
    ],
)
def test_bulk_store(what: str, kind: str) -> None:
    tensors = numbers()
    source = one_kernel("sm_90a", STORE, tensors, shared=512)
    passes(source, tensors)
    assert torch.equal(tensors["O"], tensors["A"])
    rest = "if" if what.endswith("if") else "((float*)shared)[tid] = 0" if what.endswith("0") else ""
    broken = replace(source, text=source.text.replace(what, rest))
    assert kind in fault(broken, tensors)
    if kind == "proxy":
        emulate(broken, tensors, proxies=False)


def test_wait_that_two_phases_pass_by() -> None:
    """A thread that stands still for two phases hangs on the hardware; counted, or hung on request."""
    tensors = numbers(64)
    body = """
  __shared__ __align__(16) uint64_t mbarrier_mem[1];
  auto mbarrier = reinterpret_cast<Barrier*>(mbarrier_mem);
  if (tid == 0) mbarrier[0].init(32);
  __syncthreads();
  if (tid < 32) {
    for (int i = 0; i < 2; ++i) { mbarrier[0].arrive(); mbarrier[0].wait(i & 1); }
  } else {
    mbarrier[0].wait(0);
  }
  O[tid] = A[tid];"""
    source = one_kernel("sm_90a", body, tensors, threads=64)
    assert emulate(source, tensors, schedule=0).overtaken_waits == 32  # the first warp goes first
    assert min(emulate(source, tensors, schedule=n).overtaken_waits for n in range(EVERY)) == 0
    with pytest.raises(EmulationError, match=r"deadlock.*waits for mbarrier 0"):
        emulate(source, tensors, schedule=Schedule(0, 0, 0, 0, hang_overtaken=True))


# ---- messages --------------------------------------------------------------------------------------------------------


def test_messages(golden: Callable[[str, str], None]) -> None:
    """What a reader gets: kernel, schedule, block and thread, what happened and where."""
    tensors = numbers()
    bulk = STORE.replace("tl::fence_proxy_async();", "")
    sources = {
        "a missing barrier": one_kernel("sm_80", EXCHANGE.replace(BARRIER, ""), tensors, shared=512),
        "a copy that is not waited for": one_kernel(
            "sm_80", COPY.format("", "tid").replace("wait<0>", "wait<1>"), tensors, shared=512
        ),
        "two blocks": one_kernel("sm_80", "  O[tid] = (float)(int)blockIdx.x;", tensors, grid=(2, 1, 1)),
        "outside": one_kernel("gfx942", "  O[tid] = A[tid + 1];", tensors),
        "no fence": one_kernel("sm_90a", bulk, tensors, shared=512),
        "a barrier nobody else comes to": one_kernel(
            "sm_80", "  if (tid < 32) tl::__sync_thread_partial(3, 64);\n  __syncthreads();", tensors
        ),
        "a wrong number of arrivals": tma_source(TMA.replace("init(1)", "init(2)"))[0],
        "too much shared memory": one_kernel("gfx942", "", tensors, shared=65540),
    }
    found = []
    for title, source in sources.items():
        with pytest.raises(EmulationError) as caught:
            emulate(source, tma_source()[1] if source.tensor_maps else tensors)
        text = re.sub(r"\n  line .*", "", str(caught.value))
        found.append(f"-- EmulationError: {title}\n{text}\n")
    golden("errors_emulation", "\n".join(found))


@pytest.mark.skipif(shutil.which("addr2line") is None, reason="addr2line is not installed")
@pytest.mark.parametrize("schedule", range(EVERY))
def test_messages_name_the_line(schedule: int) -> None:
    """Of the source, also where the fault is found inside a function of the runtime, or later."""
    tensors = numbers()
    for body, line in [
        ("  int i = tid + 1;\n  O[tid] = A[i];", "O[tid] = A[i];"),
        (
            "  const void* p = A + 128;\n  tl::cp_async_gs<4>(shared, p);\n  tl::cp_async_wait<0>();",
            "tl::cp_async_gs<4>(shared, p);",
        ),
        ("  if (tid % 2)\n  ((float*)shared)[0] = tid;\n  __syncthreads();", "((float*)shared)[0] = tid;"),
    ]:
        source = one_kernel("sm_80", body, tensors, shared=512)
        number = source.text.split("\n").index(f"  {line}") + 1
        with pytest.raises(EmulationError) as caught:
            emulate(source, tensors, schedule=schedule)
        assert str(caught.value).endswith(f"\n  line {number}: {line}")


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
