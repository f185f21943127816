"""Blocks of a tensor: indices that count up along axes of their own select a view, which is free to read or write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .expr import Axes, Expr, Iota, Op
from .interp_values import Frame, Ints, Run, Scope, as_number, compile_value


@dataclass(frozen=True)
class Span:
    """An index that is known, when compiled, to count up by one along an axis from a scalar, or to be one scalar."""

    axis: str | None
    starts: tuple[Run, ...]  # whose sum is where it starts

    def within(self, f: Frame, sizes: Mapping[str, int], extent: int) -> slice | int | None:
        """What it selects of a dimension, or None where some of that is outside."""
        start = sum(int(as_number(run(f))) for run in self.starts)
        size = 1 if self.axis is None else sizes[self.axis]
        if start < 0 or start + size > extent:
            return None
        return start if self.axis is None else slice(start, start + size)


def spans_of(index: Sequence[Expr], axes: Axes, scope: Scope) -> tuple[Span, ...] | None:
    """One span per index, where they count along all of `axes`, in any order; else None."""
    found = [_span(i, scope) for i in index]
    spans = tuple(s for s in found if s is not None)
    along = [s.axis for s in spans if s.axis is not None]
    return spans if len(spans) == len(index) and sorted(along) == sorted(axes) else None


def _span(e: Expr, scope: Scope) -> Span | None:
    if not e.axes and not scope.lanes(e):
        return Span(None, (compile_value(e, (), scope).run,))
    match e:
        case Iota(axis):
            return Span(axis, ())
        case Op("add", (a, b)):
            left, right = _span(a, scope), _span(b, scope)
            if left is None or right is None or (left.axis and right.axis):
                return None
            return Span(left.axis or right.axis, (*left.starts, *right.starts))
        case _:
            return None


def spanned(tensor: torch.Tensor, spans: tuple[Span, ...], axes: Axes, scope: Scope, f: Frame) -> torch.Tensor | None:
    """The view [axes.., remaining dimensions..] that spans select, or None where some of it is outside."""
    places = [s.within(f, scope.sizes, n) for s, n in zip(spans, tensor.shape, strict=False)]
    if any(p is None for p in places):
        return None
    view = tensor[tuple(places)]
    order = [s.axis for s in spans if s.axis is not None]
    if tuple(order) == axes:
        return view
    return view.permute(*(order.index(a) for a in axes), *range(len(order), view.ndim))


def consecutive(index: Ints) -> bool:
    """Whether a flat index counts up by one."""
    n = len(index)
    return int(index[-1]) - int(index[0]) == n - 1 and (n < 3 or bool((index[1:] - index[:-1] == 1).all()))


def block(tensor: torch.Tensor, index: Sequence[Ints]) -> torch.Tensor | None:
    """`tensor[index]` as a view, or None where the indices do not select a block.

    index: one array per leading dimension of `tensor`, all of one rank, in bounds. The view has the dimensions of the
    indices, then the tensor's remaining ones.
    """
    rank = index[0].ndim
    owner: dict[int, int] = {}  # dimension of the indices -> dimension of the tensor that counts along it
    view = tensor
    sizes: list[list[int]] = []
    for n, i in enumerate(index):
        along = [d for d in range(rank) if i.shape[d] > 1]
        flat = i.reshape(-1)
        if any(d in owner for d in along) or not consecutive(flat):
            return None
        owner.update((d, n) for d in along)
        view = view.narrow(n, int(flat[0]), len(flat))
        sizes.append([i.shape[d] for d in along])
    view = view.reshape([m for s in sizes for m in s] + list(view.shape[len(index) :]))
    if view.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        return None  # strides that cannot be split without a copy
    order = [d for n in range(len(index)) for d in sorted(d for d, by in owner.items() if by == n)]
    place = {d: n for n, d in enumerate(order)}
    split = view.permute([place[d] for d in sorted(order)] + list(range(len(order), view.ndim)))
    for d in range(rank):
        if d not in owner:
            split = split.unsqueeze(d)
    return split


def rows_at(tensor: torch.Tensor, index: Sequence[Ints]) -> torch.Tensor:
    """`tensor[index]`, a copy: [dimensions of the indices.., the tensor's remaining ones..].

    index: one array per leading dimension of `tensor`, in bounds. By one index over memory where strides are multiples
    of the last, as they are in any pool of pages: that copies rows, where several indices copy element by element.
    """
    leading, rest = tensor.shape[: len(index)], tensor.shape[len(index) :]
    strides = tensor.stride()[: len(index)]
    unit = strides[-1]
    if unit == 0 or any(s % unit for s in strides) or tensor.numel() == 0:
        return tensor[tuple(torch.from_numpy(np.ascontiguousarray(i)) for i in index)]
    steps = [s // unit for s in strides]
    count = 1 + sum((n - 1) * step for n, step in zip(leading, steps, strict=True))
    rows = tensor.as_strided((count, *rest), (unit, *tensor.stride()[len(index) :]))
    place = np.asarray(sum(i * step for i, step in zip(index, steps, strict=True)))
    return rows.index_select(0, torch.from_numpy(place.reshape(-1))).view(*place.shape, *rest)


def kept_rows(index: list[Ints], dim: int, keep: Ints) -> list[Ints]:
    """Indices at the kept places of one dimension."""
    return [np.take(i, keep, axis=dim) if i.shape[dim] > 1 else i for i in index]
