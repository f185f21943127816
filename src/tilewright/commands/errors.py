"""Errors of the command line itself, and the exit status each error means."""

from __future__ import annotations

from bdb import BdbQuit

from tilewright.dsl.errors import (
    ArgumentError,
    AuthorError,
    BadEnvironment,
    IllegalSchedule,
    TilewrightError,
    UnknownConstant,
    UnknownTarget,
)


class BadOption(TilewrightError, ValueError):
    """Something on the command line that means nothing."""

    template = "{option} {value!r}: {problem}"


class BrokenFile(AuthorError, RuntimeError):
    """An author's file that raises while it is imported, traced or run."""

    template = "{error}, while {doing}"


class NotInstalled(TilewrightError, ImportError):
    """A verb that needs an optional dependency."""

    template = "{what} needs {package}, which is not installed: pip install 'tilewright[{extra}]'"


_BAD_USAGE = (BadOption, ArgumentError, BadEnvironment, IllegalSchedule, UnknownConstant, UnknownTarget)


def exit_status(e: BaseException) -> int | None:
    """2 for what was asked, 1 for an operator, a file or a machine at fault; None for what is not a user's error."""
    if isinstance(e, _BAD_USAGE):
        return 2
    return 1 if isinstance(e, TilewrightError | BdbQuit) else None
