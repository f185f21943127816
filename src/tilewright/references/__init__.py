"""Dense references in float64, and comparing what an operator computed with one.

A reference of operator NAME is an ordinary function, `NAME_reference` (or `reference`) beside it. It is called once for
each sequence that has rows, with keyword arguments only, and takes whichever of these it names:

    a tensor        this sequence's rows where it has a row axis, its entry where it has a seq axis, else all of it, as
                    float64 or int64 torch tensors; None for an optional one that was left out
    a scalar        the number
    a paged cache   `.k` [heads, keys, dim] and `.v` [heads, keys, value_dim], once per query head, so that heads need
                    no grouping; float64, stored values times their scales
    a constant      as given: a mask is a function of (query, key) positions, or None
    pos, key        positions of the rows [rows] and of the keys [keys], int64
    num_keys, seq   how many keys, which sequence

It returns what the operator returns: an array [rows, ...], or a dict of named ones. For an output that holds picks, as
of `topk`, it may return `Candidates`, which compares them by score: of two that are as good as equal, either is right.

`LIBRARY` has those of the library's operators, written from the papers' definitions and sharing nothing with the
compiler, one module a family; `SAMPLES` has what their random inputs need beside the declaration.
"""

from . import attention, compressor, latent, selection
from .attention import flash_attention
from .calling import BadReference, Reference, name_of, place_of, reference_outputs
from .comparing import TOLERANCES, Candidates, Comparison, compare, worst_error
from .samples import SAMPLES, Sample

__all__ = [
    "LIBRARY",
    "SAMPLES",
    "TOLERANCES",
    "BadReference",
    "Candidates",
    "Comparison",
    "Reference",
    "Sample",
    "compare",
    "flash_attention",
    "name_of",
    "place_of",
    "reference_outputs",
    "worst_error",
]

# A family's `__all__` names its references, each by the operator it is of.
LIBRARY: dict[str, Reference] = {
    name: getattr(family, name) for family in (attention, compressor, latent, selection) for name in family.__all__
}
