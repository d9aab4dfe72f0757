"""Gradients once a backward has ended: what `p.grad` is, and what a step takes.

With update="step" a gradient is published as `p.grad`, a view of the arena, when the backward that made it ends; until the
step the user may change, replace or drop it. How it got there: `arrivals.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memferry_ascend.arrivals import Arrivals
from memferry_ascend.errors import FerryError
from memferry_ascend.gradstate import GradState, UnitGrads, set_grad


class Gradients(Arrivals):
    """The gradients of one engine."""

    def finish(self, at: str) -> None:
        """A pass is over: the next forward pass ("forward") or the step ("step") begins. Nothing is outstanding here;
        with several ranks they settle now which gradients there are."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """There is nobody to exchange with."""
        yield

    # -- when a backward ends ----------------------------------------------------------------------------------------
    def _end(self, task: int) -> None:
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
