"""Passes for processors with caches: rounding of operands, and strips of points that stay in the nearest cache."""

from __future__ import annotations

from dataclasses import replace

from .algebra import (
    add,
    either,
    less,
    maximum,
    minimum,
    rebuild,
    sub,
    substitute,
)
from .context import Context
from .dtypes import DTYPES, DType, f32
from .expr import Const, Elem, Expr, Param, Tile, Var, walk
from .loops import For, If, Kernel, Let, Program, Stmt, Store, Strip
from .rewrite import Body, expressions, rewrite_body, statements
from .spec import ParamKind, Range
from .tile import Gemm, Map, Reduce

# ---- rounding --------------------------------------------------------------------------------------------------------


def round_operands(program: Program, cx: Context) -> Program:
    """Round what matrix products multiply to the type they multiply in.

    before: g = gemm(a, b)                     and the schedule's products are bfloat16 (or float16)
    after:  a_bfloat16 = a; b_bfloat16 = b; g = gemm(a_bfloat16, b_bfloat16)
            where tiles named so hold bfloat16; a tile loaded from such a type, for products alone, holds it itself
    Scores stay as exact as they were: rounded are only weights of sums over keys, and what holds no more precision.
    Products of two tiles that both differ from row to row stay in float32: no matrix unit takes them.
    """
    to = DTYPES[cx.schedule.products]
    if to is f32:
        return program
    return replace(program, kernels=tuple(replace(k, body=_rounded(k.body, to, cx)) for k in program.kernels))


def is_product(g: Gemm) -> bool:
    """A product of row-side tiles with key-side tiles: what a matrix unit computes."""
    sides = [bool({"row", "head"} & set(t.axes)) for t in (g.a, g.b)]
    return sides == [True, False] and len(g.b.axes) == 2 and g.a.axes[-1] == g.over


def _rounded(body: Body, to: DType, cx: Context) -> Body:
    everything = list(statements(body))
    fits = {s.dst.name for s in everything if isinstance(s, Map) and _fits(s.expr, to, cx)}

    def in_narrow(s: Stmt) -> bool:
        if not isinstance(s, Gemm) or not is_product(s) or s.b.name not in fits:
            return False
        return s.over == "key" or s.a.name in fits

    products = [s for s in everything if in_narrow(s)]
    operands = {t.name for g in products if isinstance(g, Gemm) for t in (g.a, g.b)}
    elsewhere = {
        x.name for s in everything if s not in products for e in expressions(s) for x in walk(e) if isinstance(x, Tile)
    }
    exact = (fits & operands) - elsewhere

    def held(t: Tile) -> Tile:
        return replace(t, dtype=to) if t.name in exact else replace(t, name=f"{t.name}_{to.name}", dtype=to)

    def lower(s: Stmt) -> Body:
        match s:
            case Gemm() if s in products:
                return (replace(s, a=held(s.a), b=held(s.b)),)
            case Map(dst) if dst.name in exact:
                return (replace(s, dst=held(dst)),)
            case Map(dst) | Gemm(dst) | Reduce(dst) if dst.name in operands:
                return (s, Map(held(dst), dst, s.loc))
            case _:
                return (s,)

    return rewrite_body(body, lower)


def _fits(e: Expr, to: DType, cx: Context) -> bool:
    """Whether every value is one that the narrower type holds: elements stored in it, or in a type it contains."""
    if not isinstance(e, Elem):
        return False
    stored = _stored_type(e.tensor, cx)
    return stored is not None and (stored is to or stored.bits == 8)


def _stored_type(tensor: str, cx: Context) -> DType | None:
    for name, leaf in cx.binding.leaves:
        if tensor in (f"{name}_k", f"{name}_v"):
            return leaf.dtype
    return dict(cx.binding.dtypes).get(tensor)


# ---- strips ----------------------------------------------------------------------------------------------------------


def cut_strips(program: Program, cx: Context) -> Program:
    """Work through a key tile some points at a time, each strip over the keys that its own rows see.

    before: for kt: keys = ..; scores = gemm(q, keys); .. if edge: mask ..
    after:  for kt: keys = ..; for each n points: c0, c1 := keys its rows may see; scores = ..; if its edge: mask ..
    A strip's scores stay in the nearest cache, and what is masked for all of its rows is not computed.
    """
    if cx.schedule.strip == 0:
        return program
    return replace(program, kernels=tuple(_cut_kernel(k, cx) for k in program.kernels))


def _cut_kernel(k: Kernel, cx: Context) -> Kernel:
    def lower(s: Stmt) -> Body:
        if not isinstance(s, For) or not s.var.startswith("kt"):
            return (s,)
        return (replace(s, body=_cut_body(s.body, s.var[2:], cx)),)

    return replace(k, body=rewrite_body(k.body, lower))


def _cut_body(body: Body, label: str, cx: Context) -> Body:
    """Runs of statements that work point by point become strips."""
    out: list[Stmt] = []
    run: list[Stmt] = []
    count = 0
    for s in (*body, None):
        if s is not None and _by_points(s):
            run.append(s)
            continue
        if run:
            out.append(_strip(tuple(run), label, count, cx))
            run, count = [], count + 1
        if s is not None:
            out.append(s)
    return tuple(out)


def _by_points(s: Stmt) -> bool:
    match s:
        case Map(dst):
            return "row" in dst.axes
        case Store(_, _, _, axes):
            return "row" in axes
        case Reduce(dst, _, _, over):
            return "row" in dst.axes and over != "row"
        case Gemm(dst, _, _, over):
            return "row" in dst.axes and over != "row"
        case If(_, body):
            return all(_by_points(x) for x in body)
        case _:
            return False


def _strip(body: Body, label: str, count: int, cx: Context) -> Strip:
    first, last = f"ra{label}_{count}", f"rb{label}_{count}"
    heads = cx.heads
    whole_rows = heads > 1 and any(_needs_whole_rows(s) for s in statements(body))
    points = heads * max(1, cx.schedule.strip // heads) if whole_rows else cx.schedule.strip
    lets, columns, edge = _columns(label, count, Var(first), Var(last), cx)
    if edge is not None:
        body = rewrite_body(body, lambda s: (replace(s, cond=edge),) if isinstance(s, If) else (s,))
    return Strip(first, last, points, columns, (*lets, *body))


def _needs_whole_rows(s: Stmt) -> bool:
    """A statement that has no head axis, or none any more, computes for a row what all its heads share."""
    match s:
        case Map(dst) | Reduce(dst) | Gemm(dst):
            return "head" not in dst.axes
        case Store(_, _, _, axes):
            return "head" not in axes
        case _:
            return False


def _columns(
    label: str, count: int, first: Var, last: Var, cx: Context
) -> tuple[tuple[Stmt, ...], tuple[str, str] | None, Expr | None]:
    """Scalars of a strip: the columns its rows may see; and when a mask is needed."""
    number, size = cx.part_of(label), cx.schedule.keys
    names = (f"c_lo{label}_{count}", f"c_hi{label}_{count}")

    def column(key: Expr) -> Expr:
        return minimum(maximum(sub(key, Var("k0")), 0), size)

    end = Var(f"hi{label}")
    if not isinstance(cx.parts[number], Range):
        return (Let(names[0], Const(0)), Let(names[1], column(end))), names, None
    if len(cx.labels(number)) > 1:  # a tile of one alternative may hold keys that are seen through another
        return (), None, None
    (i,) = cx.intervals[number]
    rows: dict[Expr, Expr] = {Var("q0"): add(Var("q0"), first), Var("q1"): add(Var("q0"), last)}

    def of_strip(e: Expr) -> Expr:
        return substitute(_bind_scalars(e, cx), rows)

    lo = Var(f"lo{label}") if i.lo is None else maximum(of_strip(i.lo), Var(f"lo{label}"))
    hi: Expr = end if i.hi is None else minimum(add(of_strip(i.hi), 1), end)
    lets: list[Stmt] = [Let(names[0], column(lo)), Let(names[1], column(hi))]
    if not i.whole or cx.schedule.masks == "always":
        return tuple(lets), names, None
    whole_lo = Var(f"lo{label}") if i.whole_lo is None else maximum(of_strip(i.whole_lo), Var(f"lo{label}"))
    whole_hi: Expr = end if i.whole_hi is None else minimum(add(of_strip(i.whole_hi), 1), end)
    w0, w1 = Var(f"w_lo{label}_{count}"), Var(f"w_hi{label}_{count}")
    lets += [Let(w0.name, sub(whole_lo, Var("k0"))), Let(w1.name, sub(whole_hi, Var("k0")))]
    return tuple(lets), names, either(less(Const(0), w0), less(w1, size))


def _bind_scalars(e: Expr, cx: Context) -> Expr:
    if isinstance(e, Param) and cx.spec.param(e.name).kind is ParamKind.SCALAR:
        return Var(e.name, e.dtype)
    return rebuild(e, lambda c: _bind_scalars(c, cx))
