"""What random inputs of the library's operators need beside the declaration: constants, and numbers that are valid.

A value on the command line goes before any of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewright.dsl.errors import ArgumentValueError
from tilewright.dsl.lang import Operator
from tilewright.ops.cache import PagedLeaf
from tilewright.random_inputs import Inputs, Sizes, random_inputs


def unchanged(made: Mapping[str, object]) -> None:
    """What was made is valid as it is."""


@dataclass(frozen=True)
class Sample:
    """How to make inputs that an operator's declaration alone does not describe.

    constants   values of constants that have no default
    windows     caches that hold a window of tokens for each position, and the constant that says how many
    given       numbers that fill a tensor
    arrange     changes what was made at random, in place, into what the operator may assume; by argument
    """

    constants: Mapping[str, object] = field(default_factory=dict)
    windows: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, object] = field(default_factory=dict)
    arrange: Callable[[Mapping[str, object]], None] = unchanged

    def inputs(
        self,
        operator: Operator,
        constants: Mapping[str, object],
        sizes: Sizes,
        seed: int = 0,
        given: Mapping[str, object] | None = None,
    ) -> Inputs:
        """`random_inputs`, made valid. Raises as it does."""
        given = given or {}
        per_position = {leaf: _window(operator, n, constants[n]) for leaf, n in self.windows.items()}
        sizes = replace(sizes, per_position=per_position)
        made = random_inputs(operator, constants, sizes, seed, {**self.given, **given})
        self.arrange({n: a for n, a in made.arguments.items() if n not in given})
        return made


def _window(operator: Operator, name: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ArgumentValueError(op=operator.name, argument=name, got=value, expected="a whole number, at least 1")
    return value


def order_bounds(made: Mapping[str, object]) -> None:
    """The greatest key of a page is at least the least one, elementwise."""
    match made.get("bounds"):
        case PagedLeaf(keys=keys, values=Tensor() as values) as leaf:
            a, b = keys.float(), values.float()
            keys.copy_(torch.maximum(a, b))
            values.copy_(torch.minimum(a, b))
            if leaf.key_scales is not None and leaf.value_scales is not None:
                leaf.value_scales.copy_(leaf.key_scales)


def descale(made: Mapping[str, object]) -> None:
    """float8 rows are stored as large as 448; descaled, they are as large as the other numbers."""
    for t in _tensors(made, "k_descale", "v_descale"):
        t.div_(448)


def few_documents(made: Mapping[str, object]) -> None:
    """Documents of several tokens each."""
    for t in _tensors(made, "document"):
        t.remainder_(3)


def stored_prefix(made: Mapping[str, object]) -> None:
    """A prefix on its own is what its cache held before."""
    for t in _tensors(made, "length"):
        t.copy_(_lengths(made, "prefix"))


def short_prefixes(made: Mapping[str, object]) -> None:
    """Prefixes that end among the cached tokens, or a little after."""
    for t in _tensors(made, "prefix"):
        t.remainder_(_lengths(made, "cache") + 4)


def tree_of_rows(made: Mapping[str, object]) -> None:
    """This call's rows are the drafts, and see any of each other."""
    for t in _tensors(made, "committed"):
        t.copy_(_lengths(made, "cache"))
    for t in _tensors(made, "tree"):
        t.mul_(0x3779B1)  # small numbers, of a few bits, become bits everywhere


def _tensors(made: Mapping[str, object], *names: str) -> list[Tensor]:
    return [t for n in names if isinstance(t := made.get(n), Tensor)]


def _lengths(made: Mapping[str, object], cache: str) -> Tensor:
    """Tokens before this call, by sequence."""
    leaf = made[cache]
    assert isinstance(leaf, PagedLeaf)
    return leaf.cache_lengths


BLOCKS = {"block": 4}
CHOICE = {"block": 4, "top_k": 3}

SAMPLES: dict[str, Sample] = {
    "attend_by_group": Sample(BLOCKS),
    "attend_by_head": Sample(BLOCKS),
    "choose_by_mean": Sample(CHOICE),
    "choose_by_weight": Sample(CHOICE),
    "choose_pages": Sample(CHOICE, arrange=order_bounds),
    "compress_overlapping": Sample({"rate": 4, "dim": 64}, {"tokens": "rate"}),
    "compress_windows": Sample({"rate": 4}, {"tokens": "rate"}),
    "compressed_attention": Sample(BLOCKS),
    "descaled_attention": Sample(arrange=descale),
    "document_attention": Sample(arrange=few_documents),
    "indexer": Sample({"top_k": 8}),
    "indexer_blocks": Sample({"depth": 64, **CHOICE}),
    "indexer_in_blocks": Sample({"block": 4, "top_k": 8}),
    "latent_sparse_attention": Sample({"window": 16}),
    "mla_indexer": Sample({"top_k": 8}),
    "page_bounds": Sample(BLOCKS, {"kv": "block"}, {"one": 1.0}),
    "pool_means": Sample({"rate": 4}, {"tokens": "rate"}),
    "prefix_attention": Sample(arrange=stored_prefix),
    "prefix_lm_attention": Sample(arrange=short_prefixes),
    "tree_attention": Sample(arrange=tree_of_rows),
}
