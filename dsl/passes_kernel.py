"""Passes that shape kernels: what runs at each grid point."""

from __future__ import annotations

from dataclasses import replace

from .algebra import add, mul
from .context import ROW_OK, Context
from .dtypes import f32
from .expr import Const, Coord, Elem, Expr, Iota, Tile, Var
from .loops import Arg, For, Kernel, KeyLoop, Program, Stmt, Store
from .passes_select import column_count, fetches, select_kernels, window_workspace
from .tile import Map


def coordinate(axis: str) -> Expr:
    """Where a point of a tile stands in a whole tensor, along one axis."""
    return Coord(axis, (axis,)) if axis in ("row", "head") else Iota(axis)


def form_kernel(program: Program, cx: Context) -> Program:
    """One kernel at every row tile and head block.

    before: a tile program
    after:  kernel over row tiles x head blocks: operand = ..; state = init; for keys of part: step; finish; store
    """
    tp = cx.tp
    operands = tuple(Map(Tile(p.name, p.axes, p.dtype), p) for p in tp.operands)
    if tp.selects:
        return _form_selections(program, operands, cx)
    body: list[Stmt] = [*operands]
    number = 0
    for p in tp.passes:
        body += [Map(Tile(s.name, s.axes), Const(s.init)) for s in p.states]
        for part in p.source.parts:
            body.append(KeyLoop(number, part, (*fetches(part, p.fields), *p.step)))
            number += 1
        body += p.finish
    body += tp.epilogue
    body += [Store(name, tuple(map(coordinate, t.axes)), t, t.axes) for name, t in tp.outputs]
    grid = cx.grid(cx.schedule.rows, cx.heads)
    return replace(program, kernels=(Kernel("fold", grid, (), (), tuple(body)),))


def _form_selections(program: Program, operands: tuple[Stmt, ...], cx: Context) -> Program:
    """Two kernels for each selection, run for a window of rows at a time so that scores stay within a budget."""
    kernels: list[Kernel] = []
    columns: list[tuple[str, Expr]] = []
    row_bytes: Expr = Const(0)
    for n, s in enumerate(cx.tp.selects):
        kernels += select_kernels(n, s, n, (*operands, *cx.tp.epilogue) if n == 0 else operands, cx)
        columns.append((f"columns{n}", column_count(n, cx)))
        row_bytes = add(row_bytes, mul(Var(f"columns{n}"), 4 * (cx.binding.heads if "head" in s.order.axes else 1)))
    lengths = None if cx.spec.positions is None else f"{cx.spec.positions}_lengths"
    work = tuple(window_workspace(n, s, cx) for n, s in enumerate(cx.tp.selects))
    return replace(
        program, kernels=tuple(kernels), workspaces=work, columns=tuple(columns), row_bytes=row_bytes, lengths=lengths
    )


def partition_keys(program: Program, cx: Context) -> Program:
    """Split keys over grid points, merged by a second kernel.

    before: kernel: operands; init; key loops; finish; store
    after:  kernel over (.., part): operands; init; key loops; states to workspace[part]
            kernel: operands; init; for p in parts: merge workspace[p]; finish; store
    Whatever enters in finish, such as a sink, enters once. One partition: unchanged.
    """
    count = cx.schedule.partitions
    if count == 1 or not cx.tp.passes:
        return program
    (fold,), (key_pass,) = program.kernels, cx.tp.passes
    loops = [n for n, s in enumerate(fold.body) if isinstance(s, KeyLoop)]
    start, walk, end = fold.body[: loops[0]], fold.body[loops[0] : loops[-1] + 1], fold.body[loops[-1] + 1 :]

    def spot(axes: tuple[str, ...], part: str) -> tuple[Expr, ...]:
        return (Var(part), *map(coordinate, axes))

    save = [Store(f"part_{s.name}", spot(s.axes, "part"), Tile(s.name, s.axes), s.axes) for s in key_pass.states]
    load = [
        Map(
            Tile(f"{s.name}_other", s.axes),
            Elem(f"part_{s.name}", spot(s.axes, "p"), f32, ROW_OK if "row" in s.axes else Const(True)),
        )
        for s in key_pass.states
    ]
    merge = For("p", Const(0), Const(count), (*load, *key_pass.merge))
    work = tuple(Arg(f"part_{s.name}", f32, (count, *(_extent(a, cx) for a in s.axes))) for s in key_pass.states)
    kernels = (
        replace(fold, grid=(*fold.grid, ("part", Const(count))), body=(*start, *walk, *save)),
        Kernel("merge", fold.grid, (), (), (*start, merge, *end)),
    )
    return replace(program, kernels=kernels, workspaces=work)


def _extent(axis: str, cx: Context) -> int | str:
    return "total_rows" if axis == "row" else cx.binding.size(axis)
