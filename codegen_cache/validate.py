"""Checks of values: offsets, lengths and page numbers, for the pages that some row can see and no others.

Entries of a lookup table that no visible key needs may hold anything (stale, aliased, -1), so they are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tilewright.dsl.closed_form import Ints, evaluate
from tilewright.dsl.errors import ArgumentValueError
from tilewright.dsl.expr import ALWAYS
from tilewright.dsl.loops import KeyReach, Program
from tilewright.dsl.spec import Listed, Spec

from .bind import Bound
from .checks import expect_non_negative


def validate(op: str, spec: Spec, program: Program, bound: Bound, offsets: Ints, names: Mapping[str, str]) -> None:
    """Raise ArgumentValueError for lengths beyond the table, and pages outside the pool, that visible keys need."""
    for name, leaf in bound.leaves.items():
        expect_non_negative(op, f"{names.get(name, name)}.cache_lengths", leaf.cache_lengths)
    rows = np.diff(offsets)
    past = np.zeros_like(rows) if spec.positions is None else _ints(bound.tensors[f"{spec.positions}_lengths"])
    for part in (p for source in spec.sources for p in source.parts if isinstance(p, Listed)):
        entries = past + rows if part.leaf == spec.positions else _ints(bound.tensors[f"{part.leaf}_lengths"])
        _check_listed(op, part, bound, entries, rows, names)
    known = {
        **{n: np.asarray(v, np.int64) for n, v in bound.scalars.items() if isinstance(v, int)},
        **{f"{n}_count": _ints(leaf.cache_lengths) for n, leaf in bound.leaves.items() if n != spec.positions},
        "q0": past, "q1": past + rows - 1, "num_keys": past + rows,
    }  # fmt: skip
    for reach in program.reach:
        if reach.exact:  # else which keys are seen is known only to the running nest, which checks every read
            _check_reach(op, reach, bound, known, rows, names)


def _check_reach(
    op: str, reach: KeyReach, bound: Bound, known: dict[str, Ints], rows: Ints, names: Mapping[str, str]
) -> None:
    shown = names.get(reach.leaf, reach.leaf)
    leaf = bound.leaves[reach.leaf]
    page = leaf.keys.shape[1]
    first = np.broadcast_to(np.maximum(evaluate(reach.lo, known), 0), rows.shape)
    end = np.broadcast_to(evaluate(reach.hi, known), rows.shape)
    used = (rows > 0) & (first < end)
    if not used.any():
        return
    width, pages = leaf.lookup_table.shape[1], leaf.keys.shape[0]
    if (beyond := np.flatnonzero(used & (end > width * page))).size:
        b = int(beyond[0])
        raise ArgumentValueError(
            op=op, argument=f"{shown} sequence {b}", got=f"{int(end[b])} keys long",
            expected=f"at most {width * page}, as its lookup_table row holds {width} pages of {page}",
        )  # fmt: skip
    low, high = first[used] // page, (end[used] - 1) // page
    left, right = int(low.min()), int(high.max()) + 1  # columns that some sequence needs
    sequences = np.flatnonzero(used)
    table = _ints(leaf.lookup_table[:, left:right])[sequences]
    column = np.arange(left, right)
    needed = (column >= low[:, None]) & (column <= high[:, None])
    bad = np.argwhere(needed & ((table < 0) | (table >= pages)))
    if bad.size:
        row, at = (int(x) for x in bad[0])
        raise ArgumentValueError(
            op=op,
            argument=f"{shown}.lookup_table[{int(sequences[row])}, {left + at}]",
            got=int(table[row, at]),
            expected=f"a page in 0..{pages - 1}",
        )


def _check_listed(op: str, part: Listed, bound: Bound, entries: Ints, rows: Ints, names: Mapping[str, str]) -> None:
    """Every listed entry is one the leaf has, in a page of its sequence's table and of the pool."""
    leaf, listed = bound.leaves[part.leaf], _ints(bound.tensors[part.indices])
    if part.block > 1 or part.where != ALWAYS:
        return  # a block may stick out of the leaf, and not all that is listed is seen: the nest checks what it reads
    shown, shown_leaf = names.get(part.indices, part.indices), names.get(part.leaf, part.leaf)
    page, sequence = leaf.keys.shape[1], np.repeat(np.arange(len(rows)), rows)
    limit = np.minimum(entries, leaf.lookup_table.shape[1] * page)[sequence].reshape(-1, *(1,) * (listed.ndim - 1))
    if (bad := np.argwhere(listed >= limit)).size:
        at, t = tuple(int(x) for x in bad[0]), int(sequence[int(bad[0][0])])
        raise ArgumentValueError(
            op=op, argument=f"{shown}{list(at)} (row {at[0]}, slot {at[-1]})", got=int(listed[at]),
            expected=f"below {int(limit.reshape(-1)[at[0]])}, the entries that {shown_leaf} holds for sequence {t}",
        )  # fmt: skip
    used = np.argwhere(listed >= 0)
    if not used.size:
        return
    table = _ints(leaf.lookup_table)
    pages = table[sequence[used[:, 0]], listed[tuple(used.T)] // page]
    if (wrong := np.flatnonzero((pages < 0) | (pages >= leaf.keys.shape[0]))).size:
        at = tuple(int(x) for x in used[wrong[0]])
        column = int(listed[at]) // page
        raise ArgumentValueError(
            op=op, argument=f"{shown_leaf}.lookup_table[{int(sequence[at[0]])}, {column}]", got=int(pages[wrong[0]]),
            expected=f"a page in 0..{leaf.keys.shape[0] - 1}, as {shown}{list(at)} lists entry {int(listed[at])}",
        )  # fmt: skip


def _ints(t: Tensor) -> Ints:
    """Values of an index tensor. torch has hardly any uint32 operations, slicing among the few."""
    out: Ints = t.to(torch.int64).numpy()
    return out
