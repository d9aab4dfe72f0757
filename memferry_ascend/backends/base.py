"""The backend contract: what the engine asks of a device family. Documented here, once.

A backend owns three things nobody else touches: host memory (`alloc_host`), engine-held device memory
(`alloc_device`) and streams. The engine never creates a stream or pins a page itself, and never asks which family it
runs on.

Vocabulary
    slab     host bytes seen twice: `host` is a CPU tensor, `device` a device tensor over the same bytes (or None when
             the memory is not mapped). Both are one-dimensional uint8.
    stream   a named queue of copies, in order. `compute` is the stream the user's kernels run on.
    event    a point in a stream. Recording is per stream, waiting is either on a stream (the stream waits, the caller
             does not) or on the host (`synchronize`).

Ordering is only ever expressed by events. On a backend whose compute is synchronous (`cpu`) waiting on the compute
stream blocks the caller, which is the same promise.
"""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memferry_ascend import sizes
from memferry_ascend.backends.loans import Borrowed, Loan
from memferry_ascend.errors import FerryError

if TYPE_CHECKING:
    from memferry_ascend.backends.fused import FusedAdam
    from memferry_ascend.lending import Lending
    from memferry_ascend.topology import EmulatedLinks

ALIGNMENT = 512
"""Bytes. Every parameter starts at a multiple of this in slabs, buffers and slots, so kernels see one alignment."""

DIRECT_KINDS = frozenset({"Linear", "Conv1D", "Embedding", "LayerNorm", "RMSNorm"})
"""Layer kinds `direct.py` has functions for; a backend offers those whose kernels may write mapped host memory."""


class NotSupported(FerryError):
    """The backend cannot do what was asked; the message says what can be done instead."""


class BytesLost(FerryError):
    """Part of a copy that a peer had accepted did not arrive, and nobody else has carried it."""


class DeviceOutOfMemory(FerryError):
    """A device allocation of the engine went over the backend's limit."""


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """Smallest multiple of `to` that holds `nbytes`."""
    return (nbytes + to - 1) // to * to


@dataclass
class HostSlab:
    """Host bytes with two faces. `free` returns them to the system; the tensors must not be used afterwards."""

    nbytes: int
    host: torch.Tensor
    device: torch.Tensor | None
    handle: object = None


@dataclass(frozen=True)
class MemoryStats:
    """Bytes. `allocated` and `peak` are what the family's allocator counts, `limit` what this process may use."""

    allocated: int
    peak: int
    limit: int
    free: int


@dataclass(frozen=True)
class Capabilities:
    """What a device family offers, as `memferry doctor` prints it."""

    dha_kinds: frozenset[str]
    """Layer kinds (module class names) whose kernels gave right numbers on mapped host memory."""
    direct_kinds: frozenset[str]
    """Layer kinds whose weight gradient a kernel may write straight to mapped host memory."""
    peers: int = 0
    coherent: bool = True
    """Host and device see each other's writes to mapped memory. Where they do not, only copies are right: every layer is
    GFGB and gradients are not published."""
    swap_storage: bool = False
    """torch offers `UntypedStorage._swap_data_ptr_`."""
    notes: tuple[str, ...] = field(default_factory=tuple)


Carrier = Callable[["Stream", torch.Tensor, torch.Tensor], bool]
"""carrier(stream, dst, src): take a copy on, in the stream's order; False leaves it to the stream. Called when the copy
runs where copies block their stream's thread, when it is queued where they are queued."""


class Event(ABC):
    """A point in a stream; may be recorded again once nobody waits for the earlier recording on the host."""

    handle: int = 0
    """The runtime's own event, for native code; 0 where there is none."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread, without the interpreter lock, until the last recording has been reached."""

    @abstractmethod
    def query(self) -> bool:
        """True if the last recording has been reached (or there was none)."""

    @abstractmethod
    def elapsed(self, later: Event) -> float:
        """Seconds between this recording and `later`'s; both must have been created with timing and reached."""


class Stream(ABC):
    """A named, in-order queue of copies."""

    name: str
    handle: int = 0
    """The runtime's own stream, for native code; 0 where there is none."""
    carrier: Carrier | None = None
    """Divides this stream's copies over several paths (`transfers.py`); None copies directly."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue dst <- src (same numel and dtype, contiguous). Returns at once. Both must stay alive until an event
        recorded afterwards is reached. One of them may be a slab's host face, which must then be `mapped`."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Record `event` behind everything queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Everything queued from now on runs after the event's latest recording."""

    def wait_word(self, address: int, value: int) -> None:
        """Everything queued from now on runs once the 32-bit word at `address` (mapped memory) has reached `value`.
        Only for backends whose driver says `has_values`."""
        raise NotSupported("this device cannot wait for a word of host memory")

    def copy_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue several copies; a family overrides it where one call is cheaper than many."""
        for dst, src in pairs:
            self.copy(dst, src)

    def copy_direct(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies past the carrier; for carriers of backends that queue relays."""
        raise NotSupported("this stream's carrier moves the bytes itself")

    def copy_behind(
        self, compute: Compute, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], ready: Event, done: Event
    ) -> None:
        """Queue copies behind what the compute stream has now: record `ready` there, wait for it, copy, record `done`.
        One call for a whole unit's gradients: a family overrides it where that saves launch time."""
        compute.record(ready)
        self.wait(ready)
        self.copy_many(pairs)
        self.record(done)

    @abstractmethod
    def synchronize(self) -> None:
        """Block until everything queued so far is done; raises what a copy raised."""


class QueuedStream(Stream):
    """A stream of a family whose runtime queues copies: the carrier is asked as they are queued, and `copy_direct` queues
    what it leaves."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copy_many(((dst, src),))

    def copy_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self.carrier is not None:
            pairs = [(dst, src) for dst, src in pairs if not self.carrier(self, dst, src)]
        if pairs:
            self.copy_direct(pairs)


class Compute(ABC):
    """The stream the user's kernels run on, whichever that is when a method is called."""

    @abstractmethod
    def record(self, event: Event) -> None: ...

    @abstractmethod
    def wait(self, event: Event) -> None: ...

    def wait_word(self, address: int, value: int) -> None:
        """As `Stream.wait_word`."""
        raise NotSupported("this device cannot wait for a word of host memory")

    @abstractmethod
    def synchronize(self) -> None: ...


Disturb = Callable[[str], None]
"""Called with a hand-over's name just before it runs; tests inject delays and faults through it."""


class Backend(ABC):
    """One device of one family."""

    name: str
    device: torch.device
    compute: Compute
    disturb: Disturb | None = None
    node: int | None = None
    """The NUMA node that host memory and host threads go to (`numa.choose`); None: wherever they come."""
    queues: bool = True
    """Kernels run behind the thread that launches them. False: on it, so that launching a kernel is running it."""
    device_waits: bool = False
    """Streams can wait for a word of mapped host memory (`wait_word`)."""
    swaps: bool = False
    """Units that move exchange the memory beneath their tensors (`swapped.py`); otherwise saved-tensor hooks find them."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    # -- memory ----------------------------------------------------------------------------------------------------
    @abstractmethod
    def alloc_host(
        self, nbytes: int, *, mapped: bool, shared: str | None = None, file: int | None = None
    ) -> HostSlab:
        """Zeroed host memory, at least 4 KiB aligned. `mapped` memory is registered with the device and has a
        `device` face; other memory is ordinary pages for the host only. The only place that allocates host memory.

        shared: a name. Processes of this machine that ask for the same name and size get the same memory, each
            registered with its own device; the first one gets it zeroed. `hostmem.forget` removes the name.
        file: a descriptor (`hostmem.nameless`) of `host_bytes(nbytes)` that other processes map too.

        Raises:
            FerryError: the system refused (out of memory, locked-memory limit), naming bytes and the limit.
        """

    def sharing_failure(self) -> str | None:
        """Why `shared` is not to be had on this device; None: it is."""
        return None

    @abstractmethod
    def free_host(self, slab: HostSlab) -> None:
        """Unregister and return the pages. The caller has synchronised with every user of the slab."""

    def host_bytes(self, nbytes: int) -> int:
        """Bytes that `alloc_host` maps for `nbytes`, and needs behind a `file`."""
        return align(nbytes, 4096)

    def drop_host(self, slab: HostSlab) -> None:
        """`free_host` of a slab that certainly nobody uses: does not wait for the device."""
        self.free_host(slab)

    @abstractmethod
    def alloc_device(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 device tensor that the engine holds for long (buffers, slots).

        Raises:
            DeviceOutOfMemory: over the device's limit; names requested, in use and limit.
        """

    def _no_room(self, nbytes: int) -> DeviceOutOfMemory:
        """What `alloc_device` raises where the family's allocator refused."""
        stats = self.memory_stats()
        return DeviceOutOfMemory(
            f"device memory: asked for {sizes.fmt(nbytes)} with {sizes.fmt(stats.allocated)} in use and "
            f"{sizes.fmt(stats.free)} free of {sizes.fmt(stats.limit)}; set a smaller device_memory"
        )

    @abstractmethod
    def memory_stats(self) -> MemoryStats: ...

    def allocated_bytes(self) -> int:
        """`memory_stats().allocated`, where it can be had for less: the recorder asks at every mark."""
        return self.memory_stats().allocated

    @abstractmethod
    def reset_peak(self) -> None: ...

    def locked_memory_limit(self) -> int | None:
        """Bytes of host memory that this process may still register with the device; None where RLIMIT_MEMLOCK does not
        bind it (memory that is never registered, or registered by a driver that does not ask for the limit)."""
        return None

    def pci_address(self) -> str | None:
        """Where the device sits ("0000:3b:00.0"), for its NUMA node; None where the family does not say."""
        return None

    # -- queues ----------------------------------------------------------------------------------------------------
    @abstractmethod
    def _new_stream(self, name: str) -> Stream: ...

    def stream(self, name: str) -> Stream:
        """The stream of that name, created at its first use. The engine uses `upload` (urgent), `reload` (patient)
        and `download`: one shared stream makes the urgent copy wait behind the patient one."""
        if name not in self._streams:
            self._streams[name] = self._new_stream(name)
        return self._streams[name]

    @abstractmethod
    def event(self, *, timing: bool = False) -> Event: ...

    @abstractmethod
    def bind_thread(self, *, own_stream: bool = False) -> None:
        """Called once at the start of every engine thread (sets the current device where that is per thread). With
        `own_stream` kernels that the thread launches run on a stream of its own, which `compute` then means in it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the device and every stream are idle; raises what a copy raised."""

    def driver(self) -> Any:
        """The family's runtime for native code (`_ops.Driver`), or None: jobs then run on a Python thread."""
        return None

    def fused_adam(self) -> FusedAdam | None:
        """The family's own kernels for updates on the device; None: torch's operations do them."""
        return None

    # -- what it can do --------------------------------------------------------------------------------------------
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    def identity(self) -> dict[str, str]:
        """What measurements on this device depend on: a profile is only used again where all of it is equal."""
        return {
            "backend": self.name,
            "device": str(self.device),
            "system": platform.release(),
            "about": "; ".join(self.capabilities().notes),
        }

    carries: bool = False
    """Streams give their copies to a carrier, so that devices can assist."""

    links: EmulatedLinks | None = None
    """Where copies block: emulated links that this backend shares with others. None: each engine emulates its own."""

    queues_relays: bool = False
    """`relay` queues; otherwise copies block their stream's thread and paths have threads of their own."""

    def peers(self) -> tuple[int, ...]:
        """Indices of the devices that can forward to this one."""
        return ()

    def relay(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, *, peer: int, chunk: int, slots: int = 4
    ) -> None:
        """Queue dst <- src (uint8, one of them host memory) through buffers of device `peer`, in pipelined chunks,
        behind everything on `stream` (paper section IV-E). The peer's memory taken is `slots` times `chunk` bytes.
        `relays_done` makes `stream` wait for it.

        Raises:
            NotSupported: no such peer.
            BytesLost: an earlier relay failed after it was queued; another path cannot mend that.
            RuntimeError: the device's runtime refused; what had been queued is in `relays_done` all the same.
        """
        self.begin_relay(stream, dst, src, peer=peer, chunk=chunk, slots=slots)()

    def begin_relay(
        self, stream: Stream, dst: torch.Tensor, src: torch.Tensor, *, peer: int, chunk: int, slots: int = 4
    ) -> Callable[[], None]:
        """As `relay`, in two parts: behind everything on `stream` now, but queued when what is returned is called (once,
        at most). What the stream gets in between moves beside it. Both parts raise what `relay` raises."""
        raise NotSupported(f"backend {self.name!r} has no peer devices to relay through; use the direct path")

    def relays_done(self, stream: Stream) -> None:
        """Everything queued on `stream` from now on runs after the relays queued for it."""
        return None

    # -- devices of other processes (lending.py) -------------------------------------------------------------------
    lends: bool = False
    """Other processes may relay through this device (`lend`), and this one through theirs (`borrow`)."""

    lending: Lending | None = None
    """What an engine on this backend borrows and lends now."""

    def end_borrowing(self) -> None:
        """Let go of everything that relays through devices of other processes."""
        return None

    def process(self) -> int:
        """This process, as its device's runtime names it to others."""
        return os.getpid()

    def lend(self, nbytes: int, borrower: int) -> Loan:
        """Staging memory on this device, for the process `borrower` (its `process()`) to import.

        Raises:
            NotSupported: this family cannot share device memory.
            FerryError: no room, or the runtime refused.
        """
        raise NotSupported(f"backend {self.name!r} cannot lend its device to other processes")

    def borrow(self, key: str, file: int | None, nbytes: int, owner: int) -> Borrowed:
        """Import what another process, on device `owner`, has lent. Raises as `lend`."""
        raise NotSupported(f"backend {self.name!r} cannot relay through devices of other processes")

    def hold(self, streams: Sequence[Stream]) -> Callable[[], None]:
        """Keep `streams` from running what is queued from now on, until the function returned is called; all go on
        at once then. For measurements: queuing must not be what is measured."""
        raise NotSupported(f"backend {self.name!r} cannot hold its streams")

    def close(self) -> None:
        """Stop the streams' workers. Slabs must have been freed."""
        self._streams.clear()

    def _at(self, point: str) -> None:
        if self.disturb is not None:
            self.disturb(point)
