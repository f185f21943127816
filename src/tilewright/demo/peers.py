"""The same jobs in torch, to time against: pages gathered, then torch's own attention, one sequence after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tilewright.ops.cache import PagedLeaf
from tilewright.random_inputs import Inputs

Peer: TypeAlias = Callable[[], list[Tensor]]
Mask: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Sequence:
    """What torch needs to know of one sequence: its pages that some row sees, its rows, and what is added to scores."""

    pages: Tensor
    start: int  # the first key's place in the first page
    keys: int
    rows: slice
    bias: Tensor  # [heads, rows, keys]


def sequences(inputs: Inputs, leaf: PagedLeaf, mask: Mask | None) -> list[Sequence]:
    """Prepared before anything is timed, masks too: torch is given every advantage that a server could give it."""
    out: list[Sequence] = []
    offsets, page = inputs.input_row_offsets.tolist(), leaf.page_size
    for b, (rows, keys) in enumerate(zip(inputs.sizes.rows, inputs.sizes.num_keys, strict=True)):
        pos, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
        seen = torch.ones(rows, keys, dtype=torch.bool) if mask is None else mask(pos, key).expand(rows, keys)
        visible = seen.any(0).nonzero().flatten()
        first, last = int(visible[0]), int(visible[-1])
        bias = torch.zeros(rows, keys).masked_fill(~seen, -torch.inf)[:, first : last + 1]
        pages = leaf.lookup_table[b, first // page : last // page + 1].long()
        heads = bias.expand(inputs.sizes.heads, *bias.shape)
        out.append(Sequence(pages, first % page, last + 1 - first, slice(offsets[b], offsets[b + 1]), heads))
    return out


def gathered(s: Sequence, pages: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A sequence's keys or values, dense: [kv_heads, keys, width]."""
    rows = pages.index_select(0, s.pages).flatten(0, 1)[s.start : s.start + s.keys].to(dtype)
    if scales is not None:
        each = scales.index_select(0, s.pages).flatten(0, 1)[s.start : s.start + s.keys]
        rows = rows * each.repeat_interleave(rows.shape[-1] // each.shape[-1], -1)
    return rows.transpose(0, 1)


def sdpa(inputs: Inputs) -> Peer:
    """scaled_dot_product_attention. Query heads of a group are folded into rows, its quickest form on a CPU."""
    q, leaf, sink = inputs.arguments["q"], inputs.arguments["kv"], inputs.arguments["sink"]
    scale = float(str(inputs.arguments["scale"]))
    assert isinstance(q, Tensor)
    assert isinstance(leaf, PagedLeaf)
    assert leaf.values is not None
    values, groups = leaf.values, leaf.num_kv_heads
    every = sequences(inputs, leaf, inputs.constants["mask"])  # type: ignore[arg-type]  # a named mask
    if isinstance(sink, Tensor):
        every = [_with_sink(s, sink) for s in every]
    biases = [_folded(s, groups).to(q.dtype) for s in every]

    def run() -> list[Tensor]:
        out: list[Tensor] = []
        for s, bias in zip(every, biases, strict=True):
            k, v = gathered(s, leaf.keys, leaf.key_scales, q.dtype), gathered(s, values, leaf.value_scales, q.dtype)
            if isinstance(sink, Tensor):  # one more key, whose score is the sink and whose value is 0
                k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
            rows = _folded_rows(q[s.rows], groups)
            x = scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=bias[None], scale=scale)
            out.append(x.view(q.shape[1], -1, x.shape[-1]).transpose(0, 1))
        return out

    return run


def eager_softcap_alibi(inputs: Inputs) -> Peer:
    """The variant in plain torch operations: scaled_dot_product_attention has no place for its cap."""
    q, leaf, slopes = inputs.arguments["q"], inputs.arguments["kv"], inputs.arguments["slopes"]
    scale, cap = (float(str(inputs.arguments[n])) for n in ("scale", "cap"))
    assert isinstance(q, Tensor)
    assert isinstance(slopes, Tensor)
    assert isinstance(leaf, PagedLeaf)
    assert leaf.values is not None
    values, groups = leaf.values, leaf.num_kv_heads
    every = sequences(inputs, leaf, lambda query, key: key <= query)
    biases = [_folded(_with_alibi(s, slopes), groups) for s in every]

    def run() -> list[Tensor]:
        out: list[Tensor] = []
        for s, bias in zip(every, biases, strict=True):
            k, v = gathered(s, leaf.keys, None, q.dtype), gathered(s, values, None, q.dtype)
            scores = _folded_rows(q[s.rows], groups) @ k.transpose(1, 2)
            x = scores.mul_(scale / cap).tanh_().mul_(cap).add_(bias).softmax(-1) @ v
            out.append(x.view(q.shape[1], -1, x.shape[-1]).transpose(0, 1))
        return out

    return run


def latent_attention(inputs: Inputs) -> Peer:
    """Latent sparse attention in plain operations: no two rows have the same listed keys."""
    q, indices, sink, recent, listed = (inputs.arguments[n] for n in LATENT)
    scale, window = float(str(inputs.arguments["scale"])), int(str(inputs.constants["window"]))
    assert isinstance(q, Tensor)
    assert isinstance(indices, Tensor)
    assert isinstance(sink, Tensor)
    assert isinstance(recent, PagedLeaf)
    assert isinstance(listed, PagedLeaf)
    every = sequences(inputs, recent, lambda query, key: (key <= query) & (query - key < window))
    biases = [s.bias.transpose(0, 1) for s in every]
    pool, table, page = listed.keys.flatten(0, 2), listed.lookup_table.long(), listed.page_size

    def run() -> list[Tensor]:
        out: list[Tensor] = []
        for b, (s, bias) in enumerate(zip(every, biases, strict=True)):
            rows, entry = q[s.rows] * scale, indices[s.rows].long()
            unused, entry = entry < 0, entry.clamp(min=0)
            near, far = gathered(s, recent.keys, None, q.dtype)[0], pool[table[b][entry // page] * page + entry % page]
            scores = [rows @ near.T + bias, (rows @ far.transpose(1, 2)).masked_fill_(unused[:, None], -torch.inf)]
            p = torch.cat([*scores, sink[None, :, None].expand(len(rows), -1, 1)], -1).softmax(-1)
            out.append(p[..., : len(near)] @ near + p[..., len(near) : -1] @ far)
        return out

    return run


LATENT = ("q", "comp_indices", "attn_sink", "swa_cache", "comp_cache")


def indexer(inputs: Inputs) -> Peer:
    """The float8 indexer in plain operations: scores in float32, then torch.topk."""
    q, weights, leaf = (inputs.arguments[n] for n in ("q", "q_s", "k"))
    top_k = int(str(inputs.constants["top_k"]))
    assert isinstance(q, Tensor)
    assert isinstance(weights, Tensor)
    assert isinstance(leaf, PagedLeaf)
    every = sequences(inputs, leaf, lambda query, key: key <= query)

    def run() -> list[Tensor]:
        out: list[Tensor] = []
        for s in every:
            keys = gathered(s, leaf.keys, leaf.key_scales, torch.float32)[0]
            products = (q[s.rows].float() @ keys.T).relu_()
            scores = (weights[s.rows][:, None] @ products)[:, 0] + s.bias[0]
            best = scores.topk(min(top_k, scores.shape[1]), -1)
            picked = best.indices.masked_fill(best.values == -torch.inf, -1)
            out.append(pad(picked, (0, top_k - picked.shape[1]), value=-1))
        return out

    return run


def _with_sink(s: Sequence, sink: Tensor) -> Sequence:
    column = sink.float()[:, None, None].expand(*s.bias.shape[:2], 1)
    return replace(s, bias=torch.cat([s.bias, column], -1))


def _with_alibi(s: Sequence, slopes: Tensor) -> Sequence:
    rows = s.rows.stop - s.rows.start
    pos, key = torch.arange(s.keys - rows, s.keys)[:, None], torch.arange(s.keys)
    return replace(s, bias=s.bias - slopes[:, None, None] * (pos - key))


def _folded(s: Sequence, groups: int) -> Tensor:
    """[heads, rows, keys] -> [kv_heads, group * rows, keys]"""
    return s.bias.reshape(groups, -1, s.bias.shape[-1])


def _folded_rows(q: Tensor, groups: int) -> Tensor:
    """[rows, heads, dim] -> [kv_heads, group * rows, dim]"""
    return q.transpose(0, 1).reshape(groups, -1, q.shape[-1])
