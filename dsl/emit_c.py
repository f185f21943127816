"""A loop nest as C: one function per kernel, which does one grid point, and one that runs them all.

What is printed is the nest and nothing else: loops, branches and scalars as they stand, statements over the same axes
in shared vector loops, matrix products by the micro-kernels of `dsl/cpu`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from .dtypes import Kind, bf16
from .emit_c_groups import GroupPrinter
from .emit_c_plan import Block, Group, Node, Panels, Plan, Product, Storage, panel_words, plan_kernel
from .emit_c_values import ELEMENTS, Level, LoopNest, Tensor
from .expr import Expr
from .isa import Isa
from .loops import Arg, Best, For, If, Kernel, Let, Program, Search, Strip
from .printer import show, show_stmt
from .rewrite import statements
from .tile import Gemm

FEW = 4  # points up to which keys are read where they lie: packing would cost more than it saves


@dataclass(frozen=True)
class CSource:
    """C text, and in which order it takes what a call passes."""

    text: str
    tensors: tuple[Arg, ...]  # addresses and strides; after them a buffer for a fault
    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    scratch_bytes: int  # of one thread, at most


def emit_c(program: Program, isa: Isa) -> CSource:
    """The C program of a finished loop nest, for processors of one instruction set."""
    everything = (*program.args, *program.workspaces)
    tensors = tuple(a for a in everything if a.shape)
    scalars = [a for a in everything if not a.shape]
    named = [d.partition(" + ")[0] for a in tensors for d in a.shape if isinstance(d, str)]
    sizes = tuple(dict.fromkeys([*named, *(a.name for a in scalars if a.dtype.kind is Kind.INT)]))
    numbers = tuple(a.name for a in scalars if a.dtype.kind is not Kind.INT)
    printers = [_KernelPrinter(k, tensors, sizes, numbers, isa) for k in program.kernels]
    bodies = [line for p in printers for line in (*p.function(), "")]
    zeros = max([64, *(n for p in printers for n in p.plan.sizes.values())]) + 64
    head = [
        f"/* {program.name}, for {isa.name} */",
        '#include "tilewright.h"',
        "",
        f"static const double tw_zeros[{zeros}] __attribute__((aligned(64)));",
        "",
    ]
    text = "\n".join([*head, *bodies, *_program(program, printers, sizes)]) + "\n"
    return CSource(text, tensors, sizes, numbers, max(p.plan.scratch_bytes for p in printers))


def _program(program: Program, printers: list[_KernelPrinter], sizes: tuple[str, ...]) -> list[str]:
    out = [
        '__attribute__((visibility("default")))',
        "int tw_program(const tw_args *args, tw_parallel_function parallel, int threads) {",
        *(f"    const int64_t s_{n} = args->sizes[{i}]; (void)s_{n};" for i, n in enumerate(sizes)),
        "    int status = 0;",
    ]
    for p in printers:
        out += p.grid_points()
        call = f"parallel({p.kernel.name}, (void *)args, n_{p.kernel.name}, {p.scratch()}, threads)"
        out.append(f"    if (status == 0 && n_{p.kernel.name} > 0) status = {call};")
    return [*out, "    return status;", "}"]


class _KernelPrinter:
    """One kernel's function."""

    def __init__(
        self, kernel: Kernel, tensors: tuple[Arg, ...], sizes: tuple[str, ...], numbers: tuple[str, ...], isa: Isa
    ) -> None:
        self.kernel, self.isa = kernel, isa
        self._all, self._sizes, self._numbers = tensors, sizes, numbers
        self.tensors = {a.name: Tensor(a, n) for n, a in enumerate(tensors)}
        self.plan: Plan = plan_kernel(kernel, {a.name: a for a in tensors}, isa.lanes, 2 * isa.lanes)
        self._count = itertools.count()
        self._heads = self.plan.sizes.get("head", 1)
        self._out: list[str] = []
        self._keys_end: list[str] = []  # of the key loops around, innermost last
        self._columns: list[tuple[str, str]] = []
        self._points = ("0", "points")  # of the strip around, else of the tile
        self._after_rows = ""  # what comes once it is known that there are rows

    def fresh(self) -> int:
        return next(self._count)

    # ---- the function ------------------------------------------------------------------------------------------------

    def function(self) -> list[str]:
        k = self.kernel
        self._out = [f"static void {k.name}(void *context, int64_t item, void *scratch) {{"]
        self._line("const tw_args *args = context;")
        self._line(f"int64_t *const fault = args->data[{len(self._all)}]; (void)fault;")
        self._arguments()
        self._grid()
        for t in self.plan.storage.values():
            kind = "const void *" if t.pointers is not None else f"{t.ctype} "
            self._line(f"{kind}*const t_{t.name} = (void *)((char *)scratch + {t.offset});{_shape(t)}")
        for p in self.plan.panels.values():
            word = "uint32_t" if self._is_bf16(p.tile) else "float"
            self._line(f"{word} *const {panels_name(p)} = (void *)((char *)scratch + {p.offset});")
        if not self._says_rows():
            self._line(f"const int64_t rows = {self.plan.sizes.get('row', 1)}; (void)rows;")
            self._line(f"const int64_t points = rows * {self._heads}; (void)points;")
        tiles = any(self._is_bf16(p.tile) for p in self.plan.panels.values())
        self._after_rows = "tw_begin_products();" if tiles else ""
        if tiles and not self._says_rows():
            self._line(self._after_rows)
        self._nodes(self.plan.nodes)
        if tiles:
            self._line("tw_end_products();")
        return [*self._out, "}"]

    def grid_points(self) -> list[str]:
        """How many points the grid has, as a constant `n_<kernel>`."""
        self._out = []
        extents = [self.number(e) for _, e in self.kernel.grid]
        return [*self._out, f"    const int64_t n_{self.kernel.name} = {' * '.join(f'({x})' for x in extents)};"]

    def _line(self, text: str) -> None:
        self._out.append("    " * (1 + self._depth()) + text)

    def _depth(self) -> int:
        return self._indent

    _indent = 0

    def _says_rows(self) -> bool:
        names = {n.name for n in self.plan.nodes if isinstance(n, Let)}
        return {"r0", "r1"} <= names

    def _arguments(self) -> None:
        """Addresses, strides and sizes that this kernel uses."""
        used = {a.name for a in self.kernel.args}
        strides = 0
        for n, a in enumerate(self._all):
            if a.name in used:
                ctype = ELEMENTS[a.dtype.name]
                self._line(f"{ctype} *const a_{a.name} = args->data[{n}];")
                names = [f"a_{a.name}_s{i} = args->strides[{strides + i}]" for i in range(len(a.shape))]
                self._line(f"const int64_t {', '.join(names)};")
                self._line(" ".join(f"(void)a_{a.name}_s{i};" for i in range(len(a.shape))))
            strides += len(a.shape)
        for i, name in enumerate(self._sizes):
            self._line(f"const int64_t s_{name} = args->sizes[{i}]; (void)s_{name};")
        for i, name in enumerate(self._numbers):
            self._line(f"const float s_{name} = (float)args->numbers[{i}]; (void)s_{name};")

    def _grid(self) -> None:
        """Heads outermost, so that threads share what they read; later row tiles first, which see more keys."""
        grid = list(self.kernel.grid)
        rest = "item"
        for n, (name, extent) in enumerate(grid):
            size = self.number(extent)
            at = rest if n == len(grid) - 1 else f"{rest} % ({size})"
            if name == "tile":
                at = f"({size}) - 1 - ({at})"
            self._line(f"const int64_t s_{name} = {at}; (void)s_{name};")
            rest = f"({rest} / ({size}))"

    # ---- statements --------------------------------------------------------------------------------------------------

    def _nodes(self, nodes: list[Node]) -> None:
        for n in nodes:
            match n:
                case Let():
                    self._let(n)
                case Search():
                    self._search(n)
                case Group():
                    self._comment(n)
                    for line in GroupPrinter(self, n).lines():
                        self._line(line)
                    self._pack(n.writes)
                case Product(g):
                    self._product(g)
                case Best():
                    self._best(n)
                case Block():
                    self._block(n)

    def _comment(self, g: Group) -> None:
        for i in g.items:
            where = f"  ({i.stmt.loc})" if i.stmt.loc is not None else ""
            guard = f"if {show(i.guard)}: " if i.guard is not None else ""
            self._line(f"/* {guard}{show_stmt(i.stmt)[0].strip()}{where} */")

    def number(self, e: Expr) -> str:
        """A scalar expression, statements for its parts printed before it."""
        nest = self.nest([], None)
        v = nest.value(e)
        for line in nest.levels[0].lines:
            self._line(line)
        return v.text

    def nest(self, levels: list[Level], vector: str | None) -> LoopNest:
        top = Level(None, frozenset())
        return LoopNest(
            [top, *levels], {}, vector, "TW_LANES", self.plan.storage, self.tensors, self.isa.lanes, self.fresh
        )

    def _let(self, s: Let) -> None:
        value = self.number(s.expr)
        kind = "float" if s.expr.dtype.kind is Kind.FLOAT else "int64_t"
        self._line(f"const {kind} s_{s.name} = {value}; (void)s_{s.name};")
        if s.name == "r1":
            self._line("const int64_t rows = s_r1 - s_r0;")
            self._line("if (rows <= 0) return;")
            self._line(f"const int64_t points = rows * {self._heads}; (void)points;")
            if self._after_rows:
                self._line(self._after_rows)

    def _search(self, s: Search) -> None:
        lo, hi = self.number(s.lo), self.number(s.hi)
        self._line(f"int64_t s_{s.name} = {lo};")
        self._line(f"for (int64_t end = {hi}; end - s_{s.name} > 1;) {{")
        self._indent += 1
        self._line(f"const int64_t first = s_{s.name}, middle = first + (end - first) / 2;")
        self._line(f"s_{s.name} = middle;")
        cond = self.number(s.cond)
        self._line(f"if (!({cond})) {{ end = middle; s_{s.name} = first; }}")
        self._indent -= 1
        self._line("}")

    def _block(self, b: Block) -> None:
        s = b.stmt
        match s:
            case For(var, lo, hi):
                first, end = self.number(lo), self.number(hi)
                self._line(f"for (int64_t s_{var} = {first}, end_{var} = {end}; s_{var} < end_{var}; s_{var}++) {{")
            case If(cond):
                self._line(f"if ({self.number(cond)}) {{")
            case Strip():
                step = s.points
                self._line(f"for (int64_t m0 = 0; m0 < points; m0 += {step}) {{")
        self._indent += 1
        if isinstance(s, For) and s.var.startswith("kt"):
            self._key_loop(s, b)
        elif isinstance(s, Strip):
            self._strip(s, b)
        else:
            self._nodes(b.body)
        self._indent -= 1
        self._line("}")

    def _key_loop(self, s: For, b: Block) -> None:
        """Of a last tile that is not full, only the keys that there are."""
        lets = list(itertools.takewhile(lambda n: isinstance(n, Let), b.body))
        self._nodes(lets)
        size = self.plan.sizes.get("key", 1)
        end = f"s_hi{s.var[2:]}"
        name = f"keys_{s.var}"
        if "_" in s.var:
            self._line(f"const int64_t {name} = {size}; (void){name};")
        else:
            self._line(f"const int64_t {name} = tw_min_64({size}, tw_max_64({end} - s_k0, 0)); (void){name};")
        self._keys_end.append(name)
        self._nodes(b.body[len(lets) :])
        self._keys_end.pop()

    def _strip(self, s: Strip, b: Block) -> None:
        self._line(f"const int64_t m1 = tw_min_64(m0 + {s.points}, points), ms = m0 / {self._heads}; (void)ms;")
        self._line(f"const int64_t s_{s.first} = ms, s_{s.last} = (m1 - 1) / {self._heads};")
        self._line(f"(void)s_{s.first}; (void)s_{s.last};")
        lets = list(itertools.takewhile(lambda n: isinstance(n, Let), b.body))
        self._nodes(lets)
        if s.columns is not None:
            lo, hi = (f"s_{c}" for c in s.columns)
            self._line(f"if ({lo} >= {hi}) continue;")
            self._line(f"const int64_t c0 = {lo} / TW_LANES * TW_LANES;")
            self._line("(void)c0;")
            self._columns.append((lo, hi))
        outside, self._points = self._points, ("m0", "m1")
        self._nodes(b.body[len(lets) :])
        self._points = outside
        if s.columns is not None:
            self._columns.pop()

    # ---- what groups ask ---------------------------------------------------------------------------------------------

    @property
    def points(self) -> tuple[str, str]:
        return self._points

    @property
    def in_strip(self) -> bool:
        return self._points[0] == "m0"

    def key_range(self, whole: bool = False) -> tuple[str, str]:
        """Keys of the tile that are in sight; `whole`: from the start of the vector that holds the first of them."""
        if self._columns:
            lo, hi = self._columns[-1]
            return ("c0" if whole else lo), hi
        return "0", self._keys_end[-1] if self._keys_end else str(self.plan.sizes.get("key", 1))

    # ---- matrix products ---------------------------------------------------------------------------------------------

    def _is_bf16(self, tile: str) -> bool:
        return self.plan.storage[tile].dtype is bf16

    def _few(self) -> str:
        """Whether this tile has so few points that keys are read where they lie."""
        most = self.plan.sizes.get("row", 1) * self._heads
        return "1" if most <= FEW else f"points <= {FEW}"

    def _row_pointers(self, t: Storage) -> str:
        """The rows of a key-side tile."""
        if t.pointers is not None:
            return f"(const {ELEMENTS[t.element.name]} *const *)t_{t.name}"
        return f"r_{t.name}"

    def _pack(self, tiles: set[str]) -> None:
        """After a tile of rows is written: pointers to its rows, and its panels."""
        for name in tiles:
            wanted = [p for (tile, _), p in self.plan.panels.items() if tile == name]
            if not wanted:
                continue
            t = self.plan.storage[name]
            count = self._rows_of(t)
            if t.pointers is None:
                ctype = "uint16_t" if t.dtype is bf16 else "float"
                self._line(f"const {ctype} *r_{name}[{t.sizes[0] + self.isa.lanes}];")
                self._line(f"for (int64_t j = 0; j < {count}; j++) r_{name}[j] = t_{name} + j * {t.strides[0]};")
            few = self._few()
            for p in wanted:
                how = "columns" if p.turned else "rows"
                stride = self._panel_stride(p, t)
                args = f"{self._row_pointers(t)}, (int)({count}), {t.sizes[1]}, {panels_name(p)}, {stride}"
                condition = "" if few == "0" else f"if (!({few})) "
                self._line(f"{condition}tw_pack_{how}_{t.primitives}({args});")

    def _rows_of(self, t: Storage) -> str:
        return self.key_range()[1] if t.axes[0] == "key" else str(t.sizes[0])

    def _panel_stride(self, p: Panels, t: Storage) -> int:
        depth = t.sizes[1] if p.turned else t.sizes[0]
        return panel_words(depth, t.dtype) * 2 * self.isa.lanes

    def _product(self, g: Gemm) -> None:
        self._line(f"/* {show_stmt(g)[0].strip()}{f'  ({g.loc})' if g.loc is not None else ''} */")
        a, b, c = (self.plan.storage[t.name] for t in (g.a, g.b, g.dst))
        panels = self.plan.panels[g.b.name, g.over == g.b.axes[-1]]
        first, count = self._product_rows(g)
        left, out = self._at(a, first), self._at(c, first)
        lda, ldc = (t.strides[-2] if len(t.strides) > 1 else 0 for t in (a, c))
        acc = "true" if g.accumulate else "false"
        kind = "bfloat16" if b.dtype is bf16 else "float32"
        few = self._few()
        if few != "0":
            self._line(f"if ({few}) {{")
            self._few_rows(g, a, b, c, left, out, count, acc)
            self._line("} else {")
        columns, depth = self._product_ranges(g, b, panels)
        if b.dtype is bf16:
            left, lda = f"(const uint32_t *)({left})", lda // 2
            depth = (f"{depth[0]} / 2", f"({depth[1]} + 1) / 2")
        stride = self._panel_stride(panels, b)
        ranges = ", ".join(f"(int)({x})" for x in (*columns, *depth))
        self._line(
            f"{'    ' if few != '0' else ''}tw_gemm_{kind}((int)({count}), {ranges}, {left}, {lda},"
            f" {panels_name(panels)}, {stride}, {out}, {ldc}, {acc});"
        )
        if few != "0":
            self._line("}")

    def _product_rows(self, g: Gemm) -> tuple[str, str]:
        """First row of the product among the first operand's, and how many."""
        axes = set(g.a.axes) & {"row", "head"}
        if axes == {"head"}:
            return "0", str(self._heads)
        m0, m1 = self._points
        if axes == {"row"} and self._heads > 1:
            m0, m1 = ("ms", f"(m1 + {self._heads} - 1) / {self._heads}") if self.in_strip else ("0", "rows")
        return m0, f"{m1} - {m0}" if m0 != "0" else m1

    def _at(self, t: Storage, first: str) -> str:
        return f"t_{t.name}" if t.local or first == "0" else f"t_{t.name} + {first} * {t.strides[-2]}"

    def _product_ranges(self, g: Gemm, b: Storage, p: Panels) -> tuple[tuple[str, str], tuple[str, str]]:
        """Columns in whole vectors, depth exactly."""
        rows = self.key_range(whole=p.turned) if b.axes[0] == "key" else ("0", str(b.sizes[0]))
        if p.turned:
            return (rows[0], f"tw_whole({rows[1]})"), ("0", str(b.sizes[1]))
        return ("0", f"tw_whole({b.sizes[1]})"), rows

    def _few_rows(self, g: Gemm, a: Storage, b: Storage, c: Storage, left: str, out: str, count: str, acc: str) -> None:
        rows, lda, ldc = self._row_pointers(b), a.strides[-2], c.strides[-2]
        if g.over == b.axes[-1]:
            if b.dtype is bf16:
                left, lda = f"(const uint32_t *)({left})", lda // 2
            lo, hi = self.key_range(whole=True) if b.axes[0] == "key" else ("0", str(b.sizes[0]))
            part = f"{rows} + {lo}" if lo != "0" else rows
            start = f"{out} + {lo}" if lo != "0" else out
            n = f"{hi} - {lo}" if lo != "0" else hi
            self._line(
                f"    tw_dot_rows_{b.primitives}((int)({count}), {left}, {lda}, {part}, (int)({n}),"
                f" {b.sizes[1]}, {start}, {ldc});"
            )
            return
        lo, hi = self.key_range() if b.axes[0] == "key" else ("0", str(b.sizes[0]))
        self._line(
            f"    tw_combine_rows_{b.primitives}((int)({count}), {left}, {lda}, {rows}, (int)({lo}), (int)({hi}),"
            f" {b.sizes[1]}, {out}, {ldc}, {acc});"
        )

    # ---- selections --------------------------------------------------------------------------------------------------

    def _best(self, s: Best) -> None:
        self._line(f"/* {show_stmt(s)[0].strip()} */")
        t = self.plan.storage[s.dst.name]
        count = self.number(s.count)
        outer = s.dst.axes[:-1]
        self._line(f"for (int64_t m = 0; m < {'points' if 'head' in outer else 'rows'}; m++) {{")
        self._indent += 1
        both = {"row", "head"} <= set(outer)
        row = f"m / {self._heads}" if both else "m"
        place = {"row": row, "head": f"m % {self._heads}", "point": "m"}
        nest = replace(self.nest([], None), place=place)
        terms = [f"{nest.value(i).text} * a_{s.window}_s{n}" for n, i in enumerate(s.index)]
        for line in nest.levels[0].lines:
            self._line(line)
        at = "m" if outer else "0"
        self._line(
            f"tw_best(a_{s.window} + {' + '.join(terms)}, {count}, {t.sizes[-1]},"
            f" t_{t.name} + {at} * {t.strides[-2] if outer else 0}, (char *)scratch + {self.plan.scratch_bytes});"
        )
        self._indent -= 1
        self._line("}")

    def scratch(self) -> str:
        """Bytes of one thread: its tiles, and what a selection needs."""
        best = [s for s in statements(self.kernel.body) if isinstance(s, Best)]
        sizes = [
            f"tw_best_scratch(s_{self.tensors[s.window].arg.shape[-1]}, {self.plan.sizes[s.dst.axes[-1]]})"
            for s in best
        ]
        return " + ".join([str(self.plan.scratch_bytes), *sizes])


def panels_name(p: Panels) -> str:
    return f"k_{p.tile}" if p.turned else f"v_{p.tile}"


def _shape(t: Storage) -> str:
    kind = "rows of " + t.pointers.tensor if t.pointers is not None else str(t.dtype)
    return f" /* [{', '.join(f'{a}:{n}' for a, n in zip(t.axes, t.sizes, strict=True))}] {kind} */"
