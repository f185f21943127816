"""Where compilers for GPUs are found: on PATH, in a CUDA toolkit, or in packages of PyPI. Nothing is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tilewright.dsl.errors import MissingToolkit

EXTRA: Final = "pip install 'tilewright[gpu-verify]'"


def package_folder(name: str) -> Path | None:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def templates() -> tuple[Path, str]:
    """TileLang's folder of headers, which its sources include, and its version. Raises MissingToolkit."""
    folder = package_folder("tilelang")
    if folder is None:
        raise MissingToolkit(what="compiling TileLang's sources", needed="its headers", advice="pip install tilelang")
    return folder, importlib.metadata.version("tilelang")


def nvidia_folder() -> Path | None:
    """Where NVIDIA's packages for CUDA 13 put their files."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        if (folder := Path(place) / "cu13").is_dir():
            return folder
    return None


def find_program(name: str) -> Path | None:
    """A program of the CUDA toolkit: on PATH, in $CUDA_HOME, or from PyPI."""
    if found := shutil.which(name):
        return Path(found)
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    homes += [folder] if (folder := nvidia_folder()) else []
    return next((p for home in homes if os.access(p := home / "bin" / name, os.X_OK)), None)


@functools.lru_cache(maxsize=8)
def nvcc_version(nvcc: Path) -> str:
    """Such as "nvcc 13.0.88". Raises MissingToolkit for one that does not run."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
        found = re.search(r"\bV(\d[\d.]+)", done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        found = None
    if found is None:
        raise MissingToolkit(what=f"{nvcc}", needed="a CUDA toolkit around it", advice=EXTRA)
    return f"nvcc {found[1]}"


def nvrtc() -> tuple[Path, str] | None:
    """The library of PyPI's nvidia-cuda-nvrtc, and its version."""
    folder = nvidia_folder()
    libraries = sorted(folder.glob("lib/libnvrtc.so.*")) if folder else []
    if not libraries or folder is None or not (folder / "include" / "cuda_fp16.h").is_file():
        return None
    return libraries[0], f"nvrtc {importlib.metadata.version('nvidia-cuda-nvrtc')}"


def zig() -> tuple[Path, str]:
    """PyPI's ziglang: clang and lld for AMD GPUs. Raises MissingToolkit."""
    folder = package_folder("ziglang")
    if folder is None:
        advice = f"{EXTRA}, or pip install ziglang"
        raise MissingToolkit(what="compiling HIP", needed="clang and lld for AMD GPUs", advice=advice)
    return folder, f"zig {importlib.metadata.version('ziglang')}"
