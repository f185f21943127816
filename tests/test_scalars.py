"""Every row of the table of scalar operations: all its forms agree, on tiles, on numbers and mixed, at every corner."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tilewright.dsl import bounds
from tilewright.dsl.closed_form import evaluate
from tilewright.dsl.dtypes import DType, Kind, boolean, f32, i32
from tilewright.dsl.expr import Const, Expr, Op, Param, Tile, Var
from tilewright.dsl.interp_values import Array, Frame, Scope, compile_value
from tilewright.dsl.loops import Kernel
from tilewright.dsl.scalars import OPS, Number

INF, NAN, BIG = math.inf, math.nan, 2**31 - 1
SMALL_INTS = (0, 1, -1, 2, -2, 3, 7, -7, 8, 31, -32, 1000, -1000)  # exact in float32
INTS = (*SMALL_INTS, BIG, -BIG, -BIG - 1, 2**40, -(2**40) + 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 7.25, 100.0, -100.0, 1e-30, 3e38, -3e38, INF, -INF, NAN)
BOOLS = (True, False)
KINDS = (f32, i32, boolean)
Values = tuple[Number, ...]


def domain(dtype: DType, mixed: bool) -> tuple[Number, ...]:
    if dtype is boolean:
        return BOOLS
    return FLOATS if dtype is f32 else SMALL_INTS if mixed else INTS


def defined(name: str, args: Values) -> bool:
    """Whether an operation has a value: integers neither overflow 64 bits, nor are divided by zero or shifted back."""
    if name in ("floordiv", "mod") and args[1] == 0:
        return False
    if name in ("shl", "shr") and not 0 <= args[1] < 32:
        return False
    if name == "int" and isinstance(args[0], float):
        return abs(args[0]) < 2**31
    if name == "bits" and isinstance(args[0], float):
        return not math.isnan(args[0])  # many bit patterns
    if name == "from_bits":
        return -(2**31) <= args[0] < 2**31
    out = OPS[name].number(*args)
    return not isinstance(out, int) or abs(out) < 2**63


def signatures() -> Iterator[tuple[str, tuple[DType, ...]]]:
    for name, row in OPS.items():
        for kinds in itertools.product(KINDS, repeat=row.arity):
            if row.rule(kinds) is not None and (name, kinds) not in SENSELESS:
                yield name, kinds


# Operations on anything, but only meant for one kind.
SENSELESS = {("bits", (i32,)), ("bits", (boolean,)), ("from_bits", (f32,)), ("from_bits", (boolean,))}
SIGNATURES = list(signatures())
IDS = [f"{name}-{'-'.join(k.name for k in kinds)}" for name, kinds in SIGNATURES]


def arguments(name: str, kinds: tuple[DType, ...]) -> list[Values]:
    mixed = len({k.kind for k in kinds if k is not boolean}) > 1 or name == "div"
    every = itertools.product(*(domain(k, mixed) for k in kinds))
    return [args for args in every if defined(name, args)]


def tile(values: Values, dtype: DType) -> Array:
    if dtype is f32:
        return torch.tensor([values], dtype=torch.float32)
    return np.array([values], np.bool_) if dtype is boolean else np.array([values], np.int64)


def run(e: Expr, tiles: dict[str, Array], count: int, consumed: frozenset[str] = frozenset()) -> list[Number]:
    """What the interpreter makes of an expression over tiles [1, count], or over numbers alone."""
    scope = Scope(Kernel("k", (), (), (), ()), {}, {"key": count}, frozenset())
    found = compile_value(e, ("key",), scope, consumed).run(Frame({}, {}, {}, {}, dict(tiles)))
    flat = [found] if isinstance(found, int | float) else torch.as_tensor(found).reshape(-1).tolist()
    return flat if len(flat) == count else flat * count


def rounded(x: Number) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def expect(name: str, found: list[Number], args: list[Values], result: DType) -> None:
    for x, a in zip(found, args, strict=True):
        wanted = OPS[name].number(*a)
        if result.kind is Kind.FLOAT:  # numbers have 64 bits until a tile takes them
            x, wanted = rounded(x), rounded(wanted)
        if isinstance(wanted, float) and math.isnan(wanted):
            assert math.isnan(x), (name, a, x)
        else:
            assert x == pytest.approx(wanted, rel=2e-6, abs=1e-37), (name, a, x, wanted)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "kinds"), SIGNATURES, ids=IDS)
def test_tiles_are_numbers(name: str, kinds: tuple[DType, ...]) -> None:
    """On whole tiles an operation gives, at every element, what it gives on numbers; so it does overwriting its own."""
    args = arguments(name, kinds)
    assert len(args) > 1
    result = OPS[name].rule(kinds)
    assert result is not None
    columns = list(zip(*args, strict=True))
    names = [f"x{n}" for n in range(len(kinds))]

    def tiles() -> dict[str, Array]:
        return {n: tile(c, k) for n, c, k in zip(names, columns, kinds, strict=True)}

    e = Op(name, tuple(Tile(n, ("key",), k) for n, k in zip(names, kinds, strict=True)))
    assert e.dtype == result
    expect(name, run(e, tiles(), len(args)), args, result)
    for n in names:
        expect(name, run(e, tiles(), len(args), frozenset({n})), args, result)
    expect(name, run(e, tiles(), len(args), frozenset(names)), args, result)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "kinds"), SIGNATURES, ids=IDS)
def test_numbers_beside_tiles(name: str, kinds: tuple[DType, ...]) -> None:
    """With a number for any of its operands, and for all of them."""
    args = arguments(name, kinds)
    result = OPS[name].rule(kinds)
    assert result is not None
    for place in range(len(kinds)):
        for value in {repr(a[place]): a[place] for a in args}.values():  # 0.0 and -0.0, 1 and True are two
            some = [a for a in args if repr(a[place]) == repr(value)]
            columns = list(zip(*some, strict=True))
            operands = [Const(value) if n == place else Tile(f"x{n}", ("key",), k) for n, k in enumerate(kinds)]
            tiles = {f"x{n}": tile(c, k) for n, (c, k) in enumerate(zip(columns, kinds, strict=True)) if n != place}
            for consumed in (frozenset[str](), frozenset(tiles)):
                found = run(Op(name, tuple(operands)), {n: _copy(t) for n, t in tiles.items()}, len(some), consumed)
                expect(name, found, some, result)
    for a in args[:: 1 + len(args) // 50]:
        expect(name, run(Op(name, tuple(map(Const, a))), {}, 1), [a], result)


def _copy(t: Array) -> Array:
    return t.clone() if isinstance(t, torch.Tensor) else t.copy()


# Closed forms are of integers.
CLOSED = [
    (name, kinds)
    for name, kinds in SIGNATURES
    if f32 not in kinds and OPS[name].rule(kinds) is not f32 and name not in ("int", "bits", "from_bits")
]


@pytest.mark.parametrize(("name", "kinds"), CLOSED)
def test_closed_forms(name: str, kinds: tuple[DType, ...]) -> None:
    """Operations on integers evaluate for many sequences at once."""
    args = arguments(name, kinds)
    columns = zip(*args, strict=True)
    known = {
        f"x{n}": np.array(c, np.bool_ if k is boolean else np.int64)
        for n, (c, k) in enumerate(zip(columns, kinds, strict=True))
    }
    found = evaluate(Op(name, tuple(Var(n) for n in known)), known)  # type: ignore[arg-type]  # conditions too
    assert found.tolist() == [OPS[name].number(*a) for a in args]


def test_the_signs_of_division() -> None:
    """Quotients round towards minus infinity and remainders have the divisor's sign, in every form."""
    expected = [(-7, 3, -3, 2), (7, -3, -3, -2), (-7, -3, 2, -1), (7, 3, 2, 1), (-6, 3, -2, 0), (-1, 1000, -1, 999)]
    for a, b, quotient, remainder in expected:
        assert (OPS["floordiv"].number(a, b), OPS["mod"].number(a, b)) == (quotient, remainder)
        both = {"a": np.array([a]), "b": np.array([b])}
        for name, wanted in (("floordiv", quotient), ("mod", remainder)):
            assert evaluate(Op(name, (Var("a"), Var("b"))), both).tolist() == [wanted]
            tiles: dict[str, Array] = {n: x.reshape(1, 1) for n, x in both.items()}
            e = Op(name, (Tile("a", ("key",), i32), Tile("b", ("key",), i32)))
            assert run(e, tiles, 1) == [wanted]


ANALYSED = {"add", "sub", "mul", "floordiv"}


@pytest.mark.parametrize("name", [n for n, row in OPS.items() if row.arity == 2 and row.rule((i32, i32)) is i32])
def test_bounds_agree(name: str) -> None:
    """What the analysis of predicates takes apart means the same when it is put together again; the rest is opaque."""
    x, y = Param("x", (), i32), Param("y", (), i32)
    taken_apart = set()
    for c in (-5, -2, -1, 1, 2, 3, 7):
        for e in (
            Op(name, (x, Const(c))),
            Op(name, (Const(c), x)),
            Op(name, (x, y)),
            Op(name, (Op("sub", (x, y)), Const(c))),
        ):
            try:
                again = bounds._expr(bounds._sum(e))
            except bounds._Opaque:
                continue
            taken_apart.add(name)
            for a, b in itertools.product(SMALL_INTS, repeat=2):
                known = {"x": np.array([a]), "y": np.array([b])}
                assert evaluate(again, known).tolist() == evaluate(e, known).tolist(), (e, a, b)
    assert taken_apart == ({name} & ANALYSED)


def test_the_table_is_complete() -> None:
    """Each row has the arity of its meaning and a function of torch or a form of the interpreter's own."""
    own = {"float", "int", "bits", "from_bits"}
    for name, row in OPS.items():
        assert name in own or hasattr(torch, row.torch), name
        assert row.infix is None or row.arity == 2
        assert any(row.rule(kinds) is not None for kinds in itertools.product(KINDS, repeat=row.arity)), name
    assert OPS["add"].number is operator.add
