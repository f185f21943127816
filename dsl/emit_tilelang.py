"""A loop nest as a TileLang program: one Python function per kernel, which makes TileLang's function of it.

What is printed is the nest and nothing else. Where tiles lie, what is padded, what is loaded ahead are in the nest, so
the interpreter runs the same; here each statement gets the one form that the notes on TileLang found to be right and
lowered in reasonable time. Nothing of a call is in the text: sizes, strides, lengths, tables and numbers are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import f8e4m3
from .emit_tilelang_kernel import KernelPrinter, is_strided, stride_name, stride_unit
from .gpu import Gpu
from .legal_gpu import shared_bytes
from .loops import Arg, Program

DECODE = '''
def decode_e4m3(byte):
    """float8_e4m3fn by its bits, exact, whichever float8 format the machine reads. No number on the way is tiny."""
    bits = T.cast(byte, "int32")
    size = bits & 127
    normal = T.reinterpret((size << 20) + (120 << 23), "float32")
    value = T.if_then_else(size < 8, T.cast(size, "float32") * T.float32(2.0**-9), normal)
    signed = T.if_then_else(bits < 128, value, -value)
    return T.if_then_else(size == 127, T.reinterpret(T.int32(0x7FC00000), "float32"), signed)
'''


@dataclass(frozen=True)
class KernelText:
    """One kernel of a program: its function, its launch grid in terms of run-time sizes, its threads."""

    name: str
    grid: tuple[str, ...]
    threads: int
    shared_bytes: int  # that its tiles take, before TileLang lays them out


@dataclass(frozen=True)
class TileLangSource:
    """TileLang text, and what its kernels take.

    strides: of each argument that may have any, the names of the parameters that carry them, and what each is a
        multiple of: rows are then loaded in vectors, so the address must be a multiple of 16 bytes as well.
    """

    text: str
    kernels: tuple[KernelText, ...]
    args: tuple[Arg, ...]
    workspaces: tuple[Arg, ...]
    strides: tuple[tuple[str, tuple[str, ...], int], ...]


def emit_tilelang(program: Program, gpu: Gpu, *, aligned: bool = True) -> TileLangSource:
    """The TileLang program of a nest that was lowered for this architecture.

    aligned: rows of tensors start at multiples of 16 bytes, or of as much as their length allows; False: anywhere, and
        every element is loaded alone.

    Raises NotOnTarget for what has no form: `print` and `breakpoint()` of the author's.
    """
    target = f"{gpu.kind}:{gpu.name}"
    workspaces = frozenset(w.name for w in program.workspaces)
    printers = [KernelPrinter(k, workspaces, gpu, aligned) for k in program.kernels]
    bodies = [line for p in printers for line in ("", "", *p.function())]
    decodes = any(a.dtype is f8e4m3 for k in program.kernels for a in k.args)
    head = [
        f'"""{program.name} for {target}: {", ".join(k.name for k in program.kernels)}."""',
        "",
        "import tilelang.language as T",
        *(["", *DECODE.rstrip().split("\n")] if decodes else []),
    ]
    text = "\n".join([*head, *bodies]) + "\n"
    kernels = tuple(
        KernelText(k.name, p.grid(), k.threads, sum(shared_bytes(program, k.name).values()))
        for k, p in zip(program.kernels, printers, strict=True)
    )
    strided = [a for a in program.args if is_strided(a, workspaces)]
    strides = tuple(
        (a.name, tuple(stride_name(a.name, n) for n in range(len(a.shape) - 1)), stride_unit(a, gpu) if aligned else 1)
        for a in strided
    )
    return TileLangSource(text, kernels, program.args, program.workspaces, strides)
