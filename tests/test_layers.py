"""Which folder may import which, read from the sources: no import has to happen for a forbidden one to be found."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a file of each folder may import of the package, by the first name below `tilewright`.
ALLOWED = {
    "dsl": {"__version__", "dsl"},
    "codegen_cache": {"__version__", "dsl", "codegen_cache"},
    "ops": {"__version__", "dsl", "codegen_cache", "ops"},
}


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a module of `package` imports, wherever in the module it does."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")
                base = parents[: len(parents) - level + 1] if level else []
                origin = ".".join([*base, *([module] if module else [])])
                for alias in names:
                    yield node.lineno, f"{origin}.{alias.name}"
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def crossings(tree: ast.Module, package: str) -> list[tuple[int, str]]:
    """Imports that the module's folder may not make. A bare `import tilewright` is one: it hides what it reaches."""
    allowed = ALLOWED[package.split(".")[1]]
    return [
        (line, name)
        for line, name in imports(tree, package)
        if name.split(".")[0] == "tilewright" and name.partition(".")[2].partition(".")[0] not in allowed
    ]


def second_copies(tree: ast.Module, package: str) -> list[tuple[int, str]]:
    """Imports of a source folder by its bare name."""
    return [(line, name) for line, name in imports(tree, package) if name.split(".")[0] in ALLOWED]


def uses_of_any(tree: ast.Module) -> list[tuple[int, str]]:
    """`Any`, however it was reached."""
    named = [(line, name) for line, name in imports(tree, "") if name in {"typing.Any", "typing_extensions.Any"}]
    dotted = [(n.lineno, ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "Any"]
    return named + dotted


def sources(folder: str) -> list[tuple[Path, ast.Module, str]]:
    """Every module below a folder: its path, its tree, its package. An empty folder would prove nothing."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        inside = ".".join(path.relative_to(ROOT).parent.parts)
        package = f"tilewright.{inside}" if folder in ALLOWED else inside
        found.append((path.relative_to(ROOT), ast.parse(path.read_bytes(), str(path)), package))
    assert found, f"no Python file below {folder}/"
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_keeps_to_its_layer(folder: str) -> None:
    """dsl knows neither sibling, codegen_cache knows dsl, ops knows both."""
    found = [f"{path}:{line}: {name}" for path, tree, pkg in sources(folder) for line, name in crossings(tree, pkg)]
    assert found == []


@pytest.mark.parametrize("folder", [*ALLOWED, "src", "tests"])
def test_no_folder_is_imported_by_its_bare_name(folder: str) -> None:
    """`import dsl` from a checkout makes a second copy of every class."""
    found = [f"{path}:{line}: {name}" for path, tree, pkg in sources(folder) for line, name in second_copies(tree, pkg)]
    assert found == []


def test_language_and_compiler_are_free_of_any() -> None:
    """In dsl/ a type says what a value is."""
    found = [f"{path}:{line}: {name}" for path, tree, _ in sources("dsl") for line, name in uses_of_any(tree)]
    assert found == []


@pytest.mark.parametrize(
    ("package", "text", "seen"),
    [
        ("tilewright.dsl", "import tilewright.ops.cache", ["tilewright.ops.cache"]),
        ("tilewright.dsl", "from tilewright import codegen_cache", ["tilewright.codegen_cache"]),
        ("tilewright.dsl", "from ..ops import cache", ["tilewright.ops.cache"]),
        ("tilewright.dsl", "from .. import ops, dsl", ["tilewright.ops"]),
        ("tilewright.dsl.emit", "def f():\n    from ...ops.cache import x", ["tilewright.ops.cache.x"]),
        ("tilewright.dsl", "importlib.import_module('tilewright.ops')", ["tilewright.ops"]),
        ("tilewright.dsl", "import tilewright", ["tilewright"]),
        ("tilewright.dsl", "from . import expr\nfrom .expr import Expr\nfrom tilewright.dsl import ops", []),
        (
            "tilewright.codegen_cache",
            "from tilewright.dsl import ir\nfrom tilewright import PagedKVCache",
            ["tilewright.PagedKVCache"],
        ),
        ("tilewright.ops", "from tilewright import __version__\nfrom tilewright.codegen_cache import store", []),
    ],
)
def test_crossings_are_seen(package: str, text: str, seen: list[str]) -> None:
    """Each way to write an import is resolved to the same name."""
    assert [name for _, name in crossings(ast.parse(text), package)] == seen


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("import dsl.ir", ["dsl.ir"]),
        ("from ops import cache", ["ops.cache"]),
        ("from . import ops\nfrom tilewright.ops import cache", []),
    ],
)
def test_second_copies_are_seen(text: str, seen: list[str]) -> None:
    """Only the bare name is wrong."""
    assert [name for _, name in second_copies(ast.parse(text), "tilewright")] == seen


@pytest.mark.parametrize(
    "text", ["from typing import Any", "import typing as t\nx: t.Any", "from typing_extensions import Any"]
)
def test_any_is_seen(text: str) -> None:
    """Neither an alias nor another module hides it."""
    assert len(uses_of_any(ast.parse(text))) == 1
