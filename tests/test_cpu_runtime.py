"""The CPU runtime, element by element: every storage type, and the functions against numpy."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cpu_runtime import (
    COMPILE,
    DRIVER,
    LEVELS,
    STORED,
    STRICT,
    Array,
    Level,
    Runtime,
    build,
    compiler,
    fenced,
    pointers,
    why_not,
)


@pytest.fixture(scope="module", params=LEVELS, ids=str)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return Runtime(request.param, build(request.param, request.config.cache.mkdir("cpu_runtime")))


def bits(x: Array) -> Array:
    return x.view(np.uint32)


def expect(got: Array, wanted: Array) -> None:
    """The same bits, but any NaN for a NaN."""
    nan = np.isnan(wanted)
    assert np.isnan(got[nan]).all()
    assert np.array_equal(bits(got[~nan]), bits(wanted[~nan]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_every_narrow_float(runtime: Runtime, dtype: str) -> None:
    kind, raw = STORED[dtype]
    every = fenced(np.arange(1 << 8 * np.dtype(raw).itemsize).astype(raw))
    wanted = torch.from_numpy(every.copy()).view(kind).float().numpy()
    for form in ("load", "one"):
        got = np.zeros(len(every), np.float32)
        runtime.call(f"{form}_{dtype}", every, got, len(every))
        expect(got, wanted)


INTEGERS = {"int32": np.int32, "uint32": np.uint32, "int64": np.int64, "uint8": np.uint8, "bool": np.bool_}


@pytest.mark.parametrize("dtype", ["float32", *INTEGERS])
def test_loads(runtime: Runtime, dtype: str, rng: np.random.Generator) -> None:
    """A part reads no further than asked, the other lanes are 0; of 64 bits, the nearest that 32 hold."""
    kind = INTEGERS.get(dtype, np.float32)
    values = rng.integers(0, 2 if kind is np.bool_ else 256, (3 * runtime.lanes + 1) * np.dtype(kind).itemsize)
    values = values.astype(np.uint8).view(kind)
    if dtype == "int64":
        values[::2] >>= rng.integers(30, 40, len(values[::2]))
        values[:4] = (1 << 31) - 1, -(1 << 31), 1 << 32, -(1 << 32) - 1
    limited = values.clip(-(1 << 31), (1 << 31) - 1) if dtype == "int64" else values
    wanted = values.view(np.int32) if dtype == "float32" else limited.astype(np.int32)
    wanted = -wanted if dtype == "bool" else wanted
    for n in range(1, len(values) + 1):
        source, got = fenced(values[:n]), fenced(np.zeros(n, np.int32))
        for form in ("load", "one"):
            runtime.call(f"{form}_{dtype}", source, got, n)
            assert np.array_equal(got, wanted[:n])
        if n <= runtime.lanes:
            padded = np.full(runtime.lanes, 7, np.int32)
            runtime.call(f"pad_{dtype}", source, padded, n)
            assert np.array_equal(padded, np.r_[wanted[:n], np.zeros(runtime.lanes - n)])


def floats_around_every_half() -> Array:
    """Random bit patterns, and both sides of every boundary that rounding to 16 bits has."""
    rng = np.random.default_rng(1)
    high, fine = np.arange(1 << 16) << 16, np.arange(1 << 19) << 13
    near = [a + d for a in (high + 0x8000, fine + 0x1000) for d in (-1, 0, 1)]
    return (
        np.concatenate([high, fine, *near, rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)])
        .astype(np.uint32)
        .view(np.float32)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_to_16_bits(runtime: Runtime, dtype: str) -> None:
    values = floats_around_every_half()
    kind, _ = STORED[dtype]
    wanted = torch.from_numpy(values.copy()).to(kind)
    nan = wanted.isnan().numpy()
    for form in ("store", "put"):
        got = np.zeros(len(values), np.uint16)
        runtime.call(f"{form}_{dtype}", values, got, len(values))
        assert torch.from_numpy(got.view(np.int16)).view(kind)[torch.from_numpy(nan)].isnan().all()
        assert np.array_equal(got[~nan], wanted.view(torch.int16).numpy().view(np.uint16)[~nan])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *INTEGERS])
def test_stores(runtime: Runtime, dtype: str, rng: np.random.Generator) -> None:
    """A part writes no further than asked."""
    floating = dtype in STORED
    values = rng.integers(-(1 << 31), 1 << 31, 3 * runtime.lanes + 1).astype(np.int32)
    values = values.astype(np.float32) if floating else values
    values[::3] = 0
    kind = STORED[dtype][1] if floating else INTEGERS[dtype]
    for n in range(1, len(values) + 1):
        source, got = fenced(values[:n]), fenced(np.zeros(n, kind))
        if floating:
            wanted = torch.from_numpy(values[:n].copy()).to(STORED[dtype][0]).float()
        for form in ("store", "put"):
            got[:] = 1
            runtime.call(f"{form}_{dtype}", source, got, n)
            if floating:
                assert torch.equal(torch.from_numpy(got.view(np.uint8).copy()).view(STORED[dtype][0]).float(), wanted)
            else:
                assert np.array_equal(got, values[:n].astype(kind))


def both(runtime: Runtime, name: str, *args: Array, out: type[np.generic] = np.float32) -> Array:
    """By vectors; by numbers it must be the same, bit for bit."""
    n = len(args[0])
    vector, number = fenced(np.zeros(n, out)), fenced(np.zeros(n, out))
    runtime.call(name, *args, vector, n)
    runtime.call(f"{name}_1", *args, number, n)
    assert np.array_equal(bits(vector), bits(number))
    return vector


EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, 1.0, -1.0, 1e7, -1e7, 1e30, -1e30, 3.4e38, -3.4e38]


def arguments(*parts: Array | list[float]) -> Array:
    return fenced(np.concatenate([*parts, EDGES]).astype(np.float32))


def relative_error(got: Array, wanted: Array) -> float:
    """Over the results that are normal numbers in float32."""
    normal = (np.abs(wanted) > 1.2e-38) & (np.abs(wanted) < 3.4e38)
    return float(np.abs(got[normal] / wanted[normal] - 1).max())


def test_exp(runtime: Runtime, rng: np.random.Generator) -> None:
    x = arguments(
        rng.uniform(-104, 89, 400_000),
        rng.normal(size=200_000),
        np.linspace(-104.5, -86, 20_000),
        [88.72, 88.73, 200, -200],
    )
    with np.errstate(over="ignore"):
        wanted = np.exp(x.astype(np.float64))
    got, rough = both(runtime, "exp", x), both(runtime, "exp_bf16", x)
    assert relative_error(got, wanted) <= 2e-7
    assert relative_error(rough, wanted) <= 1e-4
    for y in (got, rough):
        expect(y[~np.isfinite(x)], wanted[~np.isfinite(x)].astype(np.float32))
        assert np.isposinf(y[x > 88.73]).all()
        assert (y[x < -104] == 0).all()
    tiny = wanted < 1.2e-38
    assert np.abs(got[tiny] - wanted[tiny]).max() <= 2e-45  # denormal results, within rounding


def test_log(runtime: Runtime, rng: np.random.Generator) -> None:
    x = arguments(
        np.exp(rng.uniform(-103, 88, 200_000)), rng.uniform(0.4, 2.5, 200_000), 1 + rng.normal(0, 1e-3, 50_000)
    )
    with np.errstate(all="ignore"):
        wanted = np.log(x.astype(np.float64))
    got = both(runtime, "log", x)
    assert relative_error(got, wanted) <= 2e-7
    expect(got[~np.isfinite(wanted)], wanted[~np.isfinite(wanted)].astype(np.float32))
    assert (got[x == 1] == 0).all()


def test_tanh(runtime: Runtime, rng: np.random.Generator) -> None:
    x = arguments(
        rng.uniform(-10, 10, 200_000), rng.normal(size=200_000), rng.normal(0, 1e-3, 20_000), [0.625, 20, 100]
    )
    wanted = np.tanh(x.astype(np.float64))
    got = both(runtime, "tanh", x)
    assert relative_error(got, wanted) <= 5e-7
    expect(got[np.isnan(x)], x[np.isnan(x)])
    assert (np.abs(got[np.abs(x) > 10]) == 1).all()
    expect(both(runtime, "tanh", fenced(-x)), -got)
    assert np.array_equal(np.signbit(got[x == 0]), np.signbit(x[x == 0]))


def test_simple_functions(runtime: Runtime, rng: np.random.Generator) -> None:
    a = arguments(rng.normal(size=1000))
    b = fenced(rng.permutation(a))
    with np.errstate(all="ignore"):
        expect(both(runtime, "sqrt", a), np.sqrt(a))
        expect(both(runtime, "abs", a), np.abs(a))
    for name, wanted in (("max", np.maximum(a, b)), ("min", np.minimum(a, b))):
        got = both(runtime, name, a, b)
        assert np.array_equal(got, wanted, equal_nan=True)
    assert np.array_equal(both(runtime, "bits", a, out=np.int32), a.view(np.int32))
    expect(both(runtime, "from_bits", fenced(a.view(np.int32))), a)
    whole = fenced(rng.integers(-(1 << 31), 1 << 31, 1000).astype(np.int32))
    expect(both(runtime, "f32_of_i32", whole), whole.astype(np.float32))
    some = fenced((rng.normal(size=1000) * 1e6).astype(np.float32))
    assert np.array_equal(both(runtime, "i32_of_f32", some, out=np.int32), some.astype(np.int32))


INTEGER_MEANING: dict[str, Callable[[int, int], int]] = {
    "floordiv_i32": lambda a, b: a // b if b else 0,
    "mod_i32": lambda a, b: a % b if b else 0,
    "max_i32": max,
    "min_i32": min,
    "shl_i32": lambda a, n: a << n if 0 <= n < 32 else 0,
    "shr_i32": lambda a, n: a >> (n if 0 <= n < 32 else 31),
}


@pytest.mark.parametrize("name", INTEGER_MEANING)
def test_integers(runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    """Results that do not fit wrap."""
    large, small = rng.integers(-(1 << 31), 1 << 31, (2, 3000)), rng.integers(-40, 40, (2, 3000))
    edges = np.array(
        [[a, b] for a in (-(1 << 31), (1 << 31) - 1, 0, -1) for b in (-(1 << 31), (1 << 31) - 1, 0, 1, -1, 31, 32)]
    )
    a = fenced(np.r_[large[0], large[1], small[0], edges[:, 0]].astype(np.int32))
    b = fenced(np.r_[small[1], large[0], small[1], edges[:, 1]].astype(np.int32))
    exact = [INTEGER_MEANING[name](int(x), int(y)) for x, y in zip(a, b, strict=True)]
    wanted = np.array([(x + (1 << 31)) % (1 << 32) - (1 << 31) for x in exact])
    assert np.array_equal(both(runtime, name, a, b, out=np.int32), wanted)


def test_wide_integers(runtime: Runtime, rng: np.random.Generator) -> None:
    a, b = rng.integers(-(1 << 62), 1 << 62, 2000), rng.integers(-50, 50, 2000)
    for name, meaning in (
        ("floordiv_64", "floordiv_i32"),
        ("mod_64", "mod_i32"),
        ("max_64", "max_i32"),
        ("min_64", "min_i32"),
    ):
        got = np.zeros(len(a), np.int64)
        runtime.call(name, a, b, got, len(a))
        assert [INTEGER_MEANING[meaning](int(x), int(y)) for x, y in zip(a, b, strict=True)] == got.tolist()
    got = np.ones(2, np.int64)
    runtime.call("floordiv_64", np.array([-(1 << 63), 5]), np.array([-1, 0]), got, 2)  # neither may trap
    assert got.tolist() == [-(1 << 63), 0]


def test_whole_vectors(runtime: Runtime, rng: np.random.Generator) -> None:
    lanes = runtime.lanes
    for k in range(lanes):
        x = rng.normal(size=lanes).astype(np.float32)
        out = np.zeros(3 + lanes, np.float32)
        runtime.call("reduce_float", x, out)
        assert out[0] == pytest.approx(x.sum(dtype=np.float64), abs=1e-5)
        assert (out[3:] == out[0]).all()  # the sums of several vectors at once are these sums
        assert (out[1], out[2]) == (x.max(), x.min())
        x[k] = np.nan
        runtime.call("reduce_float", x, out)
        assert np.isnan(out[:3]).all()
        i = rng.integers(-(1 << 31), 1 << 31, lanes).astype(np.int32)
        i[i == 0] = 1
        i[k] = 0
        whole = np.zeros(5, np.int32)
        runtime.call("reduce_int", i, whole)
        assert whole.tolist() == [i.sum(dtype=np.int32), i.max(), i.min(), True, False]
    a, b = rng.normal(size=(2, lanes)).astype(np.float32)
    chosen = np.zeros((2, lanes), np.float32)
    runtime.call("choose", a, b, chosen)
    assert np.array_equal(chosen[0], np.minimum(a, b))
    assert np.allclose(chosen[1], a * b + np.arange(lanes), rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_primitives_apart(level: Level, request: pytest.FixtureRequest) -> None:
    """Every prototype has its body, and it gives the bits that it gives where it is compiled with what calls it."""
    cache = request.config.cache.mkdir("cpu_runtime")
    if compiler() is None or os.uname().machine != "x86_64":
        pytest.skip("flags for gcc on x86_64")
    apart = build(level, cache, apart=True)
    if reason := why_not(level):
        pytest.skip(reason)
    rng = np.random.default_rng(0)
    both = [Runtime(level, path) for path in (build(level, cache), apart)]
    rows, n, depth = 7, 3 * both[0].panel, 50
    a, b = (rng.normal(size=(k, depth)).astype(np.float32) for k in (rows, n))
    scores = rng.integers(0, 1000, 20000).astype(np.int32)
    results = []
    for runtime in both:
        panels, c = np.zeros((n, depth), np.float32), np.zeros((2, rows, n), np.float32)
        runtime.call("pack_columns_float32", pointers(list(b)), n, depth, panels, depth * runtime.panel)
        runtime.call("gemm_float32", rows, 0, n, 0, depth, a, depth, panels, depth * runtime.panel, c[0], n, 0)
        runtime.call("dot_rows_float32", rows, a, depth, pointers(list(b)), n, depth, c[1], n)
        best, scratch = np.zeros(500, np.int32), np.zeros(runtime.call("best_scratch", 20000, 500), np.uint8)
        runtime.call("best", scores, 20000, 500, best, scratch)
        results.append([panels.tobytes(), c.tobytes(), best.tobytes()])
    assert results[0] == results[1]


@pytest.mark.slow
def test_sanitizers(tmp_path: Path) -> None:
    """No access beside what a call names and nothing undefined: the portable level, as that one has no intrinsics."""
    if (cc := compiler()) is None:
        pytest.skip("no C compiler")
    program = tmp_path / "program"
    flags = ["-DWITH_MAIN", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [cc, *COMPILE, "-O0", *STRICT, *flags, str(DRIVER), "-o", str(program), "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clang", "aarch64-linux-gnu-gcc"])
def test_other_compilers(name: str, tmp_path: Path) -> None:
    """The same sources without a warning; a compiler for another processor has the portable level only."""
    if (cc := shutil.which(name)) is None:
        pytest.skip(f"no {name}")
    for level in LEVELS[: 1 if "aarch64" in name else None]:
        command = [cc, *COMPILE, *level.flags, *STRICT, "-c", str(DRIVER), "-o", str(tmp_path / "driver.o")]
        built = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert built.returncode == 0, built.stderr
