"""Reads of parameters between `step()` and the next forward: they wait for the update in flight.

`step()` returns at once while workers still write. User code that looks at a parameter then (an EMA, a logged norm,
`deepcopy`, `state_dict`) must see the new value. A torch function mode that is active only in that gap sees every
such read and waits for the parameter's unit; during forward and backward, where launch time counts, it is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memferry_ascend.tracing import parameters_in


class ReadGuard(TorchFunctionMode):
    """`wait(id(parameter))` is called before any torch function that takes the parameter."""

    def __init__(self, wait: Callable[[int], None], is_pending: Callable[[], bool]) -> None:
        super().__init__()
        self._wait = wait
        self._is_pending = is_pending
        self.active = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_pending():
            for p in parameters_in((*args, *kwargs.values())):
                self._wait(id(p))
        return func(*args, **kwargs)

    def on(self) -> None:
        """Begin to watch the calling thread."""
        if not self.active:
            self.active = True
            self.__enter__()

    def off(self) -> None:
        """Stop, wherever in the thread's stack of modes we are: the user may have entered modes after us."""
        if not self.active:
            return
        self.active = False
        above: list[TorchFunctionMode] = []
        while torch._C._len_torch_function_stack() > 0:
            mode = torch._C._pop_torch_function_stack()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)
