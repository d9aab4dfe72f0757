"""Background host work: gradient sums, norms and updates, first needed first.

One interface, two implementations: `PythonJobs` runs anything (every optimizer, every backend) on a Python thread,
`nativejobs.py` the one-pass AdamW in C++.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memferry_ascend import hostmath, numa
from memferry_ascend.backends.base import Backend, Compute, Event, Stream
from memferry_ascend.hostupdate import Hypers, UnitUpdate
from memferry_ascend.layers import Param
from memferry_ascend.worker import Priority, Worker

if TYPE_CHECKING:
    from memferry_ascend.recorder import Recorder


class Fold(NamedTuple):
    """An arrival to add to its sum; flat host tensors. `clear`: leave zeros where the gradient was."""

    acc: torch.Tensor
    grad: torch.Tensor
    first: bool
    clear: bool


@dataclass(eq=False)
class Scale:
    """What one step's updates multiply their gradients by; set by the norm job before any of them runs."""

    value: float = 1.0
    norm: float = -1.0


@dataclass(frozen=True)
class Upload:
    """A copy to start when an update is done: behind `after` (an event), with `done` recorded behind it."""

    stream: Stream
    dst: torch.Tensor
    src: torch.Tensor
    after: Event | None
    done: Event

    def start(self) -> None:
        if self.after is not None:
            self.stream.wait(self.after)
        self.stream.copy(self.dst, self.src)
        self.stream.record(self.done)


class Update(NamedTuple):
    """One unit's update: behind the events in `waits` call `before`, update the parameters in `part`, start `upload`, leave
    zeros in `clear` (gradients, consumed by now), call `then`."""

    unit: int
    priority: int
    waits: Sequence[Event]
    update: UnitUpdate
    part: Sequence[Param]
    summed: bool
    """The gradients are fp32 sums."""
    hypers: Hypers
    scale: Any
    upload: Upload | None
    then: Callable[[], None] | None
    before: Callable[[], None] | None
    clear: Sequence[torch.Tensor]


class Jobs(ABC):
    """Jobs of `units` units. An exception ends the background work and is raised in the user's thread by the next
    call, also by one that is waiting already."""

    @abstractmethod
    def fold(self, unit: int, waits: Sequence[Event], items: Sequence[Fold]) -> None:
        """Add arrivals to their fp32 sums, before any norm or update."""

    @abstractmethod
    def wait_folds(self, unit: int) -> None:
        """Block until the unit's folds are done."""

    @abstractmethod
    def norm(self, waits: Sequence[Event], pieces: Sequence[tuple[int, torch.Tensor]], limit: float) -> Any:
        """Compute the global norm of (parameter index, flat gradient) before any update; returns the scale it sets."""

    @abstractmethod
    def wait_norm(self) -> None: ...

    @abstractmethod
    def update(self, job: Update) -> None:
        """Queue an update, the lowest `priority` first."""

    @abstractmethod
    def updated(self, unit: int) -> bool:
        """True if no update of the unit is in flight."""

    @abstractmethod
    def ticket(self, unit: int) -> int:
        """How many updates of the unit were handed over so far."""

    @abstractmethod
    def wait_ticket(self, unit: int, ticket: int) -> None:
        """Block until that many of the unit's updates are done."""

    @abstractmethod
    def hold(self, unit: int, queue: Stream | Compute) -> bool:
        """Nothing queued on `queue` from now on runs before the unit's latest update is done. Returns True if its
        upload is covered too. Where the device cannot wait for the host, the calling thread does."""

    def next_epoch(self) -> None:
        """A step was handed over: its jobs come before whatever is submitted from now on."""
        return None

    device_waits: bool = False
    """`hold` never blocks the calling thread."""

    @abstractmethod
    def drain(self) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Raise what a job raised."""

    @abstractmethod
    def failure(self) -> str | None: ...

    @abstractmethod
    def close(self) -> None: ...

    calls_back = True
    """`before` and `then` of an update are called."""

    def on_failure(self, call: Callable[[], None]) -> None:
        """Have `call` called on the worker when a job fails; does nothing unless `calls_back`."""
        _ = call

    def new_scale(self, value: float = 1.0, norm: float = -1.0) -> Any:
        """A scale of this implementation's own kind."""
        return Scale(value, norm)


def factor(max_norm: float, norm: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies by; NaN stays NaN."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def combine(squares: dict[int, float]) -> float:
    """Norm of norms, each rounded to fp32 first, in registration order."""
    norms = torch.tensor([math.sqrt(squares[i]) for i in sorted(squares)], dtype=torch.float32)
    return math.sqrt(sum(float(x) ** 2 for x in norms))


class PythonJobs(Jobs):
    """On one Python thread."""

    def __init__(self, backend: Backend, units: int, recorder: Recorder) -> None:
        with numa.near(backend.node):
            self.worker = Worker(backend)
        self._backend = backend
        self._recorder = recorder
        self._folds = [0] * units
        self._updates = [0] * units
        self._tickets = [0] * units
        self._norms = 0

    def fold(self, unit: int, waits: Sequence[Event], items: Sequence[Fold]) -> None:
        self._folds[unit] += 1

        def job() -> None:
            for event in waits:
                event.synchronize()
            self._backend._at("fold")
            for item in items:
                hostmath.accumulate(item.acc, item.grad, item.first)
                if item.clear:
                    self._clear([item.grad])
            self._folds[unit] -= 1
            self.worker.notify()

        self.worker.submit(Priority.FOLD, job, unit, waits)

    def wait_folds(self, unit: int) -> None:
        self.worker.wait_for(lambda: self._folds[unit] == 0)

    def norm(self, waits: Sequence[Event], pieces: Sequence[tuple[int, torch.Tensor]], limit: float) -> Scale:
        scale = Scale()
        self._norms += 1

        def job() -> None:
            for event in waits:
                event.synchronize()
            scale.norm = combine({index: hostmath.sum_squares(grad) for index, grad in pieces})
            scale.value = factor(limit, scale.norm)
            self._norms -= 1
            self.worker.notify()

        self.worker.submit(Priority.NORM, job, waits=waits)
        return scale

    def wait_norm(self) -> None:
        self.worker.wait_for(lambda: self._norms == 0)

    def update(self, job: Update) -> None:
        unit = job.unit
        self._updates[unit] += 1
        self._tickets[unit] += 1

        def run() -> None:
            for event in job.waits:
                event.synchronize()
            self._backend._at("update")
            if job.before is not None:
                job.before()
            with self._recorder.host("update", str(unit)):
                job.update.run(job.part, job.summed, job.hypers, job.scale.value)
            if job.upload is not None:
                job.upload.start()
            self._clear(job.clear)
            self._updates[unit] -= 1
            if job.then is not None:
                job.then()
            self.worker.notify()

        self.worker.submit(job.priority, run, unit, job.waits)

    def _clear(self, consumed: Sequence[torch.Tensor]) -> None:
        for grad in consumed:
            self._backend._at("clear")
            grad.zero_()

    def updated(self, unit: int) -> bool:
        return self._updates[unit] == 0

    def ticket(self, unit: int) -> int:
        return self._tickets[unit]

    def wait_ticket(self, unit: int, ticket: int) -> None:
        self.worker.wait_for(lambda: self._tickets[unit] - self._updates[unit] >= ticket)

    def hold(self, unit: int, queue: Stream | Compute) -> bool:
        self.worker.wait_for(lambda: self._updates[unit] == 0)
        return False

    def drain(self) -> None:
        self.worker.drain()

    def check(self) -> None:
        self.worker.check()

    def failure(self) -> str | None:
        return None if self.worker.error is None else str(self.worker.error)

    def on_failure(self, call: Callable[[], None]) -> None:
        self.worker.on_failure = call

    def close(self) -> None:
        self.worker.close()
