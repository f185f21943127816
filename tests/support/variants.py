"""A causal ragged batch for operators that a test declares, and what they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tilewright
from tilewright.dsl.schedule import Schedule

from .batches import Content, content, place
from .reference import NAMED, Floats, Sees, visible

PAST, ROWS = (7, 0, 0, 15, 2), (5, 6, 0, 1, 3)
TOTAL = sum(ROWS)
CAUSAL = NAMED["causal"](0)


def batch(rng: np.random.Generator, heads: int = 4, kv_heads: int = 2) -> Content:
    return content(rng, PAST, ROWS, heads=heads, kv_heads=kv_heads)


def run(
    operator: Any, data: Content, rng: np.random.Generator, schedule: Schedule, sees: Sees = CAUSAL, **captured: object
) -> dict[str, torch.Tensor]:
    """The operator's outputs on a batch in pages of 3, what `sees` hides poisoned."""
    leaf = place(data, rng, page_size=3, sees=sees).layer(0)
    given = {"q": data.q, "kv": leaf, **captured}
    return tilewright.run(operator, given, data.offsets, schedule=schedule)


def per_row(data: Content, value: Any, width: int | None = None) -> Floats:
    """[rows, heads] or [rows, heads, width] of value(scores of the keys a causal mask shows, their values, where)."""
    out = np.zeros((len(data.q64), data.heads, *([] if width is None else [width])))
    for at in data.ragged.places(data.heads):
        kv_head = at.head * data.kv_heads // data.heads
        seen = visible(CAUSAL, at)
        s = data.keys[at.seq][seen, kv_head] @ data.q64[at.row, at.head]
        out[at.row, at.head] = value(s, data.values[at.seq][seen, kv_head], at)
    return out
