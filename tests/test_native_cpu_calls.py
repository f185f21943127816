# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""Native code as a caller meets it: the same bits every time, indices outside refused, C that can be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import content, place
from support.native import INTERPRETER, On, distance, inputs_of, needs_compiler, of_sequences, run
from support.reference import assert_same_bits
from support.running import attention

import tilewright
from tilewright import dsl
from tilewright.dsl import Paged, Rows, dot, op, where
from tilewright.dsl.dtypes import bf16, f32
from tilewright.dsl.emit_c import emit_c
from tilewright.dsl.errors import IllegalSchedule, OutOfBounds
from tilewright.dsl.isa import ISAS, supported
from tilewright.dsl.lower import lower
from tilewright.dsl.schedule import Binding, LeafBinding, Schedule
from tilewright.dsl.targets_cpu import native_schedule
from tilewright.ops import PagedKVCache, generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.flash_attention import flash_attention
from tilewright.ops.masks import mask_named
from tilewright.random_inputs import Inputs, binding_of

SCHEDULE = Schedule(rows=4, keys=16, partitions=3, strip=12)
LISTED = Schedule(rows=1, keys=16, start="first", strip=5)
CAUSAL = mask_named("test", "causal", None)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("flash_attention", SCHEDULE), ("latent_sparse_attention", LISTED), ("mla_indexer", replace(LISTED, rows=4))],
)
def test_the_same_bits_every_time(name: str, schedule: Schedule, seed: int) -> None:
    """From run to run, on one thread and on several."""
    inputs = inputs_of(name, seed, rows=(5, 1, 0, 18, 7, 2), cached=(3, 70, 9, 0, 33, 100))
    first = run(inputs, schedule, On("cpu", threads=1))
    for threads in (1, 2, 2, 2, 5):
        again = run(inputs, schedule, On("cpu", threads=threads))
        for key, x in first.items():
            assert_same_bits(again[key], x)


@needs_compiler
def test_pages_anywhere(rng: np.random.Generator) -> None:
    """Where pages lie, what lies between them and what stale entries say changes nothing."""
    data = content(rng, (9, 0, 31, 3), (3, 5, 0, 2), heads=4, kv_heads=2)
    found = []
    for n in range(4):
        cache = place(data, np.random.default_rng(n), page_size=4, spare=n + 1)
        given = {"q": data.q, "kv": cache.layer(0), "scale": 0.5}
        constants = {"mask": CAUSAL}
        found.append(
            tilewright.run(flash_attention, given, data.offsets, constants=constants, schedule=SCHEDULE, target="cpu")[
                "out"
            ]
        )
    for out in found[1:]:
        assert_same_bits(out, found[0])


@needs_compiler
@pytest.mark.parametrize("order", [(0,), (1,), (3,), (3, 2, 1, 0), (1, 1, 3, 0, 3)], ids=str)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("alibi_attention", SCHEDULE),
        ("flash_attention", replace(SCHEDULE, start="first")),
        ("flash_attention", None),
        ("latent_sparse_attention", LISTED),
        ("latent_sparse_attention", None),
        ("mla_indexer", replace(LISTED, rows=4)),
        ("mla_indexer", None),
    ],
)
def test_other_sequences_of_a_batch(name: str, schedule: Schedule | None, order: tuple[int, ...], seed: int) -> None:
    """Under one schedule (None: the whole batch's default), a row has the same bits whatever else is in the batch."""
    inputs = inputs_of(name, seed)
    rows, batch = int(inputs.input_row_offsets[-1]), len(inputs.input_row_offsets) - 1
    isa = supported()[-1]
    schedule = schedule or native_schedule(isa, inputs.spec, binding_of(inputs.spec, inputs.sizes), rows, batch)
    on = On("cpu", isa.name)
    other, taken = of_sequences(inputs, order)
    whole = run(inputs, schedule, on)
    for key, x in run(other, schedule, on).items():
        assert_same_bits(x, whole[key][taken])


# ---- indices outside -------------------------------------------------------------------------------------------------


def spoilt(inputs: Inputs, leaf: str, sequence: int, page: int, entry: int) -> Inputs:
    """With another entry in a lookup table."""
    kv = inputs.arguments[leaf]
    assert isinstance(kv, tilewright.ops.cache.PagedLeaf)
    table = kv.lookup_table.clone()
    table[sequence, page] = entry
    return replace(inputs, arguments={**inputs.arguments, leaf: replace(kv, lookup_table=table)})


OUTSIDE = (-1, -(1 << 31), (1 << 31) - 1, 1 << 20)


@needs_compiler
@pytest.mark.parametrize("entry", OUTSIDE)
@pytest.mark.parametrize(
    ("name", "leaf", "schedule"),
    [
        ("flash_attention", "kv", SCHEDULE),
        ("flash_attention", "kv", Schedule(rows=1, heads=1, keys=16)),
        ("latent_sparse_attention", "swa_cache", LISTED),
        ("mla_indexer", "k", replace(LISTED, rows=4)),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_page_outside_the_pool(
    name: str, leaf: str, schedule: Schedule, entry: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by tensor, axis, index and extent, even where nobody looked at the table before; nothing is read there."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    inputs = inputs_of(name, 1)
    bad = spoilt(inputs, leaf, 0, 0, entry)
    found = inputs.arguments[leaf]
    assert isinstance(found, tilewright.ops.cache.PagedLeaf)
    with pytest.raises(OutOfBounds) as raised:
        run(bad, schedule, On("cpu", threads=threads))
    fields = raised.value.fields
    assert (fields["axis"], fields["index"], fields["extent"]) == (0, entry, found.keys.shape[0])
    assert str(fields["tensor"]).startswith(leaf)
    good = run(inputs, schedule, On("cpu", threads=threads))  # and the next call is none the worse
    for key, x in run(inputs, schedule, INTERPRETER).items():
        assert distance(good[key], x) <= 3e-6


@needs_compiler
def test_a_page_that_only_the_nest_can_find(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a predicate that cannot be taken apart, checks leave the table to the program; buffers stay as they are."""
    monkeypatch.setenv("TILEWRIGHT_TARGET", "cpu")
    data = content(rng, (9, 4), (3, 2), heads=4, kv_heads=2)
    cache = place(data, rng, page_size=2)
    cache.lookup_table[0, 3] = 1000
    buffer = torch.full_like(data.q, 7.0)

    def thirds(q: Any, k: Any) -> Any:
        return (k % 3 == 0) & (k <= q)

    with pytest.raises(OutOfBounds, match=r"kv_[kv] at index 1000 of axis 0, which has"):
        attention(data.q, data.offsets, cache, where=thirds, schedule=SCHEDULE, out=buffer)
    assert (buffer == 7).all()
    cache.lookup_table[0, 2:4] = torch.tensor([1000, int(cache.lookup_table[0, 0])])  # keys 4 and 5 are seen by nobody
    assert attention(data.q, data.offsets, cache, where=thirds, schedule=SCHEDULE)[0].isfinite().all()


# ---- integers --------------------------------------------------------------------------------------------------------


@op
def last_positive(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k < query - 2)
    positive = dot(q, keys) > 0
    return {
        "last": dsl.max(where(positive, dsl.key, -1), over="key"),
        "count": dsl.sum(where(positive, 1, 0), over="key"),
    }


@needs_compiler
def test_reductions_of_integers(rng: np.random.Generator) -> None:
    """Exact; the greatest of no key is -inf, as in the interpreter."""
    data = content(rng, (9, 0), (3, 5), heads=4, kv_heads=2)
    given = {"q": data.q, "kv": place(data, rng).layer(0)}
    for schedule in (replace(SCHEDULE, keys=3), Schedule(rows=2, keys=32, masks="split", strip=3)):
        want, got = (
            tilewright.run(last_positive, given, data.offsets, schedule=schedule, target=t)
            for t in ("interpret", "cpu")
        )
        assert all(torch.equal(got[n], x) for n, x in want.items())
        assert (want["last"][3:6] == -torch.inf).all()


# ---- C ---------------------------------------------------------------------------------------------------------------

BINDING = Binding(
    (("dim", 8), ("head", 2), ("value_dim", 8)), (("out", f32), ("q", f32)), (("kv", LeafBinding(4, 1, f32)),)
)


def test_golden_c(golden: Callable[[str, str], None]) -> None:
    """Causal attention in strips for AVX2, whole: what a change to the printer changes is seen line by line."""
    spec = flash_attention.trace(mask=CAUSAL, sink=None)
    text = emit_c(lower(spec, BINDING, Schedule(rows=4, keys=16, strip=6)), ISAS["avx2"]).text
    golden("emit_c_causal_avx2", re.sub(r"\((?:/|\.\.|src)[^ ]*/(\w+\.py):", r"(\1:", text))


def test_products_that_an_instruction_set_lacks() -> None:
    """Refused by name before anything is compiled."""
    spec = flash_attention.trace(mask=CAUSAL, sink=None)
    binding = replace(BINDING, leaves=(("kv", LeafBinding(4, 1, bf16)),))
    program = lower(spec, binding, replace(SCHEDULE, products="bfloat16"))
    message = r"schedule field products='bfloat16': instruction set avx2 has none"
    with pytest.raises(IllegalSchedule, match=message):
        emit_c(program, ISAS["avx2"])
    assert "bfloat16" in emit_c(program, ISAS["avx512bf16"]).text


def test_queries_whose_elements_stand_apart(rng: np.random.Generator) -> None:
    """A view whose last axis is not contiguous is read by its strides, at the first call and when made again."""
    q = torch.from_numpy(rng.standard_normal((3, 2, 16), dtype=np.float32))
    blocks = torch.from_numpy(rng.standard_normal((4, 2, 1, 4, 1, 16), dtype=np.float32))
    cache = PagedKVCache(blocks, torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)

    def attend(x: torch.Tensor) -> torch.Tensor:
        out = generic_flash_attention_kv_cache_ragged_sink(x, offsets, cache, 0, 0.5, target="cpu")
        assert isinstance(out, torch.Tensor)
        return out

    expected = attend(q)
    assert torch.equal(attend(apart), expected)
    assert torch.equal(attend(apart), expected)
