"""Gradients on their way: from autograd to the arena, accumulated in fp32.

A gradient leaves the device as soon as its unit's last one of this pass was produced: a hook on each parameter takes
it from autograd, and one copy job per unit carries it to the arena behind the compute stream. Device tensors are kept
until the compute stream has waited for their download, a bounded number of bytes at a time, so that the allocator
reuses them in stream order.

Several arrivals before a step are summed in fp32 on the host, in order of arrival: the first is converted, the others
added. `arrivals` counts what has come since the last step, `folded` how much of that is in the fp32 sum already.

That is placement "stage". A unit that keeps its gradients (`kept.py`) sums on the device and leaves at the step; a
gradient that a kernel wrote to the arena itself (`direct.py`) arrives without a tensor. Both fall back to staging for
what they cannot do: a second gradient that nobody declared, a parameter used twice, a user's hook.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from memferry_ascend.arena import Arena
from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.errors import FerryError
from memferry_ascend.gradstate import GradState, UnitGrads, user_hooks
from memferry_ascend.jobs import Fold, Jobs
from memferry_ascend.kept import Kept
from memferry_ascend.planner.plan import Grad, Update
from memferry_ascend.shadow import Resident


class Arrivals(ABC):
    """Takes the gradients of one engine from autograd. What becomes of them then: `Gradients`.

    `window` bounds, in bytes, the device gradients whose download the compute stream has not waited for yet.
    `final` (with update="backward") is called with a unit when each of its gradients has arrived `accumulate` times.
    """

    def __init__(
        self,
        residents: list[Resident],
        arena: Arena,
        backend: Backend,
        jobs: Jobs,
        *,
        accumulate: int,
        publish: bool,
        window: int,
        final: Callable[[UnitGrads], None] | None = None,
    ) -> None:
        self._arena = arena
        self._backend = backend
        self._jobs = jobs
        self._accumulate = accumulate
        self.publishes = publish
        self._final = final
        self._window = window
        self._in_flight: deque[tuple[Event, list[torch.Tensor], int]] = deque()
        self._in_flight_bytes = 0
        self._download = backend.stream("download")
        self._passes: set[int] = set()
        """Backward passes (autograd's numbers) whose end we have asked to be told."""
        self._arrived: list[UnitGrads] = []
        self._written: list[tuple[UnitGrads, GradState]] = []
        self.summing = False
        """fp32 accumulators exist: several backwards precede a step."""
        self.units: list[UnitGrads] = []
        self.by_param: dict[int, GradState] = {}
        self.backward_ended: Callable[[], None] | None = None
        for r in residents:
            states = [GradState(p) for p in r.unit.params if p.trainable]
            if not states:
                continue
            ug = self._unit(r, states)
            self.units.append(ug)
            for s in states:
                self.by_param[s.p.index] = s
            self._bind(ug)
        if accumulate > 1:
            self._start_summing()

    def _unit(self, resident: Resident, states: list[GradState]) -> UnitGrads:
        event, plan = self._backend.event, resident.unit.plan
        ug = UnitGrads(resident, states, ((event(), event()), (event(), event())))
        ug.updates_on_device = plan.update is Update.DEVICE
        if ug.updates_on_device or plan.grad is Grad.KEEP:
            ug.kept = Kept(
                self._backend, resident.memory.layout, [s.p for s in states], wide=self._accumulate > 1
            )
        return ug

    def _bind(self, ug: UnitGrads) -> None:
        """Make the views that gradients are copied to, and that `p.grad` is set to."""
        if ug.updates_on_device:
            return
        for s in ug.states:
            s.view = ug.memory.device_grad(s.p)
            s.host = ug.memory.host_grad(s.p)

    def _bind_sums(self, ug: UnitGrads) -> None:
        for s in ug.states:
            s.sum_view = ug.memory.device_state("acc", s.p).view(s.p.shape)

    def install(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Hook every trainable parameter. Call after parameters are bound to the device type."""
        handles = []
        for ug in self.units:
            for s in ug.states:
                handles.append(s.p.param.register_post_accumulate_grad_hook(self._arrival_hook(ug, s)))
                if self.publishes or s.direct:
                    handles.append(s.p.param.register_hook(self._before_hook(ug, s)))
        return handles

    # -- during the backward pass ------------------------------------------------------------------------------------
    def _before_hook(
        self, ug: UnitGrads, s: GradState
    ) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        def before(grad: torch.Tensor | None) -> torch.Tensor | None:
            self._reclaim(s)
            s.partial = False
            if s.written:
                if grad is None:
                    self.arrive(ug, s, None)
                else:
                    # Read somewhere that no forward pass has shown us: add that part as autograd would have, once,
                    # over the link; from now on this parameter is staged.
                    s.written = s.direct = s.rows = False
                    assert s.view is not None
                    return s.view + grad
            return None

        return before

    @staticmethod
    def _reclaim(s: GradState) -> None:
        """Take our published gradient away before autograd would add to it in place."""
        if s.published is None:
            return
        if s.p.param.grad is s.published:
            s.p.param.grad = None
            s.published = None
        else:  # the user discarded it, or put a tensor there that autograd adds to
            s.reset()

    def _arrival_hook(self, ug: UnitGrads, s: GradState) -> Callable[[torch.Tensor], None]:
        def arrive(param: torch.Tensor) -> None:
            grad = param.grad
            if grad is None:
                return
            if grad.requires_grad:
                param.grad = None
                raise FerryError(
                    f"parameter {s.p.name!r}: its gradient has a graph of its own (create_graph=True); gradients of "
                    "gradients are not supported after ferry"
                )
            param.grad = None
            self.arrive(ug, s, grad)

        return arrive

    def _expect_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            # Once per pass, nested (re-entrant) ones included. A pass that raises never calls back, so what it leaves
            # here is no more than a number.
            self._passes.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))

    @abstractmethod
    def _end(self, task: int) -> None:
        """Autograd calls this when a backward pass (or a nested, re-entrant one) has run all its nodes."""

    def arrive(self, ug: UnitGrads, s: GradState, grad: torch.Tensor | None) -> None:
        """Take a gradient produced on the compute stream; None: a kernel wrote it to the arena."""
        self._expect_end()
        s.written = False
        if self._final is not None and s.arrivals + 1 > self._accumulate:
            raise FerryError(
                f"parameter {s.p.name!r}: gradient {s.arrivals + 1} before step(), but accumulate={self._accumulate} "
                'was declared with update="backward"; declare the true number, or use update="step"'
            )
        if not ug.seen:
            ug.seen = True
            self._arrived.append(ug)
        if grad is not None:
            if grad.is_sparse:
                grad = grad.to_dense()
            if grad.dtype != s.p.dtype:  # once an fp32 sum was published, autograd no longer converts
                grad = grad.to(s.p.dtype)
            if ug.kept is not None and self._keep(ug, s, grad):
                return
        if s.staged:
            self._flush(ug)
        s.staged = True
        ug.staged.append((s, grad))
        if len(ug.staged) == len(ug.states):
            self._flush(ug)

    def _flush(self, ug: UnitGrads) -> None:
        """Queue the download of what a unit has staged."""
        staged, ug.staged = ug.staged, []
        if not staged:
            return
        ug.resident.wait()  # an update in flight reads what the download overwrites
        again = [s for s, _ in staged if s.arrivals]
        if again:
            self._start_summing()
            unfolded = [s for s in again if s.folded < s.arrivals]
            if unfolded:
                # Kernels of the user's may have changed what was published.
                self._next_pair(ug)
                self._backend.compute.record(ug.ready)
                self._fold(ug, unfolded, ug.ready)
        self._wait_folds(ug)  # the copy below overwrites what a fold reads
        pairs = []
        nbytes = 0
        for s, grad in staged:
            s.staged = False
            if grad is not None:
                assert s.host is not None
                pairs.append((s.host, grad.contiguous()))
                nbytes += s.host.nbytes
                s.clean = False
        self._to_host(ug, pairs)
        if pairs:
            self._in_flight.append((ug.downloaded, [g for _, g in pairs], nbytes))
            self._in_flight_bytes += nbytes
        for s, _ in staged:
            s.arrivals += 1
            s.zeroed = False
        if self.summing:
            self._fold(ug, [s for s, _ in staged])
        self._maybe_final(ug)
        while self._in_flight_bytes > self._window and len(self._in_flight) > 1:
            self._let_go()

    def _next_pair(self, ug: UnitGrads) -> None:
        """Use the other pair of events; an update that waits for it is older than the one before."""
        ug.turn ^= 1
        self._jobs.wait_ticket(ug.resident.unit.index, ug.tickets[ug.turn])

    def _to_host(self, ug: UnitGrads, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies behind the compute stream; `downloaded` is then behind them and behind what kernels on the
        compute stream wrote to the arena themselves."""
        self._next_pair(ug)
        if pairs:
            self._download.copy_behind(self._backend.compute, pairs, ug.ready, ug.downloaded)
            return
        self._backend.compute.record(ug.ready)
        self._download.wait(ug.ready)
        self._download.record(ug.downloaded)

    def _wait_folds(self, ug: UnitGrads) -> None:
        if self.summing:
            self._jobs.wait_folds(ug.resident.unit.index)

    def _maybe_final(self, ug: UnitGrads) -> None:
        if self._final is not None and all(s.arrivals == self._accumulate for s in ug.states):
            if ug.kept is not None and not ug.updates_on_device:
                self._send(ug, ug.states)
            self._final(ug)

    # -- kept on the device ------------------------------------------------------------------------------------------
    def _keep(self, ug: UnitGrads, s: GradState, grad: torch.Tensor) -> bool:
        """Put a gradient into the unit's device buffer. False: it must be staged."""
        kept = ug.kept
        assert kept is not None
        if s.arrivals and not s.on_device:
            return False
        if s.arrivals and not (kept.exact(s.p) if ug.updates_on_device else kept.wide):
            if not ug.updates_on_device:  # nobody declared it: go on with the sum on the host
                self._to_host(ug, [(ug.memory.host_grad(s.p), kept.views[s.p.index])])
                kept.leaving, s.on_device = True, False
                return False
            kept.widen()
        ug.resident.wait()  # an update in flight may still need what is there
        if kept.leaving:
            self._backend.compute.wait(ug.downloaded)
            kept.leaving = False
        kept.put(s.p, grad, first=s.arrivals == 0)
        s.arrivals += 1
        s.on_device, s.zeroed = True, False
        if kept.wide:
            s.folded = s.arrivals
        self._maybe_final(ug)
        return True

    def _send(self, ug: UnitGrads, states: list[GradState]) -> None:
        """Queue the download of kept gradients: the whole unit in one copy where all of it takes part."""
        kept, memory = ug.kept, ug.memory
        assert kept is not None and memory.grad is not None
        ug.resident.wait()
        self._wait_folds(ug)
        if len(states) == len(ug.states):
            target = memory.state["acc"].host if kept.wide else memory.grad.host
            n = min(target.numel(), kept.buffer.numel())
            pairs = [(target[:n], kept.buffer[:n])]
        elif kept.wide:
            pairs = [(memory.host_state("acc", s.p).view(s.p.shape), kept.views[s.p.index]) for s in states]
        else:
            pairs = [(memory.host_grad(s.p), kept.views[s.p.index]) for s in states]
        self._to_host(ug, pairs)
        kept.leaving = True
        for s in states:
            s.folded = s.arrivals if kept.wide else 0

    # -- written by kernels ------------------------------------------------------------------------------------------
    def direct_target(self, ug: UnitGrads, s: GradState) -> torch.Tensor | None:
        """Where a kernel launched now may write this pass's gradient of a parameter; None: give it to autograd."""
        param = s.p.param
        if not s.direct or s.staged or s.written or s.partial or user_hooks(param):
            return None
        if param.grad is not None and param.grad is not s.published:
            return None
        self._reclaim(s)
        if s.arrivals > s.folded:
            return None  # the arena holds the only copy of an earlier gradient
        ug.resident.wait()
        self._wait_folds(ug)
        return s.view

    def direct_written(self, ug: UnitGrads, s: GradState) -> None:
        """The kernel that writes to `direct_target` has been launched."""
        self._expect_end()
        s.written, s.clean = True, False
        self._written.append((ug, s))

    def _let_go(self) -> None:
        """Make the compute stream wait for the oldest download, then drop its device tensors."""
        downloaded, tensors, nbytes = self._in_flight.popleft()
        self._in_flight_bytes -= nbytes
        self._backend.compute.wait(downloaded)
        tensors.clear()

    def _fold(self, ug: UnitGrads, states: list[GradState], after: Event | None = None) -> None:
        """Queue adding the last arrival of `states` to their fp32 sums, behind the download and `after`."""
        items = []
        for s in states:
            grad = ug.memory.host_grad(s.p).view(-1)
            items.append(Fold(ug.memory.host_state("acc", s.p), grad, s.folded == 0, s.rows))
            s.folded += 1
            s.clean = s.rows
        waits = [downloaded for _, downloaded in ug.events]
        if after is not None:
            waits.append(after)
        self._jobs.fold(ug.resident.unit.index, waits, items)

    def _start_summing(self) -> None:
        if self.summing:
            return
        summed = [ug for ug in self.units if not ug.updates_on_device]
        total = sum(ug.memory.layout.elements * 4 for ug in summed)
        regions = []
        for ug in summed:  # all or nothing: the arena may refuse
            nbytes = ug.memory.layout.elements * 4
            regions.append(self._arena.region("acc", nbytes, mapped=True, expect=total))
            total -= nbytes
        self.summing = True
        for ug, region in zip(summed, regions, strict=True):
            ug.memory.state["acc"] = region
            self._bind_sums(ug)
