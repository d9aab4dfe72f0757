"""Who assists whom: assign assisting devices to training devices so that all of them load soonest.

The MemFerry paper (section VI-E) trains on four NPUs of a node and lets the other four assist. `plan_node`
decides the pairs from the fabric, by simulating every training device's load at once: an assisting device
that would only take another path's links stays idle.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from .dispatch import Path, finish_time, split
from .fabric import Fabric
from .fabric_sim import Flow, simulate
from .fluid import max_min_rates
from .paths import Direction, FabricPath, PathSet


@dataclass(frozen=True)
class Load:
    """One training device's part of the plan: bytes per path, and seconds with and without its assistants."""

    device: str
    host: str
    assist: tuple[str, ...]
    paths: tuple[str, ...]
    shares: tuple[int, ...]
    seconds: float
    direct_seconds: float


@dataclass(frozen=True)
class NodePlan:
    """All training devices move `nbytes` each at once, in `direction`; `idle` devices help nobody."""

    fabric: str
    nbytes: int
    direction: Direction
    loads: tuple[Load, ...]
    idle: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return max(load.seconds for load in self.loads)

    @property
    def direct_seconds(self) -> float:
        """The same without any assistance."""
        return max(load.direct_seconds for load in self.loads)

    def table(self) -> str:
        """A plain text table, one line a training device."""
        head = ["device", "host", "assisted by", "direct", "ms", "ms direct", "GB/s", "gain"]
        rows = [head]
        for load in self.loads:
            rows.append(
                [
                    load.device,
                    load.host,
                    ", ".join(load.assist) or "nobody",
                    f"{load.shares[0] / self.nbytes:.0%}",
                    f"{load.seconds * 1e3:.3f}",
                    f"{load.direct_seconds * 1e3:.3f}",
                    f"{self.nbytes / load.seconds / 1e9:.1f}",
                    f"{load.direct_seconds / load.seconds:.2f}x",
                ]
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        size = f"{self.nbytes / 2**20:g} MiB {self.direction}"
        title = f"{self.fabric}: {size} for each of {len(self.loads)} devices"
        lines.insert(
            0, f"{title}, all at once: {self.seconds * 1e3:.3f} ms ({self.direct_seconds * 1e3:.3f} direct)"
        )
        if self.idle:
            lines.append(f"idle: {', '.join(self.idle)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        document = asdict(self) | {"seconds": self.seconds, "direct_seconds": self.direct_seconds}
        return json.dumps(document, indent=1) + "\n"

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw hosts, assisting and training devices with the bytes between them. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install 'memferry_ascend[plot]'") from error
        columns = (
            ("host", list(dict.fromkeys(load.host for load in self.loads))),
            ("assisting", [name for load in self.loads for name in load.assist] + list(self.idle)),
            ("training", [load.device for load in self.loads]),
        )
        figure = Figure(
            figsize=(9, 1.5 + 0.6 * max(len(names) for _, names in columns)), layout="constrained"
        )
        axes = figure.add_subplot()
        axes.set_axis_off()
        title = f"{self.fabric}: {self.nbytes / 2**20:g} MiB {self.direction} for each device"
        axes.set_title(f"{title}, {self.seconds * 1e3:.2f} ms")
        place: dict[tuple[str, str], tuple[float, float]] = {}
        for column, (role, names) in enumerate(columns):
            axes.text(column, 1.04, role, ha="center", weight="bold")
            for row, name in enumerate(names):
                place[role, name] = (float(column), 1 - (row + 0.5) / len(names))
        arrow = "-|>" if self.direction == "h2d" else "<|-"

        def connect(a: tuple[str, str], b: tuple[str, str], nbytes: int, colour: str) -> None:
            style = {"arrowstyle": arrow, "lw": 0.5 + 4 * nbytes / self.nbytes, "color": colour}
            axes.annotate("", place[b], place[a], arrowprops=style)

        for load in self.loads:
            connect(("host", load.host), ("training", load.device), load.shares[0], "tab:blue")
            for peer, share in zip(load.assist, load.shares[1:], strict=True):
                connect(("host", load.host), ("assisting", peer), share, "tab:orange")
                connect(("assisting", peer), ("training", load.device), share, "tab:orange")
        for (_, name), (x, y) in place.items():
            axes.text(x, y, name, ha="center", va="center", fontsize=8, bbox={"fc": "white", "ec": "grey"})
        axes.set_xlim(-0.4, 2.4)
        axes.set_ylim(0, 1.1)
        figure.savefig(path)


def plan_node(
    fabric: Fabric,
    train: Sequence[str] | None = None,
    assist: Sequence[str] | None = None,
    *,
    nbytes: int = 64 << 20,
    direction: Direction = "h2d",
) -> NodePlan:
    """Assign each `assist` device to at most one of the `train` devices, each of which moves `nbytes`.

    Names may be patterns (`node0/npu[0-3]/die0`). Without names, every second device of `node0` (of all,
    where there is no such node) trains and the others assist. What counts is when the last training device
    has its bytes, then the sum of their times. Meant for the devices of one node: the search tries every free
    assistant for every training device (tens of each, not hundreds).

    Raises ValueError for unknown devices, a device in both roles, no training device or no bytes.
    """
    if nbytes <= 0:
        raise ValueError(f"expected some bytes to move, found {nbytes}")
    node = [d for d in fabric.devices if d.startswith("node0/")] or list(fabric.devices)
    trainers = node[::2] if train is None else _devices(fabric, train)
    helpers = [d for d in node if d not in trainers] if assist is None else _devices(fabric, assist)
    both = sorted(set(trainers) & set(helpers))
    if both or not trainers:
        raise ValueError(f"expected training devices that do not also assist, found {both or 'none'}")

    planner = _Planner(fabric, nbytes, direction)
    direct = planner.seconds(dict.fromkeys(trainers, ()))
    chosen = _search(planner, trainers, helpers)
    times = planner.seconds(chosen)
    unused = [peer for peer in helpers if not any(peer in peers for peers in chosen.values())]
    shares = planner.shares(chosen)
    loads = []
    for device in trainers:
        paths = planner.paths(device, chosen[device])
        names = tuple(p.name for p in paths)
        host = paths[0].host
        loads.append(
            Load(device, host, chosen[device], names, tuple(shares[device]), times[device], direct[device])
        )
    return NodePlan(fabric.name, nbytes, direction, tuple(loads), tuple(unused))


def beside(
    fabric: Fabric, chosen: Mapping[str, Sequence[str]], device: str, direction: Direction = "h2d"
) -> PathSet:
    """The paths of `device` with what is left of their links when all paths of all devices in `chosen` (training device
    to its assistants) run at once.

    Sharing is max-min fair, and what is fair among all stays so among the paths of one device within what the others
    leave: `PathSet.together` gives the rates of the whole node.
    """
    every = {name: fabric.paths(name, via=peers, direction=direction).paths for name, peers in chosen.items()}
    flat = [(name, path) for name, paths in every.items() for path in paths]
    rates = max_min_rates([p.bandwidth for _, p in flat], [p.uses for _, p in flat], fabric.capacity)
    left = {name: fabric.capacity[name] for path in every[device] for name in path.uses}
    for (owner, path), rate in zip(flat, rates, strict=True):
        for name, weight in path.uses.items():
            if owner != device and name in left:
                left[name] -= rate * weight
    return PathSet(every[device], left)


Chosen = dict[str, tuple[str, ...]]


def _search(planner: _Planner, trainers: Sequence[str], helpers: Sequence[str]) -> Chosen:
    """The best of: nobody assists; every training device has 1, 2, ... assistants; then single changes.

    Adding assistants one by one alone would stop too early: where training devices share a host's links, the
    first to be assisted slows its neighbour, and only when both are assisted do both gain.
    """
    best: Chosen = dict.fromkeys(trainers, ())
    score = planner.score(best)
    trial = dict(best)
    for _ in range(len(helpers) // len(trainers)):
        for device in trainers:
            free = _free(trial, helpers)
            trial = min(({**trial, device: (*trial[device], peer)} for peer in free), key=planner.score)
        if (found := planner.score(trial)) < score:
            best, score = trial, found
    while True:
        changes = [
            {**best, device: (*best[device], peer)} for device in trainers for peer in _free(best, helpers)
        ] + [
            {**best, device: tuple(p for p in best[device] if p != peer)}
            for device in trainers
            for peer in best[device]
        ]
        trial = min(changes, key=planner.score, default=best)
        if planner.score(trial) >= score:
            return best
        best, score = trial, planner.score(trial)


def _free(chosen: Chosen, helpers: Sequence[str]) -> list[str]:
    taken = {peer for peers in chosen.values() for peer in peers}
    return [peer for peer in helpers if peer not in taken]


class _Planner:
    """Shares and finish times for a choice of assistants, with the paths looked up once."""

    def __init__(self, fabric: Fabric, nbytes: int, direction: Direction) -> None:
        self.fabric, self.nbytes, self.direction = fabric, nbytes, direction
        self._known: dict[tuple[str, str | None], FabricPath] = {}

    def paths(self, device: str, peers: Sequence[str]) -> list[FabricPath]:
        vias: list[str | None] = [None, *peers]
        for via in vias:
            if (device, via) not in self._known:
                self._known[device, via] = self.fabric.path(device, via=via, direction=self.direction)
        return [self._known[device, via] for via in vias]

    def shares(self, chosen: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
        """Bytes per path of each device."""
        return self._split(chosen)[0]

    def _split(
        self, chosen: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, list[int]], dict[str, list[Path]]]:
        """Shares, and the paths at the rates they were split by: those that all paths of all devices keep
        together.
        """
        listed = {device: self.paths(device, peers) for device, peers in chosen.items()}
        flat = [p for paths in listed.values() for p in paths]
        rates = iter(max_min_rates([p.bandwidth for p in flat], [p.uses for p in flat], self.fabric.capacity))
        together = {
            device: [Path(p.name, p.latency, next(rates)) for p in paths] for device, paths in listed.items()
        }
        return {device: split(self.nbytes, paths) for device, paths in together.items()}, together

    def score(self, chosen: Mapping[str, Sequence[str]]) -> tuple[float, float]:
        """(the last device's time, the sum of all) while everyone keeps loading, to the picosecond.

        Not the end of one load each: a device that hogs its host's links would look harmless there, because
        it is done early and leaves the links to the others.
        """
        shares, paths = self._split(chosen)
        times = [finish_time(shares[device], paths[device]) for device in chosen]
        return round(max(times), 12), round(sum(times), 12)

    def seconds(self, chosen: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """When each device has its bytes, all starting at once."""
        shares = self.shares(chosen)
        flows, owners = [], []
        for device, peers in chosen.items():
            for path, nbytes in zip(self.paths(device, peers), shares[device], strict=True):
                flows.append(Flow(path, nbytes))
                owners.append(device)
        result = simulate(flows, self.fabric.capacity)
        times = dict.fromkeys(chosen, 0.0)
        for device, finish in zip(owners, result.finish, strict=True):
            times[device] = max(times[device], finish)
        return times


def _devices(fabric: Fabric, patterns: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = fnmatch.filter(fabric.devices, pattern)
        if not matches:
            raise ValueError(f"{fabric.name}: no device matches {pattern!r}")
        found.update(dict.fromkeys(matches))
    return list(found)
