"""A loop nest as C: one function per kernel, which does one grid point, and one that runs them all.

What is printed is the nest and nothing else: loops, branches and scalars as they stand, statements over the same axes
in shared vector loops, matrix products by the micro-kernels of `dsl/cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import Kind, bf16, f32
from .emit_c_kernel import KernelPrinter
from .errors import IllegalSchedule, NotOnTarget
from .isa import Isa
from .loops import Arg, Program
from .rewrite import statements
from .tile import Gemm, Show


@dataclass(frozen=True)
class CSource:
    """C text, and in which order it takes what a call passes."""

    text: str
    tensors: tuple[Arg, ...]  # addresses and strides; after them a buffer for a fault
    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    scratch_bytes: int  # of one thread, at most


def emit_c(program: Program, isa: Isa) -> CSource:
    """The C program of a finished loop nest, for processors of one instruction set.

    Raises NotOnTarget for `print` and `breakpoint()` of the author's, IllegalSchedule for products it has not.
    """
    _refuse(program, isa)
    everything = (*program.args, *program.workspaces)
    tensors = tuple(a for a in everything if a.shape)
    scalars = [a for a in everything if not a.shape]
    named = [d.partition(" + ")[0] for a in tensors for d in a.shape if isinstance(d, str)]
    sizes = tuple(dict.fromkeys([*named, *(a.name for a in scalars if a.dtype.kind is Kind.INT)]))
    numbers = tuple(a.name for a in scalars if a.dtype.kind is not Kind.INT)
    made = frozenset(a.name for a in program.workspaces)
    printers = [KernelPrinter(k, tensors, made, sizes, numbers, isa) for k in program.kernels]
    bodies = [line for p in printers for line in (*p.function(), "")]
    zeros = max([64, *(n for p in printers for n in p.plan.sizes.values())]) + 64
    head = [
        f"/* {program.name}, for {isa.name} */",
        '#include "tilewright.h"',
        "",
        f"static const double tw_zeros[{zeros}] __attribute__((aligned(64)));",
        "",
    ]
    text = "\n".join([*head, *bodies, *_program(program, printers, sizes)]) + "\n"
    return CSource(text, tensors, sizes, numbers, max(p.plan.scratch_bytes for p in printers))


def _refuse(program: Program, isa: Isa) -> None:
    for s in (s for k in program.kernels for s in statements(k.body)):
        if isinstance(s, Show):
            instead = "target='interpret', which runs it"
            raise NotOnTarget(loc=s.loc, target="cpu", what=f"{s.kind}()", expected=instead)
        if isinstance(s, Gemm) and s.b.dtype is not f32 and not (s.b.dtype is bf16 and isa.bf16_dot):
            problem = f"instruction set {isa.name} has none"
            raise IllegalSchedule(field="products", value=repr(s.b.dtype.name), problem=problem)


def _program(program: Program, printers: list[KernelPrinter], sizes: tuple[str, ...]) -> list[str]:
    out = [
        '__attribute__((visibility("default")))',
        "int tw_program(const tw_args *args, tw_parallel_function parallel, int threads) {",
        *(f"    const int64_t s_{n} = args->sizes[{i}]; (void)s_{n};" for i, n in enumerate(sizes)),
        "    int status = 0;",
    ]
    for p in printers:
        call = f"parallel({p.kernel.name}, (void *)args, n_{p.kernel.name}, {p.scratch()}, threads)"
        run = f"    if (status == 0 && n_{p.kernel.name} > 0) status = {call};"
        out += ["    {", *("    " + line for line in (*p.grid_points(), run)), "    }"]
    return [*out, "    return status;", "}"]
