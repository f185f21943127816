"""Operators with a mistake in them, each as the text of a module, and what is wrong with it."""

from __future__ import annotations

import importlib.util
import linecache
from collections.abc import Callable
from pathlib import Path

from tilewright.dsl.lang import Operator

HEAD = """\
from __future__ import annotations

from tilewright.dsl import *
from tilewright.dsl.value import reduce_over

SAME = lambda states, _: states


@op
def attention(
    q: Rows["head", "dim"],
    kv: Paged["dim"],
    sink: PerHead,
    bias: Tensor["distance"],
    limit: Rows[i32],
    *,
    window: Const = 4,
):
    keys = kv.keys(where=lambda query, k: k <= query)
    s = dot(q, keys)
    out = softmax(s) @ keys.v
"""

# In the function's body, after `out`; indented once. Each is all that is wrong.
BODIES: dict[str, dict[str, str]] = {
    "AxisMismatch": {
        "values without keys": "return softmax(s) @ q",
        "weights without keys": "return softmax(sink) @ keys.v",
        "no key rows in a reduction": "return logsumexp(to_float(key))",
        "keys of two sources": "return softmax(dot(q, kv.keys())) @ keys.v",
        "nothing to contract": "return dot(out, sink)",
        "several axes to contract": "return dot(out * bias, q * bias)",
        "an axis only one side has": 'return dot(out, sink, over="dim")',
        "an axis that is not there": 'return sum(out, over="rank")',
        "over rows": 'return out - sum(out, over="row")',
        "a product over rows": 'return dot(out, q, over="row") + out',
        "a value per key returned": "return s",
        "no row returned": "return {'out': out, 'bias': bias}",
        "keys outside a reduction": 'return dot(s, keys.v, over="key")',
        "a per-row predicate over per-key values": 'return out + sum(keys.k, over="key")',
        "too many indices": "return softmax(s + bias[pos, key]) @ keys.v",
        "an index into an expression": "return softmax(s[0]) @ keys.v",
        "a predicate that reads keys": "return softmax(s) @ kv.keys(where=lambda query, k: s > 0.0).v",
        "lse of no softmax": "return {'out': out, 'lse': lse(q)}",
        "lse of two": "return {'out': out, 'lse': lse(out - softmax(2.0 * s) @ keys.v)}",
        "a print that would need a second walk": "print(exp(s - lse(out)))\n    return out",
        "a state left out": (
            "r = Reducer('r', {'x': 0.0}, {'n': StateOf(0.0, ('x',))}, lambda s, x: {}, lambda s, o: s, SAME)\n"
            "    return fold(r, {'x': s})['n']"
        ),
        "a state of other axes": (
            "r = Reducer('r', {'x': 0.0}, {'n': StateOf(0.0, ('x',))}, lambda s, x: {'n': x['x']}, SAME, SAME)\n"
            "    return fold(r, {'x': s})['n']"
        ),
    },
    "DTypeMismatch": {
        "a condition and a number": "return softmax(s & (key <= pos)) @ keys.v",
        "numbers as conditions": "return softmax(s) @ kv.keys(where=lambda query, k: (k <= query) | (query - k)).v",
        "a condition as a number": "return softmax(s + (key <= pos)) @ keys.v",
        "floats as integers": "return softmax(s // 2) @ keys.v",
        "not of a number": "return softmax(~s) @ keys.v",
        "where of a number": "return softmax(where(s, 1.0, 0.0)) @ keys.v",
        "a number as a predicate": "return softmax(s) @ kv.keys(where=lambda query, k: query - k).v",
        "a float as an index": "return softmax(s + bias[s]) @ keys.v",
        "a sum of conditions": 'return sum(s > 0.0, over="key")',
        "a product of conditions": "return dot(out > 0.0, q)",
        "a maximum of conditions": 'return max(out > 0.0, over="dim")',
    },
    "BranchOnTraced": {
        "if": "if s > 0.0:\n        return out\n    return 2.0 * out",
        "and": "return softmax(s) @ kv.keys(where=lambda query, k: k <= query and query - k < window).v",
        "or": "return softmax(s) @ kv.keys(where=lambda query, k: k <= query or k < 4).v",
        "not": "return softmax(s) @ kv.keys(where=lambda query, k: not k > query).v",
        "a chained comparison": "return softmax(s) @ kv.keys(where=lambda query, k: 0 <= query - k < 4).v",
        "an inline if": "return out if limit > 4 else 2.0 * out",
        "for": "return softmax([x for x in s]) @ keys.v",
        "int()": "return out * int(limit)",
        "float()": "return out * float(limit)",
        "range()": "return [out for _ in range(limit)][0]",
        "membership": "return out if 4 in limit else 2.0 * out",
        "the builtin max": "import builtins\n    return softmax(builtins.max(s, 0.0)) @ keys.v",
        "bool()": "return softmax(s) @ kv.keys(where=lambda query, k: bool(k <= query)).v",
    },
    "NotTraceable": {
        "a string in arithmetic": "return softmax(s + 'one') @ keys.v",
        "None as scores": "return softmax(None) @ keys.v",
        "a list of values": "return softmax([s]) @ keys.v",
        "a cache as a value": "return softmax(dot(q, kv)) @ keys.v",
        "an input left out": (
            "r = Reducer('r', {'x': 0.0}, {'n': StateOf(0.0, ('x',))}, SAME, SAME, SAME)\n    return fold(r, {})['n']"
        ),
        "a state called like an input": (
            "r = Reducer('r', {'x': 0.0}, {'input0': StateOf(0.0, ('x',))}, SAME, SAME, SAME)\n"
            "    return fold(r, {'x': s})['input0']"
        ),
        "a state called like another's other": (
            "states = {'n': StateOf(0.0, ('x',)), 'n_other': StateOf(0.0, ('x',))}\n"
            "    return fold(Reducer('r', {'x': 0.0}, states, SAME, SAME, SAME), {'x': s})['n']"
        ),
        "a result that is no value": (
            "n = {'n': StateOf(0.0, ('x',))}\n"
            "    r = Reducer('r', {'x': 0.0}, n, lambda s, x: s, lambda s, o: s, lambda s, p: {'n': 'three'})\n"
            "    return fold(r, {'x': s})['n']"
        ),
        "no whole pool": "return softmax(s) @ kv.keys(pool=0).v",
        "columns after the name": "größe = s; return softmax(größe + 'ä') @ keys.v",
    },
    "NothingReturned": {
        "no return": "pass",
        "an empty dict": "return {}",
        "a number": "return {'out': out, 'window': window}",
        "a tuple": "return out, lse(out)",
        "weights without values": "return softmax(s)",
    },
    "BadDeclaration": {
        "an output called like a parameter": "return {'q': out}",
        "an output called like what a parameter brings": "return {'kv_lengths': out}",
        "an output called like something of the nest": "return {'seq': out}",
        "an output that is no identifier": "return {'the output': out}",
    },
}
GOOD_BODY = "    return out\n"
OPERATOR = HEAD + GOOD_BODY


def _signature(old: str, new: str) -> str:
    assert old in OPERATOR
    return OPERATOR.replace(old, new)


# Mistakes in the signature: found when the operator is declared.
SIGNATURES: dict[str, str] = {
    "no annotation": _signature("sink: PerHead", "sink"),
    "another annotation": _signature("sink: PerHead", "sink: float"),
    "an unknown annotation": _signature("sink: PerHead", "sink: PerQuery"),
    "no axes": _signature('bias: Tensor["distance"]', "bias: Tensor"),
    "an axis twice": _signature('q: Rows["head", "dim"]', 'q: Rows["head", "row"]'),
    "a reserved name": _signature("limit: Rows[i32]", "seq: Rows[i32]"),
    "a name that a cache brings": _signature("limit: Rows[i32]", 'kv_table: Tensor["seq", i32]'),
    "a name that a tensor brings": _signature("limit: Rows[i32]", "bias_distance: Scalar[i32]"),
    "several caches": _signature("limit: Rows[i32]", 'other: Paged["dim"]'),
    "positions of no cache": _signature("@op\n", '@op(positions="q")\n'),
}


def module_of(text: str, folder: Path) -> Callable[[], Operator]:
    """The module's `attention`, from a file of its own, whose lines messages can show."""
    file = folder / "author.py"
    file.write_text(text, encoding="utf-8")
    linecache.checkcache(str(file))
    spec = importlib.util.spec_from_file_location("author", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def load() -> Operator:
        assert spec.loader is not None
        spec.loader.exec_module(module)
        found = module.attention
        assert isinstance(found, Operator)
        return found

    return load
