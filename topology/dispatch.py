"""Divide a transfer between several paths: the arithmetic of the adaptive data dispatcher.

A path is a way from host memory to a device with a startup latency L (seconds) and a bandwidth B (bytes/s):
`direct`, or `assisted` through a peer that forwards. The dispatcher minimises the time at which the last byte
arrives (the MemFerry paper, section IV-E). For two paths that is the paper's closed form; for k paths it is
water-filling: raise one common finish time T until the paths with L_i < T have moved B_i (T - L_i) bytes
each, all bytes together.

`strategies.py` turns these shares into chunks that copying code can ask for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 512  # bytes; every parameter starts at such an address, and shares keep it for their offsets


@dataclass(frozen=True)
class Path:
    """One way from host memory to a device.

    `latency` is in seconds (what a transfer costs before its first byte moves), `bandwidth` in bytes/s.
    Raises ValueError for a negative latency, a bandwidth that is not above zero, or either not finite.
    """

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"path {self.name!r}: expected a latency of 0 s or more, found {self.latency!r}")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(
                f"path {self.name!r}: expected a bandwidth above 0 bytes/s, found {self.bandwidth!r}"
            )

    def seconds(self, nbytes: int) -> float:
        """Seconds that `nbytes` take on this path alone; no bytes take no time."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


def threshold(direct: Path, assisted: Path) -> float:
    """Bytes up to which the path with the lower latency carries everything: B_d (L_a - L_d), never below
    zero.
    """
    first, second = sorted((direct, assisted), key=lambda p: p.latency)
    return first.bandwidth * (second.latency - first.latency)


def finish_time(shares: Sequence[int], paths: Sequence[Path]) -> float:
    """Seconds until the last byte of `shares` (bytes per path) has arrived when all paths start together."""
    return max((p.seconds(n) for n, p in zip(shares, paths, strict=True)), default=0.0)


def split(nbytes: int, paths: Sequence[Path], *, min_chunk: int = 0) -> list[int]:
    """Bytes per path, in the order of `paths`, so that the last byte arrives as early as possible.

    The shares sum to `nbytes` exactly. All but one are multiples of 512 bytes; what is left over goes to the
    last used path, so that every share laid end to end starts 512-byte aligned. Up to `threshold` bytes one
    path carries everything. A path whose share would be below `min_chunk` bytes is left out; when one path
    remains it is the one that is fastest alone. The result is within one 512-byte block per path of the
    continuous optimum.

    Raises ValueError if `nbytes` or `min_chunk` is negative or there is no path.
    """
    if nbytes < 0 or min_chunk < 0:
        raise ValueError(f"expected sizes of 0 bytes or more, found nbytes={nbytes}, min_chunk={min_chunk}")
    if not paths:
        raise ValueError("expected at least one path to split over, found none")
    if nbytes == 0:
        return [0] * len(paths)
    used = list(range(len(paths)))
    shares = _fill(nbytes, paths, used)
    while min_chunk and len(shares) > 1:
        small = [i for i, share in shares.items() if share < min_chunk]
        if not small:
            break
        # Leave out the small path that is missed least.
        used = list(shares)
        rests = [_fill(nbytes, paths, [j for j in used if j != i]) for i in small]
        shares = min(rests, key=lambda rest: _level(nbytes, paths, list(rest)))
    if len(shares) == 1:
        best = min(range(len(paths)), key=lambda i: (paths[i].seconds(nbytes), i))
        return [nbytes if i == best else 0 for i in range(len(paths))]
    return _align(nbytes, paths, shares)


def _level(nbytes: float, paths: Sequence[Path], used: Sequence[int]) -> float:
    """The common finish time (seconds) of the paths `used`, all of which carry bytes."""
    bandwidth = sum(paths[i].bandwidth for i in used)
    return (nbytes + sum(paths[i].bandwidth * paths[i].latency for i in used)) / bandwidth


def _fill(nbytes: float, paths: Sequence[Path], candidates: Sequence[int]) -> dict[int, float]:
    """Water-filling: path index to bytes (a float above zero), only for the paths that are used, in path
    order.
    """
    order = sorted(candidates, key=lambda i: (paths[i].latency, -paths[i].bandwidth, i))
    used = [order[0]]
    for i in order[1:]:
        # Bytes that the paths so far can finish before this one could deliver its first. The comparison is
        # the paper's S <= B_d (L_a - L_d), kept in bytes: it is exact at the threshold, where a comparison of
        # times is not.
        if nbytes <= sum(paths[j].bandwidth * (paths[i].latency - paths[j].latency) for j in used):
            break
        used.append(i)
    if len(used) == 1:
        return {used[0]: float(nbytes)}
    time = _level(nbytes, paths, used)
    shares = {i: paths[i].bandwidth * (time - paths[i].latency) for i in sorted(used)}
    return {
        i: share for i, share in shares.items() if share > 0
    }  # rounding may leave -1e-12 at the threshold


def _align(nbytes: int, paths: Sequence[Path], shares: dict[int, float]) -> list[int]:
    """Whole 512-byte blocks per path; blocks lost to rounding go where they finish first; the tail to the
    last path.
    """
    total = -(-nbytes // ALIGNMENT)
    blocks = {i: int(share // ALIGNMENT) for i, share in shares.items()}
    missing = total - sum(blocks.values())
    for _ in range(max(missing, 0)):
        best = min(
            blocks, key=lambda i: (paths[i].latency + (blocks[i] + 1) * ALIGNMENT / paths[i].bandwidth, i)
        )
        blocks[best] += 1
    while missing < 0:  # floating point may overshoot sizes beyond 2**53 bytes
        worst = max(
            blocks,
            key=lambda i: (blocks[i] > 0, paths[i].latency + blocks[i] * ALIGNMENT / paths[i].bandwidth),
        )
        removed = min(blocks[worst], -missing)
        blocks[worst] -= removed
        missing += removed
    result = [blocks.get(i, 0) * ALIGNMENT for i in range(len(paths))]
    last = max(i for i, n in enumerate(result) if n)
    result[last] -= total * ALIGNMENT - nbytes
    return result
