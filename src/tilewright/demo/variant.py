# mypy: disable-error-code="name-defined, valid-type, type-arg, attr-defined, no-untyped-def"
# ruff: noqa: F821, UP037
# Axis names stand in subscripts of annotations, which checkers take for types.
"""An attention variant nobody put into the library: capped scores and ALiBi, in one short function, and its reference."""

import torch

from tilewright.dsl import Paged, PerHead, Rows, Scalar, dot, f32, key, op, pos, softmax, tanh, to_float


@op
def softcap_alibi(q: Rows["head", "dim"], kv: Paged["dim"], slopes: PerHead[f32], scale: Scalar[f32], cap: Scalar[f32]):
    keys = kv.keys(where=lambda query, key: key <= query)
    scores = cap * tanh(dot(q, keys) * scale / cap) - slopes * to_float(pos - key)
    return softmax(scores) @ keys.v


def softcap_alibi_reference(q, kv, slopes, scale, cap, pos, key):
    scores = cap * torch.tanh(torch.einsum("rhd,hkd->hrk", q, kv.k) * scale / cap)
    scores = scores - slopes[:, None, None] * (pos[:, None] - key)
    scores = scores.masked_fill(key > pos[:, None], -torch.inf)
    return torch.einsum("hrk,hkd->rhd", torch.softmax(scores, -1), kv.v)
