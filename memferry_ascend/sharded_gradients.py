"""Gradients across ranks: exchanged and averaged on the device unit by unit (`exchange.py`), each rank downloading its
shard.

One *pass* is what lies between two forward passes, or a forward and the step: usually one backward. In a pass every
unit is exchanged once, in reverse registration order, each as soon as the gradients it is expected to get are there and
its predecessors have gone; units complete in different orders on different ranks, the exchanges do not. At the end of
the pass (`finish`) ranks tell each other which gradients they have. A parameter that any rank has a gradient for takes
part on all of them, the others contributing zeros; one that no rank used keeps no gradient, as in plain PyTorch. What
came after its unit had gone (a second backward through the same graph) goes in a second round. The next pass expects
what this one had, so that an unused layer holds up nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memferry_ascend.arena import Arena
from memferry_ascend.backends.base import Backend
from memferry_ascend.errors import FerryError
from memferry_ascend.exchange import Exchange, ShardedGrads
from memferry_ascend.gradients import Gradients, GradState, UnitGrads
from memferry_ascend.jobs import PythonJobs
from memferry_ascend.lane import Lane, LaneEvent
from memferry_ascend.loads import Loads
from memferry_ascend.parallel import Ranks
from memferry_ascend.shadow import Resident

_KINDS = {"forward": 1, "step": 2, "zero_grad": 3, "clip_grad_norm_": 4, "another forward": 5}
_HEAD = 3
"""What a rank says of itself before it says what gradients it has: settled passes, where it is, forwards."""


class ShardedGradient(torch.Tensor):
    """Stands for `p.grad` while its parts are on several ranks: has the parameter's shape, and refuses to be read."""

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> ShardedGradient:
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise FerryError(
            f"p.grad was used by {func}, but with several ranks every rank keeps only a part of each gradient; clip "
            "with Config.max_grad_norm or engine.clip_grad_norm_(), and do not read or change p.grad"
        )


class ShardedGradients(Gradients):
    """`Gradients` with other ranks. `early` is set while `final` runs for a unit that this pass completed."""

    def __init__(
        self,
        residents: list[Resident],
        arena: Arena,
        backend: Backend,
        jobs: PythonJobs,
        *,
        ranks: Ranks,
        lane: Lane,
        loads: Loads,
        settled: Callable[[], None],
        **options: Any,
    ) -> None:
        self._ranks, self._lane, self._loads, self._settled = ranks, lane, loads, settled
        self.open = False
        self.syncing = True
        self._worker = jobs.worker
        self._local: dict[int, torch.Tensor] = {}
        """Sums of what this rank has not exchanged (no_sync), fp32, flat, in host memory as the device sees it."""
        self._pending: set[int] = set()
        """Parameters whose local sum holds something."""
        self._synced = False
        """Something of this pass is to be exchanged."""
        self._next = 0
        self._pass = 0
        super().__init__(residents, arena, backend, jobs, **options)
        self._trainable = [s for ug in self.units for s in ug.states]
        self._number = {s.p.index: i for i, s in enumerate(self._trainable)}
        self._expected = set(self._number)
        self._order = list(reversed(self._sharded))
        self.early = False
        self.exchange = Exchange(self._sharded, ranks, lane, backend)

    @property
    def _sharded(self) -> list[ShardedGrads]:
        return [ug for ug in self.units if isinstance(ug, ShardedGrads)]

    def _unit(self, resident: Resident, states: list[GradState]) -> UnitGrads:
        event, worker = self._backend.event, self._worker
        pair = event(), LaneEvent(event(), worker)
        return ShardedGrads(
            resident, states, (pair, pair), packed=LaneEvent(event(), worker), reduced=event()
        )

    def _bind(self, ug: UnitGrads) -> None:
        return None

    def _bind_sums(self, ug: UnitGrads) -> None:
        return None

    # -- during the backward pass ------------------------------------------------------------------------------------
    def _before_hook(
        self, ug: UnitGrads, s: GradState
    ) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        param = s.p.param

        def before(_grad: torch.Tensor | None) -> None:
            if s.published is not None:
                if param.grad is None:
                    raise FerryError(
                        f"parameter {s.p.name!r}: its gradient was discarded between a forward and a backward; with "
                        "several ranks call optimizer.zero_grad() instead, on every rank"
                    )
                if param.grad is s.published:
                    param.grad = None
                s.published = None

        return before

    def arrive(self, ug: UnitGrads, s: GradState, grad: torch.Tensor | None) -> None:
        assert isinstance(ug, ShardedGrads)
        assert grad is not None, "several ranks exchange gradients: no kernel writes them to the host"
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        if self._final is not None and s.arrivals + 1 > self._accumulate:
            raise FerryError(
                f"parameter {s.p.name!r}: gradient {s.arrivals + 1} before step(), but accumulate={self._accumulate} "
                'was declared with update="backward"; declare the true number, or use update="step"'
            )
        if grad.is_sparse:
            grad = grad.to_dense()
        self.open = True
        if ug not in self._arrived:
            self._arrived.append(ug)
        if not self.syncing:
            self._keep_local(s, grad)
            return
        self._synced = True
        into = ug.late if ug.gone else ug.here
        before = into.get(s.p.index)
        into[s.p.index] = grad if before is None else before.float() + grad.float()
        self._advance()

    def _keep_local(self, s: GradState, grad: torch.Tensor) -> None:
        """no_sync: add to a sum of this rank's own, through the device's alias of host memory."""
        if s.p.index not in self._local:
            region = self._arena.region("unsynced", s.p.numel * 4, mapped=True)
            assert region.device is not None
            self._local[s.p.index] = region.device[: s.p.numel * 4].view(torch.float32)
        self._local[s.p.index].add_(grad.reshape(-1))
        self._pending.add(s.p.index)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """`Engine.no_sync`."""
        if not self.publishes:
            raise FerryError(
                'no_sync needs update="step": with "backward" every gradient is exchanged as it comes'
            )
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def _with_local(self, ug: ShardedGrads, grads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """`grads`, and what no_sync has left of this unit."""
        out = dict(grads)
        for s in ug.states:
            i = s.p.index
            if i in self._pending:
                self._pending.discard(i)
                total = self._local[i]
                out[i] = total.clone() if i not in out else total + out[i].reshape(-1)
                total.zero_()
        return out

    def _advance(self) -> None:
        """Exchange what is complete, in order."""
        while self._next < len(self._order):
            ug = self._order[self._next]
            wanted = [s.p.index for s in ug.states if s.p.index in self._expected]
            if wanted:
                if not all(i in ug.here for i in wanted):
                    return
                self._send_unit(ug, ug.here)
                ug.gone = True
            self._next += 1

    def _send_unit(self, ug: ShardedGrads, grads: dict[int, torch.Tensor]) -> None:
        """Queue one exchange of a unit. `grads` are this rank's, by parameter index; the rest counts as zero."""
        ug.resident.wait()  # an update in flight reads what the download overwrites
        if any(s.arrivals for s in ug.states):
            self._start_summing()
            unfolded = [s for s in ug.states if s.folded < s.arrivals]
            if unfolded:
                self._fold(ug, unfolded)
        if self.summing:
            self._jobs.wait_folds(ug.resident.unit.index)
        grads = self._with_local(ug, grads)
        self._backend.compute.record(ug.ready)
        ug.packed.ask()
        ug.arrived.ask()
        tensors = list(grads.values())
        self._lane.submit(lambda: self.exchange.run(ug, grads))
        nbytes = sum(g.numel() * g.element_size() for g in tensors)
        self._in_flight.append((ug.packed, tensors, nbytes))
        self._in_flight_bytes += nbytes
        self._count(ug, [s for s in ug.states if s.p.index in grads])
        while self._in_flight_bytes > self._window and len(self._in_flight) > 1:
            self._let_go()

    def _count(self, ug: ShardedGrads, states: list[GradState]) -> None:
        for s in states:
            s.arrivals += 1
            s.zeroed = False
            ug.counted.add(s.p.index)
        if self.summing and states:
            self._fold(ug, states)
        if self._final is not None and states and all(s.arrivals == self._accumulate for s in ug.states):
            self.early = True
            self._final(ug)
            self.early = False

    def _let_go(self) -> None:
        packed, tensors, nbytes = self._in_flight.popleft()
        assert isinstance(packed, LaneEvent)
        packed.wait_issued()
        self._backend.compute.wait(packed.inner)
        self._in_flight_bytes -= nbytes
        tensors.clear()

    # -- between passes ----------------------------------------------------------------------------------------------
    def _end(self, task: int) -> None:
        self._passes.discard(task)
        if self.backward_ended is not None:
            self.backward_ended()
        if not self._passes:  # not a reentrant checkpoint's own
            self._loads.drain()
        arrived, self._arrived = self._arrived, []
        if not self.publishes:
            return
        for ug in arrived:
            assert isinstance(ug, ShardedGrads)
            for s in ug.states:
                i = s.p.index
                here = i in ug.here or i in ug.late or i in ug.counted or i in self._pending
                if here and s.published is None:
                    s.p.param.grad = ShardedGradient(s.p.param)
                    s.published = s.p.param.grad

    def finish(self, at: str) -> None:
        """Settle this pass with the other ranks. At the step always, elsewhere if this pass has begun.

        Raises:
            FerryError: other ranks are elsewhere (more or fewer backwards before a step).
        """
        nothing = not self.open or (
            at in ("forward", "zero_grad") and not self._synced
        )  # or all under no_sync
        if nothing and at != "step":
            self.open = False
            if at == "forward" and self._loads.used:
                self._compare(self._row("another forward"))
            return
        row = self._row(at)
        n = len(self._trainable)
        for ug in self._sharded:
            for s in ug.states:
                i = _HEAD + 3 * self._number[s.p.index]
                row[i] = any(s.p.index in have for have in (ug.here, ug.counted, self._pending))
                row[i + 1] = s.p.index in ug.late
                row[i + 2] = s.published is not None and s.p.param.grad is None
        rows = self._compare(row)
        if at == "step":
            self._settled()
        first, late, dropped = rows[:, _HEAD:].amax(0).view(n, 3).bool().unbind(1)
        is_first, is_late, is_dropped = first.tolist(), late.tolist(), dropped.tolist()
        for ug in self._order:
            if not ug.gone and any(is_first[self._number[s.p.index]] for s in ug.states):
                self._send_unit(ug, ug.here)
                ug.gone = True
            self._count(
                ug,
                [s for s in ug.states if is_first[self._number[s.p.index]] and s.p.index not in ug.counted],
            )
        for ug in self._order:
            ug.counted.clear()
            again = [s for s in ug.states if is_late[self._number[s.p.index]]]
            if again:
                self._send_unit(ug, ug.late)
                self._count(ug, [s for s in again if s.p.index not in ug.counted])
        for ug in self._order:
            ug.here, ug.late, ug.gone = {}, {}, False
            ug.counted.clear()
            for s in ug.states:
                if is_dropped[self._number[s.p.index]]:
                    s.arrivals = s.folded = 0
                    s.published = None
        if any(is_first):
            self._expected = {s.p.index for s, on in zip(self._trainable, is_first, strict=True) if on}
        self.release_device()
        self._next, self.open, self._synced = 0, False, False
        self._pass = 0 if at == "step" else self._pass + 1

    def _row(self, at: str) -> torch.Tensor:
        """What this rank has to say, of its gradients nothing yet."""
        row = torch.zeros(3 * len(self._trainable) + _HEAD, dtype=torch.int32)
        row[0], row[1], row[2] = self._pass, _KINDS[at], self._loads.begun
        return row

    def _compare(self, row: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, which must say that they are at the same place."""
        self._loads.drain(unused=True)  # others may wait for them, and come here only then
        # Beside the lane: exchanges in flight there wait for ranks that come here first.
        with self._ranks.explained():
            rows = self._ranks.exchange(row, self._lane.wait)
        heads = rows[:, :_HEAD].tolist()
        if all(head == heads[0] for head in heads):
            return rows
        names = {v: k for k, v in _KINDS.items()}
        other = next(r for r, head in enumerate(heads) if head != heads[0])
        said = [
            f"rank {r} in {names[kind]} after {passes} settled passes and {forwards} forwards"
            for r, (passes, kind, forwards) in ((r, heads[r]) for r in (0, other))
        ]
        raise FerryError(
            f"data parallel: ranks are not at the same place: {said[0]}, {said[1]}; every rank must run as many "
            "forwards (not counting those without gradients) and backwards before each step, each with at least one "
            "gradient"
        )

    # -- at the step -------------------------------------------------------------------------------------------------
    def _takes_part(self, ug: UnitGrads, s: GradState) -> bool:
        grad = s.p.param.grad
        if grad is not None and grad is not s.published:
            raise FerryError(
                f"parameter {s.p.name!r}: p.grad was replaced; with several ranks gradients are kept in parts, so "
                "they cannot be set by hand"
            )
        if s.arrivals:
            return True
        if s.zeroed:
            ug.resident.wait()
            ug.downloaded.synchronize()
            ug.memory.host_grad(s.p).zero_()
            return self._replaced(ug, s, None)
        return False

    def zero(self, set_to_none: bool, updating: list[UnitGrads]) -> None:
        self.finish("zero_grad")
        for i in self._pending:
            self._local[i].zero_()
        self._pending.clear()
        early = {id(ug) for ug in updating}
        for ug in self.units:
            for s in ug.states if id(ug) not in early else ():
                if not set_to_none:
                    s.zeroed = True
                s.p.param.grad = s.published = None
                s.arrivals = s.folded = 0
