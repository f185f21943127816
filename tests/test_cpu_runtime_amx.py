"""The CPU runtime's products by AMX: edges of tiles, and the state of tiles that a thread shares with other code."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cpu_runtime import AMX, Array, Runtime, build, fenced, pointers, rounded, why_not

COLUMNS, DEPTH, ROWS = 160, 90, 99  # the depth in words
NAN = 0x7FC07FC0  # in both halves of a word


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Path:
    if reason := why_not(AMX):
        pytest.skip(reason)
    return build(AMX, request.config.cache.mkdir("cpu_runtime"))


@pytest.fixture(scope="module")
def runtime(library: Path) -> Runtime:
    return Runtime(AMX, library)


class Product:
    """Two matrices in bfloat16, and what a range of their product is."""

    def __init__(self, rng: np.random.Generator, rows: int = ROWS, columns: int = COLUMNS, depth: int = DEPTH) -> None:
        a, self.left = rounded(rng.normal(size=(rows, 2 * depth)), "bfloat16")
        b, self.right = rounded(rng.normal(size=(2 * depth, columns)), "bfloat16")
        self.a = a.view(np.uint32)
        self.b = np.ascontiguousarray(b.reshape(depth, 2, columns).swapaxes(1, 2)).view(np.uint32)[..., 0]

    def packed(self, gap: int = 1) -> Array:
        """Panels of 32 columns; `gap` words of NaN lie between two of them."""
        depth, columns = self.b.shape
        panels = self.b.reshape(depth, columns // 32, 32).swapaxes(0, 1).reshape(columns // 32, -1)
        return np.pad(panels, ((0, 0), (0, gap)), constant_values=NAN).astype(np.uint32)

    def wanted(self, rows: int, lo: int, hi: int, k0: int, k1: int) -> Array:
        out: Array = self.left[:rows, 2 * k0 : 2 * k1] @ self.right[2 * k0 : 2 * k1, lo:hi]
        return out


def multiply(
    runtime: Runtime, p: Product, c: Array, columns: tuple[int, int], depth: tuple[int, int], accumulate: bool
) -> None:
    """Into the rows that `c` has. Outside the ranges are NaNs, and past the last element to be read is nothing."""
    a, panels = p.a[: len(c)].copy(), p.packed(gap := 7)
    (lo, hi), (k0, k1) = columns, depth
    a[:, :k0], a[:, k1:] = NAN, NAN
    inside = panels[:, :-gap].reshape(len(panels), -1, 32)
    inside[:, :k0], inside[:, k1:] = NAN, NAN
    last = (hi - 1) // 32 * panels.shape[1] + (k1 - 1) * 32 + (hi - 1) % 32 + 1 if hi > lo and k1 > k0 else 0
    a_end = (len(c) - 1) * a.shape[1] + k1
    runtime.call(
        "gemm_bfloat16",
        *(len(c), lo, hi, k0, k1),
        *(fenced(a.reshape(-1)[:a_end]), a.shape[1], fenced(panels.reshape(-1)[:last]), panels.shape[1]),
        *(c, c.shape[1], int(accumulate)),
    )


def test_random_ranges(runtime: Runtime, rng: np.random.Generator) -> None:
    p = Product(rng)
    for _ in range(150):
        rows = int(rng.integers(1, ROWS + 1))
        lo, hi = (16 * int(x) for x in np.sort(rng.integers(0, COLUMNS // 16 + 1, 2)))
        k0, k1 = (int(x) for x in np.sort(rng.integers(0, DEPTH + 1, 2)))
        before = rng.normal(size=(rows, COLUMNS)).astype(np.float32)
        for accumulate in (True, False):
            c = fenced(before)
            if not accumulate:
                c[:, lo:hi] = np.nan
            multiply(runtime, p, c, (lo, hi), (k0, k1), accumulate)
            wanted = p.wanted(rows, lo, hi, k0, k1) + (before[:, lo:hi] if accumulate else 0)
            assert np.allclose(c[:, lo:hi], wanted, rtol=1e-5, atol=1e-4)
            outside = np.r_[:lo, hi:COLUMNS]
            assert np.array_equal(c[:, outside], before[:, outside])


@pytest.mark.parametrize("depth", [(0, 0), (5, 6), (3, 18), (0, 16), (1, 18), (0, 32), (9, 72), (0, DEPTH)])
def test_bits_depend_on_the_depth_alone(runtime: Runtime, depth: tuple[int, int], rng: np.random.Generator) -> None:
    """Every row and every vector of columns alone, and every number of rows, gives the bits of all at once."""
    p = Product(rng)
    before = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    whole = before.copy()
    multiply(runtime, p, whole, (0, COLUMNS), depth, True)
    for rows in range(1, 66):
        c = before[:rows].copy()
        multiply(runtime, p, c, (0, COLUMNS), depth, True)
        assert np.array_equal(c, whole[:rows])
    parts = before.copy()
    for j in range(0, COLUMNS, 16):
        multiply(runtime, p, parts, (j, j + 16), depth, True)
    assert np.array_equal(parts, whole)
    shifted = before[:40].copy()
    multiply(runtime, p, shifted, (16, COLUMNS - 16), depth, True)
    assert np.array_equal(shifted[:, 16:-16], whole[:40, 16:-16])


def test_small_integers_are_exact(runtime: Runtime, rng: np.random.Generator) -> None:
    p = Product(rng)
    for name in ("left", "right"):
        values = rng.integers(-8, 9, getattr(p, name).shape)
        stored, meaning = rounded(values, "bfloat16")
        setattr(p, name, meaning)
        if name == "left":
            p.a = stored.view(np.uint32)
        else:
            p.b = np.ascontiguousarray(stored.reshape(DEPTH, 2, COLUMNS).swapaxes(1, 2)).view(np.uint32)[..., 0]
    c = np.zeros((ROWS, COLUMNS), np.float32)
    multiply(runtime, p, c, (0, COLUMNS), (0, DEPTH), False)
    assert np.array_equal(c, p.wanted(ROWS, 0, COLUMNS, 0, DEPTH))


def test_few_rows_of_many_keys(runtime: Runtime, rng: np.random.Generator) -> None:
    """More weights than are widened at a time; as many at a time, or all, the bits are the same."""
    n, width = 600, 40
    a, left = rounded(rng.normal(size=(3, n)), "bfloat16")
    b, right = rounded(rng.normal(size=(n, width)), "bfloat16")
    rows = [fenced(row) for row in b]
    for lo, hi in ((0, n), (5, 261), (5, 262), (300, n), (7, 7)):
        c, parts = (fenced(np.full((3, width), np.nan, np.float32)) for _ in range(2))
        source, keys = fenced(a), pointers(rows)
        runtime.call("combine_rows_bfloat16", 3, source, n, keys, lo, hi, width, c, width, 0)
        assert np.allclose(c, left[:, lo:hi] @ right[lo:hi], rtol=1e-5, atol=1e-4)
        for j in range(lo, hi, 50) if hi > lo else [lo]:
            runtime.call(
                "combine_rows_bfloat16", 3, source, n, keys, j, min(j + 50, hi), width, parts, width, int(j > lo)
            )
        assert np.array_equal(parts, c)


@contextmanager
def kept_shapes(runtime: Runtime) -> Iterator[None]:
    runtime.call("begin_products")
    try:
        yield
    finally:
        runtime.call("end_products")


def test_tiles_are_released(runtime: Runtime, rng: np.random.Generator) -> None:
    """After a product, or after several that keep the shapes of tiles; these have the same bits."""
    p = Product(rng)
    alone, together = np.zeros((2, 5, 70, COLUMNS), np.float32)
    calls = [(70, (0, 64)), (32, (0, 90)), (32, (0, 32)), (7, (3, 20)), (50, (0, 0))]
    for c, (rows, depth) in zip(alone, calls, strict=True):
        multiply(runtime, p, c[:rows], (0, COLUMNS), depth, True)
        assert not runtime.call("tiles_in_use")
    with kept_shapes(runtime):
        for c, (rows, depth) in zip(together, calls, strict=True):
            multiply(runtime, p, c[:rows], (0, COLUMNS), depth, True)
        assert runtime.call("tiles_in_use")
    assert not runtime.call("tiles_in_use")
    assert np.array_equal(alone, together)
    with kept_shapes(runtime):
        pass
    assert not runtime.call("tiles_in_use")


def test_beside_torch(runtime: Runtime, rng: np.random.Generator) -> None:
    """oneDNN shapes tiles of the same thread for itself: neither disturbs the other."""
    p = Product(rng)
    x, y = (torch.from_numpy(rng.normal(size=s)).bfloat16() for s in ((200, 300), (300, 100)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, theirs = [], []
        for rows in (ROWS, 12, ROWS, 12):
            theirs.append(torch.mm(x, y))
            c = np.zeros((ROWS, COLUMNS), np.float32)
            with kept_shapes(runtime):
                multiply(runtime, p, c[:rows], (0, COLUMNS), (0, DEPTH), False)
                multiply(runtime, p, c[:12], (0, COLUMNS), (0, DEPTH), False)
            ours.append(c)
        theirs.append(torch.mm(x, y))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(t, theirs[0]) for t in theirs)
    assert torch.allclose(theirs[0].float(), x.float() @ y.float(), rtol=1e-2, atol=0.2)
    assert np.array_equal(ours[0], ours[2])
    assert np.array_equal(ours[1], ours[3])


def test_many_threads(runtime: Runtime, rng: np.random.Generator) -> None:
    """Each has shapes of its own, also those kept."""
    p = Product(rng)
    wanted = np.zeros((ROWS, COLUMNS), np.float32)
    multiply(runtime, p, wanted, (0, COLUMNS), (0, DEPTH), False)
    wrong: list[int] = []

    def work(rows: int) -> None:
        with kept_shapes(runtime):
            for _ in range(20):
                c = np.zeros((rows, COLUMNS), np.float32)
                multiply(runtime, p, c, (0, COLUMNS), (0, DEPTH), False)
                if not np.array_equal(c, wanted[:rows]):
                    wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (5, 16, 31, 64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_threads_from_before_the_permission(library: Path) -> None:
    """Loading the library is enough, for all threads of the process and its forks."""
    program = f"""
import ctypes, os, threading
loaded, libraries = threading.Event(), []

def product():
    a, b = (ctypes.c_uint32 * 1024)(*[0x3F803F80] * 1024), (ctypes.c_uint32 * 1024)(*[0x3F803F80] * 1024)
    c, n = (ctypes.c_float * 1024)(), ctypes.c_long
    libraries[0].t_gemm_bfloat16(32, 0, 32, 0, 32, a, n(32), b, n(1024), c, n(32), 0)
    assert set(c) == {{64.0}}

def late():
    loaded.wait()
    product()
    print("thread", flush=True)

thread = threading.Thread(target=late)
thread.start()
libraries.append(ctypes.CDLL({str(library)!r}))
loaded.set()
thread.join()
if child := os.fork():
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    product()
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "thread\nchild 0\n", "")
