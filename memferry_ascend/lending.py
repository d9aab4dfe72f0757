"""Devices of other processes that assist: who lends to whom, and how the ranks of a node find each other.

`Config.assist_devices` may name devices on which other local ranks train. Their processes own them, so they forward for
this one (`lender.py`, `borrower.py`), and this one for whoever names its device. All ranks learn what each was given, and
say the same about it. An idle device may have a process of its own that lends it (`serve`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from memferry_ascend import lendwire
from memferry_ascend.borrower import Link, Segments
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.lender import Lender

if TYPE_CHECKING:
    from memferry_ascend.backends.base import Backend
    from memferry_ascend.parallel import Ranks
    from memferry_ascend.runtime import Runtime

Wishes = dict[int, tuple[int, ...]]
"""What each process of this node may relay through, by the device that it owns."""


class Lending:
    """What one engine has lent and borrowed. `links` are this process's lenders by device."""

    def __init__(self, backend: Backend, links: dict[int, Link], lender: Lender | None) -> None:
        self.links, self.lender = links, lender
        self.segments = Segments(backend, links)
        self._backend = backend
        backend.lending = self

    def close(self) -> None:
        """Give back what was borrowed, then take back what was lent. No copy may be under way. May be called twice."""
        if self._backend.lending is self:
            self._backend.end_borrowing()
            self._backend.lending = None
        for link in self.links.values():
            link.close()
        if self.lender is not None:
            self.lender.close()


def wishes(runtime: Runtime, assist: tuple[int, ...]) -> list[Wishes]:
    """`assist_devices` of all ranks, by node (this one's first) and device. Every rank calls."""
    ranks = runtime.ranks
    if ranks is None:
        return [{runtime.local_rank: assist}]
    nodes: dict[int, Wishes] = {ranks.node: {}}
    for node, device, devices in ranks.gather_objects((ranks.node, runtime.local_rank, assist)):
        nodes.setdefault(node, {})[device] = devices
    return list(nodes.values())


def agree(runtime: Runtime, problem: str) -> None:
    """Raise on every rank what one of them cannot do ("" for nothing), before they wait for each other.

    Raises:
        ConfigError: this rank's problem, or the first of the others'.
    """
    problems = runtime.ranks.gather_objects(problem) if runtime.ranks is not None else [problem]
    if problem:
        raise ConfigError(problem)
    for rank, theirs in enumerate(problems):
        if theirs:
            raise ConfigError(f"{theirs} (so says rank {rank})")


OWNERS = "MEMFERRY_OWNERS"
"""Environment variable: a word that owners of idle devices and those that look for them share, to keep jobs apart."""


def idle_name(backend: Backend, device: int) -> str:
    """Where an idle process that owns a device listens (`serve`)."""
    return f"memferry-{os.getuid()}-{os.environ.get(OWNERS, '')}-{backend.name}-{device}"


def meet(runtime: Runtime, everyone: list[Wishes], wanted: Collection[int]) -> Lending | None:
    """Connect this process with those that own the devices it wants, and with those that name its own. Every rank calls with
    what `wishes` gave. `wanted`: devices that carry something for this one. None if nobody is to be connected.

    An idle device that no process serves is left to this one. A rank that cannot be reached is told about, and left out.
    """
    ranks, here, mine, backend = runtime.ranks, everyone[0], runtime.local_rank, runtime.backend
    links: dict[int, Link] = {}
    lender: Lender | None = None
    try:
        for device in wanted if backend.lends else ():
            if device not in here:
                with contextlib.suppress(OSError):
                    links[device] = Link(lendwire.connect(idle_name(backend, device)), backend, device)
        among_ranks = any(set(devices) & set(node) for node in everyone for devices in node.values())
        if ranks is not None and among_ranks:
            lender = _meet_ranks(ranks, here, mine, backend, links, wanted)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return Lending(backend, links, lender) if links or lender is not None else None


def _meet_ranks(
    ranks: Ranks, here: Wishes, mine: int, backend: Backend, links: dict[int, Link], wanted: Collection[int]
) -> Lender | None:
    """Add links to the ranks of this node that own wanted devices, and serve those that want this one."""
    token = ranks.from_first(secrets.token_hex(8))

    def name(device: int) -> str:
        return f"memferry-{token}-{ranks.node}-{device}"

    asked = any(mine in devices for devices in here.values())
    lender = Lender(backend) if asked else None
    listening = lendwire.listen(name(mine)) if asked else None
    try:
        ranks.barrier()
        for device in sorted(set(wanted) & set(here)):
            try:
                links[device] = Link(lendwire.connect(name(device)), backend, device)
            except OSError as e:
                warnings.warn(
                    f"assisting device {device}: its process cannot be reached ({e}); copies go over the other paths",
                    RuntimeWarning,
                    stacklevel=2,
                )
        came = ranks.gather_objects((ranks.node, tuple(links)))
        if lender is not None and listening is not None:
            _accept(lender, listening, sum(node == ranks.node and mine in devices for node, devices in came))
    except BaseException:
        if lender is not None:
            lender.close()
        raise
    finally:
        if listening is not None:
            listening.close()
    return lender


def serve(backend: Backend, device: int, budget: int | None, ready: Callable[[], None]) -> None:
    """Lend an idle device to the processes of this machine and user until the process is interrupted. Calls `ready` once
    it can be reached.

    Raises:
        FerryError: this family cannot lend, or another process serves this device.
    """
    if not backend.lends:
        raise FerryError(f"backend {backend.name!r} cannot lend its device to other processes")
    try:
        listening = lendwire.listen(idle_name(backend, device))
    except OSError as e:
        raise FerryError(f"device {device} is lent by another process already ({e})") from e
    lender = Lender(backend, budget)
    try:
        ready()
        while True:
            wire = lendwire.accept(listening)
            if wire is not None:
                lender.serve(wire)
    finally:
        listening.close()
        lender.close()


def _accept(lender: Lender, listening: socket.socket, count: int) -> None:
    """Serve so many borrowers, all of which have connected already."""
    while count:
        wire = lendwire.accept(listening)
        if wire is not None:
            lender.serve(wire)
            count -= 1
