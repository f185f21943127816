"""Attention in float64, written literally from sections 2 and 3 of the semantics: loops over rows and heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class At:
    """One row of one head, and every key of its sequence."""

    seq: int
    row: int  # of the whole batch
    pos: int
    head: int
    num_keys: int

    @property
    def key(self) -> Ints:
        return np.arange(self.num_keys)


Sees: TypeAlias = Callable[[At], Any]  # a bool, or one per key
"""Which keys the row sees."""

NAMED: dict[str, Callable[[int], Sees]] = {
    "causal": lambda w: lambda at: at.key <= at.pos,
    "null": lambda w: lambda at: True,
    "sliding_window_causal": lambda w: lambda at: (at.key <= at.pos) & (at.pos - at.key < w),
    "sliding_window_noncausal": lambda w: lambda at: at.key + w > at.pos,
    "chunked": lambda w: lambda at: at.key // w == at.pos // w,
    "chunked_causal": lambda w: lambda at: (at.key <= at.pos) & (at.key // w == at.pos // w),
}
WINDOWED = frozenset(NAMED) - {"causal", "null"}


@dataclass(frozen=True)
class Ragged:
    """Lengths of a batch: keys stored before the call, and rows of the call, per sequence."""

    past: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.past)

    @property
    def offsets(self) -> list[int]:
        return [sum(self.rows[:b]) for b in range(self.batch + 1)]

    def keys(self, b: int) -> int:
        return self.past[b] + self.rows[b]

    def places(self, heads: int) -> list[At]:
        """Every row of every head."""
        return [
            At(b, self.offsets[b] + i, self.past[b] + i, h, self.keys(b))
            for b in range(self.batch)
            for i in range(self.rows[b])
            for h in range(heads)
        ]


def visible(sees: Sees, at: At) -> Bools:
    return np.broadcast_to(np.asarray(sees(at), np.bool_), (at.num_keys,))


def needed(ragged: Ragged, heads: int, sees: Sees) -> list[Bools]:
    """Keys of each sequence that some row of it sees."""
    out = [np.zeros(ragged.keys(b), np.bool_) for b in range(ragged.batch)]
    for at in ragged.places(heads):
        out[at.seq] |= visible(sees, at)
    return out


def log_sum_exp(s: Floats) -> float:
    m = float(s.max()) if len(s) else -math.inf
    return m if math.isinf(m) else m + math.log(float(np.exp(s - m).sum()))


def attend(s: Floats, v: Floats, sink: float | None = None) -> Floats:
    """sum_j exp(s_j) v_j over (sum_j exp(s_j) + exp(sink)); 0 where no key is seen."""
    if len(s) == 0 or sink == math.inf:
        return np.zeros(v.shape[1])
    m = max(float(s.max()), -math.inf if sink is None else sink)
    p = np.exp(s - m)
    out: Floats = (p @ v) / (p.sum() + (0.0 if sink is None else math.exp(sink - m)))
    return out


def flash(
    ragged: Ragged,
    q: Floats,
    keys: Sequence[Floats],
    values: Sequence[Floats],
    sees: Sees,
    scale: float,
    sinks: Sequence[float] | None = None,
    score: Callable[[Floats, At], Floats] = lambda s, at: s,
) -> tuple[Floats, Floats]:
    """(out [rows, heads, value_dim], lse [rows, heads]). keys and values: [num_keys, kv_heads, width] per sequence.

    score: what is made of `scale * <q, k>` of every key.
    """
    rows, heads, _ = q.shape
    width = values[0].shape[2] if values else 0
    out, lse = np.zeros((rows, heads, width)), np.full((rows, heads), -np.inf)
    for at in ragged.places(heads):
        k, v = keys[at.seq], values[at.seq]
        kv_head = at.head // (heads // k.shape[1])
        seen = visible(sees, at)
        with np.errstate(invalid="ignore"):  # an unseen key may hold anything
            s = score(scale * (k[:, kv_head] @ q[at.row, at.head]), at)[seen]
        out[at.row, at.head] = attend(s, v[seen, kv_head], None if sinks is None else sinks[at.head])
        lse[at.row, at.head] = log_sum_exp(s)
    return out, lse


TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 4e-3), torch.float16: (2e-3, 5e-4)}
"""Relative and absolute, by the dtype of the result."""


def assert_close(actual: torch.Tensor, expected: npt.ArrayLike, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal within the tolerance of the dtype, or the wider one given; NaN equals nothing, infinity only itself."""
    r, a = TOLERANCE[actual.dtype]
    np.testing.assert_allclose(
        actual.to(torch.float64).numpy(), np.asarray(expected), rtol=max(r, rtol), atol=max(a, atol), equal_nan=False
    )


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    """The same shape, dtype and bytes."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    a, b = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} bytes differ"
