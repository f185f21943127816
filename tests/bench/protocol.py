"""Timing a method in another process: a line of JSON asks, a line answers. Needs numpy alone, as do `peer_calls`.

    {"load": FILE}                      ->  {} once the call in that file is compiled and has its operands
    {"run": FILE}                       ->  {} once it has run, its result in that file
    {"time": REPEATS, "clock": NAME}    ->  {"seconds": PER CALL}

An answer may be {"refused": TEXT}. Time is measured in the process that runs, by its clock: "cpu" or "wall".
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from support import peer_calls
from support.peer_calls import Bits, Call, Refused

if TYPE_CHECKING:  # the other side has no torch
    from torch import Tensor

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
PATIENCE = 20.0  # seconds to wait for calls of a loaded method, after which its process ends
_LOADING = 900.0  # seconds to start and to compile
_PAUSE = 0.005  # seconds before the other process works: this one's threads may still wait in a loop


class Failed(Exception):
    """The other process ended, took too long or refused."""


class Slow(Failed):
    """It took too long."""


class Apart:
    """A peer in a process of its own, started at first use and again after a failure."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self._command, self._environment = name, command, environment
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")

    def ask(self, question: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """The answer. Raises Failed; the process is then gone, or as it was before where it refused."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                if not waiting.select(seconds):
                    raise Slow(f"{self.name} took more than {seconds:.0f} s")
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except Slow:
            self.close()
            raise
        if not line:
            self.close()
            raise Failed(f"{self.name} ended: {self._said()}")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise Failed(answer["refused"])
        return answer

    def result(self, call: Call) -> Bits:
        """Loads a call and runs it once. Raises Failed, also where that takes longer than anyone waits."""
        asked, answered = Path(self._folder.name, "call.npz"), Path(self._folder.name, "answer.npz")
        peer_calls.write(asked, {"call": call})
        self.ask({"load": str(asked)}, _LOADING)
        self.ask({"run": str(answered)}, PATIENCE)
        with np.load(answered) as file:
            found: Bits = file["answer"]
            return found

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            with Path(self._folder.name, "errors").open("wb") as errors:
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=errors, text=True, cwd=self._folder.name,
                )  # fmt: skip
        return self._process

    def _said(self) -> str:
        return Path(self._folder.name, "errors").read_text(errors="replace").strip()[-300:] or "nothing said"


@dataclass(frozen=True)
class Asked:
    """A method of a peer apart."""

    peer: Apart
    call: Call
    read: Callable[[Bits], Tensor]

    def ready(self, threads: int) -> tuple[Tensor, Callable[[int], float]]:
        """Its result, and its sampler. Both raise Failed."""
        result = self.read(self.peer.result(self.call))
        clock = "cpu" if threads == 1 else "wall"

        def sample(repeats: int) -> float:
            time.sleep(_PAUSE)
            seconds: float = self.peer.ask({"time": repeats, "clock": clock}, PATIENCE)["seconds"]
            return seconds

        return result, sample


def serve(
    functions: Mapping[str, Callable[..., Callable[[], Any]]], result: Callable[[Callable[[], Any]], Bits]
) -> None:
    """The other side: until its input ends. `functions` prepare calls, `result` runs one for its answer."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    method: Callable[[], Any] | None = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, object] = {}
        try:
            if "load" in question:
                method = None  # before the next takes memory
                (call,) = peer_calls.read(Path(question["load"])).values()
                method = functions[call.function](**call.arrays, **call.options)
            elif method is None:
                answer["refused"] = "nothing is loaded"
            elif "run" in question:
                np.savez(question["run"], answer=result(method))
            else:
                answer["seconds"] = _timed(method, question["time"], CLOCKS[question["clock"]])
        except Refused as e:
            answer = {"refused": str(e)}
        except Exception as e:
            method = None
            answer = {"refused": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers, flush=True)


def _timed(f: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        f()
    return (clock() - start) / repeats
