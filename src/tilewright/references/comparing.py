"""Comparing what an operator computed with what its reference says: numbers by distance, picks by score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# What float32 sums and one rounding of the output cost, relative above 1 and absolute below.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Comparison:
    """One output against its reference. `error` is the largest |got - want| / max(1, |want|); see `worst_error`."""

    output: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, eq=False)
class Candidates:
    """What the `count` best are picked from. Picks are compared by score: rounding may swap two that are as good.

    scores: [rows, .., candidates], float64, -inf for what a row may not pick
    names: [rows, .., candidates], int64, what the output holds for each; None: its place
    """

    scores: Tensor
    count: int
    names: Tensor | None = None

    def best(self) -> Tensor:
        """[rows, .., count]: the best first, equal ones by place, then -1."""
        scores, names = self._padded(self.scores.shape[-1] + self.count)
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        return names.gather(-1, order).masked_fill(values == -torch.inf, -1)[..., : self.count]

    def scores_of(self, picked: Tensor) -> Tensor:
        """The score of each pick: -inf for -1, NaN for one that is no candidate or is picked more often than listed."""
        scores, names = (x.flatten(0, -2) for x in self._padded(self.scores.shape[-1] + 1))
        rows = zip(picked.long().flatten(0, -2), scores, names, strict=True)
        return torch.stack([_scores_of_row(*row) for row in rows]).view(picked.shape)

    def error(self, picked: Tensor) -> float:
        """The largest difference in score between a pick and the reference's at its place; see `worst_error`."""
        if picked.shape != (*self.scores.shape[:-1], self.count):
            return torch.inf
        if picked.numel() == 0:
            return 0.0
        best = self._padded(self.scores.shape[-1] + self.count)[0].sort(-1, descending=True).values
        return worst_error(self.scores_of(picked), best[..., : self.count])

    def _padded(self, width: int) -> tuple[Tensor, Tensor]:
        """Scores and names of `width` candidates, the added ones -inf and -1."""
        n = self.scores.shape[-1]
        names = torch.arange(n).expand_as(self.scores) if self.names is None else self.names
        return pad(self.scores, (0, width - n), value=-torch.inf), pad(names, (0, width - n), value=-1)

    @staticmethod
    def joined(parts: Sequence[Candidates]) -> Candidates:
        """The rows of all, one after the other."""
        widest = max(p.scores.shape[-1] for p in parts)
        scores, names = zip(*(p._padded(widest) for p in parts), strict=True)
        return Candidates(torch.cat(scores), parts[0].count, torch.cat(names))


def _scores_of_row(picked: Tensor, scores: Tensor, names: Tensor) -> Tensor:
    is_it = (picked[:, None] == names) & (scores > -torch.inf)
    before = (picked[:, None] == picked).tril(-1).sum(1)
    found = torch.where(before < is_it.sum(1), scores[is_it.int().argmax(1)], torch.nan)
    return found.masked_fill(picked == -1, -torch.inf)


def compare(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor | Candidates], tolerance: float | None = None
) -> list[Comparison]:
    """Each output against its reference; without a tolerance, the one of its dtype."""
    return [
        Comparison(n, worst_error(t, want[n]), TOLERANCES.get(t.dtype, 1e-5) if tolerance is None else tolerance)
        for n, t in got.items()
    ]


def worst_error(got: Tensor, want: Tensor | Candidates) -> float:
    """The largest |got - want| / max(1, |want|), of picks that of scores.

    Infinity meets only the same infinity, NaN meets nothing.
    """
    if isinstance(want, Candidates):
        return want.error(got)
    if got.numel() == want.numel() == 0:
        return 0.0
    if got.shape != want.shape:
        return torch.inf
    x, y = got.to(torch.float64), want.to(torch.float64)
    error = torch.where(x == y, 0.0, (x - y).abs() / y.abs().clamp(min=1))
    return float(torch.where(x.isfinite() & y.isfinite() | (x == y), error, torch.inf).max())
