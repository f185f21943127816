"""Statements over tiles, and the tile program: what happens per key tile, with no sizes, loops or targets."""

from __future__ import annotations

from dataclasses import dataclass, field

from .expr import Expr, KeyField, Param, Tile
from .source import Loc
from .spec import Source, State


@dataclass(frozen=True)
class Map:
    """dst = an elementwise expression over tiles, scalars and coordinates."""

    dst: Tile
    expr: Expr
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Gemm:
    """dst (+)= sum over one axis of a * b, accumulated in float32. Other axes of a and b are those of dst."""

    dst: Tile
    a: Tile
    b: Tile
    over: str
    accumulate: bool = False
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Reduce:
    """dst = "sum" or "max" of src over one axis."""

    dst: Tile
    src: Tile
    kind: str
    over: str
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Mask:
    """dst = absent where the row does not see the key. Becomes a Map once the loop over a part's keys is known."""

    dst: Tile
    absent: float
    loop: str = ""
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Show:
    """`print` or `breakpoint()` in the author's source: the interpreter stops here; other targets refuse it by name."""

    kind: str
    values: tuple[tuple[str, Expr], ...]
    loc: Loc | None = field(default=None, compare=False)


TileStmt = Map | Gemm | Reduce | Mask | Show


def field_tile(f: KeyField) -> Tile:
    """The tile that holds a field of a key tile's rows."""
    part = "" if f.size is None else f"_{f.start}_{f.size}"
    return Tile(f"keys{f.source}_{f.name}" + ("" if f.leaf is None else f"_{f.leaf}") + part, f.axes)


@dataclass(frozen=True)
class KeyPass:
    """One walk over the keys of a source: all folds over that source that do not need each other's results."""

    source: Source
    fields: tuple[KeyField, ...]  # fields of key rows the step reads
    states: tuple[State, ...]
    step: tuple[TileStmt, ...]  # per key tile
    merge: tuple[TileStmt, ...]  # states (+)= the states of another partition, named "<state>_other"
    finish: tuple[TileStmt, ...]  # once, after the keys: the results of the folds


@dataclass(frozen=True)
class SelectPass:
    """One walk over the keys of a source that keeps a number per key, and the choice of the best afterwards."""

    source: Source
    fields: tuple[KeyField, ...]
    step: tuple[TileStmt, ...]  # per key tile
    order: Tile  # an integer per key: larger is better, equal is equal; NOT_A_CANDIDATE where unseen
    k: int
    rank: str
    results: tuple[tuple[str, str], ...]  # output name, "indices" or "values"


NOT_A_CANDIDATE = -(1 << 31)


@dataclass(frozen=True)
class TileProgram:
    operands: tuple[Param, ...]  # captured tensors read at their own axes: loaded once per tile
    passes: tuple[KeyPass, ...]
    epilogue: tuple[TileStmt, ...]  # outputs from results and operands
    outputs: tuple[tuple[str, Tile], ...]  # of folds and operands
    selects: tuple[SelectPass, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """The source of every walk over keys, in order."""
        return (*(p.source for p in self.passes), *(s.source for s in self.selects))
