"""Data parallel, armed: residents, updates, clipping and checkpoints of an engine that has other ranks.

    unit is       in this rank's arena            after its update
    GFGB          its chunk                       chunk uploaded, buffer gathered from all ranks on the device
    DHA           all of it, once per node        ranks of the node meet: every chunk is written
    DFGB, STREAM  the same                        the same; each rank copies what it reads

Memory that several ranks read carries an epoch: nobody writes it in a step before all ranks of the node have passed
that step on their device, and nobody reads it before all chunks are written. Both are meetings on the lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from memferry_ascend import arming, hostmath, limits, shards
from memferry_ascend.arena import Arena, UnitMemory
from memferry_ascend.backends.base import Backend, Event, Stream
from memferry_ascend.backends.hostmem import forget
from memferry_ascend.config import Config
from memferry_ascend.errors import FerryError
from memferry_ascend.exchange import ShardedGradients
from memferry_ascend.hostupdate import Hypers, UnitUpdate, is_native
from memferry_ascend.jobs import PythonJobs, Scale, Upload, combine, factor
from memferry_ascend.lane import Abandoned, Lane
from memferry_ascend.layers import Layer, Param, Unit
from memferry_ascend.parallel import Ranks, must_agree
from memferry_ascend.planner.plan import Mode, Plan
from memferry_ascend.recorder import Recorder
from memferry_ascend.ring import Ring
from memferry_ascend.shadow import Resident
from memferry_ascend.shards import Cut, ShardMemory
from memferry_ascend.worker import Priority

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
)
"""torch optimizers that update each element from its own gradient and state: they work on any part of a parameter."""


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that must see whole parameters.

    Raises:
        FerryError: the class is not known to work element by element and does not say so (`elementwise = True`).
    """
    kind = type(optimizer)
    known = kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim")
    if not known and not getattr(optimizer, "elementwise", False):
        raise FerryError(
            f"data parallel cuts parameters between ranks, and {kind.__name__} is not known to update each element by "
            f"itself; use one of {', '.join(sorted(ELEMENTWISE))}, or set {kind.__name__}.elementwise = True if it does"
        )


def meet(
    ranks: Ranks,
    layers: list[Layer],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Any,
    plan: Plan | None,
) -> None:
    """Raise on every rank, naming the difference, unless all were given the same."""
    import dataclasses

    from memferry_ascend import __version__

    refuse(optimizer)
    params = [p for layer in layers for p in layer.params]
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("threads", "assist_devices")}
    groups = {
        f"group {i} {k}": v if not isinstance(v, torch.Tensor) else v.tolist()
        for i, g in enumerate(optimizer.param_groups)
        for k, v in g.items()
        if k != "params"
    }
    must_agree(
        ranks,
        {
            "version": {"memferry_ascend": __version__, "torch": torch.__version__},
            "config": settings,
            "model": {
                p.name: (tuple(p.shape), str(p.param.dtype), p.trainable, tuple(p.aliases)) for p in params
            },
            "optimizer": {"class": type(optimizer).__name__, **groups}
            | {f"group of {p.name}": p.group for p in params},
            "plan": plan_entries(plan),
        },
    )
    buffers = {f"buffer {n}": b for n, b in model.named_buffers()}
    values = {p.name: p.param.detach() for p in params} | buffers
    must_agree(ranks, {"initial value": {k: _checksum(v) for k, v in values.items()}})


def plan_entries(plan: Plan | None) -> dict[str, Any]:
    """What ranks must agree on in a plan."""
    if plan is None:
        return {}
    return {lp.name: (str(lp.mode), str(lp.grad), str(lp.update)) for lp in plan.layers}


def _checksum(t: torch.Tensor) -> int:
    """A sum of the bit patterns: enough to tell seeds apart, at memory speed."""
    flat = t.detach().contiguous().reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return int(words.sum(dtype=torch.int64)) ^ (int(words[::7].sum(dtype=torch.int64)) << 1)


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
        self._mine = mine
        self._parallel = parallel
        self._worker = parallel.jobs.worker
        super().__init__(unit, whole, backend, parallel.jobs, ring)
        self.shard = mine
        self.written = True
        """This rank's chunk holds the latest values."""
        self._readable = True
        """So do the chunks of all ranks, where this rank reads them."""
        self.epoch = 0
        self._chunk_up = backend.event()

    @property
    def gathered(self) -> bool:
        """The whole unit exists on the device only."""
        return self.mode is Mode.GFGB

    def _buffer_bytes(self) -> int:
        cut = self._mine.cut
        return cut.chunk * cut.size if self.mode is Mode.GFGB else cut.nbytes

    def master(self, p: Param) -> torch.Tensor:
        own = self._mine.master(p)
        return self._parallel.ranks.concatenate(own, counts_of(self._mine.cut, p)).view(p.shape)

    def set_master(self, p: Param, value: torch.Tensor) -> None:
        self._mine.set_master(p, value)

    def last_value(self, p: Param) -> torch.Tensor:
        return self.rest[p.index].detach().to("cpu", copy=True)

    def _rest(self, p: Param) -> torch.Tensor:
        if self.gathered:  # also what rides along to be read in place: the whole unit is here only
            assert self.buffer is not None
            return self.memory.buffer_param(self.buffer, p)
        return super()._rest(p)

    def begin_update(self) -> None:
        super().begin_update()
        self.written = self._readable = False
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
        return self._readable

    def loadable(self) -> bool:
        return self._readable

    def hold(self, stream: Stream) -> None:
        self._worker.wait_for(lambda: self._readable)

    def wait(self) -> None:
        if not self.pending:
            return
        self._worker.wait_for(lambda: self._readable)
        if self.gathered:
            self._backend.compute.wait(self.uploaded)
        self.pending = False

    def upload_job(self, after: Event | None) -> Upload | None:
        return None  # `spread` uploads

    def upload(self) -> None:
        """Bring the latest values to the buffer now (arming, edits, loading). Every rank calls."""
        if self.gathered:
            self._parallel.lane.call(lambda: self.spread(None))

    def spread(self, after: Event | None) -> None:
        """Lane: once this rank's chunk is written, make the whole unit readable. `after`: nobody reads the old buffer
        on this device behind it."""
        backend, parallel = self._backend, self._parallel
        self._worker.wait_for(lambda: self.written)
        backend._at("gather")
        if self.gathered:
            assert self.buffer is not None
            first = self._mine.rank * self._mine.cut.chunk
            nbytes = self._mine.last - self._mine.first
            compute = backend.compute
            if after is not None:
                compute.wait(after)
                self._upload.wait(after)
            if nbytes:
                self._upload.copy(self.buffer[first : first + nbytes], self._mine.param.host[:nbytes])
            self._upload.record(self._chunk_up)
            compute.wait(self._chunk_up)
            chunk = self.buffer[first : first + self._mine.cut.chunk]
            parallel.ranks.all_gather(self.buffer, chunk, parallel.lane.wait)
            compute.record(self.uploaded)
        else:
            parallel.meet_near()
        self._readable = True
        if self.ring is not None:
            self.ring.offer(self)
        self._worker.notify()


class ShardedJobs(PythonJobs):
    """Norms are over all ranks: squares by parameter, added in rank order, combined in registration order."""

    lane: Lane
    ranks: Ranks

    def norm(self, waits: Sequence[Event], pieces: Sequence[tuple[int, torch.Tensor]], limit: float) -> Scale:
        scale = Scale()
        self._norms += 1
        mine: list[torch.Tensor] = []

        def here() -> None:
            for event in waits:
                event.synchronize()
            sums = [hostmath.sum_squares(grad) if grad.numel() else 0.0 for _, grad in pieces]
            mine.append(torch.tensor(sums, dtype=torch.float64))
            self.worker.notify()

        def together() -> None:
            self.worker.wait_for(lambda: len(mine) > 0)
            rows = self.ranks.exchange(mine[0], self.lane.wait, near=True)
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            indices = [index for index, _ in pieces]
            scale.norm = combine(dict(zip(indices, total.tolist(), strict=True)))
            scale.value = factor(limit, scale.norm)
            self._norms -= 1
            self.worker.notify()

        def settled() -> None:
            self.worker.wait_for(lambda: scale.norm >= 0 or math.isnan(scale.norm))

        self.worker.submit(Priority.NORM, here)
        self.lane.submit(together)
        self.worker.submit(Priority.NORM, settled)
        return scale

    def failure(self) -> str | None:
        return None if isinstance(self.worker.error, Abandoned) else super().failure()


class DataParallel:
    """What an engine with other ranks has besides."""

    def __init__(self, ranks: Ranks, units: list[Unit], backend: Backend, recorder: Recorder) -> None:
        self.ranks = ranks
        self.cuts = [Cut(unit, ranks.local) for unit in units]
        self.jobs = ShardedJobs(backend, len(units), recorder)
        self._worker = self.jobs.worker
        self.lane = Lane(ranks, backend, self._worker)
        self.jobs.lane, self.jobs.ranks = self.lane, ranks
        self._backend = backend
        self._asked_epoch = 0
        self._epoch = 0
        self._last_spread = 0
        self.gradients: ShardedGradients | None = None

    # -- arming --------------------------------------------------------------------------------------------------------
    def arm(
        self,
        units: list[Unit],
        arena: Arena,
        native: bool,
        ring: Ring | None,
        optimizer: torch.optim.Optimizer,
    ) -> tuple[list[Resident], dict[int, UnitUpdate]]:
        """This rank's chunks, filled, and what runs on them."""
        memories = shards.fill(units, self.cuts, self.ranks.index, arena, native)
        residents: list[Resident] = [
            ShardedResident(u, whole, mine, self._backend, ring, self)
            for u, (whole, mine) in zip(units, memories, strict=True)
        ]
        updates = self._updates([mine for _, mine in memories], optimizer)
        for resident in residents:
            update = updates.get(resident.unit.index)
            if isinstance(update, ShardedUpdate) and isinstance(resident, ShardedResident):
                update.before = resident.may_write
        # All ranks have mapped and filled the shared slabs then: their names can go.
        self.ranks.barrier()
        for name in arena.shared_names:
            forget(name)
        self.ranks.barrier()
        return residents, updates

    def make_gradients(self, *args: Any, **options: Any) -> ShardedGradients:
        self.gradients = ShardedGradients(
            *args, ranks=self.ranks, lane=self.lane, settled=self._settled, **options
        )
        return self.gradients

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that exchanges hold."""
        return self.gradients.buffers.nbytes if self.gradients is not None else 0

    def _updates(self, mine: list[ShardMemory], optimizer: torch.optim.Optimizer) -> dict[int, UnitUpdate]:
        """Every unit with trainable parameters has an update on every rank, whatever its chunk holds."""
        made = arming.make_updates(list(mine), optimizer, load=False)
        native = is_native(optimizer)
        out: dict[int, UnitUpdate] = {}
        for memory in mine:
            update = ShardedUpdate(made.get(memory.unit.index), memory, self.ranks, native)
            if update.whole:
                for p in update.whole:
                    if optimizer.state.get(p.param):
                        update.check_state(p, optimizer.state[p.param])
                        update.load_state(p, optimizer.state[p.param])
                out[memory.unit.index] = update
        return out

    def _settled(self) -> None:
        """The last step's results have been issued: its event may be recorded again."""
        self.lane.finish(self._last_spread)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def epoch_to_come(self) -> int:
        """What an update handed over now must wait for before it writes shared memory; 0: nothing, because its
        unit's exchange showed that every rank is done with it."""
        early = self.gradients is not None and self.gradients.early
        return 0 if early else self._asked_epoch + 1

    def wait_epoch(self, number: int) -> None:
        self._worker.wait_for(lambda: self._epoch >= number)

    def meet_near(self) -> None:
        """Lane: all ranks of the node are here."""
        self.ranks.exchange(torch.zeros(1, dtype=torch.uint8), self.lane.wait, near=True)

    def spread(self, residents: list[Resident], after: Event) -> None:
        """A step's updates have been handed over: make their results readable, in registration order."""
        some = [r for r in residents if isinstance(r, ShardedResident)]
        if any(not r.gathered for r in some):

            def open_epoch() -> None:
                after.synchronize()
                self.meet_near()
                self._epoch += 1
                self._worker.notify()

            self.lane.submit(open_epoch)
            self._asked_epoch += 1
        for r in sorted(some, key=lambda r: r.unit.index):
            self._last_spread = self.lane.submit(lambda r=r: r.spread(after))  # type: ignore[misc]

    # -- edits, loading, closing ---------------------------------------------------------------------------------------
    @contextmanager
    def writing(self, synchronize: Callable[[], None]) -> Iterator[None]:
        """A block that writes the arena from the user's thread: nobody reads it meanwhile. Every rank enters."""
        synchronize()
        self.ranks.barrier()
        yield
        self.ranks.barrier()

    @contextmanager
    def edit(self, engine: Engine) -> Iterator[torch.nn.Module]:
        """Parameters bound to private copies on the device; on leaving, what changed becomes the master. Every rank
        must make the same edit."""
        engine.synchronize()
        copies = []
        for r in engine._residents:
            for p in r.unit.params:
                private = r.rest[p.index].detach().clone()
                copies.append((r, p, private.clone()))
                p.param.data = private
        try:
            yield engine.model
        finally:
            with self.writing(self._backend.compute.synchronize):
                for r, p, before in copies:
                    mine = r.shard
                    assert isinstance(mine, ShardMemory)
                    piece = mine.of.get(p.index)
                    if piece is None:
                        continue
                    part = slice(piece.start, piece.start + piece.count)
                    now, was = (t.reshape(-1)[part].to("cpu") for t in (p.param.detach(), before))
                    words = torch.int16 if p.dtype.itemsize == 2 else torch.int32
                    changed = now.view(words) != was.view(words)
                    mine.host_param(p)[changed] = now[changed]
                    if p.trainable and p.dtype is torch.bfloat16:
                        mine.host_state("lo", p)[changed] = 0
            from memferry_ascend import checkpoint

            checkpoint.refresh(engine, engine._residents)

    def quiesce(self) -> None:
        """Let the last step's results arrive; what belongs to an unfinished pass is abandoned, on this rank alone."""
        with suppress(FerryError):  # kept by the worker
            self.lane.finish(self._last_spread)
        idle = self.lane.idle
        self.lane.close()
        if not idle and self._worker.error is None:
            self._worker.fail(Abandoned("the engine was closed between a backward and its step"))


def choose(ranks: Ranks, given: Plan | None, found: Plan) -> Plan:
    """The plan that all ranks run: what they were given, or what rank 0 found (measurements differ by rank)."""
    return found if given is not None else ranks.from_first(found)


def need(units: list[Unit], ranks: Ranks, optimizer: torch.optim.Optimizer, config: Config) -> dict[str, int]:
    """Bytes of this rank's arena by kind; refuses before anything is allocated. Without a bound of the user's, all ranks
    of the node must fit into its memory together."""
    cuts = [Cut(unit, ranks.local) for unit in units]
    mine = shards.arena_bytes(units, cuts, ranks.index, is_native(optimizer), config.accumulate)
    state = {k: -(-v // ranks.local) for k, v in limits.state_bytes(units, optimizer).items()}
    total = mine | state
    if config.host_bytes is None:
        total = {k: v if k == "shared" else v * ranks.local for k, v in total.items()}
    limits.check_host(total, config.host_bytes)
    return mine


def token(ranks: Ranks) -> str:
    """A name that no other job has, the same on all ranks of a node."""
    import secrets

    return f"memferry-{ranks.from_first(secrets.token_hex(8))}-{ranks.node}"
