"""Before C is printed: which statements share a loop.

Statements over the same axes share one loop, in which a tile that nothing else reads is a register.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from .expr import Axes, Expr, Tile, ordered, walk
from .loops import Best, For, If, Let, Search, Store, Strip
from .passes_strip import is_product
from .rewrite import Body, expressions
from .tile import Gemm, Map, Reduce

POINTS = ("row", "head")


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


def walk_nodes(nodes: list[Node]) -> Iterator[Node]:
    for n in nodes:
        yield n
        if isinstance(n, Block):
            yield from walk_nodes(n.body)


def products_of(nodes: list[Node]) -> list[Gemm]:
    return [n.stmt for n in walk_nodes(nodes) if isinstance(n, Product)]


def tiles_of(n: Node) -> tuple[set[str], set[str]]:
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
