"""Native code on sizes that divide nothing, every way a cache can lie in memory, and every type stored in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import content, place
from support.native import INTERPRETER, ISAS, On, distance, inputs_of, needs_compiler, run, tolerance
from support.reference import Ragged, assert_same_bits

import tilewright
from tilewright.dsl.schedule import Schedule
from tilewright.ops.cache import PagedKVCache
from tilewright.ops.flash_attention import flash_attention
from tilewright.ops.masks import mask_named

pytestmark = [needs_compiler, pytest.mark.slow]
SCHEDULE = Schedule(rows=4, keys=24, strip=12)
CAUSAL = mask_named("test", "causal", None)

# Of key rows and value rows, page size, query heads for one key-value head, what is stored, elements of a scale.
SHAPES: list[tuple[int, int, int, int, str, int | None]] = [
    (8, 8, 1, 1, "float32", None),
    (40, 40, 5, 3, "bfloat16", None),
    (72, 40, 7, 7, "float16", None),
    (80, 96, 16, 12, "float8_e4m3fn", 16),
    (96, 80, 192, 1, "float8_e4m3fn", 48),
    (128, 128, 7, 3, "float8_e4m3fn", None),
    (192, 128, 16, 7, "bfloat16", None),
    (256, 256, 5, 1, "float16", None),
    (512, 8, 192, 3, "bfloat16", None),
    (576, 512, 16, 12, "bfloat16", None),
    (7, 5, 3, 2, "float32", None),
    (1, 1, 2, 5, "float16", None),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_sizes(shape: tuple[int, int, int, int, str, int | None], isa: str, seed: int) -> None:
    """The interpreter's numbers; a few rows and many; rounded products where this processor has them."""
    dim, value_dim, page_size, group, stored, granularity = shape
    n, on = SHAPES.index(shape) + ISAS.index(isa), On("cpu", isa)
    rounded = on.isa in ("avx512bf16", "amxbf16") and stored != "float32"
    output = "bfloat16" if rounded else "float32"
    inputs = inputs_of(
        "flash_attention", seed, heads=2 * group, kv_heads=2, page_size=page_size, cache_dtype=stored,
        granularity=granularity, dtype=output, dims={"dim": dim, "value_dim": value_dim}, rows=(3, 1, 0, 9, 2),
        cached=(40, 0, 3, 11, 7),
    )  # fmt: skip
    schedule = replace(SCHEDULE, products="bfloat16" if rounded else "float32", rows=(4, 1)[n % 2])
    want, got = run(inputs, schedule, INTERPRETER, output), run(inputs, schedule, on, output)
    for key, x in want.items():
        assert distance(got[key], x) <= tolerance(output, schedule)


def test_odd_sizes_are_among_them() -> None:
    """Those of models, which are no powers of two, for key rows and for value rows."""
    both = {8, 40, 80, 96, 128, 256, 512}
    assert both | {72, 192, 576} <= {s[0] for s in SHAPES}
    assert both <= {s[1] for s in SHAPES}


@pytest.mark.parametrize("form", ["blocks", "slice", "NHD", "HND", "csr"])
def test_layouts(form: str, rng: np.random.Generator) -> None:
    """Strides of any kind, tables of every integer type, a layer that is not the first: one kernel, the same bits."""
    data = content(rng, (9, 0, 3), (3, 5, 1), heads=4, kv_heads=2)

    def attend(target: str, **where: Any) -> torch.Tensor:
        cache = place(data, np.random.default_rng(0), page_size=4, **where)
        given = {"q": data.q, "kv": cache.layer(where.get("layer", 0)), "scale": 0.5}
        constants = {"mask": CAUSAL}
        return tilewright.run(
            flash_attention, given, data.offsets, constants=constants, schedule=SCHEDULE, target=target
        )["out"]

    want = attend("interpret")
    made = [attend("cpu", form=form)]
    if form == "blocks":
        made += [attend("cpu", form=form, index_dtype=t) for t in (torch.int64, torch.uint32)]
        made += [attend("cpu", form=form, layers=3, layer=1)]
    for got in made:
        assert distance(got, want) <= 3e-6
        assert_same_bits(got, made[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_offsets(dtype: torch.dtype, seed: int) -> None:
    inputs = inputs_of("flash_attention", seed)
    other = replace(inputs, input_row_offsets=inputs.input_row_offsets.to(torch.int64).to(dtype))
    one, two = (run(x, SCHEDULE, On("cpu"))["out"] for x in (inputs, other))
    assert_same_bits(one, two)


def test_strided_outputs_and_queries(seed: int) -> None:
    """Rows of a wider buffer, heads apart: what lies between stays as it was."""
    inputs = inputs_of("flash_attention", seed)
    want = run(inputs, SCHEDULE, On("cpu"))
    rows, heads, width = want["out"].shape
    buffer = torch.full((rows, heads + 1, width + 3), 7.0)
    q = inputs.arguments["q"]
    assert isinstance(q, torch.Tensor)
    wide = torch.full((2 * rows, heads, q.shape[-1] + 5), torch.nan)
    wide[::2, :, 2:-3] = q
    moved = replace(inputs, arguments={**inputs.arguments, "q": wide[::2, :, 2:-3]})
    got = run(moved, SCHEDULE, On("cpu"), outputs={"out": buffer[:, :heads, 1 : 1 + width]})
    assert_same_bits(got["out"].contiguous(), want["out"])
    assert_same_bits(got["lse"], want["lse"])
    buffer[:, :heads, 1 : 1 + width] = 7
    assert (buffer == 7).all()


@pytest.mark.parametrize("rows", [(), (0, 0), (0, 2, 0), (1,) * 9])
def test_batches(rows: tuple[int, ...], seed: int) -> None:
    """Nobody, nobody with rows, some without, many alike."""
    inputs = inputs_of("flash_attention", seed, rows=rows, cached=tuple(range(0, 3 * len(rows), 3)))
    schedule = replace(SCHEDULE, partitions=3)
    want, got = (run(inputs, schedule, on) for on in (INTERPRETER, On("cpu")))
    assert got["out"].shape[0] == sum(rows)
    for key, x in want.items():
        assert distance(got[key], x) <= 3e-6


def test_rows_that_see_nothing(rng: np.random.Generator) -> None:
    """0, and a log-sum of -inf."""
    data = content(rng, (0, 4), (3, 2), heads=2, kv_heads=1)
    cache = place(data, rng)
    assert isinstance(cache, PagedKVCache)
    assert isinstance(data.ragged, Ragged)
    given = {"q": data.q, "kv": cache.layer(0), "scale": 1.0}
    constants = {"mask": lambda q, k: k < q - 3, "with_lse": True}
    found = tilewright.run(flash_attention, given, data.offsets, constants=constants, schedule=SCHEDULE, target="cpu")
    assert (found["out"][:3] == 0).all()
    assert (found["lse"][:3] == -torch.inf).all()
    assert found["lse"][3:].isfinite().all()
