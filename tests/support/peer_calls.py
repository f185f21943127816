"""What goes to a peer's interpreter and comes back, in .npz files. Needs numpy alone: the environments share no more.

numpy has no bfloat16 and no float8: int16 arrays hold the bits of bfloat16, uint8 arrays those of float8_e4m3fn or a
cache's bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[Any]
Option: TypeAlias = int | float | str | bool

CALLS = "calls"


@dataclass(frozen=True)
class Call:
    """A call of a function of the peer's script, by keywords: arrays, and the rest."""

    function: str
    arrays: Mapping[str, Bits]
    options: Mapping[str, Option] = field(default_factory=dict)


class Refused(Exception):
    """The peer cannot make this call on this machine."""


def write(path: Path, calls: Mapping[str, Call]) -> None:
    note = {name: [call.function, dict(call.options)] for name, call in calls.items()}
    arrays = {f"{name}/{argument}": a for name, call in calls.items() for argument, a in call.arrays.items()}
    np.savez(path, allow_pickle=False, **{CALLS: np.array(json.dumps(note)), **arrays})


def read(path: Path) -> dict[str, Call]:
    with np.load(path) as file:
        arrays = {entry: file[entry] for entry in file.files}
    note: dict[str, tuple[str, dict[str, Option]]] = json.loads(str(arrays.pop(CALLS)))
    owned: dict[str, dict[str, Bits]] = {name: {} for name in note}
    for entry, a in arrays.items():
        name, _, argument = entry.rpartition("/")
        owned[name][argument] = a
    return {name: Call(function, owned[name], options) for name, (function, options) in note.items()}


def serve(functions: Mapping[str, Callable[..., Bits]]) -> None:
    """The main program of a peer's script: CALLS.npz ANSWERS.npz. An answer is an array, or text where refused."""
    asked, answered = map(Path, sys.argv[1:])
    answers: dict[str, Bits] = {}
    for name, call in read(asked).items():
        print(name, file=sys.stderr, flush=True)  # a peer that dies has said where
        try:
            answers[name] = functions[call.function](**call.arrays, **call.options)
        except Refused as reason:
            answers[name] = np.array(str(reason))
    np.savez(answered, allow_pickle=False, **answers)
