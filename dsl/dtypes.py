"""Element types: what is stored, and what expressions compute in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    FLOAT = "float"
    INT = "int"
    BOOL = "bool"


@dataclass(frozen=True)
class DType:
    """A storage type. `name` is the torch and numpy spelling."""

    name: str
    kind: Kind
    bits: int

    def __hash__(self) -> int:  # names are unique; hashed very often, as part of every expression
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def compute(self) -> DType:
        """The type a loaded element has in expressions: float32, int32 or bool, however narrow its storage."""
        match self.kind:
            case Kind.FLOAT:
                return f32
            case Kind.INT:
                return i32
            case Kind.BOOL:
                return boolean


f32 = DType("float32", Kind.FLOAT, 32)
f16 = DType("float16", Kind.FLOAT, 16)
bf16 = DType("bfloat16", Kind.FLOAT, 16)
f8e4m3 = DType("float8_e4m3fn", Kind.FLOAT, 8)
i32 = DType("int32", Kind.INT, 32)
i64 = DType("int64", Kind.INT, 64)
u32 = DType("uint32", Kind.INT, 32)
u8 = DType("uint8", Kind.INT, 8)
boolean = DType("bool", Kind.BOOL, 8)

DTYPES: dict[str, DType] = {d.name: d for d in (f32, f16, bf16, f8e4m3, i32, i64, u32, u8, boolean)}
