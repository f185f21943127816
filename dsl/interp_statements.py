"""The interpreter's statements: a body becomes closures over a `Frame`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import assert_never

import numpy as np
import torch

from .dtypes import Kind, bf16, f16
from .expr import Axes, Elem, Tile, reads
from .interp_liveness import last_reads, shared_names
from .interp_outputs import Do, Hooks, OnStatement, best, show, store
from .interp_values import (
    Array,
    Frame,
    Scope,
    as_numpy,
    as_torch,
    blank,
    compile_value,
)
from .loops import Alloc, Best, Fetch, For, If, KeyLoop, Let, Search, Stmt, Store, Strip
from .rewrite import Body, statements, written
from .tile import Gemm, Map, Mask, Reduce, Show

NARROW = (bf16, f16)  # what a tile may hold besides float32


def blank_tile(tile: Alloc, sizes: Mapping[str, int]) -> Array:
    """A tile before its first write, without storage of its own."""
    shape = (1, *(sizes[a] for a, _ in tile.axes))
    if tile.dtype.kind is Kind.FLOAT:
        return torch.full((1,) * len(shape), blank(Kind.FLOAT), dtype=torch.float32).expand(shape)
    return np.broadcast_to(np.full((1,) * len(shape), blank(Kind.INT), np.int64), shape)


def compile_body(body: Body, scope: Scope, hooks: Hooks) -> tuple[Do, ...]:
    shared = shared_names(body, scope.kernel.body)
    last = last_reads(body)
    out: list[Do] = []
    for n, s in enumerate(body):
        do = _compile(s, scope, hooks, frozenset(last.get(n, frozenset()) - shared))
        out.append(do if hooks.on_statement is None else _traced(s, do, hooks.on_statement))
    return tuple(out)


def _traced(s: Stmt, do: Do, tell: OnStatement) -> Do:
    def run(f: Frame) -> None:
        do(f)
        tell(s, f)

    return run


def _compile(s: Stmt, scope: Scope, hooks: Hooks, consumed: frozenset[str]) -> Do:
    match s:
        case Let():
            return _let(s, scope)
        case Search():
            return _search(s, scope)
        case For():
            return _for(s, scope, hooks)
        case If():
            cond, body = compile_value(s.cond, (), scope).run, compile_body(s.body, scope, hooks)

            def branch(f: Frame) -> None:
                if cond(f):
                    for do in body:
                        do(f)

            return branch
        case Strip():
            return _strip(s, scope, hooks)
        case Map():
            do = _map(s, scope, consumed)
            return do if s.dst.dtype not in NARROW else _rounded(s.dst.name, getattr(torch, s.dst.dtype.name), do)
        case Gemm():
            return _gemm(s, scope)
        case Reduce():
            return _reduce(s)
        case Store():
            return store(s, scope)
        case Show():
            return show(s, scope, hooks)
        case Best():
            return best(s, scope)
        case Mask() | KeyLoop() | Fetch():
            raise AssertionError(f"{type(s).__name__} in a finished loop nest")
        case _:
            assert_never(s)


def _let(s: Let, scope: Scope) -> Do:
    value = compile_value(s.expr, (), scope).run

    def run(f: Frame) -> None:
        f.scalars[s.name] = value(f)

    return run


def _search(s: Search, scope: Scope) -> Do:
    """Bisection: the condition holds at lo and, once false, stays false."""
    lo, hi, cond = (compile_value(e, (), scope).run for e in (s.lo, s.hi, s.cond))

    def run(f: Frame) -> None:
        first, end = int(lo(f)), int(hi(f))
        while end - first > 1:
            middle = (first + end) // 2
            f.scalars[s.name] = middle
            first, end = (middle, end) if cond(f) else (first, middle)
        f.scalars[s.name] = first

    return run


def _for(s: For, scope: Scope, hooks: Hooks) -> Do:
    lo, hi = compile_value(s.lo, (), scope).run, compile_value(s.hi, (), scope).run
    bodies = _Bodies(s, scope, hooks)

    def run(f: Frame) -> None:
        for i in range(int(lo(f)), int(hi(f))):
            f.scalars[s.var] = i
            bodies.run(f)

    return run


def _strip(s: Strip, scope: Scope, hooks: Hooks) -> Do:
    """All rows of the tile at once, and all keys: the largest strip there is."""
    body, full = compile_body(s.body, scope, hooks), scope.sizes.get("row", 1)

    def run(f: Frame) -> None:
        first, end = f.scalars.get("r0"), f.scalars.get("r1")
        rows = end - first if isinstance(first, int) and isinstance(end, int) else full
        f.scalars[s.first], f.scalars[s.last] = 0, rows - 1
        for do in body:
            do(f)

    return run


class _Bodies:
    """A loop's body for key tiles of several sizes.

    Keys past the end of a loop's range change nothing, so its last tile is computed with as many keys as it holds,
    rounded up. Loops over keys are known by their variable: `kt<part>` walks up to `hi<part>` and starts each tile at
    `k0`. Tiles of alternatives (`kt<part>_<n>`) may hold each other's keys, so they are computed whole.
    """

    def __init__(self, s: For, scope: Scope, hooks: Hooks) -> None:
        self._loop, self._scope, self._hooks = s, scope, hooks
        self._end = f"hi{s.var[2:]}" if re.fullmatch(r"kt\d+", s.var) else None
        self._first = compile_body(s.body[:1], scope, hooks) if self._end else ()
        self._rest = s.body[1:] if self._end else s.body
        self._full = scope.sizes.get("key", 1)
        self._compiled: dict[int, tuple[tuple[Do, ...], Mapping[str, Array]]] = {}

    def run(self, f: Frame) -> None:
        for do in self._first:
            do(f)
        body, blank = self._for_keys(f)
        f.tiles.update(blank)  # an iteration sees nothing of the one before but the states
        for do in body:
            do(f)

    def _for_keys(self, f: Frame) -> tuple[tuple[Do, ...], Mapping[str, Array]]:
        keys, end, start = self._full, f.scalars.get(self._end or ""), f.scalars.get("k0")
        if isinstance(end, int) and isinstance(start, int) and end - start < self._full:
            step = 16 if end - start <= 16 else 64
            keys = min(self._full, max(1, -(-(end - start) // step)) * step)
        if keys not in self._compiled:  # two threads may both compile it; either result will do
            scope = replace(self._scope, sizes={**self._scope.sizes, "key": keys})
            shared = shared_names(self._loop.body, scope.kernel.body)
            local = {n for x in statements(self._rest) for n in written(x)} - shared
            blank = {t.name: blank_tile(t, scope.sizes) for t in scope.kernel.tiles if t.name in local}
            self._compiled[keys] = compile_body(self._rest, scope, self._hooks), blank
        return self._compiled[keys]


def _rounded(name: str, dtype: torch.dtype, do: Do) -> Do:
    def run(f: Frame) -> None:
        do(f)
        f.tiles[name] = as_torch(f.tiles[name]).to(dtype).to(torch.float32)

    return run


def _shape(dst: Tile, scope: Scope) -> tuple[int, ...]:
    return tuple(scope.sizes[a] for a in dst.axes)


def _map(s: Map, scope: Scope, consumed: frozenset[str]) -> Do:
    dst, name = s.dst, s.dst.name
    itself = reads(s.expr, name) == 1
    code = compile_value(s.expr, dst.axes, scope, consumed | ({name} if itself else frozenset()))
    shape, count = _shape(dst, scope), scope.lane_count if name in scope.varying else 1
    run, full = code.run, code.axes == dst.axes and not code.number
    if full and (code.fresh or isinstance(s.expr, Elem)):

        def assign(f: Frame) -> None:
            f.tiles[name] = run(f)  # type: ignore[assignment]  # a full tile is an array

        return assign
    whole = (count, *shape)
    if dst.dtype.kind is Kind.FLOAT:

        def spread(f: Frame) -> None:
            x = run(f)
            if isinstance(x, int | float):
                f.tiles[name] = torch.full(whole, x, dtype=torch.float32)
            else:
                f.tiles[name] = as_torch(x).to(torch.float32).expand(whole).clone()

        return spread

    if dst.dtype.kind is Kind.BOOL:

        def spread_conditions(f: Frame) -> None:
            f.tiles[name] = np.broadcast_to(np.asarray(as_numpy(run(f)), np.bool_), whole).copy()

        return spread_conditions

    def spread_ints(f: Frame) -> None:
        f.tiles[name] = np.broadcast_to(np.asarray(as_numpy(run(f)), np.int64), whole).copy()

    return spread_ints


def _reduce(s: Reduce) -> Do:
    at, name, src = 1 + s.src.axes.index(s.over), s.dst.name, s.src.name
    if s.kind == "sum":

        def total(f: Frame) -> None:
            f.tiles[name] = as_torch(f.tiles[src]).sum(at)

        return total

    def largest(f: Frame) -> None:
        f.tiles[name] = as_torch(f.tiles[src]).amax(at)

    return largest


def _gemm(s: Gemm, scope: Scope) -> Do:
    """Matrix product over the axes one operand has and the other has not; einsum where a batch axis remains."""
    a, b, dst = s.a, s.b, s.dst
    rows = tuple(x for x in a.axes if x != s.over and x not in b.axes)
    columns = tuple(x for x in b.axes if x != s.over and x not in a.axes)
    if (*rows, *columns) != dst.axes:
        return _einsum(s)
    left = _matrix(a, rows, (s.over,), scope)
    right = _matrix(b, (s.over,), columns, scope)
    shape, name = _shape(dst, scope), dst.name
    flat = (_product(rows, scope), _product(columns, scope))
    if not s.accumulate:

        def multiply(f: Frame) -> None:
            x = torch.matmul(left(f), right(f))
            f.tiles[name] = x.view(x.shape[0], *shape)

        return multiply

    def accumulate(f: Frame) -> None:
        x, y, total = left(f), right(f), as_torch(f.tiles[name])
        if x.shape[0] == y.shape[0] == total.shape[0]:
            total.view(-1, *flat).baddbmm_(x, y)
        else:
            f.tiles[name] = total + torch.matmul(x, y).view(-1, *shape)

    return accumulate


def _product(axes: Axes, scope: Scope) -> int:
    n = 1
    for a in axes:
        n *= scope.sizes[a]
    return n


def _matrix(t: Tile, rows: Axes, columns: Axes, scope: Scope) -> Callable[[Frame], torch.Tensor]:
    """A tile as [lanes, rows, columns]."""
    order = (0, *(1 + t.axes.index(x) for x in (*rows, *columns)))
    shape = (_product(rows, scope), _product(columns, scope))
    name = t.name
    if order == tuple(range(len(order))):
        return lambda f: as_torch(f.tiles[name]).reshape(-1, *shape)
    return lambda f: as_torch(f.tiles[name]).permute(order).reshape(-1, *shape)


def _einsum(s: Gemm) -> Do:
    letter = {x: chr(ord("a") + n) for n, x in enumerate(dict.fromkeys((*s.a.axes, *s.b.axes)))}

    def text(t: Tile) -> str:
        return "..." + "".join(letter[x] for x in t.axes)

    equation, a, b, name = f"{text(s.a)},{text(s.b)}->{text(s.dst)}", s.a.name, s.b.name, s.dst.name

    def run(f: Frame) -> None:
        x = torch.einsum(equation, as_torch(f.tiles[a]), as_torch(f.tiles[b]))
        f.tiles[name] = as_torch(f.tiles[name]) + x if s.accumulate else x

    return run
