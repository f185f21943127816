"""Merging partial attention results over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.codegen_cache.checks import Array, as_tensor, expect_shape


def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    out_a, out_b: [rows, heads, value_dim]; lse_a, lse_b: [rows, heads], natural log, without a sink.
    Returns out in out_a's dtype and lse in float32, weighted by exp(lse - max lse). Merging with (0, -inf), the result
    over no keys, returns the other bit for bit. Raises ArgumentShapeError for shapes that differ.
    """
    op = "merge_states"
    out_a, lse_a, out_b, lse_b = (
        as_tensor(op, n, t) for n, t in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    )
    rows, heads, dim = expect_three(op, out_a)
    expect_shape(op, "out_b", out_b, rows=rows, heads=heads, value_dim=dim)
    for name, t in (("lse_a", lse_a), ("lse_b", lse_b)):
        expect_shape(op, name, t, rows=rows, heads=heads)
    a, b = lse_a.float(), lse_b.float()
    top = torch.maximum(a, b)
    base = torch.where(top == -torch.inf, 0.0, top)
    wa, wb = torch.exp(a - base), torch.exp(b - base)
    total = wa + wb
    safe = torch.where(total == 0, 1.0, total)
    mixed = (out_a.float() * (wa / safe).unsqueeze(-1) + out_b.float() * (wb / safe).unsqueeze(-1)).to(out_a.dtype)
    only_a, only_b = (b == -torch.inf), (a == -torch.inf)
    out = torch.where(only_a.unsqueeze(-1), out_a, torch.where(only_b.unsqueeze(-1), out_b.to(out_a.dtype), mixed))
    lse = torch.where(only_a, a, torch.where(only_b, b, top + torch.log(safe)))
    return out, lse


def expect_three(op: str, out: Tensor) -> tuple[int, int, int]:
    expect_shape(op, "out_a", out, rows=None, heads=None, value_dim=None)
    rows, heads, dim = out.shape
    return rows, heads, dim
