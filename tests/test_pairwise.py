"""The combinations that the default suite keeps."""

from __future__ import annotations

import itertools

import pytest
from pairwise import covering

from . import conftest


@pytest.mark.parametrize("sizes", [(5, 2), (5, 2, 2, 2), (4, 3, 2), (7,)])
def test_every_two_values_meet_in_few_rows(sizes: tuple[int, ...]) -> None:
    rows = [dict(zip("abcd", row, strict=False)) for row in itertools.product(*map(range, sizes))]
    kept = [rows[i] for i in covering(rows)]
    for a, b in itertools.combinations("abcd"[: len(sizes)], 2):
        assert {(row[a], row[b]) for row in kept} == {(row[a], row[b]) for row in rows}
    assert {row["a"] for row in kept} == set(range(sizes[0]))
    if len(sizes) > 2:
        assert len(kept) <= len(rows) // 2


def test_values_that_never_meet_are_not_asked_for() -> None:
    rows = [{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 1}, {"a": 0, "b": 0, "c": 1}]
    assert covering(rows) == {0, 1, 2}
    assert covering([]) == set()


@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("c", [None, True])
def test_combinations(a: int, b: str, c: bool | None) -> None:
    """What the test below counts."""


def test_the_rest_is_slow(request: pytest.FixtureRequest) -> None:
    module = request.node.getparent(pytest.Module)
    items = [item for item in module.collect() if item.originalname == "test_combinations"]
    conftest.pytest_collection_modifyitems(items)
    fast = [item for item in items if item.get_closest_marker("slow") is None]
    assert (len(items), len(fast)) == (12, 6)
