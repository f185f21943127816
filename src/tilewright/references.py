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

It returns what the operator returns: an array [rows, ...], or a dict of named ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tilewright.dsl.errors import AuthorError
from tilewright.dsl.source import Loc

from .random_inputs import DenseLeaf, Inputs

Reference: TypeAlias = Callable[..., object]

# What float32 sums and one rounding of the output cost, relative above 1 and absolute below.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class BadReference(AuthorError, TypeError):
    """A reference function that does not follow the calling convention."""

    template = "reference {name!r}: {problem}"


@dataclass(frozen=True)
class Comparison:
    """One output against its reference. `error` is the largest |got - want| / max(1, |want|); see `worst_error`."""

    output: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def reference_outputs(reference: Reference, inputs: Inputs) -> dict[str, Tensor]:
    """The reference's named outputs [rows, ...] in float64, sequence by sequence; rows in the call's order.

    Raises BadReference for a function that asks for something it cannot have, or returns something else than it should.
    """
    wanted = _parameters(reference, inputs)
    names = [n for n, _ in inputs.spec.outputs]
    found: dict[str, list[Tensor]] = {n: [] for n in names}
    for seq, count in enumerate(inputs.sizes.rows):
        if count == 0:
            continue
        dense = inputs.dense(seq)
        result = reference(**{n: dense[n] for n in wanted})
        given = result if isinstance(result, Mapping) else {names[0]: result}
        if set(given) != set(names):
            raise _bad(
                reference, f"returned {', '.join(map(str, given))}; the operator's outputs are {', '.join(names)}"
            )
        for n in names:
            found[n].append(_rows(reference, n, given[n], count))
    return {n: torch.cat(parts) if parts else torch.empty(0) for n, parts in found.items()}


def _rows(reference: Reference, output: str, value: object, count: int) -> Tensor:
    t = torch.as_tensor(value) if value is not None else torch.empty(0)
    if t.ndim == 0 or t.shape[0] != count:
        raise _bad(reference, f"output {output!r} has shape {list(t.shape)} for a sequence of {count} rows")
    return t.to(torch.float64)


def _parameters(reference: Reference, inputs: Inputs) -> list[str]:
    known = {*inputs.arguments, *inputs.constants, "pos", "key", "num_keys", "seq"}
    parameters = inspect.signature(reference).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return sorted(known)
    required = [p.name for p in parameters if p.name in known or p.default is p.empty]
    if unknown := [n for n in required if n not in known]:
        raise _bad(reference, f"takes {', '.join(unknown)}; it can have {', '.join(sorted(known))}")
    return required


def _bad(reference: Reference, problem: str) -> BadReference:
    return BadReference(loc=place_of(reference), name=name_of(reference), problem=problem)


def name_of(reference: Reference) -> str:
    return getattr(reference, "__name__", "reference")


def place_of(reference: Reference) -> Loc | None:
    """Where it is defined; None for a callable that is not a function."""
    code = getattr(reference, "__code__", None)
    return None if code is None else Loc(code.co_filename, code.co_firstlineno, 0, 1)


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float | None = None) -> list[Comparison]:
    """Each output against its reference; without a tolerance, the one of its dtype."""
    return [
        Comparison(n, worst_error(t, want[n]), TOLERANCES.get(t.dtype, 1e-5) if tolerance is None else tolerance)
        for n, t in got.items()
    ]


def worst_error(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| / max(1, |want|). Infinity meets only the same infinity, NaN meets nothing."""
    if got.numel() == want.numel() == 0:
        return 0.0
    if got.shape != want.shape:
        return torch.inf
    x, y = got.to(torch.float64), want.to(torch.float64)
    error = torch.where(x == y, 0.0, (x - y).abs() / y.abs().clamp(min=1))
    return float(torch.where(x.isfinite() & y.isfinite() | (x == y), error, torch.inf).max())


# ---- of the library's operators --------------------------------------------------------------------------------------


def flash_attention(
    q: Tensor, kv: DenseLeaf, sink: Tensor | None, scale: float, mask: object, with_lse: bool, pos: Tensor, key: Tensor
) -> dict[str, Tensor]:
    """Attention with sinks, written from its definition. A row that sees no key gives 0, and an lse of -inf."""
    assert kv.v is not None
    scores = torch.einsum("rhd,hkd->hrk", q, kv.k) * scale
    if callable(mask):
        scores = scores.masked_fill(torch.as_tensor(mask(pos[:, None], key)).logical_not(), -torch.inf)
    own = torch.full((q.shape[1], len(pos), 1), -torch.inf, dtype=q.dtype)
    extra = own if sink is None else sink[:, None, None].expand_as(own)
    # The sink takes part as one more key, whose value row is 0.
    p = torch.softmax(torch.cat([scores, extra], -1), -1).nan_to_num(0.0)[..., : len(key)]
    out = torch.einsum("hrk,hkd->rhd", p, kv.v)
    return {"out": out, "lse": torch.logsumexp(scores, -1).T} if with_lse else {"out": out}


LIBRARY: dict[str, Reference] = {"flash_attention": flash_attention}
