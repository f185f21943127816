# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""Several reductions over keys in one operator, reductions of the author's own, and outputs of any axes."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import normal, place
from support.reference import NAMED, At, assert_close, attend, flash, log_sum_exp
from support.running import each
from support.variants import CAUSAL, TOTAL, batch, per_row, run

import tilewright
from tilewright.dsl import (
    Paged,
    PerHead,
    Reducer,
    Rows,
    StateOf,
    Tensor,
    Value,
    dot,
    exp,
    fold,
    head,
    key,
    kv_head,
    log,
    logsumexp,
    lse,
    max,
    num_keys,
    op,
    pos,
    seq,
    sigmoid,
    softmax,
    sqrt,
    sum,
    where,
)
from tilewright.dsl.dtypes import DTYPES
from tilewright.dsl.schedule import Schedule
from tilewright.dsl.value import reduce_over

pytestmark = pytest.mark.both_targets(slow=True)

# ---- several reductions ----------------------------------------------------------------------------------------------


@op
def several(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    s = dot(q, keys)
    return {
        "log_sum": logsumexp(s),
        "total": sum(s, over="key"),
        "top": max(s, over="key"),
        "positive": sum(where(s > 0.0, 1, 0), over="key"),
        "last": max(where(s > 0.0, key, -1), over="key"),
    }


@op
def differential(q: Rows["head", "dim"], kv: Paged["dim"], other: Rows["head", "dim"], fraction: PerHead):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(dot(q, keys)) @ keys.v - fraction * (softmax(dot(other, keys)) @ keys.v)


@op
def near_and_far(q: Rows["head", "dim"], kv: Paged["dim"], gate: Rows["head"]):
    near = kv.keys(where=lambda query, k: (k <= query) & (query - k < 3))
    far = kv.keys(where=lambda query, k: query - k >= 3)
    return sigmoid(gate) * (softmax(dot(q, near)) @ near.v) + (softmax(dot(q, far)) @ far.v)


@op
def close_to_the_best(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    s = dot(q, keys)
    return softmax(where(s > max(s, over="key") - 1.0, s, -inf)) @ keys.v


@op
def sink_of_another_reduction(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    s = dot(q, keys)
    out = softmax(s, sink=logsumexp(0.5 * s) - 1.0) @ keys.v
    return {"out": out, "without_sink": lse(out)}


@each(quick=2)
def test_several_reductions_in_one_walk(schedule: Schedule, rng: np.random.Generator) -> None:
    """Sums, maxima, counts and logsumexp over the keys a row sees share one walk, and partitions."""
    data = batch(rng)
    found = run(several, data, rng, schedule)
    assert_close(found["log_sum"], per_row(data, lambda s, v, at: log_sum_exp(s)))
    assert_close(found["total"], per_row(data, lambda s, v, at: s.sum()), atol=1e-4)
    assert_close(found["top"], per_row(data, lambda s, v, at: s.max()))
    assert_close(found["positive"], per_row(data, lambda s, v, at: (s > 0).sum()))
    assert_close(found["last"], per_row(data, lambda s, v, at: np.max(np.flatnonzero(s > 0), initial=-1)))


@each(quick=2)
def test_two_softmaxes(schedule: Schedule, rng: np.random.Generator) -> None:
    """Differential attention: two softmaxes over the same keys, subtracted."""
    data, other, share = batch(rng), normal(rng, TOTAL, 4, 8), torch.tensor([0.5, 1.0, 0.0, 2.0])
    found = run(differential, data, rng, schedule, other=other, fraction=share)["out"]
    one, _ = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)
    two, _ = flash(data.ragged, other.double().numpy(), data.keys, data.values, CAUSAL, 1.0)
    assert_close(found, one - share.double().numpy()[:, None] * two)


ONE_WALK = [Schedule(rows=2, heads=1, keys=3, masks="split"), Schedule(), Schedule(rows=1, keys=1)]


@each(*ONE_WALK)
def test_two_key_sources(schedule: Schedule, rng: np.random.Generator) -> None:
    """Two predicates over one cache are two reductions; a row that sees no far key adds nothing."""
    data, gate = batch(rng), normal(rng, TOTAL, 4)
    found = run(near_and_far, data, rng, schedule, gate=gate)["out"]
    near, _ = flash(data.ragged, data.q64, data.keys, data.values, NAMED["sliding_window_causal"](3), 1.0)
    far, _ = flash(data.ragged, data.q64, data.keys, data.values, lambda at: at.pos - at.key >= 3, 1.0)
    assert_close(found, near / (1 + np.exp(-gate.double().numpy()))[..., None] + far)


@each(*ONE_WALK)
def test_a_reduction_that_needs_another(schedule: Schedule, rng: np.random.Generator) -> None:
    """A result enters the input, or the sink, of a second reduction, for which the keys are walked again."""
    data = batch(rng)
    found = run(close_to_the_best, data, rng, schedule)["out"]
    assert_close(found, per_row(data, lambda s, v, at: attend(s[s > s.max() - 1], v[s > s.max() - 1]), 8))
    both = run(sink_of_another_reduction, data, rng, schedule)
    assert_close(both["out"], per_row(data, lambda s, v, at: attend(s, v, log_sum_exp(s / 2) - 1), 8))
    assert_close(both["without_sink"], per_row(data, lambda s, v, at: log_sum_exp(s)))


# ---- reductions of the author's own ----------------------------------------------------------------------------------


def total(x: Value) -> Value:
    return reduce_over("sum", x, "key")


@op
def power_mean(q: Rows["head", "dim"], kv: Paged["dim"], power: PerHead):
    """A reducer that captures a value, and one that counts."""
    keys = kv.keys(where=lambda query, k: k <= query)
    mean = Reducer(
        "power mean",
        inputs={"x": 0.0, "one": 0.0},
        states={"sum": StateOf(0.0, ("x",)), "n": StateOf(0.0, ("one",))},
        step=lambda s, x: {
            "sum": s["sum"] + total(where(x["x"] > 0.0, exp(power * log(x["x"])), 0.0)),
            "n": s["n"] + total(x["one"]),
        },
        merge=lambda s, o: {n: s[n] + o[n] for n in s},
        finish=lambda s, params: {"mean": exp(log(s["sum"] / s["n"]) / power) + params["more"], "n": s["n"]},
    )
    s = dot(q, keys)
    return fold(mean, {"x": exp(0.2 * s), "one": where(s < inf, 1.0, 1.0)}, {"more": 1.0})


def pairs(*order: str) -> Any:
    """Sums over pairs of keys: the new states read the old ones, which no order of writing may disturb."""

    def step(s: Any, x: Any) -> Any:
        t, mine = total(x["rows"]), total(x["scores"])
        within = 0.5 * (dot(t, t) - sum(total(x["rows"] * x["rows"]), over="dim"))
        return {
            "one": s["one"] + mine,
            "two": s["two"] + s["one"] * mine + 0.5 * (mine * mine - total(x["scores"] * x["scores"])),
            "sum": s["sum"] + t,
            "dots": (s["dots"] + within) + dot(s["sum"], t),
            "old": where(s["one"] == s["one"], s["old"], s["one"]),
        }

    def merge(s: Any, o: Any) -> Any:
        return {
            "one": s["one"] + o["one"],
            "two": s["two"] + o["two"] + s["one"] * o["one"],
            "sum": s["sum"] + o["sum"],
            "dots": (s["dots"] + o["dots"]) + dot(s["sum"], o["sum"]),
            "old": s["old"],
        }

    states = {
        "one": StateOf(0.0, ("scores",)),
        "two": StateOf(0.0, ("scores",)),
        "sum": StateOf(0.0, ("rows",)),
        "dots": StateOf(0.0, ("scores",)),
        "old": StateOf(7.0, ("scores",)),
    }
    reducer = Reducer(
        "pairs", {"rows": 0.0, "scores": 0.0}, {n: states[n] for n in order}, step, merge, lambda s, _: dict(s)
    )

    @op
    def pairs(q: Rows["head", "dim"], kv: Paged["dim"]):
        keys = kv.keys(where=lambda query, k: k <= query)
        found = fold(reducer, {"rows": q * keys.k, "scores": dot(q, keys)})
        return {n: found[n] for n in ("two", "dots", "old")}

    return pairs


def delayed(*order: str) -> Any:
    """What each key found before it: one state takes the other's old value, unchanged."""
    reducer = Reducer(
        "delayed",
        {"x": 0.0},
        {n: StateOf(0.0, ("x",)) for n in order},
        lambda s, x: {"sum": s["sum"] + total(x["x"]), "before": s["sum"]},
        lambda s, o: {"sum": s["sum"] + o["sum"], "before": s["before"]},
        lambda s, _: dict(s),
    )

    @op
    def delayed(q: Rows["head", "dim"], kv: Paged["dim"]):
        keys = kv.keys(where=lambda query, k: k <= query)
        found = fold(reducer, {"x": dot(q, keys)})
        return {"all": found["sum"], "before": found["before"]}

    return delayed


@each(quick=2)
def test_power_mean(schedule: Schedule, rng: np.random.Generator) -> None:
    """An author's reducer, with a captured exponent per head and a parameter that enters once, in finish."""
    data, power = batch(rng), np.array([1.0, 2.0, -1.0, 0.5])
    found = run(power_mean, data, rng, schedule, power=torch.from_numpy(power).float())
    assert_close(found["n"], per_row(data, lambda s, v, at: len(s)))
    expected = per_row(data, lambda s, v, at: 1 + np.mean(np.exp(0.2 * s) ** power[at.head]) ** (1 / power[at.head]))
    assert_close(found["mean"], expected, rtol=1e-4)


@pytest.mark.parametrize("order", [("one", "two", "sum", "dots", "old"), ("old", "dots", "sum", "two", "one")])
@each(quick=2)
def test_states_change_all_at_once(order: tuple[str, ...], schedule: Schedule, rng: np.random.Generator) -> None:
    """Sums over pairs of keys, whatever the order of states, tiles and partitions."""
    data = batch(rng)
    found = run(pairs(*order), data, rng, schedule)
    assert_close(found["two"], per_row(data, lambda s, v, at: (s.sum() ** 2 - (s**2).sum()) / 2), rtol=1e-4, atol=1e-3)
    rows = [k[:, np.arange(4) // 2] for k in data.keys]

    def dots(at: At) -> float:
        x = data.q64[at.row, at.head] * rows[at.seq][: at.pos + 1, at.head]
        return float((x.sum(0) ** 2).sum() - (x**2).sum()) / 2

    assert_close(found["dots"], per_row(data, lambda s, v, at: dots(at)), rtol=1e-4, atol=1e-3)
    assert_close(found["old"], np.full((TOTAL, 4), 7.0))


@pytest.mark.parametrize("order", [("sum", "before"), ("before", "sum")])
def test_a_state_takes_the_old_value_of_another(order: tuple[str, ...], rng: np.random.Generator) -> None:
    """A new state that is another's old value is read before that one is written."""
    data = batch(rng)
    found = run(delayed(*order), data, rng, Schedule(rows=1, keys=1))
    assert_close(found["all"], per_row(data, lambda s, v, at: s.sum()), atol=1e-4)
    assert_close(found["before"], per_row(data, lambda s, v, at: s[:-1].sum()), atol=1e-4)


# ---- outputs ---------------------------------------------------------------------------------------------------------


@op
def outputs(q: Rows["head", "dim"], kv: Paged["dim"], x: Rows["wide"], w: Tensor["wide", "narrow"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    out = softmax(dot(q, keys)) @ keys.v
    return {
        "out": out,
        "place": pos * 100 + num_keys,
        "ids": head + 10 * kv_head + 100 * seq + 0 * pos,
        "low_rank": dot(x, w),
        "norm": sqrt(sum(out * out, over="dim")),
    }


@op
def headless(q: Rows["dim"], kv: Paged["dim"], heads: Rows["head", "dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return {"out": softmax(dot(q, keys)) @ keys.v, "with_heads": softmax(dot(heads, keys)) @ keys.v}


@each(quick=2)
def test_outputs_with_axes_of_their_own(schedule: Schedule, rng: np.random.Generator) -> None:
    """Named outputs per row, head, and feature, of any dtype; exact positions and ids."""
    data, x, w = batch(rng), normal(rng, TOTAL, 5), normal(rng, 5, 2)
    leaf = place(data, rng, page_size=3).layer(0)
    found = tilewright.run(
        outputs,
        {"q": data.q, "kv": leaf, "x": x, "w": w},
        data.offsets,
        output_dtypes={"place": DTYPES["int32"], "ids": DTYPES["int64"]},
        schedule=schedule,
    )
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)
    at: list[At] = data.ragged.places(4)
    assert_close(found["out"], expected)
    assert found["place"].tolist() == [a.pos * 100 + a.num_keys for a in at if a.head == 0]
    assert found["ids"].flatten().tolist() == [a.head + a.head // 2 * 10 + a.seq * 100 for a in at]
    assert_close(found["low_rank"], x.double().numpy() @ w.double().numpy())
    assert_close(found["norm"], np.linalg.norm(expected, axis=-1))


@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(rows=2, keys=3, partitions=2)], ids=["default", "split keys"]
)
def test_tensors_without_heads(schedule: Schedule, rng: np.random.Generator) -> None:
    """Queries without a head axis, alone and beside those with heads, over a cache of one key-value head."""
    data = batch(rng, heads=3, kv_heads=1)
    leaf = place(data, rng, page_size=3).layer(0)
    given = {"q": data.q[:, 1].contiguous(), "kv": leaf, "heads": data.q}
    found = tilewright.run(headless, given, data.offsets, schedule=schedule)
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)
    assert_close(found["with_heads"], expected)
    assert_close(found["out"], expected[:, 1])
