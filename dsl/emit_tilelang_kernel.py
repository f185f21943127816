"""One kernel of a loop nest as the body of a TileLang function: a statement of the nest, a statement of the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from pathlib import PurePath
from types import MappingProxyType
from typing import TypeAlias, assert_never

from .algebra import linear, sub
from .dtypes import Kind
from .emit_tilelang_barriers import Barriers, Touched
from .emit_tilelang_best import best_lines
from .emit_tilelang_values import ELEMENTS, Layout, Values, conjuncts
from .errors import NotOnTarget
from .expr import ALWAYS, Axes, Const, Elem, Expr, Iota, Op, Tile, Var, walk
from .gpu import Gpu
from .loops import Arg, Best, Fetch, For, If, Kernel, KeyLoop, Let, Search, Stmt, Store, Strip
from .passes_gpu import POINTS, has_points, in_registers, is_load, on_matrix_units
from .printer import show_stmt
from .rewrite import Body
from .source import Loc
from .tile import Gemm, Map, Mask, Reduce, Show

VECTOR_BYTES = 16  # of one load
OWN_NAMES = ("t_", "i_", "best_")  # of tiles, of positions in them, of what selections need
Step: TypeAlias = Callable[[Values, str], str]  # where the loop around is, and a result's element: its next value


def stride_name(tensor: str, dim: int) -> str:
    return f"{tensor}_stride{dim}"


def is_strided(a: Arg, workspaces: frozenset[str]) -> bool:
    """Whether a call passes strides: workspaces are made for the call, and one axis is dense."""
    return len(a.shape) > 1 and a.name not in workspaces


def stride_unit(a: Arg, gpu: Gpu) -> int:
    """What strides of a tensor are a multiple of, so that rows are loaded in vectors: elements, 16 bytes at most."""
    last = a.shape[-1]
    return gcd(min(gpu.lanes, VECTOR_BYTES * 8 // a.dtype.bits), last) if isinstance(last, int) else 1


class KernelPrinter:
    """The text of one kernel. Raises NotOnTarget for a statement that has no form."""

    def __init__(self, kernel: Kernel, workspaces: frozenset[str], gpu: Gpu, aligned: bool) -> None:
        self.kernel, self.gpu, self.aligned = kernel, gpu, aligned
        self.target = f"{gpu.kind}:{gpu.name}"
        self.workspaces = workspaces
        sizes = {a: n for t in kernel.tiles for a, n in t.axes}
        self.layout = Layout(sizes, kernel.points)
        self.values = Values(
            self.layout, {t.name: t for t in kernel.tiles}, {a.name: a for a in kernel.args}, self.target, {}
        )
        self._variables: list[tuple[str, str]] = []  # name, dtype
        self._lines: list[str] = []
        self._indent = 0
        self._barriers = Barriers(kernel.tiles)
        self._ahead = False  # inside a loop whose loads run ahead

    # ---- the function ------------------------------------------------------------------------------------------------

    def function(self) -> list[str]:
        k = self.kernel
        grid = ", ".join(self.values.text(e) for _, e in k.grid)
        names = ", ".join(n for n, _ in k.grid)
        points = f"({names})" if len(k.grid) > 1 else names
        for a in k.args:
            if a.name.startswith(OWN_NAMES):
                what = f"parameter named {a.name!r}: names that begin with {', '.join(OWN_NAMES)} are the program's own"
                raise NotOnTarget(target=self.target, what=what, expected="another name")
        self._indent = 3
        self._body(k.body)
        body, self._lines = self._lines, []
        self._tiles()
        head = [
            f"def {k.name}():",
            *(f'    {s} = T.dynamic("{s}")' for s in self._sizes()),
            *(f'    {s} = T.dynamic("{s}", "int64")' for a in k.args for s in self._strides(a)),
            "",
            "    @T.prim_func",
            f"    def {k.name}(",
            *(f"        {a.name}: {self._declared(a)}," for a in k.args),
            "    ):",
            f"        with T.Kernel({grid}, threads={k.threads}) as {points}:",
        ]
        return [*head, *self._assumptions(), *self._lines, *body, "", f"    return {k.name}"]

    def grid(self) -> tuple[str, ...]:
        """Extents of the launch grid, in terms of run-time sizes."""
        return tuple(self.values.text(e) for _, e in self.kernel.grid)

    def _sizes(self) -> list[str]:
        return list(dict.fromkeys(d.split()[0] for a in self.kernel.args for d in a.shape if isinstance(d, str)))

    def _strides(self, a: Arg) -> list[str]:
        if not is_strided(a, self.workspaces):
            return []
        return [stride_name(a.name, n) for n in range(len(a.shape) - 1)]

    def _declared(self, a: Arg) -> str:
        if a.dtype.name not in ELEMENTS:
            raise NotOnTarget(target=self.target, what=f"tensors of {a.dtype}", expected="another dtype")
        if not a.shape:
            return f"T.{a.dtype}"
        shape, dtype = ", ".join(map(str, a.shape)), ELEMENTS[a.dtype.name]
        if strides := self._strides(a):
            return f'T.StridedTensor(({shape}), ({", ".join(strides)}, 1), "{dtype}")'
        return f'T.Tensor(({shape},), "{dtype}")'

    def _assumptions(self) -> list[str]:
        """What a caller has looked at: without them every element is loaded alone."""
        units = [(s, stride_unit(a, self.gpu)) for a in self.kernel.args for s in self._strides(a)]
        return [f"            T.assume({s} % {n} == 0)" for s, n in units if n > 1 and self.aligned]

    def _tiles(self) -> None:
        for t in self.kernel.tiles:
            shape = ", ".join(map(str, self.layout.shape(tuple(a for a, _ in t.axes))))
            axes = ", ".join(f"{a} {n}" for a, n in t.axes)
            self._line(f't_{t.name} = T.alloc_{t.scope}(({shape},), "{ELEMENTS[t.dtype.name]}")  # {axes}')
        for name, dtype in self._variables:
            self._line(f'{name} = T.alloc_var("{dtype}")')

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    def _variable(self, name: str, dtype: str = "int32") -> str:
        if (name, dtype) not in self._variables:
            self._variables.append((name, dtype))
        return name

    def _scalar(self, name: str, e: Expr) -> str:
        """A scalar in a variable: TileLang writes anything else out wherever it is used, and simplifies for minutes."""
        if isinstance(e, Var | Const):
            return self.values.text(e)
        self._line(f"{self._variable(name)} = {self.values.text(e)}")
        return name

    # ---- statements --------------------------------------------------------------------------------------------------

    def _body(self, body: Body) -> None:
        for run in self._runs(body):
            self._run(run)

    def _runs(self, body: Body) -> list[list[Stmt]]:
        """Neighbours that compute for the same points share a loop: half as many, which TileLang has to lay out."""
        runs: list[list[Stmt]] = []
        for s in body:
            last = runs[-1] if runs else []
            if last and all(self._shares(x, s) for x in last):
                last.append(s)
            else:
                runs.append([s])
        return runs

    def _shares(self, before: Stmt, s: Stmt) -> bool:
        """Whether two statements may share a loop: both computed in registers, and the same points' elements."""
        if not isinstance(before, Map) or not isinstance(s, Map):
            return False
        dims = self.layout.dims(s.dst.axes)
        if self.layout.dims(before.dst.axes) != dims:
            return False
        if any(self._is_shared(x.dst.name) or isinstance(x.expr, Const) or is_load(x) for x in (before, s)):
            return False
        read = [x for m in (before, s) for x in walk(m.expr) if isinstance(x, Tile)]
        return all(self.layout.dims(x.axes) == dims for x in read if x.name in (before.dst.name, s.dst.name))

    def _run(self, run: list[Stmt]) -> None:
        whole = isinstance(run[0], For | If | Best)  # which see to their barriers themselves
        if not whole and self._barriers.needed(run) and (not self._ahead or self._through_memory(run[0])):
            self._line("T.sync_threads()")
        if len(run) == 1:
            self._statement(run[0])
            return
        maps = [s for s in run if isinstance(s, Map)]
        inside = self._parallel(maps[0].dst.axes)
        self._indent += 1
        for m in maps:
            self._say(m, m.loc)
            dtype = self.values.tiles[m.dst.name].dtype
            self._line(f"t_{m.dst.name}[{inside.place(m.dst.axes)}] = {inside.rounded(m.expr, dtype)}")
        self._indent -= 1

    def _statement(self, s: Stmt) -> None:
        match s:
            case Let():
                self._let(s)
            case Search():
                self._search(s)
            case For():
                self._for(s)
            case If():
                before = self._barriers.since
                self._line(f"if {self.values.text(s.cond)}:")
                self._inside(s.body)
                self._barriers.since |= before
            case Map():
                self._say(s, s.loc)
                self._map(s)
            case Gemm():
                self._say(s, s.loc)
                self._gemm(s)
            case Reduce():
                self._say(s, s.loc)
                self._reduce(s)
            case Store():
                self._say(s, s.loc)
                self._store(s)
            case Best():
                self._say(s, s.loc)
                for line in best_lines(s, self.values, self.kernel):
                    self._line(line)
                self._barriers.reached()
            case Show():
                instead = "target='interpret', which runs it"
                raise NotOnTarget(loc=s.loc, target=self.target, what=f"{s.kind}()", expected=instead)
            case Strip() | Mask() | KeyLoop() | Fetch():
                raise AssertionError(f"{type(s).__name__} in a finished loop nest of a GPU")
            case _:
                assert_never(s)

    def _say(self, s: Stmt, loc: Loc | None) -> None:
        where = f"  # {PurePath(loc.file).name}:{loc.line}" if loc is not None else ""
        text = show_stmt(s)[0].strip()
        self._line(f"# {text}{where}")

    def _inside(self, body: Body) -> None:
        names = self.values.names
        self._indent += 1
        before = len(self._lines)
        self._body(body)
        if all(line.strip().startswith("#") for line in self._lines[before:]):
            self._line("pass")
        self._indent -= 1
        self.values = replace(self.values, names=names)

    def _let(self, s: Let) -> None:
        if self._indent > 3:  # a pipelined loop may hold nothing but loads and statements over tiles
            self.values = replace(self.values, names={**self.values.names, s.name: self.values.text(s.expr)})
            return
        dtype = "float32" if s.expr.dtype.kind is Kind.FLOAT else "int32"
        self._line(f"{self._variable(s.name, dtype)} = {self.values.text(s.expr)}")

    def _search(self, s: Search) -> None:
        name, end, middle = s.name, self._variable(f"{s.name}_end"), self._variable(f"{s.name}_middle")
        self._variable(name)
        self._line(f"# {show_stmt(s)[0].strip()}")
        self._line(f"{name} = {self.values.text(s.lo)}")
        self._line(f"{end} = {self.values.text(s.hi)}")
        self._line(f"while {end} - {name} > 1:")
        inside = replace(self.values, names={**self.values.names, name: middle})
        self._line(f"    {middle} = ({name} + {end}) // 2")
        self._line(f"    if {inside.text(s.cond)}:")
        self._line(f"        {name} = {middle}")
        self._line("    else:")
        self._line(f"        {end} = {middle}")

    def _for(self, s: For) -> None:
        before, inside = self._barriers.since, self._barriers.touched(s.body)
        if s.stages:
            if before.conflicts(inside):
                self._line("T.sync_threads()")
                before = Touched()
            self._loop_ahead(s)
        else:
            self._loop(s, bool(inside.written))
        self._barriers.since |= before | (inside if s.stages else Touched())  # it may not have been entered

    def _through_memory(self, s: Stmt) -> bool:
        """Whether a statement sums elements that other threads have computed."""
        match s:
            case Gemm():
                return not on_matrix_units(s)
            case Reduce():
                return self._is_shared(s.src.name)
            case _:
                return False

    def _is_shared(self, tile: str) -> bool:
        return tile in self.values.tiles and self.values.tiles[tile].scope == "shared"

    def _loop(self, s: For, writes: bool) -> None:
        lo, hi = self._scalar(f"{s.var}_begin", s.lo), self._scalar(f"{s.var}_end", s.hi)
        self._line(f"for {s.var} in T.serial({lo}, {hi}):")
        if writes and not self._ahead:  # what the iteration before still reads
            self._line("    T.sync_threads()")
            self._barriers.reached()
        self._inside(s.body)

    def _loop_ahead(self, s: For) -> None:
        """A loop whose loads run ahead, counted from 0 as TileLang has them."""
        lo = self._scalar(f"{s.var}_begin", s.lo)
        count = self._scalar(f"{s.var}_count", sub(s.hi, s.lo))
        at = len(self._lines)
        names = self.values.names
        self.values = replace(self.values, names={**names, s.var: f"({lo} + {s.var})"})
        self._indent += 1
        self._ahead = True
        stages: list[int] = []  # of each statement of the text
        for run in self._runs(s.body):
            before = len(self._lines)
            self._run(run)
            ahead = isinstance(run[0], Map) and is_load(run[0])
            stages += [0 if ahead else 1 for line in self._lines[before:] if self._starts_statement(line)]
        self._indent -= 1
        self._ahead = False
        self.values = replace(self.values, names=names)
        self._lines.insert(
            at, "    " * self._indent + f"for {s.var} in T.Pipelined({count}, {self._staging(s, stages)}):"
        )

    def _starts_statement(self, line: str) -> bool:
        indent = "    " * self._indent
        return line.startswith(indent) and line[len(indent)] not in " #"

    def _staging(self, s: For, stages: list[int]) -> str:
        """Copies out of pages are staged by TileLang; rows gathered are staged here, with the pages they lie in."""
        loads = [x for x in s.body if isinstance(x, Map) and is_load(x)]
        if loads and all(self._is_copy(x) for x in loads):
            return f"num_stages={s.stages}"
        return f"order={list(range(len(stages)))}, stage={stages}"

    # ---- statements over tiles ---------------------------------------------------------------------------------------

    def _parallel(self, axes: Axes, only: Mapping[str, int] = MappingProxyType({})) -> Values:
        """The head of a loop over a tile's points, done by all threads together; what is printed inside of it."""
        dims = self.layout.dims(axes) or ("one",)
        at = {d: f"i_{d}" for d in dims}
        extents = ", ".join("1" if d == "one" else str(only.get(d, self.layout.extent(d))) for d in dims)
        self._line(f"for {', '.join(at.values())} in T.Parallel({extents}):")
        return replace(self.values, at=at)

    def _map(self, s: Map) -> None:
        name, dtype = f"t_{s.dst.name}", self.values.tiles[s.dst.name].dtype
        if isinstance(s.expr, Const):
            self._line(f"T.fill({name}, {self.values.rounded(s.expr, dtype)})")
        elif self._is_copy(s):
            self._copy(s)
        elif short := self._zero_past(s):
            self._padded_load(s, *short)
        else:
            inside = self._parallel(s.dst.axes)
            self._line(f"    {name}[{inside.place(s.dst.axes)}] = {inside.rounded(s.expr, dtype)}")

    def _zero_past(self, s: Map) -> tuple[str, Expr, int] | None:
        """The axis of a shared tile past whose first elements a load is zero, the guard that says so, and how many."""
        if not isinstance(s.expr, Elem) or not self._is_shared(s.dst.name):
            return None
        for c in conjuncts(s.expr.ok):
            match c:
                case Op("lt", (Iota(axis), Const(int(n)))) if axis in s.dst.axes:
                    return axis, c, n
        return None

    def _padded_load(self, s: Map, axis: str, guard: Expr, n: int) -> None:
        """Loads and zeros apart: with a guard among them, neighbours are not loaded together."""
        name, dtype = f"t_{s.dst.name}", self.values.tiles[s.dst.name].dtype
        inside = self._parallel(s.dst.axes, {axis: n})
        loads = replace(inside, known=inside.known | {guard})
        self._line(f"    {name}[{inside.place(s.dst.axes)}] = {loads.rounded(s.expr, dtype)}")
        rest = self._parallel(s.dst.axes, {axis: self.layout.sizes[axis] - n})
        rest = replace(rest, at={**rest.at, axis: f"{n} + {rest.at[axis]}"})
        self._line(f"    {name}[{rest.place(s.dst.axes)}] = {self.values.rounded(Const(0.0), dtype)}")

    def _is_copy(self, s: Map) -> bool:
        """A rectangle of a tensor, as it is stored: axes of the tile count up along dimensions of their own."""
        e = s.expr
        if not isinstance(e, Elem) or e.ok != ALWAYS or len(s.dst.axes) != 2 or set(s.dst.axes) & set(POINTS):
            return False
        starts = [_start(i, s.dst.axes) for i in e.index]
        along = tuple(a for _, a in (x for x in starts if x is not None) if a is not None)
        same = self.values.args[e.tensor].dtype is self.values.tiles[s.dst.name].dtype
        return same and None not in starts and along == s.dst.axes

    def _copy(self, s: Map) -> None:
        assert isinstance(s.expr, Elem)
        index = []
        for i in s.expr.index:
            found = _start(i, s.dst.axes)
            assert found is not None
            start, axis = self.values.text(found[0]), found[1]
            index.append(start if axis is None else f"{start} : {start} + {self.layout.sizes[axis]}")
        self._line(f"T.copy({s.expr.tensor}[{', '.join(index)}], t_{s.dst.name})")

    def _gemm(self, s: Gemm) -> None:
        if on_matrix_units(s):
            turned = s.b.axes[-1] == s.over
            self._line(
                f"T.gemm(t_{s.a.name}, t_{s.b.name}, t_{s.dst.name}, transpose_B={turned}, "
                f"clear_accum={not s.accumulate}, policy=T.GemmWarpPolicy.FullRow)"
            )
            return
        start = None if s.accumulate else "T.float32(0)"
        self._serial(s.dst.axes, s.dst.name, start, s.over, lambda v, d: f"{d} + {v.text(s.a)} * {v.text(s.b)}")

    def _reduce(self, s: Reduce) -> None:
        if self.values.tiles[s.src.name].scope == "fragment" and in_registers(s, dict(self.layout.sizes)):
            dim = self.layout.dims(s.src.axes).index(s.over)
            self._line(f"T.reduce_{s.kind}(t_{s.src.name}, t_{s.dst.name}, dim={dim}, clear=True)")
            return
        whole = self.values.tiles[s.dst.name].dtype.kind is Kind.INT
        lowest = f"T.int32({-(1 << 31)})" if whole else '-T.infinity("float32")'
        start = lowest if s.kind == "max" else "0" if whole else "T.float32(0)"

        def step(v: Values, d: str) -> str:
            return f"T.max({d}, {v.text(s.src)})" if s.kind == "max" else f"{d} + {v.text(s.src)}"

        self._serial(s.dst.axes, s.dst.name, start, s.over, step)

    def _serial(self, axes: Axes, dst: str, start: str | None, over: str, step: Step) -> None:
        """A sum or maximum of elements that every thread reads, each result by the thread that holds it."""
        inside = self._parallel(axes)
        element, total = (
            f"t_{dst}[{inside.place(axes)}]",
            self._variable(f"i_sum_{self.values.tiles[dst].dtype}", self.values.tiles[dst].dtype.name),
        )
        self._line(f"    {total} = {start or element}")
        self._line(f"    for i_{over} in T.serial({self.layout.sizes[over]}):")
        self._line(f"        {total} = {step(replace(inside, at={**inside.at, over: f'i_{over}'}), total)}")
        self._line(f"    {element} = {total}")

    def _store(self, s: Store) -> None:
        inside = self._parallel(s.axes)
        conditions = [] if s.ok == ALWAYS else [inside.text(s.ok)]
        points = has_points(s.axes, dict(self.layout.sizes))
        if points and self.layout.padded and "row" not in s.axes:  # guards say which rows there are, not which heads
            conditions.append(f"i_point < {self.layout.rows * self.layout.heads}")
        pad = "    "
        for c in conditions:
            self._line(f"{pad}if {c}:")
            pad += "    "
        at = ", ".join(inside.text(i) for i in s.index)
        value = inside.rounded(s.expr, self.values.args[s.tensor].dtype)
        self._line(f"{pad}{s.tensor}[{at}] = {value}")


def _start(i: Expr, axes: Axes) -> tuple[Expr, str | None] | None:
    """(start, axis) of an index that counts up along one axis; (index, None) of one that varies over none."""
    if not i.axes:
        return i, None
    for a in axes:
        if i.axes == (a,) and (rest := linear(i, a)) is not None:
            return rest, a
    return None
