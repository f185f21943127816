"""What the demo prints: the models, a loop nest that one ran, the variant, the table; or all as one document."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import click
import torch

from tilewright import __version__
from tilewright.codegen_cache.programs import ProgramKey, programs
from tilewright.commands.options import show_schedule
from tilewright.commands.output import echo_json, echo_program
from tilewright.dsl.printer import show_program
from tilewright.ops.flash_attention import flash_attention
from tilewright.ops.masks import mask_named

from . import deepseek_v4, gpt_oss
from .cases import Result, run_cases
from .serving import CHUNK, STEPS, ModelCheck, load_transformers
from .variant import softcap_alibi


@dataclass(frozen=True)
class Model:
    """A model that the demo serves, and how the text describes it."""

    title: str
    layers: str
    cache: str
    check: Callable[[], ModelCheck]


MODELS = {
    "gpt_oss": Model(
        "A gpt-oss from transformers, served on our attention and paged cache",
        f"4 layers, window of {gpt_oss.WINDOW} and full attention in turn, 8 query heads on 2 kv heads, a sink each",
        f"pages of {gpt_oss.PAGE_SIZE}",
        gpt_oss.check_gpt_oss,
    ),
    "deepseek_v4": Model(
        "A DeepSeek-V4 from transformers, served on our indexer, sparse attention and paged caches",
        f"4 layers, window of {deepseek_v4.WINDOW}: one with it alone, two with the {deepseek_v4.TOP_K} best entries "
        f"of {deepseek_v4.RATES[deepseek_v4.SPARSE]} tokens, one with all of {deepseek_v4.RATES[deepseek_v4.HEAVY]}",
        "pages of {} tokens and of {} entries".format(*deepseek_v4.PAGE_SIZES),
        deepseek_v4.check_deepseek_v4,
    ),
}


@dataclass(frozen=True)
class Nest:
    """A program that a model's attention ran."""

    key: ProgramKey
    text: str


def run_demo(*, as_json: bool) -> bool:
    """Run all of it; whether every check passed. Raises NotInstalled without transformers."""
    start = time.perf_counter()
    load_transformers()
    if as_json:
        models = {name: model.check() for name, model in MODELS.items()}
        results = list(run_cases())
        echo_json(document(models, decode_nest(), results, time.perf_counter() - start))
    else:
        click.echo(f"Tilewright {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        models = {name: _echo_model(model) for name, model in MODELS.items()}
        if nest := decode_nest():
            _echo_nest(nest)
        _heading("A variant, written on the spot")
        echo_program(inspect.getsource(softcap_alibi.fn))
        _heading("Cases, each against a dense float64 reference")
        results = list(_echo_cases(run_cases()))
        _echo_summary(models, results, time.perf_counter() - start)
    return all(m.ok for m in models.values()) and all(r.ok for r in results)


def decode_nest() -> Nest | None:
    """The program that decode rows of gpt-oss's layers with a window ran; None where they ran what they should not."""
    mask = mask_named("demo", "sliding_window_causal", gpt_oss.WINDOW)
    fingerprint = flash_attention.trace(mask=mask, with_lse=False).fingerprint
    ran = [(key, ready) for key, ready in programs() if key.fingerprint == fingerprint]
    if not ran:
        return None
    key, ready = min(ran, key=lambda r: r[0].schedule.rows)
    return Nest(key, show_program(ready.program))


def document(
    models: Mapping[str, ModelCheck], nest: Nest | None, results: list[Result], seconds: float
) -> dict[str, object]:
    """Everything the demo found, without NaN: a number that is not finite is None."""
    return {
        "version": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "models": {name: _model(m) for name, m in models.items()},
        "program": None if nest is None else _program(nest),
        "variant": inspect.getsource(softcap_alibi.fn),
        "cases": [_case(r) for r in results],
        "ok": all(m.ok for m in models.values()) and all(r.ok for r in results),
        "seconds": round(seconds, 3),
    }


def _model(m: ModelCheck) -> dict[str, object]:
    return {
        "prompts": list(m.prompts),
        "tokens": m.served.tokens,
        "calls": m.served.calls,
        "mixed_calls": m.served.mixed,
        "rows": m.served.rows,
        "worst_logit_difference": _finite(m.worst),
        "largest_logit": _finite(m.largest),
        "tolerance": m.tolerance,
        "same_tokens": m.same_tokens,
        "ok": m.ok,
    }


def _program(n: Nest) -> dict[str, object]:
    return {"target": n.key.target.name, "schedule": show_schedule(n.key.schedule), "text": n.text}


def _case(r: Result) -> dict[str, object]:
    return {
        "case": r.name, "rows": r.rows, "keys": r.keys, "worst_error": _finite(r.error), "tolerance": r.tolerance,
        "ok": r.ok, "ours_ms": r.ours_ms, "torch_ms": r.torch_ms, "ratio": r.ratio,
    }  # fmt: skip


def _finite(x: float) -> float | None:
    return x if abs(x) < float("inf") else None


# ---- text ------------------------------------------------------------------------------------------------------------


def _heading(text: str) -> None:
    click.secho(f"\n{text}\n", bold=True)


def _verdict(ok: bool) -> str:
    return click.style("ok" if ok else "FAILED", fg="green" if ok else "red", bold=not ok)


def _echo_model(model: Model) -> ModelCheck:
    """Check a model, and say what came of it."""
    _heading(model.title)
    m = model.check()
    lengths, decoded = ", ".join(map(str, m.prompts)), sum(map(len, m.served.tokens))
    for line in (
        f"model    {model.layers}",
        f"batch    {len(m.prompts)} prompts of {lengths} tokens in chunks of {CHUNK}, {STEPS} tokens decoded for each",
        f"calls    {m.served.calls}, {m.served.rows} packed rows in all, {m.served.mixed} with prompt and decode rows",
        f"cache    {model.cache} in random order, NaN in every unused slot",
        f"logits   at most {m.worst:.1e} of {m.largest:.1f} from the model's own eager attention, "
        f"tolerance {m.tolerance:.0e}: {_verdict(m.same_logits)}",
        f"tokens   {decoded}, the same as eager attention decodes greedily: {_verdict(m.same_tokens)}",
    ):
        click.echo(line)
    return m


def _echo_nest(nest: Nest) -> None:
    _heading("The loop nest that gpt-oss's decode rows ran, in layers with a window")
    click.echo(f"target {nest.key.target.name}, schedule {show_schedule(nest.key.schedule)}\n")
    echo_program(nest.text)


COLUMNS = ("case", "rows", "keys", "error", "tol", "check", "ours ms", "torch ms", "ratio")
WIDTHS = (29, 5, 6, 8, 6, 7, 8, 9, 7)


def _echo_cases(results: Iterable[Result]) -> Iterator[Result]:
    """A line as each case is done."""
    click.secho(_line(COLUMNS), bold=True)
    for r in results:
        numbers = (f"{r.error:.1e}", f"{r.tolerance:.0e}"), (f"{r.ours_ms:.2f}", f"{r.torch_ms:.2f}", f"{r.ratio:.2f}")
        line = _line((r.name, str(r.rows), str(r.keys), *numbers[0], "ok" if r.ok else "FAILED", *numbers[1]))
        click.secho(line, fg=None if r.ok else "red")
        yield r


def _line(cells: tuple[str, ...]) -> str:
    return cells[0].ljust(WIDTHS[0]) + "".join(c.rjust(w) for c, w in zip(cells[1:], WIDTHS[1:], strict=True))


def _echo_summary(models: Mapping[str, ModelCheck], results: list[Result], seconds: float) -> None:
    checks = [ok for m in models.values() for ok in (m.same_logits, m.same_tokens)] + [r.ok for r in results]
    click.echo(
        "\nerror: largest |ours - reference| / max(1, |reference|), of the indexer in scores of the keys it picked.\n"
        "ratio: time of ours over torch's, which gathers the pages, then runs scaled_dot_product_attention (for the\n"
        "last three, plain operations) a sequence at a time, with masks made beforehand.\n"
    )
    passed = f"{sum(checks)} of {len(checks)} checks passed"
    click.echo(f"{click.style(passed, fg='green' if all(checks) else 'red', bold=True)} in {seconds:.1f} s")
