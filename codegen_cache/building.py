"""Entries of the kernel store that compilers make: one source, some commands, each entry built once per machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tilewright.dsl.errors import CompileError, UnsafeCache

from .store import Store, cache_root, key_of, private_folder, scratch_root

OUTPUT: Final = "compiler.txt"  # what the commands of an entry said
SECONDS: Final = 300  # what a compiler may take over one source

Commands = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Work:
    """An entry to be made. Commands run in its folder and name what they make after `-o`."""

    parts: Mapping[str, object]  # what the key is made from
    file: str  # what the source is called
    source: str
    name: str  # what messages call the source
    tool: str  # and the compiler
    commands: Callable[[Path | None], Commands]  # of the folder of `needs`
    needs: Work | None = None  # another entry, which is made first
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.parts))


def entry(kind: str, work: Work) -> Path:
    """The folder of an entry of the store, found or made now.

    Raises CompileError, which keeps the source, and UnsafeCache. A cache that cannot be written is replaced by a
    temporary folder for this process, with one notice.
    """
    store = Store(cache_root(), kind)
    try:
        return _made(store, work)
    except UnsafeCache:
        raise
    except OSError as e:
        return _made(Store(scratch_root(store.root, e), kind), work)


def _made(store: Store, work: Work) -> Path:
    return store.find(work.key) or _build(store, work)


def _build(store: Store, work: Work) -> Path:
    """Compile under the lock of the key: who comes second finds what the first has made."""
    private_folder(store.root)
    with store.lock(work.key) as locked:
        if (found := store.find(work.key, locked=True)) is not None:
            return found
        needed = _made(store, work.needs) if work.needs else None
        made = store.workplace(work.key, locked=locked)
        try:
            (made / work.file).write_text(work.source, encoding="utf-8")
            for command in work.commands(needed):
                if (problem := _run(command, made, store.root)) is not None:
                    raise _failed(store, work, made, command, problem)
                if not (made / _output(command)).is_file():
                    raise _failed(store, work, made, command, f"ended well, but made no {_output(command)}")
            return store.publish(work.key, work.parts, made)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _output(command: Sequence[str]) -> str:
    return command[command.index("-o") + 1]


def _failed(store: Store, work: Work, made: Path, command: Sequence[str], problem: str) -> CompileError:
    kept = _keep(store, work.key, made)
    return CompileError(
        compiler=work.tool,
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
