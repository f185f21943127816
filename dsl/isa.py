"""What native CPU code may use: instruction sets, widest last. Read from /proc/cpuinfo, so that nothing is imported."""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass

from . import knobs
from .errors import BadEnvironment


@dataclass(frozen=True)
class Isa:
    name: str
    lanes: int  # float32 elements of a vector
    micro_rows: int  # rows of a register block, as dsl/cpu/gemm.h and amx.h have it
    bf16_dot: bool  # products of bfloat16 pairs added to float32
    machine: str  # as platform.machine() says, or "any"
    features: tuple[str, ...]  # as /proc/cpuinfo lists them
    flags: tuple[str, ...]  # for the compiler

    def missing(self) -> tuple[str, ...]:
        """What this processor lacks of it, or does not let this process use."""
        if self.machine not in ("any", platform.machine()):
            return (self.machine,)
        lacks = tuple(f for f in self.features if f not in processor_features())
        if not lacks and "amx_tile" in self.features and not tiles_permitted():
            return ("permission for amx_tile",)
        return lacks


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", *_AVX2)
_BF16 = (*_AVX512, "avx512_bf16")
_BF16_FLAGS = (*(f"-m{f}" for f in _AVX512), "-mavx512bf16")


def _x86(
    name: str, lanes: int, micro_rows: int, features: tuple[str, ...], flags: tuple[str, ...], bf16: bool = False
) -> Isa:
    return Isa(name, lanes, micro_rows, bf16, "x86_64", features, flags)


ISAS: dict[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("portable", 4, 4, False, "any", (), ()),
        _x86("avx2", 8, 6, _AVX2, tuple(f"-m{f}" for f in _AVX2)),
        _x86("avx512", 16, 12, _AVX512, tuple(f"-m{f}" for f in _AVX512)),
        _x86("avx512bf16", 16, 12, _BF16, _BF16_FLAGS, bf16=True),
        _x86(
            "amxbf16", 16, 32, (*_BF16, "amx_tile", "amx_bf16"), (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), bf16=True
        ),
    )
}


@functools.cache
def processor_features() -> frozenset[str]:
    """Flags of the first processor: the kernel lists what all of them and the operating system support."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86_64


@functools.cache
def tiles_permitted() -> bool:
    """Ask Linux for AMX, which it gives a process, with all its threads and forks, on request only.

    It refuses where it is old or told to, and where a thread's signal stack has no room for tiles.
    """
    request = [ctypes.c_long(x) for x in (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)]
    return int(ctypes.CDLL(None).syscall(*request)) == 0


@functools.cache
def supported() -> tuple[Isa, ...]:
    """Instruction sets of this processor, widest last; `portable` is always there."""
    return tuple(isa for isa in ISAS.values() if not isa.missing())


def best_isa() -> Isa:
    """The one that TILEWRIGHT_CPU_ISA names, else the widest that this processor has.

    Raises BadEnvironment for an unknown name, or one that this processor cannot run.
    """
    name = knobs.CPU_ISA.get()
    if name is None:
        return supported()[-1]
    here = ", ".join(isa.name for isa in supported())
    if name not in ISAS:
        raise BadEnvironment(name=knobs.CPU_ISA.name, value=name, expected=f"one of {', '.join(ISAS)}")
    if missing := ISAS[name].missing():
        expected = f"one of {here}: this processor lacks {', '.join(missing)}"
        raise BadEnvironment(name=knobs.CPU_ISA.name, value=name, expected=expected)
    return ISAS[name]
