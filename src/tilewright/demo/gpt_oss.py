"""A tiny random gpt-oss from transformers, served on our paged cache and attention.

Its layers alternate between a sliding window and full attention; every head has a sink, and four query heads share a
key-value head.

What stays the model's: all but its cache and attention, which it lets one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tilewright.ops.cache import PagedKVCache
from tilewright.ops.flash_attention import generic_flash_attention_kv_cache_ragged_sink

from .page_pool import PagePool
from .serving import STEPS, VOCABULARY, ModelCheck, compare, load_transformers, prompts, redraw, serve

WINDOW = 5
PAGE_SIZE = 5


def tiny_gpt_oss(seed: int = 0) -> Any:
    """A gpt-oss of 4 layers and 250 thousand parameters, float32."""
    tf = load_transformers()
    config = tf.GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=64, max_position_embeddings=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, sliding_window=WINDOW, intermediate_size=48, num_local_experts=4,
        num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return redraw(tf.GptOssForCausalLM(config), seed)


# ---- our cache and attention in it -----------------------------------------------------------------------------------


def paged_cache(config: Any, pool: PagePool) -> Any:
    """A cache of transformers whose rows lie in a page pool; its class is made here, because transformers is optional.

    `update` stores rows [1, kv_heads, rows, head_dim] of a layer. Its `kwargs` goes on to the attention, which so
    learns of the pages.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class PagedCache(Cache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, kwargs: Any, **unused: Any
        ) -> tuple[Tensor, Tensor]:
            pool.append(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
            kwargs["pages"] = pool.before
            return key_states, value_states

    # The base class asks these for lengths; they stay empty.
    return PagedCache(layers=[DynamicLayer() for _ in range(config.num_hidden_layers)])  # type: ignore[no-untyped-call]


class Pages:
    """The page pool of all layers, and the model's cache that stores in it."""

    def __init__(self, config: Any, requests: int, longest: int) -> None:
        """Room for `longest` tokens of each request."""
        self._pool = PagePool(
            requests, longest, config.num_hidden_layers, config.head_dim,
            page_size=PAGE_SIZE, heads=config.num_key_value_heads, values=True,
        )  # fmt: skip
        self._cache = paged_cache(config, self._pool)

    def begin(self, counts: Sequence[int]) -> Tensor:
        self._pool.begin(counts)
        return self._pool.positions

    def keywords(self) -> Mapping[str, Any]:
        return {"cache": self._cache, "row_offsets": self._pool.offsets}

    def end(self) -> None:
        self._pool.end()


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float, row_offsets: Tensor, pages: PagedKVCache, sliding_window: int | None = None,
    s_aux: Tensor | None = None, **unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention hook of transformers: query [1, heads, rows, dim] -> [1, rows, heads, dim], and no weights.

    Keys and values come from the pages; `key` and `value` hold the new rows only.
    """
    out = generic_flash_attention_kv_cache_ragged_sink(
        query[0].transpose(0, 1), row_offsets, pages, module.layer_idx, scaling, s_aux,
        mask_str="sliding_window_causal" if sliding_window else "causal", local_window_size=sliding_window or -1,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None], None


@contextmanager
def our_attention(model: Any) -> Iterator[None]:
    """The model's attention is ours inside, its own eager one outside."""
    # The name may hold neither "sdpa" nor "flash": transformers reads meaning into those.
    load_transformers().AttentionInterface.register("tilewright", attention)
    model.set_attn_implementation("tilewright")
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


# ---- the check -------------------------------------------------------------------------------------------------------


def check_gpt_oss(seed: int = 0) -> ModelCheck:
    """Serve the prompts and compare every logit and every token with the model's eager attention."""
    model, requests = tiny_gpt_oss(seed), prompts()
    pages = Pages(model.config, len(requests), max(map(len, requests)) + STEPS)
    with our_attention(model):
        served = serve(model, pages, requests)
    return compare(model, requests, served)
