# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""Fingerprints say what an operator means: equal for every way to write it down, different for everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import assert_close, flash
from support.variants import CAUSAL, batch, run

from tilewright.dsl import Const, Paged, PerHead, Rows, Scalar, dot, f32, i32, op, pos, softmax
from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Schedule

BASE = """
from math import inf
from tilewright.dsl import *
from tilewright.dsl.value import reduce_over

@op
def attention(q: Rows["head", "dim"], kv: Paged["dim"], sink: PerHead[f32] | None, scale: Scalar[f32], n: Scalar[i32]):
    keys = kv.keys(where=lambda query, k: (k <= query) & (query - k < 5))
    scores = dot(q, keys) * scale
    out = softmax(scores + 0.5 * scores * scores, sink=sink) @ keys.v
    total = sum(where(scores > 0.0, 1, 0), over="key")
    return {"out": out, "lse": lse(out), "total": total}
"""


def declared(text: str, name: str = "attention", file: str = "author.py", **constants: object) -> str:
    """The fingerprint of the operator that a module of this text declares."""
    module: dict[str, Any] = {"__name__": "author"}
    exec(compile(text, file, "exec"), module)
    operator = module[name]
    assert isinstance(operator, Operator)
    return operator.trace(**constants).fingerprint


def edited(*edits: tuple[str, str]) -> str:
    text = BASE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


SAME: dict[str, str] = {
    "comments and blank lines": edited(("    scores =", "\n    # a comment\n    scores =")),
    "names of locals": edited(("keys", "rows"), ("kv.rows", "kv.keys"), ("scores", "s"), ("query", "a")),
    "a docstring": edited(("    keys =", '    """What it does."""\n    keys =')),
    "statements elsewhere": edited(("    out = softmax", "    unused = exp(scores)\n    out = softmax")),
    "an unused key source": edited(
        ("    keys =", "    other = kv.keys()\n    dead = softmax(dot(q, other)) @ other.v\n    keys =")
    ),
    "order of computing": edited(
        ('    total = sum(where(scores > 0.0, 1, 0), over="key")\n', ""),
        ("    out = softmax", '    total = sum(where(scores > 0.0, 1, 0), over="key")\n    out = softmax'),
    ),
    "one expression for two": edited(("0.5 * scores * scores", "0.5 * (dot(q, keys) * scale) * scores")),
    "a helper": edited(
        (
            "    scores = dot(q, keys) * scale",
            "    def helper(x):\n        return x * scale\n\n    scores = helper(dot(q, keys))",
        )
    ),
}
OTHER: dict[str, str] = {
    "a constant of the predicate": edited(("< 5", "< 6")),
    "a comparison": edited(("k <= query", "k < query")),
    "an operation of the predicate": edited((") & (", ") | (")),
    "no predicate": edited(("where=lambda query, k: (k <= query) & (query - k < 5)", "")),
    "a constant of the scores": edited(("0.5 *", "0.25 *")),
    "an integer for a float": edited(("where(scores > 0.0, 1, 0)", "where(scores > 0.0, 1.0, 0.0)")),
    "an operation of the scores": edited(("scores + 0.5", "scores - 0.5")),
    "operands the other way round": edited(("scores + 0.5 * scores * scores", "0.5 * scores * scores - scores")),
    "a reduction": edited(("sum(where(scores > 0.0, 1, 0)", "max(where(scores > 0.0, 1, 0)")),
    "a reducer": edited(
        ("softmax(scores + 0.5 * scores * scores, sink=sink)", "weights(scores)"), (', "lse": lse(out)', "")
    ),
    "values that are keys": edited(("@ keys.v", "@ keys.k")),
    "no sink in use": edited((", sink=sink", "")),
    "a feature axis": edited(('Rows["head", "dim"]', 'Rows["head", "d"]'), ('Paged["dim"]', 'Paged["d"]')),
    "narrower values": edited(('Paged["dim"]', 'Paged["dim", "value_dim"]')),
    "the axes of a parameter": edited(("sink: PerHead[f32]", 'sink: Rows["head", f32]')),
    "the dtype of a parameter": edited(("sink: PerHead[f32]", "sink: PerHead[bf16]")),
    "the name of a parameter": edited(("scale", "factor")),
    "a scalar in place of a constant": edited(("< 5", "< n")),
    "the name of an output": edited(('"total"', '"count"')),
    "an output less": edited((', "total": total', "")),
    "outputs in another order": edited(
        ('{"out": out, "lse": lse(out), "total": total}', '{"out": out, "total": total, "lse": lse(out)}')
    ),
    "a print": edited(("    return", "    print(out)\n    return")),
    "pooled keys": edited(("(query - k < 5)", "(query - k < 5), pool=2")),
}
REDUCER = """
from tilewright.dsl import *
from tilewright.dsl.value import reduce_over

total = lambda x: reduce_over("sum", x, "key")
REDUCER = Reducer(
    "name", {"x": 0.0}, {"sum": StateOf(0.0, ("x",))},
    step=lambda s, x: {"sum": s["sum"] + total(x["x"])},
    merge=lambda s, o: {"sum": s["sum"] + o["sum"]},
    finish=lambda s, _: {"out": s["sum"]},
)

@op
def attention(q: Rows["head", "dim"], kv: Paged["dim"]):
    return fold(REDUCER, {"x": dot(q, kv.keys(where=lambda q, k: k <= q))})["out"]
"""
REDUCERS = {
    "what an unseen key contributes": ('{"x": 0.0}', '{"x": 1.0}'),
    "nothing masked": ('{"x": 0.0}', '{"x": None}'),
    "the start of a state": ('StateOf(0.0, ("x",))', 'StateOf(1.0, ("x",))'),
    "step": ('s["sum"] + total(x["x"])', 's["sum"] - total(x["x"])'),
    "merge": ('s["sum"] + o["sum"]', 's["sum"] - o["sum"]'),
    "finish": ('"out": s["sum"]', '"out": s["sum"] * 2.0'),
}


@pytest.mark.parametrize("name", SAME)
def test_how_it_is_written_does_not_matter(name: str) -> None:
    """Comments, names, helpers, files and the order of computing leave no trace."""
    assert declared(SAME[name], file=f"/elsewhere/{name}.py") == declared(BASE)


def test_the_operators_own_name_does_not_matter() -> None:
    """Two names for one operator share everything compiled."""
    assert declared(BASE.replace("def attention", "def other"), "other") == declared(BASE)
    renamed = REDUCER.replace('"name"', '"another name"')
    assert declared(renamed) == declared(REDUCER)


def test_everything_that_is_meant_matters() -> None:
    """Each constant, comparison, operation, reducer, axis, dtype, name of a parameter or an output."""
    assert len({declared(BASE), *map(declared, OTHER.values())}) == 1 + len(OTHER)
    assert all(old in REDUCER for old, _ in REDUCERS.values())
    found = {declared(REDUCER), *(declared(REDUCER.replace(*edit)) for edit in REDUCERS.values())}
    assert len(found) == 1 + len(REDUCERS)


def test_an_optional_operand_left_out_matters() -> None:
    """Without a sink it is another operator."""
    assert declared(BASE, sink=None) != declared(BASE)


@op
def by_constants(q: Rows["head", "dim"], kv: Paged["dim"], *, factors: Const, window: Const = 3):
    keys = kv.keys(where=lambda query, key: query - key < window)
    return softmax(dot(q, keys) * factors[0]) @ keys.v


def test_constants_matter_with_their_types() -> None:
    """2 and 2.0 are two constants, in tuples too; the order of asking changes nothing."""
    given: list[Any] = [(2,), (2.0,), (3,), (2.5,)]
    found = [by_constants.trace(factors=f).fingerprint for f in given]
    assert len(set(found)) == len(given)
    assert [by_constants.trace(factors=f).fingerprint for f in reversed(given)] == found[::-1]
    assert by_constants.trace(factors=(2,), window=4).fingerprint != found[0]
    assert by_constants.trace(factors=[2]).fingerprint == found[0]  # an unhashable constant


# ---- parameters that are called like something else ------------------------------------------------------------------


def limited(by_position: bool) -> Operator:
    at = pos

    @op
    def limited(q: Rows["head", "dim"], kv: Paged["dim"], pos: Scalar[i32]):
        keys = kv.keys(where=lambda query, key: key <= (at if by_position else pos))
        return softmax(dot(q, keys)) @ keys.v

    return limited


def shared(twice: bool) -> Operator:
    @op
    def shared(q: Rows["head", "dim"], kv: Paged["dim"], s0: Scalar[f32]):
        keys = kv.keys(where=lambda query, key: key <= query)
        s = dot(q, keys) * 0.5
        return softmax(s * s + (s if twice else s0)) @ keys.v

    return shared


def sunk(swap: bool) -> Operator:
    @op
    def sunk(q: Rows["head", "dim"], kv: Paged["dim"], m: PerHead, l: PerHead):  # noqa: E741
        keys = kv.keys(where=lambda query, key: key <= query)
        return softmax(dot(q, keys), sink=l if swap else m) @ keys.v

    return sunk


@pytest.mark.parametrize("make", [limited, shared, sunk])
def test_parameters_may_be_called_like_coordinates_and_states(make: Callable[[bool], Operator]) -> None:
    """A parameter that has the name of a coordinate, of a printed subexpression or of a state is not taken for it."""
    assert make(True).trace().fingerprint != make(False).trace().fingerprint


def test_two_operators_declared_at_one_place_stay_two(rng: np.random.Generator) -> None:
    """A factory's operators share file and line: each runs its own program."""
    data = batch(rng)
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)
    assert_close(run(limited(True), data, rng, Schedule(), pos=0)["out"], expected)
    first, _ = flash(data.ragged, data.q64, data.keys, data.values, lambda at: at.key <= 0, 1.0)
    assert_close(run(limited(False), data, rng, Schedule(), sees=lambda at: at.key <= 0, pos=0)["out"], first)


def test_a_parameter_like_a_state_computes(rng: np.random.Generator) -> None:
    """Names of the author's parameters and of the reducer's states do not meet in a nest."""
    data, sinks = batch(rng), torch.tensor([0.0, 1.0, -1.0, 2.0])
    found = run(sunk(False), data, rng, Schedule(keys=3, partitions=2), m=sinks, l=sinks * 0)["out"]
    assert_close(found, flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0, sinks.tolist())[0])


# ---- processes -------------------------------------------------------------------------------------------------------

ELSEWHERE = """
import sys
sys.path.insert(0, {path!r})
from test_fingerprint import BASE, OTHER, declared
print(declared(BASE), *map(declared, OTHER.values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_processes_agree(seed: str) -> None:
    """Neither the hash seed nor the process enters."""
    code = ELSEWHERE.format(path=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [declared(BASE), *map(declared, OTHER.values())]
