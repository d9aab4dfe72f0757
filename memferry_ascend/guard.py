"""Reads of parameters between `step()` and the next forward: they wait for the update in flight.

`step()` returns at once while workers still write. User code that looks at a parameter then (an EMA, a logged norm,
`deepcopy`, `state_dict`) must see the new value. A torch function mode that is active only in that gap sees every
such read and waits for the parameter's unit; during forward and backward, where launch time counts, it is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memferry_ascend.tracing import SwitchableMode, parameters_in


class ReadGuard(SwitchableMode):
    """`wait(id(parameter))` is called before any torch function that takes the parameter."""

    def __init__(self, wait: Callable[[int], None], is_pending: Callable[[], bool]) -> None:
        super().__init__()
        self._wait = wait
        self._is_pending = is_pending

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_pending():
            for p in parameters_in((*args, *kwargs.values())):
                self._wait(id(p))
        return func(*args, **kwargs)
