"""Default schedules of GPUs: tiles by what matrix units and shared memory take."""

from __future__ import annotations

from dataclasses import replace

from .dtypes import DType, Kind
from .errors import IllegalSchedule
from .gpu import MATRIX, Gpu
from .schedule import Binding, Schedule
from .spec import Listed, ParamKind, Spec
from .targets_cpu import score_width

POINTS = 64  # (row, head) points of a tile: 16 for each of four warps
NARROW = ("bfloat16", "float16")


_FITTING: dict[tuple[str, str, Binding, Schedule], Schedule] = {}


def gpu_schedule(gpu: Gpu, spec: Spec, binding: Binding, rows: int, batch: int) -> Schedule:
    """By the mean number of query rows of a sequence, rounded up to a power of two: few schedules, compiled once.

    Tiles are made smaller until they fit in shared memory.
    """
    wished = _wished(gpu, spec, binding, rows, batch)
    key = (gpu.name, spec.fingerprint, binding, wished)
    if key not in _FITTING:
        _FITTING[key] = _fitting(gpu, spec, binding, wished)
    return _FITTING[key]


def _fitting(gpu: Gpu, spec: Spec, binding: Binding, schedule: Schedule) -> Schedule:
    from .lower import lower  # here, because a schedule that is given needs none of it

    while True:
        try:
            lower(spec, binding, schedule, gpu=gpu)
        except IllegalSchedule:
            if schedule.keys > MATRIX:
                schedule = replace(schedule, keys=schedule.keys // 2)
            elif schedule.rows > 1:
                schedule = replace(schedule, rows=schedule.rows // 2)
            else:
                return schedule  # whoever lowers it is told why it does not fit
        else:
            return schedule


def _wished(gpu: Gpu, spec: Spec, binding: Binding, rows: int, batch: int) -> Schedule:
    mean = 1 << (-(-rows // max(1, batch)) - 1).bit_length() if rows else 1
    lists = [part for source in spec.sources for part in source.parts if isinstance(part, Listed)]
    own = 1 if any("head" in part.axes for part in lists) else None  # heads of a tile; None: the group
    heads = own or binding.group
    products = product_type(spec, binding)
    points = POINTS if products != "float32" else POINTS // 4
    few = 1 if lists else max(1, min(mean, points // heads))
    if (width := score_width(spec, binding)) > 16:  # a score for each feature: far fewer points make a tile
        keys = max(MATRIX, min(64, (1 << 12) // width // MATRIX * MATRIX))
        return Schedule(rows=1, heads=own, keys=keys, products=products)
    parts = _partitions(spec, binding, mean, batch)
    return Schedule(few, own, _keys(gpu, spec, binding, products, heads * few), parts, products=products)


def product_type(spec: Spec, binding: Binding) -> str:
    """The type that matrix units multiply in: what caches are stored in, where that is narrow; else float32."""
    stored = {leaf.dtype.name for _, leaf in binding.leaves}
    given = {d.name for n, d in binding.dtypes if _is_query(spec, n, d)}
    if stored <= {"float8_e4m3fn"}:
        narrow = given & set(NARROW)
        return next(iter(narrow)) if len(narrow) == 1 else "float16" if not given - {"float8_e4m3fn"} else "float32"
    both = (stored | given) - {"float8_e4m3fn"}
    return next(iter(both)) if len(both) == 1 and both <= set(NARROW) else "float32"


def _is_query(spec: Spec, name: str, dtype: DType) -> bool:
    """A tensor with rows and features: an operand of products with key rows."""
    declared = {p.name: p for p in spec.params}
    if name not in declared or declared[name].kind is not ParamKind.TENSOR or dtype.kind is not Kind.FLOAT:
        return False
    axes = declared[name].axes
    return "row" in axes and bool(set(axes) - {"row", "head"})


def _keys(gpu: Gpu, spec: Spec, binding: Binding, products: str, points: int) -> int:
    """Keys of a tile: as many as leave half of shared memory to a second block."""
    widths = {a: binding.size(a) for p in spec.params if p.kind is ParamKind.PAGED for a in (*p.axes, *p.value_axes)}
    element = 4 if products == "float32" else 2
    row = element * sum(widths.values()) * 2 + (4 * points if element == 4 or spec.selects else 0)
    most = gpu.shared_bytes // 2 // max(1, row)
    return max(MATRIX, min(64, 1 << max(0, most.bit_length() - 1)))


def _partitions(spec: Spec, binding: Binding, mean: int, batch: int) -> int:
    """A few rows of a few sequences leave multiprocessors idle unless their keys are split."""
    kv_heads = max((leaf.kv_heads for _, leaf in binding.leaves), default=1)
    splittable = len(spec.folds) == 1 and all(
        "row" in s.axes and ("head" in s.axes or kv_heads == 1) for f in spec.folds for s in f.states
    )
    return 8 if splittable and mean <= 4 and batch * kv_heads < 64 and not spec.selects else 1
