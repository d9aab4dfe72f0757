"""What is known of one parameter's and of one unit's gradient between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from memferry_ascend.arena import UnitMemory
from memferry_ascend.backends.base import Event
from memferry_ascend.kept import Kept
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
    on_device: bool = False
    """The gradient is in the unit's kept buffer, not in the arena."""
    direct: bool = False
    """A kernel may write this gradient to the arena."""
    written: bool = False
    """A kernel wrote it in this pass; autograd has not said yet that nothing else comes."""
    rows: bool = False
    """A table whose kernel writes only the rows that the batch touched: its place in the arena must be zero before."""
    clean: bool = True
    """The place in the arena is zero, or will be once the unit's folds and update have been waited for."""
    partial: bool = False
    """Autograd was given a part of this pass's gradient: the rest must go the same way."""

    def reset(self) -> None:
        """Nothing has arrived since the step."""
        self.arrivals = self.folded = 0
        self.published = None
        self.on_device = self.written = self.partial = False


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
    staged: list[tuple[GradState, torch.Tensor | None]] = field(default_factory=list)
    """Arrived in this pass and not yet flushed; None where a kernel wrote the arena itself."""
    kept: Kept | None = None
    updates_on_device: bool = False
    """Nothing of this unit has a place in the arena: its gradient stays in `kept`."""
    seen: bool = False
    """Something has arrived in this pass."""

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


def user_hooks(param: torch.nn.Parameter) -> bool:
    """True if somebody but us looks at this parameter's gradient on its way."""
    after = getattr(param, "_post_accumulate_grad_hooks", None)
    return len(param._backward_hooks or ()) > 1 or len(after or ()) > 1


def set_grad(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """`param.grad = grad` for an fp32 sum of a narrower parameter."""
    if hasattr(param, "grad_dtype"):
        param.grad_dtype = None
        param.grad = grad
    else:
        param.grad = torch.empty(0, dtype=param.dtype, device=param.device).expand(param.shape)
        param.grad.data = grad
