"""The table of an operator's benchmark."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from suite import OURS, Result

_HEADINGS = ("ms", "spread", "ratio", "of limit", "GFLOP/s", "GB/s", "error", "rounds")


def show(title: str, results: list[Result], console: Console, clock: str) -> None:
    """A table of all methods on all workloads, then which workloads miss the goal."""
    baselines = ", ".join(dict.fromkeys(r.baseline for r in results))
    table = Table(title=f"{title}: {clock} per call, ratios to {baselines}", title_justify="left", header_style="bold")
    table.add_column("workload / method", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        table.add_section()
        table.add_row(f"[bold]{r.workload}[/]")
        for name, t in sorted(r.timings.items(), key=lambda item: item[1].ratio):
            style = ("green" if r.met else "red") if name == OURS else "dim" if name.startswith(OURS) else ""
            rates = f"{r.flops / t.median / 1e9:.1f}", f"{r.bytes / t.median / 1e9:.2f}"
            figures = f"{t.median * 1e3:.2f}", f"{t.spread:.0%}", f"{t.ratio:.2f}", f"{r.limit / t.median:.0%}", *rates
            table.add_row(f"  {name}", *figures, f"{r.errors[name]:.0e}", str(t.samples), style=style)
    console.print(table)
    for r in results:
        console.print(_verdict(r), highlight=False)


def _verdict(r: Result) -> str:
    ratio, best = r.timings[OURS].ratio, r.best
    verdict = "[green]meets[/]" if r.met else "[red]misses[/]"
    beside = f"; {ratio / r.timings[r.beside].ratio:.2f}x {r.beside}" if r.beside else ""
    hint = "" if best == OURS else f"; best of its schedules {r.timings[best].ratio:.2f}x ({best})"
    size = f"{r.flops / 1e9:.2f} GFLOP, {r.bytes / 1e6:.0f} MB"
    return f"{r.workload} ({size}): {ratio:.2f}x {r.baseline}, {verdict} {r.goal:g}x{beside}{hint}"
