"""A lane: a thread that issues collectives in the order in which the user's thread asked.

There are two, each with a process group of its own: one for gradients and updated parameters, one for loads (`loads.py`),
which must not wait behind updates. Collectives of a group must be issued in the same order on all ranks. The user's thread
asks in an order that does not depend on timing, and a lane takes one job after the other: it may wait for the host worker
or for a peer without holding up the backward pass. On a device family it issues on a stream of its own (its thread's
current stream, which `backend.compute` therefore means here), and rarely blocks; with gloo it blocks in each collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from memferry_ascend.backends.base import Backend, Compute, Event, Stream
from memferry_ascend.errors import FerryError, PeerError
from memferry_ascend.parallel import LOOK, Ranks
from memferry_ascend.worker import Worker


class LaneEvent(Event):
    """An event that the lane records some time after the user's thread has asked for it: waiting waits for both."""

    def __init__(self, inner: Event, worker: Worker) -> None:
        self.inner = inner
        self._worker = worker
        self._asked = self._issued = 0

    def ask(self) -> None:
        """User's thread: one more recording is to come."""
        self._asked += 1

    def issued(self) -> None:
        """Lane: it was recorded."""
        self._issued += 1
        self._worker.notify()

    def wait_issued(self) -> None:
        """Block until everything asked for so far has been recorded."""
        target = self._asked
        self._worker.wait_for(lambda: self._issued >= target)

    def record_now(self, stream: Stream) -> None:
        """User's thread: a recording of its own."""
        self.ask()
        stream.record(self.inner)
        self.issued()

    def hold(self, stream: Stream | Compute) -> None:
        """What is queued on `stream` from now on runs after everything asked for so far."""
        self.wait_issued()
        stream.wait(self.inner)

    def synchronize(self) -> None:
        self.wait_issued()
        self.inner.synchronize()

    def query(self) -> bool:
        return self._issued == self._asked and self.inner.query()

    def elapsed(self, later: Event) -> float:
        return self.inner.elapsed(later.inner if isinstance(later, LaneEvent) else later)


class Abandoned(PeerError):
    """The engine was closed before the other ranks came to a collective."""


class Lane:
    """Waits are on the worker's condition, so that one failure, wherever it happened, wakes everybody."""

    def __init__(self, ranks: Ranks, backend: Backend, worker: Worker, name: str) -> None:
        self._ranks = ranks
        self._backend = backend
        self._worker = worker
        self._jobs: deque[Callable[[], None]] = deque()
        self.asked = 0
        """Jobs queued so far."""
        self._done = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"memferry-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> int:
        """Queue a job; returns its number."""
        self._worker.check()
        self._jobs.append(job)
        self.asked += 1
        self._worker.notify()
        return self.asked

    def call(self, job: Callable[[], None]) -> None:
        """Queue a job and wait until it has run."""
        self.finish(self.submit(job))

    def finish(self, number: int | None = None) -> None:
        """Block until job `number` (the last one) has run."""
        target = self.asked if number is None else number
        self._worker.wait_for(lambda: self._done >= target)

    def wait(self, work: Any) -> None:
        """Lane's thread: a collective's result is there, or is ordered before what this thread's stream runs next."""
        future = work.get_future()
        if not future.done():  # on a device it is as soon as the collective is queued
            future.add_done_callback(lambda _f: self._worker.notify())
            while not self._worker.wait_for(lambda: future.done() or self._closing, LOOK):
                self._ranks.look()
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
                self._ranks.check()
                self._jobs.popleft()()
            except BaseException as e:
                if self._closing and isinstance(e, Abandoned):
                    return
                if self._worker.error is None:
                    self._worker.fail(e if isinstance(e, FerryError) else self._ranks.explain(e))
                    self._ranks.abort()
                return
            self._done += 1
            self._worker.notify()

    @property
    def idle(self) -> bool:
        """Every job has run."""
        return self._done == self.asked

    def close(self) -> None:
        """Drop what is queued, leave a collective that peers have not joined, and end the thread."""
        self._closing = True
        self._worker.notify()
        self._thread.join()
