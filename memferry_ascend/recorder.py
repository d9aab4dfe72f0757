"""What really ran when: intervals on the worker and on every stream, at no cost while off."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from memferry_ascend.backends.base import Backend


@dataclass(frozen=True)
class Interval:
    """Seconds on one resource, relative to the recorder's start."""

    resource: str
    name: str
    start: float
    end: float
    nbytes: int = 0


class Recorder:
    """Collects intervals between `start()` and `stop()`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self.enabled = False
        self.intervals: list[Interval] = []
        self._origin = 0.0

    def start(self) -> None:
        """Forget earlier intervals and begin."""
        with self._lock:
            self.intervals = []
            self._origin = time.perf_counter()
            self.enabled = True

    def stop(self) -> None:
        self.enabled = False

    @contextlib.contextmanager
    def host(self, resource: str, name: str, nbytes: int = 0) -> Iterator[None]:
        """Record the body's time on a host resource."""
        if not self.enabled:
            yield
            return
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        with self._lock:
            self.intervals.append(Interval(resource, name, start - self._origin, end - self._origin, nbytes))

    def close(self) -> None:
        self.stop()
