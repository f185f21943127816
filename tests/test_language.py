# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index, operator, no-untyped-def"
"""Attention variants that an author invents here, each against float64 on ragged paged batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.batches import normal, place
from support.reference import Floats, assert_close, flash
from support.running import each
from support.variants import CAUSAL, TOTAL, batch, per_row, run

import tilewright
from tilewright.dsl import (
    Const,
    Paged,
    PerHead,
    Rows,
    Scalar,
    Tensor,
    boolean,
    dot,
    f32,
    head,
    i32,
    key,
    kv_head,
    op,
    pos,
    seq,
    sigmoid,
    softmax,
    sqrt,
    sum,
    tanh,
    to_float,
    to_int,
    weights,
    where,
)
from tilewright.dsl.schedule import Schedule

pytestmark = pytest.mark.both_targets(slow=True)

# ---- what is made of scores ------------------------------------------------------------------------------------------


@op
def softcap(q: Rows["head", "dim"], kv: Paged["dim"], cap: Scalar[f32]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(cap * tanh(dot(q, keys) / cap)) @ keys.v


@op
def alibi(q: Rows["head", "dim"], kv: Paged["dim"], slope: PerHead):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(dot(q, keys) - slope * (pos - key)) @ keys.v


@op
def bias_by_distance(q: Rows["head", "dim"], kv: Paged["dim"], bias: Tensor["distance"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(dot(q, keys) + bias[pos - key - 1]) @ keys.v


@op
def bias_by_distance_and_head(q: Rows["head", "dim"], kv: Paged["dim"], bias: Tensor["bucket", "head"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(dot(q, keys) + bias[(pos - key) // 2]) @ keys.v


@op
def bias_by_key(q: Rows["head", "dim"], kv: Paged["dim"], bias: Tensor["seq", "key"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(dot(q, keys) + bias) @ keys.v


@op
def temperature(q: Rows["head", "dim"], kv: Paged["dim"], t: Rows, by_head: Rows["head"], by_kv: Tensor["kv_head"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(dot(q, keys) * t * by_head * by_kv) @ keys.v


@op
def clipped(q: Rows["head", "dim"], kv: Paged["dim"], keep: Rows["key", boolean], *, low: Const[float]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(where(keep & (dot(q, keys) > low), dot(q, keys), to_float(to_int(dot(q, keys))))) @ keys.v


BIAS, SLOPES = np.linspace(-2, 2, 5), np.array([0.5, 0.25, 1, 0])
BY_BUCKET, BY_KEY = np.random.default_rng(1).standard_normal((3, 4)), np.random.default_rng(2).standard_normal((5, 16))
BY_ROW, BY_HEAD = np.linspace(0.2, 2, TOTAL), np.random.default_rng(3).uniform(0.5, 1.5, (TOTAL, 4))
KEEP = np.random.default_rng(4).integers(0, 2, (TOTAL, 16)).astype(bool)


def reading(table: Floats, index: Any) -> Floats:
    """A table's entries, zero outside its extent."""
    inside = (index >= 0) & (index < len(table))
    return np.where(inside, table[np.clip(index, 0, len(table) - 1)], 0.0)


SCORES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "softcap": (softcap, {"cap": 2.0}, lambda s, at: 2 * np.tanh(s / 2)),
    "alibi": (alibi, {"slope": SLOPES}, lambda s, at: s - SLOPES[at.head] * (at.pos - at.key)),
    "bias table with reads outside": (
        bias_by_distance,
        {"bias": BIAS},
        lambda s, at: s + reading(BIAS, at.pos - at.key - 1),
    ),
    "bias by bucket and head": (
        bias_by_distance_and_head,
        {"bias": BY_BUCKET},
        lambda s, at: s + reading(BY_BUCKET[:, at.head], (at.pos - at.key) // 2),
    ),
    "bias by key": (bias_by_key, {"bias": BY_KEY}, lambda s, at: s + BY_KEY[at.seq, : at.num_keys]),
    "temperatures": (
        temperature,
        {"t": BY_ROW, "by_head": BY_HEAD, "by_kv": np.array([1.0, 2.0])},
        lambda s, at: s * BY_ROW[at.row] * BY_HEAD[at.row, at.head] * (1 + at.head // 2),
    ),
    "conditions in scores": (
        clipped,
        {"keep": KEEP},
        lambda s, at: np.where(KEEP[at.row, : at.num_keys] & (s > 0), s, np.trunc(np.nan_to_num(s))),
    ),
}


@pytest.mark.parametrize("name", SCORES)
@each(quick=2)
def test_scores(name: str, schedule: Schedule, rng: np.random.Generator) -> None:
    """Softmax over any expression of scores, positions and captured tensors, which are NaN where no key is seen."""
    operator, captured, score = SCORES[name]
    data = batch(rng)
    given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in captured.items()}
    given = {n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
    if name == "bias by key":
        for b, n in enumerate(map(data.ragged.keys, range(5))):
            given["bias"][b, n:] = torch.nan
    leaf = place(data, rng, page_size=3, sees=CAUSAL).layer(0)
    constants = {"low": 0.0} if operator is clipped else {}
    found = tilewright.run(
        operator, {"q": data.q, "kv": leaf, **given}, data.offsets, constants=constants, schedule=schedule
    )
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0, score=score)
    assert_close(found["out"], expected)


@op
def one_and_one(q: Rows["head", "dim"], kv: Paged["dim"], n: Rows[i32]):
    """1 and 1.0 beside each other: an integer, which is divided with a remainder, and a float, which is not."""
    keys = kv.keys(where=lambda query, k: k <= query)
    whole, real = n + 1, n + 1.0
    return softmax(dot(q, keys) / real + to_float((whole // 2) * (key % 3) + whole)) @ keys.v


@each(quick=1)
def test_integers_and_floats_stay_apart(schedule: Schedule, rng: np.random.Generator) -> None:
    """Subexpressions that differ only in the kind of a number are two."""
    data, n = batch(rng), np.arange(TOTAL)
    found = run(one_and_one, data, rng, schedule, n=torch.from_numpy(n).int())["out"]
    expected, _ = flash(
        data.ragged,
        data.q64,
        data.keys,
        data.values,
        CAUSAL,
        1.0,
        score=lambda s, at: s / (n[at.row] + 1.0) + (n[at.row] + 1) // 2 * (at.key % 3),
    )
    assert_close(found, expected)


# ---- what is made of weights and keys --------------------------------------------------------------------------------


@op
def sigmoid_attention(q: Rows["head", "dim"], kv: Paged["dim"], bias: Scalar):
    keys = kv.keys(where=lambda query, k: k <= query)
    return weights(sigmoid(dot(q, keys) + bias)) @ keys.v


@op
def integer_weights(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return weights(where(dot(q, keys) > 0.0, key + 1, 0)) @ keys.v


@op
def normalised(q: Rows["head", "dim"], kv: Paged["dim"]):
    """Query and key rows of length one."""
    keys = kv.keys(where=lambda query, k: k <= query)
    k, queries = keys.k / sqrt(sum(keys.k * keys.k, over="dim")), q / sqrt(sum(q * q, over="dim"))
    return softmax(4.0 * dot(queries, k)) @ keys.v


@op
def projected(q: Rows["head", "dim"], kv: Paged["dim"], w: Tensor["dim", "rank"], up: Tensor["rank", "dim"]):
    """Scores in a smaller space."""
    keys = kv.keys(where=lambda query, k: k <= query)
    low = dot(dot(q, w, over="dim"), up, over="rank")
    return softmax(dot(low, keys)) @ keys.v


@op
def gated_values(q: Rows["head", "dim"], kv: Paged["dim"], gate: Tensor["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    return softmax(dot(q, keys)) @ (keys.v * gate + keys.k)


@each(quick=2)
def test_weights(schedule: Schedule, rng: np.random.Generator) -> None:
    """Plain weights, integers among them, sum over the keys a row sees without a denominator."""
    data = batch(rng)
    found = run(sigmoid_attention, data, rng, schedule, bias=-1.0)["out"]
    assert_close(found, per_row(data, lambda s, v, at: (1 / (1 + np.exp(1 - s))) @ v, 8))
    found = run(integer_weights, data, rng, schedule)["out"]
    assert_close(found, per_row(data, lambda s, v, at: ((s > 0) * (np.arange(len(s)) + 1.0)) @ v, 8))


@op
def deeply_shared(q: Rows["head", "dim"], kv: Paged["dim"]):
    keys = kv.keys(where=lambda query, k: k <= query)
    s = dot(q, keys)
    for _ in range(40):
        s = (s + s) * 0.5
    return softmax(s) @ keys.v


def test_what_is_used_twice_is_compiled_once(rng: np.random.Generator) -> None:
    """Written out, the scores would have 2**40 terms: no part of the compiler may write them out."""
    data = batch(rng)
    found = run(deeply_shared, data, rng, Schedule(rows=4, keys=16))["out"]
    expected, _ = flash(data.ragged, data.q64, data.keys, data.values, CAUSAL, 1.0)
    assert_close(found, expected)


@each(quick=2)
def test_key_rows_are_values(schedule: Schedule, rng: np.random.Generator) -> None:
    """Key and value rows enter expressions before they are multiplied; captured matrices contract."""
    data = batch(rng)
    keys = [k / np.linalg.norm(k, axis=-1, keepdims=True) for k in data.keys]
    q = data.q64 / np.linalg.norm(data.q64, axis=-1, keepdims=True)
    expected, _ = flash(data.ragged, q, keys, data.values, CAUSAL, 4.0)
    assert_close(run(normalised, data, rng, schedule)["out"], expected)
    w, up, gate = normal(rng, 8, 3), normal(rng, 3, 8), normal(rng, 8)
    q = data.q64 @ w.double().numpy() @ up.double().numpy()
    expected, _ = flash(data.ragged, q, data.keys, data.values, CAUSAL, 1.0)
    assert_close(run(projected, data, rng, schedule, w=w, up=up)["out"], expected, rtol=1e-4, atol=1e-4)
    gated = [v * gate.double().numpy() + k for k, v in zip(data.keys, data.values, strict=True)]
    expected, _ = flash(data.ragged, data.q64, data.keys, gated, CAUSAL, 1.0)
    assert_close(run(gated_values, data, rng, schedule, gate=gate)["out"], expected)
