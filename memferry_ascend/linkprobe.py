"""The link between host and device, and the host's own memory: what the planner must know of either.

All through the backend's own streams, with timing events, so that emulated links and split paths are measured as the
engine will use them. Bytes/s and seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from memferry_ascend.backends.base import Backend, Stream
from memferry_ascend.planner.profile import LinkProfile

SMALL = 4096
"""Bytes of the copy that tells the latency."""
LARGE = 32 << 20
"""Bytes of the copies that tell the bandwidth: beyond 4 MiB a copy gets 90 % of the link."""
REPEATS = 5
SLOWER = 1.1
"""An update that takes this much longer beside copies shares host memory with them."""


@dataclass
class LinkFound:
    """The link as the planner sees it, and what it has no place for. `dha_share`: bandwidth of a read by a kernel and a
    copy together over that of a copy alone (1: they share the link, 2: they do not meet)."""

    link: LinkProfile
    dha_share: float
    notes: list[str] = field(default_factory=list)


def _timed(backend: Backend, queues: Sequence[tuple[Stream, Callable[[], None]]]) -> float:
    """Seconds from the first queue's start until all of them are done; they start together."""
    backend.synchronize()
    start = backend.event(timing=True)
    ends = [backend.event(timing=True) for _ in queues]
    first = queues[0][0]
    first.record(start)
    for stream, _ in queues[1:]:
        stream.wait(start)
    for (stream, work), end in zip(queues, ends, strict=True):
        work()
        stream.record(end)
    for end in ends:
        end.synchronize()
    return max(start.elapsed(end) for end in ends)


def median(run: Callable[[], float], repeats: int = REPEATS) -> float:
    run()
    return max(1e-9, statistics.median(run() for _ in range(repeats)))


def measure_link(backend: Backend, budget: int, update: tuple[Callable[[], None], int] | None) -> LinkFound:
    """Measure latency, both directions, both at once, a kernel's reads beside a copy, and an update beside copies.

    budget: device bytes that may be taken. update: one host update and the bytes of host memory it moves; None when
    nothing is trainable.
    """
    size = max(SMALL, min(LARGE, budget // 8)) // 4096 * 4096
    slab = backend.alloc_host(2 * size, mapped=True)
    try:
        assert slab.device is not None
        device = backend.alloc_device(2 * size)
        down, up = backend.stream("upload"), backend.stream("download")
        host_a, host_b = slab.host[:size], slab.host[size:]
        dev_a, dev_b = device[:size], device[size : 2 * size]

        def upload() -> None:
            down.copy(dev_a, host_a)

        def download() -> None:
            up.copy(host_b, dev_b)

        small = median(lambda: _timed(backend, [(down, lambda: down.copy(dev_a[:SMALL], host_a[:SMALL]))]))
        t_down = median(lambda: _timed(backend, [(down, upload)]))
        t_up = median(lambda: _timed(backend, [(up, download)]))
        t_both = median(lambda: _timed(backend, [(down, upload), (up, download)]))
        latency = max(0.0, small - SMALL * t_down / size)
        h2d, d2h = size / max(1e-9, t_down - latency), size / max(1e-9, t_up - latency)
        duplex = max(2 * size / t_both, h2d, d2h)
        share = _dha_share(backend, slab.device[:size], dev_b, upload, down, t_down)
        notes = [f"a kernel's reads and a copy together reach {share:.2f} of the link"]
        memory = None
        if update is not None:
            memory = _host_memory(backend, update, [(down, upload), (up, download)], 2 * size, t_both)
            notes.append(
                "host updates and copies do not slow each other down"
                if memory is None
                else f"host updates and copies share {memory / 1e9:.1f} GB/s of host memory"
            )
        backend.synchronize()
        return LinkFound(LinkProfile(h2d, d2h, duplex, latency, memory), share, notes)
    finally:
        backend.synchronize()
        backend.free_host(slab)


def _dha_share(
    backend: Backend,
    alias: torch.Tensor,
    out: torch.Tensor,
    copy: Callable[[], None],
    stream: Stream,
    t_copy: float,
) -> float:
    """A kernel that reads the alias once, alone and beside a copy."""
    source, target = alias.view(torch.float32), out.view(torch.float32)

    def read() -> None:
        torch.add(source, 1.0, out=target)

    def alone() -> float:
        backend.synchronize()
        start, end = backend.event(timing=True), backend.event(timing=True)
        backend.compute.record(start)
        read()
        backend.compute.record(end)
        end.synchronize()
        return start.elapsed(end)

    def together() -> float:
        backend.synchronize()
        start, read_end, copy_end = (backend.event(timing=True) for _ in range(3))
        backend.compute.record(start)
        stream.wait(start)
        copy()
        stream.record(copy_end)
        read()
        backend.compute.record(read_end)
        read_end.synchronize()
        copy_end.synchronize()
        return max(start.elapsed(read_end), start.elapsed(copy_end))

    median(alone, 1)
    both = median(together, 3)
    return min(2.0, 2 * t_copy / both)


def _host_memory(
    backend: Backend,
    update: tuple[Callable[[], None], int],
    queues: Sequence[tuple[Stream, Callable[[], None]]],
    nbytes: int,
    t_both: float,
) -> float | None:
    """Bytes/s of host memory that an update and duplex copies get together; None when the update is no slower."""
    run, traffic = update

    def alone() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    before = median(alone, 3)
    rounds = min(64, int(2 * before / t_both) + 2)

    def beside() -> float:
        backend.synchronize()
        for _ in range(rounds):
            for _, work in queues:
                work()
        seconds = alone()
        backend.synchronize()
        return seconds

    after = median(beside, 3)
    if after < SLOWER * before:
        return None
    start = time.perf_counter()
    for _ in range(rounds):
        for _, work in queues:
            work()
    run()
    ran = time.perf_counter() - start
    backend.synchronize()
    whole = max(ran, time.perf_counter() - start)
    return (rounds * nbytes + traffic * max(1.0, whole / max(1e-9, after)) * (after / whole)) / whole
