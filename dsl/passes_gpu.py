"""Passes for GPUs: sizes that matrix units take, where tiles lie, loads ahead of what is computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

from .algebra import both, less, rebuild, substitute, where
from .context import Context
from .dtypes import Kind, f32
from .expr import Const, Elem, Expr, Iota, Op, Tile, Var, walk
from .gpu import MATRIX
from .loops import Alloc, Best, For, If, Kernel, Let, Program, Stmt, Store
from .passes_strip import is_product
from .rewrite import Body, map_expressions, rewrite_body, statements, written
from .tile import Gemm, Map, Reduce

POINTS = ("row", "head")


def on_matrix_units(g: Gemm) -> bool:
    """Products of narrow tiles; float32 has none that keep its precision, and is summed by ordinary arithmetic."""
    return is_product(g) and g.a.dtype is not f32 and g.a.dtype is g.b.dtype


# ---- reads -----------------------------------------------------------------------------------------------------------


def share_reads(program: Program, cx: Context) -> Program:
    """Read from memory once what many points of a tile need.

    before: seen[row, key] = .. document(q0 + i_row) == document(k0 + i_key) ..
    after:  at0[row] = document(q0 + i_row); at1[key] = document(k0 + i_key); seen[row, key] = .. at0 == at1 ..
    Elements that vary over fewer axes than the tile they are used for, or that several tiles are made of. Those of rows
    then move out of the key loop, and one for a whole tile is a scalar before it.
    """
    if cx.gpu is None:
        return program
    return replace(program, kernels=tuple(replace(k, body=_Reads().kernel(k.body)) for k in program.kernels))


class _Reads:
    """Tiles of elements, numbered over a kernel; `known` are those that hold at a place of a body."""

    def __init__(self) -> None:
        self._count = 0

    def kernel(self, body: Body) -> Body:
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, For):
                made: dict[Expr, Expr] = {}
                for x in _scalars(s):
                    name = self._name(x.tensor)
                    out.append(Let(name, x))
                    made[x] = Var(name, x.dtype)
                s = replace(s, body=_substituted(s.body, made))
            out.append(s)
        return self._body(tuple(out), {})

    def _name(self, tensor: str) -> str:
        self._count += 1
        return f"{tensor}_at{self._count - 1}"

    def _body(self, body: Body, known: dict[Expr, Tile]) -> Body:
        out: list[Stmt] = []
        known = dict(known)
        users = Counter(x for s in statements(body) if isinstance(s, Map) for x in walk(s.expr) if isinstance(x, Elem))
        for s in body:
            match s:
                case For() | If():
                    out.append(replace(s, body=self._body(s.body, known)))
                case Map(dst, e):
                    for x in walk(e):
                        if not isinstance(x, Elem) or x in known or not _tellable(x):
                            continue
                        if set(x.axes) < set(dst.axes) or (users[x] > 1 and x != e):
                            known[x] = Tile(self._name(x.tensor), x.axes, x.dtype)
                            out.append(Map(known[x], x, s.loc))
                    out.append(replace(s, expr=substitute(e, dict(known))))
                case _:
                    out.append(s)
        return tuple(out)


def _tellable(x: Elem) -> bool:
    """Whether a tile can stand for an element: it is a number, and found without tiles, which may change."""
    return bool(x.axes) and x.dtype.kind is not Kind.BOOL and not any(isinstance(y, Tile) for y in walk(x))


def _scalars(loop: For) -> list[Elem]:
    """Elements that a loop reads for a whole tile, and that no iteration changes."""
    inside = {loop.var, *(n for s in statements(loop.body) for n in written(s))}
    read = (x for s in statements(loop.body) if isinstance(s, Map) for x in walk(s.expr) if isinstance(x, Elem))
    names = {x: {y.name for y in walk(x) if isinstance(y, Var | Tile)} for x in dict.fromkeys(read) if not x.axes}
    return [x for x, used in names.items() if x.dtype.kind is not Kind.BOOL and not used & inside]


def _substituted(body: Body, table: dict[Expr, Expr]) -> Body:
    return rewrite_body(body, lambda s: (map_expressions(s, lambda e: substitute(e, table)),))


# ---- sizes -----------------------------------------------------------------------------------------------------------


def pad_features(program: Program, cx: Context) -> Program:
    """Give feature axes that matrix units walk a size that they take.

    before: k[key, dim] = cache(.., i_dim); s = gemm(q[.., dim], k[key, dim], over=dim)     and dim is 24
    after:  k[key, dim] = cache(.., i_dim if i_dim < 24); ..                                and dim is 32
    What is loaded is zero there, what is computed and then summed is made so, and nothing is stored from there.
    """
    return replace(program, kernels=tuple(_padded(k) for k in program.kernels))


def _padded(k: Kernel) -> Kernel:
    sizes = {a: n for t in k.tiles for a, n in t.axes}
    products = [s for s in statements(k.body) if isinstance(s, Gemm) and on_matrix_units(s)]
    axes = dict.fromkeys(a for g in products for a in (*g.a.axes, *g.b.axes) if a not in (*POINTS, "key"))
    short = {a: sizes[a] for a in axes if sizes[a] % MATRIX}
    if not short:
        return k
    zero = _zero_past_the_end(k.body)

    def guarded(e: Expr) -> Expr:
        e = rebuild(e, guarded)
        if not isinstance(e, Elem):
            return e
        inside = [less(Iota(a), n) for a, n in short.items() if any(a in i.axes for i in e.index)]
        return replace(e, ok=both(e.ok, *inside))

    def lower(s: Stmt) -> Body:
        s = map_expressions(s, guarded)
        match s:
            case Store(axes=axes):
                return (replace(s, ok=both(s.ok, *(less(Iota(a), n) for a, n in short.items() if a in axes))),)
            case Gemm(_, a, b, over) if over in short:
                return (*(_cleared(t, over, short[over], 0.0) for t in (a, b) if t.name not in zero), s)
            case Reduce(_, src, kind, over) if over in short:
                return (_cleared(src, over, short[over], 0.0 if kind == "sum" else -float("inf")), s)
            case _:
                return (s,)

    tiles = tuple(
        replace(t, axes=tuple((a, -(-n // MATRIX) * MATRIX if a in short else n) for a, n in t.axes)) for t in k.tiles
    )
    return replace(k, body=rewrite_body(k.body, lower), tiles=tiles)


def _zero_past_the_end(body: Body) -> set[str]:
    """Tiles of what was loaded, and of products of such: zero wherever a load is guarded."""
    writes: dict[str, list[Stmt]] = {}
    for s in statements(body):
        for n in written(s):
            writes.setdefault(n, []).append(s)
    zero: set[str] = set()

    def is_zero(e: Expr) -> bool:
        match e:
            case Elem():
                return True
            case Tile(name):
                return name in zero
            case Op("mul", (a, b)):
                return is_zero(a) and is_zero(b)
            case _:
                return False

    for name, found in writes.items():
        if all(isinstance(s, Map) and is_zero(s.expr) for s in found):
            zero.add(name)
    return zero


def _cleared(t: Tile, axis: str, size: int, identity: float) -> Map:
    value = Const(identity) if t.dtype.kind is Kind.FLOAT else Const(int(identity) if identity == 0 else -(1 << 31))
    return Map(t, where(less(Iota(axis), size), t, value))


# ---- places ----------------------------------------------------------------------------------------------------------


def place_tiles(program: Program, cx: Context) -> Program:
    """Say where tiles lie, and how many threads and points a kernel has.

    before: tile q[row:3, head:5, dim:64]
    after:  tile q[row:3, head:5, dim:64] shared; 128 threads; 64 points
    Sums over points are of tiles that every thread reads, as are operands that matrix units take from memory; what is
    computed for (row, head) points stays in registers of the threads that own them, if they can share it evenly.
    """
    gpu = cx.gpu
    assert gpu is not None
    return replace(
        program, kernels=tuple(_placed(k, cx.threads(gpu), cx.threads(gpu) // gpu.warp) for k in program.kernels)
    )


def _placed(k: Kernel, threads: int, warps: int) -> Kernel:
    sizes = {a: n for t in k.tiles for a, n in t.axes}
    count = sizes.get("row", 1) * sizes.get("head", 1)
    products = any(isinstance(s, Gemm) and on_matrix_units(s) for s in statements(k.body))
    quantum = MATRIX * warps if products else 1
    points = -(-count // quantum) * quantum
    owned = [t for t in k.tiles if has_points(_axes(t), sizes)]
    uneven = {t.name for t in owned if points * prod(n for a, n in t.axes if a not in POINTS) % threads and _is_wide(t)}
    shared = _read_by_all(k, sizes) | uneven
    if uneven and not products:  # registers of what is left would have to match no layout in particular
        shared = {t.name for t in k.tiles}
    fragments = {t.name for t in owned} - shared
    tiles = tuple(replace(t, scope="fragment" if t.name in fragments else "shared") for t in k.tiles)
    return replace(k, tiles=tiles, threads=threads, points=points)


def _axes(t: Alloc) -> tuple[str, ...]:
    return tuple(a for a, _ in t.axes)


def _is_wide(t: Alloc) -> bool:
    """Whether a tile has elements beside its points, which threads then divide among themselves."""
    return any(a not in POINTS for a, _ in t.axes)


def has_points(axes: tuple[str, ...], sizes: dict[str, int]) -> bool:
    """Whether a tile has all (row, head) points: axes of one point may be missing, but not both."""
    own = [a for a in POINTS if a in axes]
    return bool(own) and all(a in axes or sizes.get(a, 1) == 1 for a in POINTS)


def _read_by_all(k: Kernel, sizes: dict[str, int]) -> set[str]:
    """Tiles that a thread reads elements of that others have computed, or that are copied from memory as they are."""
    loads = {
        s.dst.name for s in statements(k.body) if isinstance(s, Map) and any(isinstance(e, Elem) for e in walk(s.expr))
    }
    out: set[str] = set()
    for s in statements(k.body):
        match s:
            case Gemm(_, a, b) if on_matrix_units(s):
                out |= {b.name, *({a.name} & loads)}
            case Gemm(_, a, b):
                out |= {a.name, b.name}
            case Reduce(_, src) if not in_registers(s, sizes):
                out.add(src.name)
            case Best(dst):
                out.add(dst.name)
            case _:
                pass
    return out


def in_registers(s: Reduce, sizes: dict[str, int]) -> bool:
    """Whether a reduction runs along a point's own row of elements, which its threads reduce among themselves."""
    return s.over not in POINTS and has_points(s.src.axes, sizes) and len(set(s.src.axes) - set(POINTS)) == 1


# ---- loads ahead -----------------------------------------------------------------------------------------------------


def stage_loads(program: Program, cx: Context) -> Program:
    """Loops over keys load tiles ahead of what is computed, as the schedule says.

    before: for kt: keys = cache(..); scores = ..
    after:  for kt, stages 1: ..
    Not where a loop changes what it has loaded: such tiles cannot be loaded ahead.
    """
    if cx.schedule.stages == 0:
        return program

    def lower(s: Stmt) -> Body:
        if isinstance(s, For) and s.var.startswith("kt") and not _changes_loads(s.body):
            return (replace(s, stages=cx.schedule.stages),)
        return (s,)

    return replace(program, kernels=tuple(replace(k, body=rewrite_body(k.body, lower)) for k in program.kernels))


def _changes_loads(body: Body) -> bool:
    loaded = set[str]()
    for s in statements(body):
        if isinstance(s, Map) and s.dst.name in loaded:
            return True
        if isinstance(s, Map) and is_load(s):
            loaded.add(s.dst.name)
    return False


def is_load(s: Map) -> bool:
    """Whether a tile is filled from memory alone, or from what says where in memory."""
    return any(isinstance(e, Elem) for e in walk(s.expr))
