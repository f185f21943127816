"""What happens when the interpreter reaches a `print` or `breakpoint()` of the author's source."""

from __future__ import annotations

import builtins
from collections.abc import Mapping

from .source import Loc
from .tile import Show


def show_values(s: Show, values: list[tuple[str, object]], where: Mapping[str, object]) -> None:
    """Print the values, or stop in a debugger whose frame is the author's line and whose locals are the values."""
    at = ", ".join(f"{n}={_plain(v)}" for n, v in where.items())
    if s.kind == "print":
        axes = {n: f"[{', '.join(e.axes)}]" for n, e in s.values}
        for name, value in values:
            builtins.print(f"{s.loc}: {name}{axes[name]} at {at}\n{value}")
        return
    _stop(s.loc, {**where, **dict(values)})


def _plain(v: object) -> object:
    return v.tolist() if hasattr(v, "tolist") else v


def _stop(loc: Loc | None, values: Mapping[str, object]) -> None:
    """Call `breakpoint()` from a frame that claims the author's file and line, so the debugger shows that source."""
    line, file = (loc.line, loc.file) if loc else (1, "<operator>")
    # Two statements on the author's line: a debugger stops at the second, still inside this frame.
    code = compile("\n" * (line - 1) + "breakpoint(); pass", file, "exec")
    exec(code, {"__name__": "author", **values})
