"""A rank that is gone, noticed while every thread waits for the device.

A device family queues collectives. One that waits for a rank that is gone never ends, and what waits behind it (a loss to
be printed, the end of the process) cannot be woken. So each rank listens to the next one: nothing is said until that rank
leaves or fails, and a connection that closes says that it is gone. Who hears of a failure tells the rank that listens to
it, so that all know at once. A process whose device is stuck then says why and ends: nothing else is left to it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from memferry_ascend.parallel import Ranks

GRACE = 5.0
"""Seconds that the device gets to finish once a rank has failed."""

_LEAVES, _FAILED = 0, 1
_NEVER = timedelta(days=1000)


class Vigil:
    """Listens on a thread of its own. Every rank makes one."""

    def __init__(self, ranks: Ranks, synchronize: Callable[[], None]) -> None:
        self._ranks, self._synchronize = ranks, synchronize
        # Used past torch.distributed's functions: it serves until the end, also when the program destroys its groups.
        self._group: Any = dist.new_group(backend="gloo", timeout=_NEVER)
        self.heard: BaseException | None = None
        """What told that another rank has failed."""
        self._lock, self._told = threading.Lock(), False
        self._failed = False
        self._thread = threading.Thread(target=self._listen, name="memferry-vigil", daemon=True)
        self._thread.start()
        # Behind what engines do at exit, before torch's part for the device, which lets no thread run while it waits.
        atexit.register(self._at_exit)

    def _listen(self) -> None:
        word = torch.zeros(1, dtype=torch.uint8)
        error: BaseException = RuntimeError("another rank has failed")
        try:
            self._group.recv([word], (self._ranks.rank + 1) % self._ranks.size, 0).wait()
            if int(word) == _LEAVES:
                return
        except RuntimeError as closed:
            error = closed
        self.heard = error
        self.fail()
        self._ranks.queued(GRACE)
        if not self._device_ends(self._ranks.abort).wait(GRACE):
            # Past sys.stderr, which torch replaces while it prints a traceback.
            os.write(2, f"memferry: {self._ranks.explain(error)}\n".encode())
            _end()

    def _device_ends(self, before: Callable[[], None] = lambda: None) -> threading.Event:
        """Set when the device has done what it has now, after `before`, which may not return either."""
        done = threading.Event()

        def wait() -> None:
            with suppress(Exception):
                before()
                self._synchronize()
            done.set()

        threading.Thread(target=wait, name="memferry-vigil-device", daemon=True).start()
        return done

    def _tell(self, word: int) -> None:
        with self._lock:
            if self._told:
                return
            self._told = True
        with suppress(Exception):  # there may be nobody left to hear it
            listener = (self._ranks.rank - 1) % self._ranks.size
            self._group.send([torch.tensor([word], dtype=torch.uint8)], listener, 0).wait()

    def fail(self) -> None:
        """This rank has failed, or has heard of one that has."""
        self._failed = True
        self._tell(_FAILED)

    def leave(self) -> None:
        """What comes of this rank from now on is no failure."""
        self._tell(_LEAVES)
        atexit.unregister(self._at_exit)

    def join(self) -> None:
        """All ranks leave: block until the next one has said so."""
        self.leave()
        self._thread.join()

    def _at_exit(self) -> None:
        self._tell(_LEAVES)
        if not self._device_ends().wait(GRACE if self._failed else None):
            _end()


def _end() -> None:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
