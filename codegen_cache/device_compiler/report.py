"""What compiled device code needs of a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class KernelResources:
    """Of one kernel. Registers are 32 bits wide and counted per thread, accumulation registers included.

    spill_bytes: what is written to memory for want of registers, per thread. stack_bytes: local memory of a thread,
    spills included. static_shared: bytes of shared memory that the code itself reserves; a launch may add more.
    matrix_instructions: by name; None where no disassembler was found. traps: instructions that stop the kernel, which
    the CUDA compiler puts in place of what the architecture has not.
    """

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared: int
    matrix_instructions: dict[str, int] | None
    traps: int

    @property
    def matrix_total(self) -> int:
        return sum((self.matrix_instructions or {}).values())


@dataclass(frozen=True)
class DeviceCode:
    """A cubin or an AMD code object, and its kernels."""

    arch: str
    compiler: str
    path: Path
    kernels: tuple[KernelResources, ...]

    def kernel(self, name: str) -> KernelResources:
        """Raises KeyError."""
        return {k.name: k for k in self.kernels}[name]

    def as_dict(self) -> dict[str, object]:
        """For reports in JSON."""
        return {"arch": self.arch, "compiler": self.compiler, "kernels": [asdict(k) for k in self.kernels]}
