"""Every environment variable, typed, in one place. `docs/environment.md` holds the same table; a test compares them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .errors import BadEnvironment

T = TypeVar("T")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One variable: read from the environment at each use, so that tests and hosts can change it."""

    name: str
    default: T
    parse: Callable[[str], T]
    expected: str
    purpose: str

    def get(self) -> T:
        """The value now. Raises BadEnvironment for a value that is not one of `expected`."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except (ValueError, KeyError):
            raise BadEnvironment(name=self.name, value=text, expected=self.expected) from None


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _between(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


TARGET: Knob[str | None] = Knob("TILEWRIGHT_TARGET", None, str, "a target's name", "target of calls that name none")
INTERPRET = Knob("TILEWRIGHT_INTERPRET", False, _flag, "0 or 1", "1: every call on CPU tensors runs in the interpreter")
VALIDATE: Knob[bool | None] = Knob(
    "TILEWRIGHT_VALIDATE", None, _flag, "0 or 1", "0: values are not checked; 1: visible cache contents are checked too"
)
DEBUG = Knob(
    "TILEWRIGHT_DEBUG",
    0,
    _between(0, 5),
    "0 to 5",
    "1: schedules; 2: and times; 4: and loop nests; 5: and after every pass",
)
THREADS: Knob[int | None] = Knob("TILEWRIGHT_THREADS", None, _between(1, 4096), "1 to 4096", "worker threads")
CPU_ISA: Knob[str | None] = Knob(
    "TILEWRIGHT_CPU_ISA", None, str, "an instruction set's name", "what native CPU code is compiled for"
)
CC: Knob[str | None] = Knob("TILEWRIGHT_CC", None, str, "a command", "C compiler of native CPU code")
CACHE_DIR: Knob[str | None] = Knob("TILEWRIGHT_CACHE_DIR", None, str, "a folder", "where compiled code is kept")

KNOBS = (TARGET, INTERPRET, VALIDATE, DEBUG, THREADS, CPU_ISA, CC, CACHE_DIR)

_NAMES = tuple(k.name for k in KNOBS)
_ENCODED = tuple(os.fsencode(name) for name in _NAMES)


def environment() -> tuple[object, ...]:
    """What every variable says now, as one value to compare: while it stays the same, each knob reads the same.

    CPython keeps the variables in a dict of bytes; asking that is thirty times as fast as asking os.environ, which
    raises and catches a KeyError for each variable that is not set.
    """
    texts: dict[bytes, bytes] | None = getattr(os.environ, "_data", None)
    return tuple(map(os.environ.get, _NAMES) if texts is None else map(texts.get, _ENCODED))
