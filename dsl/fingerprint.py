"""What an operator means, as one short text: equal for operators that mean the same, different for all others.

Every distinct expression becomes a numbered line that names its node and the numbers of its parts, so nothing depends
on how an author wrote it down: not on names of locals, comments or files, nor on the order of computing values.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass

from .spec import Fold, Spec


def fingerprint(spec: Spec) -> str:
    """Of everything but the operator's own name."""
    lines = _Lines(spec)
    found = [lines.of(x) for x in (spec.params, spec.positions, spec.outputs, spec.probes)]
    return hashlib.sha256(repr((found, lines.text)).encode()).hexdigest()[:16]


class _Lines:
    """Numbered lines, one per distinct node, in the order they are reached. A field that compares is part of a node."""

    def __init__(self, spec: Spec) -> None:
        self.text: list[object] = []
        self._spec = spec
        self._known: dict[object, int] = {}

    def of(self, x: object) -> object:
        if isinstance(x, tuple):
            return [self.of(y) for y in x]
        if not is_dataclass(x):
            return type(x).__name__, repr(x)
        if x not in self._known:
            line = [type(x).__name__, *(self._field(x, f.name) for f in fields(x) if f.compare)]
            self._known[x] = len(self.text)
            self.text.append(line)
        return self._known[x]

    def _field(self, x: object, name: str) -> object:
        value: object = getattr(x, name)
        if name == "source" and isinstance(value, int):  # numbered in the order that the author used them
            return self.of(self._spec.sources[value])
        return None if isinstance(x, Fold) and name == "name" else self.of(value)
