"""The CPU backend: the embedded default, and the place where ordering mistakes show.

"Device" memory is separate storage with a byte limit, copies run on one worker thread per stream, and nothing orders
two streams but events, exactly as on an accelerator. Compute is synchronous: it runs on the calling thread, so waiting
on the compute stream blocks the caller. Activations live in ordinary memory and are not counted against the limit.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from memferry_ascend import sizes
from memferry_ascend.backends.base import (
    DIRECT_KINDS,
    Backend,
    Capabilities,
    Compute,
    DeviceOutOfMemory,
    Event,
    HostSlab,
    MemoryStats,
    Stream,
    align,
)
from memferry_ascend.backends.hostmem import Pages, nameless
from memferry_ascend.backends.loans import Borrowed, Loan
from memferry_ascend.errors import FerryError


class CpuEvent(Event):
    """Counts recordings; a waiter waits for the recording that was latest when it began to wait."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._recorded = 0
        self._reached = 0
        self._time = 0.0
        self._error: BaseException | None = None

    def mark(self) -> int:
        """Host side of `record`: returns the number of this recording."""
        with self._cond:
            self._recorded += 1
            return self._recorded

    def latest(self) -> int:
        with self._cond:
            return self._recorded

    def reach(self, number: int, error: BaseException | None) -> None:
        with self._cond:
            self._reached = max(self._reached, number)
            self._time = time.perf_counter()
            self._error = error
            self._cond.notify_all()

    def wait_for(self, number: int) -> None:
        with self._cond:
            self._cond.wait_for(lambda: self._reached >= number)
            if self._error is not None:
                raise FerryError(f"a copy before this event failed: {self._error}") from self._error

    def synchronize(self) -> None:
        self.wait_for(self.latest())

    def query(self) -> bool:
        with self._cond:
            return self._reached >= self._recorded

    def elapsed(self, later: Event) -> float:
        assert isinstance(later, CpuEvent)
        return later._time - self._time


class CpuStream(Stream):
    """A worker thread that runs queued copies in order."""

    def __init__(self, backend: CpuBackend, name: str) -> None:
        self.name = name
        self._backend = weakref.ref(backend)
        self._queue: deque[Callable[[], None] | None] = deque()
        self._cond = threading.Condition()
        self._busy = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"memferry-cpu-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            # Kept for the thread that waits; later tasks still run their events, whatever hit this thread.
            try:
                with self._cond:
                    self._busy = False
                    self._cond.notify_all()
                    self._cond.wait_for(lambda: len(self._queue) > 0)
                    task = self._queue.popleft()
                    self._busy = True
                if task is None:
                    return
                task()
            except BaseException as e:
                self._error = self._error or e

    def _push(self, task: Callable[[], None] | None) -> None:
        with self._cond:
            self._queue.append(task)
            self._cond.notify_all()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if dst.numel() != src.numel() or dst.dtype != src.dtype:
            raise FerryError(
                f"copy: expected equal numel and dtype, got {dst.numel()} {dst.dtype} <- {src.numel()} {src.dtype}"
            )

        def task() -> None:
            backend = self._backend()
            if backend is not None:
                backend._at(f"copy:{self.name}")
            if self.carrier is not None and self.carrier(self, dst, src):
                return
            with torch.no_grad():
                dst.copy_(src)

        self._push(task)

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        number = event.mark()
        self._push(lambda: event.reach(number, self._error))

    def wait(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        number = event.latest()
        if number:
            self._push(lambda: event.wait_for(number))

    def synchronize(self) -> None:
        with self._cond:
            self._cond.wait_for(lambda: not self._queue and not self._busy)
        # Raised once: the next engine on this backend starts with a clean stream.
        error, self._error = self._error, None
        if error is not None:
            raise FerryError(f"stream {self.name!r} failed: {error}") from error

    def stop(self) -> None:
        self._push(None)
        self._thread.join()


class CpuCompute(Compute):
    """The calling thread. Whatever it has run is done, so a recording is reached at once."""

    def record(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        event.reach(event.mark(), None)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return None


class CpuLoan(Loan):
    """Pages that count as this device's memory."""

    def __init__(self, backend: CpuBackend, nbytes: int) -> None:
        backend._take(nbytes)
        self._backend, self._nbytes = backend, nbytes
        try:
            self.file: int | None = nameless(nbytes)
            self._pages = Pages(nbytes, file=self.file)
        except BaseException:
            backend._freed(nbytes)
            raise

    def carry(self, at: int, host: torch.Tensor, to_device: bool) -> None:
        self._backend._at("lend:h2d" if to_device else "lend:d2h")
        staged = self._pages.tensor[at : at + host.numel()]
        with torch.no_grad():
            if to_device:
                staged.copy_(host)
            else:
                host.copy_(staged)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None
            self._pages.close()
            self._backend._freed(self._nbytes)


class CpuBorrowed(Borrowed):
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def part(self, at: int, nbytes: int) -> torch.Tensor:
        return self._pages.tensor[at : at + nbytes]

    def close(self) -> None:
        self._pages.close()


class CpuBackend(Backend):
    """`limit` bounds the bytes the engine may hold as device memory (buffers, slots, kept gradients)."""

    name = "cpu"
    carries = lends = True
    queues = False
    swaps = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.compute = CpuCompute()
        self.limit = limit if limit is not None else 1 << 62
        self._lock = threading.Lock()
        self._allocated = 0
        self._peak = 0

    def alloc_host(
        self, nbytes: int, *, mapped: bool, shared: str | None = None, file: int | None = None
    ) -> HostSlab:
        pages = Pages(align(nbytes, 4096), shared, self.node, file)
        # The device face is a second tensor over the same bytes: same memory, another object.
        device = pages.tensor.view(-1) if mapped else None
        return HostSlab(nbytes, pages.tensor[:nbytes], device[:nbytes] if device is not None else None, pages)

    def free_host(self, slab: HostSlab) -> None:
        pages = slab.handle
        assert isinstance(pages, Pages)
        slab.host = slab.device = torch.empty(0, dtype=torch.uint8)
        pages.close()

    def alloc_device(self, nbytes: int) -> torch.Tensor:
        nbytes = align(nbytes)
        self._take(nbytes)
        # 64 bytes are what torch gives; ask for more and start on our own alignment.
        raw = torch.empty(nbytes + 512, dtype=torch.uint8)
        skip = -raw.data_ptr() % 512
        weakref.finalize(raw.untyped_storage(), self._freed, nbytes)
        return raw[skip : skip + nbytes]

    def _take(self, nbytes: int) -> None:
        with self._lock:
            if self._allocated + nbytes > self.limit:
                raise DeviceOutOfMemory(
                    f"device memory: asked for {sizes.fmt(nbytes)} with {sizes.fmt(self._allocated)} of "
                    f"{sizes.fmt(self.limit)} in use; raise the limit or give the engine a smaller device_memory"
                )
            self._allocated += nbytes
            self._peak = max(self._peak, self._allocated)

    def _freed(self, nbytes: int) -> None:
        with self._lock:
            self._allocated -= nbytes

    def memory_stats(self) -> MemoryStats:
        with self._lock:
            return MemoryStats(self._allocated, self._peak, self.limit, self.limit - self._allocated)

    def reset_peak(self) -> None:
        with self._lock:
            self._peak = self._allocated

    def lend(self, nbytes: int, borrower: int) -> CpuLoan:
        return CpuLoan(self, align(nbytes, 4096))

    def borrow(self, key: str, file: int | None, nbytes: int, owner: int) -> CpuBorrowed:
        if file is None:
            raise FerryError("the lender sent no descriptor of its memory")
        return CpuBorrowed(Pages(align(nbytes, 4096), file=file))

    def _new_stream(self, name: str) -> Stream:
        return CpuStream(self, name)

    def event(self, *, timing: bool = False) -> Event:
        return CpuEvent()

    def hold(self, streams: Sequence[Stream]) -> Callable[[], None]:
        gate = CpuEvent()
        number = gate.mark()
        for stream in streams:
            stream.wait(gate)
        return lambda: gate.reach(number, None)

    def bind_thread(self, *, own_stream: bool = False) -> None:
        return None

    def synchronize(self) -> None:
        errors = []
        for stream in list(self._streams.values()):
            try:
                stream.synchronize()
            except FerryError as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dha_kinds=frozenset({"*"}),
            direct_kinds=DIRECT_KINDS,
            swap_storage=self.swaps,
            notes=("host and device memory are both ordinary memory; copies run on worker threads",),
        )

    def close(self) -> None:
        for stream in self._streams.values():
            assert isinstance(stream, CpuStream)
            stream.stop()
        super().close()
