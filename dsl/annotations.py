"""Annotations of an operator's parameters: `q: Rows["head", "dim"]`, `sink: PerHead[f32] | None`, `*, w: Const`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .dtypes import DType
from .expr import Axes
from .spec import ParamKind


@dataclass(frozen=True)
class Annotation:
    """What a parameter is; `| None` makes it optional: left out, the operator is traced without it."""

    kind: ParamKind | None  # None: a compile-time constant
    axes: Axes = ()
    dtype: DType | None = None  # None: bound when the operator is compiled
    value_axes: Axes = ()
    optional: bool = False

    def __or__(self, other: None) -> Annotation:
        return replace(self, optional=True)

    def __getitem__(self, item: object) -> Annotation:
        items = item if isinstance(item, tuple) else (item,)
        names = tuple(x for x in items if isinstance(x, str))
        dtype = next((x for x in items if isinstance(x, DType)), self.dtype)
        if self.kind is ParamKind.PAGED:
            return replace(self, axes=names[:1], value_axes=names[1:2] or names[:1], dtype=dtype)
        return replace(self, axes=self.axes + names, dtype=dtype)


Rows = Annotation(ParamKind.TENSOR, ("row",))
"""`Rows["head", "dim"]`: a tensor with one entry per query row, rows ragged over sequences."""
PerHead = Annotation(ParamKind.TENSOR, ("head",))
"""`PerHead[f32]`: one entry per query head."""
Tensor = Annotation(ParamKind.TENSOR)
"""`Tensor["seq", "token", i32]`: a captured tensor with any axes. Integer tensors name their dtype."""
Paged = Annotation(ParamKind.PAGED)
"""`Paged["dim"]`: a paged cache; `Paged["dim", "value_dim"]` where values are not as wide as keys."""
Scalar = Annotation(ParamKind.SCALAR)
"""`Scalar[f32]`: a run-time number. Changing it never compiles anything."""
Const = Annotation(None)
"""`Const`, `Const[int]`: a Python value fixed when the operator is compiled."""
