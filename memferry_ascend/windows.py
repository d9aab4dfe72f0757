"""Windows: hooks around the modules that read parameters, which make those parameters readable in time.

A window belongs to a module and covers every parameter that was read while that module was innermost. Until a pass
has been traced each layer's own module is its window. For a unit that never changes storage (GFGB, DHA) the hook only
waits for the update in flight; it is one attribute test when there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memferry_ascend.layers import Param
from memferry_ascend.planner.plan import Mode
from memferry_ascend.ring import Slot
from memferry_ascend.saved import SavedHooks
from memferry_ascend.shadow import Resident
from memferry_ascend.swapped import Swaps


def _ignore(*_: Any) -> None:
    return None


class Hook:
    """A hook that a deep copy of the model does not inherit: the copy is a plain module."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _ignore


@dataclass(eq=False)
class _Frame:
    """One call of a window's module."""

    entered: list[tuple[Resident, list[Param], Slot | None]] = field(default_factory=list)
    watched: bool = False
    """Autograd records what happens inside."""


class Window:
    """The parameters that `module` reads, by unit."""

    def __init__(
        self, module: nn.Module, reads: list[tuple[Resident, list[Param]]], moves: SavedHooks | Swaps
    ) -> None:
        self.module = module
        self.fixed: list[Resident] = []
        self.moving: list[tuple[Resident, list[Param]]] = []
        for r, params in reads:
            moving = [p for p in params if p.index not in r.unit.aliased]
            if r.mode in (Mode.GFGB, Mode.DHA) or not moving:
                self.fixed.append(r)
            else:
                self.moving.append((r, moving))
        self._moves = moves
        self._open: list[_Frame] = []
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        before = Hook(self._enter if self.moving else self._wait)
        self._handles.append(self.module.register_forward_pre_hook(before, prepend=True))
        if self.moving:
            # Also when the forward raises: the next attempt must find everything in its place.
            self._handles.append(self.module.register_forward_hook(Hook(self._leave), always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def close(self) -> None:
        """Remove the hooks and let go of every tensor."""
        self.remove()
        self._open.clear()
        self.fixed, self.moving = [], []

    def _wait(self, *_: Any) -> None:
        for resident in self.fixed:
            if resident.pending:
                resident.wait()

    def _enter(self, *_: Any) -> None:
        frame = _Frame()
        self._open.append(frame)  # first: `_leave` runs, and undoes what was done, also when this raises
        self._wait()
        for resident, params in self.moving:
            resident.wait()
            slot = resident.ring.forward(resident) if resident.ring is not None else None
            frame.entered.append((resident, params, slot))
        watched = torch.is_grad_enabled()
        self._moves.enter(frame.entered, watched)
        frame.watched = watched

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._open:
            return
        frame = self._open.pop()
        self._moves.leave(frame.entered, frame.watched, output)
        self._let_go(frame)

    def reset(self) -> None:
        """Close what an interrupted forward pass has left open; its saved-tensor hooks are taken away elsewhere."""
        while self._open:
            frame = self._open.pop()
            self._moves.leave(frame.entered, False, None)
            self._let_go(frame)

    @staticmethod
    def _let_go(frame: _Frame) -> None:
        for resident, _, slot in frame.entered:
            if slot is not None:
                assert resident.ring is not None
                resident.ring.release(slot)
            elif frame.watched and resident.mode is Mode.DFGB:
                resident.load_for_backward()
