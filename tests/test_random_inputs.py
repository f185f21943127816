# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def, index"
# Axis names stand in subscripts of annotations, which type checkers take for types.
"""Generated inputs: the binding they are said to have, structurally valid, and hostile where nothing may look."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright import op, references, run
from tilewright.codegen_cache.bind import bind
from tilewright.dsl import (
    Const,
    Paged,
    PerHead,
    Rows,
    Scalar,
    Tensor,
    concat,
    dot,
    f8e4m3,
    f32,
    i32,
    key,
    max,
    pos,
    relu,
    softmax,
    sum,
    topk,
)
from tilewright.dsl.errors import ArgumentValueError
from tilewright.dsl.lang import Operator
from tilewright.ops.cache import PagedLeaf
from tilewright.ops.flash_attention import flash_attention
from tilewright.ops.masks import mask_named
from tilewright.random_inputs import Inputs, Sizes, binding_of, random_inputs
from tilewright.references import BadReference, Reference, compare, reference_outputs, worst_error


@op
def summed(
    q: Rows["head", "depth"],
    leaf: Paged["depth"],
    weight: Rows["head"],
    bias: Tensor["distance"],
    token: Tensor["seq", "key", i32],
    *,
    gain: Const[float] = 2.0,
):
    keys = leaf.keys(where=lambda query, key: key <= query)
    scores = sum(relu(dot(q, keys)) * weight, over="head") * gain
    return {"best": max(scores + bias[pos - key] + token, over="key")}


def summed_reference(q, leaf, weight, bias, token, gain, pos, key):
    scores = (torch.einsum("rhd,hkd->rhk", q, leaf.k).relu() * weight[:, :, None]).sum(1) * gain
    distance = pos[:, None] - key
    scores = scores + bias[distance.clamp(min=0)] + token[: len(key)]
    return {"best": scores.masked_fill(distance < 0, -torch.inf).amax(-1)}


@op(positions="near")
def two_leaves(
    q: Rows["head", "dim"], near: Paged["dim"], far: Paged["dim", "wide"], sink: PerHead[f32] | None, scale: Scalar
):
    recent, others = near.keys(), far.keys()
    here = softmax(dot(q, recent) * scale, sink=sink) @ recent
    return {"one": here, "two": softmax(dot(q, others) * scale) @ others.v}


def two_leaves_reference(q, near, far, sink, scale):
    assert sink is None
    pairs = {"one": (near.k, near.k), "two": (far.k, far.v)}
    weights = {n: (torch.einsum("rhd,hkd->hrk", q, k) * scale).softmax(-1) for n, (k, _) in pairs.items()}
    return {n: torch.einsum("hrk,hkd->rhd", weights[n], v) for n, (_, v) in pairs.items()}


@op(positions="near")
def listed(q: Rows["head", "dim"], slots: Rows["slot", i32], near: Paged["dim"], far: Paged["dim"], scale: Scalar):
    keys = concat(near.keys(where=lambda query, key: (key <= query) & (query - key < 4)), far.entries(slots))
    return softmax(dot(q, keys) * scale) @ keys


def listed_reference(q, slots, near, far, scale, pos, key):
    distance = pos[:, None] - key
    recent = torch.einsum("rhd,hkd->hrk", q, near.k).masked_fill((distance < 0) | (distance >= 4), -torch.inf)
    chosen = far.k[:, slots.clamp(min=0)]
    picked = torch.einsum("rhd,hrsd->hrs", q, chosen).masked_fill(slots < 0, -torch.inf)
    p = (torch.cat([recent, picked], 2) * scale).softmax(-1)
    n = len(key)
    return torch.einsum("hrk,hkd->rhd", p[..., :n], near.k) + torch.einsum("hrs,hrsd->rhd", p[..., n:], chosen)


@op
def selected(
    q: Rows["head", "depth", f8e4m3], weight: Rows["head", f32], k: Paged["depth", f8e4m3], *, pool: Const = 1
):
    keys = k.keys(where=lambda query, key: key <= query, pool=pool)
    scores = sum(relu(dot(q, keys)) * weight, over="head") * keys.scale
    return {"best": topk(scores, 9)}


def selected_reference(q, weight, k, pool, pos):
    scores = (torch.einsum("rhd,hkd->rhk", q, k.k).relu() * weight[:, :, None]).sum(1) * k.scale[0]
    out = torch.full((len(q), 9), -1)
    for row, position in enumerate(pos.tolist()):
        candidates = scores[row, : (position + 1) // pool]
        best = candidates.argsort(descending=True, stable=True)[:9]
        out[row, : len(best)] = best
    return {"best": out}


CALLS: list[tuple[Operator, dict[str, object], Sizes]] = [
    (flash_attention, {"mask": mask_named("test", "causal", -1)}, Sizes()),
    (flash_attention, {"mask": None, "sink": None, "with_lse": True}, Sizes((3, 0), (0, 9), heads=6, page_size=1)),
    (flash_attention, {"mask": None}, Sizes(dtype="bfloat16", dims={"dim": 24, "value_dim": 40}, kv_heads=8)),
    (flash_attention, {"mask": None}, Sizes(cache_dtype="float8_e4m3fn", granularity=16, page_size=7, heads=7)),
    (summed, {}, Sizes(dims={"depth": 8, "distance": 200})),
    (two_leaves, {"sink": None}, Sizes(heads=4, page_size=5)),
    (listed, {}, Sizes(heads=4, dims={"slot": 12}, page_size=3)),
    (selected, {}, Sizes(heads=4)),
    (selected, {"pool": 4}, Sizes((3, 6, 0), (3, 30, 8), heads=4, page_size=2)),
]


@pytest.fixture(params=range(len(CALLS)))
def inputs(request: pytest.FixtureRequest) -> Inputs:
    operator, constants, sizes = CALLS[request.param]
    return random_inputs(operator, constants, sizes, seed=3)


def test_binding_is_that_of_the_call(inputs: Inputs) -> None:
    """What `show` lowers for is what `run` runs."""
    outputs = {n: e.dtype for n, e in inputs.spec.outputs}
    bound = bind("test", inputs.spec, inputs.arguments, inputs.input_row_offsets, outputs, {})
    assert bound.binding == binding_of(inputs.spec, inputs.sizes)


def test_runs_checked_and_finite(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every visible key is finite, every page that is needed lies in the pool, and nothing unseen reaches a result."""
    monkeypatch.setenv("TILEWRIGHT_VALIDATE", "1")
    out = run(inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants)
    assert all(t.isfinite().all() for t in out.values())


REFERENCES: dict[str, Reference] = {
    "flash_attention": references.flash_attention,
    "summed": summed_reference,
    "two_leaves": two_leaves_reference,
    "listed": listed_reference,
    "selected": selected_reference,
}


def test_agrees_with_its_reference(inputs: Inputs) -> None:
    """A dense reference sees the numbers that the operator sees, for every kind of parameter."""
    out = run(inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants)
    compared = compare(out, reference_outputs(REFERENCES[inputs.operator.name], inputs))
    assert all(c.ok for c in compared), compared


def test_same_seed_same_inputs() -> None:
    """And another seed gives others."""
    one, two, other = (random_inputs(summed, {}, Sizes(), seed).arguments["q"] for seed in (1, 1, 2))
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert torch.equal(one, two)  # type: ignore[arg-type]  # a tensor as well
    assert not torch.equal(one, other)


def test_what_is_not_used_is_hostile() -> None:
    """Unused slots are NaN, unused table entries junk of every kind, pages out of order and never shared."""
    made = random_inputs(flash_attention, {"mask": None}, Sizes((5, 1, 16), (30, 70, 0), page_size=4), seed=0)
    leaf = made.arguments["kv"]
    assert isinstance(leaf, PagedLeaf)
    stored = sum_of(made.sizes.num_keys)
    for pages in (leaf.keys, leaf.values):
        assert pages is not None
        assert int(pages[..., 0, 0].isfinite().sum()) == stored
    counts = [-(-n // 4) for n in made.sizes.num_keys]
    owned = [p for b, n in enumerate(counts) for p in leaf.lookup_table[b, :n].tolist()]
    assert len(set(owned)) == len(owned) < leaf.num_pages
    assert owned != sorted(owned)
    junk = {int(p) for b, n in enumerate(counts) for p in leaf.lookup_table[b, n:]}
    assert {-1, 2**31 - 1} < junk


def sum_of(numbers: tuple[int, ...]) -> int:
    return int(np.sum(numbers))


def test_dense_is_what_the_pages_hold() -> None:
    """Row by row through the table, scales included, once per query head."""
    sizes = Sizes((2, 3), (4, 1), heads=6, kv_heads=2, cache_dtype="float8_e4m3fn", granularity=16, page_size=3)
    made = random_inputs(flash_attention, {"mask": None}, sizes)
    leaf, dense = made.arguments["kv"], made.dense(1)
    assert isinstance(leaf, PagedLeaf)
    assert leaf.key_scales is not None
    for j in range(4):
        page = int(leaf.lookup_table[1, j // 3])
        stored, scale = leaf.keys[page, j % 3, 1].double(), leaf.key_scales[page, j % 3, 1].double()
        for head in (3, 4, 5):
            got = dense["kv"].k[head, j]
            assert torch.equal(got, stored * scale.repeat_interleave(16))
    q = made.arguments["q"]
    assert isinstance(q, torch.Tensor)
    assert torch.equal(dense["q"], q[2:5].double())  # type: ignore[arg-type]
    assert dense["pos"].tolist() == [1, 2, 3]
    assert dense["mask"] is None
    assert dense["with_lse"] is False


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(heads=6, kv_heads=4), "kv_heads is 4; expected a divisor of heads=6"),
        (Sizes(dims={"head": 4}), "dims is head; expected axes out of depth, distance"),
    ],
)
def test_sizes_that_do_not_fit(sizes: Sizes, message: str) -> None:
    """Refused by name."""
    with pytest.raises(ArgumentValueError, match=message):
        random_inputs(summed, {}, sizes)


# ---- references ------------------------------------------------------------------------------------------------------


def test_reference_that_returns_something_else() -> None:
    """The names of outputs, and one entry per row."""
    made = random_inputs(summed, {}, Sizes())
    with pytest.raises(BadReference, match="returned worst; the operator's outputs are best"):
        reference_outputs(lambda **named: {"worst": named["q"]}, made)
    with pytest.raises(BadReference, match=r"output 'best' has shape \[\] for a sequence of 5 rows"):
        reference_outputs(lambda q: None if q is None else q.sum(), made)


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.5], [0.25], 0.25),  # absolute below 1
        ([110.0], [100.0], 0.1),  # relative above
        ([-torch.inf], [-torch.inf], 0.0),
        ([torch.inf], [-torch.inf], torch.inf),
        ([torch.nan], [0.0], torch.inf),
        ([0.0], [torch.nan], torch.inf),
        ([torch.nan], [torch.nan], torch.inf),
        ([1.0, 2.0], [1.0], torch.inf),
        ([], [], 0.0),
    ],
)
def test_worst_error(got: list[float], want: list[float], error: float) -> None:
    """One number that cannot hide a NaN."""
    assert worst_error(torch.tensor(got), torch.tensor(want, dtype=torch.float64)) == pytest.approx(error)
