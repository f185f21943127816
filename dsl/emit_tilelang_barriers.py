"""Where all threads of a block wait for each other, so that shared tiles are read after they were written.

TileLang sets barriers itself, but they do not hold everywhere: one in a loop is missing where the loop is not entered;
in code that only some threads run, those alone wait, and not the others that wrote; and where it finds no place for one
it gives up. So the text has every barrier that the nest needs. TileLang sees them, and adds none. Loops whose loads run
ahead are left to it, as it moves their statements: there only sums that go through shared memory have one of ours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .expr import Tile, walk
from .loops import Alloc, Stmt
from .rewrite import Body, expressions, statements, written


@dataclass(frozen=True)
class Touched:
    """Shared tiles that threads may have read, and written, since all last waited for each other."""

    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()

    def __or__(self, other: Touched) -> Touched:
        return Touched(self.read | other.read, self.written | other.written)

    def conflicts(self, later: Touched) -> bool:
        """Whether what comes later must wait."""
        return bool(self.written & (later.read | later.written) or self.read & later.written)


class Barriers:
    """Follows the statements of a kernel in the order they are printed."""

    def __init__(self, tiles: Collection[Alloc]) -> None:
        self._shared = frozenset(t.name for t in tiles if t.scope == "shared")
        self.since = Touched()

    def touched(self, body: Body) -> Touched:
        """What statements read and write of shared tiles, bodies included."""
        found = list(statements(body))
        read = {x.name for s in found for e in expressions(s) for x in walk(e) if isinstance(x, Tile)}
        return Touched(frozenset(read) & self._shared, frozenset(n for s in found for n in written(s)) & self._shared)

    def needed(self, run: Collection[Stmt]) -> bool:
        """Whether a barrier must stand before statements that share a loop; they count as printed from then on."""
        now = self.touched(tuple(run))
        wait = self.since.conflicts(now)
        self.since = now if wait else self.since | now
        return wait

    def reached(self) -> None:
        """All threads have waited for each other."""
        self.since = Touched()
