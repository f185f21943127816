"""What must hold of a program after every pass. A failure is a fault of the compiler, and names the pass."""

from __future__ import annotations

from .errors import VerifyError
from .expr import Coord, Dot, Elem, Expr, FoldResult, Iota, KeyField, Param, Reduction, Selected, Tile, Var, walk
from .loops import Best, Fetch, For, If, Kernel, KeyLoop, Let, Program, Search, Stmt, Store, Strip
from .printer import show_stmt
from .rewrite import Body, expressions, statements, written
from .tile import Gemm, KeyPass, Map, Mask, Reduce, TileProgram, field_tile

# Statements and expressions that a pass leaves none of: gone for good once it has run.
_LOWERED: dict[str, tuple[type, ...]] = {
    "bound_key_loops": (KeyLoop,),
    "fetch_keys": (Fetch,),
    "apply_masks": (Mask,),
    "bind_coordinates": (Coord, Param),
}
_ORDER = (
    "form_kernel", "partition_keys", "bound_key_loops", "fetch_keys", "apply_masks", "bind_coordinates",
    "share_reads", "hoist_invariants", "remove_unused", "round_operands", "cut_strips", "allocate_tiles",
    "pad_features", "place_tiles", "stage_loads",
)  # fmt: skip
_NEVER = (Dot, Reduction, KeyField, FoldResult, Selected)  # the tile program has replaced these


def verify_tile_program(tp: TileProgram) -> None:
    """Tiles are written before they are read, with one shape each, and axes fit."""
    for p in tp.passes:
        known = {t.name: t.axes for t in _given(tp, p)}
        _straight("build (step)", p.step, dict(known))
        others = {s.name + "_other": s.axes for s in p.states}
        _straight("build (merge)", p.merge, {**known, **others})
        _straight("build (finish)", p.finish, known)


def _given(tp: TileProgram, p: KeyPass) -> list[Tile]:
    operands = [Tile(o.name, o.axes, o.dtype) for o in tp.operands]
    fields = [field_tile(f) for f in p.fields]
    results = [s.dst for q in tp.passes for s in q.finish if isinstance(s, Map)]
    return operands + fields + [Tile(s.name, s.axes) for s in p.states] + results


def _straight(after: str, body: tuple[Stmt, ...], known: dict[str, tuple[str, ...]]) -> None:
    for s in body:
        _check_axes(after, s)
        for e in expressions(s):
            for x in walk(e):
                if isinstance(x, Tile) and known.get(x.name) != x.axes:
                    raise VerifyError(after=after, problem=f"tile {x.name} read before it is written: {_text(s)}")
        match s:
            case Map() | Gemm() | Reduce() | Mask():
                if known.setdefault(s.dst.name, s.dst.axes) != s.dst.axes:
                    raise VerifyError(after=after, problem=f"tile {s.dst.name} has two shapes: {_text(s)}")
            case _:
                pass


def _text(s: Stmt) -> str:
    return show_stmt(s)[0].strip()


def _check_axes(after: str, s: Stmt) -> None:
    def fail(problem: str) -> None:
        raise VerifyError(after=after, problem=f"{problem}: {_text(s)}")

    match s:
        case Map(dst, e):
            if not set(e.axes) <= set(dst.axes):
                fail("expression varies over axes its tile does not have")
        case Gemm(dst, a, b, over, _):
            if over not in a.axes or over not in b.axes:
                fail(f"no {over} axis to contract")
            if set(dst.axes) != {*a.axes, *b.axes} - {over}:
                fail("result axes do not follow from the operands")
        case Reduce(dst, src, kind, over):
            if over not in src.axes or set(dst.axes) != set(src.axes) - {over} or kind not in ("sum", "max"):
                fail("result axes do not follow from the source")
        case Store(_, _, e, axes, ok):
            if not {*e.axes, *ok.axes} <= set(axes):
                fail("stored expression varies over axes that are not stored")
        case If(cond, _):
            if cond.axes:
                fail("a branch must be uniform")
        case _:
            pass


def verify(program: Program, after: str) -> None:
    """Raise VerifyError unless the program is well formed after the named pass."""
    for k in program.kernels:
        gone = tuple(t for name in _ORDER[: _ORDER.index(after) + 1] for t in _LOWERED.get(name, ()))
        for s in statements(k.body):
            _check_axes(after, s)
            nodes: list[object] = [s, *(x for e in expressions(s) for x in walk(e))]
            for x in nodes:
                if isinstance(x, (*gone, *_NEVER)):
                    raise VerifyError(after=after, problem=f"{type(x).__name__} should be gone: {_text(s)}")
        _check_shapes(k, after)
        if _ORDER.index(after) >= _ORDER.index("bind_coordinates"):
            _check_definitions(k, program, after)


def _check_shapes(k: Kernel, after: str) -> None:
    """Every tile has one shape, that of its storage once it has some."""
    shapes = {t.name: tuple(a for a, _ in t.axes) for t in k.tiles}
    for s in statements(k.body):
        own = [s.dst] if isinstance(s, Map | Gemm | Reduce | Mask) else []
        for x in (*own, *(x for e in expressions(s) for x in walk(e))):
            if isinstance(x, Tile) and shapes.setdefault(x.name, x.axes) != x.axes:
                raise VerifyError(after=after, problem=f"tile {x.name} has two shapes: {_text(s)}")


def _check_definitions(k: Kernel, program: Program, after: str) -> None:
    """Every scalar and tile is defined on every path before it is read, and tensors are arguments."""
    tensors = {a.name for a in (*program.args, *program.workspaces)}
    sizes = {d.split()[0] for a in (*program.args, *program.workspaces) for d in a.shape if isinstance(d, str)}
    final = _ORDER.index(after) >= _ORDER.index("allocate_tiles")

    def visit(body: Body, known: set[str]) -> None:
        for s in body:
            for e in expressions(s):
                bound = known | {s.name} if isinstance(s, Search) else known
                _check_reads(e, bound, s)
            match s:
                case For(var, _, _, inner):
                    visit(inner, known | {var})
                case If(_, inner):
                    visit(inner, set(known))
                case Strip(first, last, _, _, inner):  # there is one strip at least
                    known |= {first, last}
                    visit(inner, known)
                case Store(tensor) if final and tensor not in tensors:
                    raise VerifyError(after=after, problem=f"{tensor} is not an argument: {_text(s)}")
                case Let() | Search() | Map() | Reduce() | Gemm() | Mask() | Fetch() | Best():
                    known.update(written(s))
                case _:
                    pass

    def _check_reads(e: Expr, known: set[str], s: Stmt) -> None:
        for x in walk(e):
            match x:
                case Tile(name) if name not in known:
                    raise VerifyError(after=after, problem=f"tile {name} read before it is written: {_text(s)}")
                case Var(name) if final and name not in known | tensors | sizes:
                    raise VerifyError(after=after, problem=f"scalar {name} is not defined: {_text(s)}")
                case Elem(tensor) if final and tensor not in tensors:
                    raise VerifyError(after=after, problem=f"{tensor} is not an argument: {_text(s)}")
                case Iota(axis) if not axis:
                    raise VerifyError(after=after, problem="a nameless axis")
                case _:
                    pass

    visit(k.body, {name for name, _ in k.grid})
