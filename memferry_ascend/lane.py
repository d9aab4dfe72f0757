"""The lane: one thread that issues every collective of training, in the order in which the user's thread asked.

Collectives must be issued in the same order on all ranks. The user's thread asks in an order that does not depend on
timing, and this thread takes one job after the other: it may wait for the host worker or for a peer without holding
up the backward pass. On a device family it issues on a stream of its own (its thread's current stream, which
`backend.compute` therefore means here), and rarely blocks; with gloo it blocks in each collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from memferry_ascend.backends.base import Backend
from memferry_ascend.errors import FerryError, PeerError
from memferry_ascend.parallel import Ranks
from memferry_ascend.worker import Worker


class Abandoned(PeerError):
    """The engine was closed before the other ranks came to a collective."""


class Lane:
    """Waits are on the worker's condition, so that one failure, wherever it happened, wakes everybody."""

    def __init__(self, ranks: Ranks, backend: Backend, worker: Worker) -> None:
        self._ranks = ranks
        self._backend = backend
        self._worker = worker
        self._jobs: deque[Callable[[], None]] = deque()
        self._asked = 0
        self._done = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="memferry-lane", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> int:
        """Queue a job; returns its number."""
        self._worker.check()
        self._jobs.append(job)
        self._asked += 1
        self._worker.notify()
        return self._asked

    def call(self, job: Callable[[], None]) -> None:
        """Queue a job and wait until it has run."""
        self.finish(self.submit(job))

    def finish(self, number: int | None = None) -> None:
        """Block until job `number` (the last one) has run."""
        target = self._asked if number is None else number
        self._worker.wait_for(lambda: self._done >= target)

    def wait(self, work: Any) -> None:
        """Lane's thread: a collective's result is there, or is ordered before what this thread's stream runs next."""
        if self._backend.device.type == "cpu" or self._ranks.staged:
            future = work.get_future()
            future.add_done_callback(lambda _f: self._worker.notify())
            self._worker.wait_for(lambda: future.done() or self._closing)
            if not future.done():
                raise Abandoned("the engine was closed while other ranks were still to come")
        work.wait()

    def _work(self) -> None:
        self._backend.bind_thread(own_stream=True)
        while True:
            try:
                self._worker.wait_for(lambda: len(self._jobs) > 0 or self._closing)
                if self._closing:
                    return
                self._jobs.popleft()()
            except BaseException as e:
                if self._worker.error is None:
                    self._worker.fail(e if isinstance(e, FerryError) else self._ranks.explain(e))
                    self._ranks.abort()
                return
            self._done += 1
            self._worker.notify()

    @property
    def idle(self) -> bool:
        """Every job has run."""
        return self._done == self._asked

    def close(self) -> None:
        """Drop what is queued, leave a collective that peers have not joined, and end the thread."""
        self._closing = True
        self._worker.notify()
        self._thread.join()
