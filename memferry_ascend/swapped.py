"""Switching the memory beneath a tensor: what torch 2.13 and later can do instead of saved-tensor hooks.

The parameters of a moving unit (DFGB, STREAM) are views of one storage, `UntypedStorage._swap_data_ptr_` exchanges its
memory, and every view follows, also what autograd has saved. So nothing is packed or unpacked (the hooks of `saved.py`
run for every saved tensor, activations included).

    at rest           the arena alias
    forward window    the unit's slot (STREAM), while it is pinned
    backward pass     slot or buffer, from the gradient of a window's output to the next unit's, while the unit is leased

A unit is elsewhere only while something keeps that memory from being overwritten. Whoever reads it at another time (a
node of a parallel branch, user code) reads the arena: right, only slower. A kernel keeps the address that it was
launched with, so switching needs no ordering on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memferry_ascend.layers import Param
from memferry_ascend.planner.plan import Mode
from memferry_ascend.ring import Slot
from memferry_ascend.shadow import Resident, stale
from memferry_ascend.tracing import tensors_in


class Swaps:
    """Moves units by exchanging memory. One of the two strategies a `Window` works with; `SavedHooks` is the other."""

    def __init__(self) -> None:
        self._switched: list[Resident] = []
        """DFGB units that are in their buffers."""

    def enter(self, entered: Sequence[tuple[Resident, list[Param], Slot | None]], watched: bool) -> None:
        """A window opens: bind what has a slot to it."""
        for resident, _, slot in entered:
            if slot is not None:
                resident.move(slot.bytes)

    def leave(
        self, entered: Sequence[tuple[Resident, list[Param], Slot | None]], watched: bool, output: Any
    ) -> None:
        """It closes. `watched`: the backward pass through it must find the units on the device."""
        for resident, _, slot in entered:
            if slot is not None and slot.pins == 1 and not resident.leased:
                resident.move(None)
        if not watched:
            return
        units = [(resident, params, resident.generation) for resident, params, _ in entered]

        def begin(_grad: torch.Tensor) -> None:
            for resident, params, generation in units:
                if resident.generation == generation:
                    self._lease(resident)
                elif any(p.trainable for p in params):  # autograd would say so too, but not what to do
                    raise stale(resident)

        for t in tensors_in(output):
            if t.requires_grad and t.grad_fn is not None:
                t.register_hook(begin)

    def _lease(self, resident: Resident) -> None:
        resident.move(resident.for_backward())
        if resident.mode is Mode.DFGB:
            self._switched.append(resident)

    def end_backward(self) -> None:
        """No node of ours runs any more."""
        for resident in self._switched:
            resident.move(None)
        self._switched.clear()

    def reset(self) -> None:
        """Nothing to take away from an interrupted forward pass."""

    def close(self) -> None:
        """Let go of every unit."""
        self._switched.clear()
