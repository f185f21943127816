"""The thread pool of native code, and calls into compiled programs."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewright.codegen_cache.compilers import find_compiler
from tilewright.codegen_cache.native import NativeLibrary, Program, load
from tilewright.codegen_cache.native_build import build
from tilewright.codegen_cache.threads import parallel_address, pool_source, thread_count, threads_library
from tilewright.dsl.isa import ISAS

# A program as the compiler generates them: sizes = items, what to do, scratch bytes, microseconds an item takes.
SOURCE = r"""
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>

struct tw_args { void **data; const int64_t *strides; const int64_t *sizes; const double *numbers; };
typedef int (*parallel)(void (*run)(void *, int64_t, void *), void *, int64_t, int64_t, int);
struct call { const struct tw_args *args; parallel run; int threads; _Atomic int64_t order; };
enum { RECORD, SUMS, NESTED };

static void busy(int64_t microseconds) {
  struct timespec t, u;
  clock_gettime(CLOCK_MONOTONIC, &t);
  do clock_gettime(CLOCK_MONOTONIC, &u);
  while ((u.tv_sec - t.tv_sec) * 1000000 + (u.tv_nsec - t.tv_nsec) / 1000 < microseconds);
}

/* of each item: how often, when, by which thread, in which scratch */
static void record(void *context, int64_t item, void *scratch) {
  struct call *c = context;
  int64_t *row = (int64_t *)c->args->data[0] + 4 * item, bytes = c->args->sizes[2];
  row[0]++;
  row[1] = atomic_fetch_add(&c->order, 1);
  row[2] = syscall(SYS_gettid);
  row[3] = (int64_t)(intptr_t)scratch;
  if (bytes) memset(scratch, (int)item, (size_t)bytes);
  busy(c->args->sizes[3]);
  for (int64_t i = 0; i < bytes; i += 997)
    if (((unsigned char *)scratch)[i] != (unsigned char)item) row[0] = -1000; /* somebody else wrote to it */
}

/* of each row of data[1]: its sum, through scratch */
static void sums(void *context, int64_t item, void *scratch) {
  const struct tw_args *a = ((struct call *)context)->args;
  int64_t width = a->sizes[4];
  float *own = scratch, total = 0;
  memcpy(own, (float *)a->data[1] + item * a->strides[0], (size_t)width * sizeof *own);
  for (int64_t i = 0; i < width; i++) total += own[i] * (float)a->numbers[0];
  ((float *)a->data[0])[item] = total;
}

static void add(void *context, int64_t item, void *scratch) {
  *(int64_t *)scratch = item;
  atomic_fetch_add((_Atomic int64_t *)context, *(int64_t *)scratch);
}

static void nested(void *context, int64_t item, void *scratch) {
  struct call *c = context;
  _Atomic int64_t total = 0;
  memset(scratch, 1, 64);
  int status = c->run(add, &total, 10, 64, c->threads);
  int kept = *(char *)scratch == 1 && ((char *)scratch)[63] == 1;
  ((int64_t *)c->args->data[0])[item] = status || !kept ? -1 : total;
}

__attribute__((visibility("default"))) int tw_program(const struct tw_args *args, parallel run, int threads) {
  struct call c = {args, run, threads, 0};
  void (*what[])(void *, int64_t, void *) = {record, sums, nested};
  return run(what[args->sizes[1]], &c, args->sizes[0], args->sizes[2], threads);
}
"""
CPUS = 6  # what the pools under test take the machine for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for these tests."""
    return tmp_path_factory.mktemp("threads") / "cache"


@pytest.fixture(autouse=True)
def _cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(folder))


@dataclass(frozen=True)
class Pool:
    """A pool of its own, and the program that uses it."""

    library: NativeLibrary
    program: Program

    @property
    def workers(self) -> int:
        count: int = ctypes.CFUNCTYPE(ctypes.c_int)(self.library.address("tw_workers"))()
        return count

    def record(self, items: int, threads: int, scratch: int = 0, microseconds: int = 0) -> np.ndarray:
        """Of each item: how often it ran, when, by which thread, and where its scratch was."""
        rows = np.zeros((items, 4), np.int64)
        sizes = [items, 0, scratch, microseconds, 0]
        self.program.run([rows.ctypes.data, 0], [0], sizes, [0.0], threads)
        return rows


def built(source: str) -> Path:
    compiler = find_compiler()
    assert compiler is not None
    return build(source, "a test", ISAS["portable"], compiler)


def program(pool: NativeLibrary) -> Program:
    return Program(load(built(SOURCE)), pool.address("tw_parallel"), pointers=2, strides=1, sizes=5, numbers=1)


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    """A new one: the loader takes a copy of a library for another library, with threads of its own."""
    copy = tmp_path / "pool.so"
    copy.write_bytes(built(f"#define TW_ALLOWED_CPUS {CPUS}\n{pool_source()}").read_bytes())
    library = load(copy)
    return Pool(library, program(library))


# ---- handing out items -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 4, 64])
@pytest.mark.parametrize("items", [0, 1, 2, 5, 1000])
def test_each_item_runs_once(items: int, threads: int, pool: Pool) -> None:
    """On no more threads than were asked for, than there are items, and than there are processors."""
    for _ in range(20):
        rows = pool.record(items, threads)
        assert (rows[:, 0] == 1).all()
        assert len(set(rows[:, 2])) <= min(threads, CPUS, max(1, items))
    assert pool.workers == max(0, min(threads, CPUS, items) - 1)


def test_items_are_shared_out(pool: Pool) -> None:
    """The caller works too; each thread takes its items in increasing order."""
    rows = pool.record(100, 4, microseconds=2000)
    assert threading.get_native_id() in rows[:, 2]
    assert len(set(rows[:, 2])) > 1
    for thread in set(rows[:, 2]):
        own = rows[rows[:, 2] == thread]
        assert (np.diff(own[:, 1]) > 0).all()


def test_alone_in_order(pool: Pool) -> None:
    """One thread asked for, or one item: the pool is not touched."""
    rows = pool.record(50, 1)
    assert rows[:, 1].tolist() == list(range(50))
    pool.record(1, 8)
    assert set(rows[:, 2]) == {threading.get_native_id()}
    assert pool.workers == 0


def test_results_do_not_depend_on_threads(pool: Pool, rng: np.random.Generator) -> None:
    """An item is computed alike by whichever thread takes it."""
    a = rng.standard_normal((200, 300), np.float32)
    results = []
    for threads in (1, 2, 3, 6, 6, 6):
        out = np.empty(200, np.float32)
        pool.program.run([out.ctypes.data, a.ctypes.data], [300], [200, 1, 1200, 0, 300], [0.5], threads)
        results.append(out.tobytes())
    assert len(set(results)) == 1
    np.testing.assert_allclose(np.frombuffer(results[0], np.float32), a.sum(1) / 2, rtol=1e-3, atol=1e-4)


def test_nested_calls(pool: Pool) -> None:
    """From inside an item: on the same thread, in memory beside the item's."""
    out = np.zeros(100, np.int64)
    pool.program.run([out.ctypes.data, 0], [0], [100, 2, 64, 0, 0], [0.0], 4)
    assert (out == 45).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_calls_from_several_threads(threads: int, pool: Pool) -> None:
    """Each comes back with its own results; who finds the pool taken works alone."""

    def calls(n: int) -> bool:
        return all(
            (pool.record(1 + (n + i) % 17, threads, scratch=1000 * (1 + i % 3))[:, 0] == 1).all() for i in range(300)
        )

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(calls, range(4)))
    assert pool.workers == threads - 1


def test_python_runs_meanwhile(pool: Pool) -> None:
    """The interpreter's lock is free during a call."""
    caller = threading.Thread(target=pool.record, args=(1, 1, 0, 300_000))
    caller.start()
    ticks = 0
    while caller.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5


# ---- scratch memory --------------------------------------------------------------------------------------------------


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    with open("/proc/self/maps") as lines:
        ranges = [line.split()[0].split("-") for line in lines]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.mark.parametrize(
    ("size", "boundary"), [(1, 64), (1000, 64), ((1 << 20) - 64, 64), (1 << 20, 2 << 20), (5 << 20, 2 << 20)]
)
def test_scratch(size: int, boundary: int, pool: Pool) -> None:
    """Each thread has its own, on a cache line, or a huge page where it is large; kept from call to call."""
    for _ in range(2):
        rows = pool.record(30, 4, scratch=size, microseconds=100)
        assert (rows[:, 0] == 1).all()
        assert (rows[:, 3] % boundary == 0).all()
        places = {(thread, place) for thread, place in rows[:, 2:].tolist()}
        assert len(places) == len(set(rows[:, 2])) == len(set(rows[:, 3]))
    (own,) = set(pool.record(3, 1, scratch=size)[:, 3])
    (again,) = set(pool.record(3, 1, scratch=max(1, size // 2))[:, 3])
    assert again == own


def test_large_scratch_is_given_back(pool: Pool) -> None:
    """What exceeds 64 MiB; up to there it is kept."""
    (kept,) = set(pool.record(2, 1, scratch=64 << 20)[:, 3])
    assert mapped(kept)
    (returned,) = set(pool.record(2, 1, scratch=(64 << 20) + 1)[:, 3])
    assert not mapped(returned)


def test_scratch_ends_with_its_thread(pool: Pool) -> None:
    """Callers come and go; what they used goes with them."""
    with ThreadPoolExecutor(1) as caller:
        (place,) = set(caller.submit(pool.record, 2, 1, 32 << 20).result()[:, 3])
        assert mapped(place)
    deadline = time.monotonic() + 10
    while mapped(place) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not mapped(place)


@pytest.mark.parametrize("threads", [1, 4])
def test_missing_memory(threads: int, pool: Pool) -> None:
    """An error of the call; the next one works."""
    rows = np.zeros((8, 4), np.int64)
    text = rf"no memory for the scratch of native code on {threads} threads \(Cannot allocate memory\)"
    with pytest.raises(MemoryError, match=text):
        pool.program.run([rows.ctypes.data, 0], [0], [8, 0, 1 << 60, 0, 0], [0.0], threads)
    assert not rows.any()
    assert (pool.record(8, threads, scratch=100)[:, 0] == 1).all()


# ---- a good neighbour ------------------------------------------------------------------------------------------------


def test_idle_pool_sleeps(pool: Pool) -> None:
    """Waiting workers take no processor time."""
    pool.record(20, CPUS, microseconds=100)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_workers_take_no_signals(pool: Pool) -> None:
    """Ctrl-C and the rest go to the host's threads."""
    pool.record(20, 4, microseconds=100)
    names = {p: (p / "comm").read_text().strip() for p in Path("/proc/self/task").iterdir()}
    blocked = [
        next(int(line.split()[1], 16) for line in (p / "status").read_text().splitlines() if line.startswith("SigBlk"))
        for p, name in names.items()
        if name == "tilewright"
    ]
    assert len(blocked) >= 3
    assert all(mask >> (s - 1) & 1 for mask in blocked for s in (1, 2, 15))


def child(pool: Pool, text: str) -> list[str]:
    """Run a script in a new process that has `record(items, threads, microseconds)`, as if on six processors."""
    setup = f"""
import ctypes, os, threading, time
from pathlib import Path
import numpy as np
from tilewright.codegen_cache.native import Program, load
pool = load(Path({str(pool.library.path)!r}))
library = load(Path({str(pool.program.library.path)!r}))
program = Program(library, pool.address("tw_parallel"), pointers=2, strides=1, sizes=5, numbers=1)
workers = ctypes.CFUNCTYPE(ctypes.c_int)(pool.address("tw_workers"))
def record(items, threads, microseconds=0):
    rows = np.zeros((items, 4), np.int64)
    program.run([rows.ctypes.data, 0], [0], [items, 0, 1000, microseconds, 0], [0.0], threads)
    return bool((rows[:, 0] == 1).all())
def in_child(work):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    return os.waitpid(pid, 0)[1]
"""
    done = subprocess.run([sys.executable, "-c", setup + text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_fork_after_use(pool: Pool) -> None:
    """A child hires workers of its own at its first call, and so does its child; the parent's go on."""
    text = """
assert record(50, 4) and workers() == 3
def grandchild():
    return record(50, 3) and workers() == 2
def work():
    return workers() == 0 and record(50, 6) and workers() == 5 and in_child(grandchild) == 0
print(in_child(work), in_child(work), record(50, 4), workers())
"""
    assert child(pool, text) == ["0", "0", "True", "3"]


def test_fork_during_use(pool: Pool) -> None:
    """While another thread is inside a call, and its workers hold items."""
    text = """
stop = False
def calls():
    while not stop:
        assert record(40, 5, microseconds=50)
threads = [threading.Thread(target=calls) for _ in range(2)]
for t in threads: t.start()
time.sleep(0.05)
print(sum(in_child(lambda: record(50, 4) and workers() == 3) for _ in range(20)))
stop = True
for t in threads: t.join()
"""
    assert child(pool, text) == ["0"]


def test_exit_during_use(pool: Pool) -> None:
    """A process may end while a daemon thread is inside a call."""
    text = """
threading.Thread(target=record, args=(1000, 4, 100_000), daemon=True).start()
time.sleep(0.1)
print("done")
"""
    assert child(pool, text) == ["done"]


# ---- the pool of the process -----------------------------------------------------------------------------------------


def test_one_pool() -> None:
    """Whoever asks, and however often."""
    compiler = find_compiler()
    assert compiler is not None
    with ThreadPoolExecutor(4) as callers:
        assert len({id(x) for x in callers.map(lambda _: threads_library(compiler), range(8))}) == 1
    assert parallel_address(compiler) == threads_library(compiler).address("tw_parallel")


def test_no_more_threads_than_processors() -> None:
    """The real pool, on a thread that may use few."""
    compiler = find_compiler()
    assert compiler is not None
    library = threads_library(compiler)
    own = Pool(library, program(library))
    allowed = os.sched_getaffinity(0)
    assert len(set(own.record(200, 64, microseconds=50)[:, 2])) <= len(allowed)
    assert own.workers <= len(allowed) - 1
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert set(own.record(200, 64, microseconds=50)[:, 2]) == {threading.get_native_id()}
    finally:
        os.sched_setaffinity(0, allowed)


def test_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the variable says, else as torch does."""
    assert thread_count() == torch.get_num_threads()
    monkeypatch.setenv("TILEWRIGHT_THREADS", "37")
    assert thread_count() == 37


# ---- calls -----------------------------------------------------------------------------------------------------------

ECHO = """
#include <stdint.h>
struct tw_args { void **data; const int64_t *strides; const int64_t *sizes; const double *numbers; };
__attribute__((visibility("default"))) int tw_program(const struct tw_args *a, void *parallel, int threads) {
  double *out = a->data[2];
  for (int i = 0; i < 3; i++) *out++ = (double)(uintptr_t)a->data[i];
  for (int i = 0; i < 4; i++) *out++ = (double)a->strides[i];
  for (int i = 0; i < 2; i++) *out++ = (double)a->sizes[i];
  for (int i = 0; i < 2; i++) *out++ = a->numbers[i];
  *out++ = (double)(uintptr_t)parallel;
  *out++ = threads;
  return 0;
}
"""


@pytest.fixture
def echo() -> Program:
    return Program(load(built(ECHO)), 4096, pointers=3, strides=4, sizes=2, numbers=2)


def test_arguments_arrive(echo: Program) -> None:
    """Each in its array, negative and fractional ones included."""
    out = np.zeros(13)
    for shift in range(3):
        strides = [-1, 0, 1 << 40, shift]
        echo.run([0, 16, out.ctypes.data], strides, [3, -(1 << 50)], [0.1, 7], 5)
        assert out.tolist() == [0, 16, out.ctypes.data, *strides, 3, -(1 << 50), 0.1, 7, 4096, 5]


def test_wrong_number_of_arguments(echo: Program) -> None:
    """Never read past the end."""
    with pytest.raises(struct.error):
        echo.run([0, 0, 0, 0], [0] * 4, [0] * 2, [0.0] * 2, 1)
    with pytest.raises(struct.error):
        echo.run([0, 0, 0], [0] * 3, [0] * 2, [0.0] * 2, 1)


def test_calls_keep_their_arguments_apart(echo: Program) -> None:
    """Several threads call one program at once."""

    def calls(n: int) -> bool:
        out = np.zeros(13)
        pointer = out.ctypes.data
        for i in range(2000):
            echo.run([n, i, pointer], [n] * 4, [i, n], [n, i], n)
            if out.tolist() != [n, i, pointer, n, n, n, n, i, n, n, i, 4096, n]:
                return False
        return True

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(calls, range(4)))
