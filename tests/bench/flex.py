"""FlexAttention on a CPU, compiled: over all pages as one row of keys, whose mask says which row sees which key.

Only the compiled function is timed. Keys lie by head, as it wants them, and its block mask is made beforehand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from names import Method
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from workloads import DIM, HEADS, KV_HEADS, PAGE, SCALE, Workload

_NO_WINDOW = 1 << 30


def attention(w: Workload) -> Method:
    """Raises what torch raises where it does not compile."""
    torch._dynamo.reset()  # or a few workloads later it calls this one too many to compile
    slots = len(w.k_pages) * PAGE
    # On a CPU it returns no lse that a sink could join afterwards: the sink is a key more, whose score is set.
    sink = PAGE if w.sinks is not None else 0
    k, v = (
        F.pad(x.transpose(0, 1).reshape(1, KV_HEADS, slots, DIM), (0, 0, 0, sink)).contiguous() for x in w.head_first()
    )
    sequence, first = _owners(w, slots + sink)
    decode = set(w.shape.rows) == {1}
    owner = torch.repeat_interleave(torch.arange(len(w.shape.rows)), torch.tensor(w.shape.rows))
    position = torch.cat([torch.arange(n - r, n) for r, n in zip(w.shape.rows, w.shape.keys, strict=True)])
    window = w.shape.window or _NO_WINDOW

    def seen(b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        at = b if decode else row
        key = first[slot // PAGE] + slot % PAGE
        own = (sequence[slot // PAGE] == owner[at]) & (key <= position[at]) & (key > position[at] - window)
        return own | (slot == slots) if sink else own

    sinks = w.sinks

    def score(s: Tensor, b: Tensor, h: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        assert sinks is not None
        return torch.where(slot == slots, sinks[h], s)

    batch, rows = (len(w.q), 1) if decode else (1, len(w.q))
    mask = create_block_mask(seen, batch, 1, rows, slots + sink, device="cpu", BLOCK_SIZE=(128, PAGE))
    q = (w.q[:, :, None] if decode else w.q.transpose(0, 1)[None]).contiguous()
    k, v = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    score_mod = score if sink else None

    def call() -> Tensor:
        with torch.no_grad():
            out = compiled(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True, scale=SCALE)
        assert isinstance(out, Tensor)
        return out.reshape(-1, HEADS, DIM) if decode else out[0].transpose(0, 1)

    return call


def _owners(w: Workload, slots: int) -> tuple[Tensor, Tensor]:
    """The sequence of each page, -1 is none, and the position of its first slot."""
    sequence, first = torch.full((slots // PAGE,), -1), torch.zeros(slots // PAGE, dtype=torch.long)
    for n, row in enumerate(w.table):
        pages = row[row >= 0].long()
        sequence[pages], first[pages] = n, torch.arange(len(pages)) * PAGE
    return sequence, first
