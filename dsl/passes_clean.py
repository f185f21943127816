"""Passes that tidy a nest: hoisting, removing, allocating."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from .context import Context
from .dtypes import Kind, bf16, f16, f32, i32
from .expr import Elem, Expr, Tile, Var, walk
from .loops import Alloc, Arg, Best, For, If, Kernel, Let, Program, Search, Stmt, Store
from .rewrite import Body, expressions, names_read, rewrite_body, statements, written
from .spec import Declared, ParamKind
from .tile import Gemm, Map, Reduce


def hoist_invariants(program: Program, cx: Context) -> Program:
    """Move out of loops what no iteration changes.

    before: for kt: .. t = f(what no iteration changes) ..
    after:  t = f(..); for kt: ..
    """

    def lower(s: Stmt) -> Body:
        return _hoisted(s) if isinstance(s, For) else (s,)

    return replace(program, kernels=tuple(replace(k, body=rewrite_body(k.body, lower)) for k in program.kernels))


def _hoisted(loop: For) -> Body:
    inner = list(statements(loop.body))
    writes = Counter(n for s in inner for n in written(s))
    changing = {loop.var, *writes}
    out: list[Stmt] = []
    body: list[Stmt] = []
    for s in loop.body:
        movable = isinstance(s, Map | Reduce) or (isinstance(s, Gemm) and not s.accumulate)
        if movable and not names_read(s) & changing and all(writes[n] == 1 for n in written(s)):
            out.append(s)
            changing -= set(written(s))
        else:
            body.append(s)
    return (*out, replace(loop, body=tuple(body)))


def remove_unused(program: Program, cx: Context) -> Program:
    """before: a := ..; t = ..  where nothing reads a or t
    after:  neither
    """
    return replace(program, kernels=tuple(replace(k, body=_without_unused(k.body)) for k in program.kernels))


def _without_unused(body: Body) -> Body:
    while True:
        read = {n for s in statements(body) for n in names_read(s)}

        def keep(s: Stmt, read: set[str] = read) -> Body:
            match s:
                case Let() | Search() | Map() | Reduce() | Gemm() | Best():
                    return (s,) if set(written(s)) & read else ()
                case If(_, ()):
                    return ()
                case _:
                    return (s,)

        smaller = rewrite_body(body, keep)
        if smaller == body:
            return body
        body = smaller


def allocate_tiles(program: Program, cx: Context) -> Program:
    """before: tiles and tensors are names
    after:  every kernel lists its tiles with sizes and its arguments with shapes; the program lists all arguments
    """
    args = _arguments(cx)
    known = {a.name: a for a in (*args, *program.workspaces)}
    kernels = tuple(_allocated(k, known, cx) for k in program.kernels)
    read = {a.name for k in kernels for a in k.args}
    return replace(program, kernels=kernels, args=tuple(a for a in args if a.name in read))


def _allocated(k: Kernel, known: dict[str, Arg], cx: Context) -> Kernel:
    points = {"row": k.rows or cx.schedule.rows, "head": k.heads or cx.heads}
    sizes = {**dict(cx.binding.sizes), **points, "key": cx.schedule.keys}
    tiles: dict[str, Alloc] = {}
    used: set[str] = set()
    for s in statements(k.body):
        for e in _all_expressions(s):
            for x in walk(e):
                match x:
                    case Tile(name, axes, dtype):
                        held = i32 if dtype.kind is Kind.INT else dtype if dtype in (bf16, f16) else f32
                        tiles.setdefault(name, Alloc(name, tuple((a, sizes[a]) for a in axes), held))
                    case Elem(tensor):
                        used.add(tensor)
                    case Var(name):
                        used.add(name)
        if isinstance(s, Store):
            used.add(s.tensor)
        if isinstance(s, Best):
            used.add(s.window)
    used |= {x.name for _, e in k.grid for x in walk(e) if isinstance(x, Var)}
    shapes = {d: a.name for a in known.values() for d in a.shape if isinstance(d, str)}
    used |= {shapes[n] for n in used if n in shapes} | {"offsets"}
    return replace(k, args=tuple(a for a in known.values() if a.name in used), tiles=tuple(tiles.values()))


def _all_expressions(s: Stmt) -> Iterable[Expr]:
    yield from expressions(s)
    if isinstance(s, Map | Gemm | Reduce | Best):
        yield s.dst


# ---- arguments -------------------------------------------------------------------------------------------------------


def _arguments(cx: Context) -> tuple[Arg, ...]:
    """Everything a call passes: offsets, caches by field, captured tensors, scalars, outputs."""
    out = [Arg("offsets", i32, ("batch + 1",))]
    for p in cx.spec.params:
        match p.kind:
            case ParamKind.PAGED:
                out += _leaf_arguments(p, cx)
            case ParamKind.SCALAR:
                out.append(Arg(p.name, p.dtype or f32, ()))
            case ParamKind.TENSOR:
                out.append(Arg(p.name, cx.binding.dtype(p.name), tuple(_extent(a, p.name, cx) for a in p.axes)))
    outputs = cx.tp.outputs
    out += [Arg(n, cx.binding.dtype(n), tuple(_extent(a, n, cx) for a in t.axes)) for n, t in outputs]
    for s in cx.tp.selects:
        axes = (*(a for a in s.order.axes if a != "key"), s.rank)
        out += [Arg(n, cx.binding.dtype(n), tuple(_extent(a, n, cx) for a in axes)) for n, _ in s.results]
    if cx.tp.selects:
        out += [Arg("row_lo", i32, ()), Arg("row_hi", i32, ())]
    return tuple(out)


def _leaf_arguments(p: Declared, cx: Context) -> list[Arg]:
    """One strided view per field, layer and kind chosen by the caller: four axes, so that bulk copies can take them."""
    leaf = cx.binding.leaf(p.name)
    out = [
        Arg(f"{p.name}_table", i32, ("batch", f"{p.name}_max_pages"), pages_of=f"{p.name}_k"),
        Arg(f"{p.name}_lengths", i32, ("batch",)),
    ]
    fields = [("k", p.axes)] + ([("v", p.value_axes)] if leaf.values else [])
    for name, (feature,) in fields:
        width = cx.binding.size(feature)
        pool: tuple[int | str, ...] = (f"{p.name}_pages", leaf.page_size, leaf.kv_heads)
        out.append(Arg(f"{p.name}_{name}", leaf.dtype, (*pool, width)))
        if leaf.granularity is not None:
            out.append(Arg(f"{p.name}_{name}_scale", f32, (*pool, -(-width // leaf.granularity))))
    return out


def _extent(axis: str, name: str, cx: Context) -> int | str:
    """The size of a tensor's axis: static for heads and features that tiles have, else read off the tensor."""
    match axis:
        case "row":
            return "total_rows"
        case "seq":
            return "batch"
        case "kv_head":
            return next(leaf.kv_heads for _, leaf in cx.binding.leaves)
        case _:
            return dict(cx.binding.sizes).get(axis, f"{name}_{axis}")
