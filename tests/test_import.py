"""What importing costs: each heavy library is loaded by the call that needs it, never by an import of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tilewright

HEAVY = ["numpy", "sympy", "tilelang", "torch", "transformers"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tilewright", HEAVY),
        ("tilewright.dsl", ["sympy", "tilelang", "torch", "transformers"]),
    ],
)
def test_import_is_light(module: str, absent: list[str], tmp_path: Path) -> None:
    """A new process that imports the module has loaded none of the libraries."""
    program = f"import sys, {module}; print(*sorted(set(sys.modules) & set({absent})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


@pytest.mark.parametrize("name", tilewright.__all__)
def test_public_name_resolves(name: str) -> None:
    """Every advertised name is there, under its own name, and listed."""
    value = getattr(tilewright, name)
    assert getattr(value, "__name__", name) == name
    assert name in dir(tilewright)


def test_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does in any module."""
    with pytest.raises(AttributeError, match="module 'tilewright' has no attribute 'ops_'"):
        getattr(tilewright, "ops_")  # noqa: B009  written out, the type checker refuses it
