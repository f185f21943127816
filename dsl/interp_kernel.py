"""The interpreter's kernels: which grid points run in lockstep, and how many rows of a tile are worth computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from .expr import Const, Expr
from .interp_outputs import Do, Hooks
from .interp_statements import blank_tile, compile_body
from .interp_values import Array, Frame, Scope
from .loops import Arg, For, If, Kernel, Let, Search
from .rewrite import Body, names_read, statements, written
from .tile import Show


@dataclass(frozen=True)
class _Body:
    """The statements after the scalars, for tiles of a certain number of rows."""

    do: tuple[Do, ...]
    blank: Mapping[str, Array]


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel ready to run: `grid` without the axis whose points run as lanes.

    Rows of a tile past the end of their sequence reach no output, so a tile is computed with as many rows as it holds,
    rounded up to a power of two; one that holds none is left out.
    """

    kernel: Kernel
    grid: tuple[tuple[str, Expr], ...]
    lanes: tuple[str, int] | None
    scope: Scope
    hooks: Hooks
    scalars: tuple[Do, ...]
    rest: Body
    bodies: dict[int, _Body] = field(default_factory=dict)

    def run(self, f: Frame) -> None:
        """One grid point, its index already in `f.scalars`. Tiles start as NaN."""
        if self.lanes is not None:
            f.scalars[self.lanes[0]] = np.arange(self.lanes[1])
        for do in self.scalars:
            do(f)
        rows = self._rows(f)
        if rows <= 0:
            return
        body = self._body(rows)
        f.tiles = dict(body.blank)
        for do in body.do:
            do(f)

    def _rows(self, f: Frame) -> int:
        """Rows this tile holds; all of it where the kernel does not say."""
        full = self.scope.sizes.get("row", 1)
        first, end = f.scalars.get("r0"), f.scalars.get("r1")
        return end - first if isinstance(first, int) and isinstance(end, int) else full

    def _body(self, rows: int) -> _Body:
        full = self.scope.sizes.get("row", 1)
        count = min(full, 1 << (rows - 1).bit_length())
        if count not in self.bodies:  # two threads may both compile it; either result will do
            scope = replace(self.scope, sizes={**self.scope.sizes, "row": count})
            blank = {t.name: blank_tile(t, scope.sizes) for t in self.kernel.tiles}
            self.bodies[count] = _Body(compile_body(self.rest, scope, self.hooks), blank)
        return self.bodies[count]


def compile_kernel(kernel: Kernel, args: Mapping[str, Arg], hooks: Hooks, check_finite: bool = False) -> CompiledKernel:
    """Compile a finished kernel. A grid axis of fixed size that no loop or branch depends on becomes lanes."""
    sizes = {a: n for t in kernel.tiles for a, n in t.axes}
    lanes, varying = None, frozenset[str]()
    for name, extent in kernel.grid:
        spread = varying_names(kernel.body, name)
        if isinstance(extent, Const) and extent.value > 1 and not _control_varies(kernel.body, spread):
            lanes, varying = (name, int(extent.value)), spread
            break
    scope = Scope(kernel, args, sizes, varying, lanes[1] if lanes else 1, check_finite)
    grid = tuple(g for g in kernel.grid if lanes is None or g[0] != lanes[0])
    first = next((n for n, s in enumerate(kernel.body) if not isinstance(s, Let | Search)), len(kernel.body))
    scalars = compile_body(kernel.body[:first], scope, hooks)
    return CompiledKernel(kernel, grid, lanes, scope, hooks, scalars, kernel.body[first:])


def varying_names(body: Body, lane: str) -> frozenset[str]:
    """Scalars and tiles whose value differs between points of a grid axis."""
    varying = {lane}
    while True:
        more = {n for s in statements(body) if names_read(s) & varying for n in written(s)} - varying
        if not more:
            return frozenset(varying)
        varying |= more


def _control_varies(body: Body, varying: frozenset[str]) -> bool:
    return any(isinstance(s, For | If | Search | Show) and names_read(s) & varying for s in statements(body))
