"""Loads of units that have no copy on the device of their own: each rank brings its chunk, the fabric the others.

A DFGB or STREAM unit lies in host memory that all ranks of a node share, so any rank can copy all of it over its own
link. Here they copy it together: every rank its chunk, then an all-gather on the device. That is a collective, so all
ranks must load the same units in the same order, whatever each rank's data make it do. Hence the *course*: the loads of
one pass, fixed when the pass begins and the same everywhere.

    after a step     STREAM units forward, DFGB units, STREAM units backward but for those still in their slots
    otherwise        the same without what the pass before has left in slots and buffers

A rank takes items off its course in order and never skips one: a unit that it needs brings everything before it, and
the end of the forward and of the backward what is left. What it needs no more, or has no room for, lands in a buffer
that nobody reads. What it needs and the course does not have (a layer that runs again, another order, a forward pass
without gradients, which one rank may run alone) it copies whole, over its own link: right, and as slow as alone.

An item loads the values that its unit had when the pass began. Where a unit has been updated since, nobody needs them
any more: a rank that did would not have contributed its gradient yet, and without that no rank updates.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memferry_ascend.backends.base import Backend, Compute, Event, Stream
from memferry_ascend.errors import FerryError
from memferry_ascend.lane import Lane, LaneEvent
from memferry_ascend.parallel import Ranks
from memferry_ascend.planner.plan import Mode
from memferry_ascend.ring import Ring, Slot
from memferry_ascend.shadow import Resident
from memferry_ascend.worker import Worker

if TYPE_CHECKING:
    from memferry_ascend.sharded_units import ShardedResident


@dataclass(frozen=True, eq=False)
class _Item:
    unit: ShardedResident
    generation: int
    """Of the values to load."""

    @property
    def wanted(self) -> bool:
        return self.unit.generation == self.generation


class Loads:
    """One engine's courses. The user's thread calls; a lane of its own issues."""

    def __init__(self, ranks: Ranks, backend: Backend, worker: Worker) -> None:
        self.lane = Lane(ranks, backend, worker, "loads")
        self.begun = 0
        """Courses so far: ranks compare them at the end of a pass."""
        self.on = False
        """The last forward pass was one of those that all ranks run."""
        self.ring: SharedRing | None = None
        self._ranks, self._backend, self._worker = ranks, backend, worker
        self._link = backend.stream("reload")
        self._chunk_up = backend.event()
        self._landing: torch.Tensor | None = None
        self._landed = LaneEvent(backend.event(), worker)
        self._streamed: list[ShardedResident] = []
        self._reloaded: list[ShardedResident] = []
        self._items: list[_Item] = []
        self._forward = 0
        """Items of the forward pass."""
        self._at = 0
        self._fresh = True
        """The course begun by the last step has not been used by a forward pass."""
        self._common = 0
        """The last job that every rank has queued by its last step."""

    def arrange(self, units: list[ShardedResident]) -> None:
        """Set the order of the forward pass, the same on all ranks; before the first pass and after steps only."""
        self._streamed = [r for r in units if r.mode is Mode.STREAM]
        self._reloaded = [r for r in units if r.mode is Mode.DFGB]
        moving = [*self._streamed, *self._reloaded]
        if moving and self._landing is None:
            self._landing = self._backend.alloc_device(max(r.padded_bytes for r in moving))
            self._ranks.renew_loads()
            self._begin(after_step=True)

    @property
    def active(self) -> bool:
        """Some units are loaded pass by pass."""
        return self._landing is not None

    @property
    def used(self) -> bool:
        """A forward pass has taken from this course: the next one begins another, on all ranks."""
        return self.active and not self._fresh

    @property
    def nbytes(self) -> int:
        """Device bytes of the buffer that nobody reads."""
        return self._landing.numel() if self._landing is not None else 0

    # -- passes --------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        """A step was handed over: the next pass begins with what it has updated."""
        self._begin(after_step=True)
        self._fresh = True
        if self.ring is not None:
            # As many on every rank: `close` waits for them, and no further.
            for slot in self.ring.claim(tuple(self._streamed[: len(self.ring.slots)])):
                self._issue(slot)
        self._common = self.lane.asked

    def forward(self, together: bool) -> None:
        """A forward pass begins; `together`: with gradients, so that all ranks run it."""
        self.on = together
        if together and not self._fresh:
            self._begin(after_step=False)
        if together:
            self._fresh = False

    def forward_ended(self) -> None:
        """What the forward pass did not ask for: ranks that have come further may wait for it."""
        while self.on and self._at < self._forward:
            self._issue(None)
        self.left()

    def left(self) -> None:
        """The forward pass has left a DFGB unit."""
        if self.on:
            self.take(lambda _: None)

    def drain(self, *, unused: bool = False) -> None:
        """The pass has ended: issue what is left. A course that no forward pass has used is kept, unless `unused`: other
        ranks have."""
        while self._at < len(self._items) and (unused or not self._fresh):
            self._issue(None)

    def _begin(self, after_step: bool) -> None:
        if not self.active:
            return
        self.drain(unused=True)
        slots = len(self.ring.slots) if self.ring is not None else 0
        forward = self._streamed[0 if after_step else slots :]
        reloaded = self._reloaded if after_step else []
        backward = self._streamed[: max(len(self._streamed) - slots, 0)][::-1]
        self._items = [_Item(r, r.generation) for r in (*forward, *reloaded, *backward)]
        self._forward, self._at = len(forward), 0
        self.begun += 1
        if after_step:
            for r in self._reloaded:
                r.left = False

    # -- items ---------------------------------------------------------------------------------------------------------
    def reach(self, unit: ShardedResident, room: Callable[[], Slot | None]) -> Slot | None:
        """Issue everything up to the unit's next item in this half of the pass, that one into the slot that `room`
        gives; None if it has none, or there is no room."""
        found = self._find(unit)
        slot = room() if found is not None else None
        if slot is None:
            return None
        while self._items[self._at] is not found:
            self._issue(None)
        self._issue(slot)
        return slot

    def reach_buffer(self, unit: ShardedResident) -> None:
        """The same for a DFGB unit; if it has no item it copies alone."""
        found = self._find(unit)
        while found is not None and self._at < len(self._items):
            item = self._items[self._at]
            self._issue(None)
            if item is found:
                return
        unit.reload_alone()

    def _find(self, unit: ShardedResident) -> _Item | None:
        if not self.on:
            return None
        in_backward = torch._C._current_graph_task_id() != -1
        for item in self._items[self._at : len(self._items) if in_backward else self._forward]:
            if item.unit is unit:
                return item if item.wanted else None
        return None

    def take(self, room: Callable[[Resident], Slot | None]) -> None:
        """Issue what comes next as long as there is something to do with it: DFGB units that the forward pass has
        left, and STREAM units that `room` gives a slot to."""
        in_backward = torch._C._current_graph_task_id() != -1
        while self._at < len(self._items):
            item = self._items[self._at]
            if not item.wanted or (not in_backward and self._at >= self._forward and not item.unit.left):
                return
            if item.unit.mode is Mode.DFGB:
                self._issue(None)
                continue
            slot = room(item.unit)
            if slot is None:
                return
            self._issue(slot)

    def _issue(self, slot: Slot | None) -> None:
        """Queue the next item: into `slot`, its own buffer, or nowhere."""
        item = self._items[self._at]
        unit, generation = item.unit, item.generation
        assert self._landing is not None
        into, event, free = self._landing, self._landed, self._landed.inner
        if slot is not None:
            assert isinstance(slot, SharedSlot)
            into, event, free = slot.bytes, slot.together, slot.read
        elif unit.mode is Mode.DFGB and item.wanted:
            into, event, free = unit.reload_into(), unit.loaded, unit.last_read
        event.ask()
        self.lane.submit(lambda: self._load(unit, generation, into, event, free))
        self._at += 1

    def _load(
        self, unit: ShardedResident, generation: int, into: torch.Tensor, event: LaneEvent, free: Event
    ) -> None:
        """Lane: this rank's chunk over the link, the others' over the fabric."""
        self._worker.wait_for(lambda: unit.arrived >= generation)
        self._backend._at("load")
        compute, mine = self._backend.compute, unit.mine
        for before in (free, event.inner):
            compute.wait(before)
            self._link.wait(before)
        first, nbytes = mine.rank * mine.cut.chunk, mine.last - mine.first
        if nbytes:
            self._link.copy(into[first : first + nbytes], unit.region[mine.first : mine.last])
        self._link.record(self._chunk_up)
        compute.wait(self._chunk_up)
        whole = into[: unit.padded_bytes]
        piece = whole[first : first + mine.cut.chunk]
        ranks = self._ranks
        ranks.loads_done, done = -1, ranks.loads_done
        ranks.all_gather(whole, piece, self.lane.wait, ranks.loads)
        ranks.loads_done = done + 1
        compute.record(event.inner)
        event.issued()

    def close(self) -> None:
        """End the thread. What this rank alone has queued since the last step is left: others may never come to it."""
        with suppress(FerryError):  # kept by the worker
            self.lane.finish(self._common)
        self.lane.close()
        self._landing, self._items = None, []
        self._streamed, self._reloaded, self.ring = [], [], None


class SharedSlot(Slot):
    """A slot that the lane loads as well."""

    def __init__(self, backend: Backend, nbytes: int, worker: Worker) -> None:
        super().__init__(backend, nbytes)
        self.together = LaneEvent(self.loaded, worker)
        """`loaded`, as what the lane records."""

    def hold(self, stream: Stream | Compute) -> None:
        self.together.hold(stream)

    def mark(self, stream: Stream) -> None:
        self.together.record_now(stream)


class SharedRing(Ring):
    """A ring whose slots are loaded by all ranks together where the course has it."""

    def __init__(self, backend: Backend, slots: int, nbytes: int, loads: Loads, worker: Worker) -> None:
        self._worker = worker
        super().__init__(backend, slots, nbytes)
        self._loads = loads
        loads.ring = self

    def _slot(self, backend: Backend, nbytes: int) -> Slot:
        return SharedSlot(backend, nbytes, self._worker)

    def expect_forward(self) -> None:
        return None  # `Loads.step`

    def offer(self, unit: Resident) -> None:
        return None

    def claim(self, window: tuple[Resident, ...]) -> list[Slot | None]:
        """A slot for each of `window`'s units, to be loaded: its own if it has one."""
        with self._lock:
            slots = [self._by_unit.get(id(unit)) or self._place(unit, keep=window) for unit in window]
            for slot in slots:
                if slot is not None:
                    slot.waited = False
            return slots

    def _take(self, window: tuple[Resident, ...]) -> None:
        """Take what the course has next of `window`'s units."""

        def room(unit: Resident) -> Slot | None:
            if id(unit) in self._by_unit or unit not in window:
                return None
            return self._place(unit, keep=window)

        self._loads.take(room)

    def _fetch(self, unit: Resident) -> Slot | None:
        slot = self._loads.reach(unit, lambda: self._place(unit, keep=()))  # type: ignore[arg-type]
        return slot or super()._fetch(unit)

    def _prefetch(self, unit: Resident, direction: int) -> None:
        if self._loads.on:
            self._take(self._window(unit, direction))
        else:
            super()._prefetch(unit, direction)
