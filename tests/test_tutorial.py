"""The tutorial works as written: its file, its commands, its call."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
FILE = re.findall(r"```python\n(.*?)```", TUTORIAL, re.S)[0]
COMMANDS = re.findall(r"^    (tilewright .*)$", TUTORIAL, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command shown exits with status 0, and every run agrees with the reference."""
    from tilewright.cli import main

    (tmp_path / "soft_alibi.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert (": ok" in result.output) == (command.split()[1] == "run")


def test_a_broken_reference_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    from tilewright.cli import main

    (tmp_path / "soft_alibi.py").write_text(FILE.replace("distance <= -window", "distance < -window"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["run", "soft_alibi.py:soft_alibi", "--rows", "5", "--cached", "100"])
    assert result.exit_code == 1, result.output


def test_call(tmp_path: Path) -> None:
    """The call at the end of the page runs."""
    exec(
        compile("\n".join(re.findall(r"```python\n(.*?)```", TUTORIAL, re.S)), "soft_alibi.py", "exec"),
        {"__name__": "t"},
    )
