# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, index"
"""Choosing blocks, pages and keys, and attending to what was chosen: exactly the reference's, however it is run."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import assert_same_bits
from support.running import named
from support.selecting import Batch, batch, leaf, made_exact
from support.selection import best
from torch import Tensor

import tilewright
from tilewright.dsl import Paged, Rows, dot, i32, op, softmax
from tilewright.dsl.errors import ArgumentError, ArgumentShapeError, ArgumentValueError
from tilewright.dsl.lang import Operator
from tilewright.dsl.schedule import Schedule
from tilewright.ops import compressor, indexers, page_selection, selected_blocks
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.random_inputs import Inputs, Sizes
from tilewright.references import LIBRARY, SAMPLES, Candidates, Sample, compare, reference_outputs

pytestmark = pytest.mark.both_targets(slow=True)

ROWS, PAST = (5, 1, 0, 7), (3, 21, 4, 0)
FOLDS = (
    Schedule(rows=2, heads=1, keys=3, masks="split"),
    Schedule(rows=4, keys=4, partitions=2),
    Schedule(rows=16, keys=128),
)
LISTS = (Schedule(rows=1, heads=1, keys=3), Schedule(rows=1, heads=1, keys=7, partitions=3, masks="always"))
SELECTS = (
    Schedule(rows=2, keys=3, masks="split"),
    Schedule(rows=1, keys=1, masks="always"),
    Schedule(rows=8, keys=1024),
)
OPERATORS: dict[str, Operator] = {
    x.name: x
    for module in (compressor, indexers, page_selection, selected_blocks)
    for x in vars(module).values()
    if isinstance(x, Operator)
}


def inputs_of(name: str, constants: dict[str, object], seed: int, page_size: int = 3, **sizes: Any) -> Inputs:
    dims = {"dim": 8, **({"group": 3} if name == "choose_by_weight" else {})}
    if name.startswith("indexer"):
        dims, sizes = {"depth": 8}, {"kv_heads": 1, **sizes}
    if name.startswith("attend"):
        dims["value_dim"] = 6
    if name.startswith("attend") or name == "indexer_in_blocks":
        dims["slot"] = 4
    made = Sizes(
        **{"rows": ROWS, "cached": PAST, "heads": 4, "kv_heads": 2, "dims": dims, "page_size": page_size, **sizes}
    )
    if name == "choose_by_weight":
        made = replace(made, heads=2)
    return SAMPLES.get(name, Sample()).inputs(OPERATORS[name], constants, made, seed)


def run(inputs: Inputs, schedule: Schedule | None = None) -> dict[str, Tensor]:
    return tilewright.run(
        inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants, schedule=schedule
    )


def check(inputs: Inputs, schedule: Schedule | None = None) -> None:
    """Close to the reference; picks are those of the reference, equal ones by place."""
    got, want = run(inputs, schedule), reference_outputs(LIBRARY[inputs.operator.name], inputs)
    assert max(c.error for c in compare(got, want)) < 1e-5
    if isinstance(candidates := want["out"], Candidates):
        assert torch.equal(got["out"].long(), candidates.best())


def over(cases: list[tuple[str, dict[str, object]]], schedules: tuple[Schedule, ...]) -> pytest.MarkDecorator:
    params = [
        pytest.param(
            name,
            constants,
            s,
            id=f"{name}-{'-'.join(map(str, constants.values()))}-{named(s)}",
            marks=pytest.mark.slow if n > 1 else (),
        )
        for name, constants in cases
        for n, s in enumerate(schedules)
    ]
    return pytest.mark.parametrize(("name", "constants", "schedule"), params)


# ---- each operator alone ---------------------------------------------------------------------------------------------

CHOICES: list[tuple[str, dict[str, object]]] = [
    ("choose_by_mean", {"block": 4, "top_k": 2}),
    ("choose_by_mean", {"block": 1, "top_k": 30, "local": 3}),
    ("choose_pages", {"block": 3, "top_k": 3}),
    ("choose_pages", {"block": 2, "top_k": 2, "local": 2}),
    ("indexer", {"top_k": 4}),
    ("indexer", {"top_k": 40, "kpool": 3, "rectify": False}),
    ("indexer", {"top_k": 3, "weights": None}),
    ("indexer_in_blocks", {"top_k": 5, "block": 3}),
    ("indexer_in_blocks", {"top_k": 30, "block": 4, "rectify": False, "weights": None}),
]
ATTENTION: list[tuple[str, dict[str, object]]] = [
    (f"attend_by_{lists}", {"block": block, "local": local})
    for lists in ("group", "head")
    for block, local in ((4, 1), (3, 2))
]


@over(CHOICES, SELECTS)
def test_choice_among_ties(name: str, constants: dict[str, object], schedule: Schedule, seed: int) -> None:
    """Whole numbers: many scores are equal, and float32 holds them all, so the order has one answer."""
    schedule = replace(schedule, rows=1) if name == "indexer_in_blocks" else schedule
    check(made_exact(inputs_of(name, constants, seed)), schedule)


@over(
    [*CHOICES, ("choose_by_weight", {"block": 3, "top_k": 4}), ("choose_by_weight", {"block": 2, "top_k": 9})],
    (SELECTS[0],),
)
def test_choice_without_ties(name: str, constants: dict[str, object], schedule: Schedule, seed: int) -> None:
    """Random numbers."""
    schedule = replace(schedule, rows=1) if name == "indexer_in_blocks" else schedule
    check(inputs_of(name, constants, seed), schedule)


@over([("compressed_attention", {"block": 3}), ("compressed_attention", {"block": 1})], FOLDS)
def test_compressed_attention(name: str, constants: dict[str, object], schedule: Schedule, seed: int) -> None:
    """Rows before the first whole block see nothing."""
    check(inputs_of(name, constants, seed), schedule)


@over(ATTENTION, LISTS)
def test_attention_to_lists(name: str, constants: dict[str, object], schedule: Schedule, seed: int) -> None:
    """Any list: unused slots anywhere, blocks twice, blocks among the last and after the row."""
    check(inputs_of(name, constants, seed), schedule)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(
    ("name", "constants"), [*CHOICES[::2], *ATTENTION[::2], ("compressed_attention", {"block": 3})]
)
def test_page_sizes(name: str, constants: dict[str, object], page_size: int, seed: int) -> None:
    """Any, with the default schedule."""
    exact = made_exact if name.startswith(("choose", "indexer")) else lambda x: x
    check(exact(inputs_of(name, constants, seed, page_size)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["indexer", "choose_by_mean"])
def test_sixteen_bits(name: str, dtype: str, seed: int) -> None:
    """The numbers that 16 bits hold, summed in 32."""
    constants: dict[str, object] = {"top_k": 4} if name == "indexer" else {"top_k": 4, "block": 2}
    check(made_exact(inputs_of(name, constants, seed, dtype=dtype)))


def test_float8_keys(seed: int) -> None:
    """A float8 cache of any granularity, dequantised."""
    for granularity in (8, 4, 3):
        check(inputs_of("indexer", {"top_k": 6}, seed, cache_dtype="float8_e4m3fn", granularity=granularity))


@op
def in_window(q: Rows["head", "dim"], chosen: Rows["slot", i32], kv: Paged["dim"]):  # type: ignore[no-untyped-def]
    keys = kv.blocks(chosen, 4, where=lambda query, key: (key <= query) & (query - key < 4))
    return softmax(dot(q, keys)) @ keys


@pytest.mark.parametrize("stale", [2**31 - 1, -1, 0])
def test_what_hides_in_a_listed_block_is_not_read(stale: int) -> None:
    """A row at 5 lists both blocks and sees 2 to 5: the page before is gone, or holds NaN."""
    pages = torch.full((4, 2, 1, 3), torch.nan)
    pages[1], pages[3] = 1.0, 2.0
    table = torch.tensor([[stale, 1, 3, -7]], dtype=torch.int32)
    kv = PagedKVCache.from_block_table(pages, None, table, torch.tensor([5], dtype=torch.int32)).layer(0)
    arguments = {"q": torch.ones(1, 1, 3), "chosen": torch.tensor([[0, 1]], dtype=torch.int32), "kv": kv}
    out = tilewright.run(in_window, arguments, torch.tensor([0, 1]))["out"]
    torch.testing.assert_close(out, torch.full((1, 1, 3), 2 - 1 / (1 + math.exp(3))))


# ---- choosing, then attending ----------------------------------------------------------------------------------------


def block_rows(data: Batch, rng: np.random.Generator, kind: str, block: int, page_size: int) -> PagedLeaf:
    """A row for every whole block of keys: their mean, their bounds, or rows of no meaning."""
    blocks, shape = data.of_blocks(block), data.keys[0].shape[1:]
    first: Any = {"mean": lambda x: x.mean(0), "bounds": lambda x: x.amax(0), "any": lambda x: x.sum(0).sin()}[kind]
    second: Any = {"mean": None, "bounds": lambda x: x.amin(0), "any": lambda x: x.sum(0).cos()}[kind]
    keys = [torch.stack([first(x) for x in b]) if b else torch.empty(0, *shape) for b in blocks]
    values = second and [torch.stack([second(x) for x in b]) if b else torch.empty(0, *shape) for b in blocks]
    return leaf(rng, keys, values, data.past, page_size)


PUBLIC = {
    "native_sparse_attention": ("any", selected_blocks.native_sparse_attention),
    "block_routed_attention": ("mean", selected_blocks.block_routed_attention),
    "page_selected_attention": ("bounds", page_selection.page_selected_attention),
}


@pytest.mark.parametrize(("block", "top_k", "local"), [(4, 2, 1), (3, 3, 2), (8, 1, 1)])
@pytest.mark.parametrize("name", PUBLIC)
def test_attends_to_what_it_chose(name: str, block: int, top_k: int, local: int, rng: np.random.Generator) -> None:
    """The result is attention to the lists that come with it, and holds no trace of a token outside them."""
    data = batch(rng, (37, 0, 9, 5), (3, 11, 0, 1))
    kind, function = PUBLIC[name]
    rows_of_blocks, scale = block_rows(data, rng, kind, block, page_size=3), 0.4
    sizes: dict[str, Any] = {"block": block, "top_k": top_k, "local": local}
    found: Any = function(data.q, data.offsets, data.tokens(rng, 4), rows_of_blocks, scale, **sizes)
    selected, *more = found if name == "native_sparse_attention" else (found,)
    lists = selected.chosen
    assert lists.shape == (len(data.q), 2 if more else 4, top_k)
    for _, r, pos in data.places():
        assert max(lists[r].flatten().tolist()) <= max(-1, pos // block - local)
        candidates = max(0, pos // block - local + 1)
        assert (lists[r] >= 0).sum(-1).tolist() == [min(top_k, candidates)] * lists.shape[1]
        if more and candidates:
            assert (lists[r, :, 0] == 0).all()
    torch.testing.assert_close(selected.out.double(), data.attend(lists, block, local, scale), rtol=1e-5, atol=1e-5)
    needed = data.tokens(rng, 3, data.need(lists, block, local))
    again: Any = function(data.q, data.offsets, needed, rows_of_blocks, scale, **sizes)
    assert_same_bits((again[0] if more else again).out, selected.out)


def test_native_sparse_attention_chooses_by_weight(rng: np.random.Generator) -> None:
    """The compressed branch's weights, summed over the heads of a group, order the blocks."""
    data, block, scale = batch(rng, (50, 3), (2, 9), heads=6), 4, 0.5
    blocks = block_rows(data, rng, "any", block, 2)
    (_, chosen), compressed = selected_blocks.native_sparse_attention(
        data.q, data.offsets, data.tokens(rng, 5), blocks, scale, block=block, top_k=5
    )
    for b, r, pos in data.places():
        count = (pos + 1) // block
        rows = [torch.stack([f(x.sum(0)) for x in data.of_blocks(block)[b]]).double() for f in (torch.sin, torch.cos)]
        for h in range(2):
            q = data.q[r, 3 * h : 3 * h + 3].double()
            weights = (q @ rows[0][:count, h].T * scale).softmax(-1)
            torch.testing.assert_close(
                compressed[r, 3 * h : 3 * h + 3].double(), weights @ rows[1][:count, h], rtol=1e-5, atol=1e-5
            )
            total = weights.sum(0)
            total[:1] = torch.inf
            assert chosen[r, h].tolist() == best(total[: max(0, pos // block - 1)].numpy(), 5)


def test_half_precision_queries(rng: np.random.Generator) -> None:
    """The result has the queries' dtype."""
    data = batch(rng, (9,), (3,), exact=True)
    means = block_rows(data, rng, "bounds", 2, 2)
    out, _ = page_selection.page_selected_attention(
        data.q.to(torch.bfloat16), data.offsets, data.tokens(rng, 2), means, 1.0, block=2, top_k=1
    )
    assert out.dtype == torch.bfloat16


# ---- declarations and mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_declaration(name: str) -> None:
    """At most 30 lines, and says what it takes, gives and raises."""
    operator = OPERATORS[name]
    assert len(inspect.getsource(operator.fn).rstrip().splitlines()) <= 30
    doc = inspect.getdoc(operator.fn) or ""
    assert "Returns" in doc
    assert "Raises" in doc
    assert [n for n in operator.parameters if n not in doc] == []


@pytest.mark.parametrize(
    ("name", "constants", "argument", "shape", "match"),
    [
        ("compressed_attention", {"block": 2}, "q", (13, 4, 9), r"blocks has shape \[2, 8\]; expected .*dim=9"),
        ("choose_by_weight", {"block": 2, "top_k": 1}, "total", (13, 2, 4), r"total has shape \[13, 2, 4\]"),
        ("choose_by_weight", {"block": 2, "top_k": 1}, "total", (13, 4, 3), "total"),
        ("choose_by_mean", {"block": 2, "top_k": 1}, "q", (13, 4, 5), "means"),
        ("attend_by_group", {"block": 2}, "chosen", (13, 4, 3), r"kv_head=4"),
        ("attend_by_head", {"block": 2}, "chosen", (13, 2, 3), r"chosen has shape \[13, 2, 3\]"),
        ("attend_by_head", {"block": 2}, "chosen", (12, 4, 3), "row"),
        ("choose_pages", {"block": 2, "top_k": 1}, "q", (13, 4, 7), "bounds"),
        ("indexer", {"top_k": 1}, "weights", (13, 3), r"weights has shape \[13, 3\]"),
        ("indexer", {"top_k": 1}, "q", (13, 4, 7), "keys"),
        ("indexer_in_blocks", {"top_k": 1, "block": 2}, "weights", (12, 4), "weights"),
    ],
)
def test_wrong_sizes_are_named(
    name: str, constants: dict[str, object], argument: str, shape: tuple[int, ...], match: str
) -> None:
    """The argument, what it has and what was expected."""
    inputs = inputs_of(name, constants, 0)
    like: Any = inputs.arguments[argument]
    wrong = {**inputs.arguments, argument: torch.zeros(shape, dtype=like.dtype)}
    with pytest.raises(ArgumentShapeError, match=match):
        run(replace(inputs, arguments=wrong))


def test_lists_and_heads_must_fit(rng: np.random.Generator) -> None:
    """Heads in whole groups, sizes of at least 1, and caches that agree."""
    data = batch(rng, (9,), (3,))
    blocks, tokens = block_rows(data, rng, "any", 2, 2), data.tokens(rng, 2)

    def call(**change: Any) -> None:
        given = {"q": data.q, "input_row_offsets": data.offsets, "kv": tokens, "blocks": blocks, "scale": 1.0}
        selected_blocks.native_sparse_attention(**{**given, "block": 2, "top_k": 1, **change})

    call()
    with pytest.raises(ArgumentError, match="2 key-value heads; expected a divisor of the 3 query heads"):
        call(q=data.q[:, :3])
    with pytest.raises(ArgumentValueError, match="top_k is 0; expected an integer in 1"):
        call(top_k=0)
    with pytest.raises(ArgumentValueError, match="local"):
        call(local=0)
    with pytest.raises(ArgumentShapeError, match="kv_head"):
        call(kv=batch(rng, (9,), (3,), kv_heads=1).tokens(rng, 2))
