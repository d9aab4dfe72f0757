"""Global gradient norm clipping: one fp32 norm per parameter, combined in registration order.

The norm is taken on the host from the arena's gradients (or their fp32 sums), after their download and before any
update: the same numbers whatever the plan. Scaling happens inside the update; `p.grad` is left alone.
A gradient that never leaves the device is measured there, and only its norm comes to the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memferry_ascend.arena import Arena
from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.deviceupdate import norm_into, norms_bytes
from memferry_ascend.errors import FerryError
from memferry_ascend.gradients import Gradients, GradState, UnitGrads
from memferry_ascend.jobs import Jobs

Parts = list[tuple[UnitGrads, list[GradState]]]


class Clipper:
    """Asks for the norm of what takes part in a step, and the factor that follows from it."""

    def __init__(
        self, gradients: Gradients, arena: Arena, backend: Backend, jobs: Jobs, max_norm: float | None
    ) -> None:
        self._gradients = gradients
        self._backend = backend
        self._jobs = jobs
        self._max_norm = max_norm
        self._asked: Any = None
        self._last: Any = None
        self._measured: Event | None = None
        """Behind the kernels that wrote the norms of gradients that never leave the device."""
        if any(ug.updates_on_device for ug in gradients.units):
            # A norm stands for its gradient: the norm of one number is that number.
            region = arena.region("norm", norms_bytes(gradients.by_param), mapped=True)
            assert region.device is not None
            self._host_norms = region.host.view(torch.float32)
            self._device_norms = region.device.view(torch.float32)
            self._measured = backend.event()

    def begin(self, parts: Parts, after: Event) -> Any:
        """A step starts: returns the scale its updates will find."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._last = asked
        elif self._max_norm is not None:
            self._last = self._norm(parts, [after], self._max_norm)
        else:
            self._last = None
            return self._jobs.new_scale()
        return self._last

    def _norm(self, parts: Parts, waits: list[Event], limit: float) -> Any:
        pieces = []
        for ug, part in parts:
            for s in part:
                if ug.updates_on_device:
                    assert ug.kept is not None
                    norm_into(
                        self._device_norms[s.p.index : s.p.index + 1], ug.kept.views[s.p.index], self._backend
                    )
                    pieces.append((s.p.index, self._host_norms[s.p.index : s.p.index + 1]))
                    continue
                summed = self._gradients.summing
                host = ug.memory.host_state("acc", s.p) if summed else ug.memory.host_grad(s.p).view(-1)
                pieces.append((s.p.index, host))
        if self._measured is not None:
            self._backend.compute.record(self._measured)
            waits = [*waits, self._measured]
        return self._jobs.norm([*waits, *(ug.downloaded for ug, _ in parts)], pieces, limit)

    def clip_now(self, max_norm: float) -> torch.Tensor:
        """The norm of the gradients that are there now; the coming step scales by what follows from it."""
        if not max_norm > 0 or math.isinf(max_norm):
            raise FerryError(f"clip_grad_norm_: expected a positive finite max_norm, got {max_norm}")
        if self._max_norm is not None:
            raise FerryError(
                "clip_grad_norm_: Config.max_grad_norm clips every step already; use one of the two"
            )
        if not self._gradients.publishes:
            raise FerryError('clip_grad_norm_ needs update="step"; with "backward" set Config.max_grad_norm')
        self._gradients.finish("clip_grad_norm_")
        self._backend.compute.synchronize()
        self._asked = self._norm(self._gradients.collect(), [], max_norm)
        self._jobs.wait_norm()
        return torch.tensor(self._asked.norm)

    def last_norm(self) -> float | None:
        """The last step's norm; waits for the job that computes it."""
        if self._last is None:
            return None
        self._jobs.wait_norm()
        return float(self._last.norm)
