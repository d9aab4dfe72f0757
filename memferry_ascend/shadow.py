"""The shadow model: the user's module, its parameters bound to device storage or to the device alias of the arena.

Who holds what, by mode (paper section IV-C; STREAM is ours):

    mode     outside a window    inside a forward window    in the backward pass
    GFGB     device buffer       device buffer              device buffer
    DHA      arena alias         arena alias                arena alias
    DFGB     arena alias         arena alias                device buffer, loaded after the forward window
    STREAM   arena alias         ring slot                  ring slot, loaded again

GFGB and DHA parameters never change their storage, so autograd needs no help. DFGB and STREAM do: what autograd saves
in the forward pass must be found elsewhere in the backward pass. Two ways do that: saved-tensor hooks (`saved.py`), and
exchanging the memory beneath the tensors (`swapped.py`), where torch and the backend can.

A unit is *pending* from the moment `step()` hands its update to the worker until somebody has waited for it. Only
then may its storage be read: on the host side for an alias, behind the upload's event for a device copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memferry_ascend import arming
from memferry_ascend.arena import UnitMemory
from memferry_ascend.backends.base import Backend, Event, Stream
from memferry_ascend.deviceupdate import DeviceMemory
from memferry_ascend.errors import FerryError
from memferry_ascend.jobs import Jobs, Upload
from memferry_ascend.layers import Param, Unit
from memferry_ascend.planner.plan import Mode
from memferry_ascend.ring import Ring


class Switch:
    """Bytes whose memory can be exchanged: a storage of its own over the arena's alias of one unit."""

    def __init__(self, alias: torch.Tensor) -> None:
        self.bytes = _storage_over(alias)
        self._elsewhere: dict[int, torch.Tensor] = {}
        """By address, storages as large as ours over slots and buffers; one of them may hold the alias instead."""
        self._at: torch.Tensor | None = None

    def to(self, raw: torch.Tensor | None) -> None:
        """Be over the first bytes of `raw`, or over the alias again (None)."""
        there = None
        if raw is not None:
            there = self._elsewhere.get(raw.data_ptr())
            if there is None:
                there = _storage_over(raw[: self.bytes.numel()])
                self._elsewhere[raw.data_ptr()] = there
        if there is self._at:
            return
        mine = self.bytes.untyped_storage()
        for other in (self._at, there):
            if other is not None:
                mine._swap_data_ptr_(other.untyped_storage())  # type: ignore[attr-defined]
        self._at = there


def _storage_over(raw: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor with a storage that begins and ends with them; keeps `raw` alive."""
    own: torch.Tensor = torch.from_dlpack(torch.utils.dlpack.to_dlpack(raw))
    assert own.untyped_storage().nbytes() == raw.numel() and own.data_ptr() == raw.data_ptr()
    return own


def stale(unit: Resident) -> FerryError:
    """What to say of a backward pass through a forward pass that read older values."""
    return FerryError(
        f"backward through a graph from before the last optimizer step: the parameters of {unit.unit.name!r} have been "
        "updated since its forward. Run the forward again, or call backward before step()"
    )


class Resident:
    """One unit's storages and how far its latest update is."""

    def __init__(
        self, unit: Unit, memory: UnitMemory, backend: Backend, jobs: Jobs, ring: Ring | None
    ) -> None:
        self.unit = unit
        self.memory = memory
        self.shard = memory
        """Where this process's part of the unit lives in the arena: all of it, unless there are other ranks."""
        self.mode = Mode(unit.plan.mode)
        self.order = unit.index
        """Position in the forward pass; the priority of this unit's update."""
        self.generation = 0
        """Counts updates; a graph built before the latest one must not be used."""
        self.pending = False
        """An update was handed to the worker and nobody has waited for it yet."""
        self.buffer: torch.Tensor | None = None
        self.uploaded: Event = backend.event()
        self.last_read: Event = backend.event()
        """On the compute stream, behind the last kernels that read this unit's device copy."""
        self._backend = backend
        self._jobs = jobs
        self.ring = ring if self.mode is Mode.STREAM else None
        self._upload = backend.stream("upload")
        self._reload = backend.stream("reload")
        self._reloaded = False
        self.deferred: Callable[[], None] | None = None
        """An update on the device that nobody has needed yet; `wait` launches it."""
        if isinstance(memory, DeviceMemory):
            self.buffer = memory.buffer
        elif self.mode in (Mode.GFGB, Mode.DFGB):
            self.buffer = backend.alloc_device(self._buffer_bytes())
        self._switch: Switch | None = None
        if backend.swaps and self.mode in (Mode.DFGB, Mode.STREAM):
            assert memory.param.device is not None
            self._switch = Switch(memory.param.device[: memory.layout.nbytes])
        self.rest = {p.index: self._rest(p) for p in unit.params}
        """What each parameter is bound to outside a window."""

    @property
    def region(self) -> torch.Tensor:
        """The unit's parameter bytes in the arena, as the host sees them: the source of every upload."""
        return self.memory.param.host

    def _buffer_bytes(self) -> int:
        return self.memory.layout.nbytes

    def snapshot(self) -> torch.Tensor:
        """A copy of the parameter bytes on the CPU."""
        if isinstance(self.memory, DeviceMemory):
            return self.memory.buffer.to("cpu", copy=True)
        return self.region.clone()

    def _rest(self, p: Param) -> torch.Tensor:
        if self.mode is Mode.GFGB and p.index not in self.unit.aliased:
            assert self.buffer is not None
            return self.memory.buffer_param(self.buffer, p)
        if self._switch is not None and p.index not in self.unit.aliased:
            return self.memory.buffer_param(self._switch.bytes, p)
        return self.memory.device_param(p)

    def move(self, raw: torch.Tensor | None) -> None:
        """Have the parameters in `raw`, a slot or buffer that holds this unit; None: in the arena. For units that exchange
        memory; nothing otherwise."""
        if self._switch is not None:
            self._switch.to(raw)

    @property
    def leased(self) -> bool:
        """In the backward pass, and its slot is safe."""
        return self.ring is not None and self.ring.leased(self)

    def let_go(self) -> None:
        """Drop every tensor over the arena and the device memory."""
        self.move(None)
        self.buffer, self.rest, self.ring, self.deferred, self._switch = None, {}, None, None, None

    def bind_rest(self) -> None:
        """Bind every parameter to its resting place."""
        for p in self.unit.params:
            p.param.data = self.rest[p.index]

    def bind_alias(self) -> None:
        """Bind every parameter to the arena, whatever the mode (for edits and checkpoints)."""
        for p in self.unit.params:
            p.param.data = self.memory.device_param(p)

    # -- masters, by parameter -----------------------------------------------------------------------------------------
    def master(self, p: Param) -> torch.Tensor:
        """A copy of a parameter's master on the CPU: fp32 for trainable parameters, the stored dtype for frozen ones."""
        return arming.get_master(self.memory, p)

    def set_master(self, p: Param, value: torch.Tensor) -> None:
        """Write a master value (any float dtype, CPU). Device copies are refreshed by `checkpoint.refresh`."""
        arming.set_master(self.memory, p, value)

    def last_value(self, p: Param) -> torch.Tensor:
        """What the model keeps of a parameter when the engine closes."""
        return self.master(p)

    # -- updates ---------------------------------------------------------------------------------------------------
    def begin_update(self) -> None:
        """User's thread: an update is about to be handed to the background."""
        self.generation += 1
        self.pending = True
        self.forget()

    def forget(self) -> None:
        """The arena was written by somebody else: no device copy is worth anything."""
        self._reloaded = False
        self.move(None)
        if self.ring is not None:
            self.ring.drop(self)

    def loadable(self) -> bool:
        """A copy from the arena may be queued without blocking the calling thread."""
        return self._jobs.device_waits or self.host_ready

    def hold(self, stream: Stream) -> None:
        """Copies queued on `stream` from now on see the latest values."""
        if not self.host_ready:
            self._jobs.hold(self.unit.index, stream)

    @property
    def host_ready(self) -> bool:
        """The arena holds the latest values."""
        return self._jobs.updated(self.unit.index)

    def upload_job(self, after: Event | None) -> Upload | None:
        """The copy that brings the new values to a resident buffer, behind `after` (the event on the compute stream
        before which its old values may still be read); None where nothing is uploaded."""
        if self.mode is not Mode.GFGB or self.memory.on_device:
            return None
        assert self.buffer is not None
        return Upload(self._upload, self.buffer, self.region[: self.buffer.numel()], after, self.uploaded)

    def upload(self) -> None:
        """Arena -> buffer now (arming, edits)."""
        job = self.upload_job(None)
        if job is not None:
            job.start()

    def offer(self) -> None:
        """Background: the update is done; the next forward pass may be waiting for it."""
        if self.ring is not None:
            self.ring.offer(self)

    def wait(self) -> None:
        """Make the latest values readable by kernels launched from now on. Cheap when nothing is pending."""
        if not self.pending:
            return
        if self.memory.on_device:
            update, self.deferred, self.pending = self.deferred, None, False
            if update is not None:
                update()
            return
        covered = self._jobs.hold(self.unit.index, self._backend.compute)
        if self.mode is Mode.GFGB and not covered:
            self._backend.compute.wait(self.uploaded)
        self.pending = False

    # -- the backward copy of DFGB ---------------------------------------------------------------------------------
    def load_for_backward(self) -> None:
        """DFGB, after the forward window: bring the parameters to the device while the link is idle."""
        if self._reloaded or self.buffer is None:
            return
        self._backend.compute.record(self.last_read)
        self._reload.wait(self.last_read)
        self._reload.copy(self.buffer, self.region[: self.buffer.numel()])
        self._reload.record(self.uploaded)
        self._reloaded = True

    def for_backward(self) -> torch.Tensor | None:
        """Bytes of this unit that kernels launched now may read in the backward pass; None: read the alias."""
        if self.mode is Mode.DFGB:
            if not self._reloaded:
                self.load_for_backward()
            self._backend.compute.wait(self.uploaded)
            return self.buffer
        if self.ring is not None:
            return self.ring.backward(self)
        return None
