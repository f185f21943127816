"""What the passes read besides the program: the operator, its binding and schedule, and the analysed key ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .expr import Coord, Expr, Iota, Var, add, floordiv, less, mul, sub, substitute
from .schedule import Binding, Schedule
from .spec import Part, Range, Spec
from .tile import TileProgram

if TYPE_CHECKING:
    from .bounds import Interval

ROW, HEAD, KEY = Iota("row"), Iota("head"), Iota("key")
ROW_OK = less(add(Var("r0"), ROW), Var("r1"))
GLOBAL_ROW = add(add(Var("row0"), Var("r0")), ROW)
GLOBAL_HEAD = add(Var("head0"), HEAD)
POSITION = add(Var("q0"), ROW)
KEY_POSITION = add(Var("k0"), KEY)


@dataclass(frozen=True)
class Context:
    spec: Spec
    tp: TileProgram
    binding: Binding
    schedule: Schedule
    parts: tuple[Part, ...]  # of all passes, in order
    intervals: tuple[tuple[Interval, ...], ...]  # per part: ranges of keys that some row may see

    @staticmethod
    def of(spec: Spec, tp: TileProgram, binding: Binding, schedule: Schedule) -> Context:
        # here, because SymPy takes longer to import than everything else together
        from .bounds import LISTED, analyse

        parts = tuple(part for source in tp.sources for part in source.parts)
        return Context(
            spec,
            tp,
            binding,
            schedule,
            parts,
            tuple(analyse(seen_by(p)) if isinstance(p, Range) else LISTED for p in parts),
        )

    @property
    def heads(self) -> int:
        return self.schedule.heads_per_tile(self.binding)

    @property
    def row_tiles(self) -> Expr:
        """Row tiles of the grid: each sequence may waste one."""
        rows = sub(Var("row_hi"), Var("row_lo")) if self.tp.selects else Var("total_rows")
        return add(floordiv(rows, self.schedule.rows), Var("batch"))

    def part_of(self, loop: str) -> int:
        """The part a loop label belongs to: labels are "<part>" or "<part>_<interval>"."""
        return int(loop.split("_")[0])

    def key_count(self, part: Part) -> Expr:
        """How many keys of a sequence a range's leaf holds."""
        return floordiv(Var("num_keys"), part.pool) if isinstance(part, Range) else Var("num_keys")

    def labels(self, part: int) -> tuple[str, ...]:
        """One label per interval of a part."""
        n = len(self.intervals[part])
        return (str(part),) if n == 1 else tuple(f"{part}_{i}" for i in range(n))


def seen_by(part: Range) -> Expr:
    """A range's predicate, of pool indices instead of token positions."""
    key = Coord("key", ("key",))
    return substitute(part.where, {key: add(mul(key, part.pool), part.pool - 1)})
