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

from .compilers import Compiler
from .store import Store, cache_root, key_of, private_folder, scratch_root

HEADERS: Final = Path(tilewright.dsl.__file__).parent / "cpu"
SOURCE: Final = "kernel.c"
LIBRARY: Final = "kernel.so"
OUTPUT: Final = "compiler.txt"
SECONDS: Final = 300  # what a compiler may take over one source


def build(source: str, name: str, isa: Isa, compiler: Compiler) -> Path:
    """The shared library of a C source, from the cache or compiled now. `name` is what messages call it.

    Raises CompileError, which keeps the source, and UnsafeCache. A cache that cannot be written is replaced by a
    temporary folder for this process, with one notice.
    """
    parts: dict[str, object] = {
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "headers": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(HEADERS.glob("*.h"))},
        "flags": (*compiler.flags, *isa.flags),
        "compiler": compiler.version,
        "isa": isa.name,
        "machine": platform.machine(),
        "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None,
    }
    work = _Work(key_of(parts), parts, source, name, isa, compiler)
    store = Store(cache_root(), "native")
    try:
        entry = store.find(work.key) or _build(store, work)
    except UnsafeCache:
        raise
    except OSError as e:
        store = Store(scratch_root(store.root, e), "native")
        entry = store.find(work.key) or _build(store, work)
    return entry / LIBRARY


@dataclass(frozen=True)
class _Work:
    """A library to be made."""

    key: str
    parts: dict[str, object]  # what the key is made from
    source: str
    name: str
    isa: Isa
    compiler: Compiler


def _build(store: Store, work: _Work) -> Path:
    """Compile under the lock of the key: who comes second finds what the first has made."""
    private_folder(store.root)
    with store.lock(work.key) as locked:
        if (entry := store.find(work.key, locked=True)) is not None:
            return entry
        made = store.workplace(work.key, locked=locked)
        try:
            (made / SOURCE).write_text(work.source, encoding="utf-8")
            for command in work.compiler.steps(SOURCE, LIBRARY, HEADERS, work.isa):
                if (problem := _run(command, made, store.root)) is not None:
                    raise _failed(store, work, made, command, problem)
            if not (made / LIBRARY).is_file():
                raise _failed(store, work, made, command, "ended well, but made no library")
            return store.publish(work.key, work.parts, made)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _failed(store: Store, work: _Work, made: Path, command: Sequence[str], problem: str) -> CompileError:
    kept = _keep(store, work.key, made)
    return CompileError(
        compiler=shlex.join(work.compiler.command),
        name=work.name,
        problem=problem,
        path=kept / SOURCE,
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
