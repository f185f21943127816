"""A tiny random gpt-oss from transformers, served on our paged cache and attention, against its own eager attention.

Its layers alternate between a sliding window and full attention; every head has a sink, and four query heads share a
key-value head. Requests of different lengths go through it as packed ragged batches: prompts in chunks, together with the
decode rows of requests whose prompt is done.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewright.commands.errors import NotInstalled
from tilewright.ops.cache import PagedKVCache
from tilewright.ops.flash_attention import generic_flash_attention_kv_cache_ragged_sink

if TYPE_CHECKING:
    from types import ModuleType

PROMPTS = (40, 7, 1, 23)  # tokens of each request
STEPS = 16  # tokens decoded for each
CHUNK = 9  # prompt tokens of a request in one call, at most
WINDOW = 5
PAGE_SIZE = 5
VOCABULARY = 97
TOLERANCE = 2e-5  # of float32 logits of size 5, over four layers
JUNK = 2**31 - 1  # in table entries without a page


def load_transformers() -> ModuleType:
    """transformers, silent and offline. Raises NotInstalled, which says how to install it."""
    extra = {"what": "the demo's model", "package": "transformers", "extra": "models"}
    if importlib.util.find_spec("transformers") is None:
        raise NotInstalled(**extra)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


# ---- the model -------------------------------------------------------------------------------------------------------


def tiny_gpt_oss(seed: int = 0) -> Any:
    """A gpt-oss of 4 layers and 250 thousand parameters, float32.

    Weights are redrawn so that activations stay near 1: attention is then far from uniform, sinks are not 0, and greedy
    tokens vary.
    """
    tf = load_transformers()
    config = tf.GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=64, max_position_embeddings=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, sliding_window=WINDOW, intermediate_size=48, num_local_experts=4,
        num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = tf.GptOssForCausalLM(config).to(torch.float32).eval()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=gen)
            if p.ndim > 1 and not name.endswith("bias"):
                p.copy_(noise * (1.3 / (1 if "embed" in name else p.shape[-1]) ** 0.5))
            elif "norm" in name:
                p.copy_(1 + 0.2 * noise)
            else:
                p.copy_(noise * (1.0 if "sinks" in name else 0.1))
    return model


def prompts(lengths: Sequence[int] = PROMPTS) -> list[list[int]]:
    """Random token ids, the same every time."""
    made = [torch.randint(2, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return [p.tolist() for p in made]


# ---- our cache and attention in it -----------------------------------------------------------------------------------


def paged_cache_class() -> type[Any]:
    """The cache as a subclass of transformers' own; made here, because transformers is optional."""
    from transformers.cache_utils import Cache, DynamicLayer

    class PagedCache(Cache):
        """A page pool for packed ragged batches. `update` stores each request's rows in its pages, of every layer alike.

        Pages are handed out in random order, slots without a key hold NaN, table entries without a page hold junk.
        """

        def __init__(
            self, config: Any, requests: int, max_keys: int, page_size: int = PAGE_SIZE, seed: int = 0
        ) -> None:
            layers = config.num_hidden_layers
            super().__init__(layers=[DynamicLayer() for _ in range(layers)])  # stay empty: the model asks for lengths
            width = -(-max_keys // page_size)
            shape = (requests * width, 2, layers, page_size, config.num_key_value_heads, config.head_dim)
            self._table = torch.full((requests, width), JUNK, dtype=torch.int32)
            self._free = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed)).tolist()
            lengths = torch.zeros(requests, dtype=torch.int32)
            self.pages = PagedKVCache(torch.full(shape, torch.nan), self._table, lengths)

        def reserve(self, counts: Sequence[int]) -> None:
            """Pages for so many more rows of each request."""
            for request, count in enumerate(counts):
                end = int(self.pages.cache_lengths[request]) + count
                for page in range(-(-end // self.pages.page_size)):
                    if self._table[request, page] == JUNK:
                        self._table[request, page] = self._free.pop()

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, kwargs: Any, **unused: Any
        ) -> tuple[Tensor, Tensor]:
            """Rows [1, kv_heads, rows, head_dim]. `kwargs` goes on to the attention, which so learns of the pages."""
            rows = kwargs["row_offsets"]
            self.pages.append(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), rows)
            kwargs["pages"] = self.pages
            return key_states, value_states

        def advance(self, row_offsets: Tensor) -> None:
            self.pages = self.pages.advance(row_offsets)

    return PagedCache


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    row_offsets: Tensor,
    pages: PagedKVCache,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention hook of transformers: query [1, heads, rows, dim] -> [1, rows, heads, dim], and no weights.

    Keys and values come from the pages; `key` and `value` hold the new rows only.
    """
    out = generic_flash_attention_kv_cache_ragged_sink(
        query[0].transpose(0, 1),
        row_offsets,
        pages,
        module.layer_idx,
        scaling,
        s_aux,
        mask_str="sliding_window_causal" if sliding_window else "causal",
        local_window_size=sliding_window or -1,
    )
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


# ---- serving ---------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """Per request: decoded tokens, and the logits [vocabulary] that each was chosen by. How many calls that took."""

    tokens: list[list[int]]
    logits: list[list[Tensor]]
    calls: int = 0
    mixed: int = 0  # calls that held prompt rows and decode rows at once
    rows: int = 0


def serve(model: Any, requests: Sequence[Sequence[int]], steps: int = STEPS, chunk: int = CHUNK) -> Served:
    """Decode `steps` tokens greedily for every request, all requests packed into every call."""
    longest = max(map(len, requests)) + steps
    cache = paged_cache_class()(model.config, len(requests), longest)
    waiting = [list(r) for r in requests]
    out = Served([[] for _ in requests], [[] for _ in requests])
    with our_attention(model), torch.no_grad():
        while any(waiting):
            taken = [w[:chunk] for w in waiting]
            decoding = [bool(t) and bool(made) for t, made in zip(taken, out.tokens, strict=True)]
            last = _forward(model, cache, taken)
            out.calls, out.rows = out.calls + 1, out.rows + sum(map(len, taken))
            out.mixed += any(decoding) and any(t and not d for t, d in zip(taken, decoding, strict=True))
            for b, rows in enumerate(taken):
                waiting[b] = waiting[b][len(rows) :]
                if rows and not waiting[b]:
                    out.logits[b].append(last[b])
                    out.tokens[b].append(int(last[b].argmax()))
                    waiting[b] = out.tokens[b][-1:] if len(out.tokens[b]) < steps else []
    return out


def _forward(model: Any, cache: Any, taken: Sequence[Sequence[int]]) -> list[Tensor]:
    """One call on the new tokens of every request, some of which may have none; logits of each one's last row."""
    counts = [len(t) for t in taken]
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cache.reserve(counts)
    starts = cache.pages.cache_lengths.tolist()
    positions = [s + i for s, n in zip(starts, counts, strict=True) for i in range(n)]
    ids = torch.tensor([[t for rows in taken for t in rows]])
    logits = model(
        input_ids=ids, position_ids=torch.tensor([positions]), cache=cache, use_cache=False, row_offsets=offsets
    ).logits[0]
    cache.advance(offsets)
    return [logits[end - 1] for end in offsets[1:].tolist()]


# ---- the check -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelCheck:
    """What serving gave, against the model's eager attention over each whole sequence, without a cache."""

    served: Served
    worst: float  # largest difference of a logit
    largest: float  # largest logit
    same_tokens: bool
    tolerance: float = TOLERANCE
    prompts: tuple[int, ...] = field(default=PROMPTS)

    @property
    def ok(self) -> bool:
        return self.same_tokens and self.worst <= self.tolerance  # false for NaN as well


def check_model(seed: int = 0) -> ModelCheck:
    """Serve the prompts and compare every logit and every token."""
    model, requests = tiny_gpt_oss(seed), prompts()
    served = serve(model, requests)
    worst = largest = 0.0
    same = True
    for prompt, tokens, logits in zip(requests, served.tokens, served.logits, strict=True):
        # By induction these are the tokens that greedy decoding makes: each is the best one after those before it.
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
        want = whole[len(prompt) - 1 :]
        same &= want.argmax(-1).tolist() == tokens
        difference = float((torch.stack(logits) - want).abs().max())
        worst = difference if difference != difference else max(worst, difference)
        largest = max(largest, float(want.abs().max()))
    return ModelCheck(served, worst, largest, same)
