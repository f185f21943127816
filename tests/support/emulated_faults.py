"""What an emulated source does wrong, in a word, and a pair of tensors for it to do it with."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tilewright.codegen_cache.device_source import DeviceSource
from tilewright.codegen_cache.emulator import EVERY, emulate
from tilewright.dsl.errors import EmulationError


def fault(source: DeviceSource, tensors: dict[str, Tensor], schedule: int = 0) -> str:
    """The message, without the place it begins with."""
    with pytest.raises(EmulationError) as caught:
        emulate(source, tensors, schedule=schedule)
    return re.sub(r"^.*?block \([^)]*\)(, thread \d+)?: ", "", str(caught.value).partition("\n")[0])


def kind_under_every_schedule(source: DeviceSource, tensors: dict[str, Tensor]) -> str:
    """The first word of the message: races are found whatever the order."""
    (kind,) = {fault(source, tensors, n).partition(":")[0] for n in range(EVERY)}
    return kind


def passes(source: DeviceSource, tensors: dict[str, Tensor]) -> None:
    for n in range(EVERY):
        emulate(source, tensors, schedule=n)


def numbers(n: int = 128) -> dict[str, Tensor]:
    return {"A": torch.arange(n, dtype=torch.float32), "O": torch.full((n,), -1.0)}
