"""What every test may use: golden files, a seed of its own, an environment without Tilewright's variables, a target.

Tests of what operators give run on both targets of CPU tensors: their modules are marked `both_targets`, and ids show
the target. The interpreter is the definition: tests of what it alone does are marked `interpreted`, with what that is.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tilewright.codegen_cache.compilers import find_compiler

if TYPE_CHECKING:
    import numpy as np

GOLDEN = Path(__file__).parent / "golden"

# The same examples on every run and machine; `--hypothesis-profile default` looks for new ones.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", metavar="NAME", help="where calls that name no target run, once")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden with what the tests produce")


# ---- targets ---------------------------------------------------------------------------------------------------------

TARGETS = ("interpret", "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked `both_targets` twice, but with --target or `interpreted` once, on that one.

    both_targets(slow=True): the second time is slow, where the first may not be.
    """
    marks = list(metafunc.definition.iter_markers("both_targets"))
    if not marks or metafunc.config.getoption("--target") or metafunc.definition.get_closest_marker("interpreted"):
        return
    slow = any(m.kwargs.get("slow", False) for m in marks)
    params = [TARGETS[0], pytest.param(TARGETS[1], marks=pytest.mark.slow if slow else ())]
    metafunc.parametrize("target_of_calls", params, indirect=True)


@pytest.fixture(autouse=True)
def target_of_calls(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _no_tilewright_variables: None
) -> str | None:
    """Where calls run that name no target; None: as it is chosen without a word."""
    named: str | None = getattr(request, "param", None) or request.config.getoption("--target")
    if request.node.get_closest_marker("interpreted"):
        named = "interpret"
    if named == "cpu" and find_compiler() is None:
        pytest.skip("no C compiler")
    if named:
        monkeypatch.setenv("TILEWRIGHT_TARGET", named)
    return named


# ---- golden files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text must be that of tests/golden/<name>.txt."""
    update: bool = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        __tracebackhide__ = True
        path = GOLDEN / f"{name}.txt"
        shown = f"tests/golden/{name}.txt"
        text = text.rstrip("\n") + "\n"
        expected = path.read_text(encoding="utf-8") if path.exists() else None
        if text == expected:
            return
        if update:
            _replace(path, text)
        elif expected is None:
            pytest.fail(f"{shown} is missing; read the text below, then run pytest --update-golden\n\n{text}")
        else:
            diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), shown, "this run", lineterm="")
            pytest.fail("\n".join(["the text has changed; if it should, run pytest --update-golden", "", *diff]))

    return check


def _replace(path: Path, text: str) -> None:
    """Write by renaming, so that another worker sees the old file or the new one and never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


# ---- seeds -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """32 bits that depend on the test's id alone, and not on the target in it."""
    name = re.sub(rf"(?<=[\[-])({'|'.join(TARGETS)})(-|(?=\]))", "", request.node.nodeid).removesuffix("[]")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator started from the test's own seed."""
    import numpy as np

    return np.random.default_rng(seed)


# ---- the environment -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_tilewright_variables(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is compiled is kept between runs, in a folder of the tests' own."""
    for name in [name for name in os.environ if name.startswith("TILEWRIGHT_")]:
        monkeypatch.delenv(name)
    folder = Path(request.config.cache.mkdir("tilewright"))
    folder.chmod(0o700)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(folder))
