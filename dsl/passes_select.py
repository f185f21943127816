"""Kernels for selections: scores of a window of rows as order keys, then the best of each row."""

from __future__ import annotations

from .algebra import add, at_least, both, floordiv, less, lift, mul, op, sub, where
from .context import NO_ROWS, ROW_OK, Context
from .dtypes import i32
from .expr import Const, Coord, Elem, Expr, Iota, KeyField, Param, Tile, Var
from .loops import Arg, Best, Fetch, Kernel, KeyLoop, Stmt, Store
from .spec import Listed, Part
from .tile import NOT_A_CANDIDATE, SelectPass, field_tile


def fetches(part: Part, fields: tuple[KeyField, ...]) -> tuple[Fetch, ...]:
    """One fetch for each cache whose rows a pass reads: the part's own, and those beside it."""
    leaves = dict.fromkeys([part.leaf, *(f.leaf or part.leaf for f in fields)])
    return tuple(
        Fetch(leaf, tuple((f, field_tile(f)) for f in fields if (f.leaf or part.leaf) == leaf)) for leaf in leaves
    )


def window_name(number: int) -> str:
    return f"window{number}"


def window_workspace(number: int, s: SelectPass, cx: Context) -> Arg:
    """Order keys [rows of the window, (heads,) columns]; a column is a key of a range, a slot of a list."""
    heads = (cx.binding.heads,) if "head" in s.order.axes else ()
    return Arg(window_name(number), i32, ("window_rows", *heads, f"columns{number}"), NOT_A_CANDIDATE)


def column_count(part: int, cx: Context) -> Expr:
    """Columns a sequence's rows have."""
    return cx.key_count(cx.parts[part])


def select_kernels(
    number: int, s: SelectPass, part: int, start: tuple[Stmt, ...], cx: Context
) -> tuple[Kernel, Kernel]:
    """The two kernels of a selection.

    before: a selection
    after:  kernel: for keys: score; window[row, column] = order key
            kernel: columns = best of window[row]; keys of the columns; stores
    """
    (only,) = s.source.parts
    count = column_count(part, cx)
    column = Coord("column", ("key",))
    keep = Store(window_name(number), (*_spot(s), column), s.order, s.order.axes, less(column, count))
    walk = KeyLoop(part, only, (*fetches(only, s.fields), *s.step, keep))
    scores = Kernel(f"scores{number}", cx.grid(cx.schedule.rows, cx.heads), (), (), (*start, walk))

    axes = (*(a for a in s.order.axes if a != "key"), s.rank)
    columns = Tile(f"column{number}", axes, i32)
    if cx.gpu:  # a tile past a sequence's end chooses among nothing; elsewhere it is left out as a whole
        count = where(NO_ROWS, Const(0), count)
    body: list[Stmt] = [Best(columns, window_name(number), _spot(s), count)]
    for name, result in s.results:
        body.append(
            Store(name, (*map(_output_spot, axes[:-1]), Iota(s.rank)), _result(result, number, s, columns), axes)
        )
    rows, heads = cx.schedule.rows, cx.heads
    if cx.gpu:  # all threads of a block choose for one row
        rows, heads = 1, 1 if "head" in s.order.axes else heads
    return scores, Kernel(f"select{number}", cx.grid(rows, heads), (), (), tuple(body), rows, heads)


def _spot(s: SelectPass) -> tuple[Expr, ...]:
    """Where a tile's rows (and heads) stand in the window."""
    row = sub(Coord("row", ("row",)), Var("row_lo"))
    return (row, Coord("head", ("head",))) if "head" in s.order.axes else (row,)


def _output_spot(axis: str) -> Expr:
    return Coord(axis, (axis,))


def _result(result: str, number: int, s: SelectPass, columns: Tile) -> Expr:
    (only,) = s.source.parts
    chosen = at_least(columns, 0)
    if result == "values":
        kept = Elem(window_name(number), (*_spot(s), columns), i32, both(chosen, ROW_OK))
        bits = op("bitxor", kept, op("bitand", op("shr", kept, Const(31)), Const(0x7FFFFFFF)))
        nan = op("eq", kept, Const(NOT_A_CANDIDATE + 1))
        return where(chosen, where(nan, Const(float("nan")), op("from_bits", bits)), -float("inf"))
    if isinstance(only, Listed):
        slot = floordiv(columns, only.block)
        listed = Param(only.indices, only.axes, i32, ((only.axes[-1], slot),))
        return where(chosen, add(mul(listed, only.block), op("mod", columns, lift(only.block))), -1)
    return columns
