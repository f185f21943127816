"""What GPU programs may use: one frozen row for each architecture. TileLang checks none of these limits itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """An architecture. Shared memory and threads are of one block."""

    name: str  # as compilers spell it
    kind: str  # "cuda" or "hip", as TileLang spells it
    warp: int  # threads that run in step
    shared_bytes: int
    threads: int  # at most
    matrix_columns: int  # a product's columns are a multiple of this; its rows and depth of MATRIX
    async_rows: bool  # rows gathered one by one go to shared memory without passing through registers
    async_pages: bool  # and rectangular copies
    bulk_pages: bool  # rectangular copies by the tensor memory unit, any number of them in flight
    fp8: str | None  # the float8 format that its units read; None: it has none
    lanes: int  # elements of one load, at most; TileLang has no code for more on AMD


MATRIX = 16  # rows that each warp owns of a product are a multiple of this, and so is what is summed over
KIB = 1024

GPUS: dict[str, Gpu] = {
    f"{g.kind}:{g.name}": g
    for g in (
        Gpu("sm_80", "cuda", 32, 163 * KIB, 1024, 8, True, True, False, None, 16),
        Gpu("sm_90a", "cuda", 32, 227 * KIB, 1024, 8, True, True, True, "float8_e4m3fn", 16),
        Gpu("sm_100a", "cuda", 32, 227 * KIB, 1024, 8, True, True, True, "float8_e4m3fn", 16),
        Gpu("gfx942", "hip", 64, 64 * KIB, 1024, 16, False, False, False, "float8_e4m3fnuz", 4),
        Gpu("gfx950", "hip", 64, 160 * KIB, 1024, 16, False, True, False, "float8_e4m3fn", 4),
    )
}
