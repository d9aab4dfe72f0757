"""The relays of one backend, made when they are first used: what CUDA and Ascend have in common.

A relay belongs to one stream, peer and direction. It is made anew when the chunk or the number of slots changes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from memferry_ascend.backends.base import Stream


class Relay(Protocol):
    """One direction through one peer, for one of this device's streams."""

    def begin(self, dst: torch.Tensor, src: torch.Tensor) -> Callable[[], None]:
        """dst <- src behind what the relay's stream has now, queued by calling what is returned; `done` brings the stream
        behind it."""

    def done(self) -> None: ...


LEAST = 1 << 20
"""Bytes of a chunk at least: on an H200 every chunk costs a relay about 7 us beside moving it, and 30 us to queue."""


def step(nbytes: int, buffer: int) -> int:
    """Bytes of a chunk of a copy of `nbytes` through buffers of `buffer` bytes: a quarter, so that the two legs overlap."""
    return min(buffer, max(LEAST, -(-nbytes // 4) + 511 & ~511))


S = TypeVar("S", bound=Stream)
R = TypeVar("R", bound=Relay)


class Relays(ABC, Generic[S, R]):
    """A family says how a relay is made and retired."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, int, bool], tuple[int, int, R]] = {}

    @abstractmethod
    def _make(self, stream: S, peer: int, to_device: bool, chunk: int, slots: int) -> R:
        """Raises NotSupported where `peer` cannot forward to this device."""

    @abstractmethod
    def _retire(self, stream: S, relay: R) -> None:
        """Wait for the relay, and let its buffers go."""

    def begin(
        self, stream: S, dst: torch.Tensor, src: torch.Tensor, peer: int, chunk: int, slots: int
    ) -> Callable[[], None]:
        """dst <- src (one of them host memory) through `slots` buffers of `chunk` bytes on device `peer`, behind what
        `stream` has now. Calling what is returned queues it."""
        to_device = src.device.type == "cpu"
        key = (stream.name, peer, to_device)
        with self._lock:
            made = self._made.get(key)
            if made is None or made[:2] != (chunk, slots):
                if made is not None:
                    self._retire(stream, made[2])
                    del self._made[key]
                made = self._made[key] = (chunk, slots, self._make(stream, peer, to_device, chunk, slots))
        return made[2].begin(dst, src)

    def done(self, stream: S) -> None:
        """`stream` waits for all of its relays."""
        # All of them: another thread may be queuing on this stream, and waiting for a past event costs nothing.
        for (name, _, _), (_, _, relay) in list(self._made.items()):
            if name == stream.name:
                relay.done()
