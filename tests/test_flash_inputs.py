"""Everything the published attention operator takes: dtypes, scales, head counts, widths, empty batches, buffers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import F8, content, place
from support.reference import NAMED, assert_close, assert_same_bits, flash
from support.running import SCHEDULES, attention, mask, public
from torch import Tensor

from tilewright.dsl.isa import best_isa
from tilewright.dsl.schedule import Schedule
from tilewright.ops import DecodeDispatchMetadata, PagedKVCache, generic_flash_attention_kv_cache_ragged_sink

pytestmark = pytest.mark.both_targets(slow=True)

PAST, ROWS = (7, 0, 0, 12), (4, 3, 0, 1)
CAUSAL = NAMED["causal"](0)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STORED: list[tuple[torch.dtype, int | None]] = [*((d, None) for d in FLOATS), (F8, None), (F8, 16), (F8, 5), (F8, 1)]


def with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    found = generic_flash_attention_kv_cache_ragged_sink(*args, return_lse=True, **options)
    assert isinstance(found, tuple)
    return found


# ---- dtypes and scales -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "granularity"), STORED, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("given", FLOATS, ids=lambda x: str(x).removeprefix("torch."))
def test_dtypes_and_scales(
    given: torch.dtype, stored: torch.dtype, granularity: int | None, rng: np.random.Generator
) -> None:
    """Every q with every cache: a result in q's dtype, summed in float32, the scales of unused slots poison too."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2, dim=20, dtype=stored, q_dtype=given, granularity=granularity)
    cache = place(data, rng, page_size=3, layers=2, layer=1)
    out, lse = with_lse(data.q, data.offsets, cache, 1, 0.3)
    expected, lse_expected = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 0.3)
    assert (out.dtype, lse.dtype) == (given, torch.float32)
    assert_close(out, expected)
    assert_close(lse, lse_expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("wanted", FLOATS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_output_is_rounded_once(
    products: str, wanted: torch.dtype, dtype: torch.dtype, rng: np.random.Generator, target_of_calls: str
) -> None:
    """Under one schedule, the result in any dtype is the float32 result, rounded; allocated, or written to a buffer."""
    if target_of_calls == "cpu" and products == "bfloat16" and not best_isa().bf16_dot:
        pytest.skip("this processor multiplies no bfloat16")
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2, dtype=dtype)
    cache = place(data, rng)

    def attend(dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        schedule = Schedule(rows=4, keys=16, partitions=2, strip=5, products=products)
        return attention(data.q, data.offsets, cache, where=mask("causal"), schedule=schedule, out=out, dtype=dtype)[0]

    exact = attend(torch.float32)
    assert_same_bits(attend(wanted), exact.to(wanted))
    buffer = torch.full(exact.shape, torch.nan, dtype=wanted)
    assert attend(wanted, buffer) is buffer
    assert_same_bits(buffer, exact.to(wanted))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("wanted", FLOATS, ids=lambda x: str(x).removeprefix("torch."))
def test_what_a_narrow_output_may_change(
    wanted: torch.dtype, dtype: torch.dtype, rng: np.random.Generator, target_of_calls: str
) -> None:
    """By default, no more than its rounding; but where matrix units multiply bfloat16, and that is the type of what is
    stored and of what is wanted, each weight is rounded to it as well.
    """
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2, dtype=dtype)
    cache = place(data, rng)
    exact = public(data.q, data.offsets, cache, output_dtype=torch.float32)
    got = public(data.q, data.offsets, cache, output_dtype=wanted)
    if target_of_calls == "interpret" or wanted is not torch.bfloat16:
        assert_same_bits(got, exact.to(wanted))
    largest = max(float(v.float().abs().amax()) for v in data.v if len(v))
    assert (got.float() - exact).abs().amax() <= (2.0**-9 + 2.0**-9) * largest  # of a weight, and of the result


@pytest.mark.parametrize("named", ["bfloat16", np.dtype(np.float16), torch.float32])
def test_output_dtype_by_any_name(named: object, rng: np.random.Generator) -> None:
    """torch's, numpy's and plain names of dtypes."""
    data = content(rng, [3], [1])
    found = public(data.q, data.offsets, place(data, rng), output_dtype=named)
    assert str(found.dtype).removeprefix("torch.") == str(named).removeprefix("torch.")


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_buffers_with_strides(schedule: Schedule, rng: np.random.Generator) -> None:
    """A buffer that is a slice of a larger one is filled, its NaN gone, and nothing around it changes."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2)
    cache = place(data, rng)
    expected, _ = attention(data.q, data.offsets, cache, where=mask("causal"), schedule=schedule)
    larger = torch.full((3 + 2 * sum(ROWS), 7, 12), torch.nan)
    buffer = larger[3::2, 1:5, 3:11]
    attention(data.q, data.offsets, cache, where=mask("causal"), schedule=schedule, out=buffer)
    assert_same_bits(buffer, expected)
    assert int(larger.isnan().sum()) == larger.numel() - buffer.numel()


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 5), (7, 1), (14, 2), (16, 2), (12, 1), (64, 1), (128, 2)])
@pytest.mark.parametrize("partitions", [1, 3])
def test_groups_of_heads(partitions: int, heads: int, kv_heads: int, rng: np.random.Generator) -> None:
    """Any whole number of query heads per key-value head, with a sink for each, some of them -inf and +inf."""
    data = content(rng, PAST, ROWS, heads=heads, kv_heads=kv_heads)
    sinks = torch.from_numpy(rng.standard_normal(heads)).float()
    sinks[0], sinks[-1] = -inf, inf
    out, lse = with_lse(
        data.q, data.offsets, place(data, rng, page_size=3), 0, 0.3, sinks, decode_dispatch_metadata=partitions
    )
    expected, lse_expected = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 0.3, sinks.tolist())
    assert_close(out, expected)
    assert_close(lse, lse_expected)


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(d, d) for d in (1, 5, 8, 40, 80, 128, 576)] + [(24, 16), (7, 1), (3, 9)]
)
def test_widths(dim: int, value_dim: int, rng: np.random.Generator) -> None:
    """Any head size, and values narrower or wider than keys."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2, dim=dim, value_dim=value_dim)
    out = public(data.q, data.offsets, place(data, rng, page_size=3, form="NHD"), scale=dim**-0.5)
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, dim**-0.5)
    assert out.shape == (sum(ROWS), 4, value_dim)
    assert_close(out, expected)


def test_scales_of_narrow_values(rng: np.random.Generator) -> None:
    """One granularity for keys and narrower values: each field has its own number of scales."""
    data = content(rng, PAST, ROWS, dim=20, value_dim=7, dtype=F8, granularity=5)
    out = public(data.q, data.offsets, place(data, rng, page_size=3, form="HND"))
    assert_close(out, flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)[0])


EMPTY: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "no rows in some sequences": ((3, 5, 0, 2), (0, 2, 0, 1)),
    "no rows at all": ((3, 5), (0, 0)),
    "no keys but those of the call": ((0, 0), (2, 1)),
    "one row": ((0,), (1,)),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("partitions", [1, 3])
def test_empty_sequences(name: str, partitions: int, rng: np.random.Generator) -> None:
    """Sequences of zero rows, wherever they stand, need no pages and give no rows."""
    past, rows = EMPTY[name]
    data = content(rng, past, rows)
    out, lse = with_lse(data.q, data.offsets, place(data, rng), 0, 1.0, decode_dispatch_metadata=partitions)
    expected, lse_expected = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)
    assert_close(out, expected)
    assert_close(lse, lse_expected)


def test_empty_batch() -> None:
    """No sequences, no pages: results of zero rows."""
    for pages, width in ((0, 0), (3, 2)):
        blocks = torch.full((pages, 2, 1, 4, 1, 8), torch.nan)
        table = torch.zeros(0, width, dtype=torch.int32)
        cache = PagedKVCache(blocks, table, torch.zeros(0, dtype=torch.int32))
        out, lse = with_lse(torch.zeros(0, 2, 8), torch.tensor([0]), cache, 0, 1.0)
        assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


# ---- other kinds of arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64, torch.uint32])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64, torch.uint32])
def test_index_dtypes(offsets: torch.dtype, index: torch.dtype, rng: np.random.Generator) -> None:
    """Tables, lengths and offsets of any index dtype; junk entries as large as the dtype holds."""
    data = content(rng, PAST, ROWS)
    sees = NAMED["sliding_window_causal"](3)
    cache = place(data, rng, page_size=2, index_dtype=index, sees=sees)
    out = public(data.q, data.offsets.to(offsets), cache, mask_str="sliding_window_causal", local_window_size=3)
    assert_close(out, flash(data.ragged, data.q64, data.keys, data.values, sees, 1.0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numpy_inputs(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """numpy arrays wherever tensors are taken: the same bits, a buffer written in place."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2, dtype=dtype)
    cache, sinks = place(data, rng, page_size=3), torch.tensor([0.0, 1.0, -inf, inf])
    expected = public(data.q, data.offsets, cache, sink_weights=sinks)
    leaf = cache.layer(0)
    assert leaf.values is not None
    blocks = torch.stack([leaf.keys, leaf.values], 1).unsqueeze(2).numpy()
    as_numpy = PagedKVCache(blocks, leaf.lookup_table.numpy(), leaf.cache_lengths.numpy())
    buffer = np.full(tuple(data.q.shape), np.nan, data.q.numpy().dtype)
    given: tuple[Any, ...] = (data.q.numpy(), data.offsets.numpy(), as_numpy)
    found = public(*given, sink_weights=sinks.numpy(), output=buffer)
    assert_same_bits(found, expected)
    assert np.array_equal(buffer, expected.numpy())


def test_a_negative_numpy_scale_and_numpy_window(rng: np.random.Generator) -> None:
    """numpy's numbers are numbers, and so are tensors of one element; a negative scale is a scale."""
    data = content(rng, PAST, ROWS)
    cache = place(data, rng)
    options: dict[str, Any] = {"mask_str": "chunked_causal"}
    expected = public(data.q, data.offsets, cache, scale=-0.25, local_window_size=4, **options)
    for scale, window in ((np.float32(-0.25), np.int64(4)), (torch.tensor(-0.25), 4), (np.array([-0.25]), np.uint8(4))):
        found = public(data.q, data.offsets, cache, scale=scale, local_window_size=window, **options)
        assert_same_bits(found, expected)
    sees = NAMED["chunked_causal"](4)
    assert_close(expected, flash(data.ragged, data.q64, data.keys, data.values, sees, -0.25)[0])


@pytest.mark.parametrize("metadata", [None, 1, 4, DecodeDispatchMetadata(), DecodeDispatchMetadata(3)])
def test_partitions_are_a_hint(metadata: DecodeDispatchMetadata | int | None, rng: np.random.Generator) -> None:
    """Any number of partitions gives the result within rounding."""
    data = content(rng, [300, 2], [1, 1], heads=4, kv_heads=2)
    out, lse = with_lse(data.q, data.offsets, place(data, rng), 0, 0.5, decode_dispatch_metadata=metadata)
    expected, lse_expected = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 0.5)
    assert_close(out, expected)
    assert_close(lse, lse_expected)


def test_queries_with_strides(rng: np.random.Generator) -> None:
    """q, as the engine cut it out of a fused projection or transposed it, is read in place."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2)
    cache = place(data, rng)
    expected = public(data.q, data.offsets, cache)
    fused = torch.full((sum(ROWS), 9, 8), torch.nan)
    fused[:, 2:6] = data.q
    assert_same_bits(public(fused[:, 2:6], data.offsets, cache), expected)
    assert_same_bits(public(data.q.transpose(0, 1).contiguous().transpose(0, 1), data.offsets, cache), expected)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_inference_mode_and_gradients(threads: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines call under inference mode, on tensors made there; models hand over tensors that want gradients."""
    monkeypatch.setenv("TILEWRIGHT_THREADS", threads)
    data = content(rng, PAST, ROWS)
    cache = place(data, rng)
    expected = public(data.q, data.offsets, cache)
    with torch.inference_mode():
        made_there = data.q.clone()
        assert_same_bits(public(made_there, data.offsets, cache), expected)
        buffer = torch.full_like(expected, torch.nan)
        public(made_there, data.offsets, cache, output=buffer, decode_dispatch_metadata=2)
    assert_close(buffer, expected.double().numpy())
    with_gradients = public(data.q.clone().requires_grad_(), data.offsets, cache)
    assert not with_gradients.requires_grad
    assert_same_bits(with_gradients, expected)


def test_calls_at_once() -> None:
    """Threads of one process call at the same time, on batches of their own, with programs that they share."""

    def one(seed: int) -> None:
        rng = np.random.default_rng(seed)
        data = content(rng, [seed % 40, 3], [1 + seed % 20, 2], heads=4, kv_heads=2)
        out = public(data.q, data.offsets, place(data, rng, page_size=3), decode_dispatch_metadata=1 + seed % 2)
        assert_close(out, flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)[0])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(64)))


def test_junk_entries_are_never_read(rng: np.random.Generator) -> None:
    """Entries before a window, past the end and of sequences without rows hold anything: no error, no NaN."""
    data = content(rng, [30, 6, 9], [1, 2, 0])
    sees = NAMED["sliding_window_causal"](5)
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, sees, 1.0)
    options: dict[str, Any] = {"mask_str": "sliding_window_causal", "local_window_size": 5}
    for seed in range(8):
        cache = place(data, np.random.default_rng(seed), page_size=2, sees=sees)
        assert_close(public(data.q, data.offsets, cache, **options), expected)
