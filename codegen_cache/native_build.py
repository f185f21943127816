"""Generated C to shared libraries, each compiled once per machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tilewright.dsl
from tilewright.dsl.errors import CompileError, UnsafeCache
from tilewright.dsl.isa import Isa

from .compilers import Compiler, Runtime
from .store import Store, cache_root, key_of, private_folder, scratch_root

HEADERS: Final = Path(tilewright.dsl.__file__).parent / "cpu"
RUNTIME_HEADER: Final = "tilewright.h"
PRIMITIVES_SOURCE: Final = "primitives.c"
SOURCE: Final = "kernel.c"
LIBRARY: Final = "kernel.so"
OUTPUT: Final = "compiler.txt"
SECONDS: Final = 300  # what a compiler may take over one source


def build(source: str, name: str, isa: Isa, compiler: Compiler) -> Path:
    """The shared library of a C source, from the cache or compiled now. `name` is what messages call it.

    Raises CompileError, which keeps the source, and UnsafeCache. A cache that cannot be written is replaced by a
    temporary folder for this process, with one notice.
    """
    work = _library(source, name, isa, compiler)
    store = Store(cache_root(), "native")
    try:
        entry = _made(store, work)
    except UnsafeCache:
        raise
    except OSError as e:
        store = Store(scratch_root(store.root, e), "native")
        entry = _made(store, work)
    return entry / LIBRARY


@dataclass(frozen=True)
class _Work:
    """An entry to be made: a library, or the runtime that libraries are made with."""

    key: str
    parts: dict[str, object]  # what the key is made from
    file: str  # what the source is called
    source: str
    name: str
    isa: Isa
    compiler: Compiler
    runtime: _Work | None = None  # which is needed first

    def steps(self, runtime: Runtime | None) -> tuple[tuple[str, ...], ...]:
        if self.file == PRIMITIVES_SOURCE:
            return self.compiler.runtime_steps(self.file, HEADERS, self.isa)
        return self.compiler.steps(self.file, LIBRARY, self.isa, runtime)


def _library(source: str, name: str, isa: Isa, compiler: Compiler) -> _Work:
    """Sources that do not include the runtime, such as the thread pool's, do not depend on it."""
    parts = _parts(source, isa, compiler)
    runtime = _runtime(isa, compiler) if RUNTIME_HEADER in source else None
    if runtime is not None:
        parts["runtime"] = runtime.key
    return _Work(key_of(parts), parts, SOURCE, source, name, isa, compiler, runtime)


def _runtime(isa: Isa, compiler: Compiler) -> _Work:
    source = (HEADERS / PRIMITIVES_SOURCE).read_text(encoding="utf-8")
    parts = _parts(source, isa, compiler)
    parts["headers"] = {p.name: _digest(p.read_bytes()) for p in sorted(HEADERS.glob("*.h"))}
    return _Work(key_of(parts), parts, PRIMITIVES_SOURCE, source, "the primitives", isa, compiler)


def _parts(source: str, isa: Isa, compiler: Compiler) -> dict[str, object]:
    return {
        "source": _digest(source.encode()),
        "flags": (*compiler.flags, *isa.flags),
        "compiler": compiler.version,
        "isa": isa.name,
        "machine": platform.machine(),
        "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _made(store: Store, work: _Work) -> Path:
    """The folder of an entry."""
    return store.find(work.key) or _build(store, work)


def _build(store: Store, work: _Work) -> Path:
    """Compile under the lock of the key: who comes second finds what the first has made."""
    private_folder(store.root)
    with store.lock(work.key) as locked:
        if (entry := store.find(work.key, locked=True)) is not None:
            return entry
        runtime = Runtime(HEADERS, _made(store, work.runtime)) if work.runtime else None
        made = store.workplace(work.key, locked=locked)
        try:
            (made / work.file).write_text(work.source, encoding="utf-8")
            for command in work.steps(runtime):
                if (problem := _run(command, made, store.root)) is not None:
                    raise _failed(store, work, made, command, problem)
                if not (made / _output(command)).is_file():
                    raise _failed(store, work, made, command, f"ended well, but made no {_output(command)}")
            return store.publish(work.key, work.parts, made)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _output(command: Sequence[str]) -> str:
    return command[command.index("-o") + 1]


def _failed(store: Store, work: _Work, made: Path, command: Sequence[str], problem: str) -> CompileError:
    kept = _keep(store, work.key, made)
    return CompileError(
        compiler=shlex.join(work.compiler.command),
        name=work.name,
        problem=problem,
        path=kept / work.file,
        command=f"(cd {shlex.quote(str(kept))} && {shlex.join(command)})",
    )


def _keep(store: Store, key: str, made: Path) -> Path:
    """Put a failed build where it can be looked at; the last failure of a key replaces the one before."""
    kept = private_folder(store.root / "failed") / key
    shutil.rmtree(kept, ignore_errors=True)
    made.rename(kept)
    return kept


def _run(command: Sequence[str], folder: Path, root: Path) -> str | None:
    """Run the compiler in `folder`; what went wrong, or None. What it says goes to a file, where a pipe could fill."""
    environment = {**os.environ, "LC_ALL": "C"}  # errors are looked for in English
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(root / "zig"))
    with open(folder / OUTPUT, "ab") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # so that what the compiler has started ends with it
            )
        except OSError as e:
            return f"does not run: {e.strerror}"
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"has not ended after {SECONDS} s"
        finally:
            if process.returncode is None:  # late, or interrupted
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        return _first_error((folder / OUTPUT).read_text(errors="replace")) or f"ended with status {status}"
    return None


def _first_error(text: str) -> str:
    """The first line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "")
