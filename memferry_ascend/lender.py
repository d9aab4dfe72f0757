"""The owner's side of a relay across processes: this process's device carries for others what its own training leaves.

A borrower (`borrower.py`) asks; the leg that touches the host runs here, on this device, between host memory that the
borrower has handed over and a buffer of ours that it has imported. A connection has a thread that receives, and one for each
channel, which runs one leg after the other and says when the bytes are there. None of them waits for anything but its own
device, so two processes that lend to each other cannot wait for each other.

Staging memory is bounded for all borrowers together. Borrowers close their imports first: `close` asks them to, and waits.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from queue import SimpleQueue

from memferry_ascend import sizes
from memferry_ascend.backends.base import Backend, HostSlab
from memferry_ascend.backends.loans import Loan
from memferry_ascend.errors import FerryError
from memferry_ascend.lendwire import Kind, Message, Wire

BUDGET = 64 << 20
"""Bytes of a device that its owner lends at most, to all borrowers together."""

PATIENCE = 5.0
"""Seconds that borrowers have to let go of a device whose owner stops lending."""


class Lender:
    """Serves connections until `close`.

    budget: bytes of staging memory for all borrowers together.
    """

    def __init__(self, backend: Backend, budget: int | None = None) -> None:
        self.backend = backend
        self._left = BUDGET if budget is None else budget
        self._budget = self._left
        self._lock = threading.Lock()
        self._borrowers: list[_Borrower] = []

    def serve(self, wire: Wire) -> None:
        """Lend to whoever is at the other end, until they or we have enough."""
        self._borrowers.append(_Borrower(self, wire))

    @property
    def lent(self) -> int:
        """Bytes of staging memory in borrowers' hands."""
        with self._lock:
            return self._budget - self._left

    def grant(self, slots: int, nbytes: int) -> int:
        """Slots of `nbytes`, at most `slots` and half of what is left (others will ask too), but one if there is room at
        all; they are the caller's.

        Raises:
            FerryError: not even one.
        """
        with self._lock:
            room = self._left // max(1, nbytes)
            slots = min(slots, max(room // 2, 1)) if room else 0
            if slots < 1:
                raise FerryError(
                    f"it lends {sizes.fmt(self._budget)} of staging memory at most, of which {sizes.fmt(self._left)} are "
                    f"left: no room for {sizes.fmt(nbytes)}"
                )
            self._left -= slots * nbytes
            return slots

    def take_back(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes

    def close(self) -> None:
        """Stop lending: borrowers finish what is under way and close their imports, then the memory goes. One that does
        not answer is left behind; the runtime may then keep its buffer until this process ends. May be called twice."""
        for borrower in self._borrowers:
            borrower.leave()
        deadline = time.monotonic() + PATIENCE
        for borrower in self._borrowers:
            borrower.join(max(0.0, deadline - time.monotonic()))
        self._borrowers.clear()


class _Borrower:
    """One connection."""

    def __init__(self, lender: Lender, wire: Wire) -> None:
        self._lender, self._wire = lender, wire
        self._process = 0
        self._segments: dict[int, HostSlab | str] = {}
        self._channels: dict[int, _Channel] = {}
        self._thread = threading.Thread(target=self._receive, name="memferry-lend", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.send(Message(Kind.LEAVING))

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._wire.stop()
            self._thread.join()

    def _receive(self) -> None:
        try:
            self._lender.backend.bind_thread()
            while (got := self._wire.receive()) is not None:
                message, file = got
                try:
                    if not self._handle(message, file):
                        break
                finally:
                    if file is not None:
                        os.close(file)
        except (OSError, ValueError, FerryError):
            pass  # the borrower finds the connection ended, and takes the direct path
        finally:
            self._end()

    def _handle(self, message: Message, file: int | None) -> bool:
        if message.kind is Kind.HELLO:
            self._process = message.number
        elif message.kind is Kind.SEGMENT:
            self._segments[message.segment] = self._map(file, message.nbytes)
        elif message.kind is Kind.DROP:
            self._drop(self._segments.pop(message.segment, ""))
        elif message.kind is Kind.OPEN:
            self._open(message)
        elif message.kind is Kind.CLOSE:
            self._shut(self._channels.pop(message.channel, None))
        elif message.kind is Kind.CARRY:
            channel = self._channels.get(message.channel)
            if channel is None:
                raise ValueError(f"no channel {message.channel} is open")
            channel.ask(message, self._segments.get(message.segment, "it was never handed over"))
        else:
            return False
        return True

    def _map(self, file: int | None, nbytes: int) -> HostSlab | str:
        """Host memory of the borrower, seen from here too; or why not."""
        backend = self._lender.backend
        try:
            if file is None or os.fstat(file).st_size < backend.host_bytes(nbytes):
                raise FerryError(f"expected a descriptor of {sizes.fmt(nbytes)}")
            return backend.alloc_host(nbytes, mapped=True, file=file)
        except FerryError as e:
            return str(e)

    def _drop(self, slab: HostSlab | str) -> None:
        if isinstance(slab, HostSlab):
            self._lender.backend.drop_host(slab)

    def _open(self, message: Message) -> None:
        lender, nbytes = self._lender, message.nbytes
        try:
            slots = lender.grant(message.number, nbytes)
            try:
                loan = lender.backend.lend(slots * nbytes, self._process)
            except BaseException:
                lender.take_back(slots * nbytes)
                raise
        except FerryError as e:
            self._wire.send(Message(Kind.REFUSED, message.channel, text=str(e)))
            return
        self._channels[message.channel] = _Channel(lender, self._wire, loan, slots * nbytes, message)
        granted = Message(Kind.GRANTED, message.channel, number=slots, text=loan.key)
        self._wire.send(granted, loan.file)

    def _shut(self, channel: _Channel | None) -> None:
        if channel is not None:
            channel.close()
            self._lender.take_back(channel.nbytes)

    def _end(self) -> None:
        """The borrower has gone, with BYE or without."""
        for channel in self._channels.values():
            with contextlib.suppress(FerryError):
                self._shut(channel)
        for slab in self._segments.values():
            with contextlib.suppress(FerryError):
                self._drop(slab)
        self._channels.clear()
        self._segments.clear()
        self._wire.close()


class _Channel:
    """One direction for one of the borrower's streams: legs in the order in which they are asked for."""

    def __init__(self, lender: Lender, wire: Wire, loan: Loan, nbytes: int, opened: Message) -> None:
        self.nbytes = nbytes
        self._backend, self._wire, self._loan = lender.backend, wire, loan
        self._each, self._to_device = opened.nbytes, opened.to_device
        self._asked: SimpleQueue[tuple[Message, HostSlab | str] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="memferry-lend-leg", daemon=True)
        self._thread.start()

    def ask(self, message: Message, slab: HostSlab | str) -> None:
        self._asked.put((message, slab))

    def close(self) -> None:
        """Finish what was asked for and give the memory back."""
        self._asked.put(None)
        self._thread.join()
        self._loan.close()

    def _work(self) -> None:
        self._backend.bind_thread()
        while (asked := self._asked.get()) is not None:
            message, slab = asked
            answer = Message(Kind.DONE, message.channel, message.slot)
            try:
                self._carry(message, slab)
            except Exception as e:
                answer = Message(Kind.FAILED, message.channel, message.slot, text=str(e))
            with contextlib.suppress(OSError):  # the thread that receives finds out too
                self._wire.send(answer)

    def _carry(self, message: Message, slab: HostSlab | str) -> None:
        if isinstance(slab, str):
            raise FerryError(f"it could not map the host memory: {slab}")
        end = message.offset + message.nbytes
        at = message.slot * self._each
        if end > slab.nbytes or message.nbytes > self._each or at >= self.nbytes:
            raise FerryError(
                f"bytes {message.offset} to {end} of {slab.nbytes} in slot {message.slot}: out of bounds"
            )
        self._loan.carry(at, slab.host[message.offset : end], self._to_device)
