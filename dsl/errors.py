"""Every error a user can meet: a class each, its message a template, its place in the author's file appended."""

from __future__ import annotations

from typing import ClassVar

from .source import Loc


class TilewrightError(Exception):
    """Base of all errors raised on purpose. Picklable, so worker processes can raise them."""

    template: ClassVar[str] = "{message}"

    def __init__(self, *, loc: Loc | None = None, **fields: object) -> None:
        self.loc, self.fields = loc, fields
        text = self.template.format(**fields)
        if loc is not None:
            excerpt = loc.excerpt()
            text = f"{loc}: {text}" + (f"\n{excerpt}" if excerpt else "")
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.loc, self.fields)


def _rebuild(cls: type[TilewrightError], loc: Loc | None, fields: dict[str, object]) -> TilewrightError:
    return cls(loc=loc, **fields)


# ---- an author's operator ----------------------------------------------------------------------------------------


class AuthorError(TilewrightError):
    """Something in an operator's declaration; carries the author's file, line and column."""


class AxisMismatch(AuthorError, TypeError):
    """Axes that do not meet."""

    template = "{what}: {problem}"


class DTypeMismatch(AuthorError, TypeError):
    """An operation on values of a type it does not have."""

    template = "{what} does not take {got}; {expected}"


class BranchOnTraced(AuthorError, TypeError):
    """`if`, `and`, `or`, `not`, `bool()` or iteration on a traced value."""

    template = (
        "a traced value has no truth value: it stands for every element of {what}; "
        "write where(cond, a, b) instead of `if`, and & | ~ instead of `and` `or` `not`"
    )


class NotTraceable(AuthorError, TypeError):
    """A Python object where an expression was expected."""

    template = "{what}: expected {expected}, got {got}"


class NothingReturned(AuthorError, TypeError):
    """An operator that returns nothing."""

    template = "operator {op!r} returned {got}; return a value, or a dict of named values"


class BadDeclaration(AuthorError, TypeError):
    """A signature that does not declare an operator."""

    template = "operator {op!r}: {problem}"


class UnknownConstant(AuthorError, TypeError):
    """A compile-time constant the operator does not declare, or one left out."""

    template = "operator {op!r}: {problem}"


# ---- arguments of a call -----------------------------------------------------------------------------------------


class ArgumentError(TilewrightError, ValueError):
    """A call's argument: names it, says what it was and what was expected. The output is untouched."""

    template = "{op}: {argument} {got}; expected {expected}"


class ArgumentRankError(ArgumentError):
    template = "{op}: {argument} has rank {got}; expected {expected}"


class ArgumentShapeError(ArgumentError):
    template = "{op}: {argument} has shape {got}; expected {expected}"


class ArgumentDTypeError(ArgumentError, TypeError):
    template = "{op}: {argument} has dtype {got}; expected {expected}"


class ArgumentDeviceError(ArgumentError):
    template = "{op}: {argument} is on {got}; expected {expected}"


class ArgumentLayoutError(ArgumentError):
    template = "{op}: {argument} has strides {got}; expected {expected}"


class ArgumentValueError(ArgumentError):
    template = "{op}: {argument} is {got}; expected {expected}"


class ArgumentTypeError(ArgumentError, TypeError):
    template = "{op}: {argument} is a {got}; expected {expected}"


# ---- schedules, targets, execution -------------------------------------------------------------------------------


class IllegalSchedule(TilewrightError, ValueError):
    """A schedule that has no meaning for an operator, refused by name before anything is lowered."""

    template = "schedule field {field}={value}: {problem}"


class UnknownTarget(TilewrightError, ValueError):
    template = "unknown target {target!r}; known: {known}"


class NotOnTarget(TilewrightError, NotImplementedError):
    """Something in an operator's source that a target has no form for; carries the author's line."""

    template = "target {target!r} has no {what}; expected {expected}"


class NoCompiler(TilewrightError, RuntimeError):
    """A target that generates C, on a machine without a C compiler."""

    template = "target {target!r} needs a C compiler and found none; expected {expected}"


class BadEnvironment(TilewrightError, ValueError):
    template = "environment variable {name}={value!r}; expected {expected}"


class OutOfBounds(TilewrightError, IndexError):
    """The interpreter met a read or write outside a tensor."""

    template = "{kernel}: {access} {tensor} at index {index} of axis {axis}, which has {extent}"


class VerifyError(TilewrightError, AssertionError):
    """A pass made an ill-formed program: a fault of the compiler, never of the user."""

    template = "after {after}: {problem}"


class NotFinite(TilewrightError, ValueError):
    """Checked mode met a visible key row that is not finite."""

    template = "{tensor} of sequence {seq}, key {key}: a visible slot holds NaN or infinity; expected finite values"


# ---- native code and where it is kept ----------------------------------------------------------------------------


class CompileError(TilewrightError, RuntimeError):
    """A compiler failed on generated code, or did not end. The source is kept."""

    template = "{compiler} on {name}: {problem}\n  source: {path}\n  command: {command}"


class LoadError(TilewrightError, OSError):
    """A compiled library that the system's loader refuses."""

    template = "cannot load {path}: {problem}"


class UnsafeCache(TilewrightError, PermissionError):
    """A cache folder that others could write to: what it holds is executed."""

    template = "cache folder {path} {problem}; expected {expected}"


# ---- generated GPU sources ---------------------------------------------------------------------------------------


class MissingToolkit(TilewrightError, RuntimeError):
    """Verifying a GPU source needs a tool that this machine has not."""

    template = "{what} needs {needed}, and found none: {advice}"


class LoweringError(TilewrightError, RuntimeError):
    """TileLang failed on a generated program."""

    template = "TileLang on kernel {kernel!r} for {arch}: {problem}"


class NoRoom(TilewrightError, ValueError):
    """A kernel takes more shared memory than a block has, though its tiles alone would fit."""

    template = (
        "kernel {kernel!r} takes {taken} bytes of shared memory, and {arch} has {most}: "
        "its tiles are {tiles}, the rest is TileLang's; choose a schedule with fewer keys or rows"
    )


class EmulationError(TilewrightError, RuntimeError):
    """A generated GPU source did something that the hardware does not allow, or that nothing orders."""

    template = "{kernel}, schedule {schedule}: {problem}"
