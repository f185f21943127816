"""Declaring operators: paged caches and their keys, `@op`, and tracing.

`op.trace(**constants)` runs the author's function once and gives a `Spec`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn, TypeAlias, overload

from . import errors
from .annotations import Annotation
from .constants import identity
from .dtypes import Kind, f32
from .expr import Axes, Expr, FoldResult, KeyField, Param, loc_of, ordered, walk, walk_open
from .printer import show
from .probes import traced_builtins
from .source import Loc, definition, here
from .spec import Declared, Listed, ParamKind, Part, Probe, Range, Select, Source, Spec, is_reserved
from .value import LOOP_AXES, HasValue, Value, as_expr, describe, pos
from .value import key as key_position

Predicate: TypeAlias = Callable[[Value, Value], Value | bool]


@dataclass
class Trace:
    """What one run of an author's function has gathered."""

    sources: list[Source] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)


# ---- key sources -----------------------------------------------------------------------------------------------------


class Field(Value):
    """A field of key rows. Like any value, and it can be narrowed to some of its elements."""

    __slots__ = ()

    def slice(self, axis: str, start: int, size: int) -> Field:
        """Elements start..start + size - 1 of the row, along a feature axis of their own.

        For parts of a key row, and for values that are not as wide as their keys.
        """
        e = self.expr
        assert isinstance(e, KeyField)
        if e.size is not None or not isinstance(start, int) or not isinstance(size, int) or start < 0 or size < 1:
            raise errors.NotTraceable(
                loc=here(),
                what="slice",
                expected="a start and a size, whole numbers, of a whole row",
                got=f"{start!r}, {size!r}",
            )
        return Field(replace(e, axes=ordered(("key", axis)), start=start, size=size))


class Keys(HasValue):
    """Key rows of one source. `.k` and `.v` are values: what is stored, times its scale where the cache has scales."""

    def __init__(self, trace: Trace, parts: tuple[Part, ...], axes: Mapping[str, Axes]) -> None:
        self._trace, self._parts, self._axes = trace, parts, axes
        self._number: int | None = None
        self._leaf: str | None = None

    def _field(self, name: str) -> Field:
        return Field(KeyField(self._source(), name, ordered(("key", *self._axes[name])), self._leaf))

    def _source(self) -> int:
        if self._number is None:  # numbered by first use, so an unused source leaves no trace
            self._number = len(self._trace.sources)
            self._trace.sources.append(Source(self._parts))
        return self._number

    @property
    def k(self) -> Field:
        return self._field("k")

    @property
    def v(self) -> Field:
        return self._field("v")

    @property
    def scale(self) -> Value:
        """The key row's one scale, of a cache declared by its stored dtype: `Paged["dim", f8e4m3]`."""
        return self._field("scale")

    def beside(self, leaf: Leaf) -> Keys:
        """The rows of another paged cache at the same positions: rows of mixed formats are caches side by side."""
        if len(self._parts) > 1:
            problem = "the keys of a concatenation stand in several caches"
            raise errors.AxisMismatch(loc=here(), what="beside", problem=problem)
        other = Keys(self._trace, self._parts, leaf.axes)
        other._number, other._leaf = self._source(), leaf.name
        return other

    def value(self) -> Value:
        return self.k


class Leaf:
    """A paged cache inside an operator."""

    def __init__(self, trace: Trace, declared: Declared) -> None:
        self._trace, self._declared, self.name = trace, declared, declared.name
        self.axes: Mapping[str, Axes] = {"k": declared.axes, "v": declared.value_axes, "scale": ()}

    def __repr__(self) -> str:
        return f"<paged cache {self.name}; its rows are {self.name}.keys(...)>"

    def keys(self, where: Predicate | None = None, *, pool: int = 1) -> Keys:
        """Contiguous positions of the sequence, seen where `where(query, key)` holds; without one, all of them.

        pool: tokens per key of the cache. A pool is seen where its last token is, and `key` then counts pools.
        """
        if not isinstance(pool, int) or isinstance(pool, bool) or pool < 1:
            raise errors.NotTraceable(
                loc=here(), what="pool", expected="a whole number, at least 1", got=describe(pool)
            )
        seen = self._predicate(where, f"{self.name}.keys(where=...)")
        part = Range(self._declared.name, seen, pool, here())
        return Keys(self._trace, (part,), self.axes)

    def entries(self, indices: Value, *, where: Predicate | None = None) -> Keys:
        """Entries that each row lists. A negative index is an unused slot, wherever it stands; duplicates count.

        indices: an integer parameter [row, slot], or [row, head or kv_head, slot]. An index past the cache's entries is
        unused too. where: of those listed, only entries seen by `where(query, entry)`.
        """
        return self.blocks(indices, 1, where=where)

    def blocks(self, indices: Value, size: int, *, where: Predicate | None = None) -> Keys:
        """Blocks of `size` consecutive entries that each row lists; see `entries`."""
        e, what = as_expr(indices, "entries"), f"{self.name}.entries"
        shaped = isinstance(e, Param) and not e.index and len(e.own) > 1 and e.own[0] == "row"
        if not isinstance(e, Param) or not shaped or {*e.own[1:-1]} - {"head", "kv_head"} or e.own[-1] in LOOP_AXES:
            raise errors.AxisMismatch(loc=here(), what=what, problem=f"expected a parameter [row, slot], got {show(e)}")
        if e.dtype.kind is not Kind.INT:
            raise errors.DTypeMismatch(loc=here(), what=what, got=e.dtype.name, expected="indices are integers")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise errors.NotTraceable(
                loc=here(), what="blocks", expected="a whole size, at least 1", got=describe(size)
            )
        part = Listed(self.name, e.name, e.own, size, self._predicate(where, f"{what}(where=...)"), here())
        return Keys(self._trace, (part,), self.axes)

    def _predicate(self, where: Predicate | None, what: str) -> Expr:
        seen = as_expr(True if where is None else where(pos, key_position), what)
        if seen.dtype.kind is not Kind.BOOL:
            expected = "a predicate gives a condition"
            raise errors.DTypeMismatch(loc=here(), what=what, got=seen.dtype.name, expected=expected)
        if any(isinstance(x, KeyField) for x in walk(seen)):
            problem = "a predicate cannot read the key rows it selects"
            raise errors.AxisMismatch(loc=here(), what=what, problem=problem)
        return seen


def concat(first: Keys, *more: Keys) -> Keys:
    """Key rows of several sources, of one feature axis each, walked one after the other in one reduction."""
    for k in (first, *more):
        if not isinstance(k, Keys):
            expected = "key rows of caches, such as cache.keys()"
            raise errors.NotTraceable(loc=here(), what="concat", expected=expected, got=describe(k))
        if k._leaf is not None:
            problem = f"rows of {k._leaf} that stand beside another cache's cannot be concatenated"
            raise errors.AxisMismatch(loc=here(), what="concat", problem=problem)
        for kind, name in (("key", "k"), ("value", "v")):
            if k._axes[name] != first._axes[name]:
                axes = [f"[{', '.join(x._axes[name])}]" for x in (first, k)]
                problem = f"{kind} rows have axes {' and '.join(axes)}"
                raise errors.AxisMismatch(loc=here(), what="concat", problem=problem)
    parts = tuple(p for k in (first, *more) for p in k._parts)
    return Keys(first._trace, parts, first._axes)


# ---- operators -------------------------------------------------------------------------------------------------------


class Operator:
    """A declared operator: an immutable value that can be traced, printed, lowered and run."""

    def __init__(self, fn: Callable[..., object], positions: str | None = None) -> None:
        self.fn, self.name, self.__doc__ = fn, fn.__name__, fn.__doc__
        self.loc = definition(fn)
        self.parameters = self._read_signature()
        self.positions = self._leaf_of_positions(positions)
        self._specs: dict[object, Spec] = {}

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    @cached_property
    def kinds(self) -> Mapping[str, ParamKind]:
        """What each run-time parameter is."""
        return {n: a.kind for n, (a, _) in self.parameters.items() if a.kind is not None}

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"operator {self.name!r} is a declaration; run it with tilewright.run({self.name}, ...)")

    def trace(self, **constants: object) -> Spec:
        """The Spec for these compile-time constants, with None for each optional operand that is left out.

        Raises an `AuthorError` at the author's file, line and column where the declaration makes no sense.
        """
        try:
            memo = frozenset((name, identity(value)) for name, value in constants.items())
        except TypeError:  # traced again each time; the program is found by what the operator means
            return self._trace(constants)
        if memo not in self._specs:
            self._specs[memo] = self._trace(constants)
        return self._specs[memo]

    def _trace(self, constants: Mapping[str, object]) -> Spec:
        trace = Trace()
        args, params = self._bind(trace, dict(constants))
        result = traced_builtins(self.fn, trace.probes)(**args)
        outputs = self._read_outputs(result)
        for probe in trace.probes:
            for name, e in probe.values:
                if "key" in e.axes and any(isinstance(x, FoldResult) for x in walk_open(e)):
                    problem = f"{name} has a value per key, and needs a reduction that is known after the keys"
                    raise errors.AxisMismatch(loc=probe.loc, what=probe.kind, problem=problem)
        positions = self.positions if any(p.name == self.positions for p in params) else None
        spec = Spec(self.name, params, tuple(trace.sources), outputs, positions, tuple(trace.probes))
        _expect_one_size(spec)
        for f in spec.folds:
            for e, absent in zip(f.inputs, f.absent, strict=True):
                if absent is not None:
                    _expect_per_row(f.name, e, spec.sources[f.source], f.loc)
        for s in spec.selects:
            _expect_per_row("topk", s.score, spec.sources[s.source], s.loc)
            _expect_own_rank(s, spec)
        _expect_own_slots(spec)
        return spec

    def _bind(self, trace: Trace, constants: dict[str, object]) -> tuple[dict[str, object], tuple[Declared, ...]]:
        args: dict[str, object] = {}
        params: list[Declared] = []
        for name, (a, default) in self.parameters.items():
            if a.kind is None:
                if name not in constants and default is inspect.Parameter.empty:
                    raise errors.UnknownConstant(loc=self.loc, op=self.name, problem=f"constant {name!r} was not given")
                args[name] = constants.pop(name, default)
            elif a.optional and name in constants and constants[name] is None:
                args[name] = constants.pop(name)
            else:
                declared = Declared(name, a.kind, a.axes, a.dtype, a.value_axes)
                params.append(declared)
                args[name] = _stand_in(trace, declared)
        if constants:
            known = [n for n, (a, _) in self.parameters.items() if a.kind is None or a.optional]
            problem = f"unknown constants {', '.join(sorted(constants))}; known: {', '.join(known) or 'none'}"
            raise errors.UnknownConstant(loc=self.loc, op=self.name, problem=problem)
        return args, tuple(params)

    def _read_outputs(self, result: object) -> tuple[tuple[str, Expr], ...]:
        named = result if isinstance(result, Mapping) else {"out": result}
        if result is None or not named:
            raise errors.NothingReturned(
                loc=self.loc, op=self.name, got="nothing" if result is None else "an empty dict"
            )
        out: list[tuple[str, Expr]] = []
        for name, value in named.items():
            if not isinstance(value, Value):
                raise errors.NothingReturned(loc=self.loc, op=self.name, got=f"{describe(value)} as {name!r}")
            if "key" in value.axes or "row" not in value.axes:
                problem = (
                    f"output {name!r} has axes [{', '.join(value.axes)}]; an output has one entry per row, none per key"
                )
                raise errors.AxisMismatch(loc=loc_of(value.expr) or self.loc, what=self.name, problem=problem)
            if not str(name).isidentifier():
                raise self._bad(f"output {name!r} needs a name that is an identifier")
            if name in self._taken or is_reserved(str(name)):
                raise self._bad(f"output {name!r} takes a name that a parameter or a loop nest has; choose another")
            self._expect_folded(f"output {name!r}", value.expr)
            out.append((str(name), value.expr))
        return tuple(out)

    def _expect_folded(self, what: str, e: Expr) -> None:
        """No value per key in what is computed once the keys have been walked."""
        for x in walk_open(e):
            if "key" in x.axes:
                problem = f"{what} reads {show(x)}, which has a value per key, outside a reduction over keys"
                raise errors.AxisMismatch(loc=loc_of(x) or loc_of(e) or self.loc, what=self.name, problem=problem)

    def _bad(self, problem: str) -> errors.BadDeclaration:
        return errors.BadDeclaration(loc=self.loc, op=self.name, problem=problem)

    def _read_signature(self) -> dict[str, tuple[Annotation, object]]:
        try:
            signature = inspect.signature(self.fn, eval_str=True)
        except NameError as e:
            raise self._bad(f"an annotation cannot be read: {e}") from e
        out: dict[str, tuple[Annotation, object]] = {}
        for name, p in signature.parameters.items():
            a = p.annotation
            if not isinstance(a, Annotation):
                raise self._bad(
                    f"parameter {name!r} needs an annotation such as Rows, PerHead, Tensor, Paged, Scalar or Const"
                )
            if a.kind is not None and is_reserved(name):
                raise self._bad(f"parameter {name!r} takes a name that loop nests use; choose another")
            if a.kind in (ParamKind.PAGED, ParamKind.TENSOR) and not a.axes:
                raise self._bad(f"parameter {name!r} needs named axes")
            if len(set(a.axes)) != len(a.axes):
                raise self._bad(f"parameter {name!r} repeats an axis: [{', '.join(a.axes)}]")
            out[name] = (a, p.default)
        self._taken = self._read_names(out)
        return out

    def _read_names(self, parameters: Mapping[str, tuple[Annotation, object]]) -> dict[str, str]:
        """The names that loop nests use for each parameter and what belongs to it, such as a cache's lengths."""
        taken: dict[str, str] = {}
        for name, (a, _) in parameters.items():
            own = {ParamKind.PAGED: _LEAF_NAMES, ParamKind.TENSOR: a.axes}.get(a.kind, ()) if a.kind else ()
            for n in (name, *(f"{name}_{x}" for x in own)) if a.kind else ():
                if n in taken:
                    raise self._bad(f"parameters {taken[n]!r} and {name!r} both claim the name {n!r}; choose others")
                taken[n] = name
        return taken

    def _leaf_of_positions(self, positions: str | None) -> str | None:
        paged = [n for n, (a, _) in self.parameters.items() if a.kind is ParamKind.PAGED]
        if positions is not None and positions not in paged:
            raise self._bad(f"positions={positions!r} is not one of its paged caches ({', '.join(paged) or 'none'})")
        if positions is None and len(paged) > 1:
            raise self._bad(
                f"several paged caches ({', '.join(paged)}): say whose lengths define pos, @op(positions=...)"
            )
        return positions or next(iter(paged), None)


def _expect_per_row(what: str, e: Expr, source: Source, loc: Loc | None) -> None:
    """What is reduced over the keys that a row sees varies over whatever decides which those are."""
    seen = {a for p in source.parts for a in p.where.axes}
    seen |= {a for p in source.parts if isinstance(p, Listed) for a in p.axes[:-1] if a != "kv_head"}
    if missing := ", ".join(ordered(seen - {"key", *e.axes})):
        problem = f"{show(e)} does not vary over {missing}, which decides what keys are seen; multiply by a tensor"
        raise errors.AxisMismatch(loc=loc, what=what, problem=f"{problem} that does")


def _expect_own_rank(s: Select, spec: Spec) -> None:
    """The axis that counts results is theirs alone, and all selections of an operator share it."""
    first = spec.selects[0].k
    if s.k != first:
        problem = f"keeps {s.k} of the best where another keeps {first}; an operator keeps as many in each, use two"
        raise errors.AxisMismatch(loc=s.loc, what="topk", problem=problem)
    for p in spec.params:
        if s.rank in (*p.axes, *p.value_axes):
            problem = f"its results have an axis {s.rank!r}, which parameter {p.name!r} has too; rename that one"
            raise errors.AxisMismatch(loc=s.loc, what="topk", problem=problem)


def _expect_own_slots(spec: Spec) -> None:
    """How many slots a list has is known when it runs, so no tile may have that axis."""
    fixed = spec.tile_axes.union(*((*p.axes, *p.value_axes) for p in spec.params if p.kind is ParamKind.PAGED))
    for part in (p for source in spec.sources for p in source.parts if isinstance(p, Listed)):
        if (slot := part.axes[-1]) in fixed:
            problem = f"{part.indices!r} counts its slots by axis {slot!r}, which other values have too; rename it"
            raise errors.AxisMismatch(loc=part.loc, what=f"{part.leaf}.entries", problem=problem)


_LEAF_NAMES = ("table", "lengths", "k", "v", "k_scale", "v_scale", "pages", "max_pages")


def _expect_one_size(spec: Spec) -> None:
    sizes: dict[str, int] = {}
    for e in spec.nodes:
        if isinstance(e, KeyField) and e.size is not None:
            (axis,) = (a for a in e.axes if a != "key")
            if sizes.setdefault(axis, e.size) != e.size:
                problem = f"axis {axis!r} has {sizes[axis]} elements in one slice and {e.size} in another"
                raise errors.AxisMismatch(loc=spec.sources[e.source].parts[0].loc, what="slice", problem=problem)


def _stand_in(trace: Trace, d: Declared) -> Value | Leaf:
    """What the author's function is given for a run-time parameter. A dtype left open is a float."""
    if d.kind is ParamKind.PAGED:
        return Leaf(trace, d)
    return Value(Param(d.name, d.axes, d.dtype.compute if d.dtype else f32))


@overload
def op(fn: Callable[..., object], /) -> Operator: ...
@overload
def op(*, positions: str | None = None) -> Callable[[Callable[..., object]], Operator]: ...
def op(
    fn: Callable[..., object] | None = None, /, *, positions: str | None = None
) -> Operator | Callable[[Callable[..., object]], Operator]:
    """Declare an operator. `positions` names the paged cache whose lengths define `pos`, where there are several."""
    return Operator(fn) if fn is not None else lambda f: Operator(f, positions)
