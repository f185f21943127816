"""Stored values as float32, the only float that tiles hold."""

from __future__ import annotations

from functools import cache

import torch


def as_float32(x: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of any float dtype, in float32; itself where it has that dtype already.

    torch converts one-byte floats one at a time (0.25 G/s a core), so they are looked up, two at once (2 G/s).
    """
    if x.dtype.itemsize != 1:
        return x.to(torch.float32)
    flat = x.reshape(-1)
    if flat.numel() % 2 or flat.storage_offset() % 2 or not flat.is_contiguous():
        flat = torch.cat([flat, flat.new_zeros(flat.numel() % 2)])
    found = _pairs(x.dtype).index_select(0, flat.view(torch.uint16).to(torch.int32))
    return found.view(torch.float32)[: x.numel()].view(x.shape)


@cache
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """For every two bytes, the float32 values of both as one int64; torch's own conversion says what they are."""
    bytes_ = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    return bytes_.view(dtype).to(torch.float32).view(torch.int64)
