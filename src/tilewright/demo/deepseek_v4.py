"""A tiny random DeepSeek-V4 from transformers, served on our paged caches, attention and indexer.

Every layer attends to a window of recent tokens. Two of the three kinds of layers also attend to entries, each a
window of tokens compressed into one row: compressed-sparse layers to those that an indexer picks, heavily compressed
layers to all. Rows of different requests are packed, prompts come in chunks together with decode rows.

What stays the model's: projections, norms, rotation, experts. Ours: the paged caches of tokens, entries and indexer
keys, the compressors, the indexer and the attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.codegen_cache.launch import run
from tilewright.ops.cache import PagedLeaf
from tilewright.ops.compressed import heavily_compressed_attention
from tilewright.ops.latent_attention import latent_sparse_attention_ragged_paged

from .compressor import CompressedPages, rotated
from .indexing import as_float8, best_keys
from .page_pool import PagePool
from .serving import (
    CHUNK,
    NO_MASK,
    PROMPTS,
    STEPS,
    VOCABULARY,
    ModelCheck,
    compare,
    load_transformers,
    prompts,
    redraw,
    replaced,
    serve,
)

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 8}  # tokens of an entry
WINDOW = 6
TOP_K = 3
PAGE_SIZES = (5, 3)  # of tokens, of entries


def tiny_deepseek_v4(seed: int = 0) -> Any:
    """A DeepSeek-V4 of 4 layers, float32, with a random table of experts by token in its first layer.

    Its indexer has 16 heads: with few, relu makes many scores exactly 0, and which of them the model picks is chance.
    """
    tf = load_transformers()
    config = tf.DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=64, max_position_embeddings=512, num_hidden_layers=4, num_attention_heads=4,
        head_dim=32, q_lora_rank=32, qk_rope_head_dim=8, sliding_window=WINDOW, o_groups=2, o_lora_rank=16,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, index_n_heads=16, index_head_dim=16,
        index_topk=TOP_K, hc_mult=2, mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        layer_types=["sliding_attention", SPARSE, HEAVY, SPARSE], compress_rates=RATES,
        bos_token_id=0, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = redraw(tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)
    gen = torch.Generator().manual_seed(seed)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.stack([torch.randperm(4, generator=gen)[:2] for _ in table]))
    return model


# ---- our caches and attention in it ----------------------------------------------------------------------------------


class Caches:
    """The pages of all layers: a row per token, and entries and indexer keys, which close at the pace of their kind."""

    def __init__(self, model: Any, requests: int, longest: int, page_sizes: tuple[int, int], float8: bool) -> None:
        """Room for `longest` tokens of each request. page_sizes: of tokens, of entries."""
        modules = [block.self_attn for block in model.model.layers]
        self.tokens = PagePool(requests, longest, len(modules), model.config.head_dim, page_size=page_sizes[0])
        compressors = {k: [m.compressor for m in modules if m.layer_type == k] for k in RATES}
        self.entries = {k: CompressedPages(c, requests, longest, page_sizes) for k, c in compressors.items()}
        dtype = torch.float8_e4m3fn if float8 else torch.float32
        self.index = CompressedPages([c.indexer for c in compressors[SPARSE]], requests, longest, page_sizes, dtype)
        self._all: list[PagePool | CompressedPages] = [self.tokens, *self.entries.values(), self.index]

    def begin(self, counts: Sequence[int]) -> Tensor:
        for pages in self._all:
            pages.begin(counts)
        return self.tokens.positions

    def keywords(self) -> Mapping[str, Any]:
        return NO_MASK

    def end(self) -> None:
        for pages in self._all:
            pages.end()


class Attention:
    """Stands in for one layer's attention: a window of recent tokens, and no entries."""

    def __init__(self, module: Any, caches: Caches) -> None:
        self.module, self.caches = module, caches
        kinds = module.config.layer_types
        self.layer = kinds[: module.layer_idx].count(module.layer_type)  # among the layers of its kind

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **unused: Any) -> tuple[Tensor, None]:
        """hidden_states [1, rows, hidden_size], the same out."""
        m = self.module
        cos, sin = position_embeddings[m.rope_layer_type]
        low = m.q_a_norm(m.q_a_proj(hidden_states))
        q = rotated(m.q_b_norm(_heads(m.q_b_proj(low), m.head_dim)), cos, sin)
        row = rotated(m.kv_norm(m.kv_proj(hidden_states))[:, None], cos, sin)
        self.caches.tokens.append(m.layer_idx, row[0].transpose(0, 1))
        out = self.attend(q[0].transpose(0, 1), hidden_states, low)
        # Keys are values, so the output was turned with them; it is turned back at the query's position.
        out = rotated(out.transpose(0, 1)[None], cos, -sin).transpose(1, 2)
        groups = out.reshape(1, out.shape[1], m.config.o_groups, -1)
        return m.o_b_proj(m.o_a_proj(groups).flatten(2)), None

    def attend(self, q: Tensor, hidden: Tensor, low: Tensor) -> Tensor:
        """q [rows, heads, dim], the same out. low: what the indexer's queries are made of."""
        return self.sparse(q, None, None)

    def sparse(self, q: Tensor, listed: Tensor | None, entries: PagedLeaf | None) -> Tensor:
        """Attention to the window and to listed entries."""
        m, tokens = self.module, self.caches.tokens
        window = tokens.before.layer(m.layer_idx)
        out = latent_sparse_attention_ragged_paged(
            q, tokens.offsets, listed, m.sinks, window, entries, m.scaling, window=m.sliding_window
        )
        assert isinstance(out, Tensor)
        return out


class HeavilyCompressed(Attention):
    """A window, and every entry that is closed: its last token stands at the row's position or before."""

    def attend(self, q: Tensor, hidden: Tensor, low: Tensor) -> Tensor:
        m, tokens, compressed = self.module, self.caches.tokens, self.caches.entries[HEAVY]
        compressed.append(self.layer, hidden[0])
        recent, entries = tokens.before.layer(m.layer_idx), compressed.entries.after.layer(self.layer)
        arguments = {"q": q, "recent": recent, "entries": entries, "sink": m.sinks, "scale": m.scaling}
        constants = {"window": m.sliding_window, "rate": m.compressor.compress_rate}
        return run(heavily_compressed_attention, arguments, tokens.offsets, constants=constants)["out"]


class CompressedSparse(Attention):
    """A window, and the closed entries that the indexer scores best."""

    def attend(self, q: Tensor, hidden: Tensor, low: Tensor) -> Tensor:
        compressed = self.caches.entries[SPARSE]
        compressed.append(self.layer, hidden[0])
        return self.sparse(q, self.listed(hidden, low), compressed.entries.after.layer(self.layer))

    def listed(self, hidden: Tensor, low: Tensor) -> Tensor:
        """int32 [rows, TOP_K]: the entries that each row attends to, negative for none."""
        tokens, index, indexer = self.caches.tokens, self.caches.index, self.module.compressor.indexer
        index.append(self.layer, hidden[0])
        cos, sin = indexer.rotary_emb(hidden, position_ids=tokens.positions[None], layer_type=indexer.rope_layer_type)
        q = rotated(_heads(indexer.q_b_proj(low), indexer.head_dim), cos, sin)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden[0]) * (scorer.weights_scaling * scorer.softmax_scale)
        return best_keys(
            q[0].transpose(0, 1), weights, tokens.offsets, index.entries, self.layer, tokens.before.cache_lengths,
            top_k=indexer.index_topk, kpool=indexer.compress_rate,
        )  # fmt: skip


ATTENTION = {"sliding_attention": Attention, HEAVY: HeavilyCompressed, SPARSE: CompressedSparse}


def _heads(x: Tensor, dim: int) -> Tensor:
    """[1, rows, heads * dim] -> [1, heads, rows, dim]."""
    return x.view(1, x.shape[1], -1, dim).transpose(1, 2)


# ---- the check -------------------------------------------------------------------------------------------------------


def check_deepseek_v4(
    lengths: Sequence[int] = PROMPTS, *, seed: int = 0, steps: int = STEPS, chunk: int = CHUNK,
    page_sizes: tuple[int, int] = PAGE_SIZES, float8: bool = False,
) -> ModelCheck:  # fmt: skip
    """Serve prompts of these lengths and compare every logit and token with the model's eager attention.

    steps: tokens decoded for each. chunk: prompt tokens of a request in one call, at most.
    page_sizes: of tokens, of entries.
    float8: indexer keys and queries are in float8, here and, by the same rounding, in the model compared with.
    """
    model, requests = tiny_deepseek_v4(seed), prompts(lengths)
    caches = Caches(model, len(requests), max(lengths) + steps, page_sizes, float8)
    modules = [block.self_attn for block in model.model.layers]
    ours = [(m, ATTENTION[m.layer_type](m, caches).forward) for m in modules]
    with replaced(ours):
        served = serve(model, caches, requests, steps, chunk)
    with replaced(_float8_scorers(modules) if float8 else []):
        return compare(model, requests, served)


def _float8_scorers(modules: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The model's own scorers, given queries [1, rows, heads, dim] and keys [1, entries, dim] rounded to float8."""

    def rounded(scorer: Any) -> Any:
        plain = scorer.forward
        return lambda q, keys, hidden: plain(as_float8(q), as_float8(keys), hidden)

    scorers = [m.compressor.indexer.scorer for m in modules if m.layer_type == SPARSE]
    return [(s, rounded(s)) for s in scorers]
