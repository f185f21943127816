# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""Predicates and expressions made at random, as text that means the same to the language and to numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from support.batches import content, normal, place
from support.properties import property_test
from support.reference import NAMED, At, assert_close, attend, flash, log_sum_exp
from support.running import attention
from support.variants import batch, per_row

import tilewright
from tilewright import dsl
from tilewright.dsl import Paged, PerHead, Rows, Scalar, Tensor, op
from tilewright.dsl.schedule import Schedule

pytestmark = pytest.mark.both_targets(slow=True)

Text = st.SearchStrategy[str]


def combine(form: str, *parts: Text) -> Text:
    return st.tuples(*parts).map(lambda p: form.format(*p))


def one_of(form: str, choices: list[Any], *parts: Text) -> Text:
    """The first hole takes one of the choices."""
    return st.tuples(st.sampled_from(choices), *parts).map(lambda p: form.format(*p))


SCHEDULES = st.builds(
    Schedule,
    rows=st.sampled_from([1, 2, 3, 16]),
    heads=st.sampled_from([None, 1]),
    keys=st.sampled_from([1, 2, 3, 7, 16]),
    partitions=st.sampled_from([1, 1, 2, 3]),
    masks=st.sampled_from(["branch", "split", "always"]),
)

# ---- predicates ------------------------------------------------------------------------------------------------------

INTEGERS = st.recursive(
    st.sampled_from(["q", "k", "k", "n", "q - k"]) | st.integers(-6, 14).map(str),
    lambda x: (
        combine("({} + {})", x, x)
        | combine("({} - {})", x, x)
        | one_of("({1} * {0})", [-3, -1, 2, 3], x)
        | one_of("({1} // {0})", [1, 2, 3, 5, -2], x)
        | one_of("({1} % {0})", [2, 3, 5], x)
        | one_of("{0}({1}, {2})", ["maximum", "minimum"], x, x)
    ),
    max_leaves=4,
)
COMPARISONS = one_of("({1} {0} {2})", ["<", "<=", ">", ">=", "==", "!="], st.just("k") | INTEGERS, INTEGERS)
PREDICATES = st.recursive(
    COMPARISONS | st.just("(k <= q)"),
    lambda x: one_of("({1} {0} {2})", ["&", "&", "|", "^"], x, x) | combine("inverted({})", x),
    max_leaves=4,
)
ON_VALUES = {"maximum": dsl.maximum, "minimum": dsl.minimum, "n": dsl.num_keys, "inverted": lambda x: ~as_condition(x)}
ON_ARRAYS: dict[str, Any] = {"maximum": np.maximum, "minimum": np.minimum, "inverted": np.logical_not}


def as_condition(x: Any) -> Any:
    """A comparison of two numbers is Python's own bool, whose ~ is a number."""
    return dsl.where(dsl.pos >= 0, x, x) if isinstance(x, bool) else x


@pytest.mark.slow
@property_test(
    PREDICATES,
    SCHEDULES,
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([1, 3, 4]),
    st.integers(0, 99),
    interpreted=200,
    native=60,
)
@example("((k <= q) ^ (k < 3))", Schedule(rows=2, keys=3, partitions=2), (4, 2), 3, 0)
def test_any_predicate(text: str, schedule: Schedule, heads: tuple[int, int], page_size: int, seed: int) -> None:
    """Whatever the analysis proves of a predicate, what is computed is what it says; all it hides is poison."""
    rng = np.random.default_rng(seed)
    data = content(
        rng, rng.integers(0, 24, 3).tolist(), rng.integers(0, 6, 3).tolist(), heads=heads[0], kv_heads=heads[1]
    )

    def where(q: Any, k: Any) -> Any:
        return as_condition(eval(text, {"q": q, "k": k, **ON_VALUES}))

    def sees(at: At) -> Any:
        return eval(text, {"q": np.int64(at.pos), "k": at.key, "n": np.int64(at.num_keys), **ON_ARRAYS})

    cache = place(data, rng, page_size=page_size, sees=sees)
    out, lse = attention(data.q, data.offsets, cache, where=where, schedule=schedule)
    expected, lse_expected = flash(data.ragged, data.q64, data.keys, data.values, sees, 1.0)
    assert_close(out, expected)
    assert_close(lse, lse_expected)


# ---- expressions -----------------------------------------------------------------------------------------------------

LEAVES = ["s", "other", "position", "keys_place", "scalar", "by_row", "by_head", "by_both", "distance", "by_key"]
CONDITIONS = one_of("({1} {0} 0.3)", ["<", ">"], st.sampled_from(LEAVES)) | one_of(
    "({0} % {1} == 0)", ["k", "q"], st.sampled_from(["2", "3"])
)
NUMBERS = st.recursive(
    st.sampled_from(LEAVES) | st.sampled_from(["0.5", "-1.25", "2.0"]),
    lambda x: (
        one_of("({1} {0} {2})", ["+", "-", "*"], x, x)
        | one_of("{0}({1}, {2})", ["maximum", "minimum"], x, x)
        | one_of("{0}({1})", ["tanh", "absolute", "gauss", "twice"], x)
        | combine("({} / (1.5 + absolute({})))", x, x)
        | combine("where({}, {}, {})", CONDITIONS, x, x)
        | combine("where({} & {}, {}, -1.0)", CONDITIONS, CONDITIONS, x)
    ),
    max_leaves=6,
)
KINDS = ("softmax", "sum", "max", "log_sum", "weights", "sunk")


def on_values(q: Any, k: Any) -> dict[str, Any]:
    return {
        "maximum": dsl.maximum, "minimum": dsl.minimum, "tanh": dsl.tanh, "absolute": abs, "where": dsl.where,
        "gauss": lambda x: dsl.exp(-abs(x)), "twice": lambda x: x * 0.5 + dsl.tanh(x), "q": q, "k": k,
    }  # fmt: skip


ON_ARRAYS |= {
    "tanh": np.tanh, "absolute": np.abs, "where": np.where,
    "gauss": lambda x: np.exp(-np.abs(x)), "twice": lambda x: x * 0.5 + np.tanh(x),
}  # fmt: skip


def made(texts: list[str], kinds: list[str]) -> Any:
    """An operator with an output for each expression, reduced in its way."""

    @op
    def random_program(
        q: Rows["head", "dim"],
        kv: Paged["dim"],
        q2: Rows["head", "dim"],
        scalar: Scalar,
        by_row: Rows,
        by_head: PerHead,
        by_both: Rows["head"],
        table: Tensor["distance"],
        by_key: Tensor["seq", "key"],
    ):
        keys = kv.keys(where=lambda query, key: key <= query)
        s = dsl.dot(q, keys)
        names = {
            "s": s, "other": dsl.dot(q2, keys), "scalar": scalar, "by_row": by_row, "by_head": by_head,
            "by_both": by_both, "by_key": by_key, "distance": table[dsl.pos - dsl.key],
            "position": dsl.to_float(dsl.pos) * 0.25, "keys_place": dsl.to_float(dsl.key) * 0.25,
        }  # fmt: skip
        out = {}
        for n, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
            e = 2.0 * dsl.tanh(eval(text, names | on_values(dsl.pos, dsl.key)) + 0.0 * s)
            reductions: dict[str, Any] = {
                "softmax": lambda e=e: dsl.softmax(e) @ keys.v,
                "sum": lambda e=e: dsl.sum(e, over="key"),
                "max": lambda e=e: dsl.max(e, over="key"),
                "log_sum": lambda e=e: dsl.logsumexp(e),
                "weights": lambda e=e: dsl.weights(e) @ (keys.v * by_head + keys.k),
                "sunk": lambda e=e: (dsl.softmax(e, sink=by_both) @ keys.v) * by_row + dsl.logsumexp(e) - q,
            }
            out[f"out{n}"] = reductions[kind]()
        return out

    return random_program


@pytest.mark.slow
@property_test(
    st.lists(st.tuples(NUMBERS, st.sampled_from(KINDS)), min_size=1, max_size=3),
    SCHEDULES,
    st.integers(0, 99),
    interpreted=120,
    native=40,
)
def test_any_expression(programs: list[tuple[str, str]], schedule: Schedule, seed: int) -> None:
    """However subexpressions are shared, fused, hoisted and written over one another, the values are numpy's."""
    rng = np.random.default_rng(seed)
    data, rows = batch(rng), 15
    given_tensors = {
        "q2": normal(rng, rows, 4, 8), "by_row": normal(rng, rows), "by_head": normal(rng, 4),
        "by_both": normal(rng, rows, 4), "table": normal(rng, 6), "by_key": normal(rng, 5, 16),
    }  # fmt: skip
    leaf = place(data, rng, page_size=3, sees=NAMED["causal"](0)).layer(0)
    texts, kinds = [t for t, _ in programs], [k for _, k in programs]
    arguments = {"q": data.q, "kv": leaf, "scalar": 0.75, **given_tensors}
    found = tilewright.run(made(texts, kinds), arguments, data.offsets, schedule=schedule)
    x = {n: t.double().numpy() for n, t in given_tensors.items()}

    def value(text: str, kind: str, s: Any, v: Any, at: At) -> Any:
        k = np.arange(at.pos + 1)
        rows_of_keys, away = data.keys[at.seq][: at.pos + 1, at.head // 2], at.pos - k
        names = {
            "s": s, "other": rows_of_keys @ x["q2"][at.row, at.head], "scalar": 0.75, "by_row": x["by_row"][at.row],
            "by_head": x["by_head"][at.head], "by_both": x["by_both"][at.row, at.head],
            "by_key": x["by_key"][at.seq, k], "distance": np.where(away < 6, x["table"][np.minimum(away, 5)], 0.0),
            "position": at.pos * 0.25, "keys_place": k * 0.25, "q": np.int64(at.pos), "k": k,
        }  # fmt: skip
        e = 2.0 * np.tanh(eval(text, names | ON_ARRAYS) + 0.0 * s)
        sunk = attend(e, v, x["by_both"][at.row, at.head]) * x["by_row"][at.row]
        return {
            "softmax": attend(e, v),
            "sum": e.sum(),
            "max": e.max(),
            "log_sum": log_sum_exp(e),
            "weights": e @ (v * x["by_head"][at.head] + rows_of_keys),
            "sunk": sunk + log_sum_exp(e) - data.q64[at.row, at.head],
        }[kind]

    for n, (text, kind) in enumerate(programs):
        width = 8 if kind in ("softmax", "weights", "sunk") else None
        expected = per_row(data, lambda s, v, at, text=text, kind=kind: value(text, kind, s, v, at), width)
        assert found[f"out{n}"].dtype == torch.float32
        assert_close(found[f"out{n}"], expected, rtol=1e-4, atol=1e-4)
