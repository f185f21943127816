"""Which tiles a body reads for the last time, and so may overwrite; which names it shares with its kernel."""

from __future__ import annotations

from .expr import Elem, reads
from .loops import For, If, Strip
from .rewrite import Body, names_read, statements, written
from .tile import Map


def last_reads(body: Body) -> dict[int, frozenset[str]]:
    """For each Map of a body, by place: tiles it reads once and for the last time, which it may therefore overwrite.

    Only tiles that this body alone touches and writes before it reads; never a view of a tensor argument.
    """
    touch: dict[str, list[tuple[int, bool, bool]]] = {}  # tile -> (place, read, written), in order
    for n, s in enumerate(body):
        for x in statements((s,)):
            for name in names_read(x) | set(written(x)):
                touch.setdefault(name, []).append((n, name in names_read(x), name in written(x)))
    views = {s.dst.name for s in statements(body) if isinstance(s, Map) and isinstance(s.expr, Elem)}
    out: dict[int, set[str]] = {}
    for name, uses in touch.items():
        first, last = uses[0], uses[-1]
        starts_written = first[2] and not first[1] and not isinstance(body[first[0]], If | For | Strip)
        s = body[last[0]]
        if not (starts_written and name not in views and isinstance(s, Map) and last[1] and not last[2]):
            continue
        if reads(s.expr, name) == 1:
            out.setdefault(last[0], set()).add(name)
    return {n: frozenset(names) for n, names in out.items()}


def shared_names(body: Body, whole: Body) -> set[str]:
    """Names a body shares with the rest of its kernel."""
    inside = list(statements(body))
    marks = {id(s) for s in inside}
    rest = [s for s in statements(whole) if id(s) not in marks]
    return {n for s in rest for n in names_read(s) | set(written(s))}
