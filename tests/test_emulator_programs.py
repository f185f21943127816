"""What TileLang emits, run on the CPU under every schedule, against torch."""

from __future__ import annotations

import pytest
import torch
from support.device_programs import CASES, lowered

from tilewright.codegen_cache.device_source import DeviceSource
from tilewright.codegen_cache.emulator import EVERY, emulate
from tilewright.dsl.errors import EmulationError


@pytest.mark.parametrize(("name", "arch"), [(n, a) for n, c in CASES.items() for a in c.archs])
def test_program(name: str, arch: str) -> None:
    """The same answer whatever the order of threads and of asynchronous operations, and nothing left unordered."""
    case, source = CASES[name], lowered(name, arch)
    assert DeviceSource.from_json(source.to_json()) == source
    for schedule in range(EVERY):
        torch.manual_seed(schedule)
        tensors = case.inputs(arch)
        run = emulate(source, tensors, schedule=schedule, proxies=arch not in case.unfenced)
        assert case.error(tensors) <= case.bound
        assert run.written == set(case.expected(tensors))


@pytest.mark.parametrize(("name", "arch"), [(n, a) for n, c in CASES.items() for a in c.unfenced])
def test_proxy_fence_left_out(name: str, arch: str) -> None:
    """TileLang 0.1.15 fences copies by cp.async before wgmma reads them, except in the drained tail of a pipeline."""
    source = lowered(name, arch)
    assert "tl::fence_proxy_async();" in source.text
    with pytest.raises(EmulationError, match=r"proxy: .* wgmma of warp \d+ uses what cp.async by thread"):
        emulate(source, CASES[name].inputs(arch))
