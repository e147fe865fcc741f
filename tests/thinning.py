"""Products of parameters of which `make test` runs a part, and `make test-slow` the rest.

Where axes do not touch one another in the code, a product of them repeats what its parts have shown. What is left out
is marked ``slow`` and nothing else, so that a run without ``-m`` has the product whole.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], ids: Callable[[Any], str] | None = None) -> list[Any]:
    """Their product, kept where the place in the last axis is the sum of the other places.

    Of two axes every value is there, of three also every pair, as long as the last axis is not the longest.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    last = len(numbered[-1])
    found = []
    for chosen in itertools.product(*numbered):
        *others, own = (place for place, _ in chosen)
        found.append(_param([value for _, value in chosen], sum(others) % last == own, ids))
    return found


def mostly_slow(values: Iterable[Any], kept: Sequence[str], name: Callable[[Any], str] = str) -> list[Any]:
    """All of them by name; `make test` runs those that are ``kept``."""
    values = list(values)
    missing = set(kept) - {name(value) for value in values}
    assert not missing, f"no such value: {sorted(missing)}"
    return [_param([value], name(value) in kept, name) for value in values]


def _param(values: list[Any], kept: bool, ids: Callable[[Any], str] | None) -> Any:
    named = None if ids is None else "-".join(ids(value) for value in values)
    return pytest.param(*values, marks=() if kept else pytest.mark.slow, id=named)
