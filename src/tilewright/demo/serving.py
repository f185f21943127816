"""Serving a tiny model greedily on paged caches, and comparing what it gave with the model's own eager attention."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tilewright.commands.errors import NotInstalled

if TYPE_CHECKING:
    from types import ModuleType

PROMPTS = (40, 7, 1, 23)  # tokens of each request
STEPS = 16  # tokens decoded for each
CHUNK = 9  # prompt tokens of a request in one call, at most
VOCABULARY = 97
TOLERANCE = 2e-5  # of float32 logits of size 5, over three or four layers

# A keyword: a mask that is made already, and that nobody reads. Else a DeepSeek makes a dense one of all rows.
NO_MASK: Mapping[str, Any] = {"attention_mask": {"indexed_attention": None}}


class State(Protocol):
    """The paged caches of a model. What stands in for its attention knows them, and so which rows a call holds."""

    def begin(self, counts: Sequence[int]) -> Tensor:
        """A call with so many new tokens of each request; the position in its request of each, [rows]."""

    def keywords(self) -> Mapping[str, Any]:
        """What else the model is given in this call."""

    def end(self) -> None:
        """The call is over: its tokens count as stored."""


@dataclass
class Served:
    """Per request: decoded tokens, and the logits [vocabulary] that each was chosen by. How many calls that took."""

    tokens: list[list[int]]
    logits: list[list[Tensor]]
    calls: int = 0
    mixed: int = 0  # calls that held prompt rows and decode rows at once
    rows: int = 0


@dataclass(frozen=True)
class ModelCheck:
    """What serving gave, against the model's eager attention over each whole sequence, without a cache."""

    prompts: tuple[int, ...]  # tokens of each
    served: Served
    worst: float  # largest difference of a logit
    largest: float  # largest logit
    same_tokens: bool
    tolerance: float = TOLERANCE

    @property
    def same_logits(self) -> bool:
        return self.worst <= self.tolerance  # false for NaN as well

    @property
    def ok(self) -> bool:
        return self.same_tokens and self.same_logits


# ---- models ----------------------------------------------------------------------------------------------------------


def load_transformers() -> ModuleType:
    """transformers, silent and offline. Raises NotInstalled, which says how to install it."""
    if importlib.util.find_spec("transformers") is None:
        raise NotInstalled(what="the demo's model", package="transformers", extra="models")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


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


def prompts(lengths: Sequence[int] = PROMPTS) -> list[list[int]]:
    """Random token ids, the same every time."""
    made = [torch.randint(2, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return [p.tolist() for p in made]


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
    positions = state.begin(counts)
    logits = model(
        input_ids=torch.tensor([ids]), position_ids=positions[None], use_cache=False, **state.keywords()
    ).logits[0]
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
    return ModelCheck(tuple(map(len, requests)), served, worst, largest, same)
