"""The benchmarks: `python tests/bench/run.py` from the root of a checkout. Writes no file unless asked for one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

if TYPE_CHECKING:  # torch takes a second to load, which --help need not
    from limits import Limits
    from suite import Suite

ROOT = Path(__file__).parents[2]
OPERATORS = ("attention", "latent", "indexer")
STARTUP = "startup"


@click.command()
@click.option("--only", type=click.Choice([*OPERATORS, STARTUP]), help="One part; by default all.")
@click.option(
    "--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="1: CPU time; more: wall time."
)
@click.option(
    "--budget", type=click.FloatRange(min=0), default=300, show_default=True, help="Seconds of timing, roughly."
)
@click.option("--match", default="", metavar="TEXT", help="Only the operators' workloads whose name has TEXT in it.")
@click.option(
    "--target", type=click.Choice(["interpret", "cpu"]), default="interpret", show_default=True, help="Where ours runs."
)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Also write the figures here.")
def main(only: str | None, threads: int, budget: float, match: str, target: str, path: Path | None) -> None:
    """Time Tilewright on this machine's CPU against what torch offers."""
    os.environ |= {"TILEWRIGHT_TARGET": target, "TILEWRIGHT_THREADS": str(threads)}
    operators = [] if only == STARTUP else [only] if only else list(OPERATORS)
    suites = _matching(operators, match)
    console = Console(width=None if os.isatty(1) else 132)
    facts = {**_facts(threads), "target": target}
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False)
    report: dict[str, object] = {"facts": facts}
    share = budget if only else budget / 2
    with console.status("") as status:
        if suites:
            report |= _operators(suites, threads, share, match, console, status.update)
        if only in (None, STARTUP):
            report[STARTUP] = _startup(threads, share, console, status.update)
    console.print(f"load now {os.getloadavg()[0]:.1f}", highlight=False)
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _matching(operators: list[str], match: str) -> dict[str, Suite]:
    """Suites with a workload of that name. Raises BadParameter where there is none."""
    import attention
    import indexer
    import latent

    known: dict[str, Suite] = {"attention": attention, "latent": latent, "indexer": indexer}
    suites = {name: known[name] for name in operators}
    names = [n for suite in suites.values() for n in suite.weights()]
    if names and not any(match in n for n in names):
        raise click.BadParameter(f"no workload has {match!r} in its name: {'; '.join(names)}")
    return {name: suite for name, suite in suites.items() if any(match in n for n in suite.weights())}


def _operators(
    suites: dict[str, Suite], threads: int, seconds: float, match: str, console: Console, advance: Callable[[str], None]
) -> dict[str, object]:
    """Time and show these operators; what to write of them."""
    import torch
    from limits import measured
    from report import show
    from suite import clock_for, measure, total_weight

    torch.set_num_threads(threads)
    advance("limits of this machine")
    limits = measured(clock_for(threads))
    clock = "CPU time of one thread" if threads == 1 else f"wall time of {threads} threads"
    console.print(" ".join(_HOW.format(clock=clock, limits=_spelled(limits)).split()) + "\n", highlight=False)
    out: dict[str, object] = {"limits": asdict(limits)}
    total = sum(total_weight(s, match) for s in suites.values())
    for name, suite in suites.items():
        part = seconds * total_weight(suite, match) / total
        results = measure(suite, threads=threads, seconds=part, match=match, limits=limits, advance=advance)
        show(name, results, console, clock)
        out[name] = [r.document() for r in results]
    return out


_HOW = """\
{clock}, medians over interleaved rounds; spread is interquartile range / median. Other jobs may share this machine: CPU
time is safe from preemption, not from their use of caches and memory; wall time is safe from neither. The limit of a
workload is its arithmetic in its operands' dtype (bfloat16 for float8), or its traffic, at torch's best rates here:
{limits}.
"""


def _spelled(limits: Limits) -> str:
    rates = [f"{dtype} matrix product {rate / 1e9:.0f} GFLOP/s" for dtype, rate in limits.flops.items()]
    return ", ".join([*rates, f"reading {limits.bytes / 1e9:.1f} GB/s"])


def _startup(threads: int, seconds: float, console: Console, advance: Callable[[str], None]) -> list[dict[str, object]]:
    import startup

    figures = startup.measure(threads=threads, seconds=seconds, advance=advance)
    startup.show(figures, console)
    return startup.as_json(figures)


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
