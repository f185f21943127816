"""The CPU runtime's packing, products and selection, at sizes that are no multiple of anything, to the page's end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.cpu_runtime import LEVELS, STORED, Array, Runtime, build, fenced, pointers, rounded, why_not


@pytest.fixture(scope="module", params=LEVELS, ids=str)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return Runtime(request.param, build(request.param, request.config.cache.mkdir("cpu_runtime")))


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


def cut(matrix: Array, panel: int) -> Array:
    """[depth][columns] as panels [..][depth][panel], columns past the end 0."""
    depth, columns = matrix.shape
    wide = np.zeros((depth, -(-columns // panel) * panel), matrix.dtype)
    wide[:, :columns] = matrix
    return np.ascontiguousarray(wide.reshape(depth, -1, panel).swapaxes(0, 1))


def pairs(matrix: Array) -> Array:
    """Elements of 16 bits as words of two along the last axis; an odd last one has 0 beside it."""
    return np.ascontiguousarray(np.pad(matrix, ((0, 0), (0, matrix.shape[1] % 2)))).view(np.uint32)


def close(got: Array, wanted: Array) -> bool:
    return bool(np.allclose(got, wanted, rtol=1e-5, atol=1e-4))


def sizes(lanes: int) -> list[int]:
    return [1, 2, lanes - 1, lanes, 2 * lanes, 2 * lanes + 3, 5 * lanes + 1]


@pytest.mark.parametrize("dtype", STORED)
def test_packing_into_float32(runtime: Runtime, dtype: str, rng: np.random.Generator) -> None:
    name, panel = "float32" if dtype == "float32" else f"float32_{dtype}", runtime.panel
    for n in sizes(runtime.lanes):
        for depth in sizes(runtime.lanes):
            stored, meaning = rounded(normal(rng, n, depth), dtype)
            kept = [fenced(row) for row in stored]
            rows = pointers(kept)
            for form, matrix in (("columns", meaning.T), ("rows", meaning)):
                wanted = cut(np.ascontiguousarray(matrix), panel)
                got = fenced(np.full((len(wanted), len(matrix) + 1, panel), 7, np.float32))
                runtime.call(f"pack_{form}_{name}", rows, n, depth, got, got[0].size)
                assert np.array_equal(got[:, :-1], wanted)
                assert (got[:, -1] == 7).all()


def test_packing_pairs(runtime: Runtime, rng: np.random.Generator) -> None:
    panel = runtime.panel
    for n in sizes(runtime.lanes):
        for depth in sizes(runtime.lanes):
            values = normal(rng, n, depth)
            stored, _ = rounded(values, "bfloat16")
            kept = [fenced(row) for row in stored]
            rows = pointers(kept)
            across = np.ascontiguousarray(pairs(np.ascontiguousarray(stored.T)).T)
            for form, words in (("columns", np.ascontiguousarray(pairs(stored).T)), ("rows", across)):
                wanted = cut(words, panel)
                got = fenced(np.full((len(wanted), len(words) + 1, panel), 7, np.uint32))
                runtime.call(f"pack_{form}_bfloat16", rows, n, depth, got, got[0].size)
                assert np.array_equal(got[:, :-1], wanted)
                assert (got[:, -1] == 7).all()
            out = np.full((n, depth + 1), 7, np.uint16)
            runtime.call("round_rows_bfloat16", fenced(values), depth, n, depth, out, depth + 1)
            assert np.array_equal(out[:, :-1], stored)
            assert (out[:, -1] == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemm(runtime: Runtime, dtype: str, rng: np.random.Generator) -> None:
    """Any rows, whole vectors of columns, any depth; an element's bits do not depend on what is around it."""
    if dtype == "bfloat16" and not runtime.has_bf16_dot:
        pytest.skip("no bfloat16 products at this level")
    lanes, panel, step = runtime.lanes, runtime.panel, 2 if dtype == "bfloat16" else 1
    depth, columns, most = 37, 3 * panel, 2 * runtime.micro_rows + 3
    (a, left), (b, right) = (rounded(normal(rng, *s), dtype) for s in ((most, depth * step), (depth * step, columns)))
    if dtype == "bfloat16":
        a, b = pairs(a), np.ascontiguousarray(pairs(np.ascontiguousarray(b.T)).T)
    packed = fenced(cut(b, panel))
    for lo, hi, k0, k1 in (
        (0, columns, 0, depth),
        (lanes, columns - lanes, 3, 20),
        (lanes, 2 * lanes, 5, 6),
        (0, 0, 0, 9),
    ):
        before = normal(rng, most, columns)
        whole = before[:, lo:hi] + left[:, k0 * step : k1 * step] @ right[k0 * step : k1 * step, lo:hi]
        first = before.copy()
        for rows in range(most, 0, -1):
            for accumulate in (1, 0):
                source, c = fenced(a[:rows]), fenced(before[:rows])
                c[:] = before[:rows]
                runtime.call(
                    f"gemm_{dtype}", rows, lo, hi, k0, k1, source, depth, packed, depth * panel, c, columns, accumulate
                )
                assert close(c[:, lo:hi], whole[:rows] - (0 if accumulate else before[:rows, lo:hi]))
                outside = np.delete(np.arange(columns), np.arange(lo, hi))
                assert np.array_equal(c[:, outside], before[:rows, outside])
                if accumulate and rows == most:
                    first = c.copy()
                elif accumulate:
                    assert np.array_equal(c, first[:rows])
        if hi - lo > lanes:  # the same columns one vector at a time
            c = before.copy()
            for j in range(lo, hi, lanes):
                runtime.call(
                    f"gemm_{dtype}", most, j, j + lanes, k0, k1, a, depth, packed, depth * panel, c, columns, 1
                )
            assert np.array_equal(c, first)


def kinds(runtime: Runtime) -> list[tuple[str, str, str]]:
    """Functions for few rows: the end of their names, what `a` is stored as, and what the other matrix is."""
    mixed = [(f"float32_{dtype}", "float32", dtype) for dtype in ("float16", "bfloat16", "float8_e4m3fn")]
    pair = [("bfloat16", "bfloat16", "bfloat16")] if runtime.has_bf16_dot else []
    return [("float32", "float32", "float32"), *mixed, *pair]


def test_dot_rows(runtime: Runtime, rng: np.random.Generator) -> None:
    for name, of_a, of_b in kinds(runtime):
        for n in (1, 3, 4, 21):
            for depth in sizes(runtime.lanes):
                a, left = rounded(normal(rng, 6, depth), of_a)
                b, right = rounded(normal(rng, n, depth), of_b)
                kept = [fenced(row) for row in b]
                keys = pointers(kept)
                first = np.zeros((6, n), np.float32)
                for rows in range(6, 0, -1):
                    source = fenced(pairs(a[:rows]) if of_a == "bfloat16" else a[:rows])
                    c = fenced(np.full((rows, n + 1), 7, np.float32))
                    runtime.call(f"dot_rows_{name}", rows, source, source.shape[1], keys, n, depth, c, n + 1)
                    assert close(c[:, :n], left[:rows] @ right.T)
                    assert (c[:, n] == 7).all()
                    first = c[:, :n].copy() if rows == 6 else first
                    assert np.array_equal(c[:, :n], first[:rows])
                for j in range(n):  # alone, it is the same
                    c = np.zeros((6, 1), np.float32)
                    source = pairs(a) if of_a == "bfloat16" else a
                    runtime.call(f"dot_rows_{name}", 6, source, source.shape[1], keys[j:], 1, depth, c, 1)
                    assert np.array_equal(c[:, 0], first[:, j])


def test_combine_rows(runtime: Runtime, rng: np.random.Generator) -> None:
    """Only rows n_lo to n_hi are touched: the other pointers are null."""
    n = 21
    for name, of_a, of_b in kinds(runtime):
        for width in sizes(runtime.lanes):
            a, left = rounded(normal(rng, 6, n), of_a)
            b, right = rounded(normal(rng, n, width), of_b)
            rows_of_b = [fenced(row) for row in b]
            for lo, hi in ((0, n), (1, n - 1), (2, 3), (7, 8), (3, 3)):
                keys = pointers(rows_of_b)
                keys[:lo], keys[hi:] = 0, 0
                before = normal(rng, 6, width + 1)
                first = before
                for rows in range(6, 0, -1):
                    for accumulate in (0, 1):
                        source, c = fenced(a[:rows]), fenced(before[:rows])
                        runtime.call(
                            f"combine_rows_{name}", rows, source, n, keys, lo, hi, width, c, width + 1, accumulate
                        )
                        wanted = left[:rows, lo:hi] @ right[lo:hi] + accumulate * before[:rows, :width]
                        assert close(c[:, :width], wanted)
                        assert np.array_equal(c[:, width], before[:rows, width])
                    first = c.copy() if rows == 6 else first
                    assert np.array_equal(c, first[:rows])


def misleading(rng: np.random.Generator, n: int) -> Array:
    """Large exactly where the selection samples, so that its first guess of a bound leaves too few."""
    keys, stretch, state = rng.integers(0, 1000, n), n // 1024, 1
    for i in range(1024 if stretch else 0):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        keys[i * stretch + (state * stretch >> 32)] += 1 << 20
    return keys


KEYS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "any": lambda rng, n: rng.integers(-(1 << 31), 1 << 31, n),
    "few": lambda rng, n: rng.integers(0, 3, n),
    "unseen": lambda rng, n: np.where(rng.random(n) < 0.9, -(1 << 31), rng.integers(-3, 3, n)),
    "none": lambda rng, n: np.full(n, -(1 << 31)),
    "equal": lambda rng, n: np.full(n, (1 << 31) - 1),
    "relu": lambda rng, n: np.maximum(rng.normal(size=n) - 2, 0).astype(np.float32).view(np.int32),
    "rising": lambda rng, n: np.arange(n),
    "misleading": misleading,
    "periodic": lambda rng, n: np.where(np.arange(n) % 16 == 0, 1 << 30, rng.integers(0, 1000, n)),
}


@pytest.mark.parametrize("kind", KEYS)
def test_best(runtime: Runtime, kind: str, rng: np.random.Generator) -> None:
    for count, k in (
        (0, 3),
        (1, 1),
        (10, 4),
        (100, 200),
        (4095, 7),
        (16384, 2048),
        (5000, 4999),
        (9000, 9000),
        (20000, 65536),
    ):
        row = fenced(KEYS[kind](rng, count).astype(np.int32))
        out = fenced(np.zeros(k, np.int32))
        scratch = fenced(np.zeros(runtime.call("best_scratch", count, k), np.uint8))
        runtime.call("best", row, count, k, out, scratch)
        order = np.argsort(-row.astype(np.int64), kind="stable")[:k]
        wanted = np.full(k, -1)
        wanted[: len(order)] = np.where(row[order] > -(1 << 31), order, -1)
        assert np.array_equal(out, wanted)


def test_prefetch(runtime: Runtime) -> None:
    """Of any address: nothing is read."""
    runtime.call("prefetch", fenced(np.zeros(1, np.uint8)), 10000)
