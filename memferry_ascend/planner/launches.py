"""What launching costs: seconds in which a plan keeps the thread that launches kernels, beside what a layer takes it anyway.

That thread runs hooks, binds storages and queues copies, updates and kernels. Where an iteration waits for it, not for the
device, all of that is time lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from memferry_ascend.planner.plan import Decision, Grad, Mode, Update

UNIT = "unit"
"""One unit of layers more: neighbours that are decided differently cannot share one."""
ALTERNATIVES = (*map(str, (Mode.DHA, Mode.DFGB, Mode.STREAM, Grad.KEEP, Grad.DIRECT, Update.DEVICE)), UNIT)
"""What is measured against layers in GFGB, staged and updated on the host. "device": with its kept gradient."""
WHOLE_UNIT = 12 << 20
"""Bytes from which a unit takes in no further layer."""

Launches = Mapping[str, tuple[float, float]]
"""Alternative -> seconds more for a layer in the forward, and in the backward and step. What is missing costs nothing."""

_NOTHING = (0.0, 0.0)


def added(launches: Launches, decision: Decision, units: float = 0.0) -> tuple[float, float]:
    """Seconds that a layer's decision and its part in the number of `units` add to its launching, by pass."""
    mode, grad, update = decision
    a = launches.get(mode, _NOTHING)
    b = launches.get(update if update is Update.DEVICE else grad, _NOTHING)
    unit = launches.get(UNIT, _NOTHING)
    return a[0] + b[0] + unit[0] * units, a[1] + b[1] + unit[1] * units


def missing(nbytes: int) -> float:
    """How much of a unit is missing, 0 to 1. Layers are measured in whole units: what is missing is a unit more."""
    return max(0.0, 1 - nbytes / WHOLE_UNIT)


def beginnings(chosen: Sequence[Decision]) -> list[bool]:
    """Per layer, whether it cannot share a unit with the one before. DHA counts as riding along, as small layers do."""
    return [False, *(a != b and _part(a, b) for a, b in pairwise(chosen))]


def _part(a: Decision, b: Decision) -> bool:
    return a[1:] != b[1:] or Mode.DHA not in (a[0], b[0])


def check_launches(found: Any) -> dict[str, tuple[float, float]]:
    """`found`, also as JSON has it, as Launches. Raises ValueError naming what is wrong."""
    if not isinstance(found, Mapping):
        raise ValueError(f"launches: expected seconds by alternative, found {found!r}")
    for name, pair in found.items():
        if name not in ALTERNATIVES:
            raise ValueError(f"launches: unknown {name!r}; known are {', '.join(ALTERNATIVES)}")
        numbers = isinstance(pair, list | tuple) and [type(x) in (int, float) for x in pair] == [True, True]
        if not numbers or not all(0 <= x < math.inf for x in pair):
            raise ValueError(f"launches: {name} must be two finite numbers >= 0, found {pair!r}")
    return {str(name): (pair[0], pair[1]) for name, pair in found.items()}
