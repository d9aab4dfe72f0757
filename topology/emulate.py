"""Links that take as long as real ones: copy threads block until the fluid model says that their bytes have
arrived.

`LinkClock` is the model: transfers join at a time, share links max-min fairly, and leave; it takes the time
as an argument and never looks at a clock. `EmulatedLinks` runs it against the wall clock: a thread in
`transfer` sleeps until the moment the model expects, and is woken when others joining or leaving brought that
moment forward. Events are entered at the times the model computed, not when a thread happened to wake, so
late wake-ups (some 0.1 ms) delay the thread but not the model.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .fabric import Fabric
from .fluid import Sharing
from .paths import FabricPath


@dataclass(eq=False)
class Moving:
    """A transfer in a `LinkClock`: it may move from `begin` on, once `previous` (on its path) has ended."""

    cap: float
    uses: Mapping[str, float]
    begin: float
    left: float
    previous: Moving | None = None
    rate: float = 0.0
    end: float | None = None
    expected: float = math.inf  # when it ends if nobody joins, leaves or changes a link


@dataclass
class LinkClock:
    """Fluid sharing in emulated seconds. `capacity` is bytes/s per link; times passed in must not go
    backwards.
    """

    capacity: dict[str, float]
    now: float = 0.0
    waiting: list[Moving] = field(default_factory=list)
    moving: list[Moving] = field(default_factory=list)

    def join(
        self,
        now: float,
        nbytes: int,
        latency: float,
        uses: Mapping[str, float],
        cap: float = math.inf,
        previous: Moving | None = None,
    ) -> Moving:
        """Start `nbytes` at `now`; the first byte moves `latency` later, after `previous` has ended."""
        self.advance(now)
        transfer = Moving(cap, uses, now + latency, float(nbytes))
        if nbytes == 0:
            transfer.end = now
            return transfer
        if previous is not None and previous.end is None:
            transfer.previous = previous
        self.waiting.append(transfer)
        self.advance(now)
        return transfer

    def set_capacity(self, now: float, link: str, bandwidth: float) -> None:
        """From `now` on, `link` carries `bandwidth` bytes/s."""
        self.advance(now)
        self.capacity[link] = bandwidth
        self._share()

    def wake(self, transfer: Moving) -> float:
        """When `transfer` next begins to move or ends (inf: not before another one has ended)."""
        if transfer.rate or transfer.end is not None:
            return transfer.expected
        return math.inf if transfer.previous is not None else transfer.begin

    def advance(self, now: float) -> None:
        """Enter everything that happens up to `now`, each at its own time."""
        while True:
            due = min((self.wake(t) for t in (*self.moving, *self.waiting)), default=math.inf)
            if due > now:
                break
            self._move(max(due, self.now))
            # Ends that differ by rounding only are one event.
            ended = [t for t in self.moving if t.expected <= due + 1e-12]
            for transfer in ended:
                transfer.end, transfer.left = due, 0.0
                transfer.expected = due
            self.moving = [t for t in self.moving if t.end is None]
            for transfer in self.waiting:
                if transfer.previous is not None and transfer.previous.end is not None:
                    transfer.begin = max(transfer.begin, transfer.previous.end)
                    transfer.previous = None
            begun = [t for t in self.waiting if t.previous is None and t.begin <= due]
            self.waiting = [t for t in self.waiting if t not in begun]
            self.moving += begun
            self._share()
        self._move(now)

    def _move(self, now: float) -> None:
        for transfer in self.moving:
            transfer.left = max(0.0, transfer.left - transfer.rate * (now - self.now))
        self.now = max(now, self.now)

    def _share(self) -> None:
        if not self.moving:
            return
        sharing = Sharing([t.cap for t in self.moving], [t.uses for t in self.moving], self.capacity)
        for transfer, rate in zip(
            self.moving, sharing.rates(np.ones(len(self.moving), dtype=bool)), strict=True
        ):
            transfer.rate = float(rate)
            transfer.expected = self.now + transfer.left / transfer.rate


class LinksClosed(RuntimeError):
    """`EmulatedLinks.close` was called while a transfer was in flight, or before it."""


class EmulatedLinks:
    """Blocks copy threads for as long as a fabric's links would take, sharing included.

    `links` is a `Fabric`, or maps link names to (latency in s, bandwidth in bytes/s). One emulated second
    lasts `time_scale` wall-clock seconds: links that are too fast to emulate (a wake-up is late by some 0.1
    ms) are slowed by a scale above 1. Starts no thread; every method may be called from any thread.

    Raises ValueError for latencies below zero, bandwidths or a time scale not above zero.
    """

    def __init__(
        self,
        links: Fabric | Mapping[str, tuple[float, float]],
        time_scale: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (math.isfinite(time_scale) and time_scale > 0):
            raise ValueError(f"expected a time scale above zero, found {time_scale!r}")
        if isinstance(links, Fabric):
            capacity = dict(links.capacity)
            self._latency = links.latency
        else:
            for name, (latency, bandwidth) in links.items():
                if not (math.isfinite(latency) and latency >= 0):
                    raise ValueError(f"link {name!r}: expected a latency of 0 s or more, found {latency!r}")
                _check_bandwidth(name, bandwidth)
            capacity = {name: bandwidth for name, (_, bandwidth) in links.items()}
            self._latency = {name: latency for name, (latency, _) in links.items()}
        self.time_scale = time_scale
        self._clock = clock
        self._origin = clock()
        self._model = LinkClock(capacity)
        self._lock = threading.Lock()
        self._sleepers: dict[
            Moving, tuple[threading.Condition, float]
        ] = {}  # with the time each sleeps until
        self._last: dict[tuple[str, str, str, str], Moving] = {}  # per path
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        with self._lock:
            return len(self._sleepers)

    def transfer(self, links: Sequence[str] | FabricPath, nbytes: int) -> float:
        """Block until `nbytes` have crossed `links`; returns the emulated seconds from the call to their
        arrival.

        With link names (of the mapping, or the resources of the fabric) the transfer crosses all of them at
        once, after the sum of their latencies. With a `FabricPath` it takes that path's latency, stays below
        its bandwidth and follows earlier transfers on the same path in order, as copies in one stream do; its
        latency then overlaps with them.

        Raises KeyError for an unknown link, ValueError for a negative size or no link, LinksClosed after
        `close`.
        """
        if nbytes < 0:
            raise ValueError(f"expected 0 bytes or more, found {nbytes}")
        with self._lock:
            if self._closed:
                raise LinksClosed("the emulated links are closed")
            started = self._now()
            transfer = self._join(started, links, nbytes)
            self._wake_others()
            if transfer.end is None:
                self._sleep(transfer)
            assert transfer.end is not None
            return transfer.end - started

    def set_bandwidth(self, link: str, value: float) -> None:
        """From now on `link` carries `value` bytes/s, for transfers in flight too. Raises as above."""
        _check_bandwidth(link, value)
        with self._lock:
            self._known(link)
            self._model.set_capacity(self._now(), link, value)
            self._wake_others()

    def close(self) -> None:
        """End all transfers in flight with LinksClosed and refuse new ones. May be called twice."""
        with self._lock:
            self._closed = True
            for condition, _ in self._sleepers.values():
                condition.notify_all()

    def __enter__(self) -> EmulatedLinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # All below with the lock held.

    def _now(self) -> float:
        return (self._clock() - self._origin) / self.time_scale

    def _known(self, link: str) -> None:
        if link not in self._model.capacity:
            some = ", ".join(list(self._model.capacity)[:8])
            raise KeyError(f"unknown link {link!r}; expected one of {some} ...")

    def _join(self, now: float, links: Sequence[str] | FabricPath, nbytes: int) -> Moving:
        if isinstance(links, FabricPath):
            for name in links.uses:
                self._known(name)
            lane = (links.host, links.device, links.name, links.direction)
            previous = self._last.get(lane)
            transfer = self._model.join(now, nbytes, links.latency, links.uses, links.bandwidth, previous)
            self._last[lane] = transfer
            return transfer
        if not links or isinstance(links, str):
            raise ValueError(f"expected a list of link names, found {links!r}")
        uses: dict[str, float] = {}
        for name in links:
            self._known(name)
            uses[name] = uses.get(name, 0.0) + 1.0
        return self._model.join(now, nbytes, sum(self._latency[name] for name in links), uses)

    def _sleep(self, transfer: Moving) -> None:
        condition = threading.Condition(self._lock)
        try:
            while transfer.end is None:
                until = self._model.wake(transfer)
                self._sleepers[transfer] = (condition, until)
                timeout = None if until == math.inf else max(0.0, (until - self._now()) * self.time_scale)
                condition.wait(timeout)
                if self._closed:
                    raise LinksClosed("the emulated links were closed with a transfer in flight")
                self._model.advance(self._now())
                self._wake_others()
        finally:
            del self._sleepers[transfer]

    def _wake_others(self) -> None:
        """Wake those that sleep past the time at which something now happens to them."""
        for transfer, (condition, until) in self._sleepers.items():
            if self._model.wake(transfer) < until:
                condition.notify_all()


def _check_bandwidth(link: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"link {link!r}: expected a bandwidth above 0 bytes/s, found {value!r}")
