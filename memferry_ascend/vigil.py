"""A rank that is gone, noticed while every thread waits for the device.

A device family queues collectives. One that waits for a rank that is gone never ends, and what waits behind it (a loss to
be printed, the end of the process) cannot be woken. So each rank listens to the next one: nothing is said until that rank
leaves or fails, and a connection that closes says that it is gone. Who hears of a failure tells the rank that listens to
it, so that all know at once. A process whose device is stuck then says why and ends: nothing else is left to it.

From hearing of a failure to that end every step has a time limit. Whatever may block (telling, asking why, aborting, the
device, even writing the message) runs on a thread of its own, which nobody waits for beyond it.
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
"""Seconds that the device gets to finish once a rank has failed, and as many again for the reason to be found."""

_LEAVES, _FAILED = 0, 1
_NEVER = timedelta(days=1000)


class Aside:
    """A call on a thread of its own, because it may never return."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._returned = call, False
        self._over = threading.Event()
        try:
            threading.Thread(target=self._run, name="memferry-vigil-aside", daemon=True).start()
        except RuntimeError:  # no more threads: it will not return either
            self._over.set()

    def _run(self) -> None:
        with suppress(Exception):
            self._call()
            self._returned = True
        self._over.set()

    def wait(self, seconds: float | None) -> bool:
        """Whether it has returned, without an exception; blocks until it has, for so many seconds or until `abandon`."""
        self._over.wait(seconds)
        return self._returned

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._over.set()


class Vigil:
    """Listens on a thread of its own. Every rank makes one."""

    def __init__(self, ranks: Ranks, synchronize: Callable[[], None]) -> None:
        self._ranks, self._synchronize = ranks, synchronize
        # Used past torch.distributed's functions: it serves until the end, also when the program destroys its groups.
        self._group: Any = dist.new_group(backend="gloo", timeout=_NEVER)
        self.heard: BaseException | None = None
        """What told that another rank has failed."""
        self._lock = threading.Lock()
        self._telling: Aside | None = None
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
        explained = Aside(lambda: self._ranks.explain(error))
        if not Aside(self._free_device).wait(GRACE):
            explained.wait(GRACE)
            _end(f"memferry: {self._ranks.explanation(error)}\n")
        self._tell(_FAILED).abandon()  # a connection that closes says the same

    def _free_device(self) -> None:
        """Return when the device has done what it was given."""
        self._ranks.queued(GRACE)
        with suppress(Exception):
            self._ranks.abort()
        with suppress(Exception):  # a task's error comes up once, before anything is waited for
            self._synchronize()
        self._synchronize()

    def _tell(self, word: int) -> Aside:
        """Say the one thing that this rank ever says, to the rank that listens to it."""
        with self._lock:
            if self._telling is None:
                listener = (self._ranks.rank - 1) % self._ranks.size
                said = torch.tensor([word], dtype=torch.uint8)
                self._telling = Aside(lambda: self._group.send([said], listener, 0).wait())
            return self._telling

    def fail(self) -> None:
        """This rank has failed, or has heard of one that has. Does not wait until it is told."""
        self._failed = True
        self._tell(_FAILED)

    def leave(self) -> None:
        """What comes of this rank from now on is no failure."""
        self._tell(_LEAVES).wait(self._patience())
        atexit.unregister(self._at_exit)

    def join(self) -> None:
        """All ranks leave: block until the next one has said so."""
        self.leave()
        self._thread.join()

    def _at_exit(self) -> None:
        # First the device: until it is free a failure may be heard, and must be passed on.
        if self.heard is not None:
            self._thread.join()  # sees to the device, and says why it ends the process
        elif not Aside(self._synchronize).wait(self._patience()) and self._failed:
            _end()
        self._tell(_LEAVES).wait(self._patience())

    def _patience(self) -> float | None:
        """Seconds to wait for what ends by itself as long as no rank has failed; if one does, `_listen` sees to it."""
        return GRACE if self._failed else None


def _end(message: str = "") -> None:
    def say() -> None:
        # Past sys.stderr, which torch replaces while it prints a traceback.
        os.write(2, message.encode())
        sys.stdout.flush()
        sys.stderr.flush()

    try:
        Aside(say).wait(GRACE)
    finally:
        os._exit(1)
