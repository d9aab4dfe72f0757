"""The host worker: one thread that runs host updates and tells everybody how far it is.

Of the jobs that would not wait, the one that is needed first runs next. A backward pass hands units over last needed first,
so the job that is needed first is nearly always the newest, whose gradient is still being computed; waiting for it would
leave the thread idle while older gradients lie ready (ops/worker.h, the same in native code, has figures).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memferry_ascend.backends.base import Backend, Event
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


LOOKS = 8
"""Looks that find a job not ready, before later ones are taken to be so too."""


@dataclass(eq=False)
class _Job:
    priority: int
    run: Callable[[], None]
    unit: int | None
    waits: Sequence[Event]
    reached: bool = False

    def ready(self) -> bool:
        self.reached = self.reached or all(event.query() for event in self.waits)
        return self.reached


class Worker:
    """Runs jobs on one thread that never holds the interpreter lock while it waits or computes: its jobs spend their time in
    events and native code.

    A job's exception is kept, ends the worker's useful life, and is raised in the user's thread by the next call of
    `check` or `wait_for`, also by one that is already waiting.
    """

    def __init__(self, backend: Backend, name: str = "memferry-update") -> None:
        self._backend = backend
        self._cond = threading.Condition()
        self._jobs: list[_Job] = []
        """In the order they were handed over."""
        self._running = 0
        self._closing = False
        self.error: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        """Called once, on the worker, when a job has failed: wakes others who wait for what will not come."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, priority: int, job: Callable[[], None], unit: int | None = None, waits: Sequence[Event] = ()
    ) -> None:
        """Queue a job that begins by waiting for `waits`. Jobs of one unit run in the order they were handed over; one of no
        unit runs behind everything before it and before everything after it. Raises what an earlier job raised."""
        with self._cond:
            self._raise()
            if self._closing:
                raise FerryError("the engine is closed")
            self._jobs.append(_Job(priority, job, unit, waits))
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
                job = self._choose()
                self._jobs.remove(job)
                self._running += 1
            try:
                if self.error is None:
                    job.run()
            except BaseException as e:
                self._fail(e)
            with self._cond:
                self._running -= 1
                self._cond.notify_all()

    def _choose(self) -> _Job:
        """Of the jobs that may run and would not wait, the one needed first; of none, the one handed over first, because
        streams reach its events first."""
        best: _Job | None = None
        units: set[int | None] = set()
        missed = 0
        for i, job in enumerate(self._jobs):
            if missed == LOOKS or (job.unit is None and i > 0):
                break
            if job.unit in units:
                continue
            units.add(job.unit)
            if not job.ready():
                missed += 1
            elif best is None or job.priority < best.priority:
                best = job
            if job.unit is None:
                break
        return best or self._jobs[0]

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
