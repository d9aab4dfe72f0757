"""Background host work in native code: the one-pass AdamW without ever taking the interpreter's lock.

A job waits for its events, updates and starts its upload in C++ (ops/worker.h). Where the device can wait for a word of host
memory, the launching thread does not even wait for an update: the compute stream does, so the host runs ahead as in plain
training.

Measured on an H200: with Python jobs the training thread and the worker take turns at every kernel launch, and BERT-base
takes 81 ms an iteration instead of 47.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memferry_ascend import hostmath, numa
from memferry_ascend.backends.base import Backend, Compute, Event, HostSlab, Stream
from memferry_ascend.errors import FerryError
from memferry_ascend.hostupdate import NativeUpdate
from memferry_ascend.jobs import Fold, Jobs, PythonJobs, Update, Upload
from memferry_ascend.worker import FAILED, Priority

if TYPE_CHECKING:
    from memferry_ascend.recorder import Recorder

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
        address = table.ctypes.data
        self._call("fold", self.units + unit, unit, Priority.FOLD, handles, address, len(table))

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

    def update(self, job: Update) -> None:
        update, upload = job.update, job.upload
        assert isinstance(update, NativeUpdate) and job.before is None
        address, count = update.prepare(job.part, job.summed, job.hypers)
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
        self._tickets[job.unit] += 1
        at = 64 * job.unit
        flag = (
            (self._host_flags + at, self._device_flags + at, self._tickets[job.unit])
            if self._flags
            else (0, 0, 0)
        )
        handles = [event.handle for event in job.waits]
        clear = [(grad.data_ptr(), grad.nbytes) for grad in job.clear]
        self._call("update", job.unit, job.priority, handles, address, count, job.scale, row, flag, clear)

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
