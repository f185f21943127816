"""Our attention against vLLM's compiled CPU attention. docs/oracles.md says how to get it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import pytest
import torch
from support.batches import Content, content, place
from support.peer_calls import Bits, Call
from support.peers import VLLM, answer, call, difference, finite
from support.reference import NAMED
from support.running import public
from torch import Tensor

from tilewright.ops.cache import PagedKVCache

pytestmark = [pytest.mark.both_targets, pytest.mark.slow, VLLM.needed]


@dataclass(frozen=True)
class Flash:
    """A batch of attention; `isa` and `split` choose among vLLM's kernels."""

    isa: str = "vec"
    page_size: int = 32  # vec: multiples of 32; vec16: of 16
    dim: int = 64
    heads: tuple[int, int] = (4, 2)
    mask: str = "causal"
    window: int | None = None
    sinks: bool = True
    dtype: torch.dtype = torch.float32
    past: tuple[int, ...] = (3, 70, 0, 300, 31)
    rows: tuple[int, ...] = (5, 1, 16, 9, 1)
    split: bool = True
    scale: float = 0.125


# Not compared: a window without `causal` is symmetric in vLLM (|q - k| < w), ours has no upper bound.
FLASH = {
    "plain": Flash(sinks=False),
    "sinks": Flash(),
    "no-split": Flash(split=False),
    "null": Flash(mask="null"),
    "window": Flash(mask="sliding_window_causal", window=7),
    "window-of-one": Flash(mask="sliding_window_causal", window=1),
    "window-of-pages": Flash(mask="sliding_window_causal", window=128, past=(300, 127, 128, 0), rows=(3, 2, 1, 130)),
    "group-of-7": Flash(page_size=64, heads=(7, 1)),
    "group-of-12": Flash(page_size=96, heads=(12, 1), dim=128),
    "no-groups": Flash(heads=(8, 8), dim=32),
    "pages-of-16": Flash("vec16", 16),
    "pages-of-48": Flash("vec16", 48, dim=80, mask="sliding_window_causal", window=50),
    "wide": Flash(dim=256, heads=(2, 1), scale=0.0625),
    "decode": Flash(past=(511, 512, 0, 31, 32, 700), rows=(1,) * 6),
    "empty-sequences": Flash(past=(3, 9, 40), rows=(4, 0, 2)),
    "sharp": Flash(scale=0.5),
    "bf16-vec": Flash(dtype=torch.bfloat16),
    "bf16-vec16": Flash("vec16", 16, dtype=torch.bfloat16, mask="sliding_window_causal", window=9),
    "bf16-amx": Flash("amx", dtype=torch.bfloat16, heads=(7, 1)),
    "bf16-amx-groups": Flash("amx", dtype=torch.bfloat16, window=40, mask="sliding_window_causal"),
    "f16-vec": Flash(dtype=torch.float16),
}

# Absolute, of outputs up to 4. float32: both add float32 in orders of their own. 16-bit: both round the output, and may
# end a step apart, of 2**-6 (bfloat16) or 2**-9 (float16) above 2; with AMX, vLLM rounds probabilities as well.
FLASH_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def made(name: str) -> tuple[Content, PagedKVCache, Tensor | None]:
    """The batch on pages, with poison where no row looks, and its sinks."""
    case, rng = FLASH[name], np.random.default_rng(crc32(name.encode()))
    heads, kv_heads = case.heads
    data = content(rng, case.past, case.rows, heads=heads, kv_heads=kv_heads, dim=case.dim, dtype=case.dtype)
    cache = place(data, rng, page_size=case.page_size, sees=NAMED[case.mask](case.window or 0))
    sinks = torch.from_numpy(rng.normal(1, 2, heads)).float() if case.sinks else None
    return data, cache, sinks


def ours(name: str, case: Flash | None = None) -> Tensor:
    """The published operator, as `case` says."""
    data, cache, sinks = made(name)
    case = case or FLASH[name]
    options = {"mask_str": case.mask, "local_window_size": case.window, "scale": case.scale}
    return public(data.q, data.offsets, cache, sink_weights=sinks if case.sinks else None, **options)


def asked(name: str) -> Call:
    """The same call of vLLM's operator."""
    (data, cache, sinks), case = made(name), FLASH[name]
    leaf = cache.layer(0)
    assert leaf.values is not None
    tensors = {
        "q": data.q,
        # vLLM multiplies masked probabilities of 0 with whatever the slots hold, so that NaN gets through.
        "k": finite(leaf.keys),
        "v": finite(leaf.values),
        "table": leaf.lookup_table,
        "offsets": data.offsets,
        "num_keys": torch.tensor([data.ragged.keys(b) for b in range(data.ragged.batch)], dtype=torch.int32),
        "sinks": sinks,
    }
    options = {"scale": case.scale, "causal": case.mask != "null", "window": case.window or -1}
    return call("attention", tensors, isa=case.isa, split=case.split, **options)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Bits]:
    return VLLM.answers({name: asked(name) for name in FLASH})


@pytest.mark.parametrize("name", FLASH)
def test_flash_attention(name: str, theirs: dict[str, Bits]) -> None:
    """Ragged rows over pages, by mask, sinks, head counts, widths and dtypes."""
    found = difference(ours(name), answer(theirs, name))
    assert found <= FLASH_TOLERANCE[FLASH[name].dtype]


@pytest.mark.parametrize("name", ["sinks", "window", "bf16-vec"])
def test_flash_attention_would_differ(name: str, theirs: dict[str, Bits]) -> None:
    """A key too many, no sinks and a scale 1 in 10 off are each far outside the tolerance."""
    case = FLASH[name]
    wrong = [replace(case, sinks=False), replace(case, scale=case.scale * 1.1)]
    if case.window is not None:
        wrong.append(replace(case, window=case.window - 1))
    for other in wrong:
        assert difference(ours(name, other), answer(theirs, name)) > 3 * FLASH_TOLERANCE[case.dtype]
