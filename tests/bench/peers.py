"""Baselines of attention: what a user of torch would run on the same paged input, and the reference for all methods.

Each is made by a function of a workload and is then called without arguments. Masks are made beforehand and not timed,
which favours the baselines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from names import Method
from torch import Tensor
from workloads import DIM, GROUP, HEADS, KV_HEADS, PAGE, SCALE, Workload

BASELINE = "torch heads t128"  # torch_heads

# Largest error relative to the largest value. In bfloat16 the baselines round scores and weights.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def check(name: str, got: Tensor, expected: Tensor) -> float:
    """The error of a result relative to the largest value. Raises ArithmeticError where it is too large, or NaN."""
    error = float((got.float() - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE[got.dtype]:
        raise ArithmeticError(f"{name} is wrong: relative error {error:.1e}, at most {TOLERANCE[got.dtype]:.0e}")
    return error


def reference(w: Workload) -> Tensor:
    """Attention in float32, all scores of a sequence at once, head by head."""
    out = torch.empty(w.q.shape, dtype=torch.float32)
    for n, (rows, keys) in enumerate(zip(w.shape.rows, w.shape.keys, strict=True)):
        first = int(w.offsets[n])
        k, v = (x.float() for x in _gathered(w, n, 0))
        hidden = ~_seen(w, n, 0)
        for h in range(HEADS):
            s = (w.q[first : first + rows, h].float() @ k[h // GROUP].T * SCALE).masked_fill(hidden, -math.inf)
            if w.sinks is not None:
                s = torch.cat([s, w.sinks[h].expand(rows, 1)], 1)
            out[first : first + rows, h] = s.softmax(1)[:, :keys] @ v[h // GROUP]
    return out


# ---- gathering -------------------------------------------------------------------------------------------------------


def _gathered(w: Workload, n: int, first: int) -> tuple[Tensor, Tensor]:
    """Dense keys and values [kv_head, key, dim] of sequence n from key `first` on; only their pages are read."""
    start = first // PAGE
    keys = w.shape.keys[n]
    pages = w.table[n, start : math.ceil(keys / PAGE)].long()
    k, v = (
        x[pages].transpose(0, 1).reshape(KV_HEADS, -1, DIM)[:, first - start * PAGE : keys - start * PAGE]
        for x in w.head_first()
    )
    return k, v


def _seen(w: Workload, n: int, first: int) -> Tensor:
    """[row, key from `first` on]: which keys a row sees."""
    position = torch.arange(w.shape.rows[n])[:, None] + w.shape.cached[n]
    key = torch.arange(first, w.shape.keys[n])
    seen = key <= position
    return seen if w.shape.window is None else seen & (key > position - w.shape.window)


def _folded(q: Tensor) -> Tensor:
    """[row, head, dim] as [kv_head, group * row, dim], so that a group is one matrix product with its keys."""
    return q.view(-1, KV_HEADS, GROUP, DIM).permute(1, 2, 0, 3).reshape(KV_HEADS, -1, DIM)


def _unfolded(o: Tensor) -> Tensor:
    return o.view(KV_HEADS, GROUP, -1, DIM).permute(2, 0, 1, 3).reshape(-1, HEADS, DIM)


def sdpa(w: Workload) -> Method:
    """Pages gathered, then torch's SDPA, a call a sequence; one-row sequences of equal length in one call.

    Groups are folded into rows, so that a group's keys are read once. A sink is one more key, of a zero value.
    """
    masks = [_bias(w, n) for n in range(len(w.shape.rows))]

    def call() -> Tensor:
        if _is_uniform_decode(w):
            k, v = _gathered_batch(w)
            return F.scaled_dot_product_attention(w.q.view(-1, KV_HEADS, GROUP, DIM), k, v).reshape(w.q.shape)
        out = []
        for n, (q, mask) in enumerate(zip(torch.split(w.q, list(w.shape.rows)), masks, strict=True)):
            k, v = _with_sink(w, *_gathered(w, n, w.shape.first_key(n)))
            out.append(_unfolded(F.scaled_dot_product_attention(_folded(q)[None], k[None], v[None], mask)))
        return torch.cat(out)

    return call


def sdpa_gqa(w: Workload) -> Method:
    """The same by SDPA's `enable_gqa`, and by `is_causal` where a prompt has no cached keys: a mask skips no work."""
    plain = w.shape.window is None and w.sinks is None
    causal = [plain and c == 0 and r > 1 for r, c in zip(w.shape.rows, w.shape.cached, strict=True)]
    masks = [None if c else _bias_by_head(w, n) for n, c in enumerate(causal)]

    def call() -> Tensor:
        if _is_uniform_decode(w):
            k, v = _gathered_batch(w)
            return F.scaled_dot_product_attention(w.q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
        out = []
        for n, q in enumerate(torch.split(w.q, list(w.shape.rows))):
            k, v = _with_sink(w, *_gathered(w, n, w.shape.first_key(n)))
            o = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k[None], v[None], masks[n], is_causal=causal[n], enable_gqa=True
            )
            out.append(o[0].transpose(0, 1))
        return torch.cat(out)

    return call


def _is_uniform_decode(w: Workload) -> bool:
    plain = w.shape.window is None and w.sinks is None
    return plain and set(w.shape.rows) == {1} and len(set(w.shape.keys)) == 1


def _gathered_batch(w: Workload) -> tuple[Tensor, Tensor]:
    """[sequence, kv_head, key, dim] of sequences of equal length."""
    pages, keys = w.table.long(), w.shape.keys[0]
    k, v = (x[pages].transpose(1, 2).reshape(len(pages), KV_HEADS, -1, DIM)[:, :, :keys] for x in w.head_first())
    return k, v


def _with_sink(w: Workload, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k, v) if w.sinks is None else (F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)))


def _bias(w: Workload, n: int) -> Tensor | None:
    """What SDPA adds to the folded scores of a sequence, from its first key; None where its one row sees every key."""
    if w.sinks is not None:
        by_head = _bias_by_head(w, n)
        assert by_head is not None
        return by_head.view(1, KV_HEADS, GROUP * w.shape.rows[n], -1)
    return None if w.shape.rows[n] == 1 else _seen(w, n, w.shape.first_key(n)).repeat(GROUP, 1)


def _bias_by_head(w: Workload, n: int) -> Tensor | None:
    """[row, key], or with sinks [1, head, row, key and sink]."""
    rows = w.shape.rows[n]
    if rows == 1 and w.sinks is None:
        return None
    seen = _seen(w, n, w.shape.first_key(n))
    if w.sinks is None:
        return seen
    bias = torch.zeros(seen.shape).masked_fill(~seen, -math.inf).expand(HEADS, -1, -1)
    return torch.cat([bias, w.sinks.view(HEADS, 1, 1).expand(-1, rows, -1)], 2).to(w.dtype)[None]


def eager(w: Workload) -> Method:
    """Pages gathered, then two matrix products with a softmax between, in the cache's dtype, groups folded."""
    firsts = [w.shape.first_key(n) for n in range(len(w.shape.rows))]
    masks = [~_seen(w, n, first).repeat(GROUP, 1) if w.shape.rows[n] > 1 else None for n, first in enumerate(firsts)]
    sinks = None if w.sinks is None else w.sinks.to(w.dtype).view(KV_HEADS, GROUP, 1)

    def call() -> Tensor:
        out = []
        for n, (q, first, hidden) in enumerate(zip(torch.split(w.q, list(w.shape.rows)), firsts, masks, strict=True)):
            k, v = _gathered(w, n, first)
            s = torch.bmm(_folded(q), k.transpose(1, 2)).mul_(SCALE)
            if hidden is not None:
                s.masked_fill_(hidden, -math.inf)
            if sinks is not None:
                s = torch.cat([s, sinks.expand(-1, -1, len(q)).reshape(KV_HEADS, -1, 1)], 2)
            p = s.softmax(-1)
            out.append(_unfolded(torch.bmm(p if sinks is None else p[..., :-1], v)))
        return torch.cat(out)

    return call


# ---- tile loop -------------------------------------------------------------------------------------------------------


def torch_heads(w: Workload, keys: int = PAGE, rows: int = 128, workers: int = 1) -> Method:
    """A loop over tiles of rows and keys with online softmax, each operation over all key-value heads at once.

    keys is a multiple of the page. One page is read where it lies, several are first put together. Tiles of rows are
    spread over `workers` threads.
    """
    items = [(n, r, min(rows, count - r)) for n, count in enumerate(w.shape.rows) for r in range(0, count, rows)]
    begin = [int(x) for x in w.offsets]
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) if workers > 1 else None

    def call() -> Tensor:
        out, table = torch.empty_like(w.q), w.table.tolist()

        def run(item: tuple[int, int, int]) -> None:
            n, first, count = item
            at = begin[n] + first
            q = w.q[at : at + count].view(count, KV_HEADS, GROUP, DIM).transpose(0, 1).reshape(KV_HEADS, -1, DIM)
            o = _rows(w, q * SCALE, table[n], n, first, count, keys)
            out[at : at + count] = o.view(KV_HEADS, count, GROUP, DIM).transpose(0, 1).reshape(count, HEADS, DIM)

        for _ in map(run, items) if pool is None else pool.map(run, items):
            pass
        return out

    return call


def _rows(w: Workload, q: Tensor, table: list[int], n: int, first: int, count: int, keys: int) -> Tensor:
    """One tile of rows [kv_head, row * group, dim] over the key tiles that some of its rows see."""
    start = w.shape.cached[n] + first
    end, window = start + count, w.shape.window
    position = torch.arange(start, end).repeat_interleave(GROUP)[:, None]
    state: tuple[Tensor, Tensor, Tensor] | None = None  # largest score, sum of weights, weighted sum of values
    for at, k, v in _key_tiles(w, table, w.shape.first_key(n, first), end, keys):
        s = torch.matmul(q, k.transpose(1, 2)).float()
        past_first_row = at + k.shape[1] > start + 1
        if past_first_row or (window is not None and at <= end - 1 - window):
            key = torch.arange(at, at + k.shape[1])
            hidden = key > position if window is None else (key > position) | (key <= position - window)
            s.masked_fill_(hidden, -math.inf)
        top = s.amax(-1, keepdim=True)
        top = (top if state is None else torch.maximum(state[0], top)).clamp_(min=-1e30)
        p = s.sub_(top).exp_()
        total, sums = p.sum(-1, keepdim=True), torch.matmul(p.to(w.dtype), v).float()
        if state is not None:
            shrink = (state[0] - top).exp_()
            total, sums = state[1].mul_(shrink).add_(total), state[2].mul_(shrink).add_(sums)
        state = top, total, sums
    assert state is not None  # a row sees itself
    high, total, sums = state
    if w.sinks is not None:
        sink = w.sinks.view(KV_HEADS, 1, GROUP).expand(-1, count, -1).reshape(KV_HEADS, -1, 1)
        total = total + (sink - high).exp()
    return (sums / total).to(w.dtype)


def _key_tiles(w: Workload, table: list[int], first: int, end: int, keys: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first key of a tile, its keys and its values [kv_head, key, dim]."""
    k, v = w.head_first()
    last = math.ceil(end / PAGE)
    for page in range(first // PAGE, last, keys // PAGE):
        pages = table[page : min(page + keys // PAGE, last)]
        if len(pages) == 1:
            yield page * PAGE, k[pages[0]], v[pages[0]]
        else:
            yield page * PAGE, torch.cat([k[p] for p in pages], 1), torch.cat([v[p] for p in pages], 1)
