"""The manual says what the code does: tables are compared with it, and snippets run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tilewright.dsl import errors, knobs
from tilewright.dsl.lower import GPU_PASSES, PASSES
from tilewright.dsl.targets import TARGETS
from tilewright.ops.masks import MASKS

DOCS = Path(__file__).parents[1] / "docs"


def rows(page: str, heading: str = "") -> list[list[str]]:
    """Cells of every table row whose first cell is code, after a heading."""
    text = (DOCS / page).read_text()
    text = text[text.index(heading) :]
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]


def test_environment_table_is_the_knob_table() -> None:
    """Every variable is documented with the values it takes and what it does."""
    documented = {r[0]: (r[1], r[3]) for r in rows("environment.md")}
    assert documented == {f"`{k.name}`": (k.expected, k.purpose) for k in knobs.KNOBS}


def test_pass_table_is_the_pass_list() -> None:
    """The passes are documented in the order they run."""
    documented = [r[0] for r in rows("ir.md", "## From tile program to loop nest") if "_" in r[0]]
    assert documented == [f"`{p.__name__}`" for p in (*PASSES, *GPU_PASSES)]


def test_every_error_is_documented() -> None:
    """Each error class has its row."""
    classes = {n for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.TilewrightError)}
    assert {r[0].strip("`") for r in rows("errors.md")} == classes - {"TilewrightError"}


def test_targets_and_masks_are_documented() -> None:
    """The tables of targets and masks are complete."""
    assert [r[0].strip("`") for r in rows("targets.md")] == list(TARGETS)
    documented = [r[0].strip("`") for r in rows("semantics.md", "## 2. Masks") if r[0] != "`mask_str`"]
    assert documented[: len(MASKS)] == list(MASKS)


def snippets() -> list[tuple[str, str]]:
    """The `python` blocks of each page, joined; a block marked `py` is a sketch that needs names from elsewhere."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
        found.append((page.name, "\n".join(blocks)))
    return [(name, code) for name, code in found if code.strip()]


@pytest.mark.parametrize(("page", "code"), snippets())
def test_snippets_run(page: str, code: str, tmp_path: Path) -> None:
    """What a reader copies runs."""
    file = tmp_path / f"{page}.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), {"__name__": "snippet"})


def test_operator_table_is_the_library() -> None:
    """Every operator is listed with its file and the first line of its docstring."""
    from tilewright.commands.operators import library

    documented = {r[0].strip("`"): (r[1].strip("`"), r[2]) for r in rows("operators.md")}
    expected = {
        name: (f"ops/{o.fn.__module__.split('.')[-1]}.py", (o.__doc__ or "").strip().split("\n")[0])
        for name, o in library().items()
    }
    assert documented == expected
    assert all(first for _, first in expected.values())
