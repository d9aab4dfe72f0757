"""Simulate transfers that share a fabric: fluid max-min rates between events, exact finish times.

An event is a transfer's first byte or its last; between two events every rate is constant. A relayed transfer
is one flow over all links of both legs: it runs in chunks, so both legs move at one pace. Deterministic: same
flows, same numbers.

Max-min sharing is fair, not optimal: making one link faster lets its transfers press harder on the next link,
which may delay others. Making all links faster by one factor never makes anything slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .fluid import Sharing
from .paths import FabricPath


@dataclass(frozen=True)
class Flow:
    """`nbytes` that start at `start` (s) and cross `path`, whose latency passes before the first moves."""

    path: FabricPath
    nbytes: int
    start: float = 0.0


@dataclass(frozen=True)
class Interval:
    """From `begin` to `end` (s) every flow ran at its entry of `rates` (bytes/s)."""

    begin: float
    end: float
    rates: np.ndarray


@dataclass(frozen=True)
class SimResult:
    """When each flow's last byte arrived (s, in the order given) and what ran between."""

    finish: tuple[float, ...]
    intervals: tuple[Interval, ...]
    sharing: Sharing

    @property
    def seconds(self) -> float:
        """When the last byte of all arrived."""
        return max(self.finish, default=0.0)

    def utilisation(self) -> dict[str, float]:
        """Per resource, the highest part of its capacity that was ever in use (1.0 is full)."""
        peak = np.zeros(len(self.sharing.capacity))
        for interval in self.intervals:
            np.maximum(peak, self.sharing.load(interval.rates), out=peak)
        return dict(zip(self.sharing.resources, (peak / self.sharing.capacity).tolist(), strict=True))

    def carried(self) -> dict[str, float]:
        """Bytes that crossed each resource."""
        total = np.zeros(len(self.sharing.capacity))
        for interval in self.intervals:
            total += self.sharing.load(interval.rates) * (interval.end - interval.begin)
        return dict(zip(self.sharing.resources, total.tolist(), strict=True))


def simulate(flows: Sequence[Flow], capacity: Mapping[str, float]) -> SimResult:
    """Run `flows` over resources of `capacity` (bytes/s) until all have ended.

    Raises ValueError for negative sizes or starts, KeyError for a resource without a capacity.
    """
    for flow in flows:
        if flow.nbytes < 0 or not (math.isfinite(flow.start) and flow.start >= 0):
            raise ValueError(
                f"expected sizes and starts of 0 or more, found {flow.nbytes} bytes at {flow.start} s"
            )
    sharing = Sharing([f.path.bandwidth for f in flows], [f.path.uses for f in flows], capacity)
    left = np.array([float(f.nbytes) for f in flows])
    begin = np.array([f.start + f.path.latency for f in flows])
    finish = np.array([f.start for f in flows])  # of flows without bytes
    waiting = left > 0
    moving = np.zeros(len(flows), dtype=bool)
    intervals: list[Interval] = []
    now = 0.0
    while waiting.any() or moving.any():
        rates = sharing.rates(moving)
        next_begin = begin[waiting].min(initial=math.inf)
        remaining = np.full(len(flows), math.inf)
        np.divide(left, rates, out=remaining, where=moving)
        step = remaining.min(initial=math.inf)
        # Flows that end together up to rounding end in one event, or symmetric loads would take thousands.
        ended = np.zeros(len(flows), dtype=bool)
        if now + step <= next_begin:
            end = now + step
            ended = remaining <= step * (1 + 1e-9)
        else:
            end = float(next_begin)
        if moving.any():
            intervals.append(Interval(now, end, rates))
        left[moving] -= rates[moving] * (end - now)
        finish[ended] = end
        left[ended] = 0.0
        now = end
        started = waiting & (begin <= now)
        waiting &= ~started
        moving = (moving & ~ended) | started
    return SimResult(tuple(finish.tolist()), tuple(intervals), sharing)
