"""Global gradient norm clipping: one fp32 norm per parameter, combined in registration order.

The norm is taken on the host from the arena's gradients (or their fp32 sums), after their download and before any
update: the same numbers whatever the plan. Scaling happens inside the update; `p.grad` is left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from memferry_ascend import hostmath
from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.errors import FerryError
from memferry_ascend.gradients import Gradients, GradState, UnitGrads
from memferry_ascend.worker import Priority, Worker

Parts = list[tuple[UnitGrads, list[GradState]]]


@dataclass(eq=False)
class Scale:
    """What one step's updates multiply their gradients by; set by the norm job before any of them runs."""

    value: float = 1.0
    norm: float | None = None


class Clipper:
    """Computes the norm of what takes part in a step, and the factor that follows from it."""

    def __init__(
        self, gradients: Gradients, backend: Backend, worker: Worker, max_norm: float | None
    ) -> None:
        self._gradients = gradients
        self._backend = backend
        self._worker = worker
        self._max_norm = max_norm
        self._asked: Scale | None = None
        self._last: Scale | None = None

    def begin(self, parts: Parts, after: Event) -> Scale:
        """A step starts: returns the scale its updates will find."""
        scale, self._asked = self._asked or Scale(), None
        if self._max_norm is not None and scale.norm is None:
            limit = self._max_norm
            summed = self._gradients.summing

            def job() -> None:
                after.synchronize()
                norm = self._norm(parts, summed)
                scale.value = factor(limit, norm)
                scale.norm = norm
                self._worker.notify()

            self._worker.submit(Priority.NORM, job)
        self._last = scale if self._max_norm is not None or scale.norm is not None else None
        return scale

    def _norm(self, parts: Parts, summed: bool) -> float:
        squares: dict[int, float] = {}
        for ug, part in parts:
            ug.downloaded.synchronize()
            for s in part:
                host = ug.memory.host_state("acc", s.p) if summed else ug.memory.host_grad(s.p).view(-1)
                squares[s.p.index] = hostmath.sum_squares(host)
        return combine(squares)

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
        self._worker.drain()
        self._backend.compute.synchronize()
        norm = self._norm(self._gradients.collect(), self._gradients.summing)
        self._asked = Scale(factor(max_norm, norm), norm)
        return torch.tensor(norm)

    def last_norm(self) -> float | None:
        """The last step's norm; waits for the job that computes it."""
        scale = self._last
        if scale is None:
            return None
        self._worker.wait_for(lambda: scale.norm is not None)
        return scale.norm


def factor(max_norm: float, norm: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies by; NaN stays NaN."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def combine(squares: dict[int, float]) -> float:
    """Norm of norms, each rounded to fp32 first, in registration order."""
    norms = torch.tensor([math.sqrt(squares[i]) for i in sorted(squares)], dtype=torch.float32)
    return math.sqrt(sum(float(x) ** 2 for x in norms))
