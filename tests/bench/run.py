"""The benchmarks: `python tests/bench/run.py` from the root of a checkout. Writes no file unless asked for one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import click
from rich.console import Console

ROOT = Path(__file__).parents[2]


@click.command()
@click.option("--only", type=click.Choice(["attention", "startup"]), help="One part; by default both.")
@click.option(
    "--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="1: CPU time; more: wall time."
)
@click.option(
    "--budget", type=click.FloatRange(min=0), default=300, show_default=True, help="Seconds of timing, roughly."
)
@click.option("--match", default="", metavar="TEXT", help="Only the attention workloads whose name has TEXT in it.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Also write the figures here.")
def main(only: str | None, threads: int, budget: float, match: str, path: Path | None) -> None:
    """Time Tilewright on this machine's CPU against what torch offers."""
    import attention
    import startup

    if not any(match in n for n in attention.names()):
        raise click.BadParameter(f"no workload has {match!r} in its name: {'; '.join(attention.names())}")
    console = Console(width=None if os.isatty(1) else 132)
    clock = "CPU time of one thread" if threads == 1 else f"wall time of {threads} threads"
    facts = _facts(threads)
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False)
    console.print(
        f"{clock}, medians over interleaved rounds; spread is interquartile range / median. Other jobs may share this "
        "machine: CPU time is safe from preemption, not from their use of caches and memory; wall time is safe from "
        "neither.\n",
        highlight=False,
    )
    report: dict[str, object] = {"facts": facts}
    share = budget if only else budget / 2
    with console.status("") as status:
        if only != "startup":
            results = attention.measure(threads=threads, seconds=share, match=match, advance=status.update)
            attention.show(results, console, clock)
            report["attention"] = attention.as_json(results)
        if only != "attention":
            figures = startup.measure(threads=threads, seconds=share, advance=status.update)
            startup.show(figures, console)
            report["startup"] = startup.as_json(figures)
    console.print(f"load now {os.getloadavg()[0]:.1f}", highlight=False)
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _facts(threads: int) -> dict[str, str]:
    """What figures depend on."""
    import torch

    variables = [f"{n}={v}" for n, v in sorted(os.environ.items()) if n.startswith("TILEWRIGHT_")]
    return {
        "machine": f"{_processor()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "threads": str(threads),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "commit": _commit(),
        "environment": " ".join(variables) or "no TILEWRIGHT_ variable set",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.machine())


def _commit() -> str:
    """The checkout's commit, and how many files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        state = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    changed = len(state.stdout.splitlines())
    return head.stdout.strip() + (f" and {changed} changed files" if changed else "")


if __name__ == "__main__":
    main()
