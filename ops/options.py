"""Options that several operators take."""

from __future__ import annotations

from tilewright.dsl.dtypes import DTYPES, DType
from tilewright.dsl.errors import ArgumentDTypeError


def output_dtype_of(name: str, default: DType, wanted: object) -> DType:
    """`output_dtype=` as torch, numpy or this project names it; None is the default.

    Raises ArgumentDTypeError for anything but float32, float16 and bfloat16.
    """
    if wanted is None:
        return default
    text = str(getattr(wanted, "__name__", wanted)).removeprefix("torch.")
    if text not in ("float32", "float16", "bfloat16"):
        raise ArgumentDTypeError(op=name, argument="output_dtype", got=text, expected="float32, float16 or bfloat16")
    return DTYPES[text]
