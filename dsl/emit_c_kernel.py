"""One kernel of a loop nest as a C function that does one point of its grid."""

from __future__ import annotations

import itertools
from dataclasses import replace

from .dtypes import Kind, bf16, f32
from .emit_c_groups import GroupPrinter
from .emit_c_plan import Block, Group, Node, Product
from .emit_c_products import ProductPrinter, panels_name
from .emit_c_storage import Plan, Storage, addresses, plan_kernel
from .emit_c_values import ELEMENTS, Level, LoopNest, Tensor
from .expr import Expr
from .isa import Isa
from .loops import Arg, Best, For, If, Kernel, Let, Search, Store, Strip
from .printer import show, show_stmt
from .rewrite import statements
from .tile import Gemm


class KernelPrinter:
    """One kernel's function."""

    def __init__(
        self,
        kernel: Kernel,
        tensors: tuple[Arg, ...],
        workspaces: frozenset[str],
        sizes: tuple[str, ...],
        numbers: tuple[str, ...],
        isa: Isa,
    ) -> None:
        self.kernel, self.isa, self._workspaces = kernel, isa, workspaces
        self._all, self._sizes, self._numbers = tensors, sizes, numbers
        self.tensors = {a.name: Tensor(a, n) for n, a in enumerate(tensors)}
        self.plan: Plan = plan_kernel(kernel, {a.name: a for a in tensors}, isa.lanes, 2 * isa.lanes)
        self._count = itertools.count()
        self._heads = self.plan.sizes.get("head", 1)
        self._out: list[str] = []
        self._keys_end: list[str] = []  # of the key loops around, innermost last
        self._columns: list[tuple[str, str]] = []
        self._points = ("0", "points")  # of the strip around, else of the tile
        self._indent = 0
        self._products = ProductPrinter(self)
        self._ahead: str | None = None  # how many keys the next tile has, where their addresses are known
        self._sequence: list[Gemm] = []  # matrix products of the strip around
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
            self._line(f"{_pointer(t)} t_{t.name} = (void *)((char *)scratch + {t.offset});{_shape(t)}")
            if t.ahead:
                self._line(f"{_pointer(t)} b_{t.name} = t_{t.name};")
        for p in self.plan.panels.values():
            word = "uint32_t" if self.plan.storage[p.tile].dtype is bf16 else "float"
            self._line(f"{word} *const {panels_name(p)} = (void *)((char *)scratch + {p.offset});")
        if not self._says_rows():
            self._line(f"const int64_t rows = {self.plan.sizes.get('row', 1)}; (void)rows;")
            self._line(f"const int64_t points = rows * {self._heads}; (void)points;")
        tiles = any(self.plan.storage[p.tile].dtype is bf16 for p in self.plan.panels.values())
        self._after_rows = "tw_begin_products();" if tiles else ""
        if tiles and not self._says_rows():
            self._line(self._after_rows)
        stored = dict.fromkeys(s.tensor for s in statements(k.body) if isinstance(s, Store))
        streamed = [name for name in stored if self.streams(name)]
        for name in streamed:
            self._line(f"const bool large_{name} = {self._bytes(name)} >= TW_STREAMED; (void)large_{name};")
        self._nodes(self.plan.nodes)
        if streamed:
            self._line("tw_end_stream();")
        if tiles:
            self._line("tw_end_products();")
        return [*self._out, "}"]

    def grid_points(self) -> list[str]:
        """How many points the grid has, as a constant `n_<kernel>`."""
        self._out = []
        extents = [self.number(e) for _, e in self.kernel.grid]
        return [*self._out, f"    const int64_t n_{self.kernel.name} = {' * '.join(f'({x})' for x in extents)};"]

    def _line(self, text: str) -> None:
        self._out.append("    " * (1 + self._indent) + text)

    def _lines(self, texts: list[str]) -> None:
        for text in texts:
            self._line(text)

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

    def _bytes(self, tensor: str) -> str:
        arg = self.tensors[tensor].arg
        extents = (f"s_{n.partition(' + ')[0]}" if isinstance(n, str) else str(n) for n in arg.shape)
        return f"{' * '.join(extents)} * {arg.dtype.bits // 8}"

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
                    self._lines(GroupPrinter(self, n).lines())
                    self._lines(self._products.packed(n.writes))
                case Product(g):
                    self._lines(self._products.product(g))
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
                start = f", first_{var} = {first}" if addresses(b.body, self.plan.storage) else ""
                self._line(
                    f"for (int64_t s_{var} = {first}{start}, end_{var} = {end}; s_{var} < end_{var}; s_{var}++) {{"
                )
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
        early = addresses(b.body, self.plan.storage)
        outside, self._ahead = self._ahead, None
        if early:
            self._addresses(s, lets, early)
        self._keys_of(s, lets)
        self._keys_end.append(f"keys_{s.var}")
        if early:
            self._line(f"(void)keys_{s.var};")
            self._buffers(s, early)
            self._lines(self._products.packed({t for g in early for t in g.writes}))
            self._ahead = f"next_{s.var}"
        self._nodes(b.body[len(lets) + len(early) :])
        self._keys_end.pop()
        self._ahead = outside

    def _keys_of(self, s: For, lets: list[Node]) -> None:
        self._nodes(lets)
        size = self.plan.sizes.get("key", 1)
        some = "_" not in s.var
        count = f"tw_min_64({size}, tw_max_64(s_hi{s.var[2:]} - s_k0, 0))" if some else str(size)
        self._line(f"const int64_t keys_{s.var} = {count}; (void)keys_{s.var};")

    def _addresses(self, s: For, lets: list[Node], early: list[Group]) -> None:
        """Where the next tile's rows are; the first time round, this tile's as well."""
        v = s.var
        self._line(f"int64_t next_{v} = 0; (void)next_{v};")
        start = f"int64_t now_{v} = s_{v}, at_{v} = now_{v} + (now_{v} > first_{v})"
        self._line(f"for ({start}; at_{v} < now_{v} + 2 && at_{v} < end_{v}; at_{v}++) {{")
        self._indent += 1
        self._line(f"const int64_t s_{v} = at_{v};")
        self._keys_of(s, lets)
        self._line(f"if (at_{v} > now_{v}) next_{v} = keys_{v};")
        self._keys_end.append(f"keys_{v}")
        self._buffers(s, early)
        for g in early:
            self._comment(g)
            self._lines(GroupPrinter(self, g).lines())
        self._keys_end.pop()
        self._indent -= 1
        self._line("}")

    def _buffers(self, s: For, early: list[Group]) -> None:
        """The halves of tiles that hold this tile's addresses."""
        for name in sorted({t for g in early for t in g.writes} & self.plan.storage.keys()):
            t = self.plan.storage[name]
            self._line(f"{_pointer(t)} t_{name} = b_{name} + (s_{s.var} & 1) * {t.elements}; (void)t_{name};")
            if t.pointers is not None:
                self._line(f"{_pointer(t)} n_{name} = b_{name} + (~s_{s.var} & 1) * {t.elements}; (void)n_{name};")

    def _strip(self, s: Strip, b: Block) -> None:
        self._line(f"const int64_t m1 = tw_min_64(m0 + {s.points}, points), ms = m0 / {self._heads}; (void)ms;")
        self._line(f"const int64_t s_{s.first} = ms, s_{s.last} = (m1 - 1) / {self._heads};")
        self._line(f"(void)s_{s.first}; (void)s_{s.last};")
        lets = list(itertools.takewhile(lambda n: isinstance(n, Let), b.body))
        self._nodes(lets)
        self._lines(self._products.prefetched(b.body))
        outside_products, self._sequence = self._sequence, [n.stmt for n in b.body if isinstance(n, Product)]
        if s.columns is not None:
            lo, hi = (f"s_{c}" for c in s.columns)
            self._line(f"if ({lo} >= {hi}) continue;")
            self._line(f"const int64_t c0 = {lo} / TW_LANES * TW_LANES;")
            self._line("(void)c0;")
            self._columns.append((lo, hi))
        outside, self._points = self._points, ("m0", "m1")
        self._nodes(b.body[len(lets) :])
        self._points, self._sequence = outside, outside_products
        if s.columns is not None:
            self._columns.pop()

    # ---- what groups ask ---------------------------------------------------------------------------------------------

    @property
    def points(self) -> tuple[str, str]:
        return self._points

    @property
    def in_strip(self) -> bool:
        return self._points[0] == "m0"

    def streams(self, tensor: str) -> bool:
        """Whether rows of a tensor go past the caches where it is large: results, which no kernel reads again."""
        arg = self.tensors[tensor].arg
        return tensor not in self._workspaces and arg.dtype in (f32, bf16)

    @property
    def ahead(self) -> str | None:
        return self._ahead

    def product_after(self, g: Gemm) -> Gemm | None:
        """The next product of this strip that reads other rows."""
        later = self._sequence[self._sequence.index(g) + 1 :] if g in self._sequence else []
        return next((x for x in later if x.b.name != g.b.name), None)

    @property
    def first_product(self) -> Gemm | None:
        return self._sequence[0] if self._sequence else None

    def key_range(self, whole: bool = False) -> tuple[str, str]:
        """Keys of the tile that are in sight; `whole`: from the start of the vector that holds the first of them."""
        if self._columns:
            lo, hi = self._columns[-1]
            return ("c0" if whole else lo), hi
        return "0", self._keys_end[-1] if self._keys_end else str(self.plan.sizes.get("key", 1))

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


def _pointer(t: Storage) -> str:
    return "const void **const" if t.pointers is not None else f"{t.ctype} *const"


def _shape(t: Storage) -> str:
    kind = "rows of " + t.pointers.tensor if t.pointers is not None else str(t.dtype)
    return f" /* [{', '.join(f'{a}:{n}' for a, n in zip(t.axes, t.sizes, strict=True))}] {kind} */"
