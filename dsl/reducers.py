"""Reductions over keys as values: states, absent, step, merge, finish, written in the language itself.

The compiler never looks at a reducer's name. An input says what it contributes at a key the row does not see; `merge`
joins the states of two sets of keys, which gives split keys for any reducer; whatever enters in `finish` enters once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from . import errors
from .dtypes import Kind
from .expr import Expr, FoldResult, KeyField, Selected, Tile, ordered, walk, walk_open
from .printer import show
from .source import here
from .spec import Fold, Select, State
from .value import HasValue, Operand, Value, as_expr, describe, dot, exp, log, maximum, reduce_over, where

Named: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class StateOf:
    """A running value: its start, and the inputs whose axes (without the key axis) it has."""

    init: float
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Reducer:
    """A reduction over keys.

    `inputs` maps each input to what it contributes at a key that a row does not see, or None where that cannot matter.
    `step(states, inputs)` and `merge(states, others)` give the new states, `finish(states, params)` the named results.
    """

    name: str
    inputs: Mapping[str, float | None]
    states: Mapping[str, StateOf]
    step: Callable[[Named, Named], Named]
    merge: Callable[[Named, Named], Named]
    finish: Callable[[Named, Named], Named]


def fold(
    reducer: Reducer, inputs: Mapping[str, Operand], params: Mapping[str, Operand] | None = None
) -> dict[str, Value]:
    """Fold `inputs` over the keys they stand for; the reducer's named results. `params` go to `finish` only."""
    given = {n: _input(reducer, n, inputs.get(n)) for n in reducer.inputs}
    source = _source_of(reducer.name, given)
    taken = {n: Value(Tile(f"input{i}", e.axes, e.dtype)) for i, (n, e) in enumerate(given.items())}
    states = tuple(
        State(n, ordered(a for i in s.inputs for a in given[i].axes if a != "key"), s.init)
        for n, s in reducer.states.items()
    )
    own = {s.name: Value(Tile(s.name, s.axes)) for s in states}
    other = {s.name: Value(Tile(s.name + "_other", s.axes)) for s in states}
    _check_names(reducer)
    step, merge = reducer.step(own, taken), reducer.merge(own, other)
    extra = {n: Value(as_expr(p, f"{reducer.name} parameter {n!r}")) for n, p in (params or {}).items()}
    finish = reducer.finish(own, extra)
    loc = here()
    made = Fold(
        reducer.name,
        source,
        tuple(given.values()),
        tuple(reducer.inputs.values()),
        states,
        tuple(_state(reducer, "step", step, s) for s in states),
        tuple(_state(reducer, "merge", merge, s) for s in states),
        tuple((n, as_expr(v, f"{reducer.name} result {n!r}")) for n, v in finish.items()),
        loc,
    )
    return {n: Value(FoldResult(made, n, loc)) for n in finish}


def _input(reducer: Reducer, name: str, given: Operand | None) -> Expr:
    e = as_expr(given, f"{reducer.name} input {name!r}")
    if e.dtype.kind is Kind.BOOL:
        what = f"{reducer.name} input {name!r}"
        raise errors.DTypeMismatch(loc=here(), what=what, got="bool", expected="write where(cond, 1.0, 0.0)")
    return e


def _check_names(reducer: Reducer) -> None:
    """States are tiles named after themselves, beside `input0`, .. and, in merge, `<state>_other`."""
    for n in reducer.states:
        if n.startswith("input") or (n.endswith("_other") and n.removesuffix("_other") in reducer.states):
            expected = "a name of its own, other than input.. and <state>_other"
            raise errors.NotTraceable(
                loc=here(), what=f"reducer {reducer.name!r} state", expected=expected, got=repr(n)
            )


def _state(reducer: Reducer, stage: str, new: Named, state: State) -> Expr:
    if state.name not in new:
        raise errors.AxisMismatch(
            loc=here(), what=f"reducer {reducer.name!r}", problem=f"{stage} leaves out state {state.name!r}"
        )
    e = as_expr(new[state.name], f"{reducer.name} {stage} of {state.name!r}")
    if e.axes != state.axes:
        problem = f"{stage} gives state {state.name!r} axes [{', '.join(e.axes)}], it has [{', '.join(state.axes)}]"
        raise errors.AxisMismatch(loc=here(), what=f"reducer {reducer.name!r}", problem=problem)
    return e


def _source_of(name: str, inputs: Mapping[str, Expr]) -> int:
    sources: set[int] = set()
    for n, e in inputs.items():
        if "key" not in e.axes:
            problem = f"{n} has axes [{', '.join(e.axes)}]: it does not vary over keys"
            raise errors.AxisMismatch(loc=here(), what=name, problem=problem)
        sources |= {x.source for x in walk_open(e) if isinstance(x, KeyField)}
    if len(sources) != 1:
        problem = (
            "no key rows among its inputs"
            if not sources
            else "its inputs come from different key sources, whose keys do not meet"
        )
        raise errors.AxisMismatch(loc=here(), what=name, problem=problem)
    return sources.pop()


# ---- the reducers of the language ------------------------------------------------------------------------------------


def _guarded(m: Value) -> Value:
    """A finite base for exp(x - base), so that -inf minus -inf never happens."""
    return where(m == -inf, 0.0, m)


def _softmax_step(s: Named, x: Named) -> Named:
    m = maximum(s["m"], reduce_over("max", x["scores"], "key"))
    base = _guarded(m)
    shrink, p = exp(s["m"] - base), exp(x["scores"] - base)
    new = {"m": m, "l": s["l"] * shrink + reduce_over("sum", p, "key")}
    return {**new, "acc": s["acc"] * shrink + dot(p, x["values"], over="key")} if "acc" in s else new


def _softmax_merge(s: Named, o: Named) -> Named:
    m = maximum(s["m"], o["m"])
    base = _guarded(m)
    a, b = exp(s["m"] - base), exp(o["m"] - base)
    return {"m": m, **{n: s[n] * a + o[n] * b for n in s if n != "m"}}


def _softmax_finish(s: Named, params: Named) -> Named:
    """out and the natural-log lse over the keys alone; a sink is one more logit in the denominator, with no value."""
    m, total = s["m"], s["l"]
    lse = {"lse": m + log(total)}
    if "acc" not in s:
        return lse
    if "sink" not in params:
        return {"out": where(total == 0.0, 0.0, s["acc"] / total), **lse}
    sink = params["sink"]
    base = _guarded(maximum(m, sink))
    shrink = exp(m - base)
    denominator = total * shrink + exp(sink - base)
    weight = where((denominator == 0.0) | (sink == inf), 0.0, shrink / denominator)
    return {"out": s["acc"] * weight, **lse}


_SOFTMAX_STATES = {"m": StateOf(-inf, ("scores",)), "l": StateOf(0.0, ("scores",))}

ONLINE_SOFTMAX = Reducer(
    "softmax",
    {"scores": -inf, "values": None},
    {**_SOFTMAX_STATES, "acc": StateOf(0.0, ("scores", "values"))},
    _softmax_step,
    _softmax_merge,
    _softmax_finish,
)
LOGSUMEXP = Reducer("logsumexp", {"scores": -inf}, _SOFTMAX_STATES, _softmax_step, _softmax_merge, _softmax_finish)
WEIGHTED_SUM = Reducer(
    "weighted_sum",
    {"weights": 0.0, "values": None},
    {"acc": StateOf(0.0, ("weights", "values"))},
    lambda s, x: {"acc": s["acc"] + dot(x["weights"], x["values"], over="key")},
    lambda s, o: {"acc": s["acc"] + o["acc"]},
    lambda s, _: {"out": s["acc"]},
)
SUM = Reducer(
    "sum",
    {"x": 0.0},
    {"total": StateOf(0.0, ("x",))},
    lambda s, x: {"total": s["total"] + reduce_over("sum", x["x"], "key")},
    lambda s, o: {"total": s["total"] + o["total"]},
    lambda s, _: {"out": s["total"]},
)
MAX = Reducer(
    "max",
    {"x": -inf},
    {"top": StateOf(-inf, ("x",))},
    lambda s, x: {"top": maximum(s["top"], reduce_over("max", x["x"], "key"))},
    lambda s, o: {"top": maximum(s["top"], o["top"])},
    lambda s, _: {"out": s["top"]},
)


class Weights:
    """Weights over keys, waiting for the rows they weigh: `softmax(scores) @ keys.v`."""

    def __init__(
        self, reducer: Reducer, name: str, weights: Operand, params: Mapping[str, Operand] | None = None
    ) -> None:
        self._reducer, self._name, self._weights, self._params = reducer, name, weights, params

    def __repr__(self) -> str:
        return f"<{self._reducer.name} of {self._weights!r}, waiting for @ values>"

    def __matmul__(self, values: Value | HasValue) -> Value:
        return fold(self._reducer, {self._name: self._weights, "values": values}, self._params)["out"]


def softmax(scores: Operand, *, sink: Operand | None = None) -> Weights:
    """Softmax over keys. `sink` is one more logit (per head, or any row-side axes) that takes weight and has no value.

    A row that sees no key gives 0, and an lse of -inf.
    """
    return Weights(ONLINE_SOFTMAX, "scores", scores, None if sink is None else {"sink": sink})


def weights(w: Operand) -> Weights:
    """Plain weights over keys, as in sigmoid or linear attention: `weights(sigmoid(s)) @ keys.v`."""
    return Weights(WEIGHTED_SUM, "weights", w)


def logsumexp(scores: Operand) -> Value:
    """Natural log of the sum over seen keys of exp(scores); -inf where no key is seen."""
    return fold(LOGSUMEXP, {"scores": scores})["lse"]


def sum(x: Operand, *, over: str) -> Value:
    """Sum over an axis; over "key", over the keys a row sees."""
    return fold(SUM, {"x": x})["out"] if over == "key" else reduce_over("sum", x, over)


def max(x: Operand, *, over: str) -> Value:
    """Maximum over an axis; over "key", over the keys a row sees (-inf where it sees none)."""
    return fold(MAX, {"x": x})["out"] if over == "key" else reduce_over("max", x, over)


def topk(scores: Operand, k: int) -> Value:
    """Indices of the k best keys that a row sees, int32, along a new axis "rank"; -1 past the last candidate.

    Descending score, equal scores by ascending key, NaN last. A range's index is its key, a list's the listed entry,
    with ties by slot. k is not limited.
    """
    return topk_with_values(scores, k)[1]


def topk_with_values(scores: Operand, k: int) -> tuple[Value, Value]:
    """Scores and indices of the k best keys; see `topk`. Past the last candidate -inf and -1."""
    e = as_expr(scores, "topk")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise errors.NotTraceable(loc=here(), what="topk", expected="k, a whole number, at least 1", got=describe(k))
    if e.dtype.kind is Kind.BOOL:
        raise errors.DTypeMismatch(loc=here(), what="topk", got="bool", expected="write where(cond, 1.0, 0.0)")
    source, features = _source_of("topk", {"scores": e}), [a for a in e.axes if a not in ("row", "head", "key")]
    if features:
        problem = f"{show(e)} has axes [{', '.join(e.axes)}]; reduce over {', '.join(features)} first"
        raise errors.AxisMismatch(loc=here(), what="topk", problem=problem)
    select = Select(source, e, k, "rank", here())
    return Value(Selected(select, "values", here())), Value(Selected(select, "indices", here()))


def lse(out: Value) -> Value:
    """The natural-log lse of the softmax that made `out`, over its keys alone (a sink is not counted)."""
    folds = {x.fold: x for x in walk(out.expr) if isinstance(x, FoldResult) and "lse" in dict(x.fold.finish)}
    if len(folds) != 1:
        raise errors.AxisMismatch(
            loc=here(), what="lse", problem=f"expected the result of one softmax, found {len(folds)}"
        )
    return Value(FoldResult(next(iter(folds)), "lse", here()))
