"""Which keys a tile of rows can see: closed forms, from SymPy, in the tile's first and last position.

A predicate becomes a disjunction of conjunctions of integer comparisons. Each comparison is solved for the key, which
gives a bound X(q) for one row; then q runs over the tile. Facts about all rows are proven from 0 <= q < num_keys and
u - (d-1)/d <= floor(u) <= u. What cannot be taken apart is opaque: it bounds nothing, and is never an error.

Importing SymPy takes longer than everything else in the compiler, so nothing imports this module before it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import gcd
from typing import Literal, TypeAlias

import sympy as sp

from .algebra import add, floordiv, maximum, minimum, mul, op, sub
from .dtypes import DTYPES, Kind
from .expr import Const, Coord, Expr, Op, Param, Var


@dataclass(frozen=True)
class Interval:
    """Keys that rows at positions q0..q1 see through one alternative of a predicate; empty where lo > hi."""

    lo: Expr | None  # first key that some row may see; None: no lower bound (0)
    hi: Expr | None  # last key, inclusive; None: no upper bound (num_keys - 1)
    whole_lo: Expr | None  # with `whole`: inside [whole_lo, whole_hi] every row sees every key; None: unbounded there
    whole_hi: Expr | None
    whole: bool  # False: unknown which keys every row sees, so the mask is always evaluated
    exact: bool  # proven: every key of [max(lo, 0), min(hi, num_keys - 1)] is seen by at least one row of the tile


LISTED = (Interval(None, None, None, None, whole=False, exact=True),)  # of a list: nothing is known before it is read
MOST_ALTERNATIVES = 4
_MOST_PRODUCTS = 32  # alternatives that an `and` of two `or`s may reach; then only what all of a side share is kept


def analyse(where: Expr, *, own_keys: bool = True) -> tuple[Interval, ...]:
    """Alternatives, which may overlap; their union covers everything visible. () means that nothing ever is.

    own_keys: keys are those of the sequence, 0..num_keys - 1. Otherwise they are of another cache, whose number is not
    known here, so that nothing follows from a key being below num_keys.
    """
    alternatives = _alternatives(where, True, own_keys)
    found = tuple(dict.fromkeys(i for a in alternatives if (i := _interval(a)) is not None))
    return found if len(found) <= MOST_ALTERNATIVES else (_hull(found),)


# ---- integer sums: the form in which SymPy holds every operand -------------------------------------------------------

# A sum of symbols and FloorDiv terms with integer factors. SymPy's own `floor` costs a millisecond each and keeps the
# fraction unreduced, so FloorDiv is an uninterpreted function of numerator and denominator, made by `_floordiv` alone.
Sum: TypeAlias = sp.Expr
FloorDiv = sp.Function("FloorDiv", integer=True)

K, Q, N, Q0, Q1 = sp.symbols("key pos num_keys q0 q1", integer=True)
_COORDS: dict[Expr, Sum] = {Coord("key", ("key",)): K, Coord("pos", ("row",)): Q, Coord("num_keys"): N}
_VARS: dict[Sum, Expr] = {Q0: Var("q0"), Q1: Var("q1"), N: Var("num_keys")}


class _Opaque(Exception):
    """This comparison cannot be taken apart."""


def _terms(e: Sum) -> dict[Sum, int]:
    """Integer factor of every symbol and FloorDiv, and of 1."""
    return {term: int(factor) for term, factor in e.as_coefficients_dict().items()}


def _floordiv(n: Sum, d: int) -> Sum:
    """floor(n / d) in one form: whole multiples outside, lowest terms inside, a floor of a floor made one."""
    n, d = (n, d) if d > 0 else (-n, -d)
    terms = _terms(n)
    offset = terms.pop(sp.S.One, 0)
    out = sp.Add(offset // d, *(t * (c // d) for t, c in terms.items() if c % d == 0))
    rest = {t: c for t, c in terms.items() if c % d}
    if not rest:
        return out
    common = gcd(d, *rest.values())
    d, n = d // common, sp.Add(offset % d // common, *(t * (c // common) for t, c in rest.items()))
    for t, c in rest.items():
        if t.func is FloorDiv and c == common:
            m, e = t.args  # floor((floor(m/e) + x) / d) = floor((m + e*x) / (d*e)) for an integer x
            return out + _floordiv(m + e * (n - t), d * int(e))
    return out + FloorDiv(n, d)


def _sum(e: Expr) -> Sum:
    match e:
        case Const(bool()):
            raise _Opaque
        case Const(int() as v):
            return sp.Integer(v)
        case Coord() if e in _COORDS:
            return _COORDS[e]
        case Param(name, (), dtype, ()) if dtype.kind is Kind.INT:
            return sp.Symbol(f"{name}:{dtype}", integer=True)  # the colon: K, Q and the rest have none
        case Op("add", (a, b)):
            return _sum(a) + _sum(b)
        case Op("sub", (a, b)):
            return _sum(a) - _sum(b)
        case Op("mul", (a, b)):
            x, y = _sum(a), _sum(b)
            if x.is_Integer or y.is_Integer:
                return x * y
        case Op("floordiv", (a, b)):
            n, d = _sum(a), _sum(b)
            if d.is_Integer and d != 0:
                return _floordiv(n, int(d))
    raise _Opaque


def _expr(e: Sum) -> Expr:
    """Back to an expression: what is added, what is subtracted, then the constant, where `add` can fold it."""
    terms = _terms(e)
    offset = terms.pop(sp.S.One, 0)
    added = [mul(_term(t), c) for t, c in terms.items() if c > 0]
    taken = [mul(_term(t), -c) for t, c in terms.items() if c < 0]
    if not added:
        added, offset = [Const(offset)], 0
    return add(reduce(sub, taken, reduce(add, added)), offset)


def _term(t: Sum) -> Expr:
    if t.func is FloorDiv:
        return floordiv(_expr(t.args[0]), int(t.args[1]))
    if t in _VARS:
        return _VARS[t]
    name, _, dtype = t.name.rpartition(":")
    return Param(name, (), DTYPES[dtype])


# ---- facts about a bound X(q) ----------------------------------------------------------------------------------------


def _at_most(e: Sum) -> int | None:
    """A number that `e` never exceeds at any row, 0 <= q < num_keys; None if there is none or it cannot be found."""
    terms = e.as_coefficients_dict()
    for t, c in terms.items():
        if t.func is FloorDiv:
            n, d = t.args
            return _at_most(e - c * t + c * (n if c > 0 else n - d + 1) / d)
    offset, in_q, in_n = (terms.pop(t, 0) for t in (sp.S.One, Q, N))
    # With num_keys = q + 1 + (something not negative) the remaining factors must not be positive.
    if any(terms.values()) or in_n > 0 or in_q + in_n > 0:
        return None
    return int((offset + in_n) // 1)  # `e` is an integer


def _never_above(a: Sum, b: Sum) -> bool:
    """Proven: a <= b at every row."""
    most = _at_most(a - b)
    return most is not None and most <= 0


def _step(e: Sum) -> tuple[int, int]:
    """Least and greatest possible e(q+1) - e(q)."""
    low = high = 0
    for t, c in _terms(e).items():
        a, b = (1, 1) if t == Q else (0, 0)
        if t.func is FloorDiv:
            d = int(t.args[1])
            a, b = _step(t.args[0])
            a, b = a // d, -(-b // d)
        low, high = low + min(a * c, b * c), high + max(a * c, b * c)
    return low, high


def _trend(bounds: list[Sum]) -> tuple[bool, bool]:
    """Proven: all of them rise with q, or stay; all fall, or stay."""
    steps = [_step(e) for e in bounds]
    return all(low >= 0 for low, _ in steps), all(high <= 0 for _, high in steps)


def _substitute(e: Sum, rising: Sum, falling: Sum) -> Sum:
    """`e` with `rising` for q in what grows with it, `falling` in the rest."""
    out = []
    for t, c in _terms(e).items():
        up, down = (rising, falling) if c > 0 else (falling, rising)
        if t.func is FloorDiv:
            t = _floordiv(_substitute(t.args[0], up, down), int(t.args[1]))
        out.append(c * (up if t == Q else t))
    return sp.Add(*out)


def _at(e: Sum, q: Sum) -> Sum:
    return _substitute(e, q, q)


def _extreme(e: Sum, greatest: bool) -> Sum:
    """Greatest or least value over q0..q1: attained if `e` rises or falls, else a bound, term by term."""
    rises, falls = _trend([e])
    best, worst = (Q1, Q0) if greatest else (Q0, Q1)
    return _at(e, best) if rises else _at(e, worst) if falls else _substitute(e, best, worst)


# ---- a predicate as alternatives of bounds ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bound:
    """key >= at, key <= at, or "row": at <= 0, whatever the key is. "opaque" says nothing."""

    side: Literal["lo", "hi", "row", "opaque"]
    at: Sum


_Alternative: TypeAlias = tuple[_Bound, ...]  # all of these
_Alternatives: TypeAlias = tuple[_Alternative, ...]  # any of these
_OPAQUE = _Bound("opaque", sp.S.Zero)
_ALWAYS: _Alternatives = ((),)
_NEVER: _Alternatives = ()
_UNKNOWN = (sp.S.One, sp.S.Zero)  # a comparison that is never proven


def _alternatives(e: Expr, holds: bool, own: bool) -> _Alternatives:
    """Where `e` is `holds`: disjunctive normal form, `not` pushed down to the comparisons."""
    match e, holds:
        case Const(bool(v)), _:
            return _ALWAYS if v is holds else _NEVER
        case Op("not", (a,)), _:
            return _alternatives(a, not holds, own)
        case (Op("and", (a, b)), True) | (Op("or", (a, b)), False):
            return _both(_alternatives(a, holds, own), _alternatives(b, holds, own))
        case (Op("or", (a, b)), True) | (Op("and", (a, b)), False):
            return _either(_alternatives(a, holds, own), _alternatives(b, holds, own))
        case (Op("le", (a, b)), True) | (Op("lt", (b, a)), False):
            return _compare(a, b, 0, own)
        case (Op("lt", (a, b)), True) | (Op("le", (b, a)), False):
            return _compare(a, b, 1, own)
        case (Op("eq", (a, b)), True) | (Op("ne", (a, b)), False):
            return _both(_compare(a, b, 0, own), _compare(b, a, 0, own))
        case (Op("ne", (a, b)), True) | (Op("eq", (a, b)), False):
            return _either(_compare(a, b, 1, own), _compare(b, a, 1, own))
    return ((_OPAQUE,),)


def _both(x: _Alternatives, y: _Alternatives) -> _Alternatives:
    if len(x) * len(y) > _MOST_PRODUCTS:
        shared = (b for side in (x, y) for b in side[0] if all(b in a for a in side))
        return ((*shared, _OPAQUE),)
    return _either(tuple(tuple(dict.fromkeys(a + b)) for a, b in product(x, y)), _NEVER)


def _either(x: _Alternatives, y: _Alternatives) -> _Alternatives:
    """All of them, but those that ask for everything another one asks for, and more."""
    distinct = {frozenset(a): a for a in x + y}
    return tuple(a for s, a in distinct.items() if not any(other < s for other in distinct))


def _compare(a: Expr, b: Expr, gap: int, own: bool) -> _Alternatives:
    """a + gap <= b."""
    match a, b:
        case (Op("max", (x, y)), _):
            return _both(_compare(x, b, gap, own), _compare(y, b, gap, own))
        case (_, Op("min", (x, y))):
            return _both(_compare(a, x, gap, own), _compare(a, y, gap, own))
        case (Op("min", (x, y)), _):
            return _either(_compare(x, b, gap, own), _compare(y, b, gap, own))
        case (_, Op("max", (x, y))):
            return _either(_compare(a, x, gap, own), _compare(a, y, gap, own))
    try:
        bound = _solve(_sum(a) - _sum(b) + gap)
    except _Opaque:
        return ((_OPAQUE,),)
    if not own and bound.side == "row":
        return ((_OPAQUE,),)
    # The same for all keys of all rows: the comparison is a constant. Only own keys are known to end at num_keys.
    always, never = {
        "lo": ((bound.at, sp.S.Zero), (N, bound.at) if own else _UNKNOWN),
        "hi": ((N - 1, bound.at) if own else _UNKNOWN, (bound.at, sp.S.NegativeOne)),
        "row": ((bound.at, sp.S.Zero), (sp.S.One, bound.at)),
    }[bound.side]
    return _ALWAYS if _never_above(*always) else _NEVER if _never_above(*never) else ((bound,),)


def _solve(e: Sum) -> _Bound:
    """`e` <= 0, solved for the key."""
    terms = _terms(e)
    with_key = [t for t in terms if t.has(K)]
    if not with_key:
        return _Bound("row", e)
    if len(with_key) > 1:
        raise _Opaque
    t, c = with_key[0], terms[with_key[0]]
    x = _floordiv(c * t - e, c) if c > 0 else _floordiv(e - c * t - c - 1, -c)  # t <= x, or t >= x (rounded up)
    if t == K:
        return _Bound("hi" if c > 0 else "lo", x)
    n, d = t.args  # floor(n/d) <= x means n <= d*x + d-1; floor(n/d) >= x means n >= d*x
    return _solve(n - d * x - d + 1 if c > 0 else d * x - n)


# ---- the rows of a tile ----------------------------------------------------------------------------------------------


def _interval(bounds: _Alternative) -> Interval | None:
    """What rows q0..q1 see through all of `bounds`; None if that is proven to be nothing."""
    lows = _tightest([b.at for b in bounds if b.side == "lo"], 1)
    highs = _tightest([b.at for b in bounds if b.side == "hi"], -1)
    rows = [b.at for b in bounds if b.side == "row"]
    if any(_never_above(high + 1, low) for low, high in product(lows, highs)):
        return None

    def span(whole: bool) -> tuple[Expr | None, Expr | None]:
        """What every row sees, or any. A row that fails a condition of its own sees nothing: it starts at num_keys."""
        failed = [minimum(maximum(_expr(_extreme(e, whole)), 0), 1) for e in rows]
        starts = [*(_expr(_extreme(x, whole)) for x in lows), *(mul(_VARS[N], f) for f in failed)]
        return _fold("max", starts), _fold("min", [_expr(_extreme(x, not whole)) for x in highs])

    if _OPAQUE in bounds:
        return Interval(*span(False), None, None, whole=False, exact=False)
    return Interval(*span(False), *span(True), whole=True, exact=_exact(lows, highs, rows))


def _tightest(bounds: list[Sum], sign: int) -> list[Sum]:
    """Without those that another bound implies."""
    for x in bounds:
        others = [y for y in bounds if y != x]
        if any(_never_above(sign * x, sign * y) for y in others):
            bounds = others  # two that imply each other do not both go
    return bounds


def _exact(lows: list[Sum], highs: list[Sum], rows: list[Sum]) -> bool:
    """Proven: each key between the extremes is seen by some row.

    A row condition counts as a lower bound: num_keys where it fails. If no lower bound rises and no upper bound falls,
    the last row sees all of it; mirrored, the first. If all rise, take a key x between the extremes and the last row q
    whose lower bounds are <= x. Either q = q1, which ends at x or later, or some lower bound that is not constant
    exceeds x at q+1; if none of these exceeds an upper bound at q by more than one, q ends at x or later. If all fall,
    from the other end. Cutting keys off at 0 and num_keys - 1 changes nothing: x is any key that is left.
    """
    rise, fall = _trend([*lows, *rows])
    ends_rise, ends_fall = _trend(highs)
    if (fall and ends_rise) or (rise and ends_fall):
        return True
    if any(e.has(Q) for e in rows):
        return False
    pairs = [(low, high) for low, high in product(lows, highs) if low.has(Q) and high.has(Q)]
    if rise and ends_rise:
        return all(_never_above(_at(low, Q + 1), high + 1) for low, high in pairs)
    return fall and ends_fall and all(_never_above(low, _at(high, Q + 1) + 1) for low, high in pairs)


def _hull(found: tuple[Interval, ...]) -> Interval:
    """One interval around them all; its whole keys are those of the first that has any."""
    inner = next((i for i in found if i.whole), found[0])
    return replace(inner, lo=_fold("min", [i.lo for i in found]), hi=_fold("max", [i.hi for i in found]), exact=False)


def _fold(name: str, bounds: Sequence[Expr | None]) -> Expr | None:
    """One bound of several, None if there is none or one is None; constants first, so that they fold into one."""
    known = sorted((b for b in dict.fromkeys(bounds) if b is not None), key=lambda e: not isinstance(e, Const))
    return reduce(lambda a, b: op(name, a, b), known) if known and None not in bounds else None
