"""Gradients: from autograd to the arena, accumulated in fp32, published as `p.grad` when the backward ends.

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

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from memferry_ascend.arena import Arena
from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.errors import FerryError
from memferry_ascend.gradstate import GradState, UnitGrads, set_grad, user_hooks
from memferry_ascend.jobs import Fold, Jobs
from memferry_ascend.kept import Kept
from memferry_ascend.planner.plan import Grad, Update
from memferry_ascend.shadow import Resident


class Gradients:
    """Collects the gradients of one engine.

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
        self.backward_began: Callable[[], None] | None = None
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

    def finish(self, at: str) -> None:
        """A pass is over: the next forward pass ("forward") or the step ("step") begins. Nothing is outstanding here;
        with several ranks they settle now which gradients there are."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """There is nobody to exchange with."""
        yield

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

    def _end(self, task: int) -> None:
        """Autograd calls this when a backward pass (or a nested, re-entrant one) has run all its nodes."""
        written, self._written = self._written, []
        for ug, s in written:
            if s.written:  # a torch that runs no hooks for an undefined gradient
                self.arrive(ug, s, None)
        self._passes.discard(task)
        arrived, self._arrived = self._arrived, []
        for ug in arrived:
            ug.seen = False
            self._flush(ug)
        if self.backward_ended is not None:
            self.backward_ended()
        if not self.publishes:
            return
        while self._in_flight:
            self._let_go()
        for ug in arrived:
            self._wait_folds(ug)
            for s in ug.states:
                if s.arrivals and s.published is None:
                    self._publish_one(ug, s)

    def _publish_one(self, ug: UnitGrads, s: GradState) -> None:
        grad = s.sum_view if self.summing and s.folded else s.view
        if s.on_device and ug.kept is not None:
            grad = ug.kept.views[s.p.index]
        assert grad is not None
        if grad.dtype != s.p.param.dtype:
            set_grad(s.p.param, grad)
        else:
            s.p.param.grad = grad
        s.published = s.p.param.grad

    def discard(self) -> None:
        """`zero_grad`: forget what a backward pass that raised has left behind."""
        for ug in self._arrived:
            for s, _ in ug.staged:
                s.staged = False
            ug.staged.clear()
            ug.seen = False
        self._arrived = []
        self._passes.clear()
        while self.publishes and self._in_flight:  # otherwise a pass that ended has let go of all
            with contextlib.suppress(
                FerryError
            ):  # a copy of what is discarded here had failed; that was said
                self._let_go()
        self._forget_written()

    def _forget_written(self) -> None:
        """Of a backward pass that raised: autograd has not taken what kernels wrote, so it does not count."""
        for _, s in self._written:
            s.written = s.partial = False
        self._written.clear()

    # -- at the step -------------------------------------------------------------------------------------------------
    def release_device(self) -> None:
        """Let go of device tensors whose download is behind us; never waits on the host."""
        while self._in_flight:
            self._let_go()

    def collect(self) -> list[tuple[UnitGrads, list[GradState]]]:
        """What takes part in a step: per unit the parameters that have a gradient. Honours what the user did to
        `p.grad` since the backward: None discards, another tensor replaces."""
        out = []
        self._passes.clear()
        self._forget_written()
        for ug in self._arrived:  # of a backward pass that raised: what had come counts, as in plain PyTorch
            ug.seen = False
            self._flush(ug)
        self._arrived = []
        for ug in sorted(self.units, key=lambda ug: ug.resident.order):
            part = [s for s in ug.states if self._takes_part(ug, s)]
            if not part:
                continue
            out.append((ug, part))
            if ug.updates_on_device:
                continue
            kept = [s for s in part if s.on_device]
            if kept:
                self._send(ug, kept)
            if self.summing:
                unfolded = [s for s in part if s.folded < s.arrivals]
                if unfolded:
                    self._backend.compute.record(ug.ready)
                    self._fold(ug, unfolded, ug.ready)
        return out

    def _takes_part(self, ug: UnitGrads, s: GradState) -> bool:
        grad = s.p.param.grad
        if s.published is not None and grad is s.published:
            return True
        if grad is None:
            if s.published is None and s.arrivals:
                return True  # update="backward": never published
            if s.zeroed:
                ug.resident.wait()  # an update in flight reads what is written here
                if ug.updates_on_device:
                    return self._replaced(ug, s, torch.zeros((), device=s.p.param.device))
                self._backend.compute.synchronize()
                ug.memory.host_grad(s.p).zero_()
                return self._replaced(ug, s, None)
            s.reset()
            return False
        if grad.shape != s.p.shape:
            raise FerryError(
                f"parameter {s.p.name!r}: p.grad has shape {tuple(grad.shape)}, expected {tuple(s.p.shape)}"
            )
        ug.resident.wait()  # an update in flight reads what the download overwrites
        if ug.updates_on_device:
            return self._replaced(ug, s, grad.detach())
        self._wait_folds(ug)
        target, s.clean = ug.memory.host_grad(s.p), False
        self._to_host(ug, [(target, grad.detach().to(target.dtype).contiguous())])
        ug.downloaded.synchronize()
        return self._replaced(ug, s, None)

    def _replaced(self, ug: UnitGrads, s: GradState, grad: torch.Tensor | None) -> bool:
        """The gradient is another than what arrived: `grad`, for the device, or what was written to the arena."""
        s.reset()
        s.arrivals, s.zeroed = 1, False
        if grad is not None:
            assert ug.kept is not None
            ug.resident.wait()
            ug.kept.put(s.p, grad, first=True)
            s.on_device = True
        return True

    def zero(self, set_to_none: bool, updating: list[UnitGrads]) -> None:
        """`optimizer.zero_grad()`. `updating` were updated during the backward pass: the coming step counts them."""
        early = {id(ug) for ug in updating}
        for ug in self.units:
            for s in ug.states:
                if s.p.param.grad is not None:
                    if set_to_none:
                        s.p.param.grad = None
                    else:
                        s.p.param.grad.zero_()
                elif not set_to_none:
                    s.zeroed = True
                elif s.arrivals and s.published is None and id(ug) not in early:
                    s.reset()

    def to_clear(self, ug: UnitGrads, part: list[GradState]) -> list[torch.Tensor]:
        """Where the update of `part`, about to be handed over, must leave zeros. Sums' arrivals were cleared already."""
        if self.summing:
            return []
        rows = [s for s in part if s.rows]
        for s in rows:
            s.clean = True
        return [ug.memory.host_grad(s.p) for s in rows]

    def consumed(self, part: list[GradState]) -> None:
        """The step has taken these: `p.grad` becomes None."""
        for s in part:
            s.reset()
            s.zeroed = False
            s.p.param.grad = None
