"""`@pytest.mark.pairwise`: the default suite runs as many combinations of a test's parameters as it takes for every two
values to meet; `make slow` runs the rest."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter

import pytest


def covering(rows: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """Numbers of some of `rows`, the value of each parameter by its name, such that every two values that meet in a row
    meet in one of these. Greedy: each is the first of those that add most."""
    pairs = [
        set(itertools.combinations(sorted(row.items(), key=itemgetter(0)), min(2, len(row)))) for row in rows
    ]
    left, chosen = set().union(*pairs), set()
    while left:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Of a test marked `pairwise`, what the default suite leaves out becomes slow."""
    tests: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            tests[item.path.as_posix(), item.originalname].append(item)
    for some in tests.values():
        # The same value is the same object in every combination.
        kept = covering([{name: id(value) for name, value in item.callspec.params.items()} for item in some])
        for number, item in enumerate(some):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
