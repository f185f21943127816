"""The `tilewright` command: its options. What verbs do is in `commands` and `demo`, loaded when a verb runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from . import __version__

if TYPE_CHECKING:
    from .dsl.schedule import Binding, Schedule
    from .dsl.spec import Spec
    from .dsl.targets import Target

F = TypeVar("F", bound=Callable[..., None])
Made = TypeVar("Made")

FLOATS = ("float32", "float16", "bfloat16")
POSITIVE = click.IntRange(min=1)


class Verbs(click.Group):
    """A group whose verbs end every error made on purpose as one message and an exit status, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as e:
            from .commands.output import report

            status = report(e)
            if status is None:
                raise
            ctx.exit(status)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tilewright")
def main() -> None:
    """A declarative tile language for attention kernels, and its compiler.

    Exit status: 0 all went well, 1 a check failed or an operator is wrong, 2 something on the command line is. With
    TILEWRIGHT_DEBUG=1 an error shows its traceback.
    """


def _options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help page."""

    def decorate(f: F) -> F:
        for d in reversed(decorators):
            f = d(f)
        return f

    return decorate


operator_options = _options(
    click.argument("op", metavar="OP|FILE.py:NAME"),
    click.option("--set", "constants", multiple=True, metavar="CONST=VALUE", help=(
        "A compile-time constant: a mask by name (sliding_window_causal:128), a number, true, false, none, a string. "
        "OPERAND=none leaves out an optional operand."
    )),
    click.option("--heads", type=POSITIVE, metavar="N", default=8, show_default=True, help="Query heads."),
    click.option("--kv-heads", type=POSITIVE, metavar="N", help="Key-value heads.  [default: 2, 1 to sum over heads]"),
    click.option("--dim", "dims", multiple=True, metavar="AXIS=N", help="Extent of any other axis.  [default: 64]"),
    click.option("--page-size", type=POSITIVE, metavar="N", default=16, show_default=True, help="Keys in a page."),
    click.option("--dtype", type=click.Choice(FLOATS), default="float32", show_default=True, help="Of all tensors."),
    click.option("--cache-dtype", type=click.Choice((*FLOATS, "float8_e4m3fn")), help="Of caches; float8 has scales."),
    click.option("--schedule", metavar="FIELD=N,...", help="Fields of the schedule: rows=16,keys=64."),
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@main.command()
@operator_options
@click.option(
    "--level",
    metavar="spec|tiles|loops",
    default="loops",
    show_default=True,
    help="The traced operator, the tile program without sizes, or the loop nest under a schedule.",
)
@click.option("--after", metavar="PASS|all", help="The loop nest after one pass, or after each in turn.")
@click.option("--target", metavar="NAME", default="interpret", show_default=True, help="What the nest is shaped for.")
@json_option
def show(
    op: str,
    constants: tuple[str, ...],
    schedule: str | None,
    level: str,
    after: str | None,
    target: str,
    as_json: bool,
    **shape: object,
) -> None:
    """Print an operator at any level, after any pass.

    OP is an operator of the library or a public function that runs one; FILE.py:NAME is one of yours.

    \b
    Examples:
      tilewright show flash_attention --level spec
      tilewright show flash_attention --set mask=sliding_window_causal:128 --set sink=none --schedule rows=16,keys=64
      tilewright show mine.py:alibi --after bound_key_loops
    """
    from .commands import options as read
    from .commands import show as levels
    from .commands.operators import authors_errors, find
    from .commands.output import echo_json, echo_program
    from .dsl.targets import default_schedule, target_named
    from .random_inputs import binding_of

    found, chosen = find(op), target_named(target)
    operator = found.operator
    sizes = read.sizes(**shape)  # type: ignore[arg-type]  # click has read them by their types
    wanted = read.constants(operator, constants, found.sample.constants)
    with found.given(wanted):
        with authors_errors(operator.loc.file, f"tracing {operator.name}"):
            spec = operator.trace(**wanted)
        binding = binding_of(spec, sizes)
        default = default_schedule(chosen, spec, binding, sum(sizes.rows), len(sizes.rows))
        picked = read.schedule(schedule, default)
        stages = levels.stages(spec, binding, picked, level, after, chosen.gpu)
    if as_json:
        shown = {"schedule": asdict(picked)} if level == "loops" else {}
        echo_json({"operator": operator.name, "level": level, **shown, "stages": [asdict(s) for s in stages]})
    elif after == "all":
        for s in stages:
            click.secho(f"-- after {s.name}" + ("" if s.changed else " (unchanged)"), bold=True)
            if s.changed:
                echo_program(s.text)
    else:
        echo_program(stages[0].text)


target_option = click.option("--target", metavar="NAME", required=True, help="cpu, cuda:sm_90a, hip:gfx942, ...")
batch_options = _options(
    click.option("--rows", metavar="N,...", default="5,1,16", show_default=True, help="Query rows of each sequence."),
    click.option(
        "--cached", metavar="N,...", default="3,70,0", show_default=True, help="Tokens of each cached before."
    ),
)


@main.command()
@operator_options
@batch_options
@target_option
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), required=True, help="Where files go.")
@click.option("--text-only", is_flag=True, help="GPU programs as TileLang text, not lowered to device sources.")
@json_option
def emit(
    op: str,
    constants: tuple[str, ...],
    schedule: str | None,
    target: str,
    folder: Path,
    text_only: bool,
    as_json: bool,
    **shape: object,
) -> None:
    """Write an operator as source text for a target.

    For a GPU: the TileLang program, which names the author's lines, the device source of each kernel, and launch.json,
    which has all that a host needs to launch them. No GPU is needed. For cpu: the C program. The default schedule is
    the target's for a batch of --rows and --cached.

    \b
    Examples:
      tilewright emit flash_attention --target cuda:sm_90a --dtype bfloat16 --dim dim=128 -o out
      tilewright emit mine.py:alibi --target hip:gfx942 --schedule rows=8,keys=64,stages=1 -o out
    """
    from .commands import emit as emits
    from .commands.output import echo_json

    asked = _asked(op, constants, schedule, target, shape)
    made = asked(partial(emits.emit, lowered=not text_only))
    paths = emits.write(made, folder)
    if as_json:
        echo_json({**made.document(), "files": [str(p) for p in paths]})
        return
    for line in [*made.lines(), *(f"wrote     {p}" for p in paths)]:
        click.echo(line)


@main.command()
@operator_options
@batch_options
@target_option
@click.option("--tier", metavar="lower", default="lower", show_default=True, help="How far it is taken.")
@json_option
def verify(
    op: str,
    constants: tuple[str, ...],
    schedule: str | None,
    target: str,
    tier: str,
    as_json: bool,
    **shape: object,
) -> None:
    """Check an operator's GPU program without a GPU.

    OP may be `all`: every operator of the library. Tier lower: the program goes through TileLang to a device source,
    and fits in shared memory. What was lowered before is not lowered again.

    \b
    Examples:
      tilewright verify flash_attention --target cuda:sm_80 --tier lower --dtype float16
      tilewright verify all --target hip:gfx942 --dtype bfloat16
    """
    from .commands import emit as emits
    from .commands.operators import library
    from .commands.output import echo_json, report

    done: list[dict[str, object]] = []
    failed = 0
    for name in library() if op == "all" else (op,):
        try:
            asked = _asked(name, constants, schedule, target, shape)
            made = asked(lambda spec, binding, picked, chosen: emits.verify(spec, binding, picked, chosen, tier))
        except Exception as e:
            if op != "all" or report(e) is None:
                raise
            failed += 1
            done.append({"operator": name, "ok": False, "error": str(e)})
            continue
        done.append({**made.document(), "ok": True})
        for line in () if as_json else made.lines():
            click.echo(line)
    if as_json:
        echo_json({"tier": tier, "ok": not failed, "operators": done})
    sys.exit(1 if failed else 0)


def _asked(
    op: str, constants: tuple[str, ...], schedule: str | None, target: str, shape: Mapping[str, object]
) -> Callable[[Callable[[Spec, Binding, Schedule, Target], Made]], Made]:
    """What the options of an operator, a schedule and a target mean: a call of what is done with them."""
    from .commands import options as read
    from .commands.operators import authors_errors, find
    from .dsl.targets import default_schedule, target_named
    from .random_inputs import binding_of

    found, chosen = find(op), target_named(target)
    operator = found.operator
    sizes = read.sizes(**shape)  # type: ignore[arg-type]  # click has read them by their types
    wanted = read.constants(operator, constants, found.sample.constants)

    def call(act: Callable[[Spec, Binding, Schedule, Target], Made]) -> Made:
        with found.given(wanted):
            with authors_errors(operator.loc.file, f"tracing {operator.name}"):
                spec = operator.trace(**wanted)
            binding = binding_of(spec, sizes)
            default = default_schedule(chosen, spec, binding, sum(sizes.rows), len(sizes.rows))
            return act(spec, binding, read.schedule(schedule, default), chosen)

    return call


@main.command()
@operator_options
@click.option("--random", "seed", type=int, default=0, show_default=True, metavar="SEED", help="Seed of the inputs.")
@click.option("--rows", metavar="N,...", default="5,1,16", show_default=True, help="Query rows of each sequence.")
@click.option("--cached", metavar="N,...", default="3,70,0", show_default=True, help="Tokens of each cached before.")
@click.option(
    "--arg", "arguments", multiple=True, metavar="NAME=NUMBER", help="A scalar, or what a tensor is filled with."
)
@click.option("--target", metavar="NAME", help="Where to run; by default as tilewright.run chooses.")
@click.option("--check", is_flag=True, help="Require a reference to compare with.")
@click.option(
    "--tolerance", type=float, metavar="X", help="Largest error allowed.  [default: 1e-5 for float32, by dtype]"
)
@click.option(
    "--repeat", type=POSITIVE, metavar="N", default=5, show_default=True, help="Timed calls; their median is shown."
)
@click.option("--trace", is_flag=True, help="Print executed statements, with the numbers they made.")
@click.option("--trace-limit", type=POSITIVE, metavar="N", default=200, show_default=True, help="Statements to print.")
@json_option
def run(
    op: str,
    constants: tuple[str, ...],
    arguments: tuple[str, ...],
    schedule: str | None,
    seed: int,
    target: str | None,
    check: bool,
    tolerance: float | None,
    repeat: int,
    trace: bool,
    trace_limit: int,
    as_json: bool,
    **shape: object,
) -> None:
    """Run an operator on random ragged, paged inputs made from its declaration.

    Pages lie in random order, unused slots hold NaN, unused table entries hold junk. Outputs are compared with a dense
    reference in float64: the library's, or NAME_reference in your file, called once a sequence with keyword arguments
    named as the operator's parameters (keys as kv.k [heads, keys, dim]), pos and key. See tilewright.references.

    \b
    Examples:
      tilewright run flash_attention --rows 5,1,16 --cached 3,70,0 --set mask=causal --check
      tilewright run mine.py:alibi --random 7 --arg scale=0.1 --schedule rows=4,keys=32 --trace
    """
    from .commands import options as read
    from .commands import run as runs
    from .commands.operators import authors_errors, find
    from .commands.output import echo_json
    from .commands.report import Report

    found = find(op, need_reference=check)
    operator = found.operator
    sizes = read.sizes(**shape)  # type: ignore[arg-type]  # click has read them by their types
    wanted = read.constants(operator, constants, found.sample.constants)
    given, allowed = read.arguments(operator, arguments), read.tolerance(tolerance)
    lines: list[str] = []
    # What the author prints must not end up inside the document.
    with redirect_stdout(sys.stderr) if as_json else nullcontext(), found.given(wanted):
        with authors_errors(operator.loc.file, f"tracing {operator.name}"):
            inputs = found.sample.inputs(operator, wanted, sizes, seed, given)
        plan, executed = runs.plan(inputs, schedule, target), None
        if trace:
            ran, executed = runs.trace(plan, lines.append if as_json else click.echo, trace_limit)
        else:
            ran = runs.execute(plan, repeat)
    comparisons = found.compare(inputs, ran.outputs, allowed)
    report = Report(plan, seed, ran, found.reference_name, comparisons, lines, executed)
    if as_json:
        echo_json(report.document())
    else:
        if executed is not None and executed > trace_limit:
            click.echo(f"... {executed - trace_limit} more statements; --trace-limit shows more")
        for line in report.lines():
            click.echo(line)
    sys.exit(0 if report.ok else 1)


@main.command()
@json_option
def demo(as_json: bool) -> None:
    """Serve models on our operators, show the loop nest they ran, and check and time a table of cases.

    The models are a tiny random gpt-oss and DeepSeek-V4 from transformers (pip install 'tilewright[models]'): prompts
    and decode rows go through our paged caches, attention and indexer in packed ragged batches, and logits and tokens
    must be those of their own eager attention. Nothing is downloaded.

    \b
    Examples:
      tilewright demo
      tilewright demo --json
    """
    from .demo.report import run_demo

    sys.exit(0 if run_demo(as_json=as_json) else 1)


if __name__ == "__main__":
    main()
