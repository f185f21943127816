"""Where in an author's file a value was written: captured once when traced, carried through every level."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from types import FrameType

_INSIDE = __name__.rpartition(".")[0]  # frames of this package are the compiler, never the author


@dataclass(frozen=True)
class Loc:
    """A span of one line of source; columns count from 0, as Python's own positions do."""

    file: str
    line: int
    col: int
    end_col: int

    def __str__(self) -> str:
        return f"{_shown_path(self.file)}:{self.line}:{self.col + 1}"

    def excerpt(self) -> str:
        """The source line with a row of carets under the span, or nothing when the file cannot be read."""
        text = linecache.getline(self.file, self.line).rstrip("\n")
        if not text.strip():
            return ""
        width = max(1, min(self.end_col, len(text)) - self.col)
        return f"    {text}\n    {' ' * self.col}{'^' * width}"


def _shown_path(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def author_frame() -> FrameType | None:
    """The innermost frame outside the compiler. Judged by module name: through links one file has two paths."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != _INSIDE and not name.startswith(_INSIDE + "."):
            return frame
        frame = frame.f_back
    return None


def here() -> Loc | None:
    """The author's position now being evaluated."""
    frame = author_frame()
    if frame is None:
        return None
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    line, end_line, col, end_col = positions or (frame.f_lineno, None, 0, 0)
    line = line or frame.f_lineno
    text = linecache.getline(frame.f_code.co_filename, line).rstrip()
    end = len(text) if end_line != line or end_col is None else _characters(text, end_col)
    return Loc(frame.f_code.co_filename, line, _characters(text, col or 0), end)


def definition(fn: Callable[..., object]) -> Loc:
    """The name in a function's `def`, which stands below its decorators."""
    file, first = fn.__code__.co_filename, fn.__code__.co_firstlineno
    for line in range(first, first + 20):
        found = re.match(rf"\s*def\s+({re.escape(fn.__name__)})\b", linecache.getline(file, line))
        if found:
            return Loc(file, line, *found.span(1))
    return Loc(file, first, 0, 1)


def _characters(text: str, byte: int) -> int:
    """Python counts the columns of an instruction in bytes of UTF-8."""
    return byte if text.isascii() else len(text.encode()[:byte].decode(errors="ignore"))
