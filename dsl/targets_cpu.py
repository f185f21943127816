"""Default schedules of native CPU code: tiles by the sizes of caches, strips by the micro-kernels' rows."""

from __future__ import annotations

import math

from .dtypes import Kind, bf16
from .isa import Isa
from .schedule import Binding, Schedule
from .spec import Listed, ParamKind, Spec

POINTS = 384  # (row, head) points that share a packed key tile: enough to make packing 2-4 % of the work
FLOAT_ROWS = 12  # of the widest micro-kernel of float32 products
PACKED_BYTES = (
    256 << 10
)  # of a key tile, keys and values: with a tile's queries and sums it stays in a second-level cache


def native_schedule(isa: Isa, spec: Spec, binding: Binding, rows: int, batch: int) -> Schedule:
    """By the mean number of query rows of a sequence, rounded up to a power of two: few schedules, compiled once."""
    mean = 1 << (-(-rows // max(1, batch)) - 1).bit_length() if rows else 1
    lists = [part for source in spec.sources for part in source.parts if isinstance(part, Listed)]
    products = "bfloat16" if isa.bf16_dot and _narrow(spec, binding) else "float32"
    strip = isa.micro_rows if products == "bfloat16" else min(isa.micro_rows, FLOAT_ROWS)
    if (width := score_width(spec, binding)) > 16:  # a score for each feature: far fewer points make a tile
        few = 1 if lists else min(4, mean)
        keys = max(8, min(128, (1 << 18) // (few * width) // 8 * 8))
        return Schedule(rows=few, heads=_heads(lists), keys=keys, strip=strip)
    heads = 1 if _heads(lists) == 1 else binding.heads if spec.selects else binding.group
    tile_rows = 1 if lists else max(1, min(mean, POINTS // heads))
    keys = _keys(spec, binding, products)
    if spec.selects:
        few = 1 if lists else max(1, min(mean, 512 // heads))
        return Schedule(rows=few, heads=_heads(lists), keys=keys, strip=strip, products=products)
    parts = _partitions(spec, binding, mean, batch)
    start = "first" if lists else "aligned"
    return Schedule(tile_rows, _heads(lists), keys, parts, start, strip=strip, products=products)


def _heads(lists: list[Listed]) -> int | None:
    return 1 if any("head" in part.axes for part in lists) else None


def _keys(spec: Spec, binding: Binding, products: str) -> int:
    """Keys of a tile: as many as keep its packed form within a cache."""
    widths = {a: binding.size(a) for p in spec.params if p.kind is ParamKind.PAGED for a in (*p.axes, *p.value_axes)}
    words = sum(max(widths[a] for a in axes) for axes in _packings(spec, widths))
    element = 2 if products == "bfloat16" else 4
    most = PACKED_BYTES // (element * max(1, words))
    return max(32, min(256 if products == "bfloat16" else 128, 1 << max(0, most.bit_length() - 1)))


def _packings(spec: Spec, widths: dict[str, int]) -> list[tuple[str, ...]]:
    """Rows of keys, packed for scores; and of values, packed for sums."""
    leaves = [p for p in spec.params if p.kind is ParamKind.PAGED]
    if not leaves:
        return []
    keys = tuple(a for p in leaves for a in p.axes)
    values = tuple(a for p in leaves for a in p.value_axes)
    return [keys] if spec.selects else [keys, values or keys]


def _partitions(spec: Spec, binding: Binding, mean: int, batch: int) -> int:
    """A few rows of a few sequences with one key-value head leave cores idle unless their keys are split."""
    kv_heads = max((leaf.kv_heads for _, leaf in binding.leaves), default=1)
    points = batch * kv_heads
    splittable = len(spec.folds) == 1 and all(
        "row" in s.axes and ("head" in s.axes or kv_heads == 1) for f in spec.folds for s in f.states
    )
    return 4 if splittable and mean <= 4 and points < 4 and not spec.selects else 1


def _narrow(spec: Spec, binding: Binding) -> bool:
    """Whether results are stored in bfloat16, so that rounding weights to it loses little; or are positions.

    A result without features, such as lse, is of scores alone, which are not rounded.
    """
    made = [binding.dtype(n) for n, e in spec.outputs if _has_features(e.axes)]
    return all(d is bf16 for d in made if d.kind is Kind.FLOAT)


def _has_features(axes: tuple[str, ...]) -> bool:
    return bool(set(axes) - {"row", "head"})


def score_width(spec: Spec, binding: Binding) -> int:
    """Features that something has for every row and key."""
    per_key = [e for e in spec.nodes if "key" in e.axes and ("row" in e.axes or "head" in e.axes)]
    features = [[a for a in e.axes if a not in ("row", "head", "key")] for e in per_key]
    return max((math.prod(binding.size(a) for a in axes) for axes in features), default=1)
