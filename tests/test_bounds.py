"""Closed forms of visible keys against enumeration: sound for any predicate, tight and exact for the usual masks."""

from __future__ import annotations

import ast
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilewright.dsl.algebra import add as plus
from tilewright.dsl.algebra import both, either, floordiv, lift, mul, op, sub
from tilewright.dsl.bounds import MOST_ALTERNATIVES, Interval, analyse
from tilewright.dsl.dtypes import boolean, f32, i32, i64
from tilewright.dsl.expr import Const, Coord, Expr, Op, Param, Var, walk
from tilewright.dsl.scalars import OPS, Number

K, Q, N, HEAD = Coord("key", ("key",)), Coord("pos", ("row",)), Coord("num_keys"), Coord("head", ("head",))
P = Param("p", (), i32)

# ---- building predicates ---------------------------------------------------------------------------------------------


def le(a: Expr | int, b: Expr | int) -> Expr:
    return op("le", lift(a), lift(b))


def lt(a: Expr | int, b: Expr | int) -> Expr:
    return op("lt", lift(a), lift(b))


def eq(a: Expr | int, b: Expr | int) -> Expr:
    return op("eq", lift(a), lift(b))


def negate(a: Expr) -> Expr:
    return op("not", a)


def mod(a: Expr, b: int) -> Expr:
    return op("mod", a, lift(b))


# ---- enumeration -----------------------------------------------------------------------------------------------------


def value(e: Expr, env: Mapping[str, int]) -> Number:
    """An expression on numbers. A tensor holds arbitrary but fixed numbers."""
    match e:
        case Const(v):
            return v
        case Coord(name) | Var(name) | Param(name, (), _, ()):
            return env[name]
        case Param(name, own, dtype, index):
            at = dict(index)
            place = [value(at[a], env) if a in at else env["pos" if a == "row" else a] for a in own]
            found = random.Random(f"{name} {place}").randint(0, 9)
            return found % 2 == 0 if dtype is boolean else found
        case Op(name, args):
            return OPS[name].number(*(value(a, env) for a in args))
        case _:
            raise AssertionError(e)


@dataclass(frozen=True)
class Box:
    """A tile of rows and the run-time numbers."""

    q0: int
    q1: int
    num_keys: int
    p: int

    @property
    def env(self) -> dict[str, int]:
        return {"q0": self.q0, "q1": self.q1, "num_keys": self.num_keys, "p": self.p, "head": 1, "kv_head": 0, "seq": 2}

    def visible(self, where: Expr) -> tuple[set[int], set[int]]:
        """Keys that some row sees, and keys that every row sees."""
        env = self.env
        rows = [
            {k for k in range(self.num_keys) if value(where, env | {"pos": q, "key": k})}
            for q in range(self.q0, self.q1 + 1)
        ]
        return set.union(*rows), set.intersection(*rows)

    def keys(self, lo: Expr | None, hi: Expr | None) -> set[int]:
        first = 0 if lo is None else int(value(lo, self.env))
        last = self.num_keys - 1 if hi is None else int(value(hi, self.env))
        return set(range(max(first, 0), min(last, self.num_keys - 1) + 1))

    def seen(self, i: Interval) -> set[int]:
        return self.keys(i.lo, i.hi)

    def whole(self, i: Interval) -> set[int]:
        return self.keys(i.whole_lo, i.whole_hi) if i.whole else set()


def faults(where: Expr, found: tuple[Interval, ...], box: Box) -> list[str]:
    """What is wrong with `found` at one tile."""
    some, every = box.visible(where)
    out = []
    if hidden := some.difference(*(box.seen(i) for i in found)):
        out.append(f"hidden: {sorted(hidden)}")
    for i in found:
        if masked := box.whole(i) - every:
            out.append(f"not whole: {sorted(masked)}")
        if i.exact and (unseen := box.seen(i) - some):
            out.append(f"not exact: {sorted(unseen)}")
    return out


def boxes(seed: int, count: int) -> list[Box]:
    """Random tiles, most of them small, with all of the shortest and longest caches that fit."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        q0 = rng.randrange(60)
        q1 = min(59, q0 + rng.choice([0, 1, 2, 3, 7, 15, 60]))
        out.append(Box(q0, q1, rng.choice([q1 + 1, rng.randint(q1 + 1, 70), 70]), rng.randint(-10, 80)))
    return out


# ---- the usual masks: tight and exact --------------------------------------------------------------------------------

CAUSAL, PREFIX, LAST = le(K, Q), lt(K, P), sub(N, 1)


def window(w: int) -> Expr:
    return lt(sub(Q, K), w)


def chunk(w: int, keys: Expr = K) -> Expr:
    return eq(floordiv(keys, w), floordiv(Q, w))


POOLED = plus(mul(K, 4), 3)
SIZES = (1, 2, 3, 7, 61)
ONE_INTERVAL: dict[str, Callable[[int], Expr]] = {
    "causal": lambda w: CAUSAL,
    "always": lambda w: Const(True),
    "window": lambda w: both(CAUSAL, window(w)),
    "window without causal": lambda w: lt(Q, plus(K, w)),
    "both sides": lambda w: both(le(K, plus(Q, w)), le(sub(Q, 2), K)),
    "from the end": lambda w: both(le(K, sub(LAST, Q)), lt(sub(sub(LAST, Q), K), w)),
    "narrowing": lambda w: both(le(Q, K), le(K, plus(LAST, sub(Const(w), Q)))),
    "widening": lambda w: both(le(sub(P, Q), K), le(K, plus(P, Q))),
    "far ahead": lambda w: le(plus(Q, w), K),
    "chunk": chunk,
    "causal chunk": lambda w: both(CAUSAL, chunk(w)),
    "chunk and window": lambda w: both(CAUSAL, both(chunk(8), window(w))),
    "this and the last chunk": lambda w: both(CAUSAL, le(floordiv(Q, w), plus(floordiv(K, w), 1))),
    "lookahead": lambda w: le(K, plus(Q, w)),
    "dilated": lambda w: le(plus(mul(K, w), 1), Q),
    "pooled": lambda w: le(POOLED, Q),
    "pooled chunk": lambda w: chunk(w, POOLED),
    "pooled by floor": lambda w: lt(K, floordiv(plus(Q, 1), w)),
    "block causal, nested": lambda w: le(floordiv(floordiv(K, 2), w), floordiv(floordiv(Q, 2), w)),
    "from a position": lambda w: both(CAUSAL, le(P, K)),
    "clipped by max": lambda w: both(CAUSAL, le(op("max", sub(Q, w), P), K)),
    "clipped by min": lambda w: le(K, op("min", Q, plus(P, w))),
    "prefix rows see the prefix": lambda w: both(lt(Q, P), PREFIX),
    "a share of the past": lambda w: le(K, sub(Q, floordiv(Q, w))),
    "a share of the end": lambda w: le(sub(LAST, sub(Q, floordiv(Q, w))), K),
    "all but the last keys": lambda w: lt(K, sub(N, w)),
    "last keys": lambda w: both(CAUSAL, le(sub(N, w), K)),
    "turned off by a scalar": lambda w: both(le(P, w), CAUSAL),
    "not": lambda w: negate(either(lt(Q, K), negate(window(w)))),
}
UNIONS: dict[str, Callable[[int], tuple[Expr, ...]]] = {
    "prefix": lambda w: (CAUSAL, PREFIX),
    "prefix for its own rows": lambda w: (CAUSAL, both(lt(Q, P), PREFIX)),
    "sinks and window": lambda w: (both(CAUSAL, lt(K, 4)), both(CAUSAL, window(w))),
    "all but a band": lambda w: (lt(K, sub(Q, w)), lt(plus(Q, w), K)),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ONE_INTERVAL)
def test_one_interval_is_tight_and_exact(name: str, size: int, seed: int) -> None:
    where = ONE_INTERVAL[name](size)
    (found,) = analyse(where)
    assert found.whole
    assert found.exact
    for box in boxes(seed, 10):
        assert (box.seen(found), box.whole(found)) == box.visible(where), box


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", UNIONS)
def test_a_union_is_tight_and_exact_in_each_alternative(name: str, size: int, seed: int) -> None:
    parts = UNIONS[name](size)
    where = either(*parts)
    found = analyse(where)
    assert len(found) == len(parts)
    assert all(i.exact and i.whole for i in found)
    for box in boxes(seed, 10):
        assert faults(where, found, box) == []
        assert [(box.seen(i), box.whole(i)) for i in found] == [box.visible(part) for part in parts], box


def test_sinks_are_distributed_over_the_union() -> None:
    where = both(CAUSAL, either(lt(K, 4), window(7)))
    assert analyse(where) == analyse(either(*UNIONS["sinks and window"](7)))


# ---- any predicate: sound --------------------------------------------------------------------------------------------


SYMBOLS: list[Expr] = [K, K, Q, Q, N, P]


@st.composite
def affine(draw: st.DrawFn) -> Expr:
    """A small integer sum of the coordinates and the scalar."""
    out: Expr = Const(draw(st.integers(-9, 9)))
    for x in draw(st.lists(st.sampled_from(SYMBOLS), min_size=1, max_size=3)):
        out = plus(out, mul(x, draw(st.integers(-3, 4))))
    return out


def divided(of: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    divisor = st.integers(-5, 9).filter(bool)
    quotient = st.builds(floordiv, of, divisor)
    return quotient | st.builds(mul, quotient, st.integers(-4, 4)) | st.builds(plus, quotient, of)


NUMBERS = st.recursive(affine(), divided, max_leaves=3)
PAIRS = st.builds(lambda n, a, b: op(n, a, b), st.sampled_from(["max", "min"]), NUMBERS, NUMBERS)


def comparisons(of: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.builds(lambda n, a, b: op(n, a, b), st.sampled_from(["le", "le", "lt", "lt", "eq", "ne"]), of, of)


USUAL = st.sampled_from([f(w) for f in ONE_INTERVAL.values() for w in (1, 3, 8)])


def combined(of: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.recursive(
        of, lambda x: st.builds(negate, x) | st.builds(both, x, x) | st.builds(either, x, x), max_leaves=5
    )


PREDICATES = combined(comparisons(NUMBERS) | comparisons(NUMBERS | PAIRS) | USUAL)
OPAQUE = st.sampled_from(
    [
        eq(mod(floordiv(K, 4), 2), 0),
        le(mod(sub(Q, K), 5), 2),
        lt(HEAD, 2),
        lt(Coord("kv_head"), 1),
        eq(Coord("seq"), 2),
        lt(K, HEAD),
        le(mul(K, Q), 50),
        le(K, mul(P, Q)),
        le(op("where", lt(K, Q), K, Q), 9),
        op("where", lt(Q, P), CAUSAL, Const(True)),
        le(op("abs", sub(K, Q)), 3),
        le(op("float", K), Const(7.5)),
        le(K, Const(7.5)),
        le(K, Param("p", (), f32)),
        le(K, Param("limit", ("row",), i32)),
        le(Param("start", ("row",), i64), K),
        Param("tree", ("row", "key"), boolean),
        Param("flag", ("seq",), boolean),
        lt(Param("bias", ("distance",), f32, (("distance", sub(Q, K)),)), 5),
        le(plus(op("max", sub(Q, 7), lift(0)), 1), K),
        op("eq", floordiv(K, 3), op("floordiv", Q, op("max", P, lift(1)))),
    ]
)

BOXES = st.builds(
    lambda q0, rows, spare, p: Box(q0, min(59, q0 + rows), min(59, q0 + rows) + 1 + spare, p),
    st.integers(0, 59),
    st.integers(0, 12),
    st.integers(0, 10),
    st.integers(-20, 80),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(PREDICATES, st.lists(BOXES, min_size=1, max_size=2))
@example(eq(mul(K, 2), Q), [Box(0, 5, 8, 0)])  # every other row sees nothing
@example(eq(K, mul(Q, 2)), [Box(0, 5, 20, 0)])  # every other key is seen by none
@example(eq(K, sub(sub(N, 1), mul(Q, 2))), [Box(0, 5, 20, 0)])
@example(both(CAUSAL, lt(sub(Q, K), P)), [Box(0, 5, 8, 0)])  # a scalar window that is empty
@example(both(lt(Q, P), CAUSAL), [Box(0, 9, 12, 4)])  # the rows that see most see nothing
@example(both(CAUSAL, both(le(sub(Const(10), Q), K), lt(K, 7))), [Box(0, 9, 20, 0)])  # bounds in opposite directions
@example(le(K, sub(Q, mul(floordiv(Q, 2), 2))), [Box(0, 9, 20, 0)])  # neither rises nor falls
@example(le(mul(floordiv(Q, 4), 4), plus(K, sub(Q, 2))), [Box(0, 9, 20, 0)])
def test_any_predicate_is_sound(where: Expr, tiles: list[Box]) -> None:
    found = analyse(where)
    assert len(found) <= MOST_ALTERNATIVES
    for box in tiles:
        assert faults(where, found, box) == []


@pytest.mark.slow
@settings(max_examples=150)
@given(combined(OPAQUE | USUAL | comparisons(NUMBERS)), st.lists(BOXES, min_size=1, max_size=2))
def test_opaque_parts_stay_sound(where: Expr, tiles: list[Box]) -> None:
    found = analyse(where)
    for box in tiles:
        assert faults(where, found, box) == []


@settings(max_examples=100)
@given(OPAQUE)
def test_an_opaque_comparison_tells_nothing(where: Expr) -> None:
    unknown = Interval(None, None, None, None, whole=False, exact=False)
    assert analyse(where) == analyse(negate(where)) == (unknown,)
    assert analyse(both(CAUSAL, where)) == (replace(unknown, hi=Var("q1")),)


def test_division_by_zero_is_left_to_the_mask() -> None:
    assert analyse(le(floordiv(K, 0), Q)) == analyse(Param("tree", ("row", "key"), boolean))


@pytest.mark.slow
@settings(max_examples=150)
@given(PREDICATES)
def test_results_use_nothing_but_the_tile(where: Expr) -> None:
    """So that a host or a kernel can compute them before any row or key exists."""
    variables, ops = {Var("q0"), Var("q1"), Var("num_keys"), P}, {"add", "sub", "mul", "floordiv", "max", "min"}
    for i in analyse(where):
        for bound in (i.lo, i.hi, i.whole_lo, i.whole_hi):
            for e in () if bound is None else walk(bound):
                assert (
                    (e.name in ops and e.dtype is i32) if isinstance(e, Op) else isinstance(e, Const) or e in variables
                )


# ---- the checker itself ----------------------------------------------------------------------------------------------

BOX = Box(5, 9, 20, 3)
EXACT_CAUSAL = Interval(None, Var("q1"), None, Var("q0"), whole=True, exact=True)


@pytest.mark.parametrize(
    ("where", "wrong", "said"),
    [
        (CAUSAL, (replace(EXACT_CAUSAL, hi=Var("q0")),), "hidden: [6, 7, 8, 9]"),
        (CAUSAL, (replace(EXACT_CAUSAL, lo=Const(1)),), "hidden: [0]"),
        (CAUSAL, (), "hidden: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"),
        (CAUSAL, (replace(EXACT_CAUSAL, whole_hi=plus(Var("q0"), 1)),), "not whole: [6]"),
        (CAUSAL, (replace(EXACT_CAUSAL, hi=plus(Var("q1"), 1)),), "not exact: [10]"),
        (CAUSAL, (replace(EXACT_CAUSAL, hi=None, exact=False, whole_hi=None),), "not whole: [6, 7, 8"),
        (le(Q, K), (Interval(plus(Var("q0"), 1), None, Var("q1"), None, whole=True, exact=True),), "hidden: [5]"),
        (le(Q, K), (Interval(Var("q0"), None, Var("q0"), None, whole=True, exact=True),), "not whole: [5, 6, 7, 8]"),
    ],
)
def test_the_checker_sees_each_kind_of_fault(where: Expr, wrong: tuple[Interval, ...], said: str) -> None:
    assert faults(where, analyse(where), BOX) == []
    assert any(fault.startswith(said) for fault in faults(where, wrong, BOX))


# ---- forms -----------------------------------------------------------------------------------------------------------


def test_closed_forms() -> None:
    assert analyse(CAUSAL) == (EXACT_CAUSAL,)
    assert analyse(both(le(0, K), le(K, sub(N, 1)))) == analyse(Const(True)) == analyse(le(0, Q))
    start, whole = sub(plus(Var("q0"), 1), P), sub(plus(Var("q1"), 1), P)
    (found,) = analyse(both(CAUSAL, lt(sub(Q, K), P)))
    assert [value(x, BOX.env) for x in (found.lo, found.whole_lo) if x] == [value(x, BOX.env) for x in (start, whole)]


@pytest.mark.parametrize(
    "where",
    [
        Const(False),
        Op("not", (Const(True),)),
        lt(K, 0),
        le(N, K),
        both(CAUSAL, lt(Q, K)),
        both(lt(K, floordiv(Q, 3)), le(floordiv(Q, 3), K)),
        both(CAUSAL, window(0)),
        both(le(N, Q), CAUSAL),
        negate(either(CAUSAL, le(Q, K))),
    ],
)
def test_nothing_is_ever_visible(where: Expr) -> None:
    assert analyse(where) == ()


@pytest.mark.parametrize("where", [either(CAUSAL, both(CAUSAL, lt(K, 4))), both(CAUSAL, le(K, plus(Q, 2)))])
def test_what_adds_nothing_is_dropped(where: Expr) -> None:
    assert analyse(where) == (EXACT_CAUSAL,)


def test_many_alternatives_become_one_interval(seed: int) -> None:
    few = either(*(eq(K, 3 * j) for j in range(1, 5)))
    assert [(i.lo, i.hi) for i in analyse(few)] == [(Const(3 * j), Const(3 * j)) for j in range(1, 5)]
    many = either(*(eq(K, 3 * j) for j in range(1, 7)))
    (hull,) = analyse(many)
    assert (hull.lo, hull.hi, hull.whole, hull.exact) == (Const(3), Const(18), True, False)
    holes = both(CAUSAL, *(op("ne", K, Const(3 * j)) for j in range(9)))
    rest = analyse(holes)
    assert len(rest) <= MOST_ALTERNATIVES
    for box in boxes(seed, 10):
        assert faults(many, (hull,), box) + faults(holes, rest, box) == []
        assert all(box.seen(i) <= set(range(box.q1 + 1)) for i in rest)  # what all alternatives share is not lost


@pytest.mark.parametrize("name", ["q0", "num_keys", "key", "a:b", "_p"])
def test_a_scalar_may_have_any_name(name: str) -> None:
    scalar = Param(name, (), i64)
    assert analyse(le(K, scalar)) == (Interval(None, scalar, None, scalar, whole=True, exact=True),)


def test_sympy_is_imported_here_only() -> None:
    """Everything else starts without waiting for it."""
    folder = Path(__file__).parents[1] / "dsl"
    importers = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(n.split(".")[0] == "sympy" for n in names):
                importers.add(path.name)
    assert importers == {"bounds.py"}


def test_an_analysis_takes_milliseconds() -> None:
    for where in [f(7) for f in ONE_INTERVAL.values()] + [either(*f(7)) for f in UNIONS.values()]:
        spent = []
        for _ in range(5):
            start = time.process_time()
            analyse(where)
            spent.append(time.process_time() - start)
        assert min(spent) < 0.01
