"""Measure the paths between host memory and a device: each alone and together, in both directions, with the data
checked.

Streams are held until every copy of a measurement is queued, and a copy is timed between two events of its own
stream: what it costs to launch a copy does not hide what it costs to begin one. On the CPU backend a fabric's links
may be emulated (slowed by a time scale that the result states); assisted paths then forward in chunks through
staging buffers, with the threads that `memferry_ascend.transfers` trains with.
"""

from __future__ import annotations

import datetime
import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from .fabric import Fabric
from .fit import fit, shared_bottlenecks
from .measured import Figures, Measured, MeasuredPath, Sample, Shared
from .paths import DIRECTIONS, Direction

if TYPE_CHECKING:
    import torch

    from memferry_ascend.backends.base import Backend, Event, HostSlab, Stream

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(4 * KIB << i for i in range(17))  # 4 KiB to 256 MiB
SMALL_SIZES = tuple(4 * KIB << i for i in range(13))  # 4 KiB to 16 MiB: the CPU backend copies slowly
SHORTEST = 0.01  # wall-clock seconds that the shortest emulated copy takes, so that late wake-ups hardly show

Say = Callable[[str], None]


@dataclass(eq=False)
class Way:
    """A path that can be measured: a stream per direction, and memory at both ends."""

    name: str
    host: str
    device: str
    via: str | None
    slab: HostSlab
    memory: torch.Tensor
    streams: dict[Direction, Stream]
    events: tuple[Event, Event]
    least: int = 0
    """Bytes of the smallest copies that go this way in training: only from there on must its line fit."""
    samples: dict[Direction, list[Sample]] = field(default_factory=lambda: {"h2d": [], "d2h": []})

    def counted(self, direction: Direction) -> list[Sample]:
        """Samples that the line is fitted to; all of them if fewer than two sizes are large enough."""
        large = [(nbytes, seconds) for nbytes, seconds in self.samples[direction] if nbytes >= self.least]
        return large if len({nbytes for nbytes, _ in large}) > 1 else self.samples[direction]

    def queue(self, direction: Direction, nbytes: int) -> None:
        far, near = self.memory[:nbytes], self.slab.host[:nbytes]
        dst, src = (far, near) if direction == "h2d" else (near, far)
        stream = self.streams[direction]
        stream.record(self.events[0])
        stream.copy(dst, src)
        stream.record(self.events[1])


def probe(
    backend: Backend | None = None,
    *,
    fabric: Fabric | None = None,
    target: str | None = None,
    via: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 5,
    time_scale: float | None = None,
    say: Say | None = None,
) -> Measured:
    """Measure the direct path to a device and one through each peer; returns what `Measured.save` writes.

    backend: the device; None makes the CPU backend when `fabric` is given, else takes `memferry_ascend.init`'s.
    fabric: emulate this fabric's links (CPU backend only). `target` is one of its devices (default the first), `via`
        the peers (default: the one device of the target's node that adds most).
    sizes: bytes, at least two; by default 4 KiB to 256 MiB, to 16 MiB on the CPU backend.
    time_scale: wall-clock seconds per emulated second; by default such that the shortest copy takes 10 ms.

    Raises:
        FerryError: data arrived changed, or times do not grow with sizes.
        ValueError: wrong sizes, repeats, devices or peers.
    """
    if fabric is None and (target is not None or via is not None or time_scale is not None):
        raise ValueError("target, via and time_scale belong to an emulated fabric: give fabric too")
    if backend is None:
        from memferry_ascend import runtime

        backend = runtime.make_backend("cpu") if fabric is not None else runtime.current().backend
    if fabric is not None and backend.queues_relays:
        raise ValueError(f"links are emulated on the cpu backend only, not on {backend.name!r}")
    chosen = tuple(sizes or (SMALL_SIZES if backend.name == "cpu" else SIZES))
    if len(set(chosen)) < 2 or min(chosen) <= 0:
        raise ValueError(f"expected at least two sizes above 0 bytes, found {list(chosen)}")
    if repeats < 1:
        raise ValueError(f"expected at least one repeat, found {repeats}")
    if fabric is None:
        with _real_ways(backend, max(chosen)) as ways:
            return _Probe(backend, ways, 1.0, repeats, say).run(chosen, None)
    with _emulated_ways(backend, fabric, target, via, max(chosen), time_scale) as (ways, scale):
        return _Probe(backend, ways, scale, repeats, say).run(chosen, fabric)


class _Probe:
    def __init__(
        self, backend: Backend, ways: Sequence[Way], scale: float, repeats: int, say: Say | None
    ) -> None:
        self.backend, self.ways, self.scale, self.repeats = backend, ways, scale, repeats
        self.say = say or (lambda _text: None)

    def run(self, sizes: Sequence[int], fabric: Fabric | None) -> Measured:
        from memferry_ascend.errors import FerryError

        largest = max(sizes)
        measured = []
        for way in self.ways:
            figures = {}
            for direction in DIRECTIONS:
                self.say(f"{way.name} {direction}")
                self._verify(way, direction, (min(sizes), largest))
                for nbytes in sorted(set(sizes)):
                    times = self._time([way], direction, nbytes)
                    way.samples[direction] += [(nbytes, t[0]) for t in times]
                try:
                    found = fit(way.counted(direction))
                except ValueError as error:
                    raise FerryError(f"probe: {way.name} {direction}: {error}") from error
                figures[direction] = Figures(found.latency, found.bandwidth, tuple(way.samples[direction]))
            measured.append(
                MeasuredPath(way.name, way.host, way.device, way.via, figures["h2d"], figures["d2h"])
            )
        together, shared = self._together(largest)
        machine: dict[str, Any] = {
            "backend": self.backend.name, "host": platform.node(), "repeats": self.repeats,
            "emulated": fabric is not None, "time_scale": self.scale,
            "verified": [min(sizes), largest], "together_bytes": largest, "together": together,
            "duplex": self._duplex(largest),
        }  # fmt: skip
        name = fabric.name if fabric is not None else f"{platform.node()} {self.backend.device}"
        created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Measured(name, tuple(measured), tuple(shared), created, machine)

    def _time(self, ways: Sequence[Way], direction: Direction, nbytes: int) -> list[list[float]]:
        """Seconds of each way's copy, all started at once; one list per repeat, after one that does not count."""
        return [self._once([(way, direction) for way in ways], nbytes) for _ in range(self.repeats + 1)][1:]

    def _once(self, copies: Sequence[tuple[Way, Direction]], nbytes: int) -> list[float]:
        release = self.backend.hold([way.streams[direction] for way, direction in copies])
        try:
            for way, direction in copies:
                way.queue(direction, nbytes)
        finally:
            release()
        for way, direction in copies:
            way.streams[direction].synchronize()
        return [way.events[0].elapsed(way.events[1]) / self.scale for way, _ in copies]

    def _verify(self, way: Way, direction: Direction, sizes: Sequence[int]) -> None:
        """Random bytes across, compared at the other end; also an odd number of them."""
        import torch

        from memferry_ascend.errors import FerryError

        for nbytes in (*sizes, max(1, sizes[-1] - 513)):
            want = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
            far, near = way.memory[:nbytes], way.slab.host[:nbytes]
            (near if direction == "h2d" else far).copy_(want)
            (far if direction == "h2d" else near).zero_()
            self.backend.synchronize()
            way.queue(direction, nbytes)
            way.streams[direction].synchronize()
            got = (far if direction == "h2d" else near).cpu()
            if not torch.equal(got, want):
                wrong = int((got != want).sum())
                raise FerryError(
                    f"probe: {way.name} {direction} delivered {wrong} of {nbytes} bytes changed; do not train over "
                    "this path"
                )

    def _together(self, nbytes: int) -> tuple[list[dict[str, Any]], list[Shared]]:
        """Pairs of paths, and all of them, at once: [{paths, direction, bandwidth}], and what shares a bottleneck."""
        together: list[dict[str, Any]] = []
        shared: list[Shared] = []
        groups = list(itertools.combinations(self.ways, 2))
        if len(self.ways) > 2:
            groups.append(tuple(self.ways))  # type: ignore[arg-type]
        for direction in DIRECTIONS:
            alone = [
                (way.name, n / seconds)
                for way in self.ways
                for n, seconds in way.samples[direction]
                if n == nbytes
            ]
            sums: list[tuple[tuple[str, ...], float]] = []
            for group in groups:
                names = tuple(way.name for way in group)
                self.say(f"{' and '.join(names)} together {direction}")
                for times in self._time(group, direction, nbytes):
                    sums.append((names, len(group) * nbytes / max(times)))
            for names in dict.fromkeys(names for names, _ in sums):
                middle = median(b for found, b in sums if found == names)
                together.append({"paths": list(names), "direction": direction, "bandwidth": middle})
            device = self.ways[0].device
            for bottleneck in shared_bottlenecks(alone, sums):
                pairs = tuple((device, name) for name in bottleneck.names)
                shared.append(Shared(pairs, direction, bottleneck.bandwidth))
        return together, shared

    def _duplex(self, nbytes: int) -> float:
        """Bytes/s of the direct path with both directions at once."""
        way = self.ways[0]
        # The way back has events of its own.
        back = Way(
            way.name, way.host, way.device, way.via, self.ways[0].slab, way.memory, way.streams,
            (self.backend.event(timing=True), self.backend.event(timing=True)),
        )  # fmt: skip
        half = max(1, nbytes // 2)
        back.memory = way.memory[nbytes - half :]
        back.slab = type(way.slab)(half, way.slab.host[nbytes - half :], None)
        sums = []
        for _ in range(self.repeats):
            times = self._once([(way, "h2d"), (back, "d2h")], half)
            sums.append(2 * half / max(times))
        return median(sums)


@contextmanager
def _real_ways(backend: Backend, nbytes: int) -> Iterator[list[Way]]:
    """The direct path of a backend and its relays through peers, as training queues them."""
    from memferry_ascend.transfers import LEAST_SHARE, RELAY_CHUNK

    with _memory(backend) as make:
        ways = [make("direct", "host", None, nbytes)]
        family = backend.device.type
        ways[0].device = f"{family}:{backend.device.index or 0}"
        for peer in backend.peers():
            way = make(f"via {family}:{peer}", "host", f"{family}:{peer}", nbytes)
            way.device, way.least = ways[0].device, LEAST_SHARE

            def relay(stream: Stream, dst: torch.Tensor, src: torch.Tensor, peer: int = peer) -> bool:
                backend.relay(stream, dst, src, peer=peer, chunk=RELAY_CHUNK)
                backend.relays_done(stream)
                return True

            for stream in way.streams.values():
                stream.carrier = relay
            ways.append(way)
        yield ways


@contextmanager
def _emulated_ways(
    backend: Backend,
    fabric: Fabric,
    target: str | None,
    via: Sequence[str] | None,
    nbytes: int,
    time_scale: float | None,
) -> Iterator[tuple[list[Way], float]]:
    from memferry_ascend.assist import emulated
    from memferry_ascend.transfers import Transfers

    device = target or fabric.devices[0]
    if device not in fabric.devices:
        raise ValueError(f"{fabric.name} has no device {device!r}")
    peers = best_peers(fabric, device) if via is None else list(via)
    for peer in peers:
        if peer not in fabric.devices or peer == device:
            raise ValueError(
                f"{fabric.name}: {peer!r} cannot assist {device}: expected another of its devices"
            )
    paths = {d: fabric.paths(device, via=peers, direction=d) for d in DIRECTIONS}
    shortest = min(p.latency for found in paths.values() for p in found.paths)
    scale = time_scale or max(1.0, SHORTEST / max(shortest, 1e-6))
    by_name = {str(direction): found for direction, found in paths.items()}
    transfers = Transfers(backend, by_name, links=emulated(by_name, scale))
    try:
        with _memory(backend) as make:
            ways = []
            for path in paths["h2d"].paths:
                way = make(path.name, path.host, path.via, nbytes)
                way.device = device
                for direction, stream in way.streams.items():

                    def carry(
                        _stream: Stream,
                        dst: torch.Tensor,
                        src: torch.Tensor,
                        direction: Direction = direction,
                        name: str = path.name,
                    ) -> bool:
                        transfers.move(dst, src, direction, only=name)
                        return True

                    stream.carrier = carry
                ways.append(way)
            yield ways, scale
    finally:
        transfers.close()


def best_peers(fabric: Fabric, device: str) -> list[str]:
    """The one device of `device`'s node (of all, without nodes) that adds most bandwidth; none where none adds any."""
    node = device.split("/")[0] + "/" if "/" in device else ""
    direct = fabric.path(device).bandwidth
    gains = {}
    for peer in fabric.devices:
        if peer != device and peer.startswith(node):
            gains[peer] = fabric.paths(device, via=[peer]).joint_bandwidth()
    best = max(gains, key=lambda peer: gains[peer], default=None)
    return [best] if best is not None and gains[best] > 1.01 * direct else []


@contextmanager
def _memory(backend: Backend) -> Iterator[Callable[[str, str, str | None, int], Way]]:
    """Makes ways, and gives their memory back."""
    ways: list[Way] = []

    def make(name: str, host: str, via: str | None, nbytes: int) -> Way:
        slab = backend.alloc_host(nbytes, mapped=True)
        streams: dict[Direction, Stream] = {d: backend.stream(f"probe {name} {d}") for d in DIRECTIONS}
        events = (backend.event(timing=True), backend.event(timing=True))
        way = Way(name, host, "", via, slab, backend.alloc_device(nbytes), streams, events)
        ways.append(way)
        return way

    try:
        yield make
    finally:
        try:
            backend.synchronize()
        finally:
            for way in ways:
                for stream in way.streams.values():
                    stream.carrier = None
                backend.free_host(way.slab)
