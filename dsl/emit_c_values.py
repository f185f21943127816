"""Expressions as C: each value is computed once, in the outermost loop that knows everything it depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .algebra import linear, substitute
from .dtypes import Kind
from .emit_c_plan import POINTS
from .emit_c_storage import Storage
from .expr import Axes, Const, Elem, Expr, Iota, Op, Tile, Var, walk
from .loops import Arg
from .scalars import OPS

# Spelling of operations on vectors and on numbers, by the kind that they compute in: {0}, {1} .. are operands.
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "le": "<=", "lt": "<", "eq": "==", "ne": "!=",
    "bitand": "&", "bitor": "|", "bitxor": "^",
}  # fmt: skip
_WRAPS = ("add", "sub", "mul")  # in lanes that a condition leaves out, anything may stand
_COMPARES = ("le", "lt", "eq", "ne")
_LOGIC = {"and": "&", "or": "|"}


@dataclass(frozen=True)
class Value:
    """A C expression without side effects: a name or a constant."""

    text: str
    kind: Kind
    vector: bool = False


@dataclass(frozen=True)
class Tensor:
    """A tensor argument as C sees it: `a_<name>` and strides `a_<name>_s<axis>`."""

    arg: Arg
    number: int

    @property
    def ctype(self) -> str:
        return ELEMENTS[self.arg.dtype.name]


ELEMENTS = {
    "float32": "float", "float16": "uint16_t", "bfloat16": "uint16_t", "float8_e4m3fn": "uint8_t",
    "int32": "int32_t", "int64": "int64_t", "uint32": "uint32_t", "uint8": "uint8_t", "bool": "uint8_t",
}  # fmt: skip


@dataclass
class Level:
    """One loop: its head, what is computed at the start and at the end of every turn."""

    head: str | None  # None: the block around the loops
    axes: frozenset[str]
    lines: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    known: dict[Expr, Value] = field(default_factory=dict)


@dataclass
class LoopNest:
    """Loops around one group of statements, innermost last. `vector`: the axis whose lanes are computed at once."""

    levels: list[Level]
    place: Mapping[str, str]  # axis -> C expression of the index along it (of the first lane, along `vector`)
    vector: str | None  # "row" and "head" together where points are lanes
    lanes: str  # C expression: how many lanes hold points; "TW_LANES" where all do
    tiles: Mapping[str, Storage]
    tensors: Mapping[str, Tensor]
    lanes_static: int
    fresh: Callable[[], int]
    local_point: str = "m0"  # first point and row of the strip
    local_row: str = "ms"
    registers: dict[str, Value] = field(default_factory=dict)  # tiles that this turn has written

    @property
    def inner(self) -> Level:
        return self.levels[-1]

    def is_vector(self, axes: Axes) -> bool:
        if self.vector is None:
            return False
        return bool(set(POINTS) & set(axes)) if self.vector in POINTS else self.vector in axes

    def level_of(self, axes: Axes) -> int:
        return max((n for n, level in enumerate(self.levels) if level.axes & set(axes)), default=0)

    # ---- values ------------------------------------------------------------------------------------------------------

    def value(self, e: Expr) -> Value:
        """The value of e, computed at the level where it first can be."""
        match e:
            case Const():
                return constant(e)
            case Var(name, dtype):
                return Value(f"s_{name}", dtype.kind)
            case Tile(name) if name in self.registers:
                return self.registers[name]
        level = self.levels[self.level_of(e.axes)]
        if e not in level.known:
            level.known[e] = self._made(e, level)
        return level.known[e]

    def forget(self, tile: str) -> None:
        """The tile has been written: what was computed from its old value is no longer its value."""
        stale = [e for e in self.inner.known if any(isinstance(x, Tile) and x.name == tile for x in walk(e))]
        for e in stale:
            del self.inner.known[e]

    def name(self, level: Level, text: str, kind: Kind, vector: bool) -> Value:
        ctype = {Kind.FLOAT: "tw_f32" if vector else "float"}.get(kind, "tw_i32" if vector else "int64_t")
        made = f"x{self.fresh()}"
        level.lines.append(f"const {ctype} {made} = {text};")
        return Value(made, kind, vector)

    def _made(self, e: Expr, level: Level) -> Value:
        match e:
            case Iota(axis):
                return self._iota(axis, level)
            case Tile():
                return self._tile(e, level)
            case Op():
                return self._operation(e, level)
            case Elem():
                return self._element(e, level)
            case _:
                raise AssertionError(f"{type(e).__name__} in a finished loop nest")

    def _iota(self, axis: str, level: Level) -> Value:
        if not self.is_vector((axis,)):
            return Value(self.place[axis], Kind.INT)
        return self.name(level, f"tw_i32_all((int32_t)({self.place[axis]})) + tw_iota()", Kind.INT, True)

    def offset(self, t: Storage) -> str:
        """Where the current point lies in a tile."""
        terms: list[str] = []
        axes = set(t.axes)
        if set(POINTS) <= axes:
            m = f"({self.place['point']} - {self.local_point})" if t.local else self.place["point"]
            terms.append(_times(m, t.stride("head")))
        for a, stride in zip(t.axes, t.strides, strict=True):
            if set(POINTS) <= axes and a in POINTS:
                continue
            at = self.place[a]
            terms.append(_times(f"({at} - {self.local_row})" if t.local and a == "row" else at, stride))
        return " + ".join(terms) or "0"

    def _tile(self, e: Tile, level: Level) -> Value:
        t, kind = self.tiles[e.name], e.dtype.kind
        at, vector = self.offset(t), self.is_vector(e.axes)
        if not vector:
            text = f"tw_one_bfloat16(&t_{e.name}[{at}])" if t.ctype == "uint16_t" else f"t_{e.name}[{at}]"
            return self.name(level, text, kind, False)
        load = {"float": "float32", "uint16_t": "bfloat16"}.get(t.ctype, "int32")
        if self.vector in POINTS:
            return self.name(level, f"tw_load_{load}_part(&t_{e.name}[{at}], {self.lanes})", kind, True)
        if e.axes[-1] == self.vector:
            return self.name(level, f"tw_load_{load}(&t_{e.name}[{at}])", kind, True)
        step = t.stride(self.vector or "")
        return self._gathered(level, kind, f"t_{e.name}[{at} + (int64_t)lane * {step}]")

    def _gathered(self, level: Level, kind: Kind, one: str) -> Value:
        """A vector made lane by lane of `one`, which reads `lane`."""
        n = self.fresh()
        element, load = ("float", "float32") if kind is Kind.FLOAT else ("int32_t", "int32")
        one = f"-(({one}) != 0)" if kind is Kind.BOOL else one
        level.lines.append(f"{element} g{n}[TW_LANES] = {{0}};")
        level.lines.append(f"for (int lane = 0; lane < {self.lanes}; lane++) g{n}[lane] = {one};")
        return self.name(level, f"tw_load_{load}(g{n})", kind, True)

    # ---- operations --------------------------------------------------------------------------------------------------

    def _operation(self, e: Op, level: Level) -> Value:
        vector = self.is_vector(e.axes)
        computed = _computes_in(e)
        args = [self.value(a) for a in e.args]
        texts = [self.converted(a, _operand_kind(e, n, computed), vector) for n, a in enumerate(args)]
        return self.name(level, spelled(e.name, texts, computed, vector), e.dtype.kind, vector)

    def converted(self, v: Value, kind: Kind, vector: bool) -> str:
        """The value as a number or vector of a kind."""
        text = v.text
        if kind is Kind.FLOAT and v.kind is not Kind.FLOAT:
            text = f"tw_f32_of_i32({text})" if v.vector else f"(float)({text})"
        if vector and not v.vector:
            if kind is Kind.FLOAT:
                return f"tw_f32_all({text})"
            return f"tw_i32_all({f'-({text} != 0)' if kind is Kind.BOOL else f'(int32_t)({text})'})"
        return text

    # ---- reads of tensors --------------------------------------------------------------------------------------------

    def _element(self, e: Elem, level: Level) -> Value:
        kind, t = e.dtype.kind, self.tensors[e.tensor]
        if not self.is_vector(e.axes):
            address = self._address_of(e.tensor, e.index, level)
            ok = self._guard(e, e.ok, e.index, level)
            read = self._read(t, address)
            return self.name(level, read if ok == "1" else f"({ok}) ? {read} : 0", kind, False)
        same = self._same_in_all_lanes(e)
        if same is not None:
            return self.name(level, self.converted(self._element(same, level), kind, True), kind, True)
        base = None if t.arg.pages_of is not None else self.contiguous(e.index, e.ok)
        if base is not None:
            return self._row(e, base, level)
        return self._lanes(e, level)

    def _read(self, t: Tensor, address: str) -> str:
        """One element; of a page table, one that is no page is reported."""
        read = f"tw_one_{t.arg.dtype.name}(&a_{t.arg.name}[{address}])"
        if t.arg.pages_of is None:
            return read
        pool = self.tensors[t.arg.pages_of]
        return f"tw_page(fault, {pool.number}, {read}, {_extent(pool, 0)})"

    def contiguous(self, index: tuple[Expr, ...], ok: Expr) -> tuple[Expr, ...] | None:
        """The index of the first lane, where lanes are neighbours in memory and read or guarded together."""
        if self.vector is None or self.vector in POINTS or not index:
            return None
        *outer, last = index
        rest = linear(last, self.vector)
        return None if rest is None or any(self.vector in x.axes for x in (*outer, ok)) else (*outer, rest)

    def pointer(self, tensor: str, base: tuple[Expr, ...], ok: Expr, constant_data: bool, e: Elem | None) -> str:
        """A pointer to where lane 0 of turn 0 reads, zeros where `ok` is false."""
        at = max(self.level_of(x.axes) for x in (*base, ok, Const(0)))
        level = self.levels[at]
        t, n = self.tensors[tensor], self.fresh()
        address = self._address_of(tensor, base, level)
        guard = self._guard(e, ok, base, level) if e is not None else "1"
        here = f"&a_{tensor}[{address}]"
        text = here if guard == "1" else f"({guard}) ? {here} : (const {t.ctype} *)tw_zeros"
        level.lines.append(f"{'const ' if constant_data else ''}{t.ctype} *p{n} = {text};")
        return f"p{n}"

    def _row(self, e: Elem, base: tuple[Expr, ...], level: Level) -> Value:
        key = Elem(e.tensor, base, e.dtype, e.ok)
        at = self.levels[max(self.level_of(x.axes) for x in (*base, e.ok, Const(0)))]
        if key not in at.known:
            at.known[key] = Value(self.pointer(e.tensor, base, e.ok, True, e), Kind.INT)
        p, t = at.known[key].text, self.tensors[e.tensor]
        where, name = self.place[self.vector or ""], t.arg.dtype.name
        if self.lanes == "TW_LANES":
            return self.name(level, f"tw_load_{name}({p} + {where})", e.dtype.kind, True)
        return self.name(level, f"tw_load_{name}_part({p} + {where}, {self.lanes})", e.dtype.kind, True)

    def _same_in_all_lanes(self, e: Elem) -> Elem | None:
        """The read of lane 0, where all lanes read one element: scales of blocks that lanes divide."""
        if self.vector is None or self.vector in POINTS or self.vector in e.ok.axes:
            return None
        axis = self.vector
        for i in e.index:
            match i:
                case _ if axis not in i.axes:
                    pass
                case Op("floordiv", (a, Const(int(size)))) if size % self.lanes_static == 0:
                    rest = linear(a, axis)
                    if not (isinstance(rest, Const) and int(rest.value) % self.lanes_static == 0):
                        return None
                case _:
                    return None
        first: Expr = Iota(first_lane(axis))
        return Elem(e.tensor, tuple(substitute(i, {Iota(axis): first}) for i in e.index), e.dtype, e.ok, e.loc)

    def _lanes(self, e: Elem, level: Level) -> Value:
        """Every lane reads an element of its own."""
        t = self.tensors[e.tensor]
        terms, checks = list[str](), list[str]()
        for n, i in enumerate(e.index):
            v = self.value(i)
            text = f"(int64_t){self._spread(v, level)}[lane]" if v.vector else v.text
            terms.append(f"{text} * a_{e.tensor}_s{n}")
            if needs_check(i, t):
                checks.append(self._inside(t, n, text))
        ok = self.value(e.ok)
        guards = [] if e.ok == Const(True) else [f"{self._spread(ok, level)}[lane]" if ok.vector else ok.text]
        guard = " && ".join((*guards, *checks))
        read = self._read(t, " + ".join(terms))
        return self._gathered(level, e.dtype.kind, f"({guard}) ? {read} : 0" if guard else read)

    def _spread(self, v: Value, level: Level) -> str:
        """The lanes of an integer vector, in memory."""
        n = self.fresh()
        level.lines.append(f"int32_t i{n}[TW_LANES]; tw_store_int32(i{n}, {v.text});")
        return f"i{n}"

    def _address_of(self, tensor: str, index: tuple[Expr, ...], level: Level) -> str:
        terms = [f"{self.value(i).text} * a_{tensor}_s{n}" for n, i in enumerate(index) if i != Const(0)]
        return " + ".join(terms) or "0"

    def _guard(self, e: Elem | None, ok: Expr, index: tuple[Expr, ...], level: Level) -> str:
        """`ok`, and that every index that was read from memory lies inside."""
        tests = [] if ok == Const(True) else [self.value(ok).text]
        if e is not None:
            t = self.tensors[e.tensor]
            tests += [self._inside(t, n, self.value(i).text) for n, i in enumerate(index) if needs_check(i, t)]
        return " && ".join(tests) or "1"

    def _inside(self, t: Tensor, axis: int, index: str) -> str:
        return f"tw_inside(fault, {t.number}, {axis}, {index}, {_extent(t, axis)})"


def _extent(t: Tensor, axis: int) -> str:
    extent = t.arg.shape[axis]
    return str(extent) if isinstance(extent, int) else f"s_{extent.partition(' + ')[0]}"


def first_lane(axis: str) -> str:
    """The axis that stands for the first lane of a vector along another."""
    return f"first {axis}"


def needs_check(i: Expr, t: Tensor) -> bool:
    """Indices read from memory, and those of page tables, which may be too short for the keys in sight."""
    return t.arg.pages_of is not None or from_memory(i)


def from_memory(i: Expr) -> bool:
    """Whether an index depends on what a table or list holds, which may be anything."""
    return any((isinstance(x, Tile) and x.dtype.kind is Kind.INT) or isinstance(x, Elem) for x in walk(i)) and not (
        isinstance(i, Op) and i.name == "mod"
    )


def _times(text: str, factor: int) -> str:
    return text if factor == 1 else f"{text} * {factor}"


def constant(e: Const) -> Value:
    match e.value:
        case bool(x):
            return Value(str(int(x)), Kind.BOOL)
        case int(x):
            return Value(f"{x}" if abs(x) < 1 << 31 else f"INT64_C({x})", Kind.INT)
        case x if math.isnan(x):
            return Value("NAN", Kind.FLOAT)
        case x if math.isinf(x):
            return Value("INFINITY" if x > 0 else "(-INFINITY)", Kind.FLOAT)
        case x:
            return Value(f"{float(np.float32(x)).hex()}f", Kind.FLOAT)


def _computes_in(e: Op) -> Kind:
    """The kind that operands are brought to."""
    if e.name in ("and", "or", "not"):
        return Kind.BOOL
    if e.name in ("bits", "float", "int", "from_bits"):
        return e.args[0].dtype.kind
    if e.name in _COMPARES:
        return Kind.FLOAT if any(a.dtype.kind is Kind.FLOAT for a in e.args) else Kind.INT
    return e.dtype.kind


def _operand_kind(e: Op, n: int, computed: Kind) -> Kind:
    return Kind.BOOL if e.name == "where" and n == 0 else computed


def spelled(name: str, args: list[str], kind: Kind, vector: bool) -> str:
    """An operation in C."""
    ends = "" if vector else "_1"
    floats = kind is Kind.FLOAT
    if name in _COMPARES:
        compared = f"({args[0]} {_INFIX[name]} {args[1]})"
        return f"(tw_i32){compared}" if vector else compared
    if name in _WRAPS and vector and not floats:
        return f"tw_{name}_i32({args[0]}, {args[1]})"
    if name in _INFIX:
        return f"({args[0]} {_INFIX[name]} {args[1]})"
    if name in _LOGIC:
        return f"({args[0]} {_LOGIC[name]} {args[1]})"
    match name:
        case "not":
            return f"(~{args[0]})" if vector else f"(!{args[0]})"
        case "where" if vector:
            return f"tw_select_{'f32' if floats else 'i32'}({', '.join(args)})"
        case "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        case "float" | "int":
            return _cast(name, args[0], kind, vector)
        case "bits" | "from_bits":
            return f"tw_{name}{ends}({args[0]})"
        case "floordiv" | "mod":
            return f"tw_{name}_i32({args[0]}, {args[1]})" if vector else f"tw_{name}_64({args[0]}, {args[1]})"
        case "max" | "min" if not floats:
            return f"tw_{name}_i32({', '.join(args)})" if vector else f"tw_{name}_64({', '.join(args)})"
        case "abs" | "shl" | "shr" if not floats:
            return f"tw_{name}_i32{ends}({', '.join(args)})"
    assert name in OPS
    return f"tw_{name}{ends}({', '.join(args)})"


def _cast(name: str, arg: str, source: Kind, vector: bool) -> str:
    if name == "float":
        return arg if source is Kind.FLOAT else f"tw_f32_of_i32({arg})" if vector else f"(float)({arg})"
    if source is Kind.FLOAT:
        return f"tw_i32_of_f32({arg})" if vector else f"tw_i32_of_f32_1({arg})"
    return f"({arg} & 1)" if source is Kind.BOOL and vector else arg
