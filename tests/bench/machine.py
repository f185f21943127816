"""What figures depend on: the machine, versions, the checkout."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from tilewright.codegen_cache.compilers import find_compiler
from tilewright.dsl.isa import best_isa

ROOT = Path(__file__).parents[2]


def facts() -> dict[str, str]:
    import torch

    variables = [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith("TILEWRIGHT_")]
    compiler = find_compiler()
    return {
        "machine": f"{_processor()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "instructions": best_isa().name,
        "compiler": compiler.version if compiler else "none",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "commit": _commit(),
        "environment": " ".join(variables) or "no TILEWRIGHT_ variable set",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine())


def _commit() -> str:
    """The checkout's commit, and how many files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        state = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    changed = len(state.stdout.splitlines())
    return head.stdout.strip() + (f" and {changed} changed files" if changed else "")
