"""`print` and `breakpoint()` in an author's source: a traced value is shown when the interpreter reaches it.

While an operator is traced its function sees two replaced builtins; a `print` without traced values prints at once.
"""

from __future__ import annotations

import builtins
import inspect
import linecache
import types
from collections.abc import Callable

from .source import here
from .spec import Probe
from .value import HasValue, Value, as_expr


def traced_builtins(fn: Callable[..., object], probes: list[Probe]) -> Callable[..., object]:
    """`fn` with `print` and `breakpoint` recording into `probes`; nothing else about it changes."""
    if not isinstance(fn, types.FunctionType):
        return fn

    def traced_print(*args: object, **kwargs: object) -> None:
        if not any(isinstance(a, Value | HasValue) for a in args):
            builtins.print(*args, **kwargs)  # type: ignore[call-overload]  # passed on as given
            return
        loc = here()
        named = tuple(
            (_spelling(n), as_expr(a, "print")) for n, a in enumerate(args) if isinstance(a, Value | HasValue)
        )
        probes.append(Probe("print", named, loc))

    def traced_breakpoint(*args: object, **kwargs: object) -> None:
        frame = inspect.currentframe()
        local = frame.f_back.f_locals if frame is not None and frame.f_back is not None else {}
        named = tuple((n, v.expr) for n, v in local.items() if isinstance(v, Value))
        probes.append(Probe("breakpoint", named, here()))

    copy = types.FunctionType(
        fn.__code__,
        {**fn.__globals__, "print": traced_print, "breakpoint": traced_breakpoint},
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _spelling(argument: int) -> str:
    """How the author wrote the n-th argument of the `print` now being traced."""
    import ast

    loc = here()
    text = linecache.getline(loc.file, loc.line)[loc.col : loc.end_col] if loc else ""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:  # a call over several lines
        return f"argument {argument}"
    if isinstance(call, ast.Call) and argument < len(call.args):
        return ast.unparse(call.args[argument])
    return f"argument {argument}"
