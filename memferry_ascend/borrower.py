"""The borrower's side of a relay across processes: channels through a device that another process owns.

A `Link` is the connection to one lender (`lender.py`), a `Channel` one direction through its device with a few slots of
staging memory there. Each chunk takes a slot, asks the lender for the leg that touches the host, hears that it is done, and
gives the slot back when the leg between the devices is over too. Nothing of the lender's is touched outside that, so a
lender that leaves gets its memory back as soon as no slot is taken.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import time
import warnings
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from memferry_ascend import numa
from memferry_ascend.backends import hostmem
from memferry_ascend.backends.base import Backend, HostSlab
from memferry_ascend.backends.loans import Borrowed
from memferry_ascend.errors import FerryError
from memferry_ascend.lendwire import Kind, Message, Wire


class Left(FerryError):
    """The lender has stopped lending, as it said it would."""


@dataclass(frozen=True)
class Place:
    """Bytes of host memory that lenders have mapped too."""

    segment: int
    offset: int


class Slot:
    """A part of a channel's staging memory."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.done = threading.Event()
        self.done.set()
        self.error: str | None = None


class Channel:
    """One direction through a lender's device. `memory` is the backend's import of all slots, `chunk` bytes each."""

    def __init__(self, link: Link, number: int, memory: Borrowed, slots: int, chunk: int) -> None:
        self.link, self.number, self.memory, self.chunk = link, number, memory, chunk
        self.slots = [Slot(i) for i in range(slots)]
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)

    def take(self) -> Slot:
        """A free slot; waits for one. Raises Left or FerryError if the lender is gone."""
        slot = self._free.get()
        try:
            self.link.enter()
        except FerryError:
            self._free.put(slot)
            raise
        return slot

    def give(self, slot: Slot) -> None:
        """Nothing uses the slot any more, on either side."""
        self._free.put(slot)
        self.link.leave()

    def ask(self, slot: Slot, place: Place, nbytes: int) -> None:
        """Ask the lender for the leg between `place` and the slot; `wait` until it is done. Raises as `take`."""
        slot.error = None
        slot.done.clear()
        wanted = Message(Kind.CARRY, self.number, slot.index, place.segment, place.offset, nbytes)
        try:
            self.link.send(wanted)
        except BaseException:
            slot.done.set()
            raise

    def wait(self, slot: Slot) -> None:
        """Block until the lender has answered, or is gone. Afterwards it touches neither the slot nor the host memory.

        Raises:
            FerryError: the bytes are not there.
        """
        slot.done.wait()
        if slot.error is not None:
            raise FerryError(slot.error)

    def fail(self, why: str) -> None:
        for slot in self.slots:
            if not slot.done.is_set():
                slot.error = why
                slot.done.set()

    def close(self) -> None:
        """Give the staging memory back; no slot may be taken."""
        self.link.close_channel(self)


class Link:
    """The connection to the process that owns `device`.

    A lender that dies, or is lost for another reason, leaves `lost` behind: every `take` raises it from then on.
    """

    def __init__(self, wire: Wire, backend: Backend, device: int) -> None:
        self.device = device
        self.lost: FerryError | None = None
        self.left_at = 0.0
        """When the lender said that it leaves (`time.monotonic`); 0: it has not."""
        self._wire, self._backend = wire, backend
        self._changed = threading.Condition()
        self._taken = 0
        self._released = self._gone = False
        self._channels: dict[int, Channel] = {}
        self._numbers = 0
        self._answers: SimpleQueue[tuple[Message, int | None] | None] = SimpleQueue()
        self._opening = threading.Lock()
        wire.send(Message(Kind.HELLO, number=backend.process()))
        self._thread = threading.Thread(target=self._receive, name="memferry-borrow", daemon=True)
        self._thread.start()

    # -- channels ------------------------------------------------------------------------------------------------------
    def open(self, slots: int, chunk: int, to_device: bool) -> Channel:
        """Up to `slots` slots of `chunk` bytes.

        Raises:
            FerryError: the lender refused, or is gone; says why.
        """
        with self._opening:
            self._check()
            self._numbers += 1
            self._send(Message(Kind.OPEN, self._numbers, nbytes=chunk, number=slots, to_device=to_device))
            got = self._answers.get()
            if got is None:
                self._check()
            assert got is not None
            message, file = got
            try:
                if message.kind is Kind.REFUSED:
                    raise FerryError(f"it refused: {message.text}")
                memory = self._backend.borrow(message.text, file, message.number * chunk, self.device)
            finally:
                if file is not None:
                    os.close(file)
            channel = Channel(self, message.channel, memory, message.number, chunk)
            with self._changed:
                if self.lost is None:
                    self._channels[channel.number] = channel
                    return channel
            memory.close()
            self._check()
            raise AssertionError("unreachable")

    def close_channel(self, channel: Channel) -> None:
        with self._changed:
            if self._channels.pop(channel.number, None) is None:
                return
        channel.memory.close()
        with contextlib.suppress(OSError):
            self._wire.send(Message(Kind.CLOSE, channel.number))

    # -- what channels call --------------------------------------------------------------------------------------------
    def enter(self) -> None:
        with self._changed:
            self._check()
            self._taken += 1

    def leave(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()
        self._release_if_lost()

    def send(self, message: Message, file: int | None = None) -> None:
        self._check()
        self._send(message, file)

    def lose(self, why: FerryError) -> None:
        """Ask nothing of this lender any more."""
        with self._changed:
            self.lost = self.lost or why
            self._changed.notify_all()

    def _send(self, message: Message, file: int | None = None) -> None:
        try:
            self._wire.send(message, file)
        except OSError as e:
            self.lose(self._dead())
            raise self._dead() from e

    def _check(self) -> None:
        if self.lost is not None:
            raise type(self.lost)(*self.lost.args)

    def _dead(self) -> FerryError:
        return FerryError(f"the process that owns device {self.device} is gone")

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _receive(self) -> None:
        try:
            self._backend.bind_thread()
            while (got := self._wire.receive()) is not None:
                self._handle(*got)
        except (ValueError, FerryError) as e:
            self.lose(FerryError(f"the process that owns device {self.device} makes no sense: {e}"))
        finally:
            self.lose(self._dead())
            self._gone = True
            self._answers.put(None)
            for channel in list(self._channels.values()):
                channel.fail(str(self._dead()))
            self._release_if_lost()

    def _handle(self, message: Message, file: int | None) -> None:
        if message.kind in (Kind.GRANTED, Kind.REFUSED):
            self._answers.put((message, file))
        elif message.kind in (Kind.DONE, Kind.FAILED):
            channel = self._channels.get(message.channel)
            if channel is None or message.slot >= len(channel.slots):
                raise ValueError(f"an answer for slot {message.slot} of channel {message.channel}")
            slot = channel.slots[message.slot]
            slot.error = message.text if message.kind is Kind.FAILED else None
            slot.done.set()
        elif message.kind is Kind.LEAVING:
            self.left_at = time.monotonic()
            self.lose(Left(f"the process that owns device {self.device} has stopped lending it"))
            self._release_if_lost()

    def _release_if_lost(self) -> None:
        """Whoever gives the last slot back, or loses the lender with none taken, lets go of all its memory."""
        with self._changed:
            leaving = self.left_at > 0 or self._gone
            if not leaving or self._taken or self._released:
                return
            self._released = True
        self._release()

    def _release(self) -> None:
        with self._changed:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.memory.close()
        with contextlib.suppress(OSError):
            self._wire.send(Message(Kind.BYE))
        self._wire.stop()

    def close(self) -> None:
        """Wait for slots that are taken, close the imports, and say goodbye. May be called twice."""
        self.lose(FerryError(f"device {self.device} has been given back"))
        with self._changed:
            self._changed.wait_for(lambda: self._taken == 0)
            released, self._released = self._released, True
        if not released:
            self._release()
        self._thread.join()
        self._wire.close()


class Segments:
    """Host memory of this process that its lenders have mapped too, looked up by address."""

    def __init__(self, backend: Backend, links: dict[int, Link]) -> None:
        self._backend, self._links = backend, links
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._known: list[tuple[int, int]] = []  # (end, segment), in the order of _starts
        self._mine: set[int] = set()  # where slabs begin whose memory is nobody else's
        self._said = False
        self._numbers = 0

    def alloc(self, nbytes: int, shared: str | None = None) -> HostSlab:
        """As `Backend.alloc_host`, mapped; every lender gets it too. Where processes cannot share such memory (Linux up to
        5.10 on Ascend) it is ordinary memory, which lenders do not see."""
        backend = self._backend
        if shared is not None:
            slab = backend.alloc_host(nbytes, mapped=True, shared=shared)
            self._add(slab, hostmem.named(shared), mine=False)
            return slab
        why = backend.sharing_failure()
        if why is None:
            try:
                file = hostmem.nameless(backend.host_bytes(nbytes))
                try:
                    slab = backend.alloc_host(nbytes, mapped=True, file=file)
                except BaseException:
                    os.close(file)
                    raise
                if backend.node is not None:
                    numa.prefer(slab.host, backend.node)
                self._add(slab, file, mine=True)
                return slab
            except FerryError as e:
                why = str(e)
        self._say(why)
        return backend.alloc_host(nbytes, mapped=True)

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"host memory cannot be shared with the processes that own assisting devices ({why}); copies from and to it "
                "go over the other paths",
                RuntimeWarning,
                stacklevel=3,
            )

    def _add(self, slab: HostSlab, file: int, mine: bool) -> None:
        """Note the slab, and send lenders the descriptor of its memory, which is closed here."""
        try:
            with self._lock:
                self._numbers += 1
                number, start = self._numbers, slab.host.data_ptr()
                at = bisect.bisect(self._starts, start)
                self._starts.insert(at, start)
                self._known.insert(at, (start + slab.nbytes, number))
                if mine:
                    self._mine.add(start)
            for link in self._links.values():
                with contextlib.suppress(FerryError):  # lost: nobody asks it for anything
                    link.send(Message(Kind.SEGMENT, segment=number, nbytes=slab.nbytes), file)
        finally:
            os.close(file)

    def forget(self, slab: HostSlab) -> None:
        """Lenders let go of it. Nothing that they do with it is under way."""
        with self._lock:
            at = bisect.bisect_left(self._starts, slab.host.data_ptr())
            if at == len(self._starts) or self._starts[at] != slab.host.data_ptr():
                return
            del self._starts[at]
            _, number = self._known.pop(at)
        for link in self._links.values():
            with contextlib.suppress(FerryError):
                link.send(Message(Kind.DROP, segment=number))

    def free(self, slab: HostSlab) -> None:
        """`forget`, and `Backend.free_host`."""
        with self._lock:
            mine = slab.host.data_ptr() in self._mine
            self._mine.discard(slab.host.data_ptr())
        pages = slab.host
        self.forget(slab)
        self._backend.free_host(slab)
        if mine:  # lenders may map it for a moment yet: the memory goes now
            hostmem.empty(pages)

    def find(self, host: torch.Tensor) -> Place | None:
        """Where a contiguous host tensor lies; None if lenders cannot see (all of) it."""
        start = host.data_ptr()
        with self._lock:
            at = bisect.bisect(self._starts, start) - 1
            if at < 0:
                return None
            end, number = self._known[at]
            return Place(number, start - self._starts[at]) if start + host.nbytes <= end else None
