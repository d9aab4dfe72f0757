"""Relays of the Ascend backend: host memory to this NPU through a peer's buffers, and back (paper section IV-E).

What CANN asks for, and what follows from it:

- A host copy's device end belongs to the current device, and imported or peer memory is no operand of it. So the leg that
  touches the host runs on the peer, between host memory and a buffer of the peer's own; the other leg runs here.
- A copy between devices needs access that the device it runs on has enabled. Access is opened both ways.
- A stream is used with its device current. The native relay switches the thread's device for each leg and leaves it here.
- Our calls go past torch_npu's task queue. What it still holds for a stream is handed over first, so that a relay starts
  behind the copies before it and the copies behind it start after it. That costs launches; TASK_QUEUE_ENABLE=0 does not.

Buffers, streams and events are the runtime's own (`aclrtMalloc`, ...): torch_npu's allocator never hears of the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_int32, c_void_p
from typing import TYPE_CHECKING

import torch

from memferry_ascend.backends.acl import Held, describe
from memferry_ascend.backends.ascend_lending import AscendBorrowedRelay
from memferry_ascend.backends.base import BytesLost, NotSupported
from memferry_ascend.backends.relays import Relays, step
from memferry_ascend.errors import FerryError

if TYPE_CHECKING:
    from memferry_ascend.backends.ascend import AscendBackend, AscendStream


class _Side(Held):
    """One of the two devices of a relay: its runtime calls and what was made there."""

    def __init__(self, device: int) -> None:
        from memferry_ascend import _ops

        super().__init__(device)
        self.driver = _ops.Driver("ascend", "", device)


class AscendRelay:
    """One direction through one peer, for one of this device's streams: `slots` buffers of `chunk` bytes on the peer."""

    def __init__(
        self, backend: AscendBackend, stream: AscendStream, peer: int, to_device: bool, chunk: int, slots: int
    ) -> None:
        from memferry_ascend import _ops

        self._stream, self._to_device, self._peer, self._chunk = stream, to_device, peer, chunk
        self._queued = self._proven = 0  # copies, and how many of them are known to have arrived
        self._mine, self._theirs = mine, theirs = _Side(backend.acl.device), _Side(peer)
        first, second = (theirs, mine) if to_device else (mine, theirs)
        try:
            theirs.acl.bind()
            buffers = [theirs.buffer(chunk) for _ in range(slots)]
            first.acl.bind()
            self._first, filled = first.stream(), [first.event() for _ in range(slots)]
            second.acl.bind()
            self._second, freed = second.stream(), [second.event() for _ in range(slots)]
            self._done = second.event()
            mine.acl.bind()
            self._after = mine.event()
        except BaseException:
            self.close()
            raise
        self._legs = (first, self._first), (second, self._second)
        rows = list(zip(buffers, filled, freed, strict=True))
        self._relay = _ops.Relay(first.driver, second.driver, rows, chunk, self._first, self._second)

    def begin(self, dst: torch.Tensor, src: torch.Tensor) -> Callable[[], None]:
        """As `Backend.begin_relay`. Another thread's beginning in between only puts this one behind its own."""
        self.check(wait=False)
        self._stream.flush()
        self._mine.driver.record(self._after, self._stream.handle)
        return lambda: self._queue(dst, src)

    def _queue(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._queued += 1
        try:
            copy = dst.data_ptr(), src.data_ptr(), src.nbytes, self._to_device
            self._relay.queue(*copy, self._after, self._done, step(src.nbytes, self._chunk))
        except RuntimeError:
            self._queued -= 1  # another path carries all of it
            raise

    def done(self) -> None:
        self._stream.flush()
        self._mine.driver.wait(self._stream.handle, self._done)

    def check(self, wait: bool) -> None:
        """Raise if a chunk that had been accepted failed: its bytes are missing, and no other path has carried them.
        `wait`: for everything queued. Otherwise only what is known already counts, and a peer that has gone since the last
        wait, with nothing queued, is an error that another path mends."""
        queued = self._queued
        for side, stream in self._legs:
            status = c_int32()
            try:
                code = side.acl.code("aclrtSetDevice", c_int32(side.acl.device))
                if code == 0 and wait:
                    code = side.acl.code("aclrtSynchronizeStream", c_void_p(stream))
                elif code == 0:
                    code = side.acl.code("aclrtStreamQuery", c_void_p(stream), byref(status))
            finally:
                self._mine.acl.code("aclrtSetDevice", c_int32(self._mine.acl.device))
            if code and queued == self._proven and not wait:
                raise FerryError(f"device {side.acl.device}: {describe(code)}")
            if code and queued != self._proven:
                raise BytesLost(
                    f"a relay through device {self._peer} failed after it had taken bytes: {describe(code)}; what it "
                    "carried is lost, go back to the last checkpoint and leave the device out of assist_devices"
                )
        if wait:
            self._proven = queued

    def close(self) -> None:
        self._theirs.undo()
        self._mine.undo()
        self._mine.acl.code("aclrtSetDevice", c_int32(self._mine.acl.device))


class AscendRelays(Relays["AscendStream", "AscendRelay | AscendBorrowedRelay"]):
    """Of one NPU, through peers that this process drives and through those of other processes."""

    def __init__(self, backend: AscendBackend) -> None:
        super().__init__()
        self._backend = backend

    def _make(
        self, stream: AscendStream, peer: int, to_device: bool, chunk: int, slots: int
    ) -> AscendRelay | AscendBorrowedRelay:
        lending = self._backend.lending
        if lending is not None and peer in lending.links:
            return AscendBorrowedRelay(
                self._backend, stream, lending.links[peer], lending.segments, to_device, chunk, slots
            )
        self._check(peer)
        return AscendRelay(self._backend, stream, peer, to_device, chunk, slots)

    def _retire(self, stream: AscendStream, relay: AscendRelay | AscendBorrowedRelay) -> None:
        relay.check(wait=True)
        relay.close()

    def drop_borrowed(self) -> None:
        """End the relays through devices of other processes."""
        with self._lock:
            for key, (_, _, relay) in list(self._made.items()):
                if isinstance(relay, AscendBorrowedRelay):
                    relay.close()
                    del self._made[key]

    def check(self) -> None:
        """Wait for all relays; raise what one of them lost."""
        for _, _, relay in list(self._made.values()):
            relay.check(wait=True)

    def _check(self, peer: int) -> None:
        try:
            from memferry_ascend import _ops  # noqa: F401
        except ImportError as error:
            raise NotSupported(
                "relays need the native extension, which was not built; use the direct path"
            ) from error
        count = torch.npu.device_count()
        if not 0 <= peer < count or peer == self._backend.device.index:
            raise NotSupported(f"device {peer} is absent: the machine has {count} NPUs; use the direct path")
        if not self._backend.open_peer(peer):
            raise NotSupported(
                f"device {peer} and device {self._backend.device.index} cannot open their memory to each other; use the "
                "direct path"
            )

    def close(self) -> None:
        for _, _, relay in self._made.values():
            relay.close()
        self._made.clear()
