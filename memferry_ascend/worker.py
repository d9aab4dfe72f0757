"""The host worker: one thread that runs host updates, first needed first, and tells everybody how far it is."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from memferry_ascend.backends.base import Backend
from memferry_ascend.errors import FerryError, PeerError

FAILED = (
    "Parameters updated before it hold the new values, the others the old ones; go back to the last checkpoint, then "
    "close and ferry the model again"
)
"""What a user can do after a failed update."""


class Priority:
    """Lower runs first. Updates use their unit's position in the forward pass, 0 and up."""

    FOLD = -2
    """A sum must be complete before anything reads it."""
    NORM = -1
    """Every update needs the norm."""


class Worker:
    """Runs jobs by priority (lower first, then in order of arrival) on one thread that never holds the interpreter
    lock while it waits or computes: its jobs spend their time in events and native code.

    A job's exception is kept, ends the worker's useful life, and is raised in the user's thread by the next call of
    `check` or `wait_for`, also by one that is already waiting.
    """

    def __init__(self, backend: Backend, name: str = "memferry-update") -> None:
        self._backend = backend
        self._cond = threading.Condition()
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._running = 0
        self._closing = False
        self.error: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        """Called once, on the worker, when a job has failed: wakes others who wait for what will not come."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, priority: int, job: Callable[[], None]) -> None:
        """Queue a job. Raises what an earlier job raised."""
        with self._cond:
            self._raise()
            if self._closing:
                raise FerryError("the engine is closed")
            heapq.heappush(self._jobs, (priority, next(self._sequence), job))
            self._cond.notify_all()

    def _work(self) -> None:
        # Whatever ends this thread must be known to those who wait for it, or they wait for ever.
        try:
            self._backend.bind_thread()
            self._run_jobs()
        except BaseException as e:
            self._fail(e)
        finally:
            if not self._closing and self.error is None:
                self._fail(RuntimeError("the worker thread ended by itself"))

    def _fail(self, error: BaseException) -> None:
        with self._cond:
            if self.error is None:
                self.error = error
            self._cond.notify_all()
        if self.on_failure is not None:
            self.on_failure()

    def _run_jobs(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._jobs or self._closing)
                if self._closing and (not self._jobs or self.error is not None):
                    return
                _, _, job = heapq.heappop(self._jobs)
                self._running += 1
            try:
                if self.error is None:
                    job()
            except BaseException as e:
                self._fail(e)
            with self._cond:
                self._running -= 1
                self._cond.notify_all()

    def notify(self) -> None:
        """A job changed something that `wait_for` conditions look at."""
        with self._cond:
            self._cond.notify_all()

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Block until `condition()` holds, or so many seconds, and return whether it does; raises what a job raised.
        Conditions are plain reads."""
        if condition() and self.error is None:
            return True
        with self._cond:
            holds = self._cond.wait_for(lambda: self.error is not None or condition(), seconds)
            self._raise()
            return holds

    def drain(self) -> None:
        """Block until every job queued so far is done."""
        self.wait_for(lambda: not self._jobs and self._running == 0)

    def check(self) -> None:
        """Raise what a job raised."""
        if self.error is not None:
            with self._cond:
                self._raise()

    def fail(self, error: BaseException) -> None:
        """Another thread of the engine failed: everybody who waits here must know. The first error stays."""
        self._fail(error)

    def _raise(self) -> None:
        if isinstance(self.error, PeerError):
            raise self.error
        if self.error is not None:
            raise FerryError(f"a host update failed: {self.error}. {FAILED}") from self.error

    def close(self) -> None:
        """Finish queued jobs (or drop them after a failure) and join the thread. Never raises a job's exception."""
        with self._cond:
            self._closing = True
            self._cond.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
