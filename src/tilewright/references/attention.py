"""References of softmax attention over keys and values, and of what takes the softmax's place, from the definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.random_inputs import DenseLeaf

from .parts import attend, by_mask, distances, in_window, looked_up, outputs, scores_of, unseen

__all__ = [
    "alibi_attention",
    "descaled_attention",
    "differential_attention",
    "document_attention",
    "first_keys_and_window_attention",
    "flash_attention",
    "prefix_attention",
    "prefix_lm_attention",
    "relative_bias_attention",
    "sigmoid_attention",
    "sliding_sink_attention",
    "softcap_attention",
    "t5_attention",
    "tree_attention",
]


def values_of(cache: DenseLeaf) -> Tensor:
    assert cache.v is not None
    return cache.v


def attend_to(cache: DenseLeaf, scores: Tensor, seen: Tensor, sink: Tensor | None = None) -> Tensor:
    """Attention to what is seen of a cache, without its lse."""
    return attend(unseen(scores, seen), values_of(cache), sink)["out"]


def flash_attention(
    q: Tensor, kv: DenseLeaf, sink: Tensor | None, scale: float, mask: object, with_lse: bool, pos: Tensor, key: Tensor
) -> dict[str, Tensor]:
    scores = unseen(scores_of(q, kv.k) * scale, by_mask(mask, pos, key))
    return outputs(attend(scores, values_of(kv), sink), with_lse)


# ---- windows and sinks -----------------------------------------------------------------------------------------------


def sliding_sink_attention(
    q: Tensor, cache: DenseLeaf, sink: Tensor, scale: float, window: int | None, pos: Tensor, key: Tensor
) -> Tensor:
    return attend_to(cache, scores_of(q, cache.k) * scale, in_window(pos, key, window), sink)


def first_keys_and_window_attention(
    q: Tensor, cache: DenseLeaf, scale: float, first: int, window: int, pos: Tensor, key: Tensor
) -> Tensor:
    seen = in_window(pos, key, window) | in_window(pos, key, None) & (key < first)
    return attend_to(cache, scores_of(q, cache.k) * scale, seen)


# ---- scores that are bent, biased or scaled --------------------------------------------------------------------------


def softcap_attention(
    q: Tensor, cache: DenseLeaf, scale: float, cap: float, window: int | None, with_lse: bool, pos: Tensor, key: Tensor
) -> dict[str, Tensor]:
    scores = cap * torch.tanh(scores_of(q, cache.k) * scale / cap)
    return outputs(attend(unseen(scores, in_window(pos, key, window)), values_of(cache)), with_lse)


def alibi_attention(q: Tensor, cache: DenseLeaf, slopes: Tensor, scale: float, pos: Tensor, key: Tensor) -> Tensor:
    scores = scores_of(q, cache.k) * scale - slopes[:, None, None] * distances(pos, key)
    return attend_to(cache, scores, in_window(pos, key, None))


def relative_bias_attention(
    q: Tensor, cache: DenseLeaf, bias: Tensor, scale: float, pos: Tensor, key: Tensor
) -> Tensor:
    added = looked_up(bias.T, distances(pos, key)).permute(2, 0, 1)
    return attend_to(cache, scores_of(q, cache.k) * scale + added, in_window(pos, key, None))


def t5_attention(
    q: Tensor, cache: DenseLeaf, weight: Tensor, bucket_of: Tensor, scale: float, max_distance: int, both_ways: int,
    pos: Tensor, key: Tensor,
) -> Tensor:  # fmt: skip
    d = distances(pos, key)
    bucket = looked_up(bucket_of, d.abs().clamp(max=max_distance)) + both_ways * (d < 0)
    scores = scores_of(q, cache.k) * scale + looked_up(weight, bucket).permute(2, 0, 1)
    return attend_to(cache, scores, (d >= 0) | bool(both_ways))


def descaled_attention(
    q: Tensor, cache: DenseLeaf, k_descale: Tensor, v_descale: Tensor, scale: float, pos: Tensor, key: Tensor
) -> Tensor:
    group = q.shape[1] // len(k_descale)
    of_keys, of_values = (d.repeat_interleave(group)[:, None, None] for d in (k_descale, v_descale))
    scores = unseen(scores_of(q, cache.k * of_keys) * scale, in_window(pos, key, None))
    return attend(scores, values_of(cache) * of_values)["out"]


# ---- masks that data decides -----------------------------------------------------------------------------------------


def prefix_attention(q: Tensor, prefix: DenseLeaf, length: Tensor, scale: float, key: Tensor) -> dict[str, Tensor]:
    return attend(unseen(scores_of(q, prefix.k) * scale, (key < length).expand(len(q), -1)), values_of(prefix))


def prefix_lm_attention(q: Tensor, cache: DenseLeaf, prefix: Tensor, scale: float, pos: Tensor, key: Tensor) -> Tensor:
    return attend_to(cache, scores_of(q, cache.k) * scale, in_window(pos, key, None) | (key < prefix))


def document_attention(q: Tensor, cache: DenseLeaf, document: Tensor, scale: float, pos: Tensor, key: Tensor) -> Tensor:
    same = looked_up(document, pos)[:, None] == looked_up(document, key)
    return attend_to(cache, scores_of(q, cache.k) * scale, same & in_window(pos, key, None))


def tree_attention(q: Tensor, cache: DenseLeaf, committed: Tensor, tree: Tensor, scale: float, key: Tensor) -> Tensor:
    seen = torch.ones(len(q), len(key), dtype=torch.bool)
    for row, words in enumerate(tree.tolist()):
        # A word's lowest bit is its first draft; bits past the words are 0.
        bits = "".join(f"{word % (1 << 32):032b}"[::-1] for word in words) + "0" * len(key)
        for draft in range(len(key) - int(committed)):
            seen[row, int(committed) + draft] = bits[draft] == "1"
    return attend_to(cache, scores_of(q, cache.k) * scale, seen)


# ---- other weights ---------------------------------------------------------------------------------------------------


def sigmoid_attention(
    q: Tensor, cache: DenseLeaf, scale: float, bias: float, window: int | None, pos: Tensor, key: Tensor
) -> Tensor:
    weights = torch.sigmoid(scores_of(q, cache.k) * scale + bias) * in_window(pos, key, window)
    return torch.einsum("hrk,hkd->rhd", weights, values_of(cache))


def differential_attention(
    q_first: Tensor, q_second: Tensor, cache: DenseLeaf, weight: Tensor, scale: float, half: int, pos: Tensor,
    key: Tensor,
) -> Tensor:  # fmt: skip
    seen, pairs = in_window(pos, key, None), ((q_first, cache.k[..., :half]), (q_second, cache.k[..., half : 2 * half]))
    first, second = (attend_to(cache, scores_of(q, k) * scale, seen) for q, k in pairs)
    return first - weight[:, None] * second
