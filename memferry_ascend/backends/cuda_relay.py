"""Relays of the CUDA backend: host memory to this device through a peer's buffers, and back (paper section IV-E).

One native call queues all chunks of a copy: from Python, queuing costs more than copying at 16 MiB. The peer may be this
device itself (tests on a machine with one): the path is the same, only no link of its own carries it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from memferry_ascend.backends.base import NotSupported
from memferry_ascend.backends.relays import Relays, step

if TYPE_CHECKING:
    from memferry_ascend.backends.cuda import CudaBackend, CudaStream


class CudaRelay:
    """One direction through one peer, for one of this device's streams: `slots` buffers of `chunk` bytes on the peer."""

    def __init__(
        self, backend: CudaBackend, stream: CudaStream, peer: int, to_device: bool, chunk: int, slots: int
    ) -> None:
        from memferry_ascend import _ops  # type: ignore[attr-defined]
        from memferry_ascend.backends.cuda import CudaEvent

        mine, theirs = backend.device, torch.device("cuda", peer)
        self._stream, self._to_device, self._chunk, self.buffers = stream, to_device, chunk, []
        # Bytes come in on `first` and leave on `second`. The leg that touches the host runs on the peer, the other one
        # here, so that a host link is driven by the device that owns it. An event lives where it is recorded.
        first, second = (theirs, mine) if to_device else (mine, theirs)
        with torch.cuda.device(theirs):
            self.buffers = [torch.empty(chunk, dtype=torch.uint8, device=theirs) for _ in range(slots)]
            torch.cuda.current_stream().synchronize()  # the allocator's own stream must be done with them
        with torch.cuda.device(first):
            self._first = torch.cuda.Stream(first, priority=-1)
            filled = [CudaEvent(timing=False) for _ in range(slots)]
        with torch.cuda.device(second):
            self._second = torch.cuda.Stream(second, priority=-1)
            freed = [CudaEvent(timing=False) for _ in range(slots)]
            self._done = CudaEvent(timing=False)
        with torch.cuda.device(mine):
            self._after = CudaEvent(timing=False)
        self._events = (filled, freed)  # kept alive for the handles below
        rows = [
            (b.data_ptr(), f.handle, e.handle) for b, f, e in zip(self.buffers, filled, freed, strict=True)
        ]
        driver = backend.driver()
        self._relay = _ops.Relay(
            driver, driver, rows, chunk, self._first.cuda_stream, self._second.cuda_stream
        )

    def begin(self, dst: torch.Tensor, src: torch.Tensor) -> Callable[[], None]:
        """As `Backend.begin_relay`. Another thread's beginning in between only puts this one behind its own."""
        self._stream.record(self._after)
        copy = dst.data_ptr(), src.data_ptr(), src.nbytes, self._to_device
        chunk = step(src.nbytes, self._chunk)
        return lambda: self._relay.queue(*copy, self._after.handle, self._done.handle, chunk)

    def done(self) -> None:
        self._stream.wait(self._done)


class CudaRelays(Relays["CudaStream", CudaRelay]):
    """Of one CUDA device."""

    def __init__(self, backend: CudaBackend) -> None:
        super().__init__()
        self._backend = backend

    def _make(self, stream: CudaStream, peer: int, to_device: bool, chunk: int, slots: int) -> CudaRelay:
        self._check(peer)
        return CudaRelay(self._backend, stream, peer, to_device, chunk, slots)

    def _retire(self, stream: CudaStream, relay: CudaRelay) -> None:
        relay.done()
        stream.synchronize()  # the old buffers go back to the allocator

    def _check(self, peer: int) -> None:
        mine = self._backend.device.index
        if self._backend.driver() is None:
            raise NotSupported("relays need the native extension, which was not built; use the direct path")
        if not 0 <= peer < torch.cuda.device_count():
            raise NotSupported(
                f"device {peer} is absent: the machine has {torch.cuda.device_count()} CUDA devices; use the direct path"
            )
        if peer == mine:
            return
        if not torch.cuda.can_device_access_peer(mine, peer):
            raise NotSupported(f"device {peer} has no peer access to device {mine}; use the direct path")
        # torch enables peer access when it first copies between two devices.
        here = torch.empty(1, dtype=torch.uint8, device=self._backend.device)
        there = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", peer))
        here.copy_(there)
        there.copy_(here)
        torch.cuda.synchronize(mine)
        torch.cuda.synchronize(peer)

    def close(self) -> None:
        for _, _, relay in self._made.values():
            relay.done()
        self._made.clear()
