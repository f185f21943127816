"""What an operator means, as one short text: equal for operators that mean the same, different for all others.

Every distinct expression becomes a numbered line that names its node and the numbers of its parts, so nothing depends
on how an author wrote it down: not on names of locals, comments or files, nor on the order of computing values.
"""

from __future__ import annotations

import hashlib
from typing import assert_never

from .expr import (
    Const,
    Coord,
    Dot,
    Elem,
    Expr,
    FoldResult,
    Iota,
    KeyField,
    Op,
    Param,
    Reduction,
    Selected,
    Tile,
    Var,
)
from .spec import Fold, Listed, Part, Range, Select, Spec


def fingerprint(spec: Spec) -> str:
    lines = _Lines(spec)
    found: list[object] = [(p.name, p.kind.value, p.axes, str(p.dtype), p.value_axes) for p in spec.params]
    found += [spec.positions, [(name, lines.of(e)) for name, e in spec.outputs]]
    found += [(p.kind, [(name, lines.of(e)) for name, e in p.values]) for p in spec.probes]
    return hashlib.sha256(repr((found, lines.text)).encode()).hexdigest()[:16]


class _Lines:
    """Numbered lines, one per distinct expression, fold, selection and key source, in the order they are reached."""

    def __init__(self, spec: Spec) -> None:
        self.text: list[object] = []
        self._spec = spec
        self._known: dict[Expr | Fold | Select, int] = {}
        self._sources: dict[int, int] = {}

    def of(self, e: Expr) -> int:
        if e not in self._known:
            self._known[e] = self._add(self._describe(e))
        return self._known[e]

    def _add(self, line: object) -> int:
        self.text.append(line)
        return len(self.text) - 1

    def _describe(self, e: Expr) -> tuple[object, ...]:
        match e:
            case Const(value):
                return "number", type(value).__name__, repr(value)
            case Coord(name):
                return "coordinate", name
            case Param(name, own, dtype, index):
                return "parameter", name, own, dtype.name, [(axis, self.of(x)) for axis, x in index]
            case KeyField(source, name, axes, leaf, start, size):
                return "key rows", self._source(source), name, axes, leaf, start, size
            case Op(name, args):
                return "operation", name, [self.of(a) for a in args]
            case Dot(a, b, over):
                return "dot", self.of(a), self.of(b), over
            case Reduction(kind, a, over):
                return "reduction", kind, self.of(a), over
            case FoldResult(fold, name):
                return "fold result", self._fold(fold), name
            case Selected(select, name):
                return "selected", self._select(select), name
            case Tile(name, axes, dtype):
                return "tile", name, axes, dtype.name
            case Var() | Iota() | Elem():
                raise AssertionError(f"{type(e).__name__} in a traced operator")
            case _:
                assert_never(e)

    def _fold(self, f: Fold) -> int:
        if f not in self._known:
            self._known[f] = self._add(
                (
                    "fold",
                    self._source(f.source),
                    [(self.of(e), repr(absent)) for e, absent in zip(f.inputs, f.absent, strict=True)],
                    [(s.name, s.axes, repr(s.init)) for s in f.states],
                    [self.of(e) for e in f.step],
                    [self.of(e) for e in f.merge],
                    [(name, self.of(e)) for name, e in f.finish],
                )
            )
        return self._known[f]

    def _select(self, s: Select) -> int:
        if s not in self._known:
            self._known[s] = self._add(("selection", self._source(s.source), self.of(s.score), s.k, s.rank))
        return self._known[s]

    def _source(self, number: int) -> int:
        if number not in self._sources:
            parts = [self._part(p) for p in self._spec.sources[number].parts]
            self._sources[number] = self._add(("keys", parts))
        return self._sources[number]

    def _part(self, part: Part) -> tuple[object, ...]:
        match part:
            case Range(leaf, where, pool):
                return "range", leaf, self.of(where), pool
            case Listed(leaf, indices, axes, block, where):
                return "listed", leaf, indices, axes, block, self.of(where)
            case _:
                assert_never(part)
