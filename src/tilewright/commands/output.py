"""What verbs print: text in colour where there is a terminal and plain elsewhere, JSON documents, errors."""

from __future__ import annotations

import json
import sys
import traceback

import click

from .errors import exit_status


def echo_program(text: str) -> None:
    """The text of a level, highlighted on a terminal. Lines are never cut: a long one wraps, or goes on in a pipe."""
    if not sys.stdout.isatty():
        click.echo(text, nl=not text.endswith("\n"))
        return
    from rich.console import Console
    from rich.syntax import Syntax

    shown = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(text.rstrip("\n"))
    Console().print(shown, soft_wrap=True)


def echo_json(document: object) -> None:
    """One JSON document; NaN and infinities are not JSON, and have to be gone by now."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def report(e: Exception) -> int | None:
    """Print an error that a user can meet to stderr; its exit status, or None for any other exception, not printed.

    With TILEWRIGHT_DEBUG at least 1, the traceback comes first.
    """
    from tilewright.dsl import knobs
    from tilewright.dsl.errors import BadEnvironment

    status = exit_status(e)
    if status is None:
        return None
    try:
        debug = knobs.DEBUG.get() >= 1
    except BadEnvironment:
        debug = False
    if debug:
        traceback.print_exception(e)
    click.echo(f"{click.style('error:', fg='red', bold=True)} {str(e) or 'stopped in the debugger'}", err=True)
    return status
