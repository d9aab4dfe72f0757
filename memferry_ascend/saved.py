"""What autograd saves inside a window whose storage will change: a handle, not the tensor.

Packing a parameter view as (unit, offset, size, stride) and unpacking it from wherever the unit lives then is
official, works on every torch version and device, and costs a few percent of launch time, so hooks are pushed only
around windows of DFGB and STREAM units, and only where `swapped.py` cannot do. Only the innermost hooks apply: every
tensor that is not one of our parameters goes to the hooks beneath ours, or `torch.utils.checkpoint` would silently keep
every activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memferry_ascend.errors import FerryError
from memferry_ascend.layers import Param
from memferry_ascend.ring import Slot
from memferry_ascend.shadow import Resident, stale

_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


@dataclass(frozen=True, eq=False)
class Handle:
    """A view of a unit's bytes, to be found again wherever they are."""

    unit: Resident
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    generation: int

    def tensor(self) -> torch.Tensor:
        """The view, readable by kernels launched now.

        Raises:
            FerryError: the unit was updated since the graph was built.
        """
        unit = self.unit
        if torch.is_grad_enabled():
            raise FerryError(
                f"gradients of gradients (create_graph=True) through {unit.unit.name!r}: its parameters change storage "
                "between forward and backward; plan it as GFGB or DHA, or compute this gradient before ferry"
            )
        if unit.generation != self.generation:
            raise stale(unit)
        raw = unit.for_backward()
        if raw is None:
            raw = unit.memory.param.device
            assert raw is not None
        itemsize = self.dtype.itemsize
        flat = raw[self.offset // itemsize * itemsize :]
        flat = flat[: flat.numel() // itemsize * itemsize].view(self.dtype)
        return torch.as_strided(flat, self.size, self.stride, flat.storage_offset())


class SavedHooks:
    """Moves units by binding their parameters to other tensors and hooking what autograd saves meanwhile."""

    def __init__(self) -> None:
        self.open = 0
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def enter(self, entered: Sequence[tuple[Resident, list[Param], Slot | None]], watched: bool) -> None:
        """A window opens: bind what has a slot to it, and push hooks if autograd records (`watched`)."""
        ranges: list[tuple[int, int, Resident]] = []
        for resident, params, slot in entered:
            alias = resident.memory.param.device
            assert alias is not None
            # A nested window that closes binds its parameters to the alias again: both places are this unit's.
            ranges.append((alias.data_ptr(), alias.data_ptr() + alias.numel(), resident))
            if slot is not None:
                for p in params:
                    p.param.data = self._view(resident, p, slot)
                first = slot.bytes.data_ptr()
                ranges.append((first, first + alias.numel(), resident))
        if watched:
            self._push(ranges)

    def _view(self, resident: Resident, p: Param, slot: Slot) -> torch.Tensor:
        key = (p.index, id(slot))
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = resident.memory.buffer_param(slot.bytes, p)
        return view

    def leave(
        self, entered: Sequence[tuple[Resident, list[Param], Slot | None]], watched: bool, _output: Any
    ) -> None:
        """It closes."""
        if watched:
            self._pop()
        for resident, params, slot in entered:
            if slot is not None:
                for p in params:
                    p.param.data = resident.rest[p.index]

    def end_backward(self) -> None:
        """Nothing is bound in a backward pass."""

    def _push(self, ranges: Sequence[tuple[int, int, Resident]]) -> None:
        beneath = torch._C._autograd._top_saved_tensors_default_hooks(True)
        below_pack: Callable[[torch.Tensor], Any] | None
        below_unpack: Callable[[Any], torch.Tensor] | None
        below_pack, below_unpack = beneath if beneath is not None else (None, None)

        def pack(t: torch.Tensor) -> Any:
            at = t.data_ptr()
            for first, last, unit in ranges:
                if first <= at < last and t.numel():
                    return Handle(unit, at - first, t.size(), t.stride(), t.dtype, unit.generation)
            if below_pack is not None:
                return below_pack(t)
            return t, t._version

        def unpack(packed: Any) -> torch.Tensor:
            if type(packed) is Handle:
                return packed.tensor()
            if below_unpack is not None:
                return below_unpack(packed)
            t, version = packed
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a saved tensor of shape {tuple(t.shape)} is at version {t._version}, expected {version}"
                )
            return t

        _push(pack, unpack)
        self.open += 1

    def _pop(self) -> None:
        _pop()
        self.open -= 1

    def reset(self) -> None:
        """Take away what an interrupted forward pass (Ctrl-C: no hook runs) has left pushed."""
        while self.open:
            self._pop()

    def close(self) -> None:
        """Let go of every tensor."""
        self._views.clear()
