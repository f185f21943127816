"""Tiny DeepSeek models served through our operators on paged caches give the logits and tokens of the eager models."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.demo import compressor, deepseek_v4, deepseek_v32, indexing, serving
from tilewright.demo.compressor import CompressedPages
from tilewright.demo.deepseek_v4 import check_deepseek_v4, tiny_deepseek_v4
from tilewright.demo.deepseek_v32 import check_deepseek_v32, tiny_deepseek_v32
from tilewright.demo.page_pool import PagePool
from tilewright.demo.serving import ModelCheck

pytestmark = pytest.mark.both_targets(slow=True)

CHECKS: dict[str, Callable[..., ModelCheck]] = {"v4": check_deepseek_v4, "v32": check_deepseek_v32}

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'tilewright[models]'"
)


# ---- the models ------------------------------------------------------------------------------------------------------

WORKLOADS: dict[str, dict[str, Any]] = {
    "pages-of-3": {"page_sizes": (3, 3)},
    "pages-of-8": {"page_sizes": (8, 8)},
    "pages-of-1-and-7": {"page_sizes": (1, 7), "seed": 1},
    "token-by-token": {"chunk": 1, "steps": 4, "page_sizes": (8, 3)},
    "whole-prompts": {"chunk": 64, "seed": 2},
    "long-and-short": {"lengths": (64, 3, 29, 2), "page_sizes": (3, 8)},
    "around-entries": {"lengths": (33, 31, 32, 5, 7, 8), "chunk": 7, "steps": 8},
}


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("model", CHECKS)
def test_model(model: str, workload: str) -> None:
    """Every logit within 2e-5 and every greedy token, for prompts in chunks beside decode rows."""
    given = WORKLOADS[workload]
    found = CHECKS[model](**given)
    assert found.ok, (found.worst, found.same_tokens)
    assert 0 < found.worst <= found.tolerance == 2e-5 < 1e-3 < found.largest
    assert found.served.rows == sum(n + given.get("steps", 16) - 1 for n in found.prompts)
    assert (found.served.mixed > 0) == (workload != "whole-prompts")
    # Tokens are told apart by more than logits may differ, and decoding has not run into one token.
    best = torch.stack([logits.topk(2).values for request in found.served.logits for logits in request])
    assert (best[:, 0] - best[:, 1]).min() > 10 * found.tolerance
    assert len({t for request in found.served.tokens for t in request}) > 8


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("seed", [4, 7])
@pytest.mark.parametrize("model", CHECKS)
def test_float8_indexer(model: str, seed: int) -> None:
    """The published indexer picks what the model picks from the same float8 numbers, not what it picks in float32."""
    found = CHECKS[model](float8=True, seed=seed)
    assert found.ok, (found.worst, found.same_tokens)
    plain = CHECKS[model](seed=seed)
    pairs = zip(found.served.logits, plain.served.logits, strict=True)
    assert max(float((torch.stack(a) - torch.stack(b)).abs().max()) for a, b in pairs) > 1e-2


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("tiny", [tiny_deepseek_v4, tiny_deepseek_v32])
def test_compared_with_eager_attention(tiny: Callable[[], Any]) -> None:
    """The other side of the comparison is the model as it came: its own eager attention, and its own forward."""
    model = tiny()
    assert model.config._attn_implementation == "eager"
    attention = model.model.layers[0].self_attn
    own = attention.forward
    with serving.replaced([(attention, print)]):
        assert attention.forward is print
    assert attention.forward == own


# ---- faults ----------------------------------------------------------------------------------------------------------


def alter(monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, name: str, **change: Callable[[Any], Any]) -> None:
    """Each call of a function gets some of its arguments changed."""
    right = getattr(owner, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(right).bind(*args, **kwargs)
        call.arguments.update({n: f(call.arguments[n]) for n, f in change.items()})
        return right(*call.args, **call.kwargs)

    monkeypatch.setattr(owner, name, wrong)


class OneEntryLess:
    """Drops one listed entry of one row, in one call of one layer."""

    def __init__(self) -> None:
        self.dropped = 0

    def __call__(self, listed: Tensor | None) -> Tensor | None:
        if listed is None or self.dropped or not len(at := (listed >= 0).nonzero()):
            return listed
        self.dropped, listed = 1, listed.clone()
        listed[tuple(at[-1])] = -1
        return listed


def inside(name: str, change: Callable[[], Callable[[Any], Any]]) -> Callable[[], Callable[[Any], Any]]:
    """The change of one value of an argument that is a dict, where it has the name."""

    def make() -> Callable[[Any], Any]:
        f = change()
        return lambda values: {n: f(v) if n == name else v for n, v in values.items()}

    return make


def without_turned_part(q: Tensor) -> Tensor:
    return torch.cat([q[..., :24], torch.zeros_like(q[..., 24:])], -1)


ATTENTION = "latent_sparse_attention_ragged_paged"
FLOAT8 = "mla_indexer_ragged_float8_paged"

# What is served, the function that is given something wrong, and what.
FAULTS: dict[str, tuple[str, ModuleType | type, str, dict[str, Callable[[], Callable[[Any], Any]]]]] = {
    "nothing": ("v4", deepseek_v4, ATTENTION, {}),
    "sink": ("v4", deepseek_v4, ATTENTION, {"attn_sink": lambda: lambda sink: None}),
    "window": ("v4", deepseek_v4, ATTENTION, {"window": lambda: lambda window: window + 1}),
    "one-entry": ("v4", deepseek_v4, ATTENTION, {"comp_indices": OneEntryLess}),
    "heavy-sink": ("v4", deepseek_v4, "run", {"arguments": inside("sink", lambda: torch.abs)}),
    "heavy-window": ("v4", deepseek_v4, "run", {"constants": inside("window", lambda: lambda window: window + 1)}),
    "entry-late": ("v4", deepseek_v4, "run", {"constants": inside("rate", lambda: lambda rate: rate + 1)}),
    "picked-late": ("v4", deepseek_v4, "best_keys", {"lengths": lambda: lambda lengths: (lengths - 1).clamp(0)}),
    "one-pick-less": ("v4", deepseek_v4, "best_keys", {"top_k": lambda: lambda k: k - 1}),
    "head-weights": ("v4", deepseek_v4, "best_keys", {"weights": lambda: torch.abs}),
    "rotation": ("v4", deepseek_v4, "rotated", {"sin": lambda: torch.abs}),
    "entry-rotation": ("v4", compressor, "rotated", {"sin": lambda: torch.abs}),
    "entry-weights": ("v4", compressor, "compress", {"position_bias": lambda: torch.zeros_like}),
    "float8-nothing": ("v4-float8", indexing, FLOAT8, {}),
    "float8-scales": ("v4-float8", indexing, FLOAT8, {"q_s": lambda: torch.sign}),
    "v32-nothing": ("v32", deepseek_v32, "run", {}),
    "v32-one-key": ("v32", deepseek_v32, "run", {"arguments": inside("indices", OneEntryLess)}),
    "v32-scale": ("v32", deepseek_v32, "run", {"arguments": inside("scale", lambda: lambda scale: scale * 1.001)}),
    "v32-turned-part": ("v32", deepseek_v32, "run", {"arguments": inside("q", lambda: without_turned_part)}),
    "v32-one-pick-less": ("v32", deepseek_v32, "best_keys", {"top_k": lambda: lambda k: k - 1}),
    "v32-head-weights": ("v32", deepseek_v32, "best_keys", {"weights": lambda: torch.abs}),
    "v32-float8-scales": ("v32-float8", indexing, FLOAT8, {"q_s": lambda: torch.sign}),
}


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are off wherever something is wrong, and only there."""
    served, owner, name, changes = FAULTS[fault]
    alter(monkeypatch, owner, name, **{argument: make() for argument, make in changes.items()})
    model, _, float8 = served.partition("-")
    found = CHECKS[model]((26, 2, 9), steps=4, float8=bool(float8))
    assert found.ok == (not changes), found.worst
    assert found.ok or found.worst > 10 * found.tolerance


# ---- the pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("which", ["sparse", "heavy", "index"])
@torch.no_grad()
def test_compressor_over_ragged_rows(which: str) -> None:
    """Requests in chunks of any size close the entries that the model's compressor makes of each whole request."""
    model = tiny_deepseek_v4()
    layer, rate = (2, 8) if which == "heavy" else (1, 4)
    module = model.model.layers[layer].self_attn.compressor
    requests = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (37, 3, 24)]
    pages = CompressedPages([module.indexer if which == "index" else module], len(requests), 37, (5, 3))
    for low, high in pairwise((0, 1, 2, 4, 9, 10, 23, 37)):
        chunks = [r[low:high] for r in requests]
        pages.begin([len(c) for c in chunks])
        pages.append(0, torch.cat(chunks))
        pages.end()
        assert pages.entries.before.cache_lengths.tolist() == [min(high, len(r)) // rate for r in requests]
    leaf = pages.entries.before.layer(0)
    for request, hidden in enumerate(requests):
        at = torch.arange(len(hidden) // rate)
        rows = leaf.keys[leaf.lookup_table[request, at // 3], at % 3, 0]
        want = library_entries(model, layer, hidden[None], indexer=which == "index")
        torch.testing.assert_close(rows, want, atol=2e-6, rtol=2e-6)


def library_entries(model: Any, layer: int, hidden: Tensor, *, indexer: bool) -> Tensor:
    """Entries [entries, dim] that the model's own compressor makes of hidden [1, rows, hidden_size]."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    low = torch.zeros(1, hidden.shape[1], model.config.q_lora_rank)
    positions = torch.arange(hidden.shape[1])[None]
    model.model.layers[layer].self_attn.compressor(hidden, low, positions, cache, layer)
    kept: Any = cache.layers[layer]  # of a class that this model brings
    entries: Tensor = kept.compressed_kv["indexer" if indexer else "compressor"][0]
    return entries


@pytest.mark.parametrize("values", [False, True])
def test_page_pool(values: bool) -> None:
    """Rows of several calls are found by their positions, in the layer they were stored in."""
    pool = PagePool(2, 7, 2, 4, page_size=3, heads=2, values=values)
    first, second = torch.randn(3, 2, 4), torch.randn(4, 2, 4)
    pool.begin([2, 1])
    pool.append(1, first, -first if values else None)
    assert pool.positions.tolist() == [0, 1, 0]
    assert (pool.before.cache_lengths.tolist(), pool.after.cache_lengths.tolist()) == ([0, 0], [2, 1])
    pool.end()
    pool.begin([4, 0])
    pool.append(1, second, -second if values else None)
    assert pool.positions.tolist() == [2, 3, 4, 5]
    leaf = pool.after.layer(1)
    assert leaf.cache_lengths.tolist() == [6, 1]
    at = torch.arange(6)
    where = leaf.lookup_table[0, at // 3], at % 3
    assert torch.equal(leaf.keys[where], torch.cat([first[:2], second]))
    assert (leaf.values is not None) == values
    assert leaf.values is None or torch.equal(leaf.values[where], -leaf.keys[where])
    assert pool.after.layer(0).keys.isnan().all()
