"""Data parallel, armed: what an engine with other ranks has besides, its steps, edits and norms.

Memory that several ranks read (`sharded_units.py`) carries an epoch: nobody writes it in a step before all ranks of the
node have passed that step on their device, and nobody reads it before all chunks are written. Both are meetings on the
lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from memferry_ascend import arming, hostmath, limits, shards
from memferry_ascend.arena import Arena
from memferry_ascend.backends.base import Backend, Event, align
from memferry_ascend.backends.hostmem import forget
from memferry_ascend.config import Config
from memferry_ascend.errors import FerryError
from memferry_ascend.hostupdate import UnitUpdate, is_native
from memferry_ascend.jobs import PythonJobs, Scale, combine, factor
from memferry_ascend.lane import Abandoned, Lane
from memferry_ascend.layers import Unit
from memferry_ascend.loads import Loads, SharedRing
from memferry_ascend.parallel import Ranks
from memferry_ascend.planner.plan import Mode
from memferry_ascend.recorder import Recorder
from memferry_ascend.ring import Ring
from memferry_ascend.shadow import Resident
from memferry_ascend.sharded_gradients import ShardedGradients
from memferry_ascend.sharded_units import ShardedResident, ShardedUpdate
from memferry_ascend.shards import Cut, ShardMemory
from memferry_ascend.worker import Priority

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine


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
        self.lane = Lane(ranks, backend, self._worker, "lane")
        self.loads = Loads(ranks, backend, self._worker)
        self.jobs.lane, self.jobs.ranks = self.lane, ranks
        self._backend = backend
        self._asked_epoch = 0
        self._epoch = 0
        self._last_spread = 0
        self._residents: list[ShardedResident] = []
        self._order_agreed = False
        self.gradients: ShardedGradients | None = None

    # -- arming --------------------------------------------------------------------------------------------------------
    def make_ring(self, units: list[Unit], slots: int) -> Ring | None:
        """`arming.make_ring`, its slots with room for whole chunks."""
        shape = limits.ring_shape(units, slots)
        if shape is None:
            return None
        streamed = [cut for unit, cut in zip(units, self.cuts, strict=True) if unit.plan.mode is Mode.STREAM]
        nbytes = max(cut.chunk * cut.size for cut in streamed)
        return SharedRing(self._backend, shape[0], nbytes, self.loads, self._worker)

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
        self._residents = [
            ShardedResident(u, whole, mine, self._backend, ring, self)
            for u, (whole, mine) in zip(units, memories, strict=True)
        ]
        self.loads.arrange(self._residents)
        updates = self._updates([mine for _, mine in memories], optimizer)
        for resident in self._residents:
            update = updates.get(resident.unit.index)
            if isinstance(update, ShardedUpdate):
                update.before = resident.may_write
        # All ranks have mapped and filled the shared slabs then: their names can go.
        self.ranks.barrier()
        for name in arena.shared_names:
            forget(name)
        self.ranks.barrier()
        return list(self._residents), updates

    def make_gradients(self, *args: Any, **options: Any) -> ShardedGradients:
        self.gradients = ShardedGradients(
            *args, ranks=self.ranks, lane=self.lane, loads=self.loads, settled=self._settled, **options
        )
        return self.gradients

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that exchanges and loads hold."""
        buffers = self.gradients.exchange.nbytes if self.gradients is not None else 0
        return buffers + self.loads.nbytes

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
            self._last_spread = self.lane.submit(lambda r=r, g=r.generation: r.spread(after, g))  # type: ignore[misc]

    def next_pass(self, ring: Ring | None) -> None:
        """The step's work is handed over: loads for the next pass may begin. After the first step rank 0 says in which
        order units are needed: ranks whose data led them elsewhere have learned others."""
        if self.loads.active and not self._order_agreed:
            self._order_agreed = True
            places = self.ranks.from_first({r.unit.index: r.order for r in self._residents})
            ordered = sorted(self._residents, key=lambda r: places[r.unit.index])
            if ring is not None:
                ring.arrange([r for r in ordered if r.ring is not None])
            self.loads.arrange(ordered)
        self.loads.step()

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
                shared = isinstance(r, ShardedResident) and not r.gathered
                # The device face of host memory may be no copy's operand.
                source = r.memory.host_param(p) if shared else r.rest[p.index]
                private = source.detach().to(self._backend.device, copy=True)
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
        self.loads.close()
        idle = self.lane.idle
        self.lane.close()
        if not idle and self._worker.error is None:
            self._worker.fail(Abandoned("the engine was closed between a backward and its step"))


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


def device_need(units: list[Unit], ranks: Ranks) -> int:
    """Bytes on the device beside the plan's: buffers of exchanges, and where loads land that nobody needs."""
    cuts = [Cut(unit, ranks.local) for unit in units]
    packed = max(max(c.packed) for c in cuts)
    buffers = [max(c.total for c in cuts), packed * ranks.local, packed, packed]
    moving = [
        c.chunk * c.size for c, u in zip(cuts, units, strict=True) if u.plan.mode in (Mode.DFGB, Mode.STREAM)
    ]
    return sum(align(max(n, 1)) for n in buffers) + max(moving, default=0)


def token(ranks: Ranks) -> str:
    """A name that no other job has, the same on all ranks of a node."""
    import secrets

    return f"memferry-{ranks.from_first(secrets.token_hex(8))}-{ranks.node}"
