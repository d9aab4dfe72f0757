"""Gradients that stay on the device between backward and step: the paper's reserve (section IV-D).

One persistent buffer per unit, in the layout of its parameters, so that a whole unit leaves in one copy. Where several
backwards precede a step the buffer holds fp32 sums in the layout of the state arrays instead: the first arrival is
converted, the others are added in order of arrival, which gives the bits of the host's fold.
"""

from __future__ import annotations

import torch

from memferry_ascend.arena import Layout
from memferry_ascend.backends.base import Backend
from memferry_ascend.layers import Param


def kept_bytes(layout: Layout, wide: bool) -> int:
    """Device bytes of one unit's kept gradients; `wide` is True when they are fp32 sums."""
    return layout.elements * 4 if wide else layout.grad_nbytes


class Kept:
    """One unit's kept gradients. Written and read on the compute stream only, read by the download stream.

    Raises:
        DeviceOutOfMemory: the buffer does not fit.
    """

    def __init__(self, backend: Backend, layout: Layout, params: list[Param], wide: bool) -> None:
        self._backend = backend
        self._layout = layout
        self._params = params
        self.wide = wide
        self.leaving = False
        """A download may still be reading; the next write waits for it."""
        self._allocate()

    def _allocate(self) -> None:
        # Zeros, so that the gaps between parameters add nothing to sums and moments that run over them.
        self.buffer = self._backend.alloc_device(kept_bytes(self._layout, self.wide)).zero_()
        self.views = {p.index: self._view(p) for p in self._params}

    def _view(self, p: Param) -> torch.Tensor:
        place = self._layout.places[p.index]
        if self.wide:
            return self.buffer.view(torch.float32)[place.element : place.element + p.numel].view(p.shape)
        return self.buffer[place.offset : place.offset + p.nbytes].view(p.dtype).view(p.shape)

    def put(self, p: Param, grad: torch.Tensor, first: bool) -> None:
        """Take a gradient in: the first since the step overwrites, the others are added."""
        with torch.no_grad():
            if first:
                self.views[p.index].copy_(grad)
            else:
                self.views[p.index].add_(grad)

    def exact(self, p: Param) -> bool:
        """True if adding a second gradient of `p` here rounds as the host's fp32 sum does."""
        return self.wide or p.dtype is torch.float32

    def widen(self) -> None:
        """Go over to fp32 sums, with what is there. Takes twice the memory for a moment."""
        if self.wide:
            return
        before = self.views
        self.wide = True
        self._allocate()
        with torch.no_grad():
            for index, view in before.items():
                self.views[index].copy_(view)

    def release(self) -> None:
        """Let go of the device memory."""
        self.buffer, self.views = torch.empty(0, dtype=torch.uint8), {}
