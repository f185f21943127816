"""What a caller reads when an argument is wrong: which, what it was, what was expected; and the output is untouched."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import content, place
from support.reference import NAMED, assert_close, assert_same_bits, flash
from support.running import public
from support.variants import batch
from torch import Tensor

import tilewright
from tilewright.dsl import errors
from tilewright.ops import PagedKVCache, generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.flash_attention import flash_attention

Call = dict[str, Any]
PAST, ROWS = (7, 0, 4), (3, 0, 2)


def call(rng: np.random.Generator) -> Call:
    """Arguments of a call without a fault: sequences of 10, 0 and 6 keys in pages of 4."""
    data = content(rng, PAST, ROWS, heads=4, kv_heads=2)
    cache = place(data, rng, layers=2, layer=1)
    return {
        "q": data.q,
        "input_row_offsets": data.offsets,
        "kv_collection": cache,
        "layer_idx": 1,
        "scale": 0.5,
        "sink_weights": torch.zeros(4),
        "output": torch.full((5, 4, 8), nan),
    }


def cached(c: Call, **changed: Any) -> PagedKVCache:
    """The call's cache with other tables or lengths, or blocks of other shapes."""
    cache: PagedKVCache = c["kv_collection"]
    leaf = cache.layer(1)
    assert leaf.values is not None
    blocks = torch.stack([leaf.keys, leaf.values], 1).unsqueeze(2).expand(-1, -1, 2, -1, -1, -1)
    given: Call = {"blocks": blocks, "lookup_table": cache.lookup_table, "cache_lengths": cache.cache_lengths} | changed
    return PagedKVCache(**given)


def with_entry(c: Call, page: int) -> PagedKVCache:
    table = c["kv_collection"].lookup_table.clone()
    table[2, 1] = page
    return cached(c, lookup_table=table)


def keys_only(c: Call) -> PagedKVCache:
    leaf = c["kv_collection"].layer(1)
    return PagedKVCache.from_block_table(leaf.keys, None, leaf.lookup_table, leaf.cache_lengths)


def frozen(shape: tuple[int, ...]) -> Any:
    made = np.zeros(shape, np.float32)
    made.flags.writeable = False
    return made


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


FAULTS: dict[str, dict[str, Callable[[Call], Call]]] = {
    "ArgumentRankError": {
        "q without heads": lambda c: {"q": c["q"][:, 0]},
        "two-dimensional offsets": lambda c: {"input_row_offsets": c["input_row_offsets"][None]},
        "a sink per row and head": lambda c: {"sink_weights": torch.zeros(5, 4)},
        "an output without heads": lambda c: {"output": torch.full((5, 32), nan)},
    },
    "ArgumentShapeError": {
        "a head size unlike the cache's": lambda c: {"q": torch.zeros(5, 4, 16), "output": None},
        "no heads": lambda c: {"q": torch.zeros(5, 0, 8), "output": None},
        "offsets for another batch": lambda c: {"input_row_offsets": ints(0, 5)},
        "a sink for other heads": lambda c: {"sink_weights": torch.zeros(3)},
        "an output of other rows": lambda c: {"output": torch.full((6, 4, 8), nan)},
        "an output of other width": lambda c: {"output": torch.full((5, 4, 9), nan)},
    },
    "ArgumentDTypeError": {
        "integer q": lambda c: {"q": c["q"].int()},
        "double q": lambda c: {"q": c["q"].double()},
        "q in float8": lambda c: {"q": c["q"].to(torch.float8_e4m3fn)},
        "offsets of floats": lambda c: {"input_row_offsets": c["input_row_offsets"].float()},
        "offsets of int16": lambda c: {"input_row_offsets": c["input_row_offsets"].to(torch.int16)},
        "double sinks": lambda c: {"sink_weights": torch.zeros(4, dtype=torch.float64)},
        "an output of another dtype": lambda c: {"output": c["output"].half()},
        "an integer output": lambda c: {"output": torch.zeros(5, 4, 8, dtype=torch.int32)},
        "an unknown output dtype": lambda c: {"output_dtype": torch.float64},
        "foreign byte order": lambda c: {"q": c["q"].numpy().astype(">f4")},
    },
    "ArgumentDeviceError": {
        "q on another device": lambda c: {"q": c["q"].to("meta")},
        "offsets on another device": lambda c: {"input_row_offsets": c["input_row_offsets"].to("meta")},
        "sinks on another device": lambda c: {"sink_weights": torch.zeros(4, device="meta")},
        "an output on another device": lambda c: {"output": c["output"].to("meta")},
        "a cache on another device": lambda c: {
            "kv_collection": PagedKVCache(
                torch.empty(4, 2, 2, 4, 2, 8, device="meta"),
                torch.zeros(3, 4, dtype=torch.int32, device="meta"),
                torch.zeros(3, dtype=torch.int32, device="meta"),
            )
        },
        "everything where no target runs": lambda c: (
            {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in c.items()}
            | {
                "kv_collection": PagedKVCache(
                    torch.empty(4, 2, 2, 4, 2, 8, device="meta"),
                    torch.zeros(3, 4, dtype=torch.int32, device="meta"),
                    torch.zeros(3, dtype=torch.int32, device="meta"),
                )
            }
        ),
    },
    "ArgumentLayoutError": {
        "an output transposed": lambda c: {"output": torch.full((5, 8, 4), nan).transpose(1, 2)},
        "an output expanded": lambda c: {"output": torch.full((5, 1, 8), nan).expand(5, 4, 8)},
        "q with numpy's negative strides": lambda c: {"q": c["q"].numpy()[:, ::-1]},
    },
    "ArgumentValueError": {
        "offsets from 1": lambda c: {"input_row_offsets": ints(1, 3, 3, 5)},
        "offsets out of order": lambda c: {"input_row_offsets": ints(0, 3, 2, 5)},
        "offsets that end before the rows": lambda c: {"input_row_offsets": ints(0, 3, 3, 4)},
        "offsets that end after the rows": lambda c: {"input_row_offsets": ints(0, 3, 3, 9)},
        "a page outside the pool": lambda c: {"kv_collection": with_entry(c, 1000)},
        "the page after the last": lambda c: {"kv_collection": with_entry(c, c["kv_collection"].num_pages)},
        "a negative page": lambda c: {"kv_collection": with_entry(c, -1)},
        "more keys than the table holds": lambda c: {"kv_collection": cached(c, cache_lengths=ints(7, 0, 400))},
        "an unknown mask": lambda c: {"mask_str": "casual"},
        "no mask": lambda c: {"mask_str": None},
        "a window of 0": lambda c: {"mask_str": "sliding_window_causal", "local_window_size": 0},
        "a negative window": lambda c: {"mask_str": "chunked", "local_window_size": -1},
        "no window": lambda c: {"mask_str": "chunked_causal", "local_window_size": None},
        "a window for a mask without one": lambda c: {"local_window_size": 128},
        "a layer that is not there": lambda c: {"layer_idx": 2},
        "a negative layer": lambda c: {"layer_idx": -1},
        "no partitions": lambda c: {"decode_dispatch_metadata": 0},
    },
    "ArgumentTypeError": {
        "a list for q": lambda c: {"q": c["q"].tolist()},
        "a sparse q": lambda c: {"q": c["q"].to_sparse()},
        "a leaf for a cache": lambda c: {"kv_collection": c["kv_collection"].layer(1)},
        "a float for a layer": lambda c: {"layer_idx": 1.0},
        "a bool for a layer": lambda c: {"layer_idx": True},
        "a string for a scale": lambda c: {"scale": "0.5"},
        "a scale for each head": lambda c: {"scale": torch.ones(4)},
        "a float for a window": lambda c: {"mask_str": "chunked", "local_window_size": 4.0},
        "a bool for a window": lambda c: {"mask_str": "chunked", "local_window_size": True},
    },
    "ArgumentError": {
        "no scale": lambda c: {"scale": None},
        "empty offsets": lambda c: {"input_row_offsets": ints()},
        "heads that key-value heads do not divide": lambda c: {
            "q": torch.zeros(5, 3, 8),
            "sink_weights": None,
            "output": None,
        },
        "a cache of keys alone": lambda c: {"kv_collection": keys_only(c), "layer_idx": 0},
        "a read-only output": lambda c: {"output": frozen((5, 4, 8))},
    },
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind: str, rng: np.random.Generator, golden: Callable[[str, str], None]) -> None:
    """Each names the argument as its caller wrote it; nothing has been written by then."""
    found = []
    for name, change in FAULTS[kind].items():
        c = call(rng)
        c |= change(c)
        output = c["output"]
        before = torch.as_tensor(np.array(output)).clone() if isinstance(output, np.ndarray) else output
        kept = before.clone() if isinstance(before, Tensor) and before.device.type == "cpu" else None
        with pytest.raises(errors.TilewrightError) as caught:
            generic_flash_attention_kv_cache_ragged_sink(**c)
        assert type(caught.value).__name__ == kind, f"{name}: {caught.value}"
        assert isinstance(caught.value, ValueError)
        if kept is not None:
            assert_same_bits(torch.as_tensor(np.array(output)) if isinstance(output, np.ndarray) else output, kept)
        found.append(f"-- {name}\n{caught.value}\n")
    golden(f"errors_{kind}", "\n".join(found))


def test_a_call_without_a_fault(rng: np.random.Generator) -> None:
    """What the faults above start from is legal."""
    c = call(rng)
    out = generic_flash_attention_kv_cache_ragged_sink(**c)
    assert out is c["output"]
    assert bool(out.isfinite().all())


def test_entries_that_no_visible_key_needs_are_no_error(rng: np.random.Generator) -> None:
    """Before a window, past the end, in a sequence without rows: -1, 2**31 - 1, a page too many, an alias."""
    data = content(rng, [30, 6, 9], [1, 2, 0])
    sees = NAMED["sliding_window_causal"](5)
    cache = place(data, rng, page_size=2, sees=sees)
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, sees, 1.0)
    used = [range(26 // 2, 31 // 2 + 1), range(2 // 2, 7 // 2 + 1), range(0)]
    for junk in (-1, (1 << 31) - 1, cache.num_pages, int(cache.lookup_table[0, 15])):
        table = cache.lookup_table.clone()
        for b, pages in enumerate(used):
            table[b, [p for p in range(table.shape[1]) if p not in pages]] = junk
        leaf = cache.layer(0)
        assert leaf.values is not None
        other = PagedKVCache.from_block_table(leaf.keys, leaf.values, table, cache.cache_lengths)
        out = public(data.q, data.offsets, other, mask_str="sliding_window_causal", local_window_size=5)
        assert_close(out, expected)


def test_unchecked_values(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """TILEWRIGHT_VALIDATE=0 looks at no value: rows past the last offset belong to nobody, the others are right."""
    data = batch(rng)
    cache = place(data, rng)
    expected = public(data.q, data.offsets, cache)
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "0")
    longer, buffer = torch.cat([data.q, data.q[:2]]), torch.full((len(data.q) + 2, 4, 8), 7.0)
    public(longer, data.offsets, cache, output=buffer)
    assert_same_bits(buffer[: len(data.q)], expected)
    assert bool((buffer[len(data.q) :] == 7.0).all())


# ---- tilewright.run itself -------------------------------------------------------------------------------------------


RUN_FAULTS: dict[str, Callable[[Call], Call]] = {
    "a parameter left out": lambda a: {n: x for n, x in a.items() if n != "kv"},
    "an unknown parameter": lambda a: a | {"kw": 3},
    "a cache for a leaf": lambda a: a | {"kv": 3},
    "an integer where floats are declared": lambda a: a | {"sink": torch.zeros(4, dtype=torch.int32)},
    "a dtype that no kernel has": lambda a: a | {"sink": torch.zeros(4, dtype=torch.float64)},
    "a number where a tensor is declared": lambda a: a | {"q": 1.0},
}


def test_faults_of_run(rng: np.random.Generator, golden: Callable[[str, str], None]) -> None:
    """The same of an operator that an author runs, its parameters by the names he gave them."""
    found = []
    for name, change in RUN_FAULTS.items():
        c = call(rng)
        given = {"q": c["q"], "kv": c["kv_collection"].layer(1), "sink": None, "scale": 0.5}
        with pytest.raises(errors.ArgumentError) as caught:
            tilewright.run(flash_attention, change(given), c["input_row_offsets"], constants={"mask": None})
        found.append(f"-- {type(caught.value).__name__}: {name}\n{caught.value}\n")
    golden("errors_of_run", "\n".join(found))
