"""The demo's table: cases that serving meets, each checked against a float64 reference and timed against torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewright import references
from tilewright.codegen_cache.launch import run
from tilewright.dsl.lang import Operator
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.ops.flash_attention import flash_attention, generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.indexer import mla_indexer, mla_indexer_ragged_float8_paged
from tilewright.ops.latent_attention import latent_sparse_attention, latent_sparse_attention_ragged_paged
from tilewright.ops.masks import MASKS, mask_named
from tilewright.random_inputs import Inputs, Sizes, random_inputs

from . import peers, sparse
from .variant import softcap_alibi, softcap_alibi_reference

WINDOW = 96
TOP_K = 64
REPEATS = 7

# A prompt, a chunk of a longer one, and requests that decode.
MIXED = ((96, 32, 1, 1, 1, 1, 1, 1), (0, 480, 37, 211, 512, 900, 63, 300))
DECODE = ((1, 1, 1, 1), (4095, 1000, 2500, 17))


@dataclass(frozen=True)
class Case:
    """One line of the table: inputs, how ours is called, the same in torch, and what both should give."""

    name: str
    sizes: Sizes
    operator: Operator
    reference: references.Reference
    ours: Callable[[Inputs], Callable[[], Tensor]]
    peer: Callable[[Inputs], peers.Peer]
    constants: Mapping[str, object] = field(default_factory=dict)
    given: Mapping[str, object] = field(default_factory=dict)  # values of parameters that are not random
    compared: Callable[[Inputs, Tensor], Tensor] = lambda _, out: out  # what of a result the reference gives


@dataclass(frozen=True)
class Result:
    name: str
    rows: int
    keys: int  # of all sequences together
    error: float
    tolerance: float
    ours_ms: float
    torch_ms: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # false for NaN as well

    @property
    def ratio(self) -> float:
        """Time of ours over time of torch: below 1 where ours is quicker."""
        return self.ours_ms / self.torch_ms


def cases() -> list[Case]:
    """Every case of the table, in its order."""
    return [
        attention("mixed serving batch, sinks", Sizes(*MIXED)),
        attention("decode, one partition", Sizes(*DECODE)),
        attention("decode, keys in 4 partitions", Sizes(*DECODE), partitions=4),
        *(attention(f"mask {name}", Sizes(*MIXED), name) for name in MASKS if name != "causal"),
        attention("bfloat16", Sizes(*MIXED, dtype="bfloat16")),
        attention("float8 cache with scales", Sizes(*MIXED, cache_dtype="float8_e4m3fn", granularity=32)),
        attention("pages of 7", Sizes(*MIXED, page_size=7)),
        attention("7 heads on 1 kv head, no sink", Sizes(*MIXED, heads=7, kv_heads=1), sink=False),
        latent("latent, window and listed", Sizes(*MIXED, kv_heads=1, dims={"slot": 32})),
        indexer("indexer, float8", Sizes(*MIXED, heads=16, dims={"depth": 64})),
        variant("softcap + ALiBi, written here", Sizes(*MIXED)),
    ]


def attention(name: str, sizes: Sizes, mask: str = "causal", *, partitions: int = 1, sink: bool = True) -> Case:
    """A case of the library's softmax attention, through its public function."""
    window = WINDOW if MASKS[mask].windowed else -1

    def ours(inputs: Inputs) -> Callable[[], Tensor]:
        return _run_attention(inputs, mask, window, partitions)

    constants: dict[str, object] = {"mask": mask_named("demo", mask, window)}
    if not sink:
        constants["sink"] = None
    return Case(name, sizes, flash_attention, references.flash_attention, ours, peers.sdpa, constants)


def latent(name: str, sizes: Sizes) -> Case:
    """A case of sparse latent attention, through its public function: a window, listed entries and a sink."""
    constants = {"window": WINDOW}
    reference, peer = references.LIBRARY[latent_sparse_attention.name], peers.latent_attention
    return Case(name, sizes, latent_sparse_attention, reference, _run_latent, peer, constants)


def indexer(name: str, sizes: Sizes) -> Case:
    """A case of the float8 indexer, through its public function. Its picks are compared by their scores."""
    constants = {"top_k": TOP_K, "mask": mask_named("demo", "causal", None)}
    reference, compared = sparse.best_scores, sparse.scores_of_picked
    return Case(name, sizes, mla_indexer, reference, _run_indexer, peers.indexer, constants, compared=compared)


def variant(name: str, sizes: Sizes) -> Case:
    """The operator of variant.py, with ALiBi's own slopes: 1/2, 1/4, .. for 8 heads."""
    given = {"cap": 30.0, "slopes": 2.0 ** -torch.linspace(8 / sizes.heads, 8, sizes.heads)}
    peer = peers.eager_softcap_alibi
    return Case(name, sizes, softcap_alibi, softcap_alibi_reference, _run_operator, peer, given=given)


def _run_attention(inputs: Inputs, mask: str, window: int, partitions: int) -> Callable[[], Tensor]:
    a: Any = inputs.arguments
    cache = _cache_of(a["kv"])

    def call() -> Tensor:
        out = generic_flash_attention_kv_cache_ragged_sink(
            a["q"], inputs.input_row_offsets, cache, 0, a["scale"], a["sink"],
            mask_str=mask, local_window_size=window, decode_dispatch_metadata=partitions,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return call


def _run_latent(inputs: Inputs) -> Callable[[], Tensor]:
    a: Any = inputs.arguments
    window = int(str(inputs.constants["window"]))

    def call() -> Tensor:
        out = latent_sparse_attention_ragged_paged(
            a["q"], inputs.input_row_offsets, a["comp_indices"], a["attn_sink"], a["swa_cache"], a["comp_cache"],
            a["scale"], window=window,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return call


def _run_indexer(inputs: Inputs) -> Callable[[], Tensor]:
    a: Any = inputs.arguments
    cache, top_k = _cache_of(a["k"]), int(str(inputs.constants["top_k"]))
    return lambda: mla_indexer_ragged_float8_paged(a["q"], a["q_s"], inputs.input_row_offsets, cache, 0, top_k=top_k)


def _cache_of(leaf: PagedLeaf) -> PagedKVCache:
    """A cache of one layer, for functions that take a cache and a layer."""
    return PagedKVCache.from_block_table(
        leaf.keys, leaf.values, leaf.lookup_table, leaf.cache_lengths, k_scales=leaf.key_scales,
        v_scales=leaf.value_scales, quantization_granularity=leaf.quantization_granularity,
    )  # fmt: skip


def _run_operator(inputs: Inputs) -> Callable[[], Tensor]:
    """An operator that has no function of its own: any operator runs through `tilewright.run`."""
    return lambda: run(inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants)["out"]


def run_cases(which: list[Case] | None = None) -> Iterator[Result]:
    """Check and time each case, in turn."""
    for c in cases() if which is None else which:
        inputs = random_inputs(c.operator, c.constants, c.sizes, seed=0, given=c.given)
        ours, theirs = c.ours(inputs), c.peer(inputs)
        wanted = references.reference_outputs(c.reference, inputs)
        (compared,) = references.compare({"out": c.compared(inputs, ours())}, wanted)
        ours_ms, torch_ms = _medians(ours, theirs)
        keys = sum(inputs.sizes.num_keys)
        rows = sum(inputs.sizes.rows)
        yield Result(c.name, rows, keys, compared.error, compared.tolerance, ours_ms, torch_ms)


def _medians(*calls: Callable[[], object]) -> list[float]:
    """Median milliseconds of each call, taken in turns so that a busy moment of the machine falls on all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(REPEATS):
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            mine.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(t) for t in times]
