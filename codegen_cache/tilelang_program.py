"""TileLang text to device sources, without a GPU: each kernel lowered once per machine and kept on disk.

TileLang is imported here alone, and only where a kernel has not been lowered before.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import linecache
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tilewright import __version__
from tilewright.dsl.emit_tilelang import KernelText, TileLangSource, emit_tilelang
from tilewright.dsl.errors import LoweringError, MissingToolkit, NoRoom, UnsafeCache
from tilewright.dsl.gpu import Gpu
from tilewright.dsl.loops import Program

from .device_source import DeviceSource
from .store import Store, cache_root, key_of, private_folder, scratch_root

DEVICE: Final = "device.json"  # the DeviceSource of an entry
READER: Final = 1  # counted up when what is read from TileLang's result changes


@dataclass(frozen=True)
class DeviceProgram:
    """A program for one architecture: its TileLang text, and the device source of each kernel, in order.

    seconds: of the processor, that TileLang took for each kernel; 0 where it had been lowered before.
    """

    tilelang: TileLangSource
    kernels: tuple[DeviceSource, ...]
    seconds: tuple[float, ...]


def device_program(program: Program, gpu: Gpu, *, aligned: bool = True) -> DeviceProgram:
    """The device sources of a nest lowered for `gpu`, from the cache or made now by TileLang.

    aligned: see `emit_tilelang`.

    Raises NotOnTarget for what has no form, LoweringError where TileLang fails, NoRoom where its kernel takes more
    shared memory than a block has, MissingToolkit without TileLang, UnsafeCache.
    """
    source = emit_tilelang(program, gpu, aligned=aligned)
    made = [_lowered(source, k, gpu) for k in source.kernels]
    for k, (device, _) in zip(source.kernels, made, strict=True):
        _expect_room(k, device, gpu)
    return DeviceProgram(source, tuple(d for d, _ in made), tuple(s for _, s in made))


def _expect_room(k: KernelText, device: DeviceSource, gpu: Gpu) -> None:
    for launch in device.launches:
        taken = int(launch.shared_bytes)
        if taken > gpu.shared_bytes:
            raise NoRoom(kernel=k.name, taken=taken, arch=gpu.name, most=gpu.shared_bytes, tiles=k.shared_bytes)


def _lowered(source: TileLangSource, k: KernelText, gpu: Gpu) -> tuple[DeviceSource, float]:
    """A kernel's device source, and the processor seconds it took to make."""
    parts: dict[str, object] = {
        "text": source.text,
        "kernel": k.name,
        "arch": gpu.name,
        "tilewright": __version__,
        "reader": READER,
        "tilelang": _tilelang_version(),
    }
    store = Store(cache_root(), "device")
    try:
        return _found_or_made(store, key_of(parts), parts, source, k, gpu)
    except UnsafeCache:
        raise
    except OSError as e:
        return _found_or_made(Store(scratch_root(store.root, e), "device"), key_of(parts), parts, source, k, gpu)


def _found_or_made(
    store: Store, key: str, parts: dict[str, object], source: TileLangSource, k: KernelText, gpu: Gpu
) -> tuple[DeviceSource, float]:
    if (entry := store.find(key)) is not None:
        return _read(entry), 0.0
    private_folder(store.root)
    with store.lock(key) as locked:
        if (entry := store.find(key, locked=locked)) is not None:
            return _read(entry), 0.0
        start = time.process_time()
        made = _lower(source, k, gpu)
        seconds = time.process_time() - start
        place = store.workplace(key, locked=locked)
        try:
            (place / DEVICE).write_text(made.to_json())
            store.publish(key, parts, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return made, seconds


def _read(entry: Path) -> DeviceSource:
    return DeviceSource.from_json((entry / DEVICE).read_text())


def _tilelang_version() -> str:
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        raise MissingToolkit(what="lowering GPU programs", needed="TileLang", advice="pip install tilelang") from None


def _lower(source: TileLangSource, k: KernelText, gpu: Gpu) -> DeviceSource:
    """One kernel through TileLang, which never looks for a GPU where the target is given."""
    import tilelang
    from tilelang import tvm

    from .read_tilelang import read_tilelang

    arch = {"kind": "cuda", "arch": gpu.name} if gpu.kind == "cuda" else {"kind": "hip", "mcpu": gpu.name}
    target = tvm.target.Target(arch)
    tilelang.set_log_level("ERROR")
    said = io.StringIO()
    try:
        with _quiet(said):
            function = _functions(source.text, key_of({"text": source.text}))[k.name]()
            with target:
                artifact = tilelang.lower(function, target=target)
        return read_tilelang(function, artifact, gpu.name)
    except Exception as e:  # of any kind: TileLang's own, TVM's, Python's
        text = str(e).strip().split("\n")
        problem = f"{type(e).__name__}: {text[-1] if text else ''}"
        raise LoweringError(kernel=k.name, arch=gpu.name, problem=problem) from e


def _functions(text: str, name: str) -> dict[str, Callable[[], Any]]:
    """The functions of a program's text. TileLang reads a function's source again, by its file's name."""
    file = f"<tilelang {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {"__name__": "tilewright_program"}
    exec(compile(text, file, "exec", dont_inherit=True), made)  # our own text
    return made


@contextlib.contextmanager
def _quiet(said: io.StringIO) -> Iterator[None]:
    """TileLang prints the whole program when it fails, and remarks when it does not."""
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield
