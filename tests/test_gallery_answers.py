"""What the literature says of the gallery's attention: limits in which one is another, and numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log
from typing import Any

import pytest
import torch
from support.gallery import OPERATORS, leaf_of, offsets_of
from torch import Tensor

import tilewright
from tilewright.dsl.errors import ArgumentDTypeError, ArgumentError, ArgumentRankError, ArgumentValueError
from tilewright.dsl.schedule import Schedule
from tilewright.ops.cache import PagedLeaf
from tilewright.ops.masks import mask_named
from tilewright.ops.position_bias import alibi_slopes, t5_buckets
from tilewright.ops.structured_masks import tree_words

pytestmark = pytest.mark.both_targets(slow=True)

SCHEDULE = Schedule(rows=2, keys=4, partitions=2)
ROWS, KEYS = (4, 1), (9, 6)  # of this call, and in all
OFFSETS = offsets_of(ROWS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cache(width: int = 8, value_width: int = 8, kv_heads: int = 2) -> PagedLeaf:
    keys = [normal(n, kv_heads, width, seed=n) for n in KEYS]
    return leaf_of(keys, [normal(n, kv_heads, value_width, seed=n + 1) for n in KEYS], ROWS)


def queries(width: int = 8, seed: int = 3) -> Tensor:
    return normal(sum(ROWS), 4, width, seed=seed)


def run(name: str, arguments: dict[str, Any], offsets: Tensor = OFFSETS, **constants: object) -> Tensor:
    return tilewright.run(OPERATORS[name], arguments, offsets, constants=constants, schedule=SCHEDULE)["out"]


def plain(q: Tensor, leaf: PagedLeaf, mask: str = "causal", window: int | None = None, scale: float = 0.5) -> Tensor:
    """The library's flash attention."""
    from tilewright.ops.flash_attention import flash_attention

    arguments = {"q": q, "kv": leaf, "scale": scale}
    constants = {"mask": mask_named("test", mask, window)}
    return tilewright.run(flash_attention, arguments, OFFSETS, constants=constants, schedule=SCHEDULE)["out"]


def equal_scores(values: list[float], *, rows: int = 1, heads: int = 1) -> dict[str, Any]:
    """q = 0, so that every key a row sees has the score 0: values alone decide."""
    v = torch.tensor(values).reshape(-1, 1, 1)
    return {"q": torch.zeros(rows, heads, 1), "cache": leaf_of([torch.zeros_like(v)], [v], [rows]), "scale": 1.0}


ONE = offsets_of([1])


# ---- one is another --------------------------------------------------------------------------------------------------


def given(q: Tensor | None = None, **more: object) -> dict[str, Any]:
    return {"q": queries() if q is None else q, "cache": cache(), "scale": 0.5, **more}


@pytest.mark.parametrize(
    ("name", "arguments", "constants"),
    [
        ("sliding_sink_attention", {"sink": torch.full((4,), -inf)}, {"window": None}),
        ("first_keys_and_window_attention", {}, {"first": 0, "window": 100}),
        ("first_keys_and_window_attention", {}, {"first": 100, "window": 1}),
        ("softcap_attention", {}, {"cap": 1e4}),
        ("alibi_attention", {"slopes": torch.zeros(4)}, {}),
        ("relative_bias_attention", {"bias": torch.ones(4, 9)}, {}),  # the same for every key
        ("t5_attention", {"weight": torch.ones(32, 4), "bucket_of": t5_buckets()}, {}),
        ("prefix_lm_attention", {"prefix": torch.zeros(2, dtype=torch.int32)}, {}),
        ("document_attention", {"document": torch.full((2, 9), 5, dtype=torch.int32)}, {}),
    ],
)
def test_causal_attention_as_a_limit(name: str, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """No sink, an endless window, no bias, no prefix, one document: plain causal softmax."""
    assert torch.allclose(run(name, given(**arguments), **constants), plain(queries(), cache()), atol=1e-5)


def test_other_limits() -> None:
    """A window alone; a prefix of everything; both ways with equal weights."""
    window = plain(queries(), cache(), "sliding_window_causal", 3)
    no_sink = torch.full((4,), -inf)
    for name, arguments, constants in (
        ("sliding_sink_attention", {"sink": no_sink}, {"window": 3}),
        ("first_keys_and_window_attention", {}, {"first": 0, "window": 3}),
        ("softcap_attention", {}, {"cap": 1e4, "window": 3}),
    ):
        assert torch.allclose(run(name, given(**arguments), **constants), window, atol=1e-5)
    every = plain(queries(), cache(), "null")
    prefix = given(prefix=torch.tensor([9, 100], dtype=torch.int32))
    assert torch.allclose(run("prefix_lm_attention", prefix), every, atol=1e-6)
    t5 = given(weight=torch.ones(32, 4), bucket_of=t5_buckets(16))
    assert torch.allclose(run("t5_attention", t5, both_ways=16), every, atol=1e-5)


def test_t5_is_a_bias_by_distance() -> None:
    """Causal T5 is the table of its buckets."""
    weight, buckets = normal(32, 4), t5_buckets()
    bucketed = run("t5_attention", given(weight=weight, bucket_of=buckets))
    table = weight[buckets[:9].long()].T.contiguous()
    assert torch.allclose(bucketed, run("relative_bias_attention", given(bias=table)), atol=1e-6)


def test_alibi_is_a_bias_by_distance() -> None:
    slopes = alibi_slopes(4)
    table = -slopes[:, None] * torch.arange(9)
    biased = run("relative_bias_attention", given(bias=table))
    assert torch.allclose(run("alibi_attention", given(slopes=slopes)), biased, atol=1e-6)


def test_documents_are_sequences() -> None:
    """A document packed behind others is what it is alone."""
    k, v, q = normal(9, 2, 8), normal(9, 2, 8, seed=1), normal(9, 4, 8, seed=2)
    document = torch.tensor([[4, 4, 4, 1, 1, 9, 9, 9, 9]], dtype=torch.int32)
    arguments = {"q": q, "cache": leaf_of([k], [v], [9]), "document": document, "scale": 0.5}
    packed = run("document_attention", arguments, offsets_of([9]))
    for start, end in ((0, 3), (3, 5), (5, 9)):
        alone = {"q": q[start:end], "cache": leaf_of([k[start:end]], [v[start:end]], [end - start]), "scale": 0.5}
        alone["document"] = torch.zeros(1, end - start, dtype=torch.int32)
        found = run("document_attention", alone, offsets_of([end - start]))
        assert torch.allclose(packed[start:end], found, atol=1e-6)


def test_differential_without_its_second_softmax() -> None:
    """lambda 0 is the first softmax; with both alike, lambda 1 leaves nothing."""
    leaf, q, other = cache(8), queries(4), queries(4, seed=8)
    first = leaf_of([normal(n, 2, 8, seed=n)[..., :4] for n in KEYS], [normal(n, 2, 8, seed=n + 1) for n in KEYS], ROWS)
    arguments = {"q_first": q, "q_second": other, "cache": leaf, "weight": torch.zeros(4), "scale": 0.5}
    assert torch.allclose(run("differential_attention", arguments, half=4), plain(q, first), atol=1e-6)
    alike = [torch.cat([normal(n, 2, 4, seed=n)] * 2, -1) for n in KEYS]
    arguments |= {
        "q_second": q, "cache": leaf_of(alike, [normal(n, 2, 8) for n in KEYS], ROWS), "weight": torch.ones(4),
    }  # fmt: skip
    assert run("differential_attention", arguments, half=4).abs().max() < 1e-6


def test_mla_is_attention_of_whole_rows() -> None:
    """576 and 512: keys are rows, values their first part; a list of all positions up to its own is causal."""
    rows = [normal(n, 1, 16, seed=n) for n in KEYS]
    leaf, q = leaf_of(rows, None, ROWS), queries(16)
    parts = {"q_nope": q[..., :12].contiguous(), "q_rope": q[..., 12:].contiguous(), "cache": leaf, "scale": 0.5}
    found = run("mla_attention", parts, latent=12, rope=4)
    assert torch.allclose(found, plain(q, leaf_of(rows, [r[..., :12] for r in rows], ROWS)), atol=1e-6)
    pos = torch.tensor([5, 6, 7, 8, 5])
    listed = torch.where(torch.arange(9) <= pos[:, None], torch.arange(9), -1).to(torch.int32)
    arguments = {"q": q, "indices": listed.flip(1).contiguous(), "cache": leaf, "scale": 0.5}
    sparse = tilewright.run(OPERATORS["mla_sparse_attention"], arguments, OFFSETS, constants={"latent": 12})["out"]
    assert torch.allclose(found, sparse, atol=1e-6)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_alibi_slopes() -> None:
    """Those of the paper: 1/2 .. 1/256 for 8 heads; for 12 heads, four more between them."""
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert torch.allclose(alibi_slopes(16), torch.tensor([2 ** (-n / 2) for n in range(1, 17)]))
    assert torch.allclose(alibi_slopes(12)[8:], torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]))
    assert alibi_slopes(1).tolist() == [2**-8]
    with pytest.raises(ArgumentError, match="heads"):
        alibi_slopes(0)


def test_alibi_halves_with_distance() -> None:
    """Slope ln 2: weights 1/4, 1/2, 1 of equal keys."""
    out = run("alibi_attention", {**equal_scores([4.0, 2.0, 1.0]), "slopes": torch.tensor([log(2)])}, ONE)
    assert out.item() == pytest.approx(3 / 1.75)


def test_t5_buckets() -> None:
    """Those of the model, for a decoder and an encoder, and as the paper describes them."""
    assert t5_buckets().tolist()[:17] == list(range(17))
    assert t5_buckets()[[20, 32, 64, 100, 127, 128]].tolist() == [17, 21, 26, 30, 31, 31]
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    back = -torch.arange(129)
    model = t5._relative_position_bucket
    assert torch.equal(t5_buckets(), model(back, bidirectional=False, num_buckets=32, max_distance=128).int())
    both = model(torch.cat([back, -back[1:]]), bidirectional=True, num_buckets=32, max_distance=128).int()
    assert torch.equal(torch.cat([t5_buckets(16), t5_buckets(16)[1:] + 16]), both)
    for buckets, distance in ((8, 20), (7, 64), (33, 256)):
        mine = t5_buckets(buckets, distance)
        theirs = model(-torch.arange(distance + 1), bidirectional=False, num_buckets=buckets, max_distance=distance)
        assert torch.equal(mine, theirs.int())


@pytest.mark.parametrize(("buckets", "max_distance"), [(1, 128), (32, 31), (32, 1), (2.5, 8)])
def test_t5_buckets_that_are_none(buckets: int, max_distance: int) -> None:
    with pytest.raises(ArgumentError):
        t5_buckets(buckets, max_distance)


def test_sink_takes_its_share() -> None:
    """Four equal keys and a sink of ln 4 share evenly; a sink of 0 takes a fifth."""
    arguments = equal_scores([1.0] * 6, heads=3)
    arguments["sink"] = torch.tensor([log(4), 0.0, inf])
    assert run("sliding_sink_attention", arguments, ONE, window=4).flatten().tolist() == pytest.approx([0.5, 0.8, 0.0])


def test_first_keys_and_window() -> None:
    """Two first keys and three recent ones, of which none counts twice."""
    far = run("first_keys_and_window_attention", equal_scores([float(n) for n in range(9)]), ONE, first=2, window=3)
    near = run("first_keys_and_window_attention", equal_scores([0.0, 1.0, 2.0, 3.0]), ONE, first=2, window=3)
    assert [far.item(), near.item()] == pytest.approx([(0 + 1 + 6 + 7 + 8) / 5, 6 / 4])


def test_pages_between_are_not_read() -> None:
    """First keys and a window: what lies between them may be gone."""
    q, k, v = normal(2, 4, 8), normal(40, 2, 8), normal(40, 2, 8, seed=1)
    leaf = leaf_of([k], [v], [2], page_size=4)
    arguments = {"q": q, "cache": leaf, "scale": 0.5}
    whole = run("first_keys_and_window_attention", arguments, offsets_of([2]), first=3, window=6)
    gone = leaf.lookup_table.clone()
    gone[0, 1:8] = -1
    arguments["cache"] = replace(leaf, lookup_table=gone)
    assert torch.equal(run("first_keys_and_window_attention", arguments, offsets_of([2]), first=3, window=6), whole)


def test_softcap_saturates() -> None:
    """Scores of plus and minus a million are plus and minus the cap: with ln(3) / 2, weights of 3 : 1."""
    keys, values = torch.tensor([1e6, -1e6]).reshape(2, 1, 1), torch.tensor([1.0, 0.0]).reshape(2, 1, 1)
    arguments = {"q": torch.ones(1, 1, 1), "cache": leaf_of([keys], [values], [1]), "scale": 1.0}
    assert run("softcap_attention", arguments, ONE, cap=log(3) / 2).item() == pytest.approx(0.75)


def test_sigmoid_of_equal_keys() -> None:
    """Every key has weight sigmoid(bias), whatever the others are: with bias -ln(n - 1), a mean."""
    out = run("sigmoid_attention", {**equal_scores([1.0, 2.0, 3.0, 6.0]), "bias": -log(3)}, ONE)
    assert out.item() == pytest.approx(3.0)


def test_entries_close_with_their_last_token() -> None:
    """Position 8, window 4, 3 tokens an entry: four tokens and entries 0, 1, 2; a row earlier one entry fewer."""
    tokens, entries = torch.arange(9.0).reshape(-1, 1, 1), torch.tensor([100.0, 200.0, 300.0, inf]).reshape(-1, 1, 1)
    arguments = {
        "q": torch.zeros(2, 1, 1), "recent": leaf_of([tokens], None, [2]), "entries": leaf_of([entries], None, [0]),
        "sink": None, "scale": 1.0,
    }  # fmt: skip
    out = run("heavily_compressed_attention", arguments, offsets_of([2]), window=4, rate=3).flatten()
    assert out.tolist() == pytest.approx([(4 + 5 + 6 + 7 + 300) / 6, (5 + 6 + 7 + 8 + 600) / 7])


def test_repeats_count_twice() -> None:
    """A position listed twice has twice the weight; an unused slot has none, wherever it stands."""
    rows = torch.tensor([3.0, 9.0]).reshape(2, 1, 1)
    arguments = {
        "q": torch.zeros(1, 1, 1), "indices": torch.tensor([[1, -1, 0, 1]], dtype=torch.int32),
        "cache": leaf_of([rows], None, [1]), "scale": 1.0,
    }  # fmt: skip
    out = tilewright.run(OPERATORS["mla_sparse_attention"], arguments, ONE, constants={"latent": 1})["out"]
    assert out.item() == pytest.approx(7.0)


# ---- trees -----------------------------------------------------------------------------------------------------------


def test_words_of_a_tree() -> None:
    """A root, two children, and a grandchild of the second; the 32nd bit is the sign; nothing is nothing."""
    two = tree_words(torch.tensor([-1, 0, 0, 2, -1, -1]), offsets_of([4, 0, 2]))
    assert two.tolist() == [[0b1], [0b11], [0b101], [0b1101], [0b1], [0b10]]
    chain = tree_words(torch.arange(-1, 33), offsets_of([34]))
    assert chain[30:].tolist() == [[(1 << 31) - 1, 0], [-1, 0], [-1, 1], [-1, 3]]
    assert tree_words(torch.empty(0, dtype=torch.int64), offsets_of([0])).shape == (0, 0)
    assert tree_words(torch.empty(0, dtype=torch.int64), offsets_of([])).shape == (0, 0)


@pytest.mark.parametrize(
    ("parents", "rows", "error", "match"),
    [
        (
            torch.tensor([-1, -1, 1]),
            [1, 2],
            ArgumentValueError,
            r"parents\[2\] is 1; expected an earlier draft, below 1",
        ),
        (torch.tensor([0.5]), [1], ArgumentDTypeError, "parents"),
        (torch.tensor([[0]]), [1], ArgumentRankError, "parents"),
        (torch.tensor([-1]), [2], ArgumentValueError, "row_offsets"),
    ],
)
def test_words_of_no_tree(parents: Tensor, rows: list[int], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tree_words(parents, offsets_of(rows))


def test_a_chain_is_causal() -> None:
    """Each draft continues the one before."""
    words = tree_words(torch.cat([torch.arange(-1, n - 1) for n in ROWS]), OFFSETS)
    committed = torch.tensor([k - r for k, r in zip(KEYS, ROWS, strict=True)], dtype=torch.int32)
    found = run("tree_attention", given(committed=committed, tree=words))
    assert torch.allclose(found, plain(queries(), cache()), atol=1e-6)


def test_a_branch_is_a_sequence() -> None:
    """Forty drafts in a tree: each row is what the last token of its own path is, after the committed text."""
    gen = torch.Generator().manual_seed(7)
    parents = [int(torch.randint(-1, max(1, i), (), generator=gen)) if i else -1 for i in range(40)]
    k, v, q = normal(45, 2, 8), normal(45, 2, 8, seed=1), normal(40, 4, 8, seed=2)
    arguments = {
        "q": q, "cache": leaf_of([k], [v], [40], 7), "committed": torch.tensor([5], dtype=torch.int32),
        "tree": tree_words(torch.tensor(parents), offsets_of([40])), "scale": 0.5,
    }  # fmt: skip
    found = run("tree_attention", arguments, offsets_of([40]))
    for draft in (0, 1, 17, 31, 32, 39):
        path, at = [], draft
        while at >= 0:
            path.append(5 + at)
            at = parents[at]
        seen = [*range(5), *reversed(path)]
        alone = {"q": q[draft : draft + 1], "cache": leaf_of([k[seen]], [v[seen]], [1]), "scale": 0.5}
        alone["slopes"] = torch.zeros(4)
        assert torch.allclose(found[draft], run("alibi_attention", alone, ONE)[0], atol=1e-5)
