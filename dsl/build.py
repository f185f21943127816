"""Spec -> tile program: straight-line statements over named-axis tiles.

Five rules, none of them about attention: a Dot, or a sum of products, becomes a Gemm; a Reduction becomes a Reduce;
elementwise chains fuse into one Map; a subexpression with fewer axes than its user, or with two users, gets its own
tile; `state * a + dot` becomes an in-place Map and an accumulating Gemm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import isinf

from .algebra import op, rebuild, substitute
from .dtypes import Kind
from .errors import AxisMismatch
from .expr import Const, Dot, Expr, FoldResult, KeyField, Op, Param, Reduction, Selected, Tile, children, loc_of, walk
from .spec import Fold, Probe, Select, Spec, State, is_reserved
from .tile import NOT_A_CANDIDATE, Gemm, KeyPass, Map, Mask, Reduce, SelectPass, Show, TileProgram, TileStmt, field_tile

_INLINE = ("le", "lt", "eq", "ne", "and", "or", "not")  # conditions never get a tile: tiles hold numbers


class _Names:
    """Tile names, numbered in the order statements are made; never the name of a parameter."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._count: Counter[str] = Counter()
        self._taken = set(taken)

    def fresh(self, hint: str, like: Expr) -> Tile:
        self._count[hint] += 1
        return Tile(self.unique(f"{hint}{self._count[hint] - 1}"), like.axes, like.dtype)

    def unique(self, name: str) -> str:
        while name in self._taken or (is_reserved(name) and not name.startswith(("input", "order"))):
            name += "_"
        self._taken.add(name)
        return name


class _Builder:
    """Statements for a group of expressions that run at the same place, sharing what they share."""

    def __init__(self, names: _Names, known: dict[Expr, Tile], roots: Iterable[Expr]) -> None:
        self.out: list[TileStmt] = []
        self._names, self._tiles = names, dict(known)
        distinct = {x for r in roots for x in walk(r)}
        self._users = Counter(c for x in distinct for c in children(x))

    def tile(self, e: Expr) -> Tile:
        """A tile holding e; statements that compute it are appended."""
        flat = self.flat(e)
        if isinstance(flat, Tile):
            return flat
        made = self._tiles[e] = self._names.fresh("t", e)
        self.out.append(Map(made, flat, loc_of(e)))
        return made

    def flat(self, e: Expr) -> Expr:
        """An elementwise expression over tiles equal to e; statements for everything else are appended."""
        if e in self._tiles:
            return self._tiles[e]
        match e:
            case Dot(a, b, over, loc):
                left, right = self.tile(a), self.tile(b)
                made = self._tiles[e] = self._names.fresh("g", e)
                self.out.append(Gemm(made, left, right, over, loc=loc))
                return made
            case Reduction("sum", Op("mul", (a, b)), over, loc) if over in a.axes and over in b.axes:
                return self.flat(Dot(a, b, over, loc))  # a sum of products is a matrix product
            case Reduction(kind, a, over, loc):
                src = self.tile(a)
                made = self._tiles[e] = self._names.fresh("red", e)
                self.out.append(Reduce(made, src, kind, over, loc))
                return made
            case KeyField():
                return field_tile(e)
            case Param(name, own, dtype, ()) if own and _is_operand(e):
                return Tile(name, e.axes, dtype)
            case Op():
                return rebuild(e, lambda c: self._argument(c, e))
            case Selected():
                raise AssertionError("a selection is an output")
            case FoldResult():
                raise AssertionError(f"result {e.name!r} of {e.fold.name} used before its keys were walked")
            case _:
                return rebuild(e, self.flat)

    def _argument(self, c: Expr, user: Expr) -> Expr:
        if not isinstance(c, Op) or not c.axes or c.name in _INLINE:
            return self.flat(c)
        reads = any(isinstance(x, Tile | Param | KeyField | Dot | Reduction | FoldResult) and x.axes for x in walk(c))
        narrower = set(c.axes) < set(user.axes)
        return self.tile(c) if reads and (narrower or self._users[c] > 1) else self.flat(c)

    def update(self, states: tuple[State, ...], new: tuple[Expr, ...]) -> None:
        """states := new, all at once. Every new value is read before any state that others read is written."""
        names = {s.name for s in states}
        reads = {
            s.name: {t.name for t in walk(e) if isinstance(t, Tile)} & names for s, e in zip(states, new, strict=True)
        }
        writes: list[TileStmt] = []
        for s, e in zip(states, new, strict=True):
            me = Tile(s.name, s.axes)
            read_by_others = any(s.name in r for n, r in reads.items() if n != s.name)
            if not read_by_others and (in_place := self._accumulate(me, e, names)):
                writes += in_place
            elif read_by_others or reads[s.name] - {s.name}:
                writes.append(Map(me, self._apart(e, names), loc_of(e)))
            else:
                writes.append(Map(me, self.flat(e), loc_of(e)))
        self.out += writes

    def _apart(self, e: Expr, states: set[str]) -> Tile:
        """A tile holding e that no write to a state changes."""
        found = self.tile(e)
        if found.name not in states:
            return found
        made = self._names.fresh("t", e)
        self.out.append(Map(made, found, loc_of(e)))
        return made

    def _accumulate(self, me: Tile, e: Expr, states: set[str]) -> list[TileStmt]:
        """`me * a + dot` as a rescaling Map (not for `me + dot`) and an accumulating Gemm; [] when e is not that."""
        match e:
            case Op("add", (rest, Dot(a, b, over, loc)), _):
                scaled = self.flat(rest)
                if {t.name for t in walk(scaled) if isinstance(t, Tile)} & (states - {me.name}):
                    return []
                left, right = self.tile(a), self.tile(b)
                if {left.name, right.name} & states:
                    return []
                rescale: list[TileStmt] = [] if scaled == me else [Map(me, scaled, loc_of(rest))]
                return [*rescale, Gemm(me, left, right, over, True, loc)]
            case _:
                return []


def _is_operand(p: Param) -> bool:
    """Read at its own axes and not per key: loaded once per tile."""
    return not p.index and "key" not in p.own


# ---- folds into passes -----------------------------------------------------------------------------------------------


def _needs(fold: Fold) -> set[Fold]:
    """Folds whose results this fold reads, in its inputs or later."""
    return {x.fold for e in fold.expressions for x in walk(e) if isinstance(x, FoldResult)}


def group_folds(folds: tuple[Fold, ...]) -> list[list[Fold]]:
    """Folds that can walk the keys together: the same source, and none needs another's result first."""
    passes: list[list[Fold]] = []
    for f in folds:
        ready = 1 + max((n for n, p in enumerate(passes) if any(x in _needs(f) for x in p)), default=-1)
        fits = next((p for p in passes[ready:] if p[0].source == f.source), None)
        if fits is None:
            passes.append([f])
        else:
            fits.append(f)
    return passes


def _rename(fold: Fold, names: _Names) -> tuple[tuple[State, ...], dict[Expr, Expr]]:
    """The fold's states under names of their own, and what to substitute in its step, merge and finish."""
    states = tuple(State(names.unique(s.name), s.axes, s.init) for s in fold.states)
    table: dict[Expr, Expr] = {}
    for old, new in zip(fold.states, states, strict=True):
        table[Tile(old.name, old.axes)] = Tile(new.name, new.axes)
        table[Tile(old.name + "_other", old.axes)] = Tile(new.name + "_other", new.axes)
    return states, table


# ---- the pass over a source ------------------------------------------------------------------------------------------


def _mask_inputs(b: _Builder, fold: Fold, shared: dict[tuple[Expr, float], Tile], names: _Names) -> dict[Expr, Expr]:
    """Tiles for a fold's inputs, unseen keys replaced by what they contribute."""
    table: dict[Expr, Expr] = {}
    for n, (e, absent) in enumerate(zip(fold.inputs, fold.absent, strict=True)):
        place = Tile(f"input{n}", e.axes, e.dtype)
        if absent is None and isinstance(e, KeyField):  # unseen rows are fetched as zero
            table[place] = e
            continue
        absent = 0.0 if absent is None else absent  # what is computed from a zero row may be anything, even NaN
        if e.dtype.kind is Kind.INT and isinf(absent):
            e = op("float", e)  # a tile of integers holds no infinity
        if (e, absent) not in shared:
            made = shared[e, absent] = names.fresh("input", e)
            b.out += [Map(made, b.flat(e), loc_of(e)), Mask(made, absent, loc=fold.loc)]
        table[place] = shared[e, absent]
    return table


def _show_probes(b: _Builder, probes: Iterable[Probe]) -> None:
    for p in probes:
        b.out.append(Show(p.kind, tuple((n, b.flat(e)) for n, e in p.values), p.loc))


def _build_pass(spec: Spec, group: list[Fold], results: dict[Expr, Tile], names: _Names) -> KeyPass:
    renamed = {f: _rename(f, names) for f in group}
    states = tuple(s for f in group for s in renamed[f][0])
    source = group[0].source
    probes = [p for p in spec.probes if _place(p, spec) == source]

    inputs = [e for f in group for e in f.inputs]
    b = _Builder(names, results, [*inputs, *(e for p in probes for _, e in p.values)])
    _show_probes(b, probes)
    shared: dict[tuple[Expr, float], Tile] = {}
    steps: list[Expr] = []
    for f in group:
        table = {**renamed[f][1], **_mask_inputs(b, f, shared, names)}
        steps += [substitute(e, table) for e in f.step]
    step = _Builder(names, {**results, **b._tiles}, steps)
    step.update(states, tuple(steps))

    merges = [substitute(e, renamed[f][1]) for f in group for e in f.merge]
    merge = _Builder(names, {}, merges)
    merge.update(states, tuple(merges))

    finish = _finish(spec, group, {f: renamed[f][1] for f in group}, results, names)
    fields = dict.fromkeys(
        x for e in (*inputs, *steps) for x in walk(e) if isinstance(x, KeyField) and x.source == source
    )
    return KeyPass(spec.sources[source], tuple(fields), states, (*b.out, *step.out), tuple(merge.out), finish)


def _finish(
    spec: Spec, group: list[Fold], tables: dict[Fold, dict[Expr, Expr]], results: dict[Expr, Tile], names: _Names
) -> tuple[TileStmt, ...]:
    """Results that something reads, each in a tile; `results` learns them."""
    read = [e for _, e in spec.outputs] + [e for f in spec.folds for e in f.expressions]
    read += [e for p in spec.probes for _, e in p.values]
    used = dict.fromkeys(x for e in read for x in walk(e) if isinstance(x, FoldResult) and x.fold in group)
    exprs = {r: substitute(dict(r.fold.finish)[r.name], tables[r.fold]) for r in used}
    b = _Builder(names, results, exprs.values())
    for r, e in exprs.items():
        flat = b.flat(e)
        results[r] = made = Tile(names.unique(f"{r.name}_result"), r.axes)
        b.out.append(Map(made, flat, loc_of(e)))
    return tuple(b.out)


def _order_key(score: Expr) -> Expr:
    """An integer that orders as scores do: -0 as +0, NaN below everything that is a candidate."""
    bits = op("bits", op("add", score, Const(0.0)))
    ordered_bits = op("bitxor", bits, op("bitand", op("shr", bits, Const(31)), Const(0x7FFFFFFF)))
    return op("where", op("ne", score, score), Const(NOT_A_CANDIDATE + 1), ordered_bits)


def _build_select(spec: Spec, select: Select, names: _Names) -> SelectPass:
    results: list[tuple[str, str]] = []
    for name, e in spec.outputs:
        if isinstance(e, Selected) and e.select == select:
            results.append((name, e.name))
    first = next(s for s in spec.selects if s.source == select.source)
    probes = [p for p in spec.probes if select == first and _place(p, spec) == select.source]
    read = [select.score, *(e for p in probes for _, e in p.values)]
    b = _Builder(names, {}, read)
    _show_probes(b, probes)
    score = b.tile(select.score)
    order = names.fresh("order", op("bits", score))
    b.out += [Map(order, _order_key(score), select.loc), Mask(order, NOT_A_CANDIDATE, loc=select.loc)]
    fields = dict.fromkeys(x for e in read for x in walk(e) if isinstance(x, KeyField) and x.source == select.source)
    source = spec.sources[select.source]
    return SelectPass(source, tuple(fields), tuple(b.out), order, select.k, select.rank, tuple(results))


def _check_selects(spec: Spec) -> None:
    """What lowering takes: selections of ranges or lists, alone in their operator, returned as they are."""
    for s in spec.selects:
        if spec.folds or any(not isinstance(e, Selected) for _, e in spec.outputs):
            problem = (
                "an operator either selects keys or reduces over them: return the selection, and use two operators"
            )
            raise AxisMismatch(loc=s.loc, what="topk", problem=problem)
        if len(spec.sources[s.source].parts) > 1:
            raise AxisMismatch(loc=s.loc, what="topk", problem="the keys of a concatenation have no one index")
    for p in spec.probes:
        if any(isinstance(x, Selected) for _, e in p.values for x in walk(e)):
            raise AxisMismatch(loc=p.loc, what=p.kind, problem="a selection can be returned, and looked at there")


def _place(p: Probe, spec: Spec) -> int | None:
    """The source in whose key loop a probe's values live; None: they exist once the keys are walked."""
    for _, e in p.values:
        for x in walk(e):
            if isinstance(x, FoldResult):
                return None
            if isinstance(x, KeyField):
                return x.source
    return 0 if any("key" in e.axes for _, e in p.values) and spec.sources else None


def build(spec: Spec) -> TileProgram:
    """The tile program of a traced operator.

    before: a traced operator, its folds as expressions
    after:  statements per key tile (step), per partition (merge) and per row tile (finish, epilogue)
    """
    names, results = _Names(p.name for p in spec.params), dict[Expr, Tile]()
    _check_selects(spec)
    passes = tuple(_build_pass(spec, g, results, names) for g in group_folds(spec.folds))
    selects = tuple(_build_select(spec, s, names) for s in spec.selects)
    late = [p for p in spec.probes if _place(p, spec) is None]
    b = _Builder(names, results, [*(e for _, e in spec.outputs), *(e for p in late for _, e in p.values)])
    _show_probes(b, late)
    outputs = tuple((n, b.tile(e)) for n, e in spec.outputs if not isinstance(e, Selected))
    everything = [e for f in spec.folds for e in f.expressions]
    everything += [e for _, e in spec.outputs] + [e for p in spec.probes for _, e in p.values]
    operands = dict.fromkeys(
        x for e in everything for x in walk(e) if isinstance(x, Param) and x.own and _is_operand(x)
    )
    return TileProgram(tuple(operands), passes, tuple(b.out), outputs, selects)
