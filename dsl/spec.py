"""The traced operator: parameters, key sources, folds over keys, named outputs. No sizes, no schedule, no target."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from .dtypes import DType
from .expr import ALWAYS, Axes, Coord, Expr, FoldResult, KeyField, Param, Selected, children, walk
from .source import Loc

# Names that loop nests use for their own scalars and tensors; neither a parameter nor a tile may take one.
_NEST_NAMES = re.compile(
    r"tile|head_block|part|seq|batch|total_rows|row0|n_rows|r0|r1|past|num_keys|q0|q1|head0|kv_head|k0|p|offsets"
    r"|row_lo|row_hi|first|share|share_lo|share_hi|(lo|hi|kt|u|start|size|page|entry|sees|seen|whole_lo|whole_hi|input|keys|order|column|window"
    r"|ra|rb|c_lo|c_hi|w_lo|w_hi)\d\w*|part_\w+|\w+_bfloat16"
)


def is_reserved(name: str) -> bool:
    """Whether a loop nest may use this name for something of its own."""
    return _NEST_NAMES.fullmatch(name) is not None


class ParamKind(Enum):
    TENSOR = "tensor"  # a captured tensor, loaded once per tile or addressed by expressions
    PAGED = "paged"  # a paged cache: table, lengths, and fields "k", "v" with optional scales
    SCALAR = "scalar"  # a run-time number


@dataclass(frozen=True)
class Declared:
    """One run-time parameter. A dtype of None is bound when the operator is compiled."""

    name: str
    kind: ParamKind
    axes: Axes
    dtype: DType | None = None
    value_axes: Axes = ()  # of a paged leaf's "v"; the key's axes unless declared narrower


@dataclass(frozen=True)
class Range:
    """Contiguous key positions of one leaf, seen by a row where `where` holds.

    With `pool` > 1 the leaf holds one key per pool of that many consecutive tokens; `where` is asked of a pool's last
    token, and only whole pools are keys.
    """

    leaf: str
    where: Expr
    pool: int = 1
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Listed:
    """Entries of one leaf that each row lists; a negative index is an unused slot.

    `block` > 1: what is listed are blocks of that many consecutive entries. Those listed are seen where `where` holds.
    """

    leaf: str
    indices: str  # an integer parameter
    axes: Axes  # its axes: row, perhaps head or kv_head, and last the slots
    block: int = 1
    where: Expr = ALWAYS
    loc: Loc | None = field(default=None, compare=False)


Part = Range | Listed


@dataclass(frozen=True)
class Source:
    """Key rows an operator folds over: the concatenation of its parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class State:
    """A running value of a fold, one per row, head and (for some) value feature."""

    name: str
    axes: Axes
    init: float


@dataclass(frozen=True)
class Fold:
    """A reduction over the keys of a source, traced.

    `step`, `merge` and `finish` are expressions over tiles named after states, over `input0`, `input1`, ... and, in
    merge, over `<state>_other`. `absent[i]` is what input i contributes at a key the row does not see; None where it
    cannot matter.
    """

    name: str
    source: int
    inputs: tuple[Expr, ...]
    absent: tuple[float | None, ...]
    states: tuple[State, ...]
    step: tuple[Expr, ...]
    merge: tuple[Expr, ...]
    finish: tuple[tuple[str, Expr], ...]
    loc: Loc | None = field(default=None, compare=False)

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """Everything it evaluates, in order; an author's reducer may capture values in any of them."""
        return (*self.inputs, *self.step, *self.merge, *(e for _, e in self.finish))


@dataclass(frozen=True)
class Select:
    """The `k` best keys of each row by score: descending, equal scores by ascending key, NaN after all; then none.

    Unlike a fold it wants whole rows of scores, so how they are kept is a matter of lowering.
    """

    source: int
    score: Expr
    k: int
    rank: str  # the axis that counts results
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Probe:
    """A `print` or `breakpoint()` in the author's source: shown values, in order, and where."""

    kind: str
    values: tuple[tuple[str, Expr], ...]
    loc: Loc | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Spec:
    name: str
    params: tuple[Declared, ...]
    sources: tuple[Source, ...]
    outputs: tuple[tuple[str, Expr], ...]
    positions: str | None  # the paged leaf whose lengths define `pos` and `num_keys`
    probes: tuple[Probe, ...] = ()

    @cached_property
    def folds(self) -> tuple[Fold, ...]:
        """Every fold the outputs and probes use, innermost first, each once."""
        found: dict[Fold, None] = {}
        seen: set[Expr] = set()

        def visit(e: Expr) -> None:
            if e in seen:
                return
            seen.add(e)
            for c in children(e):
                visit(c)
            if isinstance(e, FoldResult):
                for x in e.fold.expressions:
                    visit(x)
                found.setdefault(e.fold)

        for _, e in (*self.outputs, *(v for p in self.probes for v in p.values)):
            visit(e)
        return tuple(found)

    def param(self, name: str) -> Declared:
        return next(p for p in self.params if p.name == name)

    @cached_property
    def selects(self) -> tuple[Select, ...]:
        """Every selection the outputs use, each once."""
        found = (x.select for _, e in self.outputs for x in walk(e) if isinstance(x, Selected))
        return tuple(dict.fromkeys(found))

    @cached_property
    def nodes(self) -> tuple[Expr, ...]:
        """Every expression under the outputs and probes, those of folds included, each once."""
        found: dict[Expr, None] = {}

        def visit(e: Expr) -> None:
            if e in found:
                return
            found[e] = None
            for c in (*children(e), *(e.fold.expressions if isinstance(e, FoldResult) else ())):
                visit(c)

        for _, e in (*self.outputs, *(v for p in self.probes for v in p.values)):
            visit(e)
        return tuple(found)

    @cached_property
    def fixed_sizes(self) -> dict[str, int]:
        """Sizes that the declaration itself gives to axes: of slices of key rows, of selections."""
        slices = {
            a: e.size
            for e in self.nodes
            if isinstance(e, KeyField) and e.size is not None
            for a in e.axes
            if a != "key"
        }
        return {**slices, **{s.rank: s.k for s in self.selects}}

    @cached_property
    def tile_axes(self) -> frozenset[str]:
        """Axes, other than row and key, that some tile has: their sizes are compiled in."""
        return frozenset(a for e in self.nodes for a in e.axes if a not in ("row", "key"))

    @cached_property
    def scales_read(self) -> frozenset[str]:
        """Paged caches of whose key rows the one scale is read."""
        fields = [e for e in self.nodes if isinstance(e, KeyField) and e.name == "scale"]
        return frozenset(e.leaf or part.leaf for e in fields for part in self.sources[e.source].parts)

    @cached_property
    def shared_by_heads(self) -> str | None:
        """An output without a head axis that depends on the key-value head, which there may only be one of."""

        def depends(e: Expr) -> bool:
            match e:
                case KeyField() | Coord("kv_head"):
                    return True
                case Param(_, own):
                    return "kv_head" in own
                case _:
                    return False

        return next((n for n, e in self.outputs if "head" not in e.axes and any(map(depends, walk(e)))), None)

    @cached_property
    def static_axes(self) -> frozenset[str]:
        """Axes whose sizes are compiled in: those of tiles, and of rows of caches."""
        rows = {a for p in self.params if p.kind is ParamKind.PAGED for a in (*p.axes, *p.value_axes)}
        return self.tile_axes | rows

    @cached_property
    def fingerprint(self) -> str:
        """Depends only on what the operator means: not on comments, names of locals, files, or its own name."""
        from .fingerprint import fingerprint

        return fingerprint(self)
