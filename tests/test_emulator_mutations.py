"""No synchronisation can be taken from an emitted kernel unnoticed, but for those that nothing depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.device_programs import CASES, lowered
from support.mutations import mutants, verdict

from tilewright.codegen_cache.device_source import DeviceSource
from tilewright.codegen_cache.emulator import emulate

PROGRAMS = [
    ("copy", "sm_90a"),
    ("gemm_pipelined", "sm_80"),
    ("gemm_nt", "sm_90a"),
    ("attention", "sm_80"),
    ("attention", "sm_90a"),
    ("attention", "gfx942"),
    ("topk", "gfx942"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), PROGRAMS)
def test_every_synchronisation_counts(name: str, arch: str, golden: Callable[[str, str], None]) -> None:
    """The golden text says how each change is noticed. "redundant": happens-before, in which the order of the schedule
    plays no part, covers every pair of accesses without it.
    """
    case = CASES[name]

    def right(source: DeviceSource, schedule: int) -> bool:
        torch.manual_seed(0)
        tensors = case.inputs(arch)
        emulate(source, tensors, schedule=schedule)
        return case.error(tensors) <= case.bound

    lines = [f"{mutant}  =  {verdict(mutant, right)}" for mutant in mutants(lowered(name, arch))]
    golden(f"emulator_mutations_{name}_{arch}", "\n".join(lines))
