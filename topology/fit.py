"""Latency and bandwidth of a path from timed copies, and which paths share a bottleneck.

Timings have a long tail on one side: a copy is sometimes late (another process, a page fault, a clock
change), never early. So repeats of one size are reduced to their median first. The line seconds = L + bytes /
B is then the one with the least sum of absolute relative misses, which a minority of wrong sizes does not
move, and is refined by weighted least squares over the sizes that it explains. Relative, because sizes span
five decades: in seconds the largest copy would decide everything and the latency nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from .dispatch import Path

Name = TypeVar("Name")

OUTLIER = 4.0  # a size that misses by more than this many median misses takes no part in the refinement
SHARED_BELOW = 0.9  # two paths that keep less than this part of their sum together share something


@dataclass(frozen=True)
class Fit:
    """`latency` in seconds, `bandwidth` in bytes/s, `error`: the median relative miss of the fitted times."""

    latency: float
    bandwidth: float
    error: float
    sizes: int

    def path(self, name: str) -> Path:
        return Path(name, self.latency, self.bandwidth)


def medians(samples: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """One (bytes, median seconds) per size, by size.

    Raises ValueError for sizes or times that are not above zero and finite.
    """
    groups: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        if nbytes <= 0 or not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"expected bytes and seconds above zero, found {nbytes} bytes in {seconds} s")
        groups.setdefault(nbytes, []).append(seconds)
    return [(nbytes, median(times)) for nbytes, times in sorted(groups.items())]


def fit(samples: Iterable[tuple[int, float]]) -> Fit:
    """Fit seconds = latency + bytes / bandwidth to (bytes, seconds) samples, several per size.

    Needs two sizes, better eight or more over three decades. A line with a latency below zero is never
    chosen.

    Raises ValueError for fewer than two sizes, or when larger copies do not take longer (noise only: copy
    more).
    """
    points = medians(samples)
    if len(points) < 2:
        raise ValueError(f"expected samples of at least two sizes, found {len(points)}")
    lines = [(0.0, t / n) for n, t in points]
    for i, (n1, t1) in enumerate(points):
        for n2, t2 in points[i + 1 :]:
            slope = (t2 - t1) / (n2 - n1)
            lines.append((t1 - slope * n1, slope))
    # A line of least absolute misses passes through two of the points (or through one, with the latency at
    # its bound).
    possible = [line for line in lines if line[0] >= 0 and line[1] > 0]
    latency, slope = min(possible, key=lambda line: sum(_misses(points, line)))
    if points[-1][1] <= points[0][1]:
        raise ValueError(
            f"expected larger copies to take longer, found {points[0]} to {points[-1]} (bytes, seconds): "
            "measure larger sizes or more repeats"
        )
    misses = _misses(points, (latency, slope))
    limit = max(OUTLIER * median(misses), 1e-9)
    refined = _least_squares([point for point, miss in zip(points, misses, strict=True) if miss <= limit])
    if refined is not None:
        latency, slope = refined
    error = median(_misses(points, (latency, slope)))
    return Fit(latency, 1.0 / slope, error, len(points))


def _misses(points: Sequence[tuple[int, float]], line: tuple[float, float]) -> list[float]:
    """Relative miss of `line` = (latency, seconds per byte) at each point."""
    latency, slope = line
    return [abs(latency + slope * n - t) / t for n, t in points]


def _least_squares(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """(latency, seconds per byte) with the least squared relative misses, or None if impossible."""
    if len(points) < 2:
        return None
    weights = [1.0 / (t * t) for _, t in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True)) / spread
    latency = mean_t - slope * mean_n
    return (latency, slope) if latency >= 0 and slope > 0 else None


@dataclass(frozen=True)
class Bottleneck:
    """Paths that reach only `bandwidth` bytes/s together, less than the sum of each alone."""

    names: tuple[str, ...]
    bandwidth: float


def shared_bottlenecks(
    alone: Iterable[tuple[str, float]],
    together: Iterable[tuple[Sequence[str], float]],
    *,
    below: float = SHARED_BELOW,
) -> list[Bottleneck]:
    """Which paths share a bottleneck, from bandwidths (bytes/s) measured alone and in groups.

    `alone` gives (path, bandwidth), repeats allowed; `together` gives (paths, their sum when run at once).
    Repeats are reduced to medians. A group is reported when it keeps less than `below` of the sum of its
    members and when no smaller reported group within it explains that.

    Raises KeyError for a group with a path that was not measured alone, ValueError for bandwidths not above
    zero.
    """
    single = _by_name((name, b) for name, b in alone)
    groups = _by_name((tuple(sorted(set(names))), b) for names, b in together)
    found: list[Bottleneck] = []
    for names, measured in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        missing = [name for name in names if name not in single]
        if missing:
            raise KeyError(
                f"expected each path measured alone, found no such measurement of {', '.join(missing)}"
            )
        if measured < below * _explained(names, single, found):
            found.append(Bottleneck(names, measured))
    return found


def _explained(names: Sequence[str], single: dict[str, float], found: Sequence[Bottleneck]) -> float:
    """The most that `names` can reach given the bottlenecks found so far, each used at most once a path."""
    free = set(names)
    total = 0.0
    inside = [b for b in found if set(b.names) <= set(names)]
    for bottleneck in sorted(inside, key=lambda b: b.bandwidth / sum(single[n] for n in b.names)):
        if set(bottleneck.names) <= free:
            total += bottleneck.bandwidth
            free -= set(bottleneck.names)
    return total + sum(single[name] for name in free)


def _by_name(pairs: Iterable[tuple[Name, float]]) -> dict[Name, float]:
    groups: dict[Name, list[float]] = {}
    for name, value in pairs:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"expected a bandwidth above 0 bytes/s for {name!r}, found {value!r}")
        groups.setdefault(name, []).append(value)
    return {name: median(values) for name, values in groups.items()}
