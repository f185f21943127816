"""Memory for the workspaces of prepared calls: one block for each call under way, kept for the next one.

Workspaces live as long as a call. Made anew each time, those of a MiB and more would be mapped and faulted in at every
call, which takes longer than many a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tilewright.dsl.loops import Arg
from tilewright.dsl.scalars import Number
from tilewright.dsl.windows import workspace_shape

KEPT: Final = 64 << 20  # bytes of a block that is kept
ALIGNED: Final = 64

_SPARE: list[Tensor] = []  # as many as calls have ever been under way at once


def take(size: int) -> Tensor:
    """A block of at least `size` bytes; their contents are undefined."""
    try:
        block = _SPARE.pop()
    except IndexError:
        return torch.empty(size, dtype=torch.uint8)
    return block if len(block) >= size else torch.empty(size, dtype=torch.uint8)


def give_back(block: Tensor) -> None:
    """Keep a block for other calls; a large one is freed."""
    if len(block) <= KEPT:
        _SPARE.append(block)


@dataclass(frozen=True)
class Room:
    """Where workspaces are in a block of `size` bytes."""

    size: int
    starts: tuple[int, ...]
    strides: tuple[int, ...]  # of all of them, in a row
    fills: tuple[tuple[int, int, int], ...]  # first byte, 32-bit words, and what they are to hold


def room_of(workspaces: Sequence[Arg], sizes: Mapping[str, Number]) -> Room:
    """The room that workspaces need."""
    starts: list[int] = []
    strides: list[int] = []
    fills: list[tuple[int, int, int]] = []
    size = 0
    for w in workspaces:
        count = 1
        of_axes: list[int] = []
        for n in reversed(workspace_shape(w, sizes)):
            of_axes.insert(0, count)
            count *= n
        starts.append(size)
        strides += of_axes
        if w.fill is not None:
            fills.append((size, count, w.fill))
        size += -(-count * w.dtype.bits // 8 // ALIGNED) * ALIGNED
    return Room(size, tuple(starts), tuple(strides), tuple(fills))
