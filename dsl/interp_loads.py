"""The interpreter's reads of tensor arguments: bounds-checked, guarded, and by slices where rows follow each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from . import errors
from .dtypes import Kind
from .expr import Axes, Elem, Expr, Tile, Var, walk
from .interp_blocks import Span, block, consecutive, kept_rows, rows_at, spanned, spans_of
from .interp_convert import as_float32
from .interp_values import Array, Code, Frame, Ints, Scalar, Scope, as_ints, compile_value

Guard: TypeAlias = npt.NDArray[np.bool_]
Load: TypeAlias = Callable[[Frame], torch.Tensor]


def compile_load(e: Elem, axes: Axes, scope: Scope) -> Code:
    """An element read over `axes`. Dimensions addressed by a feature axis alone stay slices; the rest are indexed."""
    if not e.axes and not scope.lanes(e):
        return _element(e, scope)
    if e.dtype.kind is not Kind.FLOAT:
        load = _IndexLoad(
            e, scope, tuple(compile_value(i, axes, scope) for i in e.index), compile_value(e.ok, axes, scope), len(axes)
        )
        return Code(load, e.axes, scope.lanes(e))
    sliced = {n: axis for n in range(len(e.index)) if (axis := _feature_of(e, n)) is not None}
    indexed = tuple(n for n in range(len(e.index)) if n not in sliced)
    inner: Axes = tuple(sliced.values())
    outer: Axes = tuple(a for a in axes if a not in inner)
    codes = tuple(compile_value(e.index[n], outer, scope) for n in indexed)
    ok = compile_value(e.ok, outer, scope)
    picks = {n: _pick(e.index[n], axis, scope) for n, axis in sliced.items()}
    spans = tuple((n, int(p[0]), len(p)) for n, p in picks.items() if consecutive(p))
    others = tuple(None if consecutive(p) else torch.from_numpy(p.copy()) for p in picks.values())
    layout = _Layout(e, scope, outer, inner, axes, (*indexed, *sliced), spans, others)
    along = _row_axis(codes, ok, outer)
    read: Load = (
        _RowLoad(layout, codes, ok, scope.sizes[along])
        if along is not None and inner
        else _TileLoad(layout, codes, ok, spans_of([e.index[n] for n in indexed], outer, scope))
    )
    if scope.check_finite and "key" in axes and _is_pool(e.tensor, scope):
        read = _finite(read, e, 1 + axes.index("key"))
    return Code(read, e.axes, scope.lanes(e))


def _is_pool(tensor: str, scope: Scope) -> bool:
    """Whether a tensor holds the pages of a cache."""
    pages = scope.args[tensor].shape[0]
    return isinstance(pages, str) and pages.endswith("_pages") and tensor.startswith(pages.removesuffix("pages"))


def _finite(read: Load, e: Elem, along: int) -> Load:
    """The read, with an error for a key row that is not finite; keys run along a dimension of what is read."""
    part = next((x.name for x in walk(e.index[0]) if isinstance(x, Tile)), "").removeprefix("page").split("_")[0]

    def checked(f: Frame) -> torch.Tensor:
        out = read(f)
        bad = ~torch.isfinite(out).movedim(along, 0).flatten(1).all(1)
        if bool(bad.any()):
            place, entries = int(bad.nonzero()[0]), f.tiles.get(f"entry{part}")
            key = int(f.scalars.get("k0", 0)) + place if entries is None else int(entries.reshape(-1)[place])
            raise errors.NotFinite(loc=e.loc, tensor=e.tensor, seq=f.scalars.get("seq"), key=key)
        return out

    return checked


def _feature_of(e: Elem, dimension: int) -> str | None:
    """The feature axis that this dimension's index, and nothing else about the read, varies over."""
    i = e.index[dimension]
    others = [x for n, x in enumerate(e.index) if n != dimension] + [e.ok]
    alone = len(i.axes) == 1 and not any(i.axes[0] in x.axes for x in others)
    constant = not any(isinstance(x, Var | Tile | Elem) for x in walk(i))
    return i.axes[0] if alone and constant and i.axes[0] not in ("row", "head", "key") else None


def _pick(i: Expr, axis: str, scope: Scope) -> Ints:
    """Which elements of a sliced dimension make the feature axis."""
    return as_ints(compile_value(i, (axis,), scope).run(Frame({}, {}, {}))).reshape(-1)


def _row_axis(index: tuple[Code, ...], ok: Code, outer: Axes) -> str | None:
    """The one tile axis that indices and guard vary over, where lanes at most choose along one other dimension."""
    varying = [c for c in (*index, ok) if c.axes]
    lane = [c for c in (*index, ok) if c.lanes]
    if len(outer) != 1 or not any(c.axes for c in index) or any(c.lanes for c in varying) or len(lane) > 1 or ok.lanes:
        return None
    return outer[0]


def _failure(e: Elem, scope: Scope, dimension: int, index: int, extent: int) -> errors.OutOfBounds:
    return errors.OutOfBounds(
        loc=e.loc,
        kernel=scope.kernel.name,
        access="read of",
        tensor=e.tensor,
        axis=dimension,
        index=index,
        extent=extent,
    )


def _element(e: Elem, scope: Scope) -> Code:
    """One number."""
    index = [compile_value(i, (), scope).run for i in e.index]
    ok = compile_value(e.ok, (), scope).run
    is_float = e.dtype.kind is Kind.FLOAT

    def run(f: Frame) -> Scalar:
        if not ok(f):
            return 0.0 if is_float else 0
        at = [int(i(f)) for i in index]
        shape = tuple(f.tensors[e.tensor].shape)
        for n, i in enumerate(at):
            if not 0 <= i < shape[n]:
                raise _failure(e, scope, n, i, shape[n])
        if is_float:
            return float(f.tensors[e.tensor][tuple(at)])
        return f.lists[e.tensor][at[0]] if e.tensor in f.lists else int(f.indices[e.tensor][tuple(at)])

    return Code(run, (), False, number=True)


def _checked(
    e: Elem, scope: Scope, index: list[Ints], good: Guard, shape: tuple[int, ...], order: tuple[int, ...]
) -> list[Ints]:
    """Indices with zero where the guard is false; raises where it is true and the index is outside."""
    every = bool(good.all())
    out: list[Ints] = []
    for n, i in enumerate(index):
        seen = i if every else np.where(good, i, 0)
        lowest, highest = int(seen.min()), int(seen.max())
        if lowest < 0 or highest >= shape[n]:
            raise _failure(e, scope, order[n], lowest if lowest < 0 else highest, shape[n])
        out.append(seen)
    return out


def _arrays(codes: tuple[Code, ...], f: Frame, dims: int) -> list[Ints]:
    """Index values as arrays, numbers included."""
    values = [c.run(f) for c in codes]
    return [as_ints(v) if isinstance(v, np.ndarray) else np.full((1,) * (1 + dims), v, np.int64) for v in values]


def _guard(ok: Code, f: Frame, dims: int) -> Guard:
    value = ok.run(f)
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return (
        value.astype(np.bool_, copy=False) if isinstance(value, np.ndarray) else np.full((1,) * (1 + dims), bool(value))
    )


@dataclass(frozen=True)
class _IndexLoad:
    """A tile of integers, such as page numbers, or of conditions."""

    e: Elem
    scope: Scope
    index: tuple[Code, ...]
    ok: Code
    dims: int

    def __call__(self, f: Frame) -> Array:
        tensor, good = f.indices[self.e.tensor], _guard(self.ok, f, self.dims)
        index = _arrays(self.index, f, self.dims)
        shape = np.broadcast_shapes(good.shape, *(i.shape for i in index))
        out: Ints | Guard = np.zeros(shape, np.int64) if self.e.dtype.kind is Kind.INT else np.zeros(shape, np.bool_)
        if good.any():
            at = _checked(self.e, self.scope, index, good, tensor.shape, tuple(range(tensor.ndim)))
            np.copyto(out, tensor[tuple(at)], where=good)
            pages_of = self.scope.args[self.e.tensor].pages_of
            if pages_of is not None and int(out.min()) < 0:  # nests take -1 for a key that is not read
                raise errors.OutOfBounds(
                    loc=self.e.loc,
                    kernel=self.scope.kernel.name,
                    access="page in",
                    tensor=self.e.tensor,
                    axis=0,
                    index=int(out.min()),
                    extent=f.tensors[pages_of].shape[0],
                )
        return out


@dataclass(frozen=True)
class _Layout:
    """How values read as [lanes, outer.., inner..] become a tile over `axes`."""

    e: Elem
    scope: Scope
    outer: Axes  # the tile axes that indices vary over
    inner: Axes  # the feature axes that are slices
    axes: Axes
    order: tuple[int, ...]  # the tensor's dimensions, indexed ones first
    spans: tuple[tuple[int, int, int], ...]  # dimension, start and size of what slices read
    picks: tuple[torch.Tensor | None, ...]  # per feature axis: which elements of its slice; None: those of its span

    def tensor(self, f: Frame) -> torch.Tensor:
        """What is read from, indexed dimensions first and slices narrowed to what they read."""
        x = f.tensors[self.e.tensor]
        for dimension, start, size in self.spans:
            if start + size > x.shape[dimension]:
                raise _failure(self.e, self.scope, dimension, start + size - 1, x.shape[dimension])
            if size != x.shape[dimension]:
                x = x.narrow(dimension, start, size)
        return x.permute(self.order)

    def tile(self, x: torch.Tensor) -> torch.Tensor:
        for n, pick in enumerate(self.picks):
            if pick is not None:
                x = x.index_select(1 + len(self.outer) + n, pick)
        if (*self.outer, *self.inner) != self.axes:
            at = {a: n + 1 for n, a in enumerate((*self.outer, *self.inner))}
            x = x.permute(0, *(at[a] for a in self.axes))
        return as_float32(x)


@dataclass(frozen=True)
class _TileLoad:
    """A read with any indices."""

    layout: _Layout
    index: tuple[Code, ...]
    ok: Code
    spans: tuple[Span, ...] | None

    def __call__(self, f: Frame) -> torch.Tensor:
        dims, outer = len(self.layout.outer), self.layout.outer
        tensor, good = self.layout.tensor(f), _guard(self.ok, f, dims)
        if self.spans is not None and good.all():
            view = spanned(tensor, self.spans, outer, self.layout.scope, f)
            if view is not None:
                return self.layout.tile(view.unsqueeze(0)).contiguous()
        index = _arrays(self.index, f, dims)
        if good.all():  # made contiguous once, as it is read in every iteration of a key loop
            return self.layout.tile(self._read(tensor, index, good)).contiguous()
        shape = np.broadcast_shapes(good.shape, *(i.shape for i in index))
        out = torch.zeros((*shape, *tensor.shape[len(index) :]), dtype=torch.float32)
        if good.any():
            along = [d for d in range(1 + dims) if good.shape[d] > 1]
            if len(along) == 1:  # rows past the end: read the others
                keep = np.flatnonzero(good)
                read = self._read(tensor, kept_rows(index, along[0], keep), np.ones((1,) * (1 + dims), np.bool_))
                out.index_copy_(
                    along[0],
                    torch.from_numpy(keep),
                    read.expand(*_with(shape, along[0], len(keep)), *read.shape[1 + dims :]),
                )
            else:
                mask = torch.from_numpy(good).view(*good.shape, *(1,) * len(self.layout.inner))
                out = torch.where(mask, self._read(tensor, index, good), 0.0)
        return self.layout.tile(out)

    def _read(self, tensor: torch.Tensor, index: list[Ints], good: Guard) -> torch.Tensor:
        if not index:  # all of a tensor
            return as_float32(tensor.reshape((1,) * good.ndim + tuple(tensor.shape)))
        at = _checked(self.layout.e, self.layout.scope, index, good, tuple(tensor.shape), self.layout.order)
        view = block(tensor, at)
        return as_float32(rows_at(tensor, at) if view is None else view)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclass(frozen=True)
class _RowLoad:
    """Rows along one axis, as key rows are. Where the last index counts up they are a slice: a page is a view."""

    layout: _Layout
    index: tuple[Code, ...]
    ok: Code
    size: int

    def __call__(self, f: Frame) -> torch.Tensor:
        tensor = self.layout.tensor(f)
        good = _guard(self.ok, f, 1).reshape(-1)
        good = good if len(good) == self.size else np.full(self.size, good[0])
        rows, at, lanes = self._rows(f, tensor)
        starts = self._starts(at, good)
        if len(starts) > 2 + self.size // 4:  # many short runs: one indexed read is quicker
            out = self._indexed(rows, at, good)
        else:
            out = self._sliced(rows, at, good, starts, tensor, 1 if lanes else 0)
        return self.layout.tile(out if lanes else out.unsqueeze(0))

    def _rows(self, f: Frame, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Ints], bool]:
        """The tensor as [varying dims.., (lanes,) features..], the varying indices, and whether lanes differ."""
        varying = [n for n, c in enumerate(self.index) if c.axes]
        fixed = [n for n in range(len(self.index)) if n not in varying]
        at = [as_ints(self.index[n].run(f)).reshape(-1) for n in varying]
        lane = next((n for n in fixed if self.index[n].lanes), None)
        base = tensor.permute(
            *varying,
            *(n for n in fixed if n != lane),
            *([lane] if lane is not None else []),
            *range(len(self.index), tensor.ndim),
        )
        for n in fixed:
            if n != lane:
                i = int(self.index[n].run(f))
                if not 0 <= i < tensor.shape[n]:
                    raise _failure(self.layout.e, self.layout.scope, self.layout.order[n], i, tensor.shape[n])
                base = base.select(len(varying), i)
        if lane is None:
            return base, at, False
        chosen = as_ints(self.index[lane].run(f)).reshape(-1)
        first, count = int(chosen[0]), len(chosen)
        if int(chosen.min()) < 0 or int(chosen.max()) >= tensor.shape[lane]:
            raise _failure(
                self.layout.e, self.layout.scope, self.layout.order[lane], int(chosen.max()), tensor.shape[lane]
            )
        if consecutive(chosen):
            return base.narrow(len(varying), first, count), at, True
        return base.index_select(len(varying), torch.from_numpy(chosen)), at, True

    def _starts(self, at: list[Ints], good: Guard) -> list[int]:
        """Where runs begin, and the end: rows of a run are all read or all guarded, and differ in the last index."""
        change = good[1:] != good[:-1]
        for i in at[:-1]:
            change |= i[1:] != i[:-1]
        change |= (at[-1][1:] - at[-1][:-1]) != 1
        change &= good[1:] | good[:-1]  # between two guarded rows nothing changes
        return [0, *(np.flatnonzero(change) + 1).tolist(), self.size]

    def _sliced(
        self, rows: torch.Tensor, at: list[Ints], good: Guard, starts: list[int], tensor: torch.Tensor, lane: int
    ) -> torch.Tensor:
        """[lanes, rows, features] by slices: a view when there is one, else a copy in the order of memory."""
        runs: list[tuple[int, int, torch.Tensor | None]] = []
        for a, b in pairwise(starts):
            if not good[a]:
                runs.append((a, b, None))
                continue
            piece = rows
            for n, i in enumerate(at):
                first, last = int(i[a]), int(i[b - 1])
                if first < 0 or last >= piece.shape[0]:
                    dims = [m for m, c in enumerate(self.index) if c.axes]
                    raise _failure(
                        self.layout.e,
                        self.layout.scope,
                        self.layout.order[dims[n]],
                        first if first < 0 else last,
                        piece.shape[0],
                    )
                piece = piece[first] if n < len(at) - 1 else piece[first : last + 1]
            runs.append((a, b, piece.movedim(0, 1) if lane else piece))
        if len(runs) == 1 and runs[0][2] is not None:
            return as_float32(runs[0][2])
        shape = [*rows.shape[len(at) :]]
        slots = len(at) - 1
        dtype = rows.dtype if rows.dtype.itemsize == 1 else torch.float32  # single bytes are converted all at once
        if lane and rows.stride(slots + 1) < rows.stride(slots):  # slot-major pages: keep that order
            out = torch.empty((self.size, *shape), dtype=dtype).movedim(0, 1)
        else:
            shape.insert(lane, self.size)
            out = torch.empty(shape, dtype=dtype)
        for a, b, source in runs:
            part = out.narrow(lane, a, b - a)
            part.zero_() if source is None else part.copy_(source)
        return out

    def _indexed(self, rows: torch.Tensor, at: list[Ints], good: Guard) -> torch.Tensor:
        dims = tuple(self.layout.order[n] for n, c in enumerate(self.index) if c.axes)
        index = _checked(self.layout.e, self.layout.scope, at, good, tuple(rows.shape), dims)
        out = as_float32(rows_at(rows, index))
        if not good.all():
            out = out.masked_fill(torch.from_numpy(~good).view(-1, *(1,) * (out.ndim - 1)), 0.0)
        return out.movedim(0, 1) if any(c.lanes for c in self.index) else out
