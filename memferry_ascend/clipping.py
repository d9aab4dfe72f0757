"""Global gradient norm clipping: one fp32 norm per parameter, combined in registration order.

The norm is taken on the host from the arena's gradients (or their fp32 sums), after their download and before any
update: the same numbers whatever the plan. Scaling happens inside the update; `p.grad` is left alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.errors import FerryError
from memferry_ascend.gradients import Gradients, GradState, UnitGrads
from memferry_ascend.jobs import Jobs

Parts = list[tuple[UnitGrads, list[GradState]]]


class Clipper:
    """Asks for the norm of what takes part in a step, and the factor that follows from it."""

    def __init__(self, gradients: Gradients, backend: Backend, jobs: Jobs, max_norm: float | None) -> None:
        self._gradients = gradients
        self._backend = backend
        self._jobs = jobs
        self._max_norm = max_norm
        self._asked: Any = None
        self._last: Any = None

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
                summed = self._gradients.summing
                host = ug.memory.host_state("acc", s.p) if summed else ug.memory.host_grad(s.p).view(-1)
                pieces.append((s.p.index, host))
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
