"""Who assists this process's device: what `Config.assist_devices` asks for, checked, shared out and set up.

With several ranks on a machine all of them are given the same assisting devices; `node_plan` says who assists whom, and
each rank counts on what the others' paths leave of the links. A rank drives its assisting devices itself: they are idle
otherwise, so no process of their own is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memferry_ascend.config import Config
from memferry_ascend.errors import ConfigError
from memferry_ascend.topology import EmulatedLinks, Fabric, Measured, PathSet
from memferry_ascend.topology.node_plan import beside, plan_node
from memferry_ascend.topology.paths import DIRECTIONS
from memferry_ascend.transfers import Transfers

if TYPE_CHECKING:
    from memferry_ascend.runtime import Runtime


def for_engine(runtime: Runtime, config: Config) -> Transfers | None:
    """What `Config.assist_devices` asks for, installed in the backend's streams; None without assisting devices.

    An index counts the topology's devices (`init(topology=...)`): 0 is the first. On the CPU backend the topology's
    links are emulated: `backend.links`, or links of this process's own with what the other ranks leave of them.

    Raises:
        ConfigError: no topology to take latencies and bandwidths from, or no path in it; an index that is absent, listed
            twice, this process's own device, or another local rank's (peers that train lend nothing).
        FerryError: another engine of this process uses them.
    """
    if not config.assist_devices:
        return None
    topology, backend = runtime.topology, runtime.backend
    if not backend.carries:
        raise ConfigError(
            f"Config.assist_devices: backend {backend.name!r} cannot relay through peers yet; leave it out"
        )
    if topology is None:
        raise ConfigError(
            "Config.assist_devices needs the paths' latencies and bandwidths: measure them with `memferry probe --out "
            'paths.json` and call init(topology="paths.json"), or name a shipped fabric'
        )
    names = device_names(topology)
    mine = runtime.local_rank
    check_assist(config.assist_devices, names, mine, runtime.local_world)
    peers = {names[i]: i for i in config.assist_devices}
    try:
        paths = _paths(topology, names[: runtime.local_world], names[mine], list(peers))
    except (KeyError, ValueError) as e:
        raise ConfigError(f"Config.assist_devices: {e.args[0]}") from e
    links = None if backend.queues_relays else backend.links or emulated(paths)
    transfers = Transfers(backend, paths, dispatch=config.dispatch, links=links, peers=peers)
    try:
        transfers.install()
    except BaseException:
        transfers.close()
        raise
    return transfers


def _paths(
    topology: Fabric | Measured, ranks: Sequence[str], mine: str, peers: Sequence[str]
) -> dict[str, PathSet]:
    """This device's paths by direction: direct, and through those of `peers` that assist it.

    Raises KeyError or ValueError saying what the topology lacks.
    """
    chosen = who_assists(topology, ranks, peers) if len(ranks) > 1 else {mine: tuple(peers)}
    found: dict[str, PathSet] = {}
    for direction in DIRECTIONS:
        if isinstance(topology, Fabric):
            paths = beside(topology, chosen, mine, direction)
        else:
            paths = topology.paths(mine, via=chosen[mine], direction=direction)
        missing = sorted(set(chosen[mine]) - {p.via for p in paths.paths})
        if missing:
            raise ValueError(
                f"{topology.name} has no {direction} path to {mine} through {', '.join(missing)}; probe again with that peer"
            )
        found[direction] = paths
    return found


def who_assists(
    topology: Fabric | Measured, ranks: Sequence[str], peers: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The peers of each rank's device, the same on every rank: by `plan_node` on a fabric; dealt out in turn where only
    a probe's figures are known. A peer that would not help anybody stays idle."""
    if isinstance(topology, Fabric):
        return {load.device: load.assist for load in plan_node(topology, ranks, peers).loads}
    return {device: tuple(peers[i :: len(ranks)]) for i, device in enumerate(ranks)}


def emulated(
    paths: Mapping[str, PathSet], time_scale: float = 1.0, clock: Callable[[], float] = time.monotonic
) -> EmulatedLinks:
    """Links for the CPU backend: every resource that the paths use, slowed by `time_scale`."""
    capacity = {name: (0.0, b) for found in paths.values() for name, b in found.capacity.items()}
    return EmulatedLinks(capacity, time_scale, clock=clock)


def device_names(topology: object) -> list[str]:
    """Names of a topology's devices, by the index that `Config.assist_devices` uses. A probe's peers count too; names
    that end in an index of their own (`cuda:1`) keep it."""
    names = list(topology.devices)  # type: ignore[attr-defined]
    for path in getattr(topology, "measured", ()):
        if path.via is not None and path.via not in names:
            names.append(path.via)
    numbers = [name.rpartition(":")[2] for name in names]
    if names and all(":" in name and n.isdigit() for name, n in zip(names, numbers, strict=True)):
        by_number = {int(n): name for name, n in zip(names, numbers, strict=True)}
        return [by_number.get(i, "") for i in range(max(by_number) + 1)]
    return names


def check_assist(assist: Sequence[int], names: Sequence[str], mine: int, local_world: int) -> None:
    """Raise ConfigError for assisting devices that cannot assist."""
    there = [i for i, name in enumerate(names) if name]
    if mine not in there:
        raise ConfigError(
            f"Config.assist_devices: this process's own device {mine} is not in the topology, which has {_span(there)}"
        )
    for i in assist:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ConfigError(f"Config.assist_devices: expected device indices, got {i!r}")
        if i == mine:
            raise ConfigError(
                f"Config.assist_devices: device {i} is the target itself; name peers whose links are otherwise idle"
            )
        if i not in there:
            raise ConfigError(f"Config.assist_devices: device {i} is absent, the topology has {_span(there)}")
        if 0 <= i < local_world:
            raise ConfigError(
                f"Config.assist_devices: device {i} is busy, it trains as local rank {i} of {local_world}; name devices "
                f"from {local_world} on, or start fewer processes"
            )
    if len(set(assist)) != len(assist):
        raise ConfigError(f"Config.assist_devices: expected each device once, got {tuple(assist)}")


def _span(indices: Sequence[int]) -> str:
    return f"devices {indices[0]} to {indices[-1]}" if len(indices) > 1 else f"device {indices[0]} only"
