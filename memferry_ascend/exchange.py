"""One unit's gradients, exchanged and averaged on the device: the lane's part of `sharded_gradients.py`.

Ranks of a node swap packed chunks, and each adds those of its own in fp32 in rank order; across nodes the owners of a
chunk reduce it, in node order. The sum is divided by the number of ranks, rounded to the gradient's dtype, and downloaded
to this rank's part of host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.gradients import UnitGrads
from memferry_ascend.lane import Lane, LaneEvent
from memferry_ascend.parallel import Ranks
from memferry_ascend.shards import ShardMemory


@dataclass(eq=False)
class ShardedGrads(UnitGrads):
    """One unit's gradients in this pass, and how far its exchanges are. Both pairs of `events` are one: an update has
    run before the next gradient of its unit is exchanged."""

    here: dict[int, torch.Tensor] = field(default_factory=dict)
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    """Parameters whose arrival in this pass is in `GradState.arrivals` already."""
    gone: bool = False
    """Exchanged in this pass."""
    packed: LaneEvent = field(kw_only=True)
    """On the lane's stream: the device gradients have been copied and may be let go."""
    reduced: Event = field(kw_only=True)

    @property
    def mine(self) -> ShardMemory:
        memory = self.resident.shard
        assert isinstance(memory, ShardMemory)
        return memory

    @property
    def arrived(self) -> LaneEvent:
        """`downloaded`, as what it is."""
        event = self.downloaded
        assert isinstance(event, LaneEvent)
        return event


class Exchange:
    """Runs on the lane. Device memory for one exchange at a time, and two results whose download may lag behind."""

    def __init__(self, units: list[ShardedGrads], ranks: Ranks, lane: Lane, backend: Backend) -> None:
        self._ranks, self._lane, self._backend = ranks, lane, backend
        self._download = backend.stream("download")
        self._dtypes = {s.p.index: s.p.dtype for ug in units for s in ug.states}
        cuts = [ug.mine.cut for ug in units]
        packed = max(max(c.packed) for c in cuts)
        self._send = backend.alloc_device(max(*(c.total for c in cuts), 1))
        self._received = backend.alloc_device(max(packed * ranks.local, 1))
        self._results = [(backend.alloc_device(max(packed, 1)), backend.event()) for _ in range(2)]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        return sum(t.numel() for t in (self._send, self._received, *(r for r, _ in self._results)))

    def run(self, ug: ShardedGrads, grads: dict[int, torch.Tensor]) -> None:
        """`grads` are this rank's, by parameter index; the rest counts as zero."""
        backend, ranks, lane = self._backend, self._ranks, self._lane
        cut, compute = ug.mine.cut, self._backend.compute
        compute.wait(ug.ready)
        backend._at("exchange")
        with torch.no_grad():
            send = self._send[: cut.total].zero_()
            for index, grad in grads.items():
                flat = grad.detach().reshape(-1)
                dtype = self._dtypes[index]
                for at, start, count in cut.sends.get(index, ()):
                    target = send[at : at + count * dtype.itemsize].view(dtype)
                    target.copy_(flat[start : start + count])
            compute.record(ug.packed.inner)
            ug.packed.issued()
            own = cut.packed[ug.mine.rank]
            received = self._received[: own * ranks.local]
            ranks.all_to_all(received, send, [own] * ranks.local, cut.packed, lane.wait)
            result, free = self._results[self._turn]
            self._turn ^= 1
            compute.wait(free)
            rows = received.view(ranks.local, own)
            for run in cut.runs[ug.mine.rank]:
                part = slice(run.packed, run.packed + run.nbytes)
                total = rows[0, part].view(run.dtype).to(torch.float32, copy=True)
                for r in range(1, ranks.local):
                    total.add_(rows[r, part].view(run.dtype))
                if ranks.nodes > 1:
                    total = self._across(total)
                result[part].view(run.dtype).copy_(total.div_(ranks.size))
        compute.record(ug.reduced)
        if own:
            assert ug.mine.grad is not None
            self._download.wait(ug.reduced)
            self._download.copy_many(
                [
                    (
                        ug.mine.grad.host[run.placed : run.placed + run.nbytes],
                        result[run.packed : run.packed + run.nbytes],
                    )
                    for run in cut.runs[ug.mine.rank]
                ]
            )
        self._download.record(ug.arrived.inner)
        self._download.record(free)
        ug.arrived.issued()

    def _across(self, total: torch.Tensor) -> torch.Tensor:
        """Sum fp32 values over the nodes, in node order: reduced in parts, then gathered."""
        nodes, n = self._ranks.nodes, total.numel()
        part = -(-n // nodes)
        padded = torch.zeros(part * nodes, dtype=torch.float32, device=total.device)
        padded[:n].copy_(total)
        rows = torch.empty_like(padded)
        split = [part * 4] * nodes
        self._ranks.all_to_all(
            rows.view(torch.uint8), padded.view(torch.uint8), split, split, self._lane.wait, across=True
        )
        mine = rows.view(nodes, part)[0].clone()
        for k in range(1, nodes):
            mine.add_(rows.view(nodes, part)[k])
        self._ranks.all_gather(
            padded.view(torch.uint8), mine.view(torch.uint8), self._lane.wait, self._ranks.across
        )
        return padded[:n]
