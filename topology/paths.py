"""Paths that know the links they use, and what a set of them reaches together.

Two paths over one link must not be counted twice: the direct path and an assisted one may share the host's
way out, a PCIe switch or the target's way in. `PathSet` asks the fluid model what its paths reach side by
side, and splits transfers by those rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .dispatch import Path, finish_time, split
from .fluid import max_min_rates

Direction = Literal["h2d", "d2h"]
DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")


@dataclass(frozen=True)
class FabricPath(Path):
    """A `Path` with its end points and the resources it uses (weights: how often each byte crosses them).

    `bandwidth` is what the path reaches alone. `via` names the peer that forwards, None for the direct path.
    """

    host: str = ""
    device: str = ""
    via: str | None = None
    direction: Direction = "h2d"
    uses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PathSet:
    """Paths between one host and one device, with the capacity (bytes/s) of every resource they use."""

    paths: tuple[FabricPath, ...]
    capacity: Mapping[str, float]

    def __len__(self) -> int:
        return len(self.paths)

    def together(self, used: Sequence[int] | None = None) -> list[Path]:
        """The paths (or those at the indices `used`) with the bandwidth each keeps when all of them run."""
        paths = [self.paths[i] for i in used] if used is not None else list(self.paths)
        rates = max_min_rates([p.bandwidth for p in paths], [p.uses for p in paths], self.capacity)
        return [Path(p.name, p.latency, rate) for p, rate in zip(paths, rates, strict=True)]

    def joint_bandwidth(self) -> float:
        """Bytes/s that all paths reach together; at most the sum of their bandwidths."""
        return sum(p.bandwidth for p in self.together())

    def split(self, nbytes: int, *, min_chunk: int = 0) -> list[int]:
        """Bytes per path as in `dispatch.split`, leaving out paths that would only take another's bandwidth.

        Paths are added one at a time, each time the one that brings the end forward most, judged by the rates
        the chosen ones reach together.
        """
        if not nbytes:
            return split(nbytes, self.paths, min_chunk=min_chunk)
        chosen: list[int] = []
        shares, best = [0] * len(self.paths), float("inf")
        while len(chosen) < len(self.paths):
            trials = []
            for i in range(len(self.paths)):
                if i in chosen:
                    continue
                used = sorted([*chosen, i])
                paths = self.together(used)
                trial = split(nbytes, paths, min_chunk=min_chunk)
                trials.append((finish_time(trial, paths), i, used, trial))
            seconds, i, used, trial = min(trials, key=lambda t: t[:2])
            if seconds >= best * (1 - 1e-9):
                break
            best, chosen, shares = seconds, used, [0] * len(self.paths)
            for j, n in zip(used, trial, strict=True):
                shares[j] = n
        return shares

    def seconds(self, shares: Sequence[int]) -> float:
        """When the last byte of `shares` (bytes per path) arrives, the used paths at their joint rates."""
        used = [i for i, n in enumerate(shares) if n]
        return finish_time([shares[i] for i in used], self.together(used))
