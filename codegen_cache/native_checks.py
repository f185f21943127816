"""Checks of values in native code (dsl/cpu/checks.c), for calls that are made again and again.

They say that all is fine, or to look again; the words for what is wrong are validate.py's. A plan says what to look at:
sizes, strides and closed forms; it holds no value and no address.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from tilewright.dsl.expr import ALWAYS, Const, Expr, Op, Param, Var
from tilewright.dsl.isa import ISAS
from tilewright.dsl.loops import KeyReach, Program
from tilewright.dsl.spec import Listed, Spec

from .bind import Bound
from .checks import extent_bytes
from .compilers import Compiler
from .native import NativeLibrary, load
from .native_build import HEADERS, build

# ---- the structures of checks.c --------------------------------------------------------------------------------------

MOST_VARIABLES: Final = 24  # these two as in checks.c
MOST_DEPTH: Final = 32
_DTYPES: Final = {torch.int32: 0, torch.int64: 1, torch.uint32: 2}
_CONSTANT, _VARIABLE = 0, 1
_OPERATIONS: Final = {"add": 2, "sub": 3, "mul": 4, "floordiv": 5, "min": 6, "max": 7}

_int, _address = ctypes.c_int64, ctypes.c_void_p


class _Tensor(ctypes.Structure):
    _fields_ = [("at", _int), ("dtype", _int), ("strides", _int * 3)]


class _Form(ctypes.Structure):
    _fields_ = [("length", _int), ("code", _address)]


class _Apart(ctypes.Structure):
    _fields_ = [(n, _int) for n in ("written", "written_bytes", "read", "read_bytes", "same")]


class _Reach(ctypes.Structure):
    _fields_ = [
        ("table", _Tensor),
        *((n, _int) for n in ("width", "page", "pages", "exact")),
        ("lo", _Form),
        ("hi", _Form),
    ]


class _Listed(ctypes.Structure):
    _fields_ = [
        ("entries", _Tensor), ("table", _Tensor),
        *((n, _int) for n in ("groups", "slots", "width", "page", "pages", "limit")),
    ]  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = [
        *((n, _int) for n in ("aparts", "leaves", "scalars", "reaches", "lists", "columns")),
        *((n, _address) for n in ("apart", "lengths", "reach", "listed", "column")),
        *((n, _int) for n in ("checked", "batch", "rows", "past")),
        ("offsets", _Tensor),
    ]


class Look(ctypes.Structure):
    """What one call is looked at with."""

    _fields_ = [(n, _address) for n in ("plan", "data", "scalars", "columns")]


_LOOK: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_FILL: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)


@functools.cache
def look_function(compiler: Compiler) -> Callable[[int], int]:
    """tw_look, of the address of a `Look`: 0 where all is fine."""
    return _LOOK(_library(compiler).address("tw_look"))


@functools.cache
def fill_function(compiler: Compiler) -> Callable[[int, int, int], None]:
    """tw_fill, of an address, how many 32-bit words to fill from there, and what each is to hold."""
    return _FILL(_library(compiler).address("tw_fill"))


def _library(compiler: Compiler) -> NativeLibrary:
    source = (HEADERS / "checks.c").read_text(encoding="utf-8")
    return load(build(source, "the checks of values", ISAS["portable"], compiler))


# ---- plans -----------------------------------------------------------------------------------------------------------


class NotPlanned(Exception):
    """The native checks do not know how to look at this."""


@dataclass(frozen=True)
class Plan:
    """What to look at in every call of one shape."""

    address: int
    scalars: tuple[str, ...]  # the integer scalars it wants, in order
    columns: tuple[str, ...]  # the sizes it finds; after them, the bytes of a row, and pairs of a row and a key
    pair_cost: int  # multiplications for one such pair, about; 0 where nothing is known of it
    kept: tuple[object, ...]  # what `address` leads to


def plan_of(
    spec: Spec,
    program: Program,
    bound: Bound,
    tensors: Mapping[str, Tensor],
    places: Mapping[str, int],
    written: Sequence[str],
    *,
    checked: bool,
) -> Plan:
    """The plan of calls like this one. Raises NotPlanned.

    places: where a call's addresses stand. written: those that are the caller's buffers.
    """
    return _Planner(spec, program, bound, tensors, places).plan(written, checked)


class _Planner:
    def __init__(
        self, spec: Spec, program: Program, bound: Bound, tensors: Mapping[str, Tensor], places: Mapping[str, int]
    ) -> None:
        self.spec, self.program, self.bound, self.tensors, self.at = spec, program, bound, tensors, places
        self.kept: list[object] = []
        self.leaves = list(bound.leaves)
        self.scalars = tuple(n for n, v in bound.scalars.items() if isinstance(v, int))
        # As `sequence_fine` fills them; the leaf that defines positions has its count in num_keys.
        counts = ["" if n == spec.positions else f"{n}_count" for n in self.leaves]
        names = ["q0", "q1", "num_keys", *counts, *self.scalars]
        self.variables = {n: i for i, n in enumerate(names) if n}
        if len(names) > MOST_VARIABLES:
            raise NotPlanned

    def plan(self, written: Sequence[str], checked: bool) -> Plan:
        read = [n for n in self.bound.tensors if self.tensors[n].numel()]
        aparts = [self.apart(w, n) for w in written if self.tensors[w].numel() for n in read]
        lengths = [self.index(f"{n}_lengths") for n in self.leaves]
        reaches = [x for r in self.program.reach if (x := self.reach(r)) is not None]
        parts = [p for source in self.spec.sources for p in source.parts if isinstance(p, Listed)]
        lists = [self.listed(p) for p in parts if p.block == 1 and p.where == ALWAYS]
        columns = self.columns()
        past = self.leaves.index(self.spec.positions) if self.spec.positions is not None else -1
        made = _Plan(
            len(aparts), len(lengths), len(self.scalars), len(reaches), len(lists), len(self.program.columns),
            self.array(_Apart, aparts), self.array(_Tensor, lengths), self.array(_Reach, reaches),
            self.array(_Listed, lists), self.array(_Form, columns),
            checked, self.bound.batch, self.bound.rows, past, self.index("offsets"),
        )  # fmt: skip
        found = tuple(n for n, _ in self.program.columns)
        all_counted = bool(reaches or parts) and len(reaches) == len(self.program.reach)
        cost = self.pair_cost() if all_counted else 0
        return Plan(ctypes.addressof(made), self.scalars, found, cost, (made, *self.kept))

    def pair_cost(self) -> int:
        """A key and a value row are read for each head of a query row; one row is both where it has no values."""
        widths = [
            leaf.keys.shape[3] + (leaf.keys if leaf.values is None else leaf.values).shape[3]
            for leaf in self.bound.leaves.values()
        ]
        return self.bound.binding.heads * max(widths, default=0)

    def array(self, kind: type[ctypes.Structure], items: Sequence[ctypes.Structure]) -> int:
        array = (kind * max(1, len(items)))(*items)
        self.kept.append(array)
        return ctypes.addressof(array)

    def index(self, name: str) -> _Tensor:
        t = self.tensors[name]
        return _Tensor(self.at[name], _DTYPES[t.dtype], (_int * 3)(*t.stride()))

    def apart(self, written: str, read: str) -> _Apart:
        a, b = self.tensors[written], self.tensors[read]
        same = (a.shape, a.stride()) == (b.shape, b.stride())
        return _Apart(self.at[written], extent_bytes(a), self.at[read], extent_bytes(b), same)

    def reach(self, reach: KeyReach) -> _Reach | None:
        """None where keys are only to be counted, and there is no form to count them by."""
        try:
            lo, hi = (self.form(e, self.variables) for e in (reach.lo, reach.hi))
        except NotPlanned:
            if reach.exact:
                raise
            return None
        return _Reach(self.index(f"{reach.leaf}_table"), *self.pages(reach.leaf), reach.exact, lo, hi)

    def pages(self, leaf: str) -> tuple[int, int, int]:
        """Pages of a sequence, keys of a page, pages of the pool."""
        pages, page = self.bound.leaves[leaf].keys.shape[:2]
        return self.bound.leaves[leaf].lookup_table.shape[1], page, pages

    def listed(self, part: Listed) -> _Listed:
        t = self.tensors[part.indices]
        if not 2 <= t.dim() <= 3:
            raise NotPlanned
        groups = t.shape[1] if t.dim() == 3 else 1
        strides = (_int * 3)(t.stride(0), t.stride(1) if t.dim() == 3 else 0, t.stride(-1))
        entries = _Tensor(self.at[part.indices], _DTYPES[t.dtype], strides)
        limit = self.variables["num_keys" if part.leaf == self.spec.positions else f"{part.leaf}_count"]
        table = self.index(f"{part.leaf}_table")
        return _Listed(entries, table, groups, t.shape[-1], *self.pages(part.leaf), limit)

    def columns(self) -> list[_Form]:
        """Those of columns, and the bytes of a row, which are written in columns."""
        if self.program.row_bytes is None:
            return []
        if self.program.lengths != (f"{self.spec.positions}_lengths" if self.spec.positions else None):
            raise NotPlanned
        forms = [self.form(e, self.variables) for _, e in self.program.columns]
        return [*forms, self.form(self.program.row_bytes, {n: i for i, (n, _) in enumerate(self.program.columns)})]

    def form(self, e: Expr, variables: Mapping[str, int]) -> _Form:
        code = _postfix(e, variables)
        if len(code) > MOST_DEPTH:  # each pushes one at most
            raise NotPlanned
        words = (_int * (2 * len(code)))(*(x for pair in code for x in pair))
        self.kept.append(words)
        return _Form(len(code), ctypes.addressof(words))


def _postfix(e: Expr, variables: Mapping[str, int]) -> list[tuple[int, int]]:
    match e:
        case Const(int() as value) if abs(value) < 1 << 31:
            return [(_CONSTANT, int(value))]
        case Var(name) | Param(name, (), _, ()) if name in variables:
            return [(_VARIABLE, variables[name])]
        case Op(name, args) if name in _OPERATIONS:
            return [*(pair for a in args for pair in _postfix(a, variables)), (_OPERATIONS[name], 0)]
        case _:
            raise NotPlanned
