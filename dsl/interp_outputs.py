"""The interpreter's statements that leave a tile: stores, selections, and what the author is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from . import errors
from .interp_blocks import block, kept_rows, spanned, spans_of
from .interp_values import (
    Frame,
    Ints,
    Scalar,
    Scope,
    as_ints,
    as_numpy,
    as_torch,
    compile_value,
    torch_dtype,
)
from .loops import Best, Stmt, Store
from .tile import NOT_A_CANDIDATE, Show

Do: TypeAlias = Callable[[Frame], None]
OnShow: TypeAlias = Callable[[Show, list[tuple[str, object]], Mapping[str, object]], None]
OnStatement: TypeAlias = Callable[[Stmt, Frame], None]


@dataclass(frozen=True)
class Hooks:
    """Who is told while a nest runs: `on_show` of prints and breakpoints, `on_statement` of everything."""

    on_show: OnShow
    on_statement: OnStatement | None = None


def store(s: Store, scope: Scope) -> Do:
    """Points where `ok`: rows past the end are left out along their one axis, anything else by a mask."""
    value, ok = compile_value(s.expr, s.axes, scope), compile_value(s.ok, s.axes, scope)
    index = [compile_value(i, s.axes, scope) for i in s.index]
    apart = any(c.lanes for c in (ok, *index))  # else all lanes store one value in one place
    count = scope.lane_count if apart else 1
    whole, dtype = (count, *(scope.sizes[a] for a in s.axes)), torch_dtype(scope.args[s.tensor].dtype)
    dim = 1 + s.axes.index(ok.axes[0]) if len(ok.axes) == 1 and not ok.lanes else None
    spans = None if apart else spans_of(s.index, s.axes, scope)

    def run(f: Frame) -> None:
        tensor, good = f.tensors[s.tensor], as_numpy(ok.run(f))
        if spans is not None and np.all(good) and (target := spanned(tensor, spans, s.axes, scope, f)) is not None:
            target.copy_(_spread(value.run(f), len(whole))[0])  # rounds once
            return
        at = [_index(c.run(f), len(whole)) for c in index]
        x = _spread(value.run(f), len(whole))
        x = (x if apart else x[:1]).expand(whole)
        if not np.any(good):
            return
        if dim is not None and not np.all(good):
            keep = np.flatnonzero(good)
            at, x = kept_rows(at, dim, keep), x.index_select(dim, torch.from_numpy(keep))
        elif not np.all(good):
            mask = np.broadcast_to(np.asarray(good), whole)
            at, x = [np.broadcast_to(i, whole)[mask] for i in at], x[torch.from_numpy(mask.copy())]
        _check_write(s, scope, at, tensor)
        target = block(tensor, at)
        if target is not None and target.shape == x.shape:
            target.copy_(x)  # rounds once
        else:
            tensor[tuple(torch.from_numpy(np.ascontiguousarray(i)) for i in at)] = x.to(dtype)

    return run


def _check_write(s: Store, scope: Scope, at: list[Ints], tensor: torch.Tensor) -> None:
    for n, i in enumerate(at):
        low, high = int(i.min()), int(i.max())
        if low < 0 or high >= tensor.shape[n]:
            raise errors.OutOfBounds(
                loc=s.loc,
                kernel=scope.kernel.name,
                access="write to",
                tensor=s.tensor,
                axis=n,
                index=low if low < 0 else high,
                extent=tensor.shape[n],
            )


def _index(x: Scalar, dims: int) -> Ints:
    return as_ints(x) if isinstance(x, np.ndarray) else np.full((1,) * dims, x, np.int64)


def _spread(x: Scalar, dims: int) -> torch.Tensor:
    return as_torch(x) if isinstance(x, torch.Tensor | np.ndarray) else torch.tensor(x).view((1,) * dims)


_AT_ONCE = 1 << 16  # order keys that a selection looks at together: all that it takes beside its window


def best(s: Best, scope: Scope) -> Do:
    """The order key above the column makes one integer without ties, so any selection gives one answer.

    Some rows are looked at together, or a stretch of one row beside the best of it so far.
    """
    outer = s.dst.axes[:-1]
    index = [compile_value(i, outer, scope) for i in s.index]
    count, k, name = compile_value(s.count, (), scope).run, scope.sizes[s.dst.axes[-1]], s.dst.name
    whole = (scope.lane_count if name in scope.varying else 1, *(scope.sizes[a] for a in outer))

    def run(f: Frame) -> None:
        window, n = f.tensors[s.window].numpy(), int(count(f))
        clipped = [np.clip(_index(c.run(f), len(whole)), 0, m - 1) for c, m in zip(index, window.shape, strict=False)]
        at = [np.broadcast_to(i, whole).reshape(-1) for i in clipped]
        out = np.full((math.prod(whole), k), -1, np.int64)
        rows = max(1, _AT_ONCE // max(1, n))
        for first in range(0, len(out), rows):
            few = tuple(i[first : first + rows] for i in at)
            out[first : first + rows, :n] = _best_columns(window, few, n, k)
        f.tiles[name] = out.reshape(*whole, k)

    return run


def _best_columns(window: Ints, rows: tuple[Ints, ...], n: int, k: int) -> Ints:
    """[rows, min(k, n)]: best columns first, then -1."""
    found = np.empty((len(rows[0]), 0), np.int64)
    step = max(k, _AT_ONCE)
    for first in range(0, n, step):
        # Complemented, so that the best are the smallest, and of equal keys the first column is.
        unique = ~window[..., first : min(n, first + step)][rows].astype(np.int64)
        unique <<= 32
        unique |= np.arange(first, first + unique.shape[-1])
        found = np.concatenate([found, unique], -1) if first else unique
        if k < found.shape[-1]:
            found.partition(k - 1, -1)
            found = found[:, :k].copy()
    found.sort(-1)
    return np.where(~(found >> 32) > NOT_A_CANDIDATE, found & ((1 << 32) - 1), -1)


def show(s: Show, scope: Scope, hooks: Hooks) -> Do:
    """Values as the author thinks of them: rows of the sequence and keys it has, without the rest of the tile."""
    shown = [(n, e.axes, compile_value(e, e.axes, scope)) for n, e in s.values]
    where = ("seq", "r0", "r1", "q0", "k0", "head0", "num_keys")
    lists = any(t.name.startswith("entry") for t in scope.kernel.tiles)  # their slots are not counted by num_keys

    def run(f: Frame) -> None:
        at = {n: f.scalars[n] for n in where if n in f.scalars}
        ends = {"row": _difference(at, "r1", "r0"), "key": None if lists else _difference(at, "num_keys", "k0")}
        values: list[tuple[str, object]] = []
        for n, axes, code in shown:
            x = code.run(f)
            if isinstance(x, torch.Tensor | np.ndarray) and x.shape[0] == 1:
                x = x[(0, *(slice(ends.get(a)) for a in axes))]
            values.append((n, x))
        hooks.on_show(s, values, at)

    return run


def _difference(at: Mapping[str, Scalar], end: str, start: str) -> int | None:
    a, b = at.get(end), at.get(start)
    return a - b if isinstance(a, int) and isinstance(b, int) else None
