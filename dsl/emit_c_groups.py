"""One group of statements as C loops: points, then other axes, lanes along the last axis, a reduction's axis inside."""

from __future__ import annotations

from typing import Protocol

from .algebra import substitute
from .dtypes import DType, Kind, bf16
from .emit_c_plan import POINTS, Group, Guarded
from .emit_c_storage import Plan
from .emit_c_values import Level, LoopNest, Tensor, Value, first_lane, spelled
from .expr import Axes, Const, Elem, Expr, Iota, Op, Tile, walk
from .isa import Isa
from .loops import Store
from .rewrite import expressions
from .tile import Gemm, Map, Reduce


class Surroundings(Protocol):
    """What a group asks of the kernel around it."""

    plan: Plan
    tensors: dict[str, Tensor]
    isa: Isa

    def fresh(self) -> int: ...
    def key_range(self, whole: bool = ...) -> tuple[str, str]: ...
    def nest(self, levels: list[Level], vector: str | None) -> LoopNest: ...
    @property
    def points(self) -> tuple[str, str]: ...
    @property
    def in_strip(self) -> bool: ...
    @property
    def ahead(self) -> str | None: ...
    def streams(self, tensor: str) -> bool: ...
    def product_after(self, g: Gemm) -> Gemm | None: ...
    @property
    def first_product(self) -> Gemm | None: ...


class GroupPrinter:
    def __init__(self, kernel: Surroundings, group: Group) -> None:
        self.k, self.group = kernel, group
        self.sizes = kernel.plan.sizes
        self.heads = self.sizes.get("head", 1)
        pointers = [i for i in group.items if self._is_pointers(i)]
        self.pointer_items, self.items = pointers, [i for i in group.items if i not in pointers]
        self.vector = self._vector_axis()
        self.place: dict[str, str] = {}
        self.lanes = "TW_LANES"
        self._last_write = True

    def _is_pointers(self, i: Guarded) -> bool:
        if not isinstance(i.stmt, Map):
            return False
        t = self.k.plan.storage.get(i.stmt.dst.name)
        return t is not None and t.pointers is not None

    def _vector_axis(self) -> str | None:
        """Lanes run along the last axis; along points only where all that is read lies as they do."""
        axes = self.group.axes
        if not axes:
            return None
        if axes[-1] not in POINTS:
            return axes[-1]
        full = tuple(a for a in POINTS if a in axes)
        for i in self.items:
            if isinstance(i.stmt, Store | Reduce | Gemm):
                return None
            for e in expressions(i.stmt):
                for x in walk(e):
                    plain = isinstance(x, Op) or not x.axes or (isinstance(x, Tile) and x.axes == full)
                    if not plain:
                        return None
        return axes[-1]

    # ---- the loops ---------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        out: list[str] = []
        for i in self.pointer_items:
            assert isinstance(i.stmt, Map)
            out += self._pointer_loop(i.stmt)
        if not self.items:
            return out
        levels = self._levels()
        nest = self.k.nest(levels, self.vector)
        nest.place, nest.lanes = self.place, self.lanes
        self._rescaled(nest)
        for n, i in enumerate(self.items):
            self._last_write = all(isinstance(x.stmt, Store) or x.stmt.dst != _written(i) for x in self.items[n + 1 :])
            self._statement(nest, i)
        return [*out, *_joined(nest)]

    def _levels(self) -> list[Level]:
        """Loops outermost first. The axis of lanes is last, or last but one before a reduction along another axis."""
        axes, over = self.group.axes, self.group.over
        inner = over if over is not None and over != self.vector else None
        outer = [a for a in axes if a != inner and a != self.vector]
        levels: list[Level] = []
        if self.vector in POINTS:
            levels.append(self._point_lanes())
        else:
            points = tuple(a for a in outer if a in POINTS)
            if points:
                levels.append(self._point_loop(points))
            levels += [self._loop(a) for a in outer if a not in POINTS]
            if self.vector is not None:
                levels.append(self._lane_loop(self.vector))
        if inner is not None:
            levels.append(self._loop(inner))
            self._complete_point(levels[-1])
        return levels

    def _range(self, axis: str) -> tuple[str, str]:
        match axis:
            case "row" if self.k.in_strip:
                return "ms", f"(m1 + {self.heads} - 1) / {self.heads}"
            case "row":
                return "0", "rows"
            case "head":
                return "0", str(self.heads)
            case "key":
                return self.k.key_range()
            case _:
                return "0", str(self.sizes[axis])

    def _loop(self, axis: str) -> Level:
        lo, hi = self._range(axis)
        self.place[axis] = f"i_{_plain(axis)}"
        i = self.place[axis]
        return Level(f"for (int64_t {i} = {lo}; {i} < {hi}; {i}++)", frozenset({axis}))

    def _point_loop(self, points: Axes) -> Level:
        if points != POINTS:
            return self._loop(points[0])
        m0, m1 = self.k.points
        self.place |= {"point": "m", "row": "i_row", "head": "i_head"}
        level = Level(f"for (int64_t m = {m0}; m < {m1}; m++)", frozenset(POINTS))
        level.lines.append(f"const int64_t i_row = m / {self.heads}, i_head = m - i_row * {self.heads};")
        level.lines.append("(void)i_row; (void)i_head;")
        return level

    def _complete_point(self, level: Level) -> None:
        """Inside a loop over one of row and head alone, the point that both make."""
        if "point" not in self.place and {"row", "head"} <= self.place.keys():
            self.place["point"] = "m"
            level.lines.append(f"const int64_t m = i_row * {self.heads} + i_head; (void)m;")

    def _lane_loop(self, axis: str) -> Level:
        lo, hi = self._range(axis)
        size = self.sizes[axis]
        if axis == "key":
            lo, hi = self.k.key_range(whole=True)
        self.place |= {axis: "j", first_lane(axis): "j"}
        level = Level(f"for (int64_t j = {lo}; j < {hi}; j += TW_LANES)", frozenset({axis, first_lane(axis)}))
        if size % self.k.isa.lanes:
            self.lanes = "lanes"
            level.lines.append(f"const int lanes = (int)tw_min_64(TW_LANES, {size} - j); (void)lanes;")
        return level

    def _point_lanes(self) -> Level:
        m0, m1 = self.k.points
        axes = tuple(a for a in self.group.axes if a in POINTS)
        if axes == ("row",):
            m0, m1 = self._range("row")
        if axes == ("head",):
            m0, m1 = self._range("head")
        self.lanes = "lanes"
        self.place |= {"point": "m", "row": "m", "head": "m"}
        level = Level(f"for (int64_t m = {m0}; m < {m1}; m += TW_LANES)", frozenset(POINTS))
        level.lines.append(f"const int lanes = (int)tw_min_64(TW_LANES, {m1} - m);")
        return level

    # ---- statements --------------------------------------------------------------------------------------------------

    def _statement(self, nest: LoopNest, i: Guarded) -> None:
        match i.stmt:
            case Map() if i.guard is not None:
                self._guarded(nest, i.stmt, i.guard)
            case Map(dst, e):
                self._assign(nest, dst, nest.value(e), e.dtype.kind)
            case Store():
                self._store(nest, i.stmt)
            case Reduce(dst, src, kind):
                self._reduce(nest, dst, nest.value(src), kind, None)
            case Gemm(dst, a, b):
                self._reduce(nest, dst, nest.value(a), "sum", nest.value(b), keep=i.stmt.accumulate)

    def _vectorised(self, nest: LoopNest, dst: Tile) -> bool:
        return nest.is_vector(dst.axes)

    def _assign(self, nest: LoopNest, dst: Tile, v: Value, kind: Kind) -> None:
        vector, held = self._vectorised(nest, dst), dst.dtype.kind
        text = nest.converted(v, held, vector)
        name = f"v_{dst.name}"
        ctype = _ctype(held, vector)
        known = nest.registers.get(dst.name)
        nest.inner.lines.append(f"{'' if known else ctype + ' '}{name} = {text};")
        nest.registers[dst.name] = Value(name, held, vector)
        nest.forget(dst.name)
        self._keep(nest, dst)

    def _keep(self, nest: LoopNest, dst: Tile) -> None:
        """Into memory, for those that read the tile elsewhere."""
        t = self.k.plan.storage.get(dst.name)
        if t is None or not self._last_write:
            return
        name, at = f"v_{dst.name}", nest.offset(t)
        if not self._vectorised(nest, dst):
            put = f"tw_put_bfloat16(&t_{t.name}[{at}], {name});"
            cast = "" if t.ctype == "float" else "(int32_t)"
            nest.inner.lines.append(put if t.dtype is bf16 else f"t_{t.name}[{at}] = {cast}{name};")
            return
        kind = {"float": "float32", "uint16_t": "bfloat16"}.get(t.ctype, "int32")
        if self.vector in POINTS:
            nest.inner.lines.append(f"tw_store_{kind}_part(&t_{t.name}[{at}], {name}, lanes);")
        else:
            nest.inner.lines.append(f"tw_store_{kind}(&t_{t.name}[{at}], {name});")

    def _guarded(self, nest: LoopNest, s: Map, guard: Expr) -> None:
        """A branch that all points take together: what it alone needs is computed inside it."""
        inner, dst = nest.inner, s.dst
        vector = self._vectorised(nest, dst)
        if dst.name not in nest.registers:
            old = nest.value(dst)
            inner.lines.append(f"{_ctype(dst.dtype.kind, vector)} v_{dst.name} = {old.text};")
            nest.registers[dst.name] = Value(f"v_{dst.name}", dst.dtype.kind, vector)
        cond = nest.value(guard)
        lines, known = inner.lines, dict(inner.known)
        inner.lines = []
        v = nest.value(s.expr)
        inner.lines.append(f"v_{dst.name} = {nest.converted(v, dst.dtype.kind, vector)};")
        inside = inner.lines
        inner.lines, inner.known = lines, known
        inner.lines += [f"if ({cond.text}) {{", *("    " + x for x in inside), "}"]
        nest.forget(dst.name)
        self._keep(nest, dst)

    def _rescaled(self, nest: LoopNest) -> None:
        """A tile multiplied by a number per point is left alone where that number is one."""
        if len(self.items) != 1 or not isinstance(self.items[0].stmt, Map):
            return
        match self.items[0].stmt:
            case Map(dst, Op("mul", (Tile(name), Tile() as factor))) if (
                name == dst.name and factor.axes == tuple(a for a in dst.axes if a in POINTS) and len(nest.levels) > 2
            ):
                level = nest.levels[nest.level_of(factor.axes)]
                v = nest.value(factor)
                level.lines.append(f"if ({v.text} == 1.0f) continue;")

    # ---- reductions --------------------------------------------------------------------------------------------------

    def _reduce(
        self, nest: LoopNest, dst: Tile, src: Value, kind: str, factor: Value | None, keep: bool = False
    ) -> None:
        """An accumulator in the loop around the reduction's, finished when that loop has ended."""
        over = self.group.over
        along_lanes = over == self.vector
        outer, inner = nest.levels[-2], nest.inner
        vector = along_lanes or nest.is_vector(dst.axes)
        held = dst.dtype.kind
        name = f"r{self.k.fresh()}"
        outer.lines.append(f"{_ctype(held, vector)} {name} = {_identity(kind, held, vector)};")
        x = nest.converted(src, held, vector)
        if along_lanes and self.lanes != "TW_LANES":
            suffix = "f32" if held is Kind.FLOAT else "i32"
            x = f"tw_select_{suffix}(tw_iota() < lanes, {x}, {_identity(kind, held, True)})"
        ends = "" if vector else "_1"
        if factor is not None:
            y = nest.converted(factor, held, vector)
            inner.lines.append(f"{name} = tw_fma{ends}({x}, {y}, {name});")
        else:
            inner.lines.append(f"{name} = {spelled('add' if kind == 'sum' else 'max', [name, x], held, vector)};")
        total = name
        if along_lanes:
            total = f"tw_{'sum' if kind == 'sum' else 'max_of'}{'' if held is Kind.FLOAT else '_i32'}({name})"
        self._finish(nest, outer, dst, total, vector and not along_lanes, keep)

    def _finish(self, nest: LoopNest, outer: Level, dst: Tile, total: str, vector: bool, keep: bool) -> None:
        t = self.k.plan.storage[dst.name]
        at = nest.offset(t)
        kind = {"float": "float32", "uint16_t": "bfloat16"}.get(t.ctype, "int32")
        if vector:
            before = f"tw_load_{kind}(&t_{t.name}[{at}]) + " if keep else ""
            outer.ends.append(f"tw_store_{kind}(&t_{t.name}[{at}], {before}{total});")
        elif t.dtype is bf16:
            outer.ends.append(f"tw_put_bfloat16(&t_{t.name}[{at}], {total});")
        else:
            outer.ends.append(f"t_{t.name}[{at}] {'+=' if keep else '='} {total};")

    # ---- stores ------------------------------------------------------------------------------------------------------

    def _store(self, nest: LoopNest, s: Store) -> None:
        dtype = self.k.tensors[s.tensor].arg.dtype
        v = nest.value(s.expr)
        base = nest.contiguous(s.index, s.ok)
        if self.vector is None or self.vector in POINTS:
            self._store_one(nest, s, v, dtype)
        elif base is not None:
            self._store_row(nest, s, v, dtype, base)
        else:
            self._store_lanes(nest, s, v, dtype)

    def _store_one(self, nest: LoopNest, s: Store, v: Value, dtype: DType) -> None:
        terms = [f"{nest.value(i).text} * a_{s.tensor}_s{n}" for n, i in enumerate(s.index)]
        ok = nest.value(s.ok).text
        text = nest.converted(v, dtype.kind, False)
        address = " + ".join(terms) or "0"
        nest.inner.lines.append(f"if ({ok}) tw_put_{dtype.name}(&a_{s.tensor}[{address}], {text});")

    def _store_row(self, nest: LoopNest, s: Store, v: Value, dtype: DType, base: tuple[Expr, ...]) -> None:
        ok = nest.value(s.ok)
        pointer = nest.pointer(s.tensor, base, s.ok, False, None)
        at = f"{pointer} + {self.place[self.vector or '']}"
        x = nest.converted(v, dtype.kind, True)
        guard = "" if ok.text == "1" else f"if ({ok.text}) "
        if self.lanes == "TW_LANES" and self.k.streams(s.tensor):
            nest.inner.lines.append(f"{guard}tw_stream_{dtype.name}({at}, {x}, large_{s.tensor});")
        elif self.lanes == "TW_LANES":
            nest.inner.lines.append(f"{guard}tw_store_{dtype.name}({at}, {x});")
        else:
            nest.inner.lines.append(f"{guard}tw_store_{dtype.name}_part({at}, {x}, {self.lanes});")

    def _store_lanes(self, nest: LoopNest, s: Store, v: Value, dtype: DType) -> None:
        level, n = nest.inner, self.k.fresh()
        terms: list[str] = []
        for axis, i in enumerate(s.index):
            w = nest.value(i)
            if w.vector:
                level.lines.append(f"int32_t w{n}_{axis}[TW_LANES]; tw_store_int32(w{n}_{axis}, {w.text});")
            terms.append(f"{f'(int64_t)w{n}_{axis}[lane]' if w.vector else w.text} * a_{s.tensor}_s{axis}")
        ok = nest.value(s.ok)
        level.lines.append(f"int32_t ok{n}[TW_LANES]; tw_store_int32(ok{n}, {nest.converted(ok, Kind.BOOL, True)});")
        floats = dtype.kind is Kind.FLOAT
        x = nest.converted(v, dtype.kind, True)
        level.lines.append(f"{'float' if floats else 'int32_t'} y{n}[TW_LANES];")
        level.lines.append(f"tw_store_{'float32' if floats else 'int32'}(y{n}, {x});")
        put = f"tw_put_{dtype.name}(&a_{s.tensor}[{' + '.join(terms)}], y{n}[lane]);"
        level.lines.append(f"for (int lane = 0; lane < {self.lanes}; lane++) if (ok{n}[lane]) {put}")

    # ---- rows of a cache ---------------------------------------------------------------------------------------------

    def _pointer_loop(self, s: Map) -> list[str]:
        """The rows of a key tile where they lie in memory; zeros in place of those that are not read."""
        e = s.expr
        assert isinstance(e, Elem)
        t = self.k.plan.storage[s.dst.name]
        rows = t.axes[0]
        lo, hi = self.k.key_range() if rows == "key" else ("0", str(t.sizes[0]))
        level = Level(f"for (int64_t j = {lo}; j < {hi}; j++)", frozenset({rows}))
        nest = self.k.nest([level], None)
        nest.place = {rows: "j"}
        *outer, last = e.index
        first = substitute(last, {Iota(t.axes[1]): Const(0)})
        p = nest.pointer(e.tensor, (*outer, first), e.ok, True, e)
        level.lines.append(f"t_{t.name}[j] = {p};")
        return _joined(nest)


def _written(i: Guarded) -> Tile | None:
    return None if isinstance(i.stmt, Store) else i.stmt.dst


def _plain(axis: str) -> str:
    return axis.replace(" ", "_")


def _ctype(kind: Kind, vector: bool) -> str:
    if kind is Kind.FLOAT:
        return "tw_f32" if vector else "float"
    return "tw_i32" if vector else "int64_t"


def _identity(kind: str, held: Kind, vector: bool) -> str:
    if held is Kind.FLOAT:
        text = "0.0f" if kind == "sum" else "-INFINITY"
        return f"tw_f32_all({text})" if vector else text
    text = "0" if kind == "sum" else "INT32_MIN"
    return f"tw_i32_all({text})" if vector else text


def _joined(nest: LoopNest) -> list[str]:
    """The loops as text. A block around them keeps their names to themselves."""

    def inside(n: int) -> list[str]:
        level = nest.levels[n]
        body = [*level.lines, *(inside(n + 1) if n + 1 < len(nest.levels) else []), *level.ends]
        if level.head is None:
            return ["{", *("    " + x for x in body), "}"]
        return [level.head + " {", *("    " + x for x in body), "}"]

    return inside(0)
