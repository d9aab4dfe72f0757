"""The CUDA backend: registered host pages seen as CUDA tensors over the same bytes, one stream per direction.

Host memory is mapped pages registered with `cudaHostRegister(portable | mapped)`; under unified addressing the device
pointer equals the host pointer, and `__cuda_array_interface__` makes a tensor of it. torch's pinned caching allocator
is never used: it rounds to powers of two.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memferry_ascend import sizes
from memferry_ascend.backends.base import (
    DIRECT_KINDS,
    Backend,
    Capabilities,
    Compute,
    Event,
    HostSlab,
    MemoryStats,
    QueuedStream,
    Stream,
    align,
)
from memferry_ascend.backends.cuda_adam import CudaAdam
from memferry_ascend.backends.cuda_relay import CudaRelays
from memferry_ascend.backends.hostmem import Pages
from memferry_ascend.errors import FerryError

_PORTABLE, _MAPPED = 1, 2


def _load_driver(index: int) -> Any:
    """The CUDA runtime for native code, or None when the extension was not built."""
    try:
        from memferry_ascend import _ops  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _ops.Driver("cuda", "", index)


class _DeviceView:
    """What torch needs to know to make a tensor of mapped host memory."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        self._owner = owner


class CudaEvent(Event):
    """Host waits block the thread instead of spinning: the cores are for updates. Not those of timing events: what wakes a
    thread is work of the stream's too, and would be part of what is timed."""

    def __init__(self, timing: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timing, blocking=not timing)
        self.event.record()  # torch creates the runtime's event at the first recording
        self.handle = self.event.cuda_event

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return self.event.query()

    def elapsed(self, later: Event) -> float:
        assert isinstance(later, CudaEvent)
        return self.event.elapsed_time(later.event) / 1e3


class CudaStream(QueuedStream):
    def __init__(self, backend: CudaBackend, name: str) -> None:
        self.name = name
        self._backend = backend
        # High priority: an urgent upload is what the next kernel waits for.
        self.stream = torch.cuda.Stream(backend.device, priority=-1)
        self.handle = self.stream.cuda_stream

    def copy_direct(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        driver = self._backend.driver()
        if driver is not None and self._backend.disturb is None:
            driver.batch(*self._rows(pairs), self.handle, 0, 0, 0)
            return
        with torch.cuda.stream(self.stream), torch.no_grad():
            self._backend._at(f"copy:{self.name}")
            for dst, src in pairs:
                self._backend.check_registered(dst)
                self._backend.check_registered(src)
                dst.copy_(src, non_blocking=True)

    def wait_word(self, address: int, value: int) -> None:
        self._backend.driver().wait_value(self.handle, address, value)

    def copy_behind(
        self, compute: Compute, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], ready: Event, done: Event
    ) -> None:
        driver = self._backend.driver()
        if driver is None or self._backend.disturb is not None or self.carrier is not None:
            super().copy_behind(compute, pairs, ready, done)
            return
        now = torch._C._cuda_getCurrentRawStream(self._backend.device.index)
        driver.batch(*self._rows(pairs), self.handle, now, ready.handle, done.handle)

    def _rows(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[list[tuple[int, int, int]], int]:
        """(destination, source, bytes) of each copy, and the direction they share. On the path of every gradient."""
        up = not pairs[0][1].is_cuda
        down = not pairs[0][0].is_cuda
        check = self._backend.check_address
        rows = []
        for dst, src in pairs:
            to, from_, nbytes = dst.data_ptr(), src.data_ptr(), src.nbytes
            if dst.nbytes != nbytes or not (dst.is_contiguous() and src.is_contiguous()):
                raise FerryError(
                    f"copy: expected contiguous tensors of equal size, got {dst.nbytes} <- {nbytes} bytes"
                )
            if up:
                check(from_, nbytes)
            if down:
                check(to, nbytes)
            rows.append((to, from_, nbytes))
        return rows, 1 if up else 2 if down else 3

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.event.record(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaCompute(Compute):
    """torch's current stream of the calling thread."""

    def __init__(self, device: torch.device, driver: Any) -> None:
        self._device = device
        self._driver = driver

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        if self._driver is not None:
            self._driver.record(event.handle, torch._C._cuda_getCurrentRawStream(self._device.index))
        else:
            event.event.record(torch.cuda.current_stream(self._device))

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        if self._driver is not None:
            self._driver.wait(torch._C._cuda_getCurrentRawStream(self._device.index), event.handle)
        else:
            torch.cuda.current_stream(self._device).wait_event(event.event)

    def wait_word(self, address: int, value: int) -> None:
        self._driver.wait_value(torch._C._cuda_getCurrentRawStream(self._device.index), address, value)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def _driver_version() -> str:
    version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(version()) if version is not None else "unknown"


class CudaBackend(Backend):
    """One CUDA device."""

    name = "cuda"
    carries = queues_relays = True

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise FerryError(
                "backend 'cuda': torch sees no CUDA device; expected a CUDA build of torch and a driver "
                f"(torch {torch.__version__}); use backend='cpu' without one"
            )
        if index >= torch.cuda.device_count():
            raise FerryError(
                f"backend 'cuda': rank wants device {index}, the machine has {torch.cuda.device_count()}; start fewer "
                "processes per node"
            )
        # A stream that waits for a word must not share a hardware queue with the copy that it waits for.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        self._driver = _load_driver(index)
        self.compute = CudaCompute(self.device, self._driver)
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._relays = CudaRelays(self)
        self.device_waits = self._can_wait()
        self._adam: CudaAdam | None = None
        self._adam_failure: str | None = None

    def _can_wait(self) -> bool:
        """Try it: a word written and awaited in stream order. Only with MEMFERRY_DEVICE_WAITS=1: a host call that
        synchronises the context (the first launch of a kernel under lazy loading) then blocks the worker that the
        device waits for, and training hung on an H200 (docs/notes.md)."""
        if (
            os.environ.get("MEMFERRY_DEVICE_WAITS") != "1"
            or self._driver is None
            or not self._driver.has_values()
        ):
            return False
        slab = self.alloc_host(4096, mapped=True)
        assert slab.device is not None
        word = slab.host[:4].view(torch.int32)
        stream = torch.cuda.Stream(self.device)
        try:
            self._driver.write_value(stream.cuda_stream, slab.device.data_ptr(), 7)
            self._driver.wait_value(stream.cuda_stream, slab.device.data_ptr(), 7)
            stream.synchronize()
            return int(word) == 7
        except RuntimeError:
            return False
        finally:
            self.free_host(slab)

    def driver(self) -> Any:
        return self._driver

    def fused_adam(self) -> CudaAdam | None:
        if self._adam is None and self._adam_failure is None:
            try:
                self._adam = CudaAdam(self.device)
            except FerryError as e:
                self._adam_failure = str(e)
        return self._adam

    def pci_address(self) -> str | None:
        found: Any = torch.cuda.get_device_properties(self.device)
        if not hasattr(found, "pci_domain_id"):
            return None
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    # -- memory ----------------------------------------------------------------------------------------------------
    def alloc_host(
        self, nbytes: int, *, mapped: bool, shared: str | None = None, file: int | None = None
    ) -> HostSlab:
        pages = Pages(align(nbytes, 4096), shared, self.node, file)
        if not mapped:
            return HostSlab(nbytes, pages.tensor[:nbytes], None, pages)
        address = pages.tensor.data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, pages.nbytes, _PORTABLE | _MAPPED))
        if code != 0:
            pages.close()
            raise FerryError(
                f"host memory: cudaHostRegister of {sizes.fmt(nbytes)} failed with CUDA error {code}; check "
                "`ulimit -l`, the cgroup limit and free RAM"
            )
        with self._lock:
            at = bisect.bisect(self._starts, address)
            self._starts.insert(at, address)
            self._ends.insert(at, address + pages.nbytes)
        device = torch.as_tensor(_DeviceView(address, pages.nbytes, pages), device=self.device)
        if device.data_ptr() != address:
            raise FerryError("host memory: torch copied the mapped pages instead of wrapping them")
        return HostSlab(nbytes, pages.tensor[:nbytes], device[:nbytes], pages)

    def free_host(self, slab: HostSlab) -> None:
        pages = slab.handle
        assert isinstance(pages, Pages)
        if slab.device is not None:
            address = pages.tensor.data_ptr()
            torch.cuda.synchronize(self.device)
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
            if code != 0:
                raise FerryError(f"host memory: cudaHostUnregister failed with CUDA error {code}")
            with self._lock:
                at = self._starts.index(address)
                del self._starts[at], self._ends[at]
        slab.host = torch.empty(0, dtype=torch.uint8)
        slab.device = None
        pages.close()

    def check_registered(self, t: torch.Tensor) -> None:
        """Raise if a host tensor is not in registered memory: the copy would be slow and would block.

        Raises:
            FerryError: says where the memory should have come from.
        """
        if t.device.type == "cpu":
            self.check_address(t.data_ptr(), t.nbytes)

    def check_address(self, first: int, nbytes: int) -> None:
        """The same for `nbytes` of host memory from address `first`."""
        at = bisect.bisect(self._starts, first) - 1
        if at < 0 or first + nbytes > self._ends[at]:
            raise FerryError(
                f"copy: host tensor of {sizes.fmt(nbytes)} is not in registered memory; expected memory from "
                "alloc_host(mapped=True)"
            )

    def alloc_device(self, nbytes: int) -> torch.Tensor:
        try:
            memory = torch.empty(align(nbytes), dtype=torch.uint8, device=self.device)
            # The allocator may hand out a block that queued kernels still use; copies on other streams come next.
            torch.cuda.current_stream(self.device).synchronize()
            return memory
        except torch.OutOfMemoryError as e:
            raise self._no_room(nbytes) from e

    def memory_stats(self) -> MemoryStats:
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryStats(
            torch.cuda.memory_allocated(self.device),
            torch.cuda.max_memory_allocated(self.device),
            total,
            free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device),
        )

    def allocated_bytes(self) -> int:
        # `memory_allocated` makes a flat dictionary of all statistics first, which takes longer than launching a kernel.
        found = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
        return int(found["allocated_bytes"]["all"]["current"]) if found else 0

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    # -- queues ----------------------------------------------------------------------------------------------------
    def _new_stream(self, name: str) -> Stream:
        return CudaStream(self, name)

    def event(self, *, timing: bool = False) -> Event:
        return CudaEvent(timing)

    def peers(self) -> tuple[int, ...]:
        mine = self.device.index
        others = [i for i in range(torch.cuda.device_count()) if i != mine]
        return tuple(i for i in others if torch.cuda.can_device_access_peer(mine, i))

    def begin_relay(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, *, peer: int, chunk: int, slots: int = 4
    ) -> Callable[[], None]:
        assert isinstance(stream, CudaStream)
        self.check_registered(dst)
        self.check_registered(src)
        return self._relays.begin(stream, dst, src, peer, chunk, slots)

    def relays_done(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self._relays.done(stream)

    def hold(self, streams: Sequence[Stream]) -> Callable[[], None]:
        # Spinning for about a millisecond is longer than queuing takes; all streams go on behind the first one's event.
        gate = torch.cuda.Event()
        for i, stream in enumerate(streams):
            assert isinstance(stream, CudaStream)
            if i == 0:
                with torch.cuda.stream(stream.stream):
                    torch.cuda._sleep(2_000_000)
                gate.record(stream.stream)
            else:
                stream.stream.wait_event(gate)
        return lambda: None

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._relays.close()
        super().close()

    def bind_thread(self, *, own_stream: bool = False) -> None:
        torch.cuda.set_device(self.device)
        if own_stream:
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def identity(self) -> dict[str, str]:
        return {**super().identity(), "driver": _driver_version()}

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dha_kinds=frozenset({"*"}),
            direct_kinds=DIRECT_KINDS,
            peers=len(self.peers()),
            swap_storage=hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
            notes=(
                f"{torch.cuda.get_device_name(self.device)}, CUDA {torch.version.cuda}",
                *self._adam_note(),
            ),
        )

    def _adam_note(self) -> tuple[str, ...]:
        if self.fused_adam() is not None:
            return ()
        return (f"updates on the device take many kernels instead of one: {self._adam_failure}",)
