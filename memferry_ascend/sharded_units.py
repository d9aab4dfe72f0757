"""Units of which every rank owns one chunk: where they are read, and the update of this rank's part.

unit is       in this rank's arena            after its update
GFGB          its chunk                       chunk uploaded, buffer gathered from all ranks on the device
DHA           all of it, once per node        ranks of the node meet: every chunk is written
DFGB, STREAM  the same                        the same; ranks load what they read together (`loads.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memferry_ascend.arena import UnitMemory
from memferry_ascend.backends.base import Backend, Event, Stream
from memferry_ascend.errors import FerryError
from memferry_ascend.hostupdate import Hypers, UnitUpdate
from memferry_ascend.jobs import Upload
from memferry_ascend.lane import LaneEvent
from memferry_ascend.layers import Param, Unit
from memferry_ascend.parallel import Ranks
from memferry_ascend.planner.plan import Mode
from memferry_ascend.ring import Ring
from memferry_ascend.shadow import Resident
from memferry_ascend.shards import Cut, ShardMemory

if TYPE_CHECKING:
    from memferry_ascend.sharded import DataParallel


class ShardedUpdate(UnitUpdate):
    """The host update of this rank's chunk of a unit. State goes in and out by whole parameters; every rank calls."""

    def __init__(self, inner: UnitUpdate | None, memory: ShardMemory, ranks: Ranks, native: bool) -> None:
        super().__init__(memory, [])
        self.whole = [p for layer in memory.unit.layers for p in layer.params if p.trainable]
        self.steps = {p.index: 0 for p in self.whole}
        self._inner = inner
        self._native = native
        self.before: Callable[[], None] = lambda: None
        self._mine = memory
        self._ranks = ranks

    def run(self, part: Sequence[Param], summed: bool, hypers: Hypers, scale: float) -> None:
        for p in part:
            self.steps[p.index] += 1
        pieces = [self._mine.of[p.index] for p in part if p.index in self._mine.of]
        if self._inner is not None and pieces:
            self.before()
            self._inner.run(pieces, summed, hypers, scale)

    def state_of(self, p: Param) -> dict[str, Any]:
        if self._native and not self.steps[p.index]:
            return {}
        piece = self._mine.of.get(p.index)
        state = self._inner.state_of(piece) if self._inner is not None and piece is not None else {}
        counts = counts_of(self._mine.cut, p)
        if self._native:  # every rank knows what there is
            out: dict[str, Any] = {"step": torch.tensor(float(self.steps[p.index]))}
            for key in ("exp_avg", "exp_avg_sq"):
                own = state[key] if key in state else torch.empty(0)
                out[key] = self._ranks.concatenate(own, counts).view(p.shape)
            return out
        split = {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
        # An owner knows the keys; tensors of the piece's size are parts, everything else is the same everywhere.
        plain = {k: v for k, v in state.items() if k not in split}
        kinds = {k: state[k].dtype for k in split}
        everyone = self._ranks.gather_objects((plain, kinds))
        values: dict[str, Any] = next((s for s, kinds in everyone if s or kinds), {})
        kinds = next((kinds for _, kinds in everyone if kinds), {})
        out = dict(values)
        for key in sorted(kinds):
            own = state[key].reshape(-1) if key in state else torch.empty(0, dtype=kinds[key])
            out[key] = self._ranks.concatenate(own, counts).view(p.shape)
        return out

    def check_state(self, p: Param, state: Any) -> None:
        super().check_state(p, state)
        missing = {"step", "exp_avg", "exp_avg_sq"} - set(state)
        if self._native and state and missing:
            raise FerryError(
                f"optimizer state of {p.name!r}: expected exp_avg, exp_avg_sq and step, missing {sorted(missing)}"
            )

    def hand_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Closing talks to nobody, so the user's optimizer gets no state: take it from `state_dict` before."""
        for p in self.whole:
            optimizer.state.pop(p.param, None)

    def load_state(self, p: Param, state: Mapping[str, Any]) -> None:
        piece = self._mine.of.get(p.index)
        self.steps[p.index] = int(state.get("step", 0))
        if self._inner is None or piece is None:
            return
        cut = slice(piece.start, piece.start + piece.count)
        mine = {
            k: v.detach().reshape(-1)[cut]
            if isinstance(v, torch.Tensor) and v.dim() and v.numel() == p.numel
            else v
            for k, v in state.items()
        }
        self._inner.load_state(piece, mine)


def counts_of(cut: Cut, p: Param) -> list[int]:
    """Elements of a parameter by rank."""
    return [next((q.count for q in pieces if q.index == p.index), 0) for pieces in cut.pieces]


class ShardedResident(Resident):
    """A unit of which this rank owns one chunk."""

    def __init__(
        self,
        unit: Unit,
        whole: UnitMemory,
        mine: ShardMemory,
        backend: Backend,
        ring: Ring | None,
        parallel: DataParallel,
    ) -> None:
        self.mine = mine
        self._parallel = parallel
        self._worker = parallel.jobs.worker
        super().__init__(unit, whole, backend, parallel.jobs, ring)
        self.shard = mine
        self.written = True
        """This rank's chunk holds the latest values."""
        self.arrived = 0
        """Generation of the values that all ranks' chunks hold, where this rank reads them."""
        self.left = False
        """DFGB: the forward pass does not read it any more."""
        self.loaded = LaneEvent(backend.event(), self._worker)
        """The last load of a DFGB unit's buffer."""
        self.epoch = 0
        self._chunk_up = backend.event()

    @property
    def gathered(self) -> bool:
        """The whole unit exists on the device only."""
        return self.mode is Mode.GFGB

    @property
    def padded_bytes(self) -> int:
        """Of all chunks, the last ones filled up."""
        return self.mine.cut.chunk * self.mine.cut.size

    def _buffer_bytes(self) -> int:
        return self.padded_bytes

    def master(self, p: Param) -> torch.Tensor:
        own = self.mine.master(p)
        return self._parallel.ranks.concatenate(own, counts_of(self.mine.cut, p)).view(p.shape)

    def set_master(self, p: Param, value: torch.Tensor) -> None:
        self.mine.set_master(p, value)

    def last_value(self, p: Param) -> torch.Tensor:
        if self.gathered:
            return self.rest[p.index].detach().to("cpu", copy=True)
        return self.memory.host_param(p).detach().clone()  # its device face may be no copy's operand

    def _rest(self, p: Param) -> torch.Tensor:
        if self.gathered:  # also what rides along to be read in place: the whole unit is here only
            assert self.buffer is not None
            return self.memory.buffer_param(self.buffer, p)
        return super()._rest(p)

    def begin_update(self) -> None:
        super().begin_update()
        self.written = False
        self.epoch = self._parallel.epoch_to_come()

    def may_write(self) -> None:
        """Worker, before an update: block until no rank of the node reads the memory that it writes."""
        if not self.gathered:
            self._parallel.wait_epoch(self.epoch)

    def offer(self) -> None:
        """Worker: this rank's chunk is updated."""
        self.written = True
        self._worker.notify()

    @property
    def host_ready(self) -> bool:
        return self.arrived == self.generation

    def loadable(self) -> bool:
        return self.host_ready

    def hold(self, stream: Stream) -> None:
        self._worker.wait_for(lambda: self.host_ready)

    def wait(self) -> None:
        if not self.pending:
            return
        self._worker.wait_for(lambda: self.host_ready)
        if self.gathered:
            self._backend.compute.wait(self.uploaded)
        self.pending = False

    def upload_job(self, after: Event | None) -> Upload | None:
        return None  # `spread` uploads

    def upload(self) -> None:
        """Bring the latest values to the buffer now (arming, edits, loading). Every rank calls."""
        if self.gathered:
            self._parallel.lane.call(lambda: self.spread(None, self.generation))
        else:
            self.arrived = self.generation

    def spread(self, after: Event | None, generation: int) -> None:
        """Lane: once this rank's chunk is written, make the whole unit readable. `after`: nobody reads the old buffer
        on this device behind it."""
        backend, parallel = self._backend, self._parallel
        self._worker.wait_for(lambda: self.written)
        backend._at("gather")
        if self.gathered:
            assert self.buffer is not None
            first = self.mine.rank * self.mine.cut.chunk
            nbytes = self.mine.last - self.mine.first
            compute = backend.compute
            if after is not None:
                compute.wait(after)
                self._upload.wait(after)
            if nbytes:
                self._upload.copy(self.buffer[first : first + nbytes], self.mine.param.host[:nbytes])
            self._upload.record(self._chunk_up)
            compute.wait(self._chunk_up)
            chunk = self.buffer[first : first + self.mine.cut.chunk]
            parallel.ranks.all_gather(self.buffer, chunk, parallel.lane.wait, parallel.ranks.shard)
            compute.record(self.uploaded)
        else:
            parallel.meet_near()
        self.arrived = generation
        self._worker.notify()

    # -- the backward copy of DFGB -------------------------------------------------------------------------------------
    def load_for_backward(self) -> None:
        if not self._reloaded:
            self.left = True
            self._parallel.loads.left()

    def reload_into(self) -> torch.Tensor:
        """The buffer, to be loaded behind `last_read`: the backward pass will read it."""
        assert self.buffer is not None
        self._backend.compute.record(self.last_read)
        self._reloaded = True
        return self.buffer

    def reload_alone(self) -> None:
        """Bring all of it over this rank's own link."""
        into = self.reload_into()[: self.mine.cut.nbytes]
        self.hold(self._reload)
        self.loaded.hold(self._reload)
        self._reload.wait(self.last_read)
        self._reload.copy(into, self.region[: into.numel()])
        self.loaded.record_now(self._reload)

    def for_backward(self) -> torch.Tensor | None:
        if self.mode is not Mode.DFGB:
            return super().for_backward()
        if not self._reloaded:
            self._parallel.loads.reach_buffer(self)
        self.loaded.hold(self._backend.compute)
        return self.buffer
