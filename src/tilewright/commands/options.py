"""Values written on the command line: constants, arguments, sizes, schedules."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from inspect import Parameter
from math import isfinite

from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.spec import ParamKind
from tilewright.random_inputs import Sizes

from .errors import BadOption


def pair(option: str, text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BadOption(option=option, value=text, problem="write NAME=VALUE")
    return name.strip(), value.strip()


def integer(option: str, text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise BadOption(option=option, value=text, problem="expected an integer") from None
    if value < least:
        raise BadOption(option=option, value=text, problem=f"expected at least {least}")
    return value


def integers(option: str, text: str) -> tuple[int, ...]:
    """A list such as 5,1,16; zeros are fine."""
    return tuple(integer(option, part, least=0) for part in text.split(","))


# ---- constants -------------------------------------------------------------------------------------------------------


def constants(operator: Operator, texts: Sequence[str], otherwise: Mapping[str, object]) -> dict[str, object]:
    """What `--set NAME=VALUE` gives; `otherwise`, and mask=causal, for constants that have no default.

    A VALUE is a named mask, with its window if it has one (sliding_window_causal:128); none, true or false; a number;
    a string, in quotes where it looks like one of those. Raises BadOption.
    """
    out: dict[str, object] = {}
    settable = [n for n, (a, _) in operator.parameters.items() if a.kind is None or a.optional]
    for text in texts:
        name, value = pair("--set", text)
        if name not in settable:
            problem = f"{operator.name} has no such constant; known: {', '.join(settable) or 'none'}"
            raise BadOption(option="--set", value=text, problem=problem)
        if operator.parameters[name][0].kind is not None and value.lower() != "none":
            problem = f"{name} is an operand: it can be left out with {name}=none, or given a value with --arg"
            raise BadOption(option="--set", value=text, problem=problem)
        out[name] = _of_its_kind(text, constant(name, value), operator.parameters[name][1])
    for name, (a, default) in operator.parameters.items():
        if a.kind is None and name not in out and default is Parameter.empty:
            if name not in otherwise and name != "mask":
                problem = f"{operator.name} needs constant {name!r}, which has no default"
                raise BadOption(option="--set", value=f"{name}=", problem=problem)
            out[name] = otherwise[name] if name in otherwise else constant("mask", "causal")
    return out


def _of_its_kind(text: str, value: object, default: object) -> object:
    """The value, where the default does not say that it should be of another kind."""
    if isinstance(default, bool) and not isinstance(value, bool):
        raise BadOption(option="--set", value=text, problem="expected true or false")
    if isinstance(default, int | float) and isinstance(value, str):
        raise BadOption(option="--set", value=text, problem="expected a number")
    return value


def constant(name: str, text: str) -> object:
    """One value; for a constant named `mask` it must be the name of one."""
    from tilewright.ops.masks import MASKS

    head, _, window = text.partition(":")
    if name == "mask" or name.endswith("_mask") or head in MASKS:
        return _mask(name, text, head, window)
    lowered = {"none": None, "true": True, "false": False}
    if text.lower() in lowered:
        return lowered[text.lower()]
    try:
        value: object = literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str) else text


def _mask(name: str, text: str, head: str, window: str) -> object:
    from tilewright.dsl.errors import ArgumentValueError
    from tilewright.ops.masks import mask_named

    size = integer("--set", window, least=-1) if window else -1
    try:
        return mask_named("--set", head, size)
    except ArgumentValueError as e:
        form = f"; write {name}={head}:WINDOW" if "at least" in str(e) else ""
        problem = f"expected {e.fields['expected']}{form}"
        raise BadOption(option="--set", value=f"{name}={text}", problem=problem) from None


def settable(constants: Mapping[str, object]) -> dict[str, object]:
    """Those that a command line can say: numbers, strings and none, but no functions."""
    plain = {n: value for n, value in constants.items() if value is None or isinstance(value, int | float | str)}
    return {n: str(v) if isinstance(v, float) and not isfinite(v) else v for n, v in plain.items()}  # as JSON has them


def show_constants(constants: Mapping[str, object]) -> str:
    """The form `--set` takes, one after the other."""
    words = {"None": "none", "True": "true", "False": "false"}
    return " ".join(f"{n}={words.get(str(value), value)}" for n, value in constants.items())


# ---- arguments -------------------------------------------------------------------------------------------------------


def arguments(operator: Operator, texts: Sequence[str]) -> dict[str, int | float]:
    """What `--arg NAME=NUMBER` gives: the value of a scalar, or what a tensor is filled with. Raises BadOption."""
    known = {n: a.kind for n, (a, _) in operator.parameters.items() if a.kind in (ParamKind.SCALAR, ParamKind.TENSOR)}
    out: dict[str, int | float] = {}
    for text in texts:
        name, value = pair("--arg", text)
        if name not in known:
            problem = f"{operator.name} has no such scalar or tensor; known: {', '.join(known) or 'none'}"
            raise BadOption(option="--arg", value=text, problem=problem)
        try:
            out[name] = int(value) if value.lstrip("+-").isdigit() else float(value)
        except ValueError:
            raise BadOption(option="--arg", value=text, problem="expected a number") from None
    return out


def tolerance(value: float | None) -> float | None:
    """What `--tolerance` gives. Raises BadOption for what no error can be held against."""
    if value is not None and not value >= 0:
        raise BadOption(option="--tolerance", value=str(value), problem="expected a number, at least 0")
    return value


def sizes(
    *,
    heads: int,
    kv_heads: int | None,
    dims: Sequence[str],
    page_size: int,
    dtype: str,
    cache_dtype: str | None,
    rows: str = "5,1,16",
    cached: str = "3,70,0",
) -> Sizes:
    """Sizes as the options of `show` and `run` write them. Raises BadOption."""
    extents = {a: integer("--dim", n) for a, n in (pair("--dim", text) for text in dims)}
    of_rows, of_cached = integers("--rows", rows), integers("--cached", cached)
    if len(of_rows) != len(of_cached):
        problem = f"{len(of_cached)} sequences, but --rows {rows} has {len(of_rows)}"
        raise BadOption(option="--cached", value=cached, problem=problem)
    return Sizes(of_rows, of_cached, heads, kv_heads, extents, page_size, dtype, cache_dtype)


# ---- schedules -------------------------------------------------------------------------------------------------------


def schedule(text: str | None, default: Schedule) -> Schedule:
    """`rows=16,keys=64`: `default` with these fields changed. Raises BadOption; legality is checked when lowering."""
    if not text:
        return default
    known = {f.name: str(f.type) for f in fields(Schedule)}
    changes: dict[str, object] = {}
    for part in text.split(","):
        name, value = pair("--schedule", part)
        if name not in known:
            raise BadOption(option="--schedule", value=part, problem=f"no such field; known: {', '.join(known)}")
        changes[name] = _field(part, value, known[name])
    return replace(default, **changes)  # type: ignore[arg-type]  # each of its field's type, as `_field` sees to


def _field(part: str, value: str, kind: str) -> object:
    if value.lower() == "none" and "None" in kind:
        return None
    if "int" in kind:
        try:
            return int(value)
        except ValueError:
            expected = "an integer or none" if "None" in kind else "an integer"
            raise BadOption(option="--schedule", value=part, problem=f"expected {expected}") from None
    return value


def show_schedule(s: Schedule) -> str:
    """The form `--schedule` takes."""
    values = ((f.name, getattr(s, f.name)) for f in fields(s))
    return ",".join(f"{n}={'none' if v is None else v}" for n, v in values)
