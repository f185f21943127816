"""The demo's table: cases that serving meets, each checked against a float64 reference and timed against torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewright import references
from tilewright.codegen_cache.launch import run
from tilewright.dsl.lang import Operator
from tilewright.ops.cache import PagedKVCache, PagedLeaf
from tilewright.ops.flash_attention import flash_attention, generic_flash_attention_kv_cache_ragged_sink
from tilewright.ops.masks import MASKS, mask_named
from tilewright.random_inputs import Inputs, Sizes, random_inputs

from . import peers
from .variant import softcap_alibi, softcap_alibi_reference

WINDOW = 96
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


def variant(name: str, sizes: Sizes) -> Case:
    """The operator of variant.py, with ALiBi's own slopes: 1/2, 1/4, .. for 8 heads."""
    given = {"cap": 30.0, "slopes": 2.0 ** -torch.linspace(8 / sizes.heads, 8, sizes.heads)}
    peer = peers.eager_softcap_alibi
    return Case(name, sizes, softcap_alibi, softcap_alibi_reference, _run_operator, peer, given=given)


def _run_attention(inputs: Inputs, mask: str, window: int, partitions: int) -> Callable[[], Tensor]:
    a = inputs.arguments
    leaf = a["kv"]
    assert isinstance(leaf, PagedLeaf)
    cache = PagedKVCache.from_block_table(
        leaf.keys, leaf.values, leaf.lookup_table, leaf.cache_lengths, k_scales=leaf.key_scales,
        v_scales=leaf.value_scales, quantization_granularity=leaf.quantization_granularity,
    )  # fmt: skip

    def call() -> Tensor:
        out = generic_flash_attention_kv_cache_ragged_sink(
            a["q"], inputs.input_row_offsets, cache, 0, a["scale"], a["sink"],  # type: ignore[arg-type]  # by kind
            mask_str=mask, local_window_size=window, decode_dispatch_metadata=partitions,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return call


def _run_operator(inputs: Inputs) -> Callable[[], Tensor]:
    """An operator that has no function of its own: any operator runs through `tilewright.run`."""
    return lambda: run(inputs.operator, inputs.arguments, inputs.input_row_offsets, constants=inputs.constants)["out"]


def run_cases(which: list[Case] | None = None) -> Iterator[Result]:
    """Check and time each case, in turn."""
    for c in cases() if which is None else which:
        inputs = random_inputs(c.operator, c.constants, c.sizes, seed=0, given=c.given)
        ours, theirs = c.ours(inputs), c.peer(inputs)
        (compared,) = references.compare({"out": ours()}, references.reference_outputs(c.reference, inputs))
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
