"""Walking and rewriting statements: one place that knows where a statement keeps its expressions and bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias, assert_never

from .expr import Expr, Tile, Var, walk
from .loops import Best, Fetch, For, If, KeyLoop, Let, Search, Stmt, Store, Strip
from .tile import Gemm, Map, Mask, Reduce, Show

Body: TypeAlias = tuple[Stmt, ...]


def rewrite_body(body: Body, f: Callable[[Stmt], Body]) -> Body:
    """Every statement replaced by what `f` makes of it, inner bodies first."""
    out: list[Stmt] = []
    for s in body:
        match s:
            case For() | If() | Strip() | KeyLoop():
                out += f(replace(s, body=rewrite_body(s.body, f)))
            case _:
                out += f(s)
    return tuple(out)


def expressions(s: Stmt) -> tuple[Expr, ...]:
    """The expressions a statement itself evaluates, its body's not included."""
    match s:
        case Map():
            return (s.expr,)
        case Gemm():
            return (s.a, s.b, s.dst) if s.accumulate else (s.a, s.b)
        case Reduce():
            return (s.src,)
        case Mask():
            return (s.dst,)
        case Show():
            return tuple(e for _, e in s.values)
        case Let():
            return (s.expr,)
        case Search():
            return (s.lo, s.hi, s.cond)
        case For():
            return (s.lo, s.hi)
        case If():
            return (s.cond,)
        case KeyLoop():
            return (s.part.where,)
        case Fetch() | Strip():
            return ()
        case Store():
            return (*s.index, s.expr, s.ok)
        case Best():
            return (*s.index, s.count)
        case _:
            assert_never(s)


def map_expressions(s: Stmt, f: Callable[[Expr], Expr]) -> Stmt:
    """The statement with `f` applied to its own expressions (tiles of Gemm and Reduce stay as they are)."""
    match s:
        case Map():
            return replace(s, expr=f(s.expr))
        case Show():
            return replace(s, values=tuple((n, f(e)) for n, e in s.values))
        case Let():
            return replace(s, expr=f(s.expr))
        case Search():
            return replace(s, lo=f(s.lo), hi=f(s.hi), cond=f(s.cond))
        case For():
            return replace(s, lo=f(s.lo), hi=f(s.hi))
        case If():
            return replace(s, cond=f(s.cond))
        case Store():
            return replace(s, index=tuple(map(f, s.index)), expr=f(s.expr), ok=f(s.ok))
        case Best():
            return replace(s, index=tuple(map(f, s.index)), count=f(s.count))
        case Gemm() | Reduce() | Mask() | KeyLoop() | Fetch() | Strip():
            return s
        case _:
            assert_never(s)


def written(s: Stmt) -> tuple[str, ...]:
    """Tiles and scalars a statement itself defines."""
    match s:
        case Map() | Gemm() | Reduce() | Mask() | Best():
            return (s.dst.name,)
        case Fetch():
            return tuple(t.name for _, t in s.fields)
        case Let() | Search():
            return (s.name,)
        case For():
            return (s.var,)
        case Strip():
            return (s.first, s.last)
        case Show() | If() | KeyLoop() | Store():
            return ()
        case _:
            assert_never(s)


def statements(body: Body) -> Iterator[Stmt]:
    """Every statement, outer before inner."""
    for s in body:
        yield s
        if isinstance(s, For | If | Strip | KeyLoop):
            yield from statements(s.body)


def names_read(s: Stmt) -> set[str]:
    """Tiles and scalars a statement itself reads."""
    return {x.name for e in expressions(s) for x in walk(e) if isinstance(x, Tile | Var)}
