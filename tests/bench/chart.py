"""The chart of a run: how many times as fast as the fastest peer each workload is, bars to either side of 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from names import DECODE, INDEXER, LATENT, LATENT_BYTES, MIXED, PREFILL, SCORES, SINKS, TOPK, WINDOW
from suite import Result

PANELS: Mapping[str, tuple[str, ...]] = {
    "decode": (DECODE,),
    "prompts": (PREFILL, MIXED, SINKS, WINDOW),
    "latent sparse attention": (LATENT, LATENT_BYTES),
    "indexer": (INDEXER, SCORES, TOPK),
}
_SHADES = ("#bdbdbd", "#636363", "#252525", "#969696")  # told apart in print, by number of threads


@dataclass(frozen=True)
class Bar:
    workload: str
    threads: int
    ratio: float
    spread: float  # interquartile range, in ratios
    peer: str


def bars(results: Sequence[Result]) -> dict[str, list[Bar]]:
    """By panel; a workload without any peer has no bar."""
    out: dict[str, list[Bar]] = {}
    for title, kinds in PANELS.items():
        for r in results:
            if r.kind in kinds and (peer := r.best_peer) is not None:
                t = r.timings[peer]
                made = Bar(r.workload, r.threads, t.ratio, t.ratio * t.ratio_spread, peer)
                out.setdefault(title, []).append(made)
    return out


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Writes .svg, .png or what else matplotlib knows by the ending. Raises ValueError for another, or without bars."""
    panels = bars(results)
    if not panels:
        raise ValueError("nothing was compared with a peer")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    heights = [1.0 + len(found) * 0.28 for found in panels.values()]
    figure = Figure(figsize=(10, sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, (name, found) in zip(axes, panels.items(), strict=True):
        _panel(ax, name, found)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)


def _panel(ax: Axes, title: str, found: Sequence[Bar]) -> None:
    names = list(dict.fromkeys(b.workload for b in found))
    counts = sorted({b.threads for b in found})
    height = 0.8 / len(counts)
    for n, threads in enumerate(counts):
        own = [b for b in found if b.threads == threads]
        places = [names.index(b.workload) + (n - (len(counts) - 1) / 2) * height for b in own]
        label = f"{threads} thread" + "s" * (threads > 1)
        lengths, spreads = [b.ratio - 1 for b in own], [b.spread / 2 for b in own]
        color = _SHADES[n % len(_SHADES)]
        ax.barh(
            places, lengths, height, left=1.0, xerr=spreads, label=label, color=color, edgecolor="black", linewidth=0.5
        )
        for b, at in zip(own, places, strict=True):
            end = max(1.0, b.ratio + b.spread / 2)
            ax.text(end, at, f"  {b.ratio:.2f}x {b.peer}", va="center", fontsize=7)
    ax.axvline(1.0, color="black", linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    least, most = (f(1.0, *(b.ratio for b in found)) for f in (min, max))
    ax.set_xlim(least / 1.2, most * (most / least) ** 0.3 * 1.6)
    ax.set_title(f"{title}: times as fast as the fastest peer", loc="left", fontsize=9)
    ax.legend(fontsize=7, loc="lower right")
