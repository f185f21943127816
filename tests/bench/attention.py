"""The attention operator, and the same declaration under other schedules, against baselines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from peers import check, eager, reference, sdpa, torch_heads
from suite import OURS, Method, Prepared
from torch import Tensor
from workloads import LAYOUTS, SCALE, SHAPES, Shape, Workload, make, name_of

from tilewright import run
from tilewright.dsl.dtypes import DTYPES
from tilewright.dsl.schedule import Schedule
from tilewright.ops import generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.flash_attention import flash_attention
from tilewright.ops.masks import mask_named

BASELINE = "torch heads t128"
GOAL = 2.0


def weights() -> dict[str, float]:
    """A workload's part of the time: more where calls take longer, and where more methods are timed."""
    return {name: (1 + shape.flops / 1e10) * (3 if layout == "HND" else 1) for shape, _, layout, name in _cases()}


def workloads(match: str, threads: int) -> Iterator[Prepared]:
    for (shape, dtype), cases in itertools.groupby(_cases(), lambda case: case[:2]):
        wanted = [layout for _, _, layout, name in cases if match in name]
        if wanted:
            w = make(shape, dtype)
            expected = reference(w)
            for layout in wanted:
                w = w.in_layout(layout)
                yield Prepared(
                    w.name, shape.flops, w.bytes, dtype, _methods(w, threads), BASELINE, GOAL,
                    partial(_error, expected),
                )  # fmt: skip


def _error(expected: Tensor, name: str, got: Tensor) -> float:
    return check(name, got, expected)


def _cases() -> Iterator[tuple[Shape, torch.dtype, str, str]]:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for layout in LAYOUTS:
                yield shape, dtype, layout, name_of(shape, dtype, layout)


# ---- methods ---------------------------------------------------------------------------------------------------------


def _methods(w: Workload, threads: int) -> dict[str, Method]:
    """What is timed on a workload; schedules and slow baselines on one page order only."""
    methods = {OURS: public_operator(w), BASELINE: torch_heads(w)}
    if threads > 1:
        methods[f"{BASELINE}, {threads} workers"] = torch_heads(w, workers=threads)
    if w.layout == "HND":
        methods |= {f"{OURS} {_spelled(s)}": _scheduled(w, s) for s in _schedules(w.shape, threads)}
        methods |= {"torch heads t512": torch_heads(w, keys=512), "eager": eager(w)}
    return {**methods, "torch SDPA": sdpa(w)}


def _mask(w: Workload) -> tuple[str, int]:
    return ("causal", -1) if w.shape.window is None else ("sliding_window_causal", w.shape.window)


def public_operator(w: Workload) -> Method:
    """The public operator, as a model calls it."""
    cache, (mask, window) = w.cache(), _mask(w)

    def call() -> Tensor:
        out = generic_flash_attention_kv_cache_ragged_sink(
            w.q, w.offsets, cache, 0, SCALE, w.sinks, mask_str=mask, local_window_size=window
        )
        assert isinstance(out, Tensor)
        return out

    return call


def _schedules(shape: Shape, threads: int) -> list[Schedule]:
    """Schedules besides the default."""
    if max(shape.rows) == 1:
        out = [Schedule(rows=1, keys=keys) for keys in (128, 512, 1024)]
        return out if threads == 1 else [*out, Schedule(rows=1, keys=512, partitions=threads)]
    return [
        Schedule(rows=32, keys=128),
        Schedule(rows=64, keys=256),
        Schedule(rows=128, keys=128),
        Schedule(rows=128, keys=512),
        Schedule(rows=128, keys=128, masks="split"),
        Schedule(rows=128, keys=128, masks="always"),
    ]


def _spelled(s: Schedule) -> str:
    parts = f" p{s.partitions}" if s.partitions > 1 else ""
    return f"r{s.rows} k{s.keys}{parts}" + (f" {s.masks}" if s.masks != Schedule().masks else "")


def _scheduled(w: Workload, schedule: Schedule) -> Method:
    """The same operator under a schedule of our choice."""
    leaf, mask = w.cache().layer(0), mask_named("bench", *_mask(w))

    def call() -> Tensor:
        results = run(
            flash_attention,
            {"q": w.q, "kv": leaf, "scale": SCALE, "sink": w.sinks},
            w.offsets,
            constants={"mask": mask, "with_lse": False},
            output_dtypes={"out": DTYPES[w.dtype_name]},
            schedule=schedule,
        )
        return results["out"]

    return call
