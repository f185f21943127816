"""Before C is printed: which statements share a loop, which tiles need memory, and how they lie there.

Statements over the same axes share one loop, in which a tile that nothing else reads is a register. Tiles that only one
strip touches hold a strip's points; key rows that are stored as they are used are pointers into the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .algebra import linear
from .dtypes import DType, Kind, bf16, f32
from .expr import Axes, Elem, Expr, Tile, ordered, walk
from .loops import Alloc, Arg, Best, For, If, Kernel, Let, Search, Store, Strip
from .passes_strip import is_product
from .rewrite import Body, expressions
from .tile import Gemm, Map, Reduce

POINTS = ("row", "head")
ALIGNMENT = 64


@dataclass(frozen=True)
class Guarded:
    """A statement of a group, and the uniform condition under which it happens."""

    stmt: Map | Reduce | Gemm | Store
    guard: Expr | None = None


@dataclass(eq=False)
class Group:
    """Statements over the same axes, done together at each point. `over`: the axis that its reductions run along."""

    axes: Axes
    items: list[Guarded] = field(default_factory=list)
    over: str | None = None

    @property
    def writes(self) -> set[str]:
        return {i.stmt.dst.name for i in self.items if not isinstance(i.stmt, Store)}


@dataclass(eq=False)
class Block:
    """A loop, branch or strip, with what it does."""

    stmt: For | If | Strip
    body: list[Node]


@dataclass(eq=False)
class Product:
    """A matrix product by the micro-kernels."""

    stmt: Gemm


Node: TypeAlias = Group | Block | Product | Let | Search | Best


def plan_body(body: Body) -> list[Node]:
    """Statements as nodes: neighbours over the same axes grouped, matrix products apart."""
    nodes: list[Node] = []
    for s in body:
        match s:
            case Let() | Search() | Best():
                nodes.append(s)
            case For() | Strip():
                nodes.append(Block(s, plan_body(s.body)))
            case If(cond, inner) if all(isinstance(x, Map) for x in inner):
                for x in inner:
                    assert isinstance(x, Map)
                    _join(nodes, Guarded(x, cond))
            case If():
                nodes.append(Block(s, plan_body(s.body)))
            case Gemm() if is_product(s) and _whole_rows(s):
                nodes.append(Product(s))
            case Map() | Reduce() | Gemm() | Store():
                _join(nodes, Guarded(s))
            case _:
                raise AssertionError(f"{type(s).__name__} has no form in C")
    return nodes


def _whole_rows(g: Gemm) -> bool:
    """Rows of the result are rows of the first operand, and columns are the second operand's other axis."""
    (column,) = (a for a in g.b.axes if a != g.over)
    return g.dst.axes == (*g.a.axes[:-1], column)


def loop_axes(s: Map | Reduce | Gemm | Store) -> Axes:
    match s:
        case Map(dst):
            return dst.axes
        case Store(_, _, _, axes):
            return axes
        case Reduce(_, src):
            return src.axes
        case Gemm(dst, _, _, over):
            return ordered((*dst.axes, over))


def summed_over(s: Map | Reduce | Gemm | Store) -> str | None:
    return s.over if isinstance(s, Reduce | Gemm) else None


def tiles_read(s: Map | Reduce | Gemm | Store) -> set[str]:
    return {x.name for e in expressions(s) for x in walk(e) if isinstance(x, Tile)}


def _join(nodes: list[Node], item: Guarded) -> None:
    """Add a statement to the group before it, where it may share that group's loop."""
    axes, over = loop_axes(item.stmt), summed_over(item.stmt)
    last = nodes[-1] if nodes else None
    if isinstance(last, Group) and last.axes == axes and _compatible(last, item, over):
        last.items.append(item)
        last.over = last.over or over
        return
    nodes.append(Group(axes, [item], over))


def _compatible(group: Group, item: Guarded, over: str | None) -> bool:
    if over is not None and group.over not in (None, over):
        return False
    results = {i.stmt.dst.name for i in group.items if isinstance(i.stmt, Reduce | Gemm)}
    if tiles_read(item.stmt) & results:  # complete only once the loop has ended
        return False
    if isinstance(item.stmt, Reduce | Gemm) and item.stmt.dst.name in {
        n for i in group.items for n in tiles_read(i.stmt)
    }:
        return False  # others of the group still read what it replaces
    mine = {x for e in expressions(item.stmt) for x in walk(e) if isinstance(x, Tile)}
    narrower = {t.name for t in mine if t.axes != group.axes}
    return not narrower & group.writes  # written at this point of the loop only


# ---- storage ---------------------------------------------------------------------------------------------------------


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

    @property
    def ctype(self) -> str:
        if self.pointers is not None:
            return "const void *"
        return {f32: "float", bf16: "uint16_t"}.get(self.dtype, "int32_t")

    @property
    def bytes(self) -> int:
        return self.elements * (8 if self.pointers is not None else self.dtype.bits // 8)

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
    offset = 0
    storage: dict[str, Storage] = {}
    for t in k.tiles:
        if t.name not in needed:
            continue
        strip = strips.get(t.name)
        points = strip.points if strip is not None else None
        made = _storage(t, points, sizes, lanes, _pointers(t.name, nodes, args), args)
        storage[t.name] = replace(made, offset=offset)
        offset += _aligned(made.bytes)
    panels: dict[tuple[str, bool], Panels] = {}
    for g in _products(nodes):
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


def _walk(nodes: list[Node]) -> Iterator[Node]:
    for n in nodes:
        yield n
        if isinstance(n, Block):
            yield from _walk(n.body)


def _products(nodes: list[Node]) -> list[Gemm]:
    return [n.stmt for n in _walk(nodes) if isinstance(n, Product)]


def _tiles_of(n: Node) -> tuple[set[str], set[str]]:
    """Tiles that a node itself reads and writes."""
    match n:
        case Group():
            return {t for i in n.items for t in tiles_read(i.stmt)}, n.writes
        case Product(g):
            return tiles_read(g), {g.dst.name}
        case Best():
            return set(), {n.dst.name}
        case _:
            return set(), set()


def _owners(nodes: list[Node]) -> dict[str, Strip]:
    """Tiles that one strip alone touches, and writes before it reads: they hold its points."""
    used: dict[str, list[Strip | None]] = {}
    first_read: set[str] = set()

    def visit(inside: list[Node], strip: Strip | None) -> None:
        for n in inside:
            if isinstance(n, Block):
                visit(n.body, n.stmt if isinstance(n.stmt, Strip) else strip)
                continue
            reads, writes = _tiles_of(n)
            known = set(used)
            early = _read_first(n) if isinstance(n, Group) else reads
            first_read.update(early - known)
            for t in reads | writes:
                used.setdefault(t, []).append(strip)

    visit(nodes, None)
    return {t: s[0] for t, s in used.items() if s[0] is not None and all(x is s[0] for x in s) and t not in first_read}


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
    for n in _walk(nodes):
        reads, writes = _tiles_of(n)
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
    """The read that fills a tile of rows, if products alone use it and need no other type than is stored."""
    writers = [i.stmt for n in _walk(nodes) if isinstance(n, Group) for i in n.items if name in _written(i)]
    readers = [n for n in _walk(nodes) if name in _tiles_of(n)[0]]
    if len(writers) != 1 or not all(isinstance(n, Product) and n.stmt.b.name == name for n in readers):
        return None
    (s,) = writers
    if not isinstance(s, Map) or not isinstance(s.expr, Elem) or len(s.dst.axes) != 2:
        return None
    held = bf16 if s.dst.dtype is bf16 else f32
    feature = s.dst.axes[1]
    *outer, last = s.expr.index
    stored = args[s.expr.tensor].dtype
    taken = stored is held or (held is f32 and stored.kind is Kind.FLOAT)
    plain = taken and not any(feature in e.axes for e in (*outer, s.expr.ok))
    return s.expr if plain and linear(last, feature) is not None else None


def _written(i: Guarded) -> set[str]:
    return set() if isinstance(i.stmt, Store) else {i.stmt.dst.name}
