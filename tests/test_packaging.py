"""The import package: links in the checkout, plain folders in a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["dsl", "ops", "codegen_cache"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_source_folder_is_linked(folder: str) -> None:
    """A checkout may move, so the link is relative."""
    assert os.readlink(ROOT / "src" / "tilewright" / folder) == f"../../{folder}"


@pytest.mark.slow
def test_wheel_holds_every_source_file(tmp_path: Path) -> None:
    """Nothing that imports from a checkout may be missing from an installation."""
    tree = tmp_path / "tree"
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ["src", *FOLDERS]:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=junk)
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, tree)

    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr

    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tilewright/")}
    package = tree / "src" / "tilewright"
    own = [path for path in package.rglob("*") if path.is_file() and path.relative_to(package).parts[0] not in FOLDERS]
    sources = {f"tilewright/{path.relative_to(package).as_posix()}" for path in own}
    for folder in FOLDERS:
        files = [path for path in (tree / folder).rglob("*") if path.is_file()]
        assert files, f"{folder}/ is empty"
        sources.update(f"tilewright/{path.relative_to(tree).as_posix()}" for path in files)
    assert "tilewright/py.typed" in sources
    assert packed == sources
