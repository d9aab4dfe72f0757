"""Before each forward pass and step: is the model still the one that was armed?

An edit in place outside `engine.edit()` reaches a device copy and not the arena, so it would be lost with the next
upload; `model.half()` or `p.data = x` would leave the engine updating memory that nobody reads. Both are noticed here,
from version counters and addresses, for a fraction of a microsecond a parameter. An edit through `p.data` (`p.data.add_`)
moves no counter and cannot be noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from memferry_ascend.errors import FerryError
from memferry_ascend.layers import Param


class Integrity:
    """Remembers version counters and resting addresses; `handles` are our own hooks on the parameters."""

    def __init__(
        self, params: Sequence[tuple[Param, torch.Tensor]], handles: Iterable[RemovableHandle]
    ) -> None:
        self._params = [p for p, _ in params]
        self._addresses = [rest.data_ptr() for _, rest in params]
        self._versions: list[int] = []
        self._ours = {h.id for h in handles}
        self.note()

    def note(self) -> None:
        """The parameters are as the engine left them."""
        self._versions = [p.param._version for p in self._params]

    def check(self) -> None:
        """Called while every parameter is at rest.

        Raises:
            FerryError: a parameter was edited in place, or replaced, outside `engine.edit()`.
        """
        for p, version, address in zip(self._params, self._versions, self._addresses, strict=True):
            param = p.param
            if (param.data_ptr() != address and p.numel) or param.dtype is not p.dtype:
                raise FerryError(
                    f"parameter {p.name!r} was given other storage after ferry (p.data = ..., model.to(), .half()); "
                    "assign values inside engine.edit(), and close the engine before converting the model"
                )
            if param._version != version:
                raise FerryError(
                    f"parameter {p.name!r} was edited in place outside engine.edit(), where the edit would be lost "
                    "with the next upload; write `with engine.edit(): ...` around it"
                )
            hooks = param._post_accumulate_grad_hooks
            if hooks is not None and len(hooks) > 1:
                self._keep_last(hooks)

    def _keep_last(self, hooks: dict[int, object]) -> None:
        """Our hook takes `p.grad` away: the user's, also those registered after `ferry`, must run before it."""
        for key in [k for k in hooks if k in self._ours]:
            if key != next(reversed(hooks)):
                hooks[key] = hooks.pop(key)  # not move_to_end: autograd reads the order of the plain dict


def check_trainable(params: Iterable[Param]) -> None:
    """Raise if `requires_grad` differs from what it was at `ferry`."""
    for p in params:
        if p.param.requires_grad != p.trainable:
            raise FerryError(
                f"parameter {p.name!r}: requires_grad was toggled after ferry; close the engine and ferry again"
            )
