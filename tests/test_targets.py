# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, operator, no-untyped-def"
"""Where a call runs: natively by default, in the interpreter where native code cannot be, and where one says."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.batches import Content, content, place
from support.native import needs_compiler
from support.running import public

import tilewright
from tilewright.codegen_cache import compilers, prepared, programs
from tilewright.codegen_cache.compilers import NOTICE, NoCompilerWarning
from tilewright.dsl import Paged, Rows, dot, op, softmax
from tilewright.dsl.errors import ArgumentDeviceError, BadEnvironment, NoCompiler, NotOnTarget
from tilewright.dsl.interp import Interpreter
from tilewright.dsl.targets import TARGETS
from tilewright.ops import PagedKVCache


@op
def talking(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    s = dot(q, keys)
    print(s)
    return softmax(s) @ keys.v


@pytest.fixture
def data(rng: np.random.Generator) -> Content:
    return content(rng, (3, 1), (5, 0), heads=2, kv_heads=1)


@pytest.fixture
def cache(data: Content, rng: np.random.Generator) -> PagedKVCache:
    return place(data, rng)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, type]]:
    """The target of each program asked for, and what runs it. Calls made again ask for none."""
    found: list[tuple[str, type]] = []
    ask = programs.program_for

    def watch(*args: object, **options: object) -> programs.Ready:
        ready = ask(*args, **options)  # type: ignore[arg-type]
        found.append((args[4].name, type(ready.runner)))
        return ready

    monkeypatch.setattr("tilewright.codegen_cache.launch.program_for", watch)
    monkeypatch.setattr(prepared, "_CALLS", {})
    return found


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine without a C compiler, in a process that has not said so. What it has yet to say is in the list."""
    notices = [NOTICE]
    monkeypatch.setattr(compilers, "_find", lambda asked, path: None)
    monkeypatch.setattr(compilers, "_NOTICES", notices)
    return notices


NATIVE = ("cpu", programs.NativeProgram)
INTERPRETED = ("interpret", Interpreter)


@needs_compiler
def test_native_code_by_default(data: Content, cache: PagedKVCache, ran: list[tuple[str, type]]) -> None:
    """For CPU tensors, the first time; the second time nothing is looked for."""
    for _ in range(2):
        public(data.q, data.offsets, cache)
    assert ran == [NATIVE]


@needs_compiler
def test_what_is_named_is_taken(
    data: Content, cache: PagedKVCache, ran: list[tuple[str, type]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TILEWRIGHT_INTERPRET before `target`, and that before TILEWRIGHT_TARGET; none sticks to later calls."""
    public(data.q, data.offsets, cache)
    public(data.q, data.offsets, cache, target="interpret")
    with monkeypatch.context() as m:
        m.setenv("TILEWRIGHT_TARGET", "interpret")
        public(data.q, data.offsets, cache)
        public(data.q, data.offsets, cache, target="cpu")
        m.setenv("TILEWRIGHT_INTERPRET", "1")
        public(data.q, data.offsets, cache, target="cpu")
    public(data.q, data.offsets, cache)
    assert ran == [NATIVE, INTERPRETED, INTERPRETED, NATIVE, INTERPRETED]


@needs_compiler
def test_checked_contents(
    data: Content, cache: PagedKVCache, ran: list[tuple[str, type]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TILEWRIGHT_VALIDATE=1: the native nest in the interpreter, also after a call that ran natively."""
    want = public(data.q, data.offsets, cache)
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    got = public(data.q, data.offsets, cache)
    assert ran == [NATIVE, ("cpu", Interpreter)]
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)


# ---- operators that print --------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", [None, "interpret"])
def test_what_prints_is_interpreted(
    name: str | None,
    data: Content,
    cache: PagedKVCache,
    ran: list[tuple[str, type]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each time it is called, where nobody has named another target."""
    given = {"q": data.q, "kv": cache.layer(0)}
    for _ in range(2):
        tilewright.run(talking, given, data.offsets, target=name)
        assert "s[row, head, key]" in capsys.readouterr().out
    assert ran == 2 * [INTERPRETED]


@needs_compiler
def test_what_prints_is_refused_where_native_code_is_named(
    data: Content, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"q": data.q, "kv": cache.layer(0)}
    with pytest.raises(NotOnTarget, match=r"target 'cpu' has no print\(\)"):
        tilewright.run(talking, given, data.offsets, target="cpu")
    monkeypatch.setenv("TILEWRIGHT_TARGET", "cpu")
    with pytest.raises(NotOnTarget, match=r"target 'cpu' has no print\(\)"):
        tilewright.run(talking, given, data.offsets)


# ---- no compiler -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler(data: Content, cache: PagedKVCache, ran: list[tuple[str, type]]) -> None:
    """The interpreter, and one notice for all calls, which names what to install."""
    with pytest.warns(NoCompilerWarning) as seen:
        got = [public(data.q, data.offsets, cache) for _ in range(3)]
    assert [str(w.message) for w in seen] == [NOTICE]
    assert all(x in NOTICE for x in ("interpreter", "gcc", "TILEWRIGHT_CC", "pip install ziglang"))
    assert ran == 3 * [INTERPRETED]
    assert torch.equal(got[0], got[2])


@pytest.mark.usefixtures("no_compiler")
def test_one_notice_for_all_threads(data: Content, cache: PagedKVCache) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: public(data.q, data.offsets, cache), range(16)))
    assert [w.category for w in seen] == [NoCompilerWarning]


def test_no_notice_where_it_makes_no_difference(data: Content, cache: PagedKVCache, no_compiler: list[str]) -> None:
    """Where the interpreter is asked for, or would run the operator anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        public(data.q, data.offsets, cache, target="interpret")
        tilewright.run(talking, {"q": data.q, "kv": cache.layer(0)}, data.offsets)
    assert no_compiler == [NOTICE]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_named_native_code_needs_one(
    by: str, data: Content, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, not a notice: what was asked for is not there."""
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    options = {"target": "cpu"} if by == "argument" else {}
    if by == "variable":
        monkeypatch.setenv("TILEWRIGHT_TARGET", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NoCompiler, match="pip install ziglang"):
            public(data.q, data.offsets, cache, **options)


@needs_compiler
def test_a_compiler_that_comes_and_goes(
    data: Content, cache: PagedKVCache, ran: list[tuple[str, type]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed while a process runs, it is used from then on; removed, calls already made go on as they were."""
    find = compilers._find
    monkeypatch.setattr(compilers, "_find", lambda asked, path: None)
    monkeypatch.setattr(compilers, "_NOTICES", [])
    public(data.q, data.offsets, cache)
    monkeypatch.setattr(compilers, "_find", find)
    want = public(data.q, data.offsets, cache)
    monkeypatch.setattr(compilers, "_find", lambda asked, path: None)
    assert torch.equal(public(data.q, data.offsets, cache), want)
    assert ran == [INTERPRETED, NATIVE]


def test_a_compiler_that_was_named_and_does_not_run(
    data: Content, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TILEWRIGHT_CC is somebody's word: no other is taken, and no interpreter."""
    monkeypatch.setattr(prepared, "_CALLS", {})
    monkeypatch.setenv("TILEWRIGHT_CC", "nowhere/cc")
    with pytest.raises(BadEnvironment, match="nowhere/cc is not a program"):
        public(data.q, data.offsets, cache)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_a_device_without_a_target(data: Content, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.codegen_cache.launch.TARGETS", {"other": TARGETS["cpu"].__class__("other", "tpu")})
    with pytest.raises(ArgumentDeviceError, match="is on cpu; expected a device with a target: tpu"):
        public(data.q, data.offsets, cache)


def test_the_last_target_of_a_device_takes_everything() -> None:
    """So that one is always found."""
    last = {t.device: t for t in TARGETS.values()}
    assert not any(t.compiled for t in last.values())
