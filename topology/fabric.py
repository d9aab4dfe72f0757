"""The fabric model: hosts, devices, switches and the links between them, and the paths that follow from them.

A transfer goes from host memory to a device directly, or host -> peer -> device: the peer copies into a
buffer of its own and forwards in chunks, so both legs run at once and the slower one sets the pace (the
MemFerry paper, section IV-E, bounds the gain by min(B_C->i, B_i->0)). Figures come from a YAML file
(`load.py`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from .paths import Direction, FabricPath, PathSet

NodeKind = Literal["host", "device", "switch"]
LINK_KINDS = ("ub", "hccs", "sio", "pcie", "nvlink", "host")


@dataclass(frozen=True)
class Link:
    """A bundle of `count` equal links between two nodes.

    `bandwidth` is bytes/s of the whole bundle in one direction, `latency` seconds one way. `both` is bytes/s
    of the two directions together, None when they do not disturb each other. `flow` is the most that one
    transfer reaches (one copy engine seldom fills a bundle), None when it may use all of it.
    """

    name: str
    a: str
    b: str
    kind: str
    bandwidth: float
    latency: float
    count: int = 1
    both: float | None = None
    flow: float | None = None


@dataclass(frozen=True)
class Hop:
    """A link crossed from `link.a` to `link.b` (`forward`) or back."""

    link: Link
    forward: bool

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """This direction of the link and, where the directions share, the link as a whole."""
        link = self.link
        own = f"{link.a}>{link.b}" if self.forward else f"{link.b}>{link.a}"
        return (f"{link.kind} {own}", *([f"{link.kind} {link.a}<>{link.b}"] if link.both is not None else []))


@dataclass(frozen=True)
class Fabric:
    """Nodes by name, links, and what a copy costs beside its links.

    `launch_latency` (seconds) is the start of any copy; a relay adds `relay_latency` (seconds: the second
    launch and the last chunk's way over the second leg) and reaches `relay_efficiency` of its slower leg.
    `homes` gives the host whose memory a device's data lies in, where it is not simply the nearest.
    """

    name: str
    nodes: Mapping[str, NodeKind]
    links: tuple[Link, ...]
    description: str = ""
    launch_latency: float = 0.0
    relay_latency: float = 0.0
    relay_efficiency: float = 1.0
    homes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.nodes.items() if kind == "host")

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.nodes.items() if kind == "device")

    @cached_property
    def capacity(self) -> dict[str, float]:
        """Bytes/s of every resource: each direction of each link, and both together where they share."""
        result: dict[str, float] = {}
        for link in self.links:
            for forward in (True, False):
                hop = Hop(link, forward)
                own, *shared = hop.resources
                result[own] = link.bandwidth
                for name in shared:
                    assert link.both is not None
                    result[name] = link.both
        return result

    @cached_property
    def latency(self) -> dict[str, float]:
        """Seconds that crossing each resource of `capacity` takes; a link counts once, in its direction."""
        result = dict.fromkeys(self.capacity, 0.0)
        for link in self.links:
            for forward in (True, False):
                result[Hop(link, forward).resources[0]] = link.latency
        return result

    @cached_property
    def _hops(self) -> dict[str, list[tuple[str, Hop]]]:
        hops: dict[str, list[tuple[str, Hop]]] = {name: [] for name in self.nodes}
        for link in self.links:
            hops[link.a].append((link.b, Hop(link, True)))
            hops[link.b].append((link.a, Hop(link, False)))
        return hops

    def route(self, source: str, target: str) -> tuple[Hop, ...]:
        """The way with the lowest latency, then the fewest links, never through a device (a relay is a
        decision).

        Raises KeyError for an unknown node and ValueError when there is no way.
        """
        for name in (source, target):
            if name not in self.nodes:
                raise KeyError(f"{self.name} has no node {name!r}; devices are {_some(self.devices)}")
        with self._lock:
            if source not in self._searches:
                self._searches[source] = _Search(source, self.nodes, self._hops)
            way = self._searches[source].to(target)
        if way is None:
            raise ValueError(f"{self.name}: no links lead from {source} to {target}")
        return way

    @cached_property
    def _searches(self) -> dict[str, _Search]:
        return {}

    @cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def home(self, device: str) -> str:
        """The host for `device`: as the file says, otherwise the nearest by latency, the first of equals."""
        if device in self.homes:
            return self.homes[device]
        if self.nodes.get(device) != "device":
            raise KeyError(f"{self.name} has no device {device!r}; devices are {_some(self.devices)}")
        ways = {}
        for host in self.hosts:
            try:
                ways[host] = sum(hop.link.latency for hop in self.route(host, device))
            except ValueError:
                continue  # this host does not reach it
        return min(ways, key=lambda host: round(ways[host] * 1e12))

    def path(
        self,
        device: str,
        *,
        host: str | None = None,
        via: str | None = None,
        direction: Direction = "h2d",
    ) -> FabricPath:
        """The path between `host` (default: the device's home) and `device`, through `via` if given."""
        host = host or self.home(device)
        if via == device or via in self.hosts:
            raise ValueError(f"{via} cannot assist {device}: expected another device")
        stops = [host, device] if via is None else [host, via, device]
        if direction == "d2h":
            stops.reverse()
        legs = [self.route(a, b) for a, b in itertools.pairwise(stops)]
        hops = [hop for leg in legs for hop in leg]
        uses: dict[str, float] = {}
        for hop in hops:
            for name in hop.resources:
                uses[name] = uses.get(name, 0.0) + 1.0
        flow = min(hop.link.flow or hop.link.bandwidth for hop in hops)
        # A byte that crosses one resource twice (in and out of a shared link) halves what the resource gives.
        alone = min(flow, *(self.capacity[name] / weight for name, weight in uses.items()))
        latency = self.launch_latency + sum(hop.link.latency for hop in hops)
        if via is not None:
            latency += self.relay_latency
            alone *= self.relay_efficiency
        name = "direct" if via is None else f"via {via}"
        return FabricPath(name, latency, alone, host, device, via, direction, uses)

    def paths(
        self,
        device: str,
        *,
        host: str | None = None,
        via: Iterable[str] | None = None,
        direction: Direction = "h2d",
    ) -> PathSet:
        """The direct path and one through each peer in `via` (default: every other device that a host
        reaches).
        """
        host = host or self.home(device)
        peers = [d for d in self.devices if d != device] if via is None else list(via)
        found = [self.path(device, host=host, direction=direction)]
        found += [self.path(device, host=host, via=peer, direction=direction) for peer in peers]
        used = {name for path in found for name in path.uses}
        return PathSet(tuple(found), {name: self.capacity[name] for name in sorted(used)})


class _Search:
    """Dijkstra from one node, carried on only as far as someone asks: most ask about nearby nodes."""

    def __init__(
        self, source: str, nodes: Mapping[str, NodeKind], hops: Mapping[str, list[tuple[str, Hop]]]
    ) -> None:
        self._source, self._nodes, self._hops = source, nodes, hops
        # Latencies in whole picoseconds: sums in another order must not change the choice. The third entry
        # keeps the order of the file among equals.
        self._queue: list[tuple[int, int, int, str, tuple[Hop, ...]]] = [(0, 0, 0, source, ())]
        self._found: dict[str, tuple[Hop, ...]] = {}
        self._pushed = 0

    def to(self, target: str) -> tuple[Hop, ...] | None:
        while target not in self._found and self._queue:
            latency, length, _, node, way = heapq.heappop(self._queue)
            if node in self._found:
                continue
            self._found[node] = way
            if node != self._source and self._nodes[node] == "device":
                continue
            for neighbour, hop in self._hops[node]:
                if neighbour not in self._found:
                    self._pushed += 1
                    picoseconds = latency + round(hop.link.latency * 1e12)
                    entry = (picoseconds, length + 1, self._pushed, neighbour, (*way, hop))
                    heapq.heappush(self._queue, entry)
        return self._found.get(target)


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
