"""From the arguments of a call to a Binding: shapes must agree by axis name, and what is compiled in is read off."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from tilewright.dsl.dtypes import DTYPES, DType, Kind
from tilewright.dsl.errors import (
    ArgumentDTypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentTypeError,
    ArgumentValueError,
)
from tilewright.dsl.schedule import Binding, LeafBinding
from tilewright.dsl.spec import Declared, ParamKind, Spec

from .checks import (
    INDEX_DTYPES,
    SCALE_DTYPES,
    as_tensor,
    expect_dtype,
    expect_rank,
    expect_same_device,
    expect_shape,
)


class Leaf(Protocol):
    """One layer of a paged cache, as strided views."""

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor | None: ...
    @property
    def lookup_table(self) -> Tensor: ...
    @property
    def cache_lengths(self) -> Tensor: ...
    @property
    def key_scales(self) -> Tensor | None: ...
    @property
    def value_scales(self) -> Tensor | None: ...
    @property
    def quantization_granularity(self) -> int | None: ...


# What kernels call the tensors of a leaf, after its name.
LEAF_TENSORS: Final = {
    "table": "lookup_table", "lengths": "cache_lengths", "k": "keys", "v": "values",
    "k_scale": "key_scales", "v_scale": "value_scales",
}  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A call's arguments by the names that kernels use, and what was read off them."""

    binding: Binding
    tensors: dict[str, Tensor]
    scalars: dict[str, int | float]
    leaves: dict[str, Leaf]
    rows: int
    batch: int
    device: torch.device


def dtype_of(t: Tensor) -> DType:
    return DTYPES[str(t.dtype).removeprefix("torch.")]


class _Sizes:
    """Extents by axis name; the first argument that has an axis says how long it is."""

    def __init__(self, op: str) -> None:
        self._op, self.of = op, dict[str, int]()
        self._by: dict[str, str] = {}

    def agree(self, argument: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        for axis, size in zip(axes, shape, strict=True):
            if axis == "key":
                continue
            if self.of.setdefault(axis, size) != size:
                shown = ", ".join(f"{a}={self.of[a]}" if a in self.of else a for a in axes)
                expected = f"[{shown}], as {self._by[axis]} has {axis} {self.of[axis]}"
                raise ArgumentShapeError(op=self._op, argument=argument, got=list(shape), expected=expected)
            self._by.setdefault(axis, argument)

    def expect(self, axis: str, size: int) -> None:
        """A size that the operator itself gives to an axis."""
        if self.of.get(axis, size) != size:
            expected = f"{axis}={size}, as the operator slices rows"
            got = f"{axis}={self.of[axis]}"
            raise ArgumentShapeError(op=self._op, argument=self._by[axis], got=got, expected=expected)


def bind(
    op: str,
    spec: Spec,
    arguments: Mapping[str, object],
    offsets: Tensor,
    outputs: Mapping[str, DType],
    names: Mapping[str, str],
) -> Bound:
    """Check shapes, dtypes and devices against the declaration. `names` are the caller's names of parameters.

    Raises the `Argument*` errors; nothing has been computed by then.
    """
    sizes = _Sizes(op)
    bound = Bound(Binding((), ()), {}, {}, {}, 0, len(offsets) - 1, offsets.device)
    sizes.agree(names.get("offsets", "offsets"), ("seq",), (bound.batch,))
    dtypes: dict[str, DType] = {}
    leaves: dict[str, LeafBinding] = {}
    for p in sorted(
        spec.params, key=lambda p: p.kind is ParamKind.PAGED
    ):  # caches last, so that q names head_dim first
        shown = names.get(p.name, p.name)
        value = arguments[p.name]
        match p.kind:
            case ParamKind.SCALAR:
                bound.scalars[p.name] = _number(op, shown, p, value)
            case ParamKind.TENSOR:
                t = bound.tensors[p.name] = _tensor(op, shown, p, value, bound)
                sizes.agree(shown, p.axes, tuple(t.shape))
                dtypes[p.name] = dtype_of(t)
            case ParamKind.PAGED:
                leaves[p.name] = _leaf(op, shown, p, value, bound, sizes)
                if p.name in spec.scales_read:
                    _expect_row_scales(op, shown, leaves[p.name].granularity, sizes.of[p.axes[0]])
    dtypes.update(outputs)
    heads, kv_heads = sizes.of.get("head", 1), sizes.of.get("kv_head", 1)
    if leaves and heads % kv_heads:
        leaf = names.get(next(iter(leaves)), next(iter(leaves)))
        expected = f"a divisor of the {heads} query heads"
        raise ArgumentError(op=op, argument=leaf, got=f"has {kv_heads} key-value heads", expected=expected)
    if kv_heads > 1 and (output := spec.shared_by_heads):
        leaf = names.get(next(iter(leaves)), next(iter(leaves)))
        expected = f"1: output {output!r} has no head axis, and depends on the key-value head"
        raise ArgumentError(op=op, argument=leaf, got=f"has {kv_heads} key-value heads", expected=expected)
    static = {a: n for a, n in sizes.of.items() if a in spec.static_axes} | {"head": heads}
    for axis, size in spec.fixed_sizes.items():
        sizes.expect(axis, size)
        static[axis] = size
    binding = Binding(
        tuple(sorted(static.items())), tuple(sorted(dtypes.items(), key=lambda d: d[0])), tuple(leaves.items())
    )
    return Bound(
        binding, bound.tensors, bound.scalars, bound.leaves, sizes.of.get("row", 0), bound.batch, offsets.device
    )


def _expect_row_scales(op: str, shown: str, granularity: int | None, width: int) -> None:
    if granularity is None or granularity < width:
        got = "has no scales" if granularity is None else f"has a scale per {granularity} values"
        raise ArgumentError(op=op, argument=shown, got=got, expected=f"one scale per key of {width}")


def _number(op: str, shown: str, p: Declared, value: object) -> int | float:
    if isinstance(value, Tensor | np.ndarray) and len(value.reshape(-1)) == 1:
        value = value.item()
    integer = p.dtype is not None and p.dtype.kind is Kind.INT
    if not isinstance(value, bool):
        if integer and isinstance(value, numbers.Integral):
            return _index(op, shown, int(value))
        if not integer and isinstance(value, numbers.Real):
            return float(value)
    expected = "an integer" if integer else "a number"
    raise ArgumentTypeError(op=op, argument=shown, got=type(value).__name__, expected=expected)


def _index(op: str, shown: str, value: int) -> int:
    if not -(1 << 31) <= value < 1 << 31:
        raise ArgumentValueError(op=op, argument=shown, got=value, expected="a 32-bit integer")
    return value


def _tensor(op: str, shown: str, p: Declared, value: object, bound: Bound) -> Tensor:
    t = as_tensor(op, shown, value)
    expect_rank(op, shown, t, *p.axes)
    if t.device != bound.device:
        expect_same_device(op, shown, t, "input_row_offsets", torch.empty(0, device=bound.device))
    name = str(t.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ArgumentDTypeError(op=op, argument=shown, got=name, expected=f"one of {', '.join(DTYPES)}")
    declared = p.dtype.compute.kind if p.dtype else DTYPES["float32"].kind
    if DTYPES[name].kind is not declared:
        raise ArgumentDTypeError(op=op, argument=shown, got=name, expected=f"{declared.value} elements")
    return t


def _leaf(op: str, shown: str, p: Declared, value: object, bound: Bound, sizes: _Sizes) -> LeafBinding:
    if not all(hasattr(value, a) for a in ("keys", "values", "lookup_table", "cache_lengths")):
        raise ArgumentTypeError(op=op, argument=shown, got=type(value).__name__, expected="one layer of a paged cache")
    leaf: Leaf = value  # type: ignore[assignment]  # structurally, as just seen
    bound.leaves[p.name] = leaf
    fields: dict[str, Tensor | None] = {n: getattr(leaf, a) for n, a in LEAF_TENSORS.items()}
    bound.tensors.update({f"{p.name}_{n}": t for n, t in fields.items() if t is not None})
    expect_rank(op, f"{shown}.keys", leaf.keys, "pages", "page_size", "kv_heads", "head_dim")
    expect_rank(op, f"{shown}.lookup_table", leaf.lookup_table, "batch", "max_pages")
    if leaf.keys.device != bound.device:
        expect_same_device(op, shown, leaf.keys, "input_row_offsets", torch.empty(0, device=bound.device))
    if p.dtype is not None:
        expect_dtype(op, shown, leaf.keys, (getattr(torch, p.dtype.name),))
    sizes.agree(shown, ("seq",), (leaf.lookup_table.shape[0],))
    expect_shape(op, f"{shown}.cache_lengths", leaf.cache_lengths, seq=sizes.of["seq"])
    sizes.agree(shown, ("kv_head", *p.axes), tuple(leaf.keys.shape[2:]))
    if leaf.values is not None:
        sizes.agree(f"{shown} values", p.value_axes, tuple(leaf.values.shape[3:]))
    elif p.value_axes != p.axes:
        raise ArgumentError(op=op, argument=shown, got="holds keys only (kv_dim 1)", expected="keys and values")
    granularity = leaf.quantization_granularity if leaf.key_scales is not None else None
    _expect_beside_keys(op, shown, leaf, granularity)
    if (
        granularity is None and dtype_of(leaf.keys).bits == 8 and p.dtype is None
    ):  # declared so, what is stored is meant
        raise ArgumentError(op=op, argument=shown, got="holds float8 without scales", expected="scales beside its rows")
    return LeafBinding(
        leaf.keys.shape[1], leaf.keys.shape[2], dtype_of(leaf.keys), leaf.values is not None, granularity
    )


def _expect_beside_keys(op: str, shown: str, leaf: Leaf, granularity: int | None) -> None:
    """A leaf's other tensors are as its keys say: one page number, slot and head is read from all of them."""
    pages, page_size, kv_heads = leaf.keys.shape[:3]
    place = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads}
    for name in ("lookup_table", "cache_lengths"):
        expect_dtype(op, f"{shown}.{name}", getattr(leaf, name), INDEX_DTYPES)
    if leaf.values is not None:
        expect_shape(op, f"{shown}.values", leaf.values, **place, value_dim=None)
        expect_dtype(op, f"{shown}.values", leaf.values, (leaf.keys.dtype,), "as its keys")
    scaled = {"key_scales": (leaf.keys, leaf.key_scales), "value_scales": (leaf.values, leaf.value_scales)}
    for name, (rows, scales) in scaled.items():
        if granularity is None or rows is None:
            continue
        if scales is None:
            raise ArgumentError(op=op, argument=f"{shown}.{name}", got="is None", expected="scales, as its keys have")
        expect_shape(op, f"{shown}.{name}", scales, **place, granules=-(-rows.shape[3] // granularity))
        expect_dtype(op, f"{shown}.{name}", scales, SCALE_DTYPES)
    for name in LEAF_TENSORS.values():
        if (t := getattr(leaf, name)) is not None and t.device != leaf.keys.device:
            expect_same_device(op, f"{shown}.{name}", t, f"{shown}.keys", leaf.keys)
