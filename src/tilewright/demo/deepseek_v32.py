"""A tiny random DeepSeek-V3.2 from transformers, served on our paged caches, attention and indexer.

The model expands the latent row of every token into keys and values of each head, and masks what its indexer did not
pick. Here the cache holds the latent row itself, with the rotated key behind it: queries are carried into the latent
space instead, only the rows that the indexer picks are read, and the output is carried out again.

What stays the model's: projections, norms, rotation, experts. Ours: the paged caches of latent rows and indexer keys,
the indexer and the attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.codegen_cache.launch import run
from tilewright.ops.mla import mla_sparse_attention

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

TOP_K = 6


def tiny_deepseek_v32(seed: int = 0) -> Any:
    """A DeepSeek-V3.2 of 3 layers, float32.

    Its indexer has 16 heads: with few, relu makes many scores exactly 0, and which of them the model picks is chance.
    """
    tf = load_transformers()
    config = tf.DeepseekV32Config(
        vocab_size=VOCABULARY, hidden_size=64, max_position_embeddings=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=96, kv_lora_rank=24, q_lora_rank=32, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, index_topk=TOP_K, index_head_dim=16, index_n_heads=16,
        first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return redraw(tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed)


# ---- our caches and attention in it ----------------------------------------------------------------------------------


class Caches:
    """The pages of all layers: a latent row and an indexer key per token."""

    def __init__(self, config: Any, requests: int, longest: int, page_sizes: tuple[int, int], float8: bool) -> None:
        """Room for `longest` tokens of each request. page_sizes: of latent rows, of indexer keys."""
        layers, width = config.num_hidden_layers, config.kv_lora_rank + config.qk_rope_head_dim
        dtype = torch.float8_e4m3fn if float8 else torch.float32
        self.latent = PagePool(requests, longest, layers, width, page_size=page_sizes[0])
        self.index = PagePool(requests, longest, layers, config.index_head_dim, page_size=page_sizes[1], dtype=dtype)

    def begin(self, counts: Sequence[int]) -> Tensor:
        self.latent.begin(counts)
        self.index.begin(counts)
        return self.latent.positions

    def keywords(self) -> Mapping[str, Any]:
        return NO_MASK

    def end(self) -> None:
        self.latent.end()
        self.index.end()


class Attention:
    """Stands in for one layer's attention, in the latent space of width kv_lora_rank."""

    def __init__(self, module: Any, caches: Caches) -> None:
        self.module, self.caches = module, caches
        up = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
        self.key_up, self.value_up = up.split([module.qk_nope_head_dim, module.v_head_dim], 1)  # [heads, dim, latent]

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **unused: Any) -> tuple[Tensor, None]:
        """hidden_states [1, rows, hidden_size], the same out."""
        m, caches, layer = self.module, self.caches, self.module.layer_idx
        low = m.q_a_layernorm(m.q_a_proj(hidden_states))
        q, row = self._latent(hidden_states, low, *position_embeddings)
        caches.latent.append(layer, row[:, None])
        q_index, key, weights = indexer_inputs(m.indexer, hidden_states, low, *position_embeddings)
        caches.index.append(layer, key[0][:, None])
        offsets = caches.latent.offsets
        lengths = caches.latent.before.cache_lengths
        listed = best_keys(q_index[0], weights[0], offsets, caches.index, layer, lengths, top_k=m.indexer.index_topk)
        arguments = {"q": q, "indices": listed, "cache": caches.latent.after.layer(layer), "scale": m.scaling}
        # The value is the latent part of a row, without its rotated key.
        out = run(mla_sparse_attention, arguments, offsets, constants={"latent": m.kv_lora_rank})["out"]
        out = torch.einsum("thc,hvc->thv", out, self.value_up)
        return m.o_proj(out.flatten(1)[None]), None

    def _latent(self, hidden: Tensor, low: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, width] and this call's rows [rows, width] of the cache: latent part, rotated part."""
        # Imported here because transformers is optional.
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb_interleave

        m = self.module
        q = m.q_b_proj(low).view(1, hidden.shape[1], m.num_heads, m.qk_head_dim).transpose(1, 2)
        q_plain, q_turned = q.split([m.qk_nope_head_dim, m.qk_rope_head_dim], -1)
        latent, key = m.kv_a_proj_with_mqa(hidden).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
        q_turned, key = apply_rotary_pos_emb_interleave(  # type: ignore[no-untyped-call]  # as transformers has it
            q_turned, key[:, None], cos, sin
        )
        q = torch.cat([torch.einsum("bhsn,hnc->bhsc", q_plain, self.key_up), q_turned], -1)
        return q[0].transpose(0, 1), torch.cat([m.kv_a_layernorm(latent)[0], key[0, 0]], -1)


def indexer_inputs(
    indexer: Any, hidden: Tensor, low: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [batch, rows, heads, dim], keys [batch, rows, dim], and weights [batch, rows, heads] with every scale."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

    turned = indexer.qk_rope_head_dim
    q = indexer.wq_b(low).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    q_turned, key_turned = apply_rotary_pos_emb(q[..., :turned], key[..., :turned], cos, sin, unsqueeze_dim=2)
    weights = indexer.weights_proj(hidden) * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    q = torch.cat([q_turned, q[..., turned:]], -1)
    return q, torch.cat([key_turned, key[..., turned:]], -1)[:, :, 0], weights


# ---- the check -------------------------------------------------------------------------------------------------------


def check_deepseek_v32(
    lengths: Sequence[int] = PROMPTS, *, seed: int = 0, steps: int = STEPS, chunk: int = CHUNK,
    page_sizes: tuple[int, int] = (5, 3), float8: bool = False,
) -> ModelCheck:  # fmt: skip
    """Serve prompts of these lengths and compare every logit and token with the model's eager attention.

    steps: tokens decoded for each. chunk: prompt tokens of a request in one call, at most.
    page_sizes: of latent rows, of indexer keys.
    float8: indexer keys and queries are in float8, here and, by the same rounding, in the model compared with.
    """
    model, requests = tiny_deepseek_v32(seed), prompts(lengths)
    caches = Caches(model.config, len(requests), max(lengths) + steps, page_sizes, float8)
    modules = [block.self_attn for block in model.model.layers]
    with torch.no_grad():  # views of weights are made in it
        ours = [(m, Attention(m, caches).forward) for m in modules]
    with replaced(ours):
        served = serve(model, caches, requests, steps, chunk)
    with replaced([(m.indexer, _float8_indexer(m.indexer)) for m in modules] if float8 else []):
        return compare(model, requests, served)


def _float8_indexer(indexer: Any) -> Any:
    """The model's indexer, dense and without a cache, of queries and keys rounded to float8."""

    def forward(
        hidden: Tensor, low: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, *unused: Any, **also: Any
    ) -> Tensor:
        q, key, weights = indexer_inputs(indexer, hidden, low, *angles)
        scores = torch.einsum("bshd,btd->bsht", as_float8(q), as_float8(key)).relu()
        scores = (scores * weights[..., None]).sum(2) + mask
        return scores.topk(min(indexer.index_topk, scores.shape[-1]), -1).indices.to(torch.int32)

    return forward
