"""Calls of the published operators on native code, made the fast way and the ordinary way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.codegen_cache import launch, prepared
from tilewright.dsl.errors import TilewrightError
from tilewright.ops import (
    PagedKVCache,
    generic_flash_attention_kv_cache_ragged_sink,
    latent_sparse_attention_ragged_paged,
    mla_indexer_ragged_float8_paged,
)

Call = dict[str, Any]
HEADS, DIM = 4, 8


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def call(seed: int = 0) -> Call:
    """Two sequences of 5 + 1 and 2 + 2 keys in pages of 4."""
    gen = torch.Generator().manual_seed(seed)
    blocks = torch.randn(6, 2, 2, 4, 2, DIM, generator=gen)
    table = torch.tensor([[4, 1, -1], [2, 0, -1]], dtype=torch.int32)
    return {
        "q": torch.randn(3, HEADS, DIM, generator=gen),
        "input_row_offsets": ints(0, 1, 3),
        "kv_collection": PagedKVCache(blocks, table, ints(5, 2)),
        "layer_idx": 1,
        "scale": 0.5,
    }


def flash(c: Call) -> Tensor:
    out = generic_flash_attention_kv_cache_ragged_sink(**c)
    return out[0] if isinstance(out, tuple) else out


def latent_call() -> Call:
    gen = torch.Generator().manual_seed(3)

    def leaf(length: int) -> Any:
        blocks = torch.randn(4, 1, 1, 4, 1, DIM, generator=gen)
        return PagedKVCache(blocks, torch.tensor([[2, 0, 1]], dtype=torch.int32), ints(length)).layer(0)

    return {
        "q": torch.randn(2, HEADS, DIM, generator=gen),
        "input_row_offsets": ints(0, 2),
        "comp_indices": torch.tensor([[0, 5, -1], [3, -1, 1]], dtype=torch.int32),
        "attn_sink": torch.zeros(HEADS),
        "swa_cache": leaf(4),
        "comp_cache": leaf(6),
        "scale": 0.5,
        "window": 3,
    }


def indexer_call() -> Call:
    gen = torch.Generator().manual_seed(4)
    blocks = torch.randn(4, 1, 1, 4, 1, DIM, generator=gen).to(torch.float8_e4m3fn)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    return {
        "q": torch.randn(2, HEADS, DIM, generator=gen).to(torch.float8_e4m3fn),
        "q_s": torch.ones(2, HEADS),
        "input_row_offsets": ints(0, 2),
        "k_collection": PagedKVCache(blocks, table, ints(7), scales=torch.ones(4, 1, 1, 4, 1, 1)),
        "layer_idx": 0,
        "top_k": 3,
    }


def latent(c: Call) -> Tensor:
    out = latent_sparse_attention_ragged_paged(**c)
    assert isinstance(out, Tensor)
    return out


def indexer(c: Call) -> Tensor:
    return mla_indexer_ragged_float8_paged(**c)


def ordinary(c: Call, f: Callable[[Call], Tensor] = flash) -> Tensor | str:
    """What the ordinary way gives, which prepares nothing: its result, or its refusal."""
    kept = dict(prepared._CALLS)
    prepared._CALLS.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "first", lambda *_: None)
            return outcome(c, f)
    finally:
        prepared._CALLS.clear()
        prepared._CALLS.update(kept)


def outcome(c: Call, f: Callable[[Call], Tensor] = flash) -> Tensor | str:
    try:
        return f(c).clone()
    except TilewrightError as e:
        return f"{type(e).__name__}: {e}"


def same(a: Tensor | str, b: Tensor | str) -> None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b
