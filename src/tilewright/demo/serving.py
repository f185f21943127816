"""Serving a tiny model greedily on paged caches, and comparing what it gave with the model's own eager attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .model import CHUNK, STEPS, ModelCheck, Served


class State(Protocol):
    """The paged caches of a model. What stands in for its attention knows them, and so which rows a call holds."""

    def begin(self, counts: Sequence[int]) -> Tensor:
        """A call with so many new tokens of each request; the position in its request of each, [rows]."""

    def end(self) -> None:
        """The call is over: its tokens count as stored."""


# ---- models ----------------------------------------------------------------------------------------------------------


def redraw(model: Any, seed: int) -> Any:
    """The model, float32, with weights that keep activations near 1, from a seed.

    Attention is then far from uniform, sinks and position biases are not 0, and greedy tokens vary.
    """
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=gen)
            if p.ndim > 1 and not name.endswith("bias"):
                p.copy_(noise * (1.3 / (1 if "embed" in name else p.shape[-1]) ** 0.5))
            elif "norm" in name and not name.endswith("bias"):
                p.copy_(1 + 0.2 * noise)
            else:
                p.copy_(noise * (1.0 if "sinks" in name else 0.1))
    return model.to(torch.float32).eval()


@contextmanager
def replaced(forwards: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Inside, each module runs the function paired with it instead of its class's forward."""
    for module, forward in forwards:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in forwards:
            del module.forward


# ---- serving ---------------------------------------------------------------------------------------------------------


def serve(
    model: Any, state: State, requests: Sequence[Sequence[int]], steps: int = STEPS, chunk: int = CHUNK
) -> Served:
    """Decode `steps` tokens greedily for every request, all requests packed into every call.

    A request brings at most `chunk` tokens of its prompt to a call, then one token a call, then none.
    """
    waiting = [list(r) for r in requests]
    out = Served([[] for _ in requests], [[] for _ in requests])
    with torch.no_grad():
        while any(waiting):
            taken = [w[:chunk] for w in waiting]
            decoding = [bool(made) for t, made in zip(taken, out.tokens, strict=True) if t]
            last = _call(model, state, taken)
            out.calls, out.rows = out.calls + 1, out.rows + sum(map(len, taken))
            out.mixed += any(decoding) and not all(decoding)
            for b, rows in enumerate(taken):
                waiting[b] = waiting[b][len(rows) :]
                if rows and not waiting[b]:
                    out.logits[b].append(last[b])
                    out.tokens[b].append(int(last[b].argmax()))
                    waiting[b] = out.tokens[b][-1:] if len(out.tokens[b]) < steps else []
    return out


def _call(model: Any, state: State, taken: Sequence[Sequence[int]]) -> list[Tensor]:
    """One call on the new tokens of every request, some of which may have none; logits of each one's last row."""
    counts = [len(t) for t in taken]
    ids = [t for rows in taken for t in rows]
    # A mask that is made already, and that nobody reads: else the model makes a dense one of all rows.
    logits = model(
        input_ids=torch.tensor([ids]), position_ids=state.begin(counts)[None], use_cache=False,
        attention_mask={"indexed_attention": None},
    ).logits[0]  # fmt: skip
    state.end()
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [logits[end - 1] for end in ends]


# ---- the check -------------------------------------------------------------------------------------------------------


def compare(model: Any, requests: Sequence[Sequence[int]], served: Served) -> ModelCheck:
    """Every logit and token served, against the model over each whole sequence, without a cache."""
    worst = largest = 0.0
    same = True
    for prompt, tokens, logits in zip(requests, served.tokens, served.logits, strict=True):
        # By induction these are the tokens that greedy decoding makes: each is the best one after those before it.
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
        want = whole[len(prompt) - 1 :]
        same &= want.argmax(-1).tolist() == tokens
        difference = float((torch.stack(logits) - want).abs().max())
        worst = difference if difference != difference else max(worst, difference)
        largest = max(largest, float(want.abs().max()))
    return ModelCheck(served, worst, largest, same, prompts=tuple(map(len, requests)))
