"""Generated C on its way to a library on disk: built once, checked at each use, and never trusted when in doubt."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tilewright.codegen_cache import building, native_build, store
from tilewright.codegen_cache.compilers import Compiler, find_compiler
from tilewright.codegen_cache.native import Program, load
from tilewright.codegen_cache.native_build import build
from tilewright.codegen_cache.store import Store, cache_root
from tilewright.dsl.errors import CompileError, LoadError, TilewrightError, UnsafeCache
from tilewright.dsl.isa import ISAS

PORTABLE = ISAS["portable"]
SOURCE = '#include <stdint.h>\n__attribute__((visibility("default"))) int answer(void) { return 42; }\n'


KERNEL = SOURCE.replace("42", "ANSWER").replace("stdint", "tilewright")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def compiler() -> Compiler:
    found = find_compiler()
    assert found is not None
    return found


class Wrapper:
    """A compiler that counts its runs, and does something before each."""

    def __init__(self, folder: Path, compiler: Compiler) -> None:
        self._path, self._runs, self._real = folder / "wrapped-cc", folder / "runs", compiler
        self._runs.touch()
        self.then("")

    def then(self, before: str) -> Compiler:
        real = " ".join(f"'{c}'" for c in self._real.command)
        script = (
            f'#!/bin/sh\n[ "$1" = --version ] && exec {real} "$@"\necho >> {self._runs}\n{before}\nexec {real} "$@"\n'
        )
        self._path.write_text(script)
        self._path.chmod(0o700)
        return replace(self._real, command=(str(self._path),))

    @property
    def command(self) -> str:
        return str(self._path)

    @property
    def runs(self) -> int:
        return len(self._runs.read_text())


@pytest.fixture
def wrapper(tmp_path: Path, compiler: Compiler) -> Wrapper:
    if compiler.is_zig:
        pytest.skip("a wrapped zig is another compiler")
    return Wrapper(tmp_path, compiler)


def made(compiler: Compiler, source: str = SOURCE) -> Path:
    return build(source, "answer", PORTABLE, compiler)


def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one in place of ours: its folder."""
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "tilewright.h").write_text("int primitive(void);\n#define ANSWER primitive()\n")
    (headers / "primitives.c").write_text("int primitive(void) { return 42; }\n")
    monkeypatch.setattr(native_build, "HEADERS", headers)
    return headers


def answer(path: Path) -> int:
    """From a copy: the loader remembers paths."""
    copy = path.with_name(f"copy-{time.time_ns()}.so")
    shutil.copy(path, copy)
    result: int = ctypes.CDLL(str(copy)).answer()
    copy.unlink()
    return result


def raised(make: Callable[[], object]) -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        make()
    return caught.value


# ---- building --------------------------------------------------------------------------------------------------------


def test_built_once(root: Path, wrapper: Wrapper) -> None:
    """A second build of the same source is a look at the disk."""
    path = made(wrapper.then(""))
    assert answer(path) == 42
    assert root in path.parents
    assert made(wrapper.then("exit 1")) == path
    assert wrapper.runs == 1


def test_entry_says_what_it_is(root: Path, compiler: Compiler) -> None:
    """Source, library and what the key was made from, with a sum for each; open to nobody else; nothing left beside."""
    entry = made(compiler).parent
    assert (entry / "kernel.c").read_text() == SOURCE
    sums = json.loads((entry / "manifest.json").read_text())["sha256"]
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in entry.iterdir() if p.name != "manifest.json"}
    assert sums == files
    assert sums["key.json"] == entry.name
    assert json.loads((entry / "key.json").read_text())["compiler"] == compiler.version
    assert {p.stat().st_mode & 0o777 for p in [root, *root.rglob("*")] if p.is_dir()} == {0o700}
    assert list((root / "building").iterdir()) == []


def test_what_a_key_depends_on(root: Path, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source, what it includes, options, compiler version and instruction set; not the compiler's path."""
    headers = runtime(tmp_path, monkeypatch)
    first = made(compiler)
    others = [made(compiler, SOURCE + "\n"), made(replace(compiler, version=f"{compiler.version} patched"))]
    others.append(build(SOURCE, "answer", replace(PORTABLE, flags=("-O2",)), compiler))
    others.append(build(SOURCE, "answer", replace(PORTABLE, name="another"), compiler))
    others.append(made(compiler, KERNEL))
    (headers / "tilewright.h").write_text("int primitive(void);\n#define ANSWER primitive() + 1\n")
    others.append(made(compiler, KERNEL))
    assert answer(others[-1]) == 43
    (headers / "primitives.c").write_text("int primitive(void) { return 43; }\n")
    others.append(made(compiler, KERNEL))
    assert answer(others[-1]) == 44
    assert len({first, *others}) == 8
    assert made(replace(compiler, command=("/elsewhere/cc",))) == first


@pytest.mark.usefixtures("root")
def test_primitives_are_compiled_once(wrapper: Wrapper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all kernels of an instruction set, and linked into each."""
    runtime(tmp_path, monkeypatch)
    compiler = wrapper.then("")
    assert answer(made(compiler, KERNEL)) == 42
    assert wrapper.runs == 2
    assert answer(made(compiler, KERNEL + "\n")) == 42
    assert wrapper.runs == 3
    build(KERNEL, "answer", replace(PORTABLE, name="another"), compiler)
    assert wrapper.runs == 5


def test_primitives_that_do_not_compile(
    root: Path, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their source is kept as a kernel's is."""
    (runtime(tmp_path, monkeypatch) / "primitives.c").write_text("int primitive(void) { return 42 }\n")
    e = raised(lambda: made(compiler, KERNEL))
    assert "on the primitives: primitives.c:1:" in str(e)
    assert Path(str(e.fields["path"])).parents[1] == root / "failed"


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damaged_primitives(
    damage: str, root: Path, wrapper: Wrapper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made again for the next kernel; a kernel that has them needs them no more."""
    runtime(tmp_path, monkeypatch)
    compiler = wrapper.then("")
    path = made(compiler, KERNEL)
    (primitives,) = root.glob("native/*/primitives.o")
    before = primitives.read_bytes()
    primitives.unlink()
    if damage == "changed":
        primitives.write_bytes(before[:-8])
    assert made(compiler, KERNEL) == path
    with pytest.warns(RuntimeWarning, match=f"primitives.o (has )?(is )?{damage}"):
        assert answer(made(compiler, KERNEL + "\n")) == 42
    assert len(list((root / "quarantine").iterdir())) == 1
    assert primitives.read_bytes() == before
    assert wrapper.runs == 4


@pytest.mark.usefixtures("root")
def test_library_has_what_it_calls(compiler: Compiler) -> None:
    """Of the primitives, those that are called, and nothing to be seen from outside."""
    source = '#include "tilewright.h"\n__attribute__((visibility("default")))\n'
    source += "int64_t answer(int64_t count) { return tw_best_scratch(count, 1); }\n"
    path = build(source, "scratch", PORTABLE, compiler)
    library = ctypes.CDLL(str(path))
    library.answer.restype = ctypes.c_int64
    assert library.answer(ctypes.c_int64(100)) > 800
    assert not hasattr(library, "tw_best_scratch")
    assert b"tw_gemm_float32" not in path.read_bytes()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TILEWRIGHT_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/tilewright"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/tilewright"),
        ({"HOME": "/h"}, "/h/.cache/tilewright"),
    ],
)
def test_root(variables: Mapping[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the variables say; a relative XDG folder counts as none."""
    for name in ("TILEWRIGHT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_relative_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where the process stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "here")
    assert cache_root() == tmp_path / "here"


# ---- compilers that fail ---------------------------------------------------------------------------------------------


def shown(e: TilewrightError, root: Path) -> str:
    """The message without what differs between machines."""
    text = str(e).replace(str(root.parent), "").replace(str(native_build.HEADERS), "/headers")
    for path in sorted((root / "failed").glob("*")) if (root / "failed").exists() else []:
        text = text.replace(path.name, "KEY")
    return text


def test_messages(
    root: Path, wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    """What a user reads when a source does not compile, a library does not load, or a folder is not safe."""
    failing = {
        "CompileError: an error": "echo 'k.c: In function f:\nk.c:1:9: fatal error: no.h' >&2; exit 1",
        "CompileError: it says nothing": "kill -9 $$",
        "CompileError: it makes nothing": "exit 0",
    }
    found = {title: raised(partial(made, wrapper.then(script))) for title, script in failing.items()}
    with monkeypatch.context() as m:
        m.setattr(building, "SECONDS", 0.5)
        found["CompileError: it does not end"] = raised(lambda: made(wrapper.then("sleep 60")))
    found["CompileError: it is gone"] = raised(lambda: made(Compiler(("/gone/cc",), "cc 12")))
    library = root / "not-a-library.so"
    library.write_text("no ELF header here: it is text")
    found["LoadError: no library"] = raised(lambda: load(library))
    root.chmod(0o755)
    found["UnsafeCache: open to others"] = raised(lambda: made(wrapper.then("")))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    found["UnsafeCache: another user's"] = raised(lambda: made(wrapper.then("")))
    texts = {title: shown(e, root).replace(f"user {os.getuid()};", "user 0;") for title, e in found.items()}
    golden("errors_native", "\n".join(f"-- {title}\n{text}\n" for title, text in texts.items()))


def test_failed_source_is_kept(root: Path, compiler: Compiler) -> None:
    """With what the compiler said of it, for the command of the message to be tried again."""
    source = SOURCE.replace("42;", "42")
    e = raised(lambda: made(compiler, source))
    assert isinstance(e, CompileError)
    assert "error: expected" in str(e)
    kept = Path(str(e.fields["path"]))
    assert kept.read_text() == source
    command = ["sh", "-c", f"export LC_ALL=C; {e.fields['command']}"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode != 0
    assert str(e.fields["problem"]) in again.stderr
    assert not (root / "native").exists()
    assert str(raised(lambda: made(compiler, source))) == str(e)


def test_late_compiler_is_ended(root: Path, wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has started."""
    monkeypatch.setattr(building, "SECONDS", 2)
    note = root.parent / "child"
    e = raised(lambda: made(wrapper.then(f"sleep 60 & echo $! > {note}; wait")))
    assert "has not ended after 2 s" in str(e)
    child = note.read_text().strip()
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(child)


def running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---- several at once -------------------------------------------------------------------------------------------------

BUILDER = f"""
import sys
from tilewright.codegen_cache.compilers import find_compiler
from tilewright.codegen_cache.native_build import build
from tilewright.dsl.isa import ISAS
print(build({SOURCE!r}, "answer", ISAS["portable"], find_compiler()))
"""


def builder(wrapper: Wrapper) -> subprocess.Popen[str]:
    environment = {**os.environ, "TILEWRIGHT_CC": wrapper.command}
    return subprocess.Popen([sys.executable, "-c", BUILDER], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("root")
def test_processes_compile_once(wrapper: Wrapper) -> None:
    """Who comes second waits, and finds it made."""
    wrapper.then("sleep 0.7")
    processes = [builder(wrapper) for _ in range(4)]
    paths = {p.communicate(timeout=120)[0].strip() for p in processes}
    assert len(paths) == 1
    assert answer(Path(paths.pop())) == 42
    assert wrapper.runs == 1


@pytest.mark.usefixtures("root")
def test_threads_compile_once(wrapper: Wrapper) -> None:
    """The same in one process."""
    slow = wrapper.then("sleep 0.3")
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(lambda _: made(slow), range(4)))) == 1
    assert wrapper.runs == 1


@pytest.mark.usefixtures("root")
def test_without_locks_entries_stay_whole(wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none, or a holder that hangs: compiled more than once, and the first entry stays."""
    monkeypatch.setattr(store, "LOCK_SECONDS", 0)
    slow = wrapper.then("sleep 0.5")
    with ThreadPoolExecutor(3) as threads:
        (path,) = set(threads.map(lambda _: made(slow), range(3)))
    assert wrapper.runs == 3
    assert answer(path) == 42


def test_killed_builder_leaves_nothing(root: Path, wrapper: Wrapper) -> None:
    """Its lock is free, its half-made folder is removed, and the library is made."""
    wrapper.then("sleep 30")
    process = builder(wrapper)
    deadline = time.monotonic() + 60
    while wrapper.runs == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(list((root / "building").iterdir())) == 1
    assert answer(made(wrapper.then(""))) == 42
    assert list((root / "building").iterdir()) == []


# ---- entries that cannot be trusted ----------------------------------------------------------------------------------


def truncate(entry: Path) -> None:
    library = entry / "kernel.so"
    library.write_bytes(library.read_bytes()[:-100])


def flip_a_bit(entry: Path) -> None:
    data = bytearray((entry / "kernel.so").read_bytes())
    data[len(data) // 2] ^= 4
    (entry / "kernel.so").write_bytes(data)


def swap_the_library(entry: Path) -> None:
    """Another one, with a manifest to match it."""
    (entry / "kernel.so").write_bytes(b"evil")
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["sha256"]["kernel.so"] = hashlib.sha256(b"evil").hexdigest()
    manifest["key"] = manifest["sha256"]["key.json"] = "0" * 64
    (entry / "manifest.json").write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "kernel.so has changed"),
    "a bit": (flip_a_bit, "kernel.so has changed"),
    "no library": (lambda entry: (entry / "kernel.so").unlink(), "kernel.so is missing"),
    "source": (lambda entry: (entry / "kernel.c").write_text("int answer;"), "kernel.c has changed"),
    "key": (lambda entry: (entry / "key.json").write_text("{}"), "key.json has changed"),
    "no manifest": (lambda entry: (entry / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (
        lambda entry: (entry / "manifest.json").write_text('{"key": '),
        "manifest.json is not a manifest",
    ),
    "a list": (lambda entry: (entry / "manifest.json").write_text("[]"), "manifest.json is not a manifest"),
    "empty manifest": (
        lambda entry: (entry / "manifest.json").write_text(json.dumps({"key": entry.name, "sha256": {}})),
        "it is another entry",
    ),
    "another entry": (swap_the_library, "it is another entry"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_entry(kind: str, root: Path, wrapper: Wrapper) -> None:
    """Set aside with one warning and made again; the damaged library is never returned."""
    damage, problem = DAMAGE[kind]
    path = made(wrapper.then(""))
    before = path.read_bytes()
    damage(path.parent)
    with pytest.warns(RuntimeWarning) as seen:
        again = made(wrapper.then(""))
    (aside,) = (root / "quarantine").iterdir()
    text = f"compiled code in {aside} is damaged ({problem}): moved there from {path.parent}, and made again"
    assert [str(w.message) for w in seen] == [text]
    assert (again, again.read_bytes(), wrapper.runs) == (path, before, 2)
    assert aside.name.startswith(path.parent.name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(wrapper.then("")) == path


@pytest.mark.parametrize("folder", [".", "native", "native/*"])
def test_folder_open_to_others(folder: str, root: Path, compiler: Compiler) -> None:
    """What others could have written is not loaded, nor repaired: the user is told."""
    made(compiler)
    (found,) = root.glob(folder) if folder != "." else [root]
    found.chmod(0o770)
    with pytest.raises(UnsafeCache, match="has mode 770; expected 700"):
        made(compiler)
    found.chmod(0o700)
    made(compiler)


def test_folder_of_another_user(root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that somebody made first, in a place that all can write."""
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeCache, match=f"belongs to user {os.getuid()}"):
        made(compiler)


# ---- caches that cannot be written -----------------------------------------------------------------------------------


def test_unwritable_root(
    tmp_path: Path, wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A temporary folder is used, with one notice, and compiled into once."""
    monkeypatch.setattr(store, "_SCRATCH", None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    path = made(wrapper.then(""))
    assert made(wrapper.then("")) == path
    made(wrapper.then(""), SOURCE + "\n")
    assert answer(path) == 42
    assert wrapper.runs == 2
    reason = "cannot be written (Not a directory); compiled code is not kept"
    assert capsys.readouterr().err == f"tilewright: cache folder {tmp_path / 'file' / 'cache'} {reason}\n"
    assert path.parents[2].stat().st_mode & 0o777 == 0o700


def test_full_disk(root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a folder that fills up."""
    monkeypatch.setattr(store, "_SCRATCH", None)
    publish = Store.publish

    def full(self: Store, key: str, parts: Mapping[str, object], made: Path) -> Path:
        if self.root == root:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(self, key, parts, made)

    monkeypatch.setattr(Store, "publish", full)
    assert answer(made(compiler)) == 42
    assert list((root / "building").iterdir()) == []


def test_temporary_folder_ends_with_its_process(tmp_path: Path, wrapper: Wrapper) -> None:
    """And not with a child that it forks."""
    (tmp_path / "file").touch()
    program = f"{BUILDER}\nimport os, pathlib\nif os.fork() == 0: raise SystemExit\nos.wait()\n"
    program += "print(len(list(pathlib.Path(os.environ['TMPDIR']).glob('tilewright-*/native/*'))))"
    folder = tmp_path / "tmp"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "TILEWRIGHT_CACHE_DIR": str(tmp_path / "file" / "x")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split()[1:] == ["1"]
    assert list(folder.iterdir()) == []


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_loaded_once(root: Path, compiler: Compiler) -> None:
    """A path is one library for the life of the process."""
    path = made(compiler)
    assert root in path.parents
    assert load(path) is load(path)
    assert load(path).address("answer") != 0


@pytest.mark.usefixtures("root")
def test_library_without_the_function(compiler: Compiler) -> None:
    """It was not made by this compiler of ours."""
    with pytest.raises(LoadError, match="it has no function tw_program"):
        Program(load(made(compiler)), 0, pointers=0, strides=0, sizes=0, numbers=0)
