"""Whoever hears of another rank's failure says why and ends, whatever else is stuck (vigil_cases.py)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from . import vigil_cases
from .world import environment

Ending = tuple[list[int], list[str]]
"""Exit codes and what was said, by rank. A process that had to be killed has the code -SIGALRM."""


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ending]:
    folder = tmp_path_factory.mktemp("vigil")
    subprocess.run(
        [sys.executable, "-m", "parallel.vigil_cases", str(folder)],
        env=environment({}),
        check=True,
        timeout=180,
    )
    codes = json.loads((folder / "codes.json").read_text())

    def ending(case: str) -> Ending:
        return codes[case], [(folder / f"{case}-{r}.txt").read_text() for r in range(len(codes[case]))]

    return ending


@pytest.mark.parametrize(
    "case",
    [
        vigil_cases.stuck_telling,
        vigil_cases.stuck_telling_on_another_thread,
        vigil_cases.stuck_explaining,
        vigil_cases.stuck_aborting,
        vigil_cases.stuck_queueing,
        vigil_cases.an_error_before_it_waits,
        vigil_cases.only_errors,
    ],
)
def test_a_process_whose_device_is_stuck_says_why_and_ends(
    case: Callable[[], int], of: Callable[[str], Ending]
) -> None:
    codes, said = of(case.__name__)
    assert codes == [1], said
    assert said[0] == "memferry: rank 0 of 2 stops: another rank has failed\n"


def test_it_ends_although_nobody_reads_what_it_says(of: Callable[[str], Ending]) -> None:
    assert of("stuck_writing")[0] == [1]


@pytest.mark.parametrize(
    "case", [vigil_cases.a_free_device, vigil_cases.a_rank_that_leaves_while_its_word_is_under_way]
)
def test_a_process_whose_device_is_free_ends_as_it_likes(
    case: Callable[[], int], of: Callable[[str], Ending]
) -> None:
    codes, said = of(case.__name__)
    assert codes == [0], said


def test_a_death_reaches_all(of: Callable[[str], Ending]) -> None:
    codes, said = of("a_rank_is_killed")
    assert codes == [-signal.SIGKILL, 1, 1], said
    for rank in (1, 2):
        assert (
            f"memferry: rank {rank} of 3 stops: another rank failed; first cause: the rank that" in said[rank]
        )


def test_a_reason_reaches_all(of: Callable[[str], Ending]) -> None:
    codes, said = of("a_rank_raises")
    assert codes == [1, 1, 1], said
    for rank in (0, 2):
        assert "another rank failed; first cause: rank 1: the data set is damaged" in said[rank]


def test_who_learns_of_a_failure_elsewhere_passes_it_on(of: Callable[[str], Ending]) -> None:
    codes, said = of("a_rank_learns_of_it_elsewhere")
    assert codes == [1, 1, 0], said
    for rank in (0, 1):
        assert f"memferry: rank {rank} of 3 stops: another rank failed" in said[rank]


def test_a_program_that_is_over_passes_on_what_it_hears_while_its_device_works(
    of: Callable[[str], Ending],
) -> None:
    codes, said = of("a_rank_is_killed_while_another_ends")
    assert codes == [-signal.SIGKILL, 1, 1], said
    assert "memferry: rank 1 of 3 stops: another rank failed" in said[1]


def test_who_joins_waits_for_the_next_rank_and_hears_of_no_failure(of: Callable[[str], Ending]) -> None:
    codes, said = of("all_leave")
    assert codes == [0, 0, 0], said
