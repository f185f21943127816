# mypy: disable-error-code="name-defined, valid-type, attr-defined"
"""Picks are compared by score: any order of equal ones is right, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.selection import best
from torch import Tensor

from tilewright.dsl import Paged, Rows, dot, op, topk
from tilewright.random_inputs import DenseLeaf, Sizes, random_inputs
from tilewright.references import BadReference, Candidates, reference_outputs, worst_error

SCORES = torch.tensor(
    [[0.5, 2.0, -torch.inf, 2.0, -1.0], [-torch.inf, -torch.inf, 3.0, -torch.inf, -torch.inf]]
).double()


def test_best_is_the_literal_order(rng: np.random.Generator) -> None:
    """Many ties, more asked for than there are, some that are no candidates."""
    scores = torch.from_numpy(rng.integers(-2, 3, (40, 9))).double()
    scores[:, 6:] = -torch.inf
    want = torch.tensor([best(s[:6].numpy(), 8) for s in scores])
    assert torch.equal(Candidates(scores, 8).best(), want)
    names = torch.arange(9).flip(0).expand(40, 9) * 10
    named = torch.where(want >= 0, (8 - want) * 10, -1)
    assert torch.equal(Candidates(scores, 8, names).best(), named)


@pytest.mark.parametrize(
    ("first", "error"),
    [
        ([1, 3, 0, 4, -1], 0.0),
        ([3, 1, 0, 4, -1], 0.0),  # as good as equal
        ([1, 3, 4, 0, -1], 1.5),  # out of order
        ([1, 0, 3, 4, -1], 1.5),
        ([1, 3, 0, -1, -1], torch.inf),  # one less
        ([1, 1, 0, 4, -1], torch.inf),  # one twice
        ([1, 3, 0, 4, 2], torch.inf),  # no candidate
        ([1, 3, 0, 4, 5], torch.inf),  # outside
        ([1, 3, 0, 4, -2], torch.inf),  # no index
        ([-1, 1, 3, 0, 4], torch.inf),
    ],
)
def test_wrong_picks_are_noticed(first: list[int], error: float) -> None:
    """An error is a difference of scores."""
    picked = torch.tensor([first, [2, -1, -1, -1, -1]], dtype=torch.int32)
    found = worst_error(picked, Candidates(SCORES, 5))
    assert found == pytest.approx(error)


def test_picks_of_another_shape() -> None:
    """A column too few is no agreement."""
    assert worst_error(torch.tensor([[1], [2]]), Candidates(SCORES, 2)) == torch.inf
    assert worst_error(torch.zeros(0, 3), Candidates(torch.zeros(0, 4), 3)) == 0.0


def test_a_name_may_be_listed_twice() -> None:
    """As often as it is a candidate."""
    twice = Candidates(torch.tensor([[1.0, 4.0, 1.0]]).double(), 3, torch.tensor([[7, 5, 7]]))
    assert worst_error(torch.tensor([[5, 7, 7]]), twice) == 0.0
    assert worst_error(torch.tensor([[5, 5, 7]]), twice) == torch.inf


@op
def nearest(q: Rows["dim"], kv: Paged["dim"]) -> object:
    return topk(dot(q, kv.keys()), 3)


def test_an_authors_reference_may_return_candidates() -> None:
    """Sequences of different lengths are joined; rows must be the sequence's."""
    inputs = random_inputs(nearest, {}, Sizes((2, 0, 3), (1, 4, 5)))

    def reference(q: Tensor, kv: DenseLeaf) -> Candidates:
        return Candidates(q @ kv.k[0].T, 3)

    joined = reference_outputs(reference, inputs)["out"]
    assert isinstance(joined, Candidates)
    assert joined.scores.shape == (5, 8)
    assert (joined.best()[:2] < 3).all()
    with pytest.raises(BadReference, match=r"output 'out' has shape \[1, 3\] for a sequence of 2 rows"):
        reference_outputs(lambda q, kv: Candidates(q[:1] @ kv.k[0].T, 3), inputs)
