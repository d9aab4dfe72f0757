"""The Ascend backend: host pages mapped into the NPU's address space, seen as NPU tensors, by torch_npu and CANN.

Streams, events and copies are torch_npu's own, so that its task queue keeps their order: with TASK_QUEUE_ENABLE above 0
(its default is 1) a launch returns before the runtime has heard of it, and a call made past the queue would overtake
what is still in it. Host updates then run on a Python thread. With TASK_QUEUE_ENABLE=0 every call reaches the runtime at
once, and updates, their events and their uploads run in native code without the interpreter lock.

Copies always take the host's address: a mapped device address may be a kernel's operand and no copy's (backends/acl.py).
Direct host access and direct gradients are allowed only after host and device have seen each other's writes, and only for
the layer kinds that gave right numbers in a child process (backends/ascend_probe.py, ascend_writes.py).
"""

from __future__ import annotations

import bisect
import importlib
import importlib.metadata
import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32
from typing import Any

import torch

from memferry_ascend import sizes
from memferry_ascend.backends import ascend_probe
from memferry_ascend.backends.acl import Acl, Block
from memferry_ascend.backends.ascend_lending import AscendBorrowed, AscendLoan
from memferry_ascend.backends.ascend_queues import AscendCompute, AscendEvent, AscendStream, Gate, naming
from memferry_ascend.backends.ascend_relay import AscendRelays
from memferry_ascend.backends.base import (
    Backend,
    Capabilities,
    Event,
    HostSlab,
    MemoryStats,
    Stream,
    align,
)
from memferry_ascend.backends.hostmem import Pages, forget
from memferry_ascend.errors import FerryError

_OVERREAD = 32
"""Bytes: torch_npu adds as many to its own allocations, because kernels may read that far behind their operands."""

INSTALL = "pip install 'memferry_ascend[ascend]'"


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def import_npu() -> Any:
    """The module torch_npu, imported now if it was not. Afterwards `torch.npu` exists.

    Raises:
        FerryError: one sentence for each way in which the software is not there: no torch_npu, one for another torch, no
            CANN, a CANN older than torch_npu needs.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise FerryError(f"backend 'ascend': torch_npu is not installed; {INSTALL}, or use backend='cpu'")
    try:
        version = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version and _release(version) != _release(torch.__version__):
        wanted = ".".join(_release(torch.__version__))
        raise FerryError(
            f"backend 'ascend': torch_npu {version} is for another torch than {torch.__version__}; install torch_npu "
            f"{wanted}.*, or the torch that torch_npu {version} names"
        )
    try:
        npu = importlib.import_module("torch_npu")
    except Exception as error:
        said = " ".join(str(error).split())
        if "cannot open shared object file" in said:
            library = said.split(":")[0].split()[-1]
            raise FerryError(
                f"backend 'ascend': CANN is not installed or not on the library path ({library} was not found); install "
                "CANN 8.5 or newer and source its set_env.sh"
            ) from error
        if "undefined symbol" in said:
            symbol = said.partition("undefined symbol:")[2].strip().split()[0].rstrip(",")
            raise FerryError(
                f"backend 'ascend': this CANN is too old for torch_npu {version}: it has no {symbol}; install CANN 8.5 or "
                "newer"
            ) from error
        raise FerryError(f"backend 'ascend': importing torch_npu {version} failed: {said[:300]}") from error
    return npu


class _Ranges:
    """Address ranges, looked up by one address in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, nbytes: int) -> None:
        with self._lock:
            at = bisect.bisect(self._starts, start)
            self._starts.insert(at, start)
            self._ends.insert(at, start + nbytes)

    def remove(self, start: int) -> None:
        with self._lock:
            at = self._starts.index(start)
            del self._starts[at], self._ends[at]

    def cover(self, start: int, nbytes: int) -> bool:
        with self._lock:
            at = bisect.bisect(self._starts, start) - 1
            return at >= 0 and start + nbytes <= self._ends[at]


class AscendBackend(Backend):
    """One NPU. `route` says how its host memory is mapped: "unified", "registered" or "locked" (backends/acl.py).

    MEMFERRY_ASCEND_ROUTE forces a route. `coherent`: host and device see each other's writes to mapped memory.
    """

    name = "ascend"
    carries = queues_relays = lends = True

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self._torch_npu = import_npu()
        with naming("backend 'ascend': asking CANN for its devices"):
            count = torch.npu.device_count()
        if count == 0:
            raise FerryError("backend 'ascend': CANN finds no NPU; check the driver with `npu-smi info`")
        if index >= count:
            raise FerryError(
                f"backend 'ascend': rank wants device {index}, the machine has {count}; start fewer processes per node"
            )
        self.device = torch.device("npu", index)
        with naming(f"backend 'ascend': starting device {index}"):
            torch.npu.set_device(self.device)
            torch.zeros(1, device=self.device)
        # A private layout (NZ) would make parameters that the arena's bytes are not.
        torch.npu.config.allow_internal_format = False
        self.acl = Acl(index)
        self._open: dict[int, bool] = {}
        self.relays = AscendRelays(self)
        self._gate: Gate | None = None
        self.compute = AscendCompute(self.device)
        self._host, self._alias = _Ranges(), _Ranges()
        self.route, self.routes_refused = self.acl.choose(os.environ.get("MEMFERRY_ASCEND_ROUTE") or None)
        self._driver, self._jobs_note = self._load_driver()
        self.coherence_failure = ascend_probe.incoherence(self)
        self._capabilities: Capabilities | None = None
        self._sharing: str | None = None
        """`sharing_failure`, "" for None, once it has been tried."""

    @property
    def coherent(self) -> bool:
        """Kernels may read what the host wrote, and the other way round, without a copy."""
        return self.coherence_failure is None

    def _load_driver(self) -> tuple[Any, str]:
        """CANN for native jobs or None, and what to tell about it."""
        if os.environ.get("TASK_QUEUE_ENABLE", "1") != "0":
            return None, "host updates on a Python thread (TASK_QUEUE_ENABLE=0 lets them run natively)"
        try:
            from memferry_ascend import _ops
        except ImportError:
            return None, "host updates on a Python thread (the C++ extension was not built)"
        event = torch.npu.Event()
        event.record()
        if not getattr(event, "npu_event", 0):
            return None, "host updates on a Python thread (this torch_npu hides its events' handles)"
        return _ops.Driver("ascend", "", self.device.index), "host updates in native code"

    def driver(self) -> Any:
        return self._driver

    # -- memory ----------------------------------------------------------------------------------------------------
    def host_bytes(self, nbytes: int) -> int:
        return align(nbytes + _OVERREAD, 4096)

    def alloc_host(
        self, nbytes: int, *, mapped: bool, shared: str | None = None, file: int | None = None
    ) -> HostSlab:
        if not mapped:
            pages = Pages(align(nbytes, 4096))
            return HostSlab(nbytes, pages.tensor[:nbytes], None, pages)
        several = Pages(self.host_bytes(nbytes), shared, file=file) if shared or file is not None else None
        block = self.acl.allocate(nbytes + _OVERREAD, self.route, several)
        try:
            device = self._view(block)
        except BaseException:
            self.acl.free(block)
            raise
        self._host.add(block.address, block.nbytes)
        if block.device_address != block.address:
            self._alias.add(block.device_address, block.nbytes)
        return HostSlab(nbytes, block.host[:nbytes], device[:nbytes], block)

    def sharing_failure(self) -> str | None:
        """Shared pages are registered where they are, whatever the route of other memory."""
        if self._sharing is None:
            name = f"memferry-try-{secrets.token_hex(8)}"
            self._sharing = ascend_probe.incoherence(self, shared=name) or ""
            forget(name)
        return self._sharing or None

    def _view(self, block: Block) -> torch.Tensor:
        """A uint8 NPU tensor over a block, in ND format. torch's own constructor makes a storage without torch_npu's
        format record; theirs is the one to use."""
        storage = self._torch_npu._C._construct_storage_from_data_pointer(
            block.device_address, self.device, block.nbytes
        )
        view = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (block.nbytes,), (1,))
        if view.data_ptr() != block.device_address:
            raise FerryError("host memory: torch_npu copied the mapped pages instead of wrapping them")
        return view

    def free_host(self, slab: HostSlab) -> None:
        block = slab.handle
        slab.host = torch.empty(0, dtype=torch.uint8)
        slab.device = None
        if not isinstance(block, Block):
            block.close()
            return
        # A kernel or copy that still runs would meet memory that is gone.
        self.synchronize()
        self._unmap(block)

    def drop_host(self, slab: HostSlab) -> None:
        block = slab.handle
        assert isinstance(block, Block)
        slab.host, slab.device = torch.empty(0, dtype=torch.uint8), None
        self._unmap(block)

    def _unmap(self, block: Block) -> None:
        self._host.remove(block.address)
        if block.device_address != block.address:
            self._alias.remove(block.device_address)
        self.acl.free(block)

    def check_operand(self, t: torch.Tensor) -> None:
        """Raise if a copy may not have this tensor as an operand: a host tensor outside registered memory (the copy would
        block), or the device face of a slab with an address of its own.

        Raises:
            FerryError: says which memory to use.
        """
        nbytes = t.numel() * t.element_size()
        if t.device.type == "cpu":
            if not self._host.cover(t.data_ptr(), nbytes):
                raise FerryError(
                    f"copy: host tensor of {sizes.fmt(nbytes)} is not in registered memory; expected memory from "
                    "alloc_host(mapped=True)"
                )
        elif self._alias.cover(t.data_ptr(), 1):
            raise FerryError(
                f"copy: the device face of mapped host memory ({sizes.fmt(nbytes)}) is no copy's operand; expected its "
                "host face"
            )

    def alloc_device(self, nbytes: int) -> torch.Tensor:
        try:
            with naming("device memory: an allocation"):
                made = torch.empty(align(nbytes), dtype=torch.uint8, device=self.device)
            # The allocator reuses blocks in the compute stream's order; copies on other streams do not follow it.
            self.compute.synchronize()
            return made
        except torch.OutOfMemoryError as e:
            raise self._no_room(nbytes) from e

    def memory_stats(self) -> MemoryStats:
        with naming("device memory: asking how much there is"):
            free, total = torch.npu.mem_get_info(self.device)
        allocated = torch.npu.memory_allocated(self.device)
        return MemoryStats(
            allocated,
            torch.npu.max_memory_allocated(self.device),
            total,
            free + torch.npu.memory_reserved(self.device) - allocated,
        )

    def allocated_bytes(self) -> int:
        return int(torch.npu.memory_allocated(self.device))

    def reset_peak(self) -> None:
        torch.npu.reset_peak_memory_stats(self.device)

    # -- queues ----------------------------------------------------------------------------------------------------
    def _new_stream(self, name: str) -> Stream:
        return AscendStream(self, name)

    def event(self, *, timing: bool = False) -> Event:
        return AscendEvent(timing, native=self._driver is not None)

    def bind_thread(self, *, own_stream: bool = False) -> None:
        with naming(f"starting a thread on {self.device}"):
            torch.npu.set_device(self.device)
            if own_stream:
                torch.npu.set_stream(torch.npu.Stream(self.device))

    def synchronize(self) -> None:
        self.relays.check()
        with naming(f"device {self.device}"):
            torch.npu.synchronize(self.device)

    # -- what it can do --------------------------------------------------------------------------------------------
    def peers(self) -> tuple[int, ...]:
        return tuple(self.acl.reachable(torch.npu.device_count()))

    def open_peer(self, peer: int) -> bool:
        """Open access between this device and another of this host, both ways; False if they cannot reach each other.
        Starts the other device in this process, so it is not done before somebody relays."""
        if peer not in self._open:
            self._open[peer] = peer in self.peers() and self.acl.open_peer(peer)
        return self._open[peer]

    def begin_relay(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, *, peer: int, chunk: int, slots: int = 4
    ) -> Callable[[], None]:
        assert isinstance(stream, AscendStream)
        self.check_operand(dst)
        self.check_operand(src)
        return self.relays.begin(stream, dst, src, peer, chunk, slots)

    def relays_done(self, stream: Stream) -> None:
        assert isinstance(stream, AscendStream)
        self.relays.done(stream)

    # -- devices of other processes --------------------------------------------------------------------------------
    def process(self) -> int:
        found = c_int32()
        self.acl.call("aclrtDeviceGetBareTgid", byref(found), doing="asking for this process's number")
        return found.value

    def lend(self, nbytes: int, borrower: int) -> AscendLoan:
        return AscendLoan(self, nbytes, borrower)

    def borrow(self, key: str, file: int | None, nbytes: int, owner: int) -> AscendBorrowed:
        return AscendBorrowed(self, key, owner)

    def end_borrowing(self) -> None:
        self.relays.drop_borrowed()

    def hold(self, streams: Sequence[Stream]) -> Callable[[], None]:
        if self._gate is None:
            self._gate = Gate(self)
        self._gate.shut(streams)
        return self._gate.open

    def close(self) -> None:
        try:
            self.synchronize()
        finally:
            self.relays.close()
            if self._gate is not None:
                self._gate.close()
                self._gate = None
            super().close()

    def capabilities(self) -> Capabilities:
        """The first call starts a child process that tries the layer kinds, unless this stack was tried before."""
        if self._capabilities is None:
            read: frozenset[str] = frozenset()
            written: frozenset[str] = frozenset()
            notes: list[str] = []
            if self.coherent:
                read, written, notes = ascend_probe.host_access(self)
            else:
                notes = [f"no direct host access or gradients, all layers GFGB: {self.coherence_failure}"]
            routes = [f"host memory: route {self.route}", *self.routes_refused]
            self._capabilities = Capabilities(
                dha_kinds=read,
                direct_kinds=written,
                peers=len(self.peers()),
                swap_storage=hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
                coherent=self.coherent,
                notes=(self.stack(), *routes, self._jobs_note, *notes),
            )
        return self._capabilities

    def stack(self) -> str:
        """Device, torch_npu and CANN versions: what a probe's result holds for."""
        return (
            f"{torch.npu.get_device_name(self.device)}, torch_npu {self._torch_npu.__version__}, torch "
            f"{torch.__version__}, CANN {self.acl.version(0)}, driver {self.acl.version(7)}"
        )
