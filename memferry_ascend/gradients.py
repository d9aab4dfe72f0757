"""Gradients: from autograd to the arena, accumulated in fp32, published as `p.grad` when the backward ends.

A gradient leaves the device as soon as its unit's last one of this pass was produced: a hook on each parameter takes
it from autograd, and one copy job per unit carries it to the arena behind the compute stream. Device tensors are kept
until the compute stream has waited for their download, a bounded number of bytes at a time, so that the allocator
reuses them in stream order.

Several arrivals before a step are summed in fp32 on the host, in order of arrival: the first is converted, the others
added. `arrivals` counts what has come since the last step, `folded` how much of that is in the fp32 sum already.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from memferry_ascend.arena import Arena, UnitMemory
from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.errors import FerryError
from memferry_ascend.jobs import Jobs
from memferry_ascend.layers import Param
from memferry_ascend.shadow import Resident


@dataclass(eq=False)
class GradState:
    """One trainable parameter's gradient since the last step."""

    p: Param
    arrivals: int = 0
    folded: int = 0
    published: torch.Tensor | None = None
    """What `p.grad` was set to when the backward ended; None while it is not set."""
    zeroed: bool = False
    """`zero_grad(set_to_none=False)` after the step consumed it: counts as a gradient of zeros."""
    view: torch.Tensor | None = None
    sum_view: torch.Tensor | None = None
    host: torch.Tensor | None = None
    staged: bool = False


@dataclass(eq=False)
class UnitGrads:
    """One unit's gradients in flight."""

    resident: Resident
    states: list[GradState]
    events: tuple[tuple[Event, Event], tuple[Event, Event]]
    """Two pairs (ready, downloaded), used in turn: the launching thread may be an iteration ahead of the job that
    still waits for the other pair."""
    turn: int = 0
    tickets: list[int] = field(default_factory=lambda: [0, 0])
    """The update that waits for each pair."""
    staged: list[tuple[GradState, torch.Tensor]] = field(default_factory=list)

    @property
    def ready(self) -> Event:
        """On the compute stream, behind the last gradient that was taken."""
        return self.events[self.turn][0]

    @property
    def downloaded(self) -> Event:
        """Behind the latest download."""
        return self.events[self.turn][1]

    @property
    def memory(self) -> UnitMemory:
        return self.resident.shard


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
        self.summing = False
        """fp32 accumulators exist: several backwards precede a step."""
        self.units: list[UnitGrads] = []
        self.by_param: dict[int, GradState] = {}
        self._unit_of: dict[int, UnitGrads] = {}
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
                self._unit_of[s.p.index] = ug
            self._bind(ug)
        if accumulate > 1:
            self._start_summing()

    def _unit(self, resident: Resident, states: list[GradState]) -> UnitGrads:
        event = self._backend.event
        return UnitGrads(resident, states, ((event(), event()), (event(), event())))

    def _bind(self, ug: UnitGrads) -> None:
        """Make the views that gradients are copied to, and that `p.grad` is set to."""
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
                if self.publishes:
                    handles.append(s.p.param.register_hook(self._before_hook(s)))
        return handles

    # -- during the backward pass ------------------------------------------------------------------------------------
    def _before_hook(self, s: GradState) -> Callable[[torch.Tensor], None]:
        param = s.p.param

        def before(_grad: torch.Tensor) -> None:
            # Take our published gradient away before autograd would add to it in place.
            if s.published is not None:
                if param.grad is None:
                    s.arrivals = s.folded = 0  # the user discarded it
                elif param.grad is s.published:
                    param.grad = None
                s.published = None

        return before

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

    def arrive(self, ug: UnitGrads, s: GradState, grad: torch.Tensor) -> None:
        """Take a gradient produced on the compute stream."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            # Once per pass, nested (re-entrant) ones included. A pass that raises never calls back, so what it leaves
            # here is no more than a number.
            self._passes.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        if self._final is not None and s.arrivals + 1 > self._accumulate:
            raise FerryError(
                f"parameter {s.p.name!r}: gradient {s.arrivals + 1} before step(), but accumulate={self._accumulate} "
                'was declared with update="backward"; declare the true number, or use update="step"'
            )
        if grad.is_sparse:
            grad = grad.to_dense()
        if s.staged:
            self._flush(ug)
        if not ug.staged:
            self._arrived.append(ug)
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
        if self.summing:
            self._jobs.wait_folds(ug.resident.unit.index)  # the copy below overwrites what a fold reads
        self._next_pair(ug)
        pairs = []
        nbytes = 0
        for s, grad in staged:
            s.staged = False
            dst = s.host
            assert dst is not None
            if grad.dtype != dst.dtype:
                grad = grad.to(dst.dtype)
            pairs.append((dst, grad.contiguous()))
            nbytes += dst.nbytes
        self._download.copy_behind(self._backend.compute, pairs, ug.ready, ug.downloaded)
        self._in_flight.append((ug.downloaded, [g for _, g in pairs], nbytes))
        self._in_flight_bytes += nbytes
        for s, _ in staged:
            s.arrivals += 1
            s.zeroed = False
        if self.summing:
            self._fold(ug, [s for s, _ in staged])
        if self._final is not None and all(s.arrivals == self._accumulate for s in ug.states):
            self._final(ug)
        while self._in_flight_bytes > self._window and len(self._in_flight) > 1:
            self._let_go()

    def _next_pair(self, ug: UnitGrads) -> None:
        """Use the other pair of events; an update that waits for it is older than the one before."""
        ug.turn ^= 1
        self._jobs.wait_ticket(ug.resident.unit.index, ug.tickets[ug.turn])

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
            items.append((ug.memory.host_state("acc", s.p), ug.memory.host_grad(s.p).view(-1), s.folded == 0))
            s.folded += 1
        waits = [downloaded for _, downloaded in ug.events]
        if after is not None:
            waits.append(after)
        self._jobs.fold(ug.resident.unit.index, waits, items)

    def _start_summing(self) -> None:
        if self.summing:
            return
        total = sum(ug.memory.layout.elements * 4 for ug in self.units)
        regions = []
        for ug in self.units:  # all or nothing: the arena may refuse
            nbytes = ug.memory.layout.elements * 4
            regions.append(self._arena.region("acc", nbytes, mapped=True, expect=total))
            total -= nbytes
        self.summing = True
        for ug, region in zip(self.units, regions, strict=True):
            ug.memory.state["acc"] = region
            self._bind_sums(ug)

    def _end(self, task: int) -> None:
        """Autograd calls this when a backward pass (or a nested, re-entrant one) has run all its nodes."""
        self._passes.discard(task)
        arrived, self._arrived = self._arrived, []
        for ug in arrived:
            self._flush(ug)
        if self.backward_ended is not None:
            self.backward_ended()
        if not self.publishes:
            return
        while self._in_flight:
            self._let_go()
        for ug in arrived:
            if self.summing:
                self._jobs.wait_folds(ug.resident.unit.index)
            for s in ug.states:
                if s.arrivals and s.published is None:
                    self._publish_one(s)

    def _publish_one(self, s: GradState) -> None:
        grad = s.sum_view if self.summing and s.folded else s.view
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
        self._arrived = []
        self._passes.clear()
        while self.publishes and self._in_flight:  # otherwise a pass that ended has let go of all
            with contextlib.suppress(
                FerryError
            ):  # a copy of what is discarded here had failed; that was said
                self._let_go()

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
        for ug in self._arrived:  # of a backward pass that raised: what had come counts, as in plain PyTorch
            self._flush(ug)
        self._arrived = []
        for ug in self.units:
            part = [s for s in ug.states if self._takes_part(ug, s)]
            if not part:
                continue
            if self.summing:
                unfolded = [s for s in part if s.folded < s.arrivals]
                if unfolded:
                    self._backend.compute.record(ug.ready)
                    self._fold(ug, unfolded, ug.ready)
            out.append((ug, part))
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
                self._backend.compute.synchronize()
                ug.memory.host_grad(s.p).zero_()
                self._replaced(s)
                return True
            s.arrivals = s.folded = 0
            s.published = None
            return False
        if grad.shape != s.p.shape:
            raise FerryError(
                f"parameter {s.p.name!r}: p.grad has shape {tuple(grad.shape)}, expected {tuple(s.p.shape)}"
            )
        ug.resident.wait()  # an update in flight reads what the download overwrites
        if self.summing:
            self._jobs.wait_folds(ug.resident.unit.index)
        self._backend.compute.record(ug.ready)
        self._download.wait(ug.ready)
        target = ug.memory.host_grad(s.p)
        self._download.copy(target, grad.detach().to(target.dtype).contiguous())
        self._download.record(ug.downloaded)
        ug.downloaded.synchronize()
        self._replaced(s)
        return True

    def _replaced(self, s: GradState) -> None:
        s.arrivals, s.folded, s.published, s.zeroed = 1, 0, None, False

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
                    s.arrivals = s.folded = 0

    def consumed(self, part: list[GradState]) -> None:
        """The step has taken these: `p.grad` becomes None."""
        for s in part:
            s.arrivals = s.folded = 0
            s.published = None
            s.zeroed = False
            s.p.param.grad = None


def set_grad(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """`param.grad = grad` for an fp32 sum of a narrower parameter."""
    if hasattr(param, "grad_dtype"):
        param.grad_dtype = None
        param.grad = grad
    else:
        param.grad = torch.empty(0, dtype=param.dtype, device=param.device).expand(param.shape)
        param.grad.data = grad
