"""The ring: a few device slots through which any number of STREAM units pass, in both directions.

A slot holds one unit. It is pinned while a forward window is open on it, and *leased* to the unit whose backward node
runs now: a node reads what one unit's handles unpack to, and the next unit's unpack proves that the earlier node's
kernels are queued. Everything else may be overwritten, behind the event of its last reader. Nobody ever waits for a
slot: a window that finds all of them pinned reads the arena alias instead, so a skipped or nested layer cannot
deadlock, and a prefetched slot that nobody consumes is simply the next to be overwritten.

The worker thread offers units as their updates finish; everything is under one lock.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from memferry_ascend.backends.base import Backend, Compute, Event, Stream, align

if TYPE_CHECKING:
    from memferry_ascend.shadow import Resident


class Slot:
    """Device bytes for one unit at a time."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self.bytes = backend.alloc_device(nbytes)
        self.unit: Resident | None = None
        self.pins = 0
        self.used = 0
        """Logical time of the last use; the least recent is overwritten first."""
        self.loaded: Event = backend.event()
        self.read: Event = backend.event()
        self.waited = True
        """The compute stream already waits for `loaded`."""

    def hold(self, stream: Stream | Compute) -> None:
        """What is queued on `stream` from now on runs after the last load."""
        stream.wait(self.loaded)

    def mark(self, stream: Stream) -> None:
        """`stream` has a load of this slot queued."""
        stream.record(self.loaded)


class Ring:
    """`slots` device slots of `nbytes` each, for the STREAM units of one engine."""

    def __init__(self, backend: Backend, slots: int, nbytes: int) -> None:
        self.slots = [self._slot(backend, align(nbytes)) for _ in range(slots)]
        self.units: list[Resident] = []
        """STREAM units in the order of the forward pass; set by `arrange`."""
        self._position: dict[int, int] = {}
        self._backend = backend
        self._lock = threading.Lock()
        self._by_unit: dict[int, Slot] = {}
        self._clock = 0
        self._lease: Resident | None = None
        self._wanted: set[int] = set()
        self._urgent = backend.stream("upload")
        self._patient = backend.stream("reload")

    def _slot(self, backend: Backend, nbytes: int) -> Slot:
        return Slot(backend, nbytes)

    def arrange(self, units: list[Resident]) -> None:
        """Set the order in which units are needed in the forward pass."""
        with self._lock:
            self.units = units
            self._position = {id(u): i for i, u in enumerate(units)}

    def forward(self, unit: Resident) -> Slot | None:
        """Open a window: the unit's slot, loaded behind the compute stream, or None when all slots are pinned."""
        with self._lock:
            slot = self._by_unit.get(id(unit)) or self._fetch(unit)
            if slot is None:
                return None
            slot.pins += 1
            self._touch(slot)
            self._await(slot)
            self._prefetch(unit, +1)
            return slot

    def release(self, slot: Slot) -> None:
        """Close a window."""
        with self._lock:
            slot.pins -= 1
            self._backend.compute.record(slot.read)

    def backward(self, unit: Resident) -> torch.Tensor | None:
        """A node of this unit is about to run: its bytes, or None to read the alias."""
        with self._lock:
            if self._lease is not unit and self._lease is not None:
                done = self._by_unit.get(id(self._lease))
                if done is not None:
                    self._backend.compute.record(done.read)
                self._lease.move(None)
            self._lease = unit
            slot = self._by_unit.get(id(unit)) or self._fetch(unit)
            if slot is None:
                return None
            self._touch(slot)
            self._await(slot)
            self._prefetch(unit, -1)
            return slot.bytes

    def end_backward(self) -> None:
        """No node of ours runs any more."""
        with self._lock:
            if self._lease is not None:
                slot = self._by_unit.get(id(self._lease))
                if slot is not None:
                    self._backend.compute.record(slot.read)
                self._lease.move(None)
            self._lease = None

    def leased(self, unit: Resident) -> bool:
        """Nothing overwrites this unit's slot: nodes of it may still run."""
        return self._lease is unit

    def drop(self, unit: Resident) -> None:
        """The unit's values are about to change: what a slot holds is worth nothing. Later kernels of the old graph
        raise, so nobody reads it any more; kernels already queued keep their event."""
        with self._lock:
            slot = self._by_unit.pop(id(unit), None)
            if slot is not None:
                self._backend.compute.record(slot.read)
                slot.unit = None
                slot.used = 0
            if self._lease is unit:
                self._lease = None

    def expect_forward(self) -> None:
        """A new pass begins after a step: its first units are wanted as soon as they are updated."""
        with self._lock:
            self._wanted = {id(u) for u in self.units[: len(self.slots)]}

    def offer(self, unit: Resident) -> None:
        """Worker: the unit's update is done. Load it if the next pass begins with it."""
        with self._lock:
            if id(unit) in self._wanted:
                self._wanted.discard(id(unit))
                # This thread may have been away for so long that the next update was handed over: waiting for that one
                # here would wait for ourselves.
                if id(unit) not in self._by_unit and unit.loadable():
                    self._load(unit, self._urgent, keep=tuple(self.units[: len(self.slots)]))

    def close(self) -> None:
        """Let go of the slots' device memory. Nobody may use the ring afterwards."""
        with self._lock:
            self.slots, self.units = [], []
            self._by_unit.clear()
            self._position.clear()
            self._wanted.clear()
            self._lease = None

    # -- under the lock --------------------------------------------------------------------------------------------
    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _await(self, slot: Slot) -> None:
        if not slot.waited:
            slot.hold(self._backend.compute)
            slot.waited = True

    def _victim(self, keep: tuple[Resident, ...]) -> Slot | None:
        free = [
            s
            for s in self.slots
            if s.pins == 0 and (s.unit is None or (s.unit is not self._lease and s.unit not in keep))
        ]
        return min(free, key=lambda s: s.used, default=None)

    def _place(self, unit: Resident, keep: tuple[Resident, ...]) -> Slot | None:
        """A slot that is the unit's from now on, not yet loaded; None when all are in use."""
        slot = self._victim(keep)
        if slot is None:
            return None
        if slot.unit is not None:
            del self._by_unit[id(slot.unit)]
        slot.unit = unit
        self._by_unit[id(unit)] = slot
        slot.waited = False
        self._touch(slot)
        return slot

    def _fetch(self, unit: Resident) -> Slot | None:
        """The unit is needed now."""
        return self._load(unit, self._urgent, keep=())

    def _load(self, unit: Resident, stream: Stream, keep: tuple[Resident, ...]) -> Slot | None:
        slot = self._place(unit, keep)
        if slot is None:
            return None
        nbytes = unit.memory.layout.nbytes
        unit.hold(stream)
        stream.wait(slot.read)
        slot.hold(stream)  # an unread prefetch on the other stream may still be writing
        stream.copy(slot.bytes[:nbytes], unit.region[:nbytes])
        slot.mark(stream)
        return slot

    def _window(self, unit: Resident, direction: int) -> tuple[Resident, ...]:
        """The unit and those after it (before it) that have a slot while it is used."""
        at = self._position[id(unit)]
        return tuple(
            self.units[i]
            for i in range(at, at + direction * len(self.slots), direction)
            if 0 <= i < len(self.units)
        )

    def _prefetch(self, unit: Resident, direction: int) -> None:
        window = self._window(unit, direction)
        for ahead in window[1:]:
            if id(ahead) not in self._by_unit and ahead.loadable():
                self._load(ahead, self._patient, keep=window)
