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
from tilewright.dsl.loops import KeyReach, Program
from tilewright.dsl.spec import Spec

from .bind import Bound
from .checks import expect_non_negative


def validate(op: str, spec: Spec, program: Program, bound: Bound, offsets: Ints, names: Mapping[str, str]) -> None:
    """Raise ArgumentValueError for lengths beyond the table, and pages outside the pool, that visible keys need."""
    rows = np.diff(offsets)
    for name, leaf in bound.leaves.items():
        expect_non_negative(op, f"{names.get(name, name)}.cache_lengths", leaf.cache_lengths)
    if spec.positions is None:
        return
    past = _ints(bound.tensors[f"{spec.positions}_lengths"])
    known = {
        **{n: np.asarray(v, np.int64) for n, v in bound.scalars.items() if isinstance(v, int)},
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


def _ints(t: Tensor) -> Ints:
    """Values of an index tensor. torch has hardly any uint32 operations, slicing among the few."""
    out: Ints = t.to(torch.int64).numpy()
    return out
