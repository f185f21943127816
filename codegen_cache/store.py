"""Compiled code on disk: a folder per entry, named by the hash of what it was made from.

An entry appears whole, by one rename, and is never changed afterwards. Readers take no lock: they check every file
against the entry's manifest. A damaged entry is moved aside by who builds it again, under its lock. What is stored is
executed, so no other user may write it.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from tilewright.dsl import knobs
from tilewright.dsl.errors import UnsafeCache

KEY_FILE: Final = "key.json"
MANIFEST: Final = "manifest.json"
LOCK_SECONDS: Final = 600  # longer than a build takes: then the holder hangs, and building twice does no harm


def key_of(parts: Mapping[str, object]) -> str:
    """The name of an entry: a hash of what it is made from, spelt in one way."""
    return hashlib.sha256(_spelt(parts)).hexdigest()


def _spelt(parts: Mapping[str, object]) -> bytes:
    return json.dumps(parts, sort_keys=True, indent=1).encode()


def cache_root() -> Path:
    """TILEWRIGHT_CACHE_DIR, else $XDG_CACHE_HOME/tilewright, else ~/.cache/tilewright. It need not exist."""
    if (asked := knobs.CACHE_DIR.get()) is not None:
        return Path(asked).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "tilewright"


@dataclass(frozen=True)
class Store:
    """Entries of one kind below a cache root."""

    root: Path
    kind: str  # a subfolder, such as "native"

    def path(self, key: str) -> Path:
        return self.root / self.kind / key

    def find(self, key: str, *, locked: bool = False) -> Path | None:
        """The folder of a whole entry; None where there is none, or only a damaged one.

        Who holds the lock of the key, and will build it again, moves the damaged entry aside, with a warning.
        Raises UnsafeCache where others could have written it.
        """
        entry = self.path(key)
        for folder in (self.root, entry.parent, entry):
            if not folder.is_dir():
                return None
            _expect_private(folder)
        problem = _damage(entry, key)
        if problem is None:
            return entry
        if locked:
            aside = private_folder(self.root / "quarantine") / f"{key}-{time.time_ns()}"
            entry.rename(aside)
            text = f"compiled code in {aside} is damaged ({problem}): moved there from {entry}, and made again"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None

    @contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """One builder of a key at a time, among all processes; released by the system when its holder dies.

        False where the file system has no locks, or the holder hangs: entries stay whole, but may be built twice.
        """
        folder = private_folder(self.root / "locks")
        lock = FileLock(folder / f"{self.kind}-{key}.lock", timeout=LOCK_SECONDS)
        try:
            lock.acquire()
        except (Timeout, NotImplementedError):
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def workplace(self, key: str, *, locked: bool) -> Path:
        """A new folder to build an entry in. Under its lock, what killed builders left is removed first."""
        folder = private_folder(self.root / "building")
        if not locked:  # under another name, as a builder with the lock may be at work, or come
            return Path(tempfile.mkdtemp(prefix=f"unlocked-{key}.", dir=folder))
        for left in folder.glob(f"{key}.*"):
            shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder))

    def publish(self, key: str, parts: Mapping[str, object], made: Path) -> Path:
        """Make the files in `made` the entry `key`, all at once; an entry that is there already wins."""
        entry = self.path(key)
        private_folder(entry.parent)
        (made / KEY_FILE).write_bytes(_spelt(parts))
        sums = {path.name: _sha256(path) for path in sorted(made.iterdir())}
        (made / MANIFEST).write_text(json.dumps({"key": key, "sha256": sums}, indent=1))
        for path in [*made.iterdir(), made]:
            _fsync(path)
        try:
            made.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
            shutil.rmtree(made, ignore_errors=True)
        _fsync(entry.parent)
        return entry


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter, or find it so; UnsafeCache otherwise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise _not_a_folder(path.parent) from None
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _expect_private(path)
    return path


def _not_a_folder(path: Path) -> OSError:
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _expect_private(path: Path) -> None:
    seen = path.stat()
    if not stat.S_ISDIR(seen.st_mode):
        raise _not_a_folder(path)
    if seen.st_uid != os.geteuid():
        expected = f"one that user {os.geteuid()} owns: compiled code is executed"
        raise UnsafeCache(path=path, problem=f"belongs to user {seen.st_uid}", expected=expected)
    if seen.st_mode & 0o077:
        expected = "700: compiled code is executed, so nobody else may reach it"
        raise UnsafeCache(path=path, problem=f"has mode {seen.st_mode & 0o777:03o}", expected=expected)


def _damage(entry: Path, key: str) -> str | None:
    """What is wrong with an entry; None for a whole one."""
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
        sums = dict(manifest["sha256"])
        if manifest["key"] != key or sums.get(KEY_FILE) != key:
            return "it is another entry"
        for name, expected in sums.items():
            if _sha256(entry / name) != expected:
                return f"{name} has changed"
    except FileNotFoundError as e:
        return f"{Path(e.filename).name} is missing"
    except OSError as e:
        return str(e)
    except (ValueError, TypeError, KeyError):
        return f"{MANIFEST} is not a manifest"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:  # not all of it at once: precompiled headers are large
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- a place for this process alone ----------------------------------------------------------------------------------

_LOCK = threading.Lock()
_SCRATCH: Path | None = None


def scratch_root(unusable: Path, problem: OSError) -> Path:
    """A private temporary folder in place of a cache root that cannot be written, until the process ends."""
    global _SCRATCH
    with _LOCK:
        if _SCRATCH is None:
            _SCRATCH = Path(tempfile.mkdtemp(prefix="tilewright-"))
            atexit.register(_remove, _SCRATCH, os.getpid())
            reason = problem.strerror or str(problem)
            text = f"tilewright: cache folder {unusable} cannot be written ({reason}); compiled code is not kept"
            print(text, file=sys.stderr)
        return _SCRATCH


def _remove(folder: Path, owner: int) -> None:
    """At exit; a forked child leaves its parent's folder alone."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _new_lock() -> None:
    """A forked child may find the lock held by a thread that it does not have."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
