"""Every hand-over is late, and a test runs in each mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import ALL_POINTS, Delays, poisoned

from memferry_ascend import runtime
from memferry_ascend.planner import Mode

from .helpers import MODES


@pytest.fixture(autouse=True)
def slow(moves: None, cpu: runtime.Runtime) -> Iterator[Delays]:
    """Every hand-over is late."""
    delays = Delays(ALL_POINTS, seed=1, most=0.001)
    cpu.backend.disturb = delays
    with poisoned():
        yield delays


@pytest.fixture(params=[*MODES, "mixed"])
def mode(request: pytest.FixtureRequest) -> Mode | str:
    """One mode for every layer, or the four in turn."""
    return request.param
