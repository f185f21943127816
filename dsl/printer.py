"""Text of every level. Golden tests and `tilewright show` read it, so it is stable and complete."""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from .algebra import rebuild
from .expr import (
    ALWAYS,
    Const,
    Coord,
    Dot,
    Elem,
    Expr,
    FoldResult,
    Iota,
    KeyField,
    Op,
    Param,
    Reduction,
    Selected,
    Tile,
    Var,
    children,
)
from .loops import Best, Fetch, For, If, Kernel, KeyLoop, Let, Program, Search, Stmt, Store, Strip
from .scalars import OPS
from .spec import Fold, Listed, Part, Range, Spec
from .tile import Gemm, KeyPass, Map, Mask, Reduce, Show, TileProgram


def _axes(axes: tuple[str, ...]) -> str:
    return f"[{', '.join(axes)}]" if axes else ""


def show(e: Expr) -> str:
    """One line of text for an expression."""
    match e:
        case Const(value):
            return str(value)
        case Coord(name) | Var(name):
            return name
        case Iota(axis):
            return f"i_{axis}"
        case Param(name, own, _, ()):
            return name + _axes(own)
        case Param(name, own, _, index):
            at = dict(index)
            return f"{name}[{', '.join(f'{a}={show(at[a])}' if a in at else a for a in own)}]"
        case KeyField(source, name, axes, leaf, start, size):
            part = "" if size is None else f"[{start}:{start + size}]"
            return f"keys{source}." + ("" if leaf is None else f"{leaf}.") + name + part + _axes(axes)
        case Tile(name, axes):
            return name + _axes(axes)
        case Op(name, (a, b)) if OPS[name].infix:
            return f"({show(a)} {OPS[name].infix} {show(b)})"
        case Op(name, args):
            return f"{name}({', '.join(map(show, args))})"
        case Dot(a, b, over):
            return f"dot({show(a)}, {show(b)}, over={over})"
        case Reduction(kind, a, over):
            return f"{kind}({show(a)}, over={over})"
        case FoldResult(fold, name):
            return f"{fold.name}({', '.join(map(show, fold.inputs))}).{name}"
        case Selected(select, name):
            return f"topk({show(select.score)}, {select.k}).{name}"
        case Elem(tensor, index, _, ok):
            guard = "" if ok == Const(True) else f" if {show(ok)}"
            return f"{tensor}({', '.join(map(show, index))}{guard})"
        case _:
            assert_never(e)


# ---- the traced operator ---------------------------------------------------------------------------------------------


def show_part(part: Part) -> str:
    match part:
        case Range(leaf, where, pool):
            return f"{leaf} where {show(where)}" + (f", one key per {pool} tokens" if pool > 1 else "")
        case Listed(leaf, indices, axes, block, where):
            blocks = f" in blocks of {block}" if block > 1 else ""
            seen = "" if where == ALWAYS else f" where {show(where)}"
            return f"{leaf} listed by {indices}{_axes(axes)}{blocks}{seen}"
        case _:
            assert_never(part)


def _with_shared(exprs: tuple[tuple[str, Expr], ...], pad: str, known: dict[Expr, str]) -> list[str]:
    """`name = expression` lines; a compound used more than once is named first, so that no line repeats another."""
    users: Counter[Expr] = Counter()

    def count(e: Expr) -> None:
        users[e] += 1
        if users[e] == 1:
            for c in children(e):
                count(c)

    for _, e in exprs:
        count(e)
    names, lines = dict(known), list[str]()

    def name_shared(e: Expr) -> Expr:
        if e in names:
            return Var(names[e], e.dtype)
        e_short = rebuild(e, name_shared)
        if users[e] > 1 and isinstance(e, Op | Dot | Reduction):
            names[e] = f"s{len(names) - len(known)}"
            lines.append(f"{pad}{names[e]} = {show(e_short)}")
            return Var(names[e], e.dtype)
        return e_short

    for name, e in exprs:
        short = name_shared(e)
        lines.append(f"{pad}{name} = {show(short)}")
    return lines


def show_spec(spec: Spec) -> str:
    """The traced operator."""
    results: dict[Expr, str] = {FoldResult(f, r): f"fold{n}.{r}" for n, f in enumerate(spec.folds) for r, _ in f.finish}
    lines = [f"operator {spec.name}"]
    for p in spec.params:
        extra = f" values [{', '.join(p.value_axes)}]" if p.value_axes and p.value_axes != p.axes else ""
        lines.append(f"param {p.name}: {p.kind.value}{_axes(p.axes)}{extra} {p.dtype or 'bound'}".rstrip())
    if spec.positions:
        lines.append(f"positions from {spec.positions}")
    for n, s in enumerate(spec.sources):
        lines += [f"keys{n} += {show_part(p)}" for p in s.parts]
    for n, f in enumerate(spec.folds):
        lines += _fold_lines(f, n, results)
    lines += _with_shared(tuple((f"output {n}{_axes(e.axes)}", e) for n, e in spec.outputs), "", results)
    for probe in spec.probes:
        lines += _with_shared(tuple((f"{probe.kind} {n}", e) for n, e in probe.values), "", results)
    return "\n".join(lines) + "\n"


def _fold_lines(f: Fold, number: int, results: dict[Expr, str]) -> list[str]:
    out = [f"fold{number} ({f.name}) over keys{f.source}:"]
    out += _with_shared(tuple((f"input{n}{_axes(e.axes)}", e) for n, e in enumerate(f.inputs)), "  ", results)
    out += [f"  input{n} unseen = {a}" for n, a in enumerate(f.absent) if a is not None]
    out += [f"  state {s.name}{_axes(s.axes)} from {s.init}" for s in f.states]
    names = [f"new {s.name}" for s in f.states]
    out += ["  step:", *_with_shared(tuple(zip(names, f.step, strict=True)), "    ", results)]
    out += ["  merge:", *_with_shared(tuple(zip(names, f.merge, strict=True)), "    ", results)]
    return [*out, "  finish:", *_with_shared(f.finish, "    ", results)]


# ---- the tile program ------------------------------------------------------------------------------------------------


def show_tile_program(tp: TileProgram) -> str:
    lines = [f"operands {', '.join(map(show, tp.operands)) or 'none'}"]
    for n, p in enumerate(tp.passes):
        lines += [f"pass {n}:", *_pass_lines(p)]
    for n, s in enumerate(tp.selects):
        lines += [f"select {n}, the best {s.k}:"]
        lines += [f"  keys += {show_part(part)}" for part in s.source.parts]
        lines += [f"  field {show(f)}" for f in s.fields]
        lines += ["  step:"] + [line for x in s.step for line in show_stmt(x, "    ")]
        lines += [f"  by {show(s.order)}"] + [f"  output {name} = {result}" for name, result in s.results]
    if tp.epilogue:
        lines += ["epilogue:"] + [line for s in tp.epilogue for line in show_stmt(s, "  ")]
    lines += [f"output {name} = {show(t)}" for name, t in tp.outputs]
    return "\n".join(lines) + "\n"


def _pass_lines(p: KeyPass) -> list[str]:
    out = [f"  keys += {show_part(part)}" for part in p.source.parts]
    out += [f"  field {show(f)}" for f in p.fields]
    out += [f"  state {s.name}{_axes(s.axes)} from {s.init}" for s in p.states]
    for title, body in (("step", p.step), ("merge", p.merge), ("finish", p.finish)):
        if body:
            out += [f"  {title}:"] + [line for s in body for line in show_stmt(s, "    ")]
    return out


# ---- the loop nest ---------------------------------------------------------------------------------------------------


def show_stmt(s: Stmt, pad: str = "") -> list[str]:
    """The lines of one statement, its body indented."""

    def block(head: str, body: tuple[Stmt, ...]) -> list[str]:
        return [pad + head] + [line for x in body for line in show_stmt(x, pad + "  ")]

    match s:
        case Map(dst, e):
            return [f"{pad}{show(dst)} = {show(e)}"]
        case Gemm(dst, a, b, over, accumulate):
            return [f"{pad}{show(dst)} {'+=' if accumulate else '='} gemm({show(a)}, {show(b)}, over={over})"]
        case Reduce(dst, src, kind, over):
            return [f"{pad}{show(dst)} = {kind}({show(src)}, over={over})"]
        case Mask(dst, absent):
            return [f"{pad}{show(dst)} = {absent} where unseen"]
        case Show(kind, values):
            return [f"{pad}{kind} {', '.join(show(e) for _, e in values)}"]
        case Let(name, e):
            return [f"{pad}{name} := {show(e)}"]
        case Search(name, lo, hi, cond):
            return [f"{pad}{name} := last in {show(lo)} .. {show(hi)} with {show(cond)}"]
        case For(var, lo, hi, body):
            return block(f"for {var} in {show(lo)} .. {show(hi)}:", body)
        case If(cond, body):
            return block(f"if {show(cond)}:", body)
        case Strip(first, last, points, columns, body):
            seen = "" if columns is None else f", keys {columns[0]} .. {columns[1]}"
            return block(f"for each {points} points, rows {first} .. {last}{seen}:", body)
        case KeyLoop(number, part, body):
            return block(f"for keys of part {number}, {show_part(part)}:", body)
        case Fetch(leaf, fields):
            return [f"{pad}{show(dst)} = fetch {leaf}.{f.name}" for f, dst in fields]
        case Store(tensor, index, e, axes, ok):
            guard = "" if ok == Const(True) else f" if {show(ok)}"
            return [f"{pad}for {', '.join(axes)}: {tensor}({', '.join(map(show, index))}) = {show(e)}{guard}"]
        case Best(dst, window, index, count):
            return [f"{pad}{show(dst)} = best of {window}({', '.join(map(show, index))}, 0 .. {show(count)})"]
        case _:
            assert_never(s)


def show_kernel(k: Kernel) -> str:
    lines = [f"kernel {k.name}  grid " + " x ".join(f"{n} < {show(e)}" for n, e in k.grid)]
    lines += [f"  arg {a.name}: {a.dtype}[{', '.join(map(str, a.shape))}]" for a in k.args]
    lines += [f"  tile {t.name}[{', '.join(f'{a}:{n}' for a, n in t.axes)}] {t.dtype}" for t in k.tiles]
    lines += [line for s in k.body for line in show_stmt(s, "  ")]
    return "\n".join(lines) + "\n"


def show_program(p: Program) -> str:
    work = [f"workspace {a.name}: {a.dtype}[{', '.join(map(str, a.shape))}]" for a in p.workspaces]
    return "\n".join([*work, *(show_kernel(k) for k in p.kernels)])
