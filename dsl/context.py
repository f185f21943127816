"""What the passes read besides the program: the operator, its binding and schedule, and the analysed key ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .expr import Iota, Var, add, less
from .schedule import Binding, Schedule
from .spec import Part, Spec
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
        from .bounds import analyse  # here, because SymPy takes longer to import than everything else together

        parts = tuple(part for p in tp.passes for part in p.source.parts)
        return Context(spec, tp, binding, schedule, parts, tuple(analyse(p.where) for p in parts))

    @property
    def heads(self) -> int:
        return self.schedule.heads_per_tile(self.binding)

    def part_of(self, loop: str) -> int:
        """The part a loop label belongs to: labels are "<part>" or "<part>_<interval>"."""
        return int(loop.split("_")[0])

    def labels(self, part: int) -> tuple[str, ...]:
        """One label per interval of a part."""
        n = len(self.intervals[part])
        return (str(part),) if n == 1 else tuple(f"{part}_{i}" for i in range(n))
