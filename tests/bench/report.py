"""The tables of an operator's benchmark."""

from __future__ import annotations

from collections.abc import Iterable

from goals import Verdict, verdicts
from limits import AMX, DRAM, GEMM
from names import OURS
from rich.console import Console
from rich.table import Table
from suite import Result

_HEADINGS = ("ms", "spread", "ours is", "spread", "of peak", "of AMX", "of GEMM", "of DRAM", "error", "rounds")


def show(title: str, results: list[Result], target: str, console: Console) -> None:
    """A table of all methods on all workloads, then who was not timed, then the goals."""
    table = _table(title, "workload / method", _HEADINGS)
    for r in results:
        table.add_section()
        table.add_row(f"[bold]{r.workload}[/]")
        for name, t in sorted(r.timings.items(), key=lambda item: item[1].ratio):
            parts = [_part(r.fractions(name).get(limit)) for limit in (r.peak, AMX, GEMM, DRAM)]
            ratio = ("", "") if name == OURS else (f"{t.ratio:.2f}x", f"{t.ratio_spread:.0%}")
            row = f"{t.median * 1e3:.2f}", f"{t.spread:.0%}", *ratio, *parts, f"{r.errors[name]:.0e}", str(t.samples)
            table.add_row(f"  {name}", *row, style="bold" if name == OURS else "")
    console.print(table)
    for peer, why, where in _absences(results):
        console.print(f"not timed: {peer} on {where}: {why}", highlight=False, markup=False)
    console.print(_goals(f"{title}: goals", results, target))


def _table(title: str, first: str, headings: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _part(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}"


def _absences(results: list[Result]) -> list[tuple[str, str, str]]:
    """Peer, reason, and workloads: the same reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in results:
        for peer, why in r.absent.items():
            found.setdefault((peer, why), []).append(r.workload)
    return [(*key, "all" if len(names) == len(results) else "; ".join(names)) for key, names in found.items()]


def _goals(title: str, results: list[Result], target: str) -> Table:
    table = _table(title, "workload", ("goal", "reached", "by", "spread", "met"))
    for r in results:
        table.add_section()
        for v in verdicts(r, target):
            met = "[green]yes[/]" if v.met else "[red]no[/]"
            table.add_row(r.workload, v.goal, reached(v), v.by, _spread(r, v), met)
    return table


def reached(v: Verdict) -> str:
    if v.reached is None:
        return "not measured"
    return f"{v.reached:.0%}" if v.is_part else f"{v.reached:.2f}x"


def _spread(r: Result, v: Verdict) -> str:
    if v.is_part:
        return f"{r.timings[OURS].spread:.0%}"
    return f"{r.timings[v.by].ratio_spread:.0%}" if v.by in r.timings else ""
