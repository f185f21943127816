"""What the passes read besides the program: the operator, its binding and schedule, and the analysed key ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from .algebra import add, at_least, floordiv, less, mul, sub, substitute
from .expr import Const, Coord, Expr, Iota, Var
from .schedule import Binding, Schedule
from .spec import Listed, Part, Range, Spec
from .tile import TileProgram

if TYPE_CHECKING:
    from .bounds import Interval
    from .gpu import Gpu

ROW, HEAD, KEY = Iota("row"), Iota("head"), Iota("key")
ROW_OK = less(add(Var("r0"), ROW), Var("r1"))
NO_ROWS = at_least(Var("r0"), Var("r1"))
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
    gpu: Gpu | None = None  # the family of targets: processors with caches, or GPUs

    @staticmethod
    def of(spec: Spec, tp: TileProgram, binding: Binding, schedule: Schedule, gpu: Gpu | None = None) -> Context:
        parts = tuple(part for source in tp.sources for part in source.parts)
        return Context(
            spec,
            tp,
            binding,
            schedule,
            parts,
            tuple(_analysed(p, spec) for p in parts),
            gpu,
        )

    @property
    def heads(self) -> int:
        return self.schedule.heads_per_tile(self.binding)

    def grid(self, rows: int, heads: int) -> tuple[tuple[str, Expr], ...]:
        """Row tiles, of which each sequence may waste one, and blocks of heads."""
        total = sub(Var("row_hi"), Var("row_lo")) if self.tp.selects else Var("total_rows")
        tiles = add(floordiv(total, rows), Var("batch"))
        return ("tile", tiles), ("head_block", Const(self.binding.heads // heads))

    def threads(self, gpu: Gpu) -> int:
        """That share a grid point: the schedule's, else four warps."""
        return self.schedule.threads or 4 * gpu.warp

    def part_of(self, loop: str) -> int:
        """The part a loop label belongs to: labels are "<part>" or "<part>_<interval>"."""
        return int(loop.split("_")[0])

    def key_count(self, part: Part) -> Expr:
        """How many keys of a sequence a part has: of a range what its leaf holds, of a list its slots."""
        match part:
            case Range(leaf, _, pool):
                return floordiv(self.entry_count(leaf), pool)
            case Listed(_, indices, axes, block):
                return mul(Var(f"{indices}_{axes[-1]}"), block)
            case _:
                assert_never(part)

    def entry_count(self, leaf: str) -> Expr:
        """Rows of a sequence in a leaf: lengths count tokens before the call where they define positions, else all."""
        return Var("num_keys") if leaf == self.spec.positions else Var(f"{leaf}_count")

    def labels(self, part: int) -> tuple[str, ...]:
        """One label per interval of a part."""
        n = len(self.intervals[part])
        return (str(part),) if n == 1 else tuple(f"{part}_{i}" for i in range(n))


def _analysed(part: Part, spec: Spec) -> tuple[Interval, ...]:
    from .bounds import LISTED, analyse  # here, because SymPy takes longer to import than everything else together

    return analyse(seen_by(part), own_keys=part.leaf == spec.positions) if isinstance(part, Range) else LISTED


def seen_by(part: Range) -> Expr:
    """A range's predicate, of pool indices instead of token positions."""
    key = Coord("key", ("key",))
    return substitute(part.where, {key: add(mul(key, part.pool), part.pool - 1)})
