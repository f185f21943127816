"""The demo: the model agrees with its own attention, a wrong attention does not, and what is printed is sound."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tilewright import references
from tilewright.cli import main
from tilewright.demo import cases, deepseek_v4, gpt_oss, indexing, peers, report
from tilewright.ops.flash_attention import generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.masks import MASKS
from tilewright.random_inputs import Inputs, Sizes, random_inputs

ROWS = ((9, 4, 1, 1), (0, 12, 7, 40))
SMALL = Sizes(*ROWS, dims={"dim": 16})


def few() -> list[cases.Case]:
    """Cases small enough for every run of the tests."""
    return [
        cases.attention("sinks", SMALL, partitions=2),
        cases.attention("window", SMALL, "sliding_window_causal"),
        cases.latent("latent", Sizes(*ROWS, kv_heads=1, dims={"dim": 16, "slot": 8})),
        cases.indexer("indexer", Sizes(*ROWS, heads=16, dims={"depth": 16})),
        cases.variant("variant", SMALL),
    ]


# ---- the table -------------------------------------------------------------------------------------------------------


def test_cases_hold() -> None:
    """Each is within its tolerance and was timed."""
    for r in cases.run_cases(few()):
        assert r.ok, r
        assert r.ours_ms > 0 < r.torch_ms
        assert (r.rows, r.keys) == (15, 74)


def test_every_kind_of_case_is_there() -> None:
    """What the table promises: each mask, partitions, 16-bit and float8, an odd page size, all three operators."""
    every = cases.cases()
    names = [c.name for c in every]
    assert len(set(names)) == len(names)
    for text in ("mixed", "partitions", "bfloat16", "float8", "pages of 7", "latent", "indexer", "ALiBi"):
        assert any(text in n for n in names), text
    assert {f"mask {m}" for m in MASKS} - set(names) == {"mask causal"}


@pytest.mark.parametrize("case", few(), ids=lambda c: c.name)
def test_torch_does_the_same_job(case: cases.Case) -> None:
    """The other column of times is of a computation with the same result."""
    inputs = random_inputs(case.operator, case.constants, case.sizes, given=case.given)
    want = references.reference_outputs(case.reference, inputs)["out"]
    assert references.worst_error(case.compared(inputs, torch.cat(case.peer(inputs)())), want) < 1e-5


def test_a_wrong_operator_is_noticed() -> None:
    """An operator that leaves out the sink is far from the reference."""
    case = few()[0]

    def without_sink(inputs: Inputs) -> Callable[[], torch.Tensor]:
        return lambda: torch.cat(peers.sdpa(random_inputs(case.operator, {**case.constants, "sink": None}, SMALL))())

    (result,) = cases.run_cases([cases.Case(**{**vars(case), "ours": without_sink})])
    assert not result.ok


@pytest.mark.parametrize("fault", ["one less", "one twice", "outside", "worst first"])
def test_wrong_picks_are_noticed(fault: str) -> None:
    """An indexer's result is compared by scores, which no other set of keys has."""
    indexer = next(c for c in few() if c.name == "indexer")

    def wrong(inputs: Inputs) -> Callable[[], torch.Tensor]:
        picked = indexer.ours(inputs)().clone()
        row = picked[-1]  # of a sequence of its own, which has fewer keys than are asked for
        last = int((row >= 0).sum()) - 1
        match fault:
            case "one less":
                row[last] = -1
            case "one twice":
                row[last] = row[0]
            case "outside":
                row[last] = 10**6
            case "worst first":
                row[: last + 1] = row[: last + 1].flip(0)
        return lambda: picked

    (result,) = cases.run_cases([cases.Case(**{**vars(indexer), "ours": wrong})])
    assert not result.ok


# ---- the models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a table of a few small cases."""
    monkeypatch.setattr(cases, "cases", few)


def demo(*args: str) -> Result:
    result = CliRunner().invoke(main, ["demo", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow
@pytest.mark.usefixtures("small_table")
def test_demo() -> None:
    """Everything holds, and the text says so."""
    result = demo()
    assert result.exit_code == 0, result.output
    text = result.stdout
    for expected in (
        "A gpt-oss from transformers",
        "A DeepSeek-V4 from transformers",
        "kernel fold  grid tile <",
        "def softcap_alibi(",
        "9 of 9 checks passed",
    ):
        assert expected in text
    assert text.count("tokens   64, the same as eager attention decodes greedily: ok") == 2
    assert "nan" not in text.lower().replace("nan in every unused slot", "")
    assert "\x1b" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("small_table")
def test_demo_json() -> None:
    """One document: every logit and token agrees, prompt and decode rows shared calls, nothing is NaN."""
    result = demo("--json")
    assert result.exit_code == 0

    def no_constant(name: str) -> float:
        raise AssertionError(name)

    found = json.loads(result.stdout, parse_constant=no_constant)
    assert found["ok"]
    assert list(found["models"]) == ["gpt_oss", "deepseek_v4"]
    for served in found["models"].values():
        assert served["ok"]
        assert served["same_tokens"]
        assert 0 < served["worst_logit_difference"] <= served["tolerance"] == 2e-5
        assert [len(t) for t in served["tokens"]] == [16] * 4
        assert len(set(served["tokens"][0])) > 4  # greedy decoding has not run into one token
        assert served["mixed_calls"] > 0
        assert served["rows"] == sum(served["prompts"]) + 4 * 15
    assert found["program"]["text"].startswith("kernel fold")
    assert [c["case"] for c in found["cases"]] == [c.name for c in few()]


@pytest.mark.slow
@pytest.mark.usefixtures("small_table")
@pytest.mark.parametrize("fault", ["sink", "window", "scale"])
def test_demo_notices_a_broken_attention(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1 when the attention is not the model's."""
    right = generic_flash_attention_kv_cache_ragged_sink

    def wrong(q, offsets, cache, layer, scale, sink, *, mask_str, local_window_size):  # type: ignore[no-untyped-def]
        if fault == "window" and local_window_size > 0:
            local_window_size += 1  # counted without the query's own
        sink = None if fault == "sink" else sink
        scale = scale * 1.01 if fault == "scale" else scale
        return right(q, offsets, cache, layer, scale, sink, mask_str=mask_str, local_window_size=local_window_size)

    monkeypatch.setattr(gpt_oss, "generic_flash_attention_kv_cache_ragged_sink", wrong)
    result = demo("--json")
    assert result.exit_code == 1
    broken_is(json.loads(result.stdout), "gpt_oss")


def broken_is(found: dict[str, Any], broken: str) -> None:
    """One model is off, the other and all cases are not."""
    assert not found["ok"]
    assert [name for name, m in found["models"].items() if not m["ok"]] == [broken]
    assert found["models"][broken]["worst_logit_difference"] > 1e-3
    assert all(c["ok"] for c in found["cases"])


@pytest.mark.slow
@pytest.mark.usefixtures("small_table")
def test_demo_notices_a_broken_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1 when DeepSeek-V4 attends to one entry less than it picks."""
    right = indexing.best_keys

    def wrong(*args: Any, top_k: int, **kwargs: Any) -> torch.Tensor:
        return right(*args, top_k=top_k - 1, **kwargs)

    monkeypatch.setattr(deepseek_v4, "best_keys", wrong)
    result = demo("--json")
    assert result.exit_code == 1
    broken_is(json.loads(result.stdout), "deepseek_v4")


@pytest.mark.slow
@pytest.mark.usefixtures("small_table")
def test_demo_notices_a_failing_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is NaN fails, is shown as such, and is null in the document."""
    nan = cases.Result("broken", 1, 1, float("nan"), 1e-5, 1.0, 1.0)

    def results(which: object = None) -> Iterator[cases.Result]:
        yield nan

    monkeypatch.setattr(report, "run_cases", results)
    result = demo()
    assert result.exit_code == 1
    assert "4 of 5 checks passed" in result.stdout
    assert [line.split()[5] for line in result.stdout.splitlines() if line.startswith("broken")] == ["FAILED"]
    (case,) = json.loads(demo("--json").stdout)["cases"]
    assert case["worst_error"] is None
    assert not case["ok"]


def test_demo_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named error that says what to install, before anything runs."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = demo()
    assert (result.exit_code, result.stdout) == (1, "")
    assert "needs transformers, which is not installed: pip install 'tilewright[models]'" in result.stderr


@pytest.mark.slow
def test_demo_of_the_installed_command_is_quiet_and_offline(tmp_path: Path) -> None:
    """The whole of it in a process of its own: nothing on stderr, and no attempt to reach a network."""
    program = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the demo reached for the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from tilewright.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    checks = len(cases.cases()) + 2 * len(report.MODELS)
    assert f"{checks} of {checks} checks passed" in done.stdout
