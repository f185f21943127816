"""Sizes and workspaces of a call: what a program's arguments say, and how many rows are worked on at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .closed_form import evaluate
from .expr import Var, walk
from .loops import Arg, Program
from .scalars import Number

Scalars: TypeAlias = Mapping[str, Number]
Integers: TypeAlias = Mapping[str, npt.NDArray[np.generic]]

DEFAULT_BUDGET = 512 << 20


def sizes_named(a: Arg, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Run-time sizes that an argument's shape names: "n", or "n + 1" for a tensor with one entry more."""
    out: dict[str, int] = {}
    for n, extent in zip(tensors[a.name].shape, a.shape, strict=True) if a.shape else ():
        if isinstance(extent, str):
            name, _, more = extent.partition(" + ")
            out[name] = n - int(more or 0)
    return out


def workspace(w: Arg, sizes: Scalars) -> torch.Tensor:
    """A workspace as kernels find it."""
    return torch.full(workspace_shape(w, sizes), torch.nan if w.fill is None else w.fill, dtype=_dtype(w))


def bare_workspace(w: Arg, sizes: Scalars) -> torch.Tensor:
    """A workspace without the NaN that shows a missing write."""
    shape, dtype = workspace_shape(w, sizes), _dtype(w)
    return torch.empty(shape, dtype=dtype) if w.fill is None else torch.full(shape, w.fill, dtype=dtype)


def workspace_shape(w: Arg, sizes: Scalars) -> tuple[int, ...]:
    return tuple(int(sizes[n]) if isinstance(n, str) else n for n in w.shape)


def _dtype(w: Arg) -> torch.dtype:
    found = getattr(torch, w.dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def row_windows(program: Program, sizes: Scalars, indices: Integers, budget_bytes: int) -> Iterator[dict[str, Number]]:
    """Scalars for each window of rows; one window of all rows where workspaces do not grow with rows and keys."""
    row_bytes, total = program.row_bytes, int(sizes.get("total_rows", 0))
    if row_bytes is None:
        yield dict(sizes)
        return
    known = _lengths(program, sizes, indices)
    sizes = {**sizes, **{n: int(np.max(evaluate(e, known), initial=0)) for n, e in program.columns}}
    cost = int(evaluate(row_bytes, {n: np.asarray(sizes[n], np.int64) for n, _ in program.columns}))
    rows = max(1, min(total, budget_bytes // max(1, cost)))
    for lo in range(0, total, rows):
        hi = min(total, lo + rows)
        yield {**sizes, "row_lo": lo, "row_hi": hi, "window_rows": hi - lo}


def _lengths(program: Program, sizes: Scalars, indices: Integers) -> dict[str, npt.NDArray[np.int64]]:
    """What closed forms of columns are written in: scalars, and num_keys and entry counts of every sequence."""
    offsets = np.asarray(indices["offsets"], np.int64)
    rows = offsets[1:] - offsets[:-1]
    past = np.asarray(indices[program.lengths], np.int64) if program.lengths else np.zeros_like(rows)
    known = {n: np.asarray(v, np.int64) for n, v in sizes.items() if isinstance(v, int)}
    known["num_keys"] = (past + rows)[rows > 0]
    read = {x.name for _, e in program.columns for x in walk(e) if isinstance(x, Var)}
    for n in read - known.keys():
        known[n] = np.asarray(indices[n.removesuffix("_count") + "_lengths"], np.int64)[rows > 0]
    return known
