"""Background host work: gradient sums, norms and updates, first needed first.

Two implementations of one interface. `PythonJobs` runs anything (every optimizer, every backend) on a Python thread.
`NativeJobs` runs the one-pass AdamW without ever taking the interpreter's lock: the job waits for its events, updates
and starts its upload in C++. Where the device can wait for a word of host memory, the launching thread does not even
wait for an update: the compute stream does, so the host runs ahead as in plain training.

Measured on an H200: with Python jobs the training thread and the worker take turns at every kernel launch, and BERT-base
takes 81 ms an iteration instead of 47.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from memferry_ascend import hostmath, numa
from memferry_ascend.backends.base import Backend, Compute, Event, HostSlab, Stream
from memferry_ascend.errors import FerryError
from memferry_ascend.hostupdate import Hypers, NativeUpdate, UnitUpdate
from memferry_ascend.layers import Param
from memferry_ascend.worker import FAILED, Priority, Worker

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
    def update(
        self,
        unit: int,
        priority: int,
        waits: Sequence[Event],
        update: UnitUpdate,
        part: Sequence[Param],
        summed: bool,
        hypers: Hypers,
        scale: Any,
        upload: Upload | None,
        then: Callable[[], None] | None,
        before: Callable[[], None] | None = None,
        clear: Sequence[torch.Tensor] = (),
    ) -> None:
        """Call `before`, update a unit behind `waits`, start `upload`, leave zeros in `clear` (gradients, consumed by
        now), call `then`."""

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

        self.worker.submit(Priority.FOLD, job)

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

        self.worker.submit(Priority.NORM, job)
        return scale

    def wait_norm(self) -> None:
        self.worker.wait_for(lambda: self._norms == 0)

    def update(
        self,
        unit: int,
        priority: int,
        waits: Sequence[Event],
        update: UnitUpdate,
        part: Sequence[Param],
        summed: bool,
        hypers: Hypers,
        scale: Any,
        upload: Upload | None,
        then: Callable[[], None] | None,
        before: Callable[[], None] | None = None,
        clear: Sequence[torch.Tensor] = (),
    ) -> None:
        self._updates[unit] += 1
        self._tickets[unit] += 1

        def job() -> None:
            for event in waits:
                event.synchronize()
            self._backend._at("update")
            if before is not None:
                before()
            with self._recorder.host("update", str(unit)):
                update.run(part, summed, hypers, scale.value)
            if upload is not None:
                upload.start()
            self._clear(clear)
            self._updates[unit] -= 1
            if then is not None:
                then()
            self.worker.notify()

        self.worker.submit(priority, job)

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


_FOLD = np.dtype(
    [
        ("acc", np.uint64),
        ("grad", np.uint64),
        ("numel", np.int64),
        ("bf16", np.uint32),
        ("first", np.uint32),
        ("clear", np.uint64),
    ]
)
_PIECE = np.dtype([("grad", np.uint64), ("numel", np.int64), ("index", np.int64), ("bf16", np.uint64)])


class NativeJobs(Jobs):
    """On one native thread (ops/worker.h). Needs a backend with a driver and the native AdamW. `then` is not called:
    who needs it asks `updated` instead."""

    calls_back = False

    def __init__(self, backend: Backend, driver: Any, units: int) -> None:
        from memferry_ascend import _ops  # type: ignore[attr-defined]

        assert _FOLD.itemsize == _ops.FOLD_BYTES
        assert _PIECE.itemsize == _ops.PIECE_BYTES
        self._ops = _ops
        self.units = units
        with numa.near(backend.node):
            self.worker = _ops.Worker(driver, 2 * units + 1)
        self._backend = backend
        self._tickets = [0] * units
        self.observe: Callable[[Upload], tuple[int, int]] | None = None
        """While somebody records: gives the handles of two timing events to record around an upload."""
        self._flags: HostSlab | None = None
        self._host_flags = self._device_flags = 0
        if backend.device_waits:
            self._flags = backend.alloc_host(64 * units, mapped=True)  # a cache line for each
            assert self._flags.device is not None
            self._host_flags, self._device_flags = self._flags.host.data_ptr(), self._flags.device.data_ptr()
        self.device_waits = self._flags is not None

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self.worker, name)(*args)
        except RuntimeError as e:
            raise FerryError(f"a host update failed: {e}. {FAILED}") from e

    def fold(self, unit: int, waits: Sequence[Event], items: Sequence[Fold]) -> None:
        table = np.array(
            [
                (a.data_ptr(), g.data_ptr(), g.numel(), g.dtype is torch.bfloat16, first, clear)
                for a, g, first, clear in items
            ],
            _FOLD,
        )
        handles = [event.handle for event in waits]
        self._call("fold", self.units + unit, Priority.FOLD, handles, table.ctypes.data, len(table))

    def wait_folds(self, unit: int) -> None:
        self._call("wait", self.units + unit)

    def norm(self, waits: Sequence[Event], pieces: Sequence[tuple[int, torch.Tensor]], limit: float) -> Any:
        scale = self._ops.Scale()
        table = np.array(
            [(g.data_ptr(), g.numel(), index, g.dtype is torch.bfloat16) for index, g in pieces], _PIECE
        )
        handles = [event.handle for event in waits]
        self._call(
            "norm", 2 * self.units, Priority.NORM, handles, table.ctypes.data, len(table), limit, scale
        )
        return scale

    def wait_norm(self) -> None:
        self._call("wait", 2 * self.units)

    def update(
        self,
        unit: int,
        priority: int,
        waits: Sequence[Event],
        update: UnitUpdate,
        part: Sequence[Param],
        summed: bool,
        hypers: Hypers,
        scale: Any,
        upload: Upload | None,
        then: Callable[[], None] | None,
        before: Callable[[], None] | None = None,
        clear: Sequence[torch.Tensor] = (),
    ) -> None:
        assert isinstance(update, NativeUpdate) and before is None
        address, count = update.prepare(part, summed, hypers)
        row = (0,) * 8
        if upload is not None:
            row = (
                upload.dst.data_ptr(),
                upload.src.data_ptr(),
                upload.src.numel() * upload.src.element_size(),
                upload.stream.handle,
                upload.after.handle if upload.after is not None else 0,
                upload.done.handle,
                *(self.observe(upload) if self.observe is not None else (0, 0)),
            )
        self._tickets[unit] += 1
        at = 64 * unit
        flag = (
            (self._host_flags + at, self._device_flags + at, self._tickets[unit])
            if self._flags
            else (0, 0, 0)
        )
        self._call(
            "update",
            unit,
            priority,
            [event.handle for event in waits],
            address,
            count,
            scale,
            row,
            flag,
            [(grad.data_ptr(), grad.nbytes) for grad in clear],
        )

    def updated(self, unit: int) -> bool:
        return self.worker.done(unit)

    def next_epoch(self) -> None:
        self.worker.next_epoch()

    def ticket(self, unit: int) -> int:
        return self._tickets[unit]

    def wait_ticket(self, unit: int, ticket: int) -> None:
        if self._tickets[unit] and ticket:
            self._call("wait_count", unit, ticket)

    def hold(self, unit: int, queue: Stream | Compute) -> bool:
        if self._flags is None:
            self._call("wait", unit)
            return False
        queue.wait_word(self._device_flags + 64 * unit, self._tickets[unit])
        return True

    def drain(self) -> None:
        self._call("drain")

    def check(self) -> None:
        if self.worker.error():
            raise FerryError(f"a host update failed: {self.worker.error()}. {FAILED}")

    def failure(self) -> str | None:
        return self.worker.error() or None

    def close(self) -> None:
        self.worker.close()
        if self._flags is not None:
            self._backend.synchronize()  # streams still write the words
            self._backend.free_host(self._flags)
            self._flags = None

    def new_scale(self, value: float = 1.0, norm: float = -1.0) -> Any:
        scale = self._ops.Scale()
        scale.value, scale.norm = value, norm
        return scale


def make_jobs(backend: Backend, units: int, recorder: Recorder, native: bool) -> Jobs:
    """Native jobs where the optimizer and the backend allow, Python's otherwise."""
    driver = backend.driver() if native and hostmath.NATIVE else None
    if driver is not None:
        return NativeJobs(backend, driver, units)
    return PythonJobs(backend, units, recorder)
