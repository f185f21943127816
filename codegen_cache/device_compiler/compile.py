"""A device source to device code, kept in the store."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tilewright.codegen_cache.building import Work, entry
from tilewright.codegen_cache.device_source import ARCHS, DeviceSource
from tilewright.dsl.errors import UnknownTarget

from . import cuda, hip, toolkits
from .report import DeviceCode


def compile_device(source: DeviceSource) -> DeviceCode:
    """A cubin or a code object, compiled once per machine, and what each kernel needs.

    Raises MissingToolkit, CompileError where the compiler refuses the source, and UnknownTarget.
    """
    if source.arch not in ARCHS:
        raise UnknownTarget(target=source.arch, known=", ".join(ARCHS))
    tools = hip if ARCHS[source.arch].kind == "hip" else cuda
    version, commands = tools.compiler(source.arch)
    _, templates = toolkits.templates()
    parts: dict[str, object] = {
        "source": hashlib.sha256(source.text.encode()).hexdigest(),
        "arch": source.arch,
        "compiler": version,
        "templates": templates,
        "commands": [[_without_folder(part) for part in command] for command in commands],
        "headers": _headers() if tools is hip else None,
    }
    name = source.launches[0].kernel if source.launches else source.arch
    work = Work(parts, tools.SOURCE, source.text, name, version, lambda _: commands)
    folder = entry("device-code", work)
    binary = folder / (hip.CODE_OBJECT if tools is hip else cuda.CUBIN)
    return DeviceCode(source.arch, version, binary, tools.resources(folder))


def _without_folder(part: str) -> str:
    """A key holds no path: two installations make the same code."""
    return part.rpartition("/")[2] if "/" in part else part


def _headers() -> str:
    files = sorted(p for p in hip.HEADERS.rglob("*") if p.is_file())
    names = [str(p.relative_to(hip.HEADERS)).encode() for p in files]
    return hashlib.sha256(b"".join(n + Path(p).read_bytes() for n, p in zip(names, files, strict=True))).hexdigest()
