"""Binding: the compile-time facts of a call. Schedule: how a tile program is cut into tiles, as data.

One rule gives a schedule its meaning: a tile may hold several points of a row-side axis (row, head) only if no key-side
tile depends on that axis. Keys of a range depend on the sequence and the key-value head, so rows of one sequence and
heads of one group may share a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import DType
from .errors import IllegalSchedule
from .spec import Listed
from .tile import Gemm, Reduce, TileProgram


@dataclass(frozen=True)
class LeafBinding:
    """What is fixed about a paged cache when an operator is compiled."""

    page_size: int
    kv_heads: int
    dtype: DType
    values: bool = True  # False: keys only, and the key row is the value row
    granularity: int | None = None  # values per scale; None: unscaled


@dataclass(frozen=True)
class Binding:
    """Sizes of static axes, dtypes and cache formats. Nothing here changes from call to call of one model."""

    sizes: tuple[tuple[str, int], ...]  # "head", and every feature axis that tiles have
    dtypes: tuple[tuple[str, DType], ...]  # of tensor parameters and outputs
    leaves: tuple[tuple[str, LeafBinding], ...] = ()

    def size(self, axis: str) -> int:
        return dict(self.sizes)[axis]

    def dtype(self, name: str) -> DType:
        return dict(self.dtypes)[name]

    def leaf(self, name: str) -> LeafBinding:
        return dict(self.leaves)[name]

    @property
    def heads(self) -> int:
        return dict(self.sizes).get("head", 1)

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // next((leaf.kv_heads for _, leaf in self.leaves), 1)


@dataclass(frozen=True)
class Schedule:
    """Tile sizes and the shape of the loops. Legal schedules differ in cost, never in meaning beyond rounding."""

    rows: int = 16  # query rows of one sequence in a tile
    heads: int | None = None  # query heads of one group in a tile; None: the whole group
    keys: int = 128  # keys in a tile
    partitions: int = 1  # parts the keys of a row tile are cut into, merged by a second kernel
    start: str = "aligned"  # aligned: key tiles start at multiples of their size | first: at the first key in sight
    strip: int = 0  # (row, head) points that a key tile is worked through at a time; 0: all of them
    products: str = "float32"  # what operands of matrix products are rounded to; sums are float32
    masks: str = "branch"  # branch: one loop, masked where not wholly seen | split: edge and middle loops | always
    fetch: str = "rows"  # rows: key rows one by one | pages: of tiles wholly seen, one copy out of a page
    stages: int = 0  # key tiles loaded ahead of the one that is computed with; on GPUs
    threads: int = 0  # that share a tile, on GPUs; 0: four warps

    def heads_per_tile(self, binding: Binding) -> int:
        return self.heads or binding.group


STARTS = ("aligned", "first")
MASKS = ("branch", "split", "always")
PRODUCTS = ("float32", "bfloat16", "float16")
FETCHES = ("rows", "pages")


def check_schedule(tp: TileProgram, binding: Binding, schedule: Schedule) -> None:
    """Raise IllegalSchedule, naming the field, unless the schedule has a meaning for this operator and binding."""

    def refuse(field: str, problem: str) -> None:
        raise IllegalSchedule(field=field, value=repr(getattr(schedule, field)), problem=problem)

    for name in ("rows", "heads", "keys", "partitions"):
        value = getattr(schedule, name)
        if value is None and name == "heads":
            continue
        if type(value) is not int:
            refuse(name, "must be an integer")
        elif value < 1:
            refuse(name, "must be at least 1")
    if schedule.start not in STARTS:
        refuse("start", f"must be one of {', '.join(STARTS)}")
    if schedule.masks not in MASKS:
        refuse("masks", f"must be one of {', '.join(MASKS)}")
    if schedule.products not in PRODUCTS:
        refuse("products", f"must be one of {', '.join(PRODUCTS)}")
    if schedule.products != "float32" and schedule.keys % 2:
        refuse("keys", f"must be even, as products in {schedule.products} take keys in pairs")
    for name in ("strip", "stages", "threads"):
        value = getattr(schedule, name)
        if type(value) is not int or value < 0:
            refuse(name, "must be an integer, 0 or more")
    if schedule.fetch not in FETCHES:
        refuse("fetch", f"must be one of {', '.join(FETCHES)}")
    if schedule.fetch == "pages":
        if schedule.masks != "split" or schedule.start != "aligned":
            refuse("fetch", "pages are copied where key tiles are wholly seen: it needs masks=split and start=aligned")
        sizes = [leaf.page_size for _, leaf in binding.leaves]
        if all(n % schedule.keys for n in sizes):
            listed = ", ".join(map(str, sizes)) or "none"
            refuse("fetch", f"a key tile must lie in one page: keys={schedule.keys} divides no page size ({listed})")
    heads = schedule.heads_per_tile(binding)
    if binding.group % heads:
        refuse("heads", f"does not divide the group of {binding.group} query heads that share a key-value head")
    statements = [*(s for p in tp.passes for s in (*p.step, *p.merge, *p.finish)), *tp.epilogue]
    statements += [s for p in tp.selects for s in p.step]
    if heads != binding.heads and any(isinstance(s, Reduce | Gemm) and s.over == "head" for s in statements):
        refuse("heads", f"a reduction over heads needs all {binding.heads} heads in one tile")
    if schedule.rows > 1 and any(isinstance(part, Listed) for source in tp.sources for part in source.parts):
        refuse("rows", "listed entries differ from row to row, so a tile holds one row")
    if heads > 1 and any(isinstance(p, Listed) and "head" in p.axes for s in tp.sources for p in s.parts):
        refuse("heads", "listed entries differ from head to head, so a tile holds one head")
    if schedule.partitions > 1 and tp.selects:
        refuse("partitions", "a selection wants whole rows of scores")
    kv_heads = max((leaf.kv_heads for _, leaf in binding.leaves), default=1)
    for s in (s for p in tp.passes for s in p.states) if schedule.partitions > 1 else ():
        if "row" not in s.axes or ("head" not in s.axes and kv_heads > 1):
            refuse("partitions", f"state {s.name!r} has axes [{', '.join(s.axes)}]; to be kept it needs row and head")
    if schedule.partitions > 1 and len(tp.passes) > 1:
        refuse("partitions", f"the operator walks its keys {len(tp.passes)} times; partitions need one walk")
