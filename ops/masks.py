"""The named masks: which keys a query sees, by absolute position. `window` counts keys, the query's own included."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from tilewright.dsl.errors import ArgumentTypeError, ArgumentValueError
from tilewright.dsl.value import Value

Predicate: TypeAlias = Callable[[Value, Value], Value]


@dataclass(frozen=True)
class Mask:
    """A predicate of (query, key) positions, made for a window where it uses one."""

    make: Callable[[int], Predicate | None]
    windowed: bool = False


MASKS: dict[str, Mask] = {
    "causal": Mask(lambda w: lambda q, k: k <= q),
    "null": Mask(lambda w: None),
    "sliding_window_causal": Mask(lambda w: lambda q, k: (k <= q) & (q - k < w), windowed=True),
    "sliding_window_noncausal": Mask(lambda w: lambda q, k: k + w > q, windowed=True),
    "chunked": Mask(lambda w: lambda q, k: k // w == q // w, windowed=True),
    "chunked_causal": Mask(lambda w: lambda q, k: (k <= q) & (k // w == q // w), windowed=True),
}


def mask_named(op: str, mask_str: str, local_window_size: int | None) -> Predicate | None:
    """The predicate of a named mask; None sees every key.

    Raises ArgumentValueError for an unknown name (listing the known), a window below 1 for a mask that uses one, and a
    window for a mask that does not; ArgumentTypeError for a window that is not an integer.
    """
    if not isinstance(mask_str, str) or mask_str not in MASKS:
        raise ArgumentValueError(op=op, argument="mask_str", got=repr(mask_str), expected=f"one of {', '.join(MASKS)}")
    window = -1 if local_window_size is None else _integer(op, local_window_size)
    if MASKS[mask_str].windowed and window < 1:
        expected = f"at least 1 for mask {mask_str!r}: keys in the window, the query's own included"
        raise ArgumentValueError(op=op, argument="local_window_size", got=local_window_size, expected=expected)
    if not MASKS[mask_str].windowed and window != -1:
        expected = f"-1 or None for mask {mask_str!r}, which uses no window"
        raise ArgumentValueError(op=op, argument="local_window_size", got=local_window_size, expected=expected)
    return _predicate(mask_str, window)


def _integer(op: str, window: object) -> int:
    """A plain int: 4.0 and True would be other predicates, which compare equal to those of 4 and 1."""
    try:
        number = None if isinstance(window, bool) else operator.index(window)  # type: ignore[arg-type]  # or TypeError
    except TypeError:
        number = None
    if number is None:
        expected = "an integer or None"
        raise ArgumentTypeError(op=op, argument="local_window_size", got=type(window).__name__, expected=expected)
    if number >= 1 << 31:  # positions are 32-bit, and sums of them with a window must not wrap
        raise ArgumentValueError(op=op, argument="local_window_size", got=number, expected="below 2147483648")
    return number


@cache
def _predicate(mask_str: str, window: int) -> Predicate | None:
    """One predicate object per mask and window, so that tracing is done once."""
    return MASKS[mask_str].make(window)
