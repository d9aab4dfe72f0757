"""One path in one direction, where copies block the thread that makes them: direct, through a peer's staging memory that
this process holds itself, or through that of another process."""

from __future__ import annotations

import queue

import torch

from memferry_ascend.backends.base import Backend
from memferry_ascend.borrower import Link, Segments
from memferry_ascend.errors import FerryError
from memferry_ascend.topology import EmulatedLinks, FabricPath


class Lane:
    """One path in one direction on a backend whose copies block the calling thread. `slots` staging buffers bound what
    an assisted path takes on the peer and how many of its chunks are under way."""

    def __init__(
        self, path: FabricPath, links: EmulatedLinks | None, slots: int, chunk: int, backend: Backend
    ) -> None:
        self.path, self.slots, self.chunk = path, slots, chunk
        self._links, self._backend = links, backend
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        if path.via is not None:
            # The peer's memory, not this device's: it does not count against the device's limit.
            for _ in range(slots):
                self._free.put(torch.empty(chunk, dtype=torch.uint8))

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """dst <- src, both uint8 of one length (at most a chunk on an assisted path); returns when it has arrived."""
        self._backend._at(f"path:{self.path.name}")
        if self.path.via is None:
            self._cross(src.numel())
            dst.copy_(src)
            return
        buffer = self._free.get()
        try:
            staged = buffer[: src.numel()]
            staged.copy_(src)
            self._cross(src.numel())
            dst.copy_(staged)
        finally:
            self._free.put(buffer)

    def _cross(self, nbytes: int) -> None:
        if self._links is not None:
            self._links.transfer(self.path, nbytes)

    def close(self) -> None:
        """Give staging memory back that belongs to somebody else."""


class BorrowedLane(Lane):
    """A path through a device of another process. The leg that touches the host runs there, between memory that both have
    mapped and the owner's staging memory, which this process has imported."""

    def __init__(
        self,
        path: FabricPath,
        links: EmulatedLinks | None,
        slots: int,
        chunk: int,
        backend: Backend,
        link: Link,
        segments: Segments,
    ) -> None:
        self._channel = link.open(slots, chunk, to_device=path.direction == "h2d")
        self._segments, self._to_device = segments, path.direction == "h2d"
        super().__init__(path, links, 0, chunk, backend)
        self.slots = len(self._channel.slots)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._backend._at(f"path:{self.path.name}")
        nbytes, channel = src.numel(), self._channel
        place = self._segments.find(src if self._to_device else dst)
        if place is None:
            raise FerryError("expected host memory that the lender has mapped")
        slot = channel.take()
        try:
            staged = channel.memory.part(slot.index * channel.chunk, nbytes)
            if self._to_device:
                channel.ask(slot, place, nbytes)
                channel.wait(slot)
                self._cross(nbytes)
                dst.copy_(staged)
            else:
                staged.copy_(src)
                self._cross(nbytes)
                channel.ask(slot, place, nbytes)
                channel.wait(slot)
        finally:
            channel.give(slot)

    def close(self) -> None:
        self._channel.close()
