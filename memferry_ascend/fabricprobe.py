"""Measures the collectives of the ranks that are there: what the planner must know of several ranks."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from memferry_ascend.backends.base import Backend
from memferry_ascend.parallel import Ranks
from memferry_ascend.planner.fabric import FabricProfile
from memferry_ascend.planner.profile import Profile
from memferry_ascend.runtime import Runtime

SMALL = 4096
LARGE, LARGE_ON_CPU = 32 << 20, 1 << 20
"""Bytes that are gathered to find the bandwidth."""
REPEATS = 5


def with_ranks(profile: Profile, runtime: Runtime) -> Profile:
    """The profile of one rank, with what connects it to the others. Every rank calls."""
    if runtime.ranks is None:
        return profile
    return replace(profile, fabric=measure(runtime.ranks, runtime.backend))


def measure(ranks: Ranks, backend: Backend) -> FabricProfile:
    """Latency and bandwidth of a gather within the node, and between nodes if there are several. Every rank calls, when
    no engine is at work; takes well below a second."""
    latency, bandwidth = _times(ranks, backend, ranks.shard, ranks.local)
    if ranks.nodes == 1:
        return FabricProfile(ranks.local, bandwidth, latency)
    latency_across, across = _times(ranks, backend, ranks.across, ranks.nodes)
    return FabricProfile(ranks.local, bandwidth, latency, ranks.nodes, across, latency_across)


def _times(ranks: Ranks, backend: Backend, group: Any, size: int) -> tuple[float, float]:
    """Seconds of a gather of next to nothing, and bytes/s that a rank sends."""
    total = (LARGE_ON_CPU if backend.device.type == "cpu" else LARGE) // size * size
    room = backend.alloc_device(total)
    room.zero_()

    def seconds(nbytes: int) -> float:
        piece = nbytes // size
        out, mine = room[: piece * size], room[:piece].clone()
        found = []
        for _ in range(REPEATS + 1):
            ranks.barrier()
            backend.compute.synchronize()
            began = time.perf_counter()
            with ranks.explained():
                ranks.all_gather(out, mine, ranks.wait, group)
            backend.compute.synchronize()
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    small, large = seconds(SMALL), seconds(total)
    moved = (total - SMALL) * (size - 1) / size
    return small, max(moved, 1.0) / max(large - small, large / 10)
