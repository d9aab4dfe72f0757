"""Ranks that lend each other their devices train as ranks that do not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from .world import Case, launch

EACH_OTHER = [[1], [0]]
PLAIN: dict[str, Any] = {"wishes": [], "modes": "GFGB"}
"""Has the bits of every plan."""
RUNS: list[dict[str, Any]] = [
    {"wishes": EACH_OTHER, "modes": "GFGB"},
    {"wishes": EACH_OTHER, "modes": "random", "update": "backward", "delays": 0.002},
    {"wishes": EACH_OTHER, "modes": "STREAM", "dispatch": "dynamic"},
    {"wishes": [[1], []], "modes": "DFGB"},
    {"wishes": [[1, 2], [0, 3]], "modes": "GFGB"},
]
SMALL = {"wishes": EACH_OTHER, "modes": "GFGB", "budget": 1024}
NONE = {"wishes": EACH_OTHER, "modes": "GFGB", "budget": 511}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"wishes": [[0], [0]]}, "device 0 is the target itself", "device 0 is the target itself.*local rank 0"),
    ({"wishes": [[1], [7]]}, "device 7 is absent.*local rank 1", "device 7 is absent"),
    ({"wishes": [[1, 1], [0]]}, "each device once", "each device once.*local rank 0"),
    (
        {"wishes": EACH_OTHER, "probe": True},
        "npu:1 through npu:0; probe again.*so says rank 1",
        "through npu:0; probe",
    ),
]
LEAVING = (0, 1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results by case, then rank."""
    cases: list[Case] = []
    cases += [("parallel.lending_cases:lent", run) for run in (PLAIN, *RUNS, SMALL, NONE)]
    cases += [("parallel.lending_cases:refused", bad) for bad, *_ in BAD]
    cases += [("parallel.lending_cases:leaves_early", {"first": first}) for first in LEAVING]
    out = launch(2, cases, tmp_path_factory.mktemp("lending"))
    return {repr(case): ranks for case, ranks in zip(cases, out, strict=True)}


def of(found: dict[str, list[Any]], name: str, arguments: dict[str, Any]) -> list[Any]:
    return found[repr((f"parallel.lending_cases:{name}", arguments))]


def check_same(found: dict[str, list[Any]], run: dict[str, Any]) -> list[Any]:
    ranks = of(found, "lent", run)
    for got, want in zip(ranks, of(found, "lent", PLAIN), strict=True):
        assert got["losses"] == want["losses"]
        for name, value in want["state"]["model"].items():
            assert torch.equal(got["state"]["model"][name], value), name
        for name, state in want["state"]["optimizer"].items():
            for key, value in state.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(got["state"]["optimizer"][name][key])
                ), (name, key)
        assert got["threads"] == [] and got["descriptors"] == 0
        assert not want["moved"]
    return ranks


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['wishes']} {run['modes']}")
def test_ranks_that_lend_have_the_bits_of_ranks_that_do_not(
    found: dict[str, list[Any]], run: dict[str, Any]
) -> None:
    ranks = check_same(found, run)
    for got, devices in zip(ranks, run["wishes"], strict=True):
        carried = {name for name, n in got["moved"].items() if n}
        others = {f"via npu{d}" for d in devices if d < 2}
        assert others <= carried
        assert not got["told"]
    for rank, got in enumerate(ranks):
        assert bool(got["lent"]) == any(rank in devices for devices in run["wishes"])


def test_staging_memory_is_bounded(found: dict[str, list[Any]]) -> None:
    for got in check_same(found, SMALL):
        assert got["lent"] and max(got["lent"]) <= SMALL["budget"]
        assert not got["told"] and any(name.startswith("via") for name in got["moved"])


def test_an_owner_that_lends_nothing_is_named_and_nothing_is_lost(found: dict[str, list[Any]]) -> None:
    for rank, got in enumerate(check_same(found, NONE)):
        assert set(got["moved"]) == {"direct"} and not got["lent"]
        assert len(got["told"]) == 1
        assert f"npu{1 - rank} failed (it refused: it lends 511 B" in got["told"][0]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_wishes_are_refused_on_every_rank(found: dict[str, list[Any]], number: int) -> None:
    bad, *wanted = BAD[number]
    for said, pattern in zip(of(found, "refused", bad), wanted, strict=True):
        assert re.search(pattern, said), said


@pytest.mark.parametrize("first", LEAVING)
def test_ranks_may_close_in_any_order(found: dict[str, list[Any]], first: int) -> None:
    for rank, got in enumerate(of(found, "leaves_early", {"first": first})):
        assert got["moved"][f"via npu{1 - rank}"] > 0
        assert got["threads"] == [] and got["descriptors"] == 0
