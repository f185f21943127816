"""Calling a reference: what it asks for, a sequence at a time, and whether it gives what it should."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from tilewright.dsl.errors import AuthorError
from tilewright.dsl.source import Loc
from tilewright.random_inputs import Inputs

from .comparing import Candidates

Reference: TypeAlias = Callable[..., object]


class BadReference(AuthorError, TypeError):
    """A reference function that does not follow the calling convention."""

    template = "reference {name!r}: {problem}"


def reference_outputs(reference: Reference, inputs: Inputs) -> dict[str, Tensor | Candidates]:
    """The reference's named outputs [rows, ...] in float64, sequence by sequence; rows in the call's order.

    Raises BadReference for a function that asks for something it cannot have, or returns something else than it should.
    """
    wanted = _parameters(reference, inputs)
    names = [n for n, _ in inputs.spec.outputs]
    found: dict[str, list[Tensor | Candidates]] = {n: [] for n in names}
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
    return {n: _joined(parts) for n, parts in found.items()}


def _joined(parts: list[Tensor | Candidates]) -> Tensor | Candidates:
    candidates = [p for p in parts if isinstance(p, Candidates)]
    tensors = [p for p in parts if isinstance(p, Tensor)]
    return Candidates.joined(candidates) if candidates else torch.cat(tensors) if tensors else torch.empty(0)


def _rows(reference: Reference, output: str, value: object, count: int) -> Tensor | Candidates:
    if isinstance(value, Candidates) and len(value.scores) == count:
        return value
    value = value.scores if isinstance(value, Candidates) else value
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
