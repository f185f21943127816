"""Before C is printed: which tiles need memory, and how they lie there.

Tiles that only one strip touches hold a strip's points; key rows that are stored as they are used are pointers into the
cache. What a strip no longer needs gives its memory to what the strip makes next.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .algebra import linear
from .dtypes import DType, Kind, bf16, f32
from .emit_c_plan import (
    POINTS,
    Block,
    Group,
    Guarded,
    Node,
    Product,
    plan_body,
    products_of,
    tiles_of,
    tiles_read,
    walk_nodes,
)
from .expr import Axes, Elem, Tile
from .loops import Alloc, Arg, Kernel, Let, Store, Strip
from .tile import Gemm, Map, Reduce

ALIGNMENT = 64


@dataclass(frozen=True)
class Storage:
    """How a tile lies in scratch memory. `strides`: elements between neighbours along each axis."""

    name: str
    axes: Axes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    elements: int
    local: bool  # holds one strip's points
    offset: int = 0
    pointers: Elem | None = None  # its rows are rows of this tensor, where they are
    stored: DType | None = None  # in this type
    ahead: bool = False  # known for the next key tile as well: tiles of odd numbers lie behind those of even ones

    @property
    def ctype(self) -> str:
        if self.pointers is not None:
            return "const void *"
        return {f32: "float", bf16: "uint16_t"}.get(self.dtype, "int32_t")

    @property
    def bytes(self) -> int:
        one = self.elements * (8 if self.pointers is not None else self.dtype.bits // 8)
        return 2 * one if self.ahead else one

    @property
    def row_bytes(self) -> int:
        """Of one index along all axes but the last."""
        return (self.strides[-2] if len(self.strides) > 1 else self.elements) * self.dtype.bits // 8

    @property
    def element(self) -> DType:
        """What its rows hold in memory."""
        return self.stored or self.dtype

    @property
    def primitives(self) -> str:
        """Which of the primitives take its rows: by the type they multiply in, and the type that is stored."""
        return self.dtype.name if self.element is self.dtype else f"{self.dtype}_{self.element}"

    def stride(self, axis: str) -> int:
        return self.strides[self.axes.index(axis)]


@dataclass(frozen=True)
class Panels:
    """A key-side tile packed for the micro-kernels: columns of a product are its rows (`turned`), or its columns."""

    tile: str
    turned: bool
    offset: int


@dataclass(frozen=True)
class Plan:
    nodes: list[Node]
    storage: dict[str, Storage]
    panels: dict[tuple[str, bool], Panels]
    scratch_bytes: int
    sizes: dict[str, int]  # of tile axes


def plan_kernel(k: Kernel, args: dict[str, Arg], lanes: int, panel: int) -> Plan:
    nodes = plan_body(k.body)
    sizes = {a: n for t in k.tiles for a, n in t.axes}
    strips = _owners(nodes)
    needed = _needing_memory(nodes)
    made = {
        t.name: _storage(t, strips.get(t.name), sizes, lanes, _pointers(t.name, nodes, args), args)
        for t in k.tiles
        if t.name in needed
    }
    for n in walk_nodes(nodes):
        if isinstance(n, Block):
            early = {t for g in addresses(n.body, made) for t in g.writes}
            made |= {t: replace(made[t], ahead=True) for t in early if t in made}
    offset = 0
    storage: dict[str, Storage] = {}
    for shared in share_memory(nodes, made):
        storage |= {t.name: replace(t, offset=offset) for t in shared}
        offset += _aligned(max(t.bytes for t in shared))
    panels: dict[tuple[str, bool], Panels] = {}
    for g in products_of(nodes):
        turned = g.over == g.b.axes[-1]
        if (g.b.name, turned) not in panels:
            panels[g.b.name, turned] = Panels(g.b.name, turned, offset)
            offset += _aligned(_panel_bytes(g.b, turned, sizes, panel))
    return Plan(nodes, storage, panels, offset, sizes)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def panel_words(depth: int, dtype: DType) -> int:
    """32-bit words that a depth takes: bfloat16 lies in pairs."""
    return -(-depth // 2) if dtype is bf16 else depth


def _panel_bytes(b: Tile, turned: bool, sizes: dict[str, int], panel: int) -> int:
    rows, width = (sizes[a] for a in b.axes)
    columns, depth = (rows, width) if turned else (width, rows)
    return 4 * (-(-columns // panel)) * panel * panel_words(depth, b.dtype)


def _owners(nodes: list[Node]) -> dict[str, int]:
    """Tiles that strips alone touch, each writing them before it reads them: they hold a strip's points, which is how
    many.
    """
    used: dict[str, set[int | None]] = {}
    first_read: set[str] = set()

    def visit(inside: list[Node], strip: Strip | None, known: set[str]) -> None:
        for n in inside:
            if isinstance(n, Block):
                own = isinstance(n.stmt, Strip)
                visit(n.body, n.stmt if isinstance(n.stmt, Strip) else strip, set() if own else known)
                continue
            reads, writes = tiles_of(n)
            early = _read_first(n) if isinstance(n, Group) else reads
            first_read.update(early - known)
            known |= reads | writes
            for t in reads | writes:
                used.setdefault(t, set()).add(None if strip is None else strip.points)

    visit(nodes, None, set())
    owned = {t: points for t, found in used.items() if t not in first_read for points in found if len(found) == 1}
    return {t: points for t, points in owned.items() if points is not None}


def _read_first(g: Group) -> set[str]:
    """Tiles that a group reads before it writes them."""
    written: set[str] = set()
    out: set[str] = set()
    for i in g.items:
        out |= tiles_read(i.stmt) - written
        if not isinstance(i.stmt, Store):
            written.add(i.stmt.dst.name)
    return out


def _needing_memory(nodes: list[Node]) -> set[str]:
    """All but those that are written and read in one group only, in that order."""
    users: dict[str, list[Node]] = {}
    needed: set[str] = set()
    for n in walk_nodes(nodes):
        reads, writes = tiles_of(n)
        for t in reads | writes:
            users.setdefault(t, []).append(n)
        if isinstance(n, Group):
            needed |= _read_first(n)
            needed |= {i.stmt.dst.name for i in n.items if isinstance(i.stmt, Reduce | Gemm)}
        else:
            needed |= reads | writes
    return needed | {t for t, ns in users.items() if len({id(n) for n in ns}) > 1}


def _storage(
    t: Alloc, points: int | None, sizes: dict[str, int], lanes: int, pointers: Elem | None, args: dict[str, Arg]
) -> Storage:
    axes, extents = tuple(a for a, _ in t.axes), [n for _, n in t.axes]
    if pointers is not None:
        return Storage(
            t.name,
            axes,
            tuple(extents),
            (1, 0),
            t.dtype,
            extents[0] + lanes,
            False,
            pointers=pointers,
            stored=args[pointers.tensor].dtype,
        )
    wide = 2 * lanes if t.dtype is bf16 else lanes
    padded = list(extents)
    if axes and axes[-1] not in POINTS:
        padded[-1] = -(-padded[-1] // wide) * wide
    strides = [1] * len(axes)
    for n in range(len(axes) - 2, -1, -1):
        strides[n] = strides[n + 1] * padded[n + 1]
    total = strides[0] * padded[0] if axes else 1
    local = points is not None and "row" in axes
    if local and points is not None:
        if "head" in axes:
            total = strides[axes.index("head")] * points
        else:
            total = strides[axes.index("row")] * max(1, points // sizes.get("head", 1))
    return Storage(t.name, axes, tuple(extents), tuple(strides), t.dtype, total + wide, local)


def _pointers(name: str, nodes: list[Node], args: dict[str, Arg]) -> Elem | None:
    """A read that fills a tile of rows, if products alone use it and need no other type than is stored.

    Each source of keys may fill it with rows of its own, of one type.
    """
    writers = [i.stmt for n in walk_nodes(nodes) if isinstance(n, Group) for i in n.items if name in _written(i)]
    readers = [n for n in walk_nodes(nodes) if name in tiles_of(n)[0]]
    if not all(isinstance(n, Product) and n.stmt.b.name == name for n in readers):
        return None
    reads = [_row_read(s, args) if isinstance(s, Map) else None for s in writers]
    stored = {args[e.tensor].dtype for e in reads if e is not None}
    return reads[0] if reads and None not in reads and len(stored) == 1 else None


def _row_read(s: Map, args: dict[str, Arg]) -> Elem | None:
    """The read of whole rows that a tile is."""
    e = s.expr
    if not isinstance(e, Elem) or len(s.dst.axes) != 2:
        return None
    held = bf16 if s.dst.dtype is bf16 else f32
    feature = s.dst.axes[1]
    *outer, last = e.index
    stored = args[e.tensor].dtype
    taken = stored is held or (held is f32 and stored.kind is Kind.FLOAT)
    plain = taken and not any(feature in i.axes for i in (*outer, e.ok))
    return e if plain and linear(last, feature) is not None else None


def _written(i: Guarded) -> set[str]:
    return set() if isinstance(i.stmt, Store) else {i.stmt.dst.name}


def addresses(body: list[Node], tiles: Mapping[str, Storage]) -> list[Group]:
    """What a loop over key tiles begins with to know where a tile's rows are, if that is all it does: page numbers,
    entries of a list, pointers. These can be had for the next tile, whose rows are then prefetched.
    """
    out: list[Group] = []
    known: set[str] = set()
    for n in itertools.dropwhile(lambda n: isinstance(n, Let), body):
        if not isinstance(n, Group) or not all(_is_address(i, tiles, known | n.writes) for i in n.items):
            break
        out.append(n)
        known |= n.writes
    pointers = any(t in tiles and tiles[t].pointers is not None for t in known)
    return out if pointers else []


def _is_address(i: Guarded, tiles: Mapping[str, Storage], known: set[str]) -> bool:
    if not isinstance(i.stmt, Map) or i.guard is not None or not tiles_read(i.stmt) <= known:
        return False
    t = i.stmt.dst
    return (t.axes == ("key",) and t.dtype.kind is Kind.INT) or (t.name in tiles and tiles[t.name].pointers is not None)


# ---- memory that tiles share -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Life:
    """When a tile is in use, in one strip: from node to node of its body."""

    first: int
    last: int


def share_memory(nodes: list[Node], tiles: Mapping[str, Storage]) -> list[list[Storage]]:
    """Tiles that take turns in the same memory, so that a strip's stay in the first-level cache.

    Only tiles that hold a strip's points take turns. One may even replace another in the loop that reads the other for
    the last time, where both lie in the order in which that loop goes.
    """
    strips = [n.body for n in walk_nodes(nodes) if isinstance(n, Block) and isinstance(n.stmt, Strip)]
    lives = [_lives(body) for body in strips]
    slots: list[list[Storage]] = []
    for t in tiles.values():
        found = None
        if t.local:
            found = next(
                (s for s in slots if s[0].local and all(_take_turns(x, t, strips, lives) for x in s)),
                None,
            )
        if found is None:
            slots.append([t])
        else:
            found.append(t)
    return slots


def _lives(body: list[Node]) -> dict[str, _Life]:
    out: dict[str, _Life] = {}
    for at, n in enumerate(body):
        for inner in walk_nodes([n]):
            for t in set().union(*tiles_of(inner)):
                out[t] = _Life(out[t].first if t in out else at, at)
    return out


def _take_turns(a: Storage, b: Storage, strips: list[list[Node]], lives: list[dict[str, _Life]]) -> bool:
    for body, life in zip(strips, lives, strict=True):
        if a.name not in life or b.name not in life:
            continue
        before, after = (a, b) if life[a.name].first < life[b.name].first else (b, a)
        end, start = life[before.name].last, life[after.name].first
        if end > start or (end == start and not _replaces(before, after, body[end])):
            return False
    return True


def _replaces(before: Storage, after: Storage, n: Node) -> bool:
    """Whether a loop may write one tile where it reads the other: never ahead of what it has yet to read."""
    if not isinstance(n, Group) or n.over not in (None, n.axes[-1]) or n.axes[-1] in POINTS:
        return False
    if before.axes != n.axes or after.axes != n.axes or before.row_bytes < after.row_bytes:
        return False
    reads = [at for at, i in enumerate(n.items) if before.name in tiles_read(i.stmt)]
    writes = [at for at, i in enumerate(n.items) if after.name in _written(i)]
    return bool(reads) and max(reads) <= min(writes)
