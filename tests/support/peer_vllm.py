"""vLLM's compiled CPU operators, called alone: only the library is loaded, none of the engine is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .peer_calls import Bits, Refused, serve


def load() -> bool:
    """Loads the library that fits this processor; whether it has DeepSeek-V4's operators."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    whole = torch.cpu._is_avx512_bf16_supported()
    name = "_C" if whole else "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    torch.ops.load_library(str(folder / f"{name}.abi3.so"))  # type: ignore[no-untyped-call]
    return whole


WHOLE = load()
ops = torch.ops._C


def tensor(a: Bits, eight: torch.dtype | None = None) -> Tensor:
    """eight: what bytes are."""
    x = torch.from_numpy(a)
    if x.dtype == torch.int16:
        return x.view(torch.bfloat16)
    return x.view(eight) if eight is not None and x.dtype == torch.uint8 else x


def array(x: Tensor) -> Bits:
    found: Bits = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def expect_whole() -> None:
    if not WHOLE:
        raise Refused("vLLM builds its DeepSeek-V4 CPU operators for processors with AVX512-BF16 only")


def attention(
    q: Bits,
    k: Bits,
    v: Bits,
    table: Bits,
    offsets: Bits,
    num_keys: Bits,
    sinks: Bits | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = -1,
    isa: str = "vec",
    split: bool = True,
) -> Bits:
    """k and v: [pages, page_size, kv_heads, width]."""
    given = (tensor(q), tensor(k), tensor(v), tensor(table), tensor(offsets), tensor(num_keys))
    options = Attention(scale, causal, window, isa, split)
    return array(prepared_attention(*given, None if sinks is None else tensor(sinks), options)())


@dataclass(frozen=True)
class Attention:
    """What a call of `prepared_attention` may choose. isa: vec, vec16 or amx."""

    scale: float
    causal: bool = True
    window: int = -1
    isa: str = "vec"
    split: bool = True


def prepared_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, offsets: Tensor, num_keys: Tensor, sinks: Tensor | None,
    options: Attention,
) -> Callable[[], Tensor]:  # fmt: skip
    """The operator alone, on a cache filled and a plan made here, for the threads that torch has now."""
    isa, causal, window = options.isa, options.causal, options.window
    # Linux lets a process use AMX once it has asked to; vLLM leaves that to whoever multiplied matrices before.
    if isa == "amx" and not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        raise Refused("this processor has no AMX")
    pages, page_size, kv_heads, width = k.shape
    pool = torch.zeros(pages, kv_heads, 2 * page_size, width, dtype=k.dtype)
    key_cache, value_cache = pool.chunk(2, 2)
    slots = torch.arange(pages * page_size)
    ops.cpu_attn_reshape_and_cache(
        k.flatten(0, 1), v.flatten(0, 1), key_cache, value_cache, slots, isa, 1.0, 1.0, "auto"
    )
    plan = ops.get_scheduler_metadata(
        len(num_keys), q.shape[1], kv_heads, width, num_keys, q.dtype, offsets, causal, window, isa, options.split,
        None, "auto",
    )  # fmt: skip

    def call() -> Tensor:
        out = torch.empty_like(q)
        ops.cpu_attention_with_kv_cache(
            q, key_cache, value_cache, out, offsets, num_keys, options.scale, causal, None, window, table, 0.0, plan,
            sinks, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    return call


def latent(
    q: Bits,
    recent: Bits,
    recent_slots: Bits,
    entries: Bits,
    entry_slots: Bits,
    sinks: Bits,
    *,
    sizes: str,
    scale: float,
) -> Bits:
    """recent, entries: bytes of DeepSeek-V4's cache, by page; slots: physical; sizes: the two page sizes."""
    expect_whole()
    rows, (near, far) = tensor(q), map(int, sizes.split())
    out = torch.full_like(rows, torch.nan)
    ops.flash_mla_with_kvcache_cpu(
        out, rows, tensor(recent), tensor(recent_slots), near, tensor(entries), tensor(entry_slots), far, tensor(sinks),
        scale,
    )  # fmt: skip
    return array(out)


def scores(q: Bits, cache: Bits, weights: Bits, visible: Bits, table: Bits, *, page_size: int) -> Bits:
    """cache: a page is page_size float8 keys, then their float32 scales."""
    expect_whole()
    found: Tensor = ops.fp8_paged_mqa_logits_cpu(
        tensor(q, torch.float8_e4m3fn), tensor(cache), tensor(weights), tensor(visible), tensor(table), page_size,
        int(visible.max()),
    )  # fmt: skip
    return array(found)


def best512(q: Bits, cache: Bits, weights: Bits, visible: Bits, table: Bits, *, page_size: int) -> Bits:
    """The keys with the best scores, in no promised order."""
    found = tensor(scores(q, cache, weights, visible, table, page_size=page_size))
    pages, keys = (torch.full((len(q), 512), -7, dtype=torch.int32) for _ in range(2))
    ops.topk_transform_512_cpu(found, tensor(visible), tensor(table), pages, page_size, keys)
    return array(keys)


def compress(
    rows: Bits, gates: Bits, bias: Bits, positions: Bits, slots: Bits, windows: Bits, ends: Bits, entry_slots: Bits,
    norm: Bits, turns: Bits, *, rate: int, pages: int, page_size: int, entry_pages: int, entry_page_size: int,
    eps: float,
) -> Bits:  # fmt: skip
    """DeepSeek-V4's cache in bytes, by page, an entry for each window; windows: slots of its tokens, -1 is none."""
    expect_whole()
    state = torch.full((pages, page_size, 2 * rows.shape[1]), torch.nan)
    ops.save_partial_states_cpu(tensor(rows), tensor(gates), tensor(bias), tensor(positions), state, tensor(slots))
    made = torch.full((entry_pages, 584 * entry_page_size), 255, dtype=torch.uint8)
    ops.compress_norm_rope_store_cpu(
        state, tensor(windows), tensor(ends), tensor(entry_slots), tensor(norm), eps, tensor(turns), made,
        entry_page_size, rate,
    )  # fmt: skip
    return array(made)


if __name__ == "__main__":
    serve({f.__name__: f for f in (attention, latent, scores, best512, compress)})
