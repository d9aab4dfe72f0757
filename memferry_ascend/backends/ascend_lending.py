"""Relays between NPUs that belong to different processes (docs/ascend.md, "Relays across processes").

CANN lets a process export device memory to named others, which may use it in copies between devices and in no host copy.
So the leg that touches the host runs in the owner's process, on the owner's device, with the owner's buffer (`AscendLoan`),
and the leg between the devices here, on the imported buffer (`AscendBorrowedRelay`).

Events do not cross processes: the owner says when a chunk is there, and a thread of the borrower's queues the next leg. The
stream for which a relay was queued waits for a notify, which CANN lets a stream wait for before it is recorded; the thread
has it recorded once everything has come. So queuing a relay returns at once, and what is queued behind it starts after it.

Nobody knows better than that thread which chunks came. What an owner that dies or refuses leaves behind it copies directly,
before it lets the stream go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING

import torch

from memferry_ascend.backends.acl import Held, describe
from memferry_ascend.backends.base import BytesLost, NotSupported
from memferry_ascend.backends.loans import Borrowed, Loan
from memferry_ascend.backends.relays import step
from memferry_ascend.borrower import Place
from memferry_ascend.errors import FerryError

if TYPE_CHECKING:
    from memferry_ascend.backends.ascend import AscendBackend
    from memferry_ascend.backends.ascend_queues import AscendStream
    from memferry_ascend.borrower import Channel, Link, Segments, Slot

_KEY = 65
"""Bytes that CANN asks for a key."""
_H2D, _D2H, _D2D = 1, 2, 3

Chunk = tuple[int, int]
"""(offset, bytes) in a relay."""


class AscendLoan(Loan):
    """A buffer of this device, exported to one process, and a stream for the legs that touch the host."""

    def __init__(self, backend: AscendBackend, nbytes: int, borrower: int) -> None:
        self._backend = backend
        self._held = Held(backend.acl.device)
        self._acl = acl = self._held.acl
        key = ctypes.create_string_buffer(_KEY)
        try:
            acl.bind()
            self._stream = self._held.stream()
            self._buffer = self._held.buffer(nbytes)
            what = "lending device memory"
            no_flags = c_uint64(0)
            arguments = c_void_p(self._buffer), c_size_t(nbytes), key, c_size_t(_KEY), no_flags
            acl.call("aclrtIpcMemGetExportKey", *arguments, doing=what)
            self.key = key.value.decode()
            who = (c_int32 * 1)(borrower)
            acl.call("aclrtIpcMemSetImportPid", c_char_p(key.value), who, c_size_t(1), doing=what)
        except BaseException:
            self.close()
            raise

    def carry(self, at: int, host: torch.Tensor, to_device: bool) -> None:
        self._backend._at("lend:h2d" if to_device else "lend:d2h")
        there, here, n = c_void_p(self._buffer + at), c_void_p(host.data_ptr()), c_size_t(host.nbytes)
        to, source, kind = (there, here, _H2D) if to_device else (here, there, _D2H)
        self._acl.bind()
        stream = c_void_p(self._stream)
        self._acl.call(
            "aclrtMemcpyAsync", to, n, source, n, c_int32(kind), stream, doing="a copy for a borrower"
        )
        self._acl.call("aclrtSynchronizeStream", stream, doing="a copy for a borrower")

    def close(self) -> None:
        if self.key and self._acl.code("aclrtSetDevice", c_int32(self._acl.device)) == 0:
            self._acl.code("aclrtIpcMemClose", c_char_p(self.key.encode()))
            self.key = ""
        self._held.undo()


class AscendBorrowed(Borrowed):
    """Another process's buffer, for copies between its device and this one."""

    def __init__(self, backend: AscendBackend, key: str, owner: int) -> None:
        self._acl, self._key = backend.acl, key.encode()
        if not self._acl.reach(owner):
            raise NotSupported(
                f"device {self._acl.device} cannot open the memory of device {owner}; use the direct path"
            )
        found = c_void_p()
        no_flags = c_uint64(0)
        what = f"borrowing memory of device {owner}"
        self._acl.call("aclrtIpcMemImportByKey", byref(found), c_char_p(self._key), no_flags, doing=what)
        assert found.value is not None
        self.address = found.value

    def close(self) -> None:
        if self._acl.code("aclrtSetDevice", c_int32(self._acl.device)) == 0:
            self._acl.code("aclrtIpcMemClose", c_char_p(self._key))


class AscendBorrowedRelay:
    """One direction through another process's device, for one of this device's streams."""

    def __init__(
        self,
        backend: AscendBackend,
        stream: AscendStream,
        link: Link,
        segments: Segments,
        to_device: bool,
        chunk: int,
        slots: int,
    ) -> None:
        self._stream, self._link, self._segments, self._to_device = stream, link, segments, to_device
        self._held = Held(backend.acl.device)
        self._acl = acl = self._held.acl
        if not acl.has("aclrtCreateNotify", "aclrtWaitAndResetNotify", "aclrtRecordNotify"):
            raise NotSupported(
                "this CANN has no notifies: relays across processes need them; use the direct path"
            )
        self._channel: Channel = link.open(slots, chunk, to_device)
        memory = self._channel.memory
        assert isinstance(memory, AscendBorrowed)
        self._address = memory.address
        try:
            acl.bind()
            self._legs = self._held.stream()
            self._notify = self._held.notify()
            self._over = [self._held.event() for _ in self._channel.slots]
        except BaseException:
            self._held.undo()
            self._channel.close()
            raise
        self._idle_events: list[int] = []
        self._joined = True
        """`done` has been called for everything queued."""
        self._queuing = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = self._closing = False
        self._error: BytesLost | None = None
        self._thread = threading.Thread(target=self._work, name="memferry-borrow-legs", daemon=True)
        self._thread.start()

    # -- threads that queue --------------------------------------------------------------------------------------------
    def begin(self, dst: torch.Tensor, src: torch.Tensor) -> Callable[[], None]:
        """As `Backend.begin_relay`. Nothing is left to queue: the thread does that."""
        if self._error is not None:
            raise self._error
        if self._link.lost is not None:
            raise type(self._link.lost)(*self._link.lost.args)
        host, device = (src, dst) if self._to_device else (dst, src)
        place = self._segments.find(host)
        if place is None:
            raise NotSupported("the owner of the peer cannot see this host memory; use the direct path")
        with self._queuing:
            self._stream.flush()
            # One for each relay under way: an event that is recorded again is waited for anew.
            after = self._idle_events.pop() if self._idle_events else self._held.event()
            what = "a relay's beginning"
            self._acl.call("aclrtRecordEvent", c_void_p(after), c_void_p(self._stream.handle), doing=what)
            self._joined = False
            addresses = device.data_ptr(), host.data_ptr()
            self._push(lambda: self._relay(after, addresses, place, src.nbytes))
        return lambda: None

    def done(self) -> None:
        with self._queuing:
            if self._joined:
                return
            self._stream.flush()
            # One bit is enough: a relay queued from now on starts behind this wait, and so does its recording.
            for_ever = c_uint32(0)
            arguments = c_void_p(self._notify), c_void_p(self._stream.handle), for_ever
            self._acl.call("aclrtWaitAndResetNotify", *arguments, doing="waiting for a relay")
            self._joined = True
            self._push(self._let_go)

    def _push(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def check(self, wait: bool) -> None:
        """Raise if bytes of a relay are missing that nobody else has carried. `wait`: for everything queued."""
        if wait:
            with self._changed:
                self._changed.wait_for(lambda: not self._jobs and not self._busy)
            code = self._acl.code("aclrtSetDevice", c_int32(self._acl.device))
            code = code or self._acl.code("aclrtSynchronizeStream", c_void_p(self._legs))
            if code and self._error is None:
                self._error = self._lost(describe(code))
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread once everything queued is over, and give the staging memory back."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._held.undo()
        self._channel.close()

    def _lost(self, why: object) -> BytesLost:
        return BytesLost(
            f"a relay through device {self._link.device} failed after it had taken bytes: {why}; what it carried is lost, "
            "go back to the last checkpoint and leave the device out of assist_devices"
        )

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                self._acl.bind()
                job()
            except Exception as e:
                self._error = self._error or self._lost(e)

    def _let_go(self) -> None:
        arguments = c_void_p(self._notify), c_void_p(self._legs)
        self._acl.call("aclrtRecordNotify", *arguments, doing="a relay's end")

    def _relay(self, after: int, addresses: tuple[int, int], place: Place, nbytes: int) -> None:
        device, host = addresses
        self._acl.call("aclrtSynchronizeEvent", c_void_p(after), doing="work before a relay")
        with self._queuing:
            self._idle_events.append(after)
        for at, n in self._through_owner(device, place, nbytes):
            if self._to_device:
                self._copy(device + at, host + at, n, _H2D)
            else:
                self._copy(host + at, device + at, n, _D2H)

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        n = c_size_t(nbytes)
        arguments = c_void_p(to), n, c_void_p(source), n, c_int32(kind), c_void_p(self._legs)
        self._acl.call("aclrtMemcpyAsync", *arguments, doing="a leg of a relay")

    def _through_owner(self, device: int, place: Place, nbytes: int) -> list[Chunk]:
        """Move the bytes; returns those that did not come, all of which nobody touches any more."""
        channel, chunk = self._channel, step(nbytes, self._channel.chunk)
        to_begin = deque((at, min(chunk, nbytes - at)) for at in range(0, nbytes, chunk))
        first: deque[tuple[Slot, Chunk]] = deque()
        second: deque[tuple[Slot, Chunk]] = deque()

        def ask(slot: Slot, part: Chunk) -> None:
            channel.ask(slot, Place(place.segment, place.offset + part[0]), part[1])

        def cross(slot: Slot, part: Chunk) -> None:
            there, here = self._address + slot.index * channel.chunk, device + part[0]
            to, source = (here, there) if self._to_device else (there, here)
            self._copy(to, source, part[1], _D2D)
            event, stream = c_void_p(self._over[slot.index]), c_void_p(self._legs)
            self._acl.call("aclrtRecordEvent", event, stream, doing="a leg of a relay")

        def crossed(slot: Slot) -> None:
            self._acl.call(
                "aclrtSynchronizeEvent", c_void_p(self._over[slot.index]), doing="a leg of a relay"
            )

        slots = len(channel.slots)
        try:
            while to_begin or first or second:
                while to_begin and len(first) + len(second) < slots:
                    slot = channel.take()
                    first.append((slot, to_begin[0]))
                    to_begin.popleft()
                    ask(*first[-1]) if self._to_device else cross(*first[-1])
                if first:
                    slot, part = first[0]
                    if self._to_device:
                        channel.wait(slot)
                        cross(slot, part)
                    else:
                        crossed(slot)
                        ask(slot, part)
                    second.append(first.popleft())
                if second and (len(second) > slots // 2 or not first):
                    slot, _ = second[0]
                    crossed(slot) if self._to_device else channel.wait(slot)
                    second.popleft()
                    channel.give(slot)
        except FerryError as e:
            self._link.lose(e)
            return self._give_up(first, second, to_begin)
        return []

    def _give_up(
        self,
        first: deque[tuple[Slot, Chunk]],
        second: deque[tuple[Slot, Chunk]],
        rest: deque[Chunk],
    ) -> list[Chunk]:
        """Wait until nothing uses the slots any more, and say which chunks are missing."""
        missing = [part for _, part in (*second, *first)] + list(rest)
        for slot, _ in (*second, *first):
            with contextlib.suppress(FerryError):
                self._channel.wait(slot)
        with contextlib.suppress(FerryError):
            self._acl.call("aclrtSynchronizeStream", c_void_p(self._legs))
        for slot, _ in (*second, *first):
            self._channel.give(slot)
        return missing
