"""Who assists this process's device: what `Config.assist_devices` asks for, checked, shared out and set up.

Idle devices: where all ranks of a machine are given the same ones, `node_plan` says who assists whom; otherwise each rank
has its own. Each counts on what the others' paths leave of the links. A rank drives them itself, unless a process of their
own does (`lending.serve`).

Devices on which other local ranks train belong to those processes (`lending.py`), and each rank names those that it wants.
They lend what is left of their links when every rank's own copies, and those through idle devices, run at once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memferry_ascend import lending
from memferry_ascend.config import Config
from memferry_ascend.errors import ConfigError
from memferry_ascend.lending import Wishes
from memferry_ascend.topology import EmulatedLinks, Fabric, FabricPath, Measured, PathSet
from memferry_ascend.topology.fluid import max_min_rates
from memferry_ascend.topology.node_plan import beside, plan_node
from memferry_ascend.topology.paths import DIRECTIONS, Direction
from memferry_ascend.transfers import Transfers

if TYPE_CHECKING:
    from memferry_ascend.runtime import Runtime

WORTH = 0.05
"""A device that trains and has less left than this part of what a path through it reaches alone lends nothing."""


def for_engine(runtime: Runtime, config: Config) -> Transfers | None:
    """What `Config.assist_devices` asks for, installed in the backend's streams, and what others ask of this device; None
    if nobody asks for anything. Every rank calls.

    An index counts the topology's devices (`init(topology=...)`): 0 is the first. On the CPU backend the topology's
    links are emulated: `backend.links`, or links of this process's own with what the other ranks leave of them.

    Raises:
        ConfigError: no topology to take latencies and bandwidths from, or no path in it; an index that is absent, listed
            twice, the rank's own device, or of a device that trains and cannot be lent. Every rank says the same.
        FerryError: another engine of this process uses them.
    """
    everyone = lending.wishes(runtime, config.assist_devices)
    if not any(devices for node in everyone for devices in node.values()):
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
    names, mine = device_names(topology), runtime.local_rank
    for node in everyone:
        owned = node if backend.lends else ()
        for device, devices in node.items():
            check_assist(devices, names, device, runtime.local_world, owned, mine=device == mine)
    paths, problem = {}, ""
    try:
        paths = _paths(topology, names, runtime.local_world, everyone[0], mine)
    except ConfigError as e:
        problem = str(e)
    lending.agree(runtime, problem)
    carrying = {path.via for found in paths.values() for path in found.paths}
    wanted = [i for i in config.assist_devices if names[i] in carrying]
    found = lending.meet(runtime, everyone, wanted)
    if found is None and not paths:
        return None
    peers = {names[i]: i for i in config.assist_devices}
    links = None if backend.queues_relays or not paths else backend.links or emulated(paths)
    try:
        transfers = Transfers(
            backend, paths, dispatch=config.dispatch, links=links, peers=peers, lending=found
        )
    except BaseException:
        if found is not None:
            found.close()
        raise
    try:
        transfers.install()
    except BaseException:
        transfers.close()
        raise
    return transfers


def _paths(
    topology: Fabric | Measured, names: Sequence[str], local_world: int, here: Wishes, mine: int
) -> dict[str, PathSet]:
    """This device's paths by direction: direct, through the idle devices that assist it, and through those that train and
    have something left; nothing if this rank asked for nothing.

    Raises:
        ConfigError: says what the topology lacks.
    """
    ranks = names[:local_world]
    try:
        idle = {names[d]: tuple(names[i] for i in devices if i not in here) for d, devices in here.items()}
        same = len(set(idle.values())) == 1 and len(ranks) > 1
        chosen = who_assists(topology, ranks, idle[names[mine]]) if same else idle
        lent = {names[d]: tuple(names[i] for i in devices if i in here) for d, devices in here.items()}
        found: dict[str, PathSet] = {}
        for direction in DIRECTIONS if here[mine] else ():
            if isinstance(topology, Fabric):
                paths = with_lent(topology, chosen, lent, names[mine], direction)
            else:
                paths = _measured(topology, chosen, lent, names[mine], direction)
            found[direction] = paths
    except (KeyError, ValueError) as e:
        raise ConfigError(f"Config.assist_devices: {e.args[0]}") from e
    _say_who_lends_nothing(lent.get(names[mine], ()), found)
    return found


def with_lent(
    fabric: Fabric,
    chosen: Mapping[str, Sequence[str]],
    lent: Mapping[str, Sequence[str]],
    mine: str,
    direction: Direction,
) -> PathSet:
    """The paths of device `mine` with what the others leave of their links, as `beside`. `lent` says which devices that
    train each one asked for: paths through these come last, and share what all others leave."""
    if not any(lent.values()):
        return beside(fabric, chosen, mine, direction)
    first = [
        (device, path)
        for device, peers in chosen.items()
        for path in fabric.paths(device, via=peers, direction=direction).paths
    ]
    rates = _rates(first, fabric.capacity)
    left = dict(fabric.capacity)
    for (_, path), rate in zip(first, rates, strict=True):
        _take(left, path, rate)
    asked = [
        (device, fabric.path(device, via=peer, direction=direction))
        for device, peers in lent.items()
        for peer in peers
    ]
    last = [(d, p) for d, p in asked if min(left[n] / w for n, w in p.uses.items()) > WORTH * p.bandwidth]
    running = [*zip(first, rates, strict=True), *zip(last, _rates(last, left), strict=True)]
    own = [path for (device, path), _ in running if device == mine]
    capacity = {name: fabric.capacity[name] for path in own for name in path.uses}
    for (device, path), rate in running:
        if device != mine:
            _take(capacity, path, rate)
    return PathSet(tuple(own), capacity)


def _rates(flows: Sequence[tuple[str, FabricPath]], capacity: Mapping[str, float]) -> list[float]:
    return max_min_rates([p.bandwidth for _, p in flows], [p.uses for _, p in flows], capacity)


def _take(left: dict[str, float], path: FabricPath, rate: float) -> None:
    """Take what a path at this rate (bytes/s) uses off the capacities in `left`."""
    for name, weight in path.uses.items():
        if name in left:
            left[name] = max(0.0, left[name] - rate * weight)


def _measured(
    topology: Measured,
    chosen: Mapping[str, Sequence[str]],
    lent: Mapping[str, Sequence[str]],
    mine: str,
    direction: Direction,
) -> PathSet:
    """The probe's paths. It knows no links, so a device that trains is taken to share its own evenly with whoever asked for
    it: no slower when all move at once, and faster when it is quiet."""
    wanted = (*chosen[mine], *lent[mine])
    paths = topology.paths(mine, via=wanted, direction=direction)
    missing = sorted(set(wanted) - {p.via for p in paths.paths})
    if missing:
        raise ValueError(
            f"{topology.name} has no {direction} path to {mine} through {', '.join(missing)}; probe again with that peer"
        )
    users = {p: 1 + sum(p in peers for peers in lent.values()) for p in lent[mine]}
    return PathSet(
        tuple(replace(p, bandwidth=p.bandwidth / users[p.via]) if p.via in users else p for p in paths.paths),
        paths.capacity,
    )


def _say_who_lends_nothing(asked: Sequence[str], found: Mapping[str, PathSet]) -> None:
    used = {p.via for paths in found.values() for p in paths.paths}
    nothing = [peer for peer in asked if peer not in used]
    if found and nothing:
        warnings.warn(
            f"Config.assist_devices: {', '.join(nothing)} lends nothing, its own copies and those of idle devices leave "
            "nothing of its links; name devices whose links are quieter",
            RuntimeWarning,
            stacklevel=2,
        )


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


def check_assist(
    assist: Sequence[int],
    names: Sequence[str],
    device: int,
    local_world: int,
    owned: Collection[int] = (),
    *,
    mine: bool = True,
) -> None:
    """Raise ConfigError for devices that cannot assist `device`. `owned` devices belong to processes that lend; `mine`:
    this process has asked for them, and not another rank."""
    try:
        _check(assist, names, device, local_world, owned)
    except ConfigError as e:
        if mine:
            raise
        raise ConfigError(f"{e} (this is what local rank {device} was given)") from None


def _check(
    assist: Sequence[int], names: Sequence[str], mine: int, local_world: int, owned: Collection[int]
) -> None:
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
        if 0 <= i < local_world and i not in owned:
            raise ConfigError(
                f"Config.assist_devices: device {i} is busy, it trains as local rank {i} of {local_world}, and no process "
                f"that lends owns it; name devices from {local_world} on, or start fewer processes"
            )
    if len(set(assist)) != len(assist):
        raise ConfigError(f"Config.assist_devices: expected each device once, got {tuple(assist)}")


def _span(indices: Sequence[int]) -> str:
    return f"devices {indices[0]} to {indices[-1]}" if len(indices) > 1 else f"device {indices[0]} only"
