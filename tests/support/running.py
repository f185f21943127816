"""Running the attention operator under a schedule, on batches of `support.batches` or on a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.dsl.dtypes import DTYPES
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.value import Value
from tilewright.ops.cache import PagedKVCache
from tilewright.ops.flash_attention import flash_attention, generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.masks import mask_named

from .batches import Content, place
from .reference import Ragged, Sees

Predicate: TypeAlias = Callable[[Value, Value], Value | bool]

SCHEDULES: tuple[Schedule, ...] = (
    Schedule(rows=2, heads=1, keys=3, masks="split"),
    Schedule(rows=4, keys=4, partitions=2),
    Schedule(rows=16, keys=128),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=3, heads=1, keys=7, partitions=4, masks="split"),
    Schedule(rows=5, keys=256, partitions=3, masks="always"),
)


def each(*schedules: Schedule, quick: int = 3) -> pytest.MarkDecorator:
    """A test for each schedule (by default, of `SCHEDULES`); those after the first few are slow together."""
    found = schedules or SCHEDULES
    params = [pytest.param(s, id=named(s), marks=() if n < quick else pytest.mark.slow) for n, s in enumerate(found)]
    return pytest.mark.parametrize("schedule", params)


def named(schedule: Schedule) -> str:
    """A schedule as a test id."""
    s = schedule
    return f"rows{s.rows}-heads{s.heads or 'all'}-keys{s.keys}-parts{s.partitions}-{s.masks}"


def mask(name: str, window: int | None = None) -> Predicate | None:
    """A named mask as the operator takes it."""
    return mask_named("test", name, window)


def attention(
    q: Tensor,
    offsets: Tensor,
    cache: PagedKVCache,
    *,
    layer: int = 0,
    scale: float = 1.0,
    sink: Tensor | None = None,
    where: Predicate | None = None,
    schedule: Schedule | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the flash attention operator under a schedule, with any predicate."""
    found = tilewright.run(
        flash_attention,
        {"q": q, "kv": cache.layer(layer), "sink": sink, "scale": scale},
        offsets,
        constants={"mask": where, "with_lse": True},
        outputs={"out": out},
        output_dtypes={"out": DTYPES[str(dtype or q.dtype).removeprefix("torch.")]},
        schedule=schedule,
    )
    return found["out"], found["lse"]


def public(q: Tensor, offsets: Tensor, cache: PagedKVCache, **options: Any) -> Tensor:
    """The published operator with scale 1 and layer 0 unless `options` say otherwise, and without lse."""
    out = generic_flash_attention_kv_cache_ragged_sink(q, offsets, cache, **{"layer_idx": 0, "scale": 1.0, **options})
    assert isinstance(out, Tensor)
    return out


def of_numbers(
    q: Sequence[Any],
    keys: Sequence[Any],
    values: Sequence[Any],
    *,
    past: Sequence[int],
    rows: Sequence[int],
    heads: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Content:
    """A batch of written numbers: q [rows, dim], the same in all heads; keys and values [num_keys, dim] by sequence."""
    made = torch.tensor(q, dtype=dtype).reshape(sum(rows), 1, -1).expand(-1, heads, -1).contiguous()
    k, v = (tuple(torch.as_tensor(x).to(dtype).reshape(len(x), 1, -1) for x in field) for field in (keys, values))
    return Content(Ragged(tuple(past), tuple(rows)), made, k, v, None, None, None)


def attend(
    data: Content, *, page_size: int = 4, sees: Sees | None = None, seed: int = 0, **options: Any
) -> tuple[Tensor, Tensor]:
    """`attention` of a batch placed in a paged cache, what `sees` hides poisoned."""
    cache = place(data, np.random.default_rng(seed), page_size=page_size, sees=sees)
    return attention(data.q, data.offsets, cache, **options)
