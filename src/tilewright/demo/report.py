"""What the demo prints: the model, the loop nest it ran, the variant's source, the table; or all as one document."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterable, Iterator
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

from .cases import Result, run_cases
from .model import CHUNK, PAGE_SIZE, STEPS, WINDOW, ModelCheck, check_model, load_transformers
from .variant import softcap_alibi


@dataclass(frozen=True)
class Nest:
    """A program that the model's attention ran."""

    key: ProgramKey
    text: str


def run_demo(*, as_json: bool) -> bool:
    """Run all of it; whether every check passed. Raises NotInstalled without transformers."""
    start = time.perf_counter()
    load_transformers()
    if as_json:
        model = check_model()
        results = list(run_cases())
        echo_json(document(model, decode_nest(), results, time.perf_counter() - start))
    else:
        click.echo(f"Tilewright {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
        model = check_model()
        _echo_model(model)
        _echo_nest(decode_nest())
        _heading("A variant, written on the spot")
        echo_program(inspect.getsource(softcap_alibi.fn))
        _heading("Cases, each against a dense float64 reference")
        results = list(_echo_cases(run_cases()))
        _echo_summary(model, results, time.perf_counter() - start)
    return model.ok and all(r.ok for r in results)


def decode_nest() -> Nest:
    """The program that the decode rows of the model's sliding-window layers ran, as it lies in memory."""
    mask = mask_named("demo", "sliding_window_causal", WINDOW)
    fingerprint = flash_attention.trace(mask=mask, with_lse=False).fingerprint
    ran = [(key, ready) for key, ready in programs() if key.fingerprint == fingerprint]
    key, ready = min(ran, key=lambda r: r[0].schedule.rows)
    return Nest(key, show_program(ready.program))


def document(model: ModelCheck, nest: Nest, results: list[Result], seconds: float) -> dict[str, object]:
    """Everything the demo found, without NaN: a number that is not finite is None."""
    served = model.served
    return {
        "version": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": {
            "prompts": list(model.prompts),
            "tokens": served.tokens,
            "calls": served.calls,
            "mixed_calls": served.mixed,
            "rows": served.rows,
            "worst_logit_difference": _finite(model.worst),
            "largest_logit": _finite(model.largest),
            "tolerance": model.tolerance,
            "same_tokens": model.same_tokens,
            "ok": model.ok,
        },
        "program": {
            "target": nest.key.target.name,
            "schedule": show_schedule(nest.key.schedule),
            "text": nest.text,
        },
        "variant": inspect.getsource(softcap_alibi.fn),
        "cases": [_case(r) for r in results],
        "ok": model.ok and all(r.ok for r in results),
        "seconds": round(seconds, 3),
    }


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


def _echo_model(m: ModelCheck) -> None:
    lengths, decoded = ", ".join(map(str, m.prompts)), sum(map(len, m.served.tokens))
    click.secho("A gpt-oss from transformers, served on our attention and paged cache\n", bold=True)
    for line in (
        f"model    4 layers, window of {WINDOW} and full attention in turn, 8 query heads on 2 kv heads, a sink each",
        f"batch    {len(m.prompts)} prompts of {lengths} tokens in chunks of {CHUNK}, {STEPS} tokens decoded for each",
        f"calls    {m.served.calls}, {m.served.rows} packed rows in all, {m.served.mixed} with prompt and decode rows",
        f"cache    pages of {PAGE_SIZE} in random order, NaN in every unused slot",
        f"logits   at most {m.worst:.1e} of {m.largest:.1f} from the model's own eager attention, "
        f"tolerance {m.tolerance:.0e}: {_verdict(m.worst <= m.tolerance)}",
        f"tokens   {decoded}, the same as eager attention decodes greedily: {_verdict(m.same_tokens)}",
    ):
        click.echo(line)


def _echo_nest(nest: Nest) -> None:
    _heading("The loop nest that its decode rows ran, in layers with a window")
    click.echo(f"target {nest.key.target.name}, schedule {show_schedule(nest.key.schedule)}\n")
    echo_program(nest.text)


COLUMNS = ("case", "rows", "keys", "error", "tolerance", "check", "ours ms", "torch ms", "ours/torch")
WIDTHS = (34, 5, 6, 9, 10, 7, 9, 9, 11)


def _cells(r: Result) -> tuple[str, ...]:
    return (
        r.name, str(r.rows), str(r.keys), f"{r.error:.1e}", f"{r.tolerance:.0e}", "ok" if r.ok else "FAILED",
        f"{r.ours_ms:.2f}", f"{r.torch_ms:.2f}", f"{r.ratio:.2f}",
    )  # fmt: skip


def _echo_cases(results: Iterable[Result]) -> Iterator[Result]:
    """A line as each case is done: in a table that grows on a terminal, else plain."""
    if sys.stdout.isatty():
        yield from _live_table(results)
        return
    for cells, r in _with_header(results):
        click.echo(
            "".join(c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, WIDTHS, strict=True)))
        )
        if r is not None:
            yield r


def _with_header(results: Iterable[Result]) -> Iterator[tuple[tuple[str, ...], Result | None]]:
    yield COLUMNS, None
    for r in results:
        yield _cells(r), r


def _live_table(results: Iterable[Result]) -> Iterator[Result]:
    from rich.box import SIMPLE_HEAD
    from rich.live import Live
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for n, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if n == 0 else "right", no_wrap=True)
    with Live(table, auto_refresh=False) as live:
        for r in results:
            table.add_row(*_cells(r), style=None if r.ok else "bold red")
            live.refresh()
            yield r


def _echo_summary(model: ModelCheck, results: list[Result], seconds: float) -> None:
    checks = [model.worst <= model.tolerance, model.same_tokens, *(r.ok for r in results)]
    click.echo(
        "\nerror: largest |ours - reference| / max(1, |reference|). torch: pages gathered, then\n"
        "scaled_dot_product_attention (the variant: plain operations) a sequence at a time, masks made beforehand.\n"
    )
    passed = f"{sum(checks)} of {len(checks)} checks passed"
    click.echo(f"{click.style(passed, fg='green' if all(checks) else 'red', bold=True)} in {seconds:.1f} s")
