"""Matrix products as calls of the micro-kernels: rows packed into panels once a tile, or read where they lie."""

from __future__ import annotations

from .dtypes import bf16
from .emit_c_groups import Surroundings
from .emit_c_plan import Node, Product
from .emit_c_storage import Panels, Storage, panel_words
from .emit_c_values import ELEMENTS
from .printer import show_stmt
from .tile import Gemm

FEW = 4  # points up to which keys are read where they lie: packing would cost more than it saves


class ProductPrinter:
    def __init__(self, kernel: Surroundings) -> None:
        self.k = kernel
        self.heads = kernel.plan.sizes.get("head", 1)

    def _few(self) -> str:
        """Whether this tile has so few points that keys are read where they lie."""
        most = self.k.plan.sizes.get("row", 1) * self.heads
        return "1" if most <= FEW else f"points <= {FEW}"

    def _row_pointers(self, t: Storage) -> str:
        """The rows of a key-side tile."""
        if t.pointers is not None:
            return f"(const {ELEMENTS[t.element.name]} *const *)t_{t.name}"
        return f"r_{t.name}"

    def packed(self, tiles: set[str]) -> list[str]:
        """After tiles of rows are written: pointers to their rows, and their panels."""
        out: list[str] = []
        for name in sorted(tiles):
            wanted = [p for (tile, _), p in self.k.plan.panels.items() if tile == name]
            if not wanted:
                continue
            t = self.k.plan.storage[name]
            count = self._rows_of(t)
            if t.pointers is None:
                ctype = "uint16_t" if t.dtype is bf16 else "float"
                out.append(f"const {ctype} *r_{name}[{t.sizes[0] + self.k.isa.lanes}];")
                out.append(f"for (int64_t j = 0; j < {count}; j++) r_{name}[j] = t_{name} + j * {t.strides[0]};")
            few = self._few()
            for p in wanted:
                how = "columns" if p.turned else "rows"
                stride = self._panel_stride(p, t)
                args = f"{self._row_pointers(t)}, (int)({count}), {t.sizes[1]}, {panels_name(p)}, {stride}"
                condition = "" if few == "0" else f"if (!({few})) "
                out.append(f"{condition}tw_pack_{how}_{t.primitives}({args});")
        return out

    def _rows_of(self, t: Storage) -> str:
        return self.k.key_range()[1] if t.axes[0] == "key" else str(t.sizes[0])

    def _panel_stride(self, p: Panels, t: Storage) -> int:
        depth = t.sizes[1] if p.turned else t.sizes[0]
        return panel_words(depth, t.dtype) * 2 * self.k.isa.lanes

    def product(self, g: Gemm) -> list[str]:
        where = f"  ({g.loc})" if g.loc is not None else ""
        out = [f"/* {show_stmt(g)[0].strip()}{where} */"]
        many, few = self._many_rows(g), self._few()
        match few:
            case "0":
                return [*out, many]
            case "1":
                return [*out, self._few_rows(g)]
            case _:
                return [*out, f"if ({few}) {{", "    " + self._few_rows(g), "} else {", "    " + many, "}"]

    def _many_rows(self, g: Gemm) -> str:
        """By the micro-kernels, from panels."""
        a, b, c = (self.k.plan.storage[t.name] for t in (g.a, g.b, g.dst))
        panels = self.k.plan.panels[g.b.name, g.over == g.b.axes[-1]]
        first, count = self._product_rows(g)
        left, out, lda = self._at(a, first), self._at(c, first), _leading(a)
        columns, depth = self._product_ranges(b, panels)
        kind = "float32"
        if b.dtype is bf16:
            kind, left, lda = "bfloat16", f"(const uint32_t *)({left})", lda // 2
            depth = (f"{depth[0]} / 2", f"({depth[1]} + 1) / 2")
        ranges = ", ".join(f"(int)({x})" for x in (*columns, *depth))
        stride, accumulate = self._panel_stride(panels, b), str(g.accumulate).lower()
        return (
            f"tw_gemm_{kind}((int)({count}), {ranges}, {left}, {lda},"
            f" {panels_name(panels)}, {stride}, {out}, {_leading(c)}, {accumulate});"
        )

    def _product_rows(self, g: Gemm) -> tuple[str, str]:
        """First row of the product among the first operand's, and how many."""
        axes = set(g.a.axes) & {"row", "head"}
        if axes == {"head"}:
            return "0", str(self.heads)
        m0, m1 = self.k.points
        if axes == {"row"} and self.heads > 1:
            m0, m1 = ("ms", f"(m1 + {self.heads} - 1) / {self.heads}") if self.k.in_strip else ("0", "rows")
        return m0, f"{m1} - {m0}" if m0 != "0" else m1

    def _at(self, t: Storage, first: str) -> str:
        return f"t_{t.name}" if t.local or first == "0" else f"t_{t.name} + {first} * {t.strides[-2]}"

    def _product_ranges(self, b: Storage, p: Panels) -> tuple[tuple[str, str], tuple[str, str]]:
        """Columns in whole vectors, depth exactly."""
        rows = self.k.key_range(whole=p.turned) if b.axes[0] == "key" else ("0", str(b.sizes[0]))
        if p.turned:
            return (rows[0], f"tw_whole({rows[1]})"), ("0", str(b.sizes[1]))
        return ("0", f"tw_whole({b.sizes[1]})"), rows

    def _few_rows(self, g: Gemm) -> str:
        """From rows where they lie: dot products with each, or their weighted sum."""
        a, b, c = (self.k.plan.storage[t.name] for t in (g.a, g.b, g.dst))
        first, count = self._product_rows(g)
        left, out, lda, ldc = self._at(a, first), self._at(c, first), _leading(a), _leading(c)
        rows, turned = self._row_pointers(b), g.over == b.axes[-1]
        lo, hi = self.k.key_range(whole=turned) if b.axes[0] == "key" else ("0", str(b.sizes[0]))
        if not turned:
            accumulate = str(g.accumulate).lower()
            return (
                f"tw_combine_rows_{b.primitives}((int)({count}), {left}, {lda}, {rows}, (int)({lo}), (int)({hi}),"
                f" {b.sizes[1]}, {out}, {ldc}, {accumulate}, {self._next_rows(g)});"
            )
        if b.dtype is bf16:
            left, lda = f"(const uint32_t *)({left})", lda // 2
        start = "" if lo == "0" else f" + {lo}"
        n = hi if lo == "0" else f"{hi} - {lo}"
        return (
            f"tw_dot_rows_{b.primitives}((int)({count}), {left}, {lda}, {rows}{start}, (int)({n}),"
            f" {b.sizes[1]}, {out}{start}, {ldc}, {self._next_rows(g)});"
        )

    def _next_rows(self, g: Gemm) -> str:
        """Rows that will be read after those of this product, and how many: the next product's, or the next tile's."""
        after, first = self.k.product_after(g), self.k.first_product
        if after is not None:
            t = self.k.plan.storage[after.b.name]
            if t.pointers is not None and after.b.axes[0] == "key":
                lo, hi = self.k.key_range()
                return f"(const void *const *)t_{t.name} + {lo}, (int)({hi} - {lo})"
        elif first is not None and self.k.ahead is not None:
            t = self.k.plan.storage[first.b.name]
            if t.ahead:
                return f"(const void *const *)n_{t.name}, (int){self.k.ahead}"
        return "0, 0"

    def prefetched(self, body: list[Node]) -> list[str]:
        """A strip's part of the next tile's rows, unless products read rows where they lie and prefetch themselves."""
        few = self._few()
        if self.k.ahead is None or few == "1":
            return []
        out: list[str] = []
        for name in dict.fromkeys(n.stmt.b.name for n in body if isinstance(n, Product)):
            t = self.k.plan.storage[name]
            if t.ahead and t.pointers is not None:
                size = t.sizes[1] * t.element.bits // 8
                out.append(f"tw_prefetch_part((const void *const *)n_{name}, {self.k.ahead}, {size}, m0, m1, points);")
        if not out or few == "0":
            return out
        return [f"if (!({few})) {{", *("    " + line for line in out), "}"]


def _leading(t: Storage) -> int:
    """Elements between neighbouring rows."""
    return t.strides[-2] if len(t.strides) > 1 else 0


def panels_name(p: Panels) -> str:
    return f"k_{p.tile}" if p.turned else f"v_{p.tile}"
