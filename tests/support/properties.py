"""Property tests on both targets: fewer examples on the one that compiles a program for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def property_test(
    *strategies: SearchStrategy[Any], interpreted: int, native: int
) -> Callable[[Callable[..., None]], Callable[[str | None], None]]:
    """`given(*strategies)` for a test marked `both_targets`, with that many examples on each.

    Natively an example costs a compilation, a hundred times its run.
    """

    def wrap(check: Callable[..., None]) -> Callable[[str | None], None]:
        runs = {n: settings(max_examples=n)(given(*strategies)(check)) for n in {interpreted, native}}

        def test(target_of_calls: str | None) -> None:
            runs[interpreted if target_of_calls == "interpret" else native]()

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return test

    return wrap
