"""The attention gallery: every operator is its float64 reference, under any schedule, page size and dtype."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gallery import LATENT, OPERATORS, ROWS, WIDTHS, Case, inputs_of, mixed, run, schedules_of, worst
from support.running import named

from tilewright.commands.operators import find
from tilewright.dsl.errors import ArgumentError, ArgumentShapeError, ArgumentValueError, AxisMismatch
from tilewright.dsl.schedule import Schedule

pytestmark = pytest.mark.both_targets(slow=True)

SCHEDULES = (
    Schedule(rows=2, heads=1, keys=3, masks="split"),
    Schedule(rows=4, keys=4, partitions=2),
    Schedule(rows=3, keys=7, partitions=4, masks="always"),
    Schedule(rows=16, keys=128),
)

# Two documents in turn, the second and third of the first sequence of one number; tokens past the keys are junk.
DOCUMENTS = torch.tensor(
    [[0, 0, 7, 7, 7, 0, 0, 5] + [9] * 17, [3] * 10 + [4] * 12 + [3] * 3, [1] * 25, [2] * 3 + [6] * 22]
)
TREES = torch.randint(-(1 << 31), 1 << 31, (sum(ROWS), 1), generator=torch.Generator().manual_seed(3)).to(torch.int32)
# What is stored in float8 is as large as 448.
DESCALES = {
    "k_descale": torch.arange(1, 9).reshape(4, 2) / 448,
    "v_descale": torch.arange(9, 1, -1).reshape(4, 2) / 448,
}
T5 = {"max_distance": 9}
T5_DIMS = {**WIDTHS, "distance": 10, "bucket": 8}

CASES: dict[str, Case] = {
    "mla": Case("mla_attention", {"latent": 12, "rope": 4, "with_lse": True}, {**LATENT, "dim": 16}, kv_heads=1),
    "mla, sparse": Case(
        "mla_sparse_attention", {"latent": 12, "with_lse": True}, {"dim": 16, "slot": 9}, kv_heads=1, listed=True
    ),
    "heavily compressed": Case(
        "heavily_compressed_attention", {"window": 4, "rate": 3, "with_lse": True}, {"dim": 8}, kv_heads=1
    ),
    "heavily compressed, no sink": Case(
        "heavily_compressed_attention", {"window": 4, "rate": 3, "sink": None}, {"dim": 8}, kv_heads=1
    ),
    "mixed rows": Case("mla_mixed_rows", {"indices": None, "with_lse": True}, LATENT, kv_heads=1),
    "mixed rows, listed": Case(
        "mla_mixed_rows", {"with_lse": True}, {**LATENT, "slot": 9}, kv_heads=1, listed=True
    ),
    "mixed rows, window and entries": Case(
        "mixed_rows_window_and_entries", {"window": 4}, {"dim": 12, "rope": 4, "slot": 9}, {}, 1, listed=True, walks=2
    ),
    "sliding sink": Case("sliding_sink_attention", {"window": 4}),
    "sink, every key": Case("sliding_sink_attention", {"window": None}),
    "first keys and window": Case("first_keys_and_window_attention", {"first": 2, "window": 4}),
    "softcap": Case("softcap_attention", {"cap": 0.5, "with_lse": True}),
    "softcap in a window": Case("softcap_attention", {"cap": 0.5, "window": 4}),
    "alibi": Case("alibi_attention"),
    "bias by distance": Case("relative_bias_attention"),
    "bias by distance, short table": Case("relative_bias_attention", dims={**WIDTHS, "distance": 5}),
    "t5": Case("t5_attention", T5, T5_DIMS),
    "t5, both ways": Case("t5_attention", {**T5, "both_ways": 4}, T5_DIMS, {"bucket_of": torch.arange(10) // 3}),
    "prefix": Case("prefix_lm_attention", given={"prefix": torch.tensor([6, 9, 0, 100])}),
    "documents": Case("document_attention", dims={**WIDTHS, "token": 25}, given={"document": DOCUMENTS}),
    "tree": Case(
        "tree_attention", {}, {**WIDTHS, "word": 1}, {"committed": torch.tensor([3, 19, 0, 1]), "tree": TREES}
    ),
    "sigmoid": Case("sigmoid_attention", given={"bias": -2.5}),
    "sigmoid in a window": Case("sigmoid_attention", {"window": 4}, given={"bias": -1.0}),
    "differential": Case("differential_attention", {"half": 4}, {**WIDTHS, "half": 4}),
    "prefix alone": Case("prefix_attention", given={"length": torch.tensor([3, 21, 4, 0])}),
    "descaled": Case("descaled_attention", given=DESCALES),
}  # fmt: skip

MANY = [
    pytest.param(name, schedule, id=f"{name}-{named(schedule)}", marks=pytest.mark.slow if n > 1 else ())
    for name, case in CASES.items()
    for n, schedule in enumerate(schedules_of(case, SCHEDULES))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), MANY)
def test_is_its_reference(name: str, schedule: Schedule, seed: int) -> None:
    """Rows, heads, keys, partitions and masks in any way."""
    assert worst(inputs_of(CASES[name], seed), schedule) < 1e-5


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "bfloat16"), pytest.param(64, "float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_page_sizes_and_dtypes(name: str, page_size: int, dtype: str, seed: int) -> None:
    """Any page size, inputs and caches of 16 bits, the default schedule. Outputs are float32, so nothing is rounded."""
    assert worst(inputs_of(CASES[name], seed, page_size, dtype=dtype)) < 1e-5


@pytest.mark.parametrize("name", ["sliding sink", "mla", "differential", "sigmoid", "heavily compressed"])
def test_float8(name: str, seed: int) -> None:
    """float8 caches with a scale per 5 elements."""
    case = replace(CASES[name], cache_dtype="float8_e4m3fn")
    assert worst(inputs_of(case, seed, 4, granularity=5), SCHEDULES[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.kv_heads > 1 and n != "descaled"])
def test_groups_of_heads(name: str, kv_heads: int, seed: int) -> None:
    """One key-value head for all, one for each."""
    schedule = Schedule(rows=3, keys=5, partitions=2)
    assert worst(inputs_of(replace(CASES[name], kv_heads=kv_heads), seed), schedule) < 1e-5


@pytest.mark.parametrize("granularity", [5, 12])
@pytest.mark.parametrize(
    ("name", "tails"),
    [
        ("mixed rows", ("ropes",)),
        ("mixed rows, listed", ("ropes",)),
        ("mixed rows, window and entries", ("recent_rope", "entries_rope")),
    ],
)
def test_rows_of_two_formats(name: str, tails: tuple[str, ...], granularity: int, seed: int) -> None:
    """float8 rows with scales beside bfloat16 tails."""
    case = CASES[name]
    inputs = mixed(case, seed, tails, granularity)
    for schedule in (None, *schedules_of(case, SCHEDULES[:1])):
        assert worst(inputs, schedule) < 1e-5


def test_decode_of_published_widths(seed: int) -> None:
    """576 and 512 as DeepSeek has them, and 448 + 64: a row per sequence."""
    decode: dict[str, Any] = {"rows": (1, 1), "cached": (40, 3), "heads": 16, "page_size": 16}
    mla = Case("mla_attention", {}, {"latent": 512, "rope": 64, "dim": 576}, kv_heads=1)
    listed = Case("mla_sparse_attention", {}, {"dim": 576, "slot": 32}, kv_heads=1)
    for case in (mla, listed):
        out = run(inputs_of(case, seed, **decode))["out"]
        assert out.shape == (2, 16, 512)
        assert worst(inputs_of(case, seed, **decode)) < 1e-5
    v4 = Case("mixed_rows_window_and_entries", {}, {"dim": 448, "rope": 64, "slot": 8}, kv_heads=1)
    assert worst(mixed(v4, seed, ("recent_rope", "entries_rope"), 64, **decode)) < 1e-5


# ---- declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_declaration(name: str) -> None:
    """Found by name, at most 30 lines, and says what it takes, gives and raises."""
    operator = find(name).operator
    assert len(inspect.getsource(operator.fn).rstrip().splitlines()) <= 30
    doc = inspect.getdoc(operator.fn) or ""
    assert "Returns" in doc
    assert "Raises" in doc
    runtime = [n for n, (a, _) in operator.parameters.items() if n not in ("with_lse",)]
    assert [n for n in runtime if n not in doc] == []


def test_every_declaration_is_compared() -> None:
    """No operator of these files is left out of the cases."""
    assert set(OPERATORS) == {c.name for c in CASES.values()}


# ---- mistakes --------------------------------------------------------------------------------------------------------


def refused(case: Case, change: dict[str, Any], error: type[Exception], match: str) -> None:
    inputs = inputs_of(case, 0)
    with pytest.raises(error, match=match):
        run(replace(inputs, arguments={**inputs.arguments, **change}))


HEADS, OTHER_HEADS, BATCH = torch.ones(4), torch.ones(3), torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("sliding sink", {"sink": OTHER_HEADS}, r"sink has shape \[3\]; expected \[head=4\]"),
        ("heavily compressed", {"sink": OTHER_HEADS}, "sink"),
        ("alibi", {"slopes": OTHER_HEADS}, "slopes"),
        ("bias by distance", {"bias": torch.ones(3, 9)}, r"bias has shape \[3, 9\]"),
        ("t5", {"weight": torch.ones(8, 3)}, "weight"),
        ("prefix", {"prefix": BATCH}, r"prefix has shape \[3\]; expected \[seq=4\]"),
        ("documents", {"document": DOCUMENTS[:3]}, "document"),
        ("tree", {"tree": TREES[:4]}, "tree"),
        ("tree", {"committed": BATCH}, "committed"),
        ("softcap", {"q": torch.ones(13, 4, 9)}, r"cache has shape .*dim=9"),
        ("sigmoid", {"q": torch.ones(13, 4, 9)}, "cache"),
        ("first keys and window", {"q": torch.ones(13, 4, 9)}, "cache"),
        ("differential", {"q_second": torch.ones(13, 4, 5)}, "q_second"),
        ("differential", {"weight": OTHER_HEADS}, "weight"),
        ("mla", {"q_rope": torch.ones(13, 4, 5)}, "rope"),
        ("mla, sparse", {"indices": torch.zeros(4, 9, dtype=torch.int32)}, "indices"),
        ("mixed rows", {"q_nope": torch.ones(13, 4, 11)}, "latents"),
        ("mixed rows, window and entries", {"q_rope": torch.ones(13, 4, 3)}, "rope"),
        ("prefix alone", {"length": BATCH}, "length"),
        ("descaled", {"k_descale": torch.ones(4, 3)}, "v_descale"),
    ],
)
def test_wrong_sizes_are_named(name: str, change: dict[str, Any], match: str) -> None:
    """An axis that two arguments have must be as long in both."""
    refused(CASES[name], change, ArgumentShapeError, match)


def test_other_mistakes(seed: int) -> None:
    """Heads that do not divide, keys alone where values are needed, positions past the cache, parts past the row."""
    refused(CASES["alibi"], {"q": torch.ones(13, 5, 8), "slopes": torch.ones(5)}, ArgumentError, "divisor of the 5")
    keys_alone = inputs_of(CASES["heavily compressed"], seed).arguments["recent"]
    refused(replace(CASES["alibi"], kv_heads=1), {"cache": keys_alone}, ArgumentError, "holds keys only")
    far = torch.full((13, 9), 500, dtype=torch.int32)
    refused(CASES["mla, sparse"], {"indices": far}, ArgumentValueError, r"indices\[0, 0\]")
    narrow = replace(CASES["mla"], dims={**LATENT, "dim": 15})
    refused(narrow, {}, AxisMismatch, "elements 12..15 of cache rows, which are 15 wide")


def test_operators_are_declarations() -> None:
    """Calling one says how to run it."""
    operator = OPERATORS["alibi_attention"]
    with pytest.raises(TypeError, match=r"tilewright\.run"):
        operator()
