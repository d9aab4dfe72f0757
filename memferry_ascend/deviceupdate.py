"""Update placement "device": parameters, masters, gradients and moments of a unit never leave the device.

The arithmetic is the host's, operation by operation, as kernels on the compute stream: the update is behind the backward
and before the next forward by order alone, and nothing crosses the link. Where the backend has a kernel of its own
(`backends/fused.py`) the bits are the host's. Elsewhere torch's operations do it (`_hostmath_torch.adam`), some 25
kernels a block; a device may fuse a multiply with an add in them, so results may differ from the host's by a rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from memferry_ascend import _hostmath_torch
from memferry_ascend.arena import Layout, UnitMemory
from memferry_ascend.backends.base import Backend, align
from memferry_ascend.backends.fused import AdamArrays
from memferry_ascend.hostupdate import AdamUpdate, Hypers
from memferry_ascend.kept import Kept
from memferry_ascend.layers import Param, Unit

BLOCK = 1 << 22
"""Elements updated at a time by torch's operations: bounds the temporaries, of which there are `TEMPORARIES` in fp32."""

TEMPORARIES = 6


def workspace_bytes(layouts: Sequence[Layout]) -> int:
    """Device bytes of temporaries while the largest of these units is updated by torch's operations; an upper bound where
    the backend has a kernel of its own."""
    return TEMPORARIES * 4 * min(BLOCK, max((layout.elements for layout in layouts), default=0))


def state_bytes(layout: Layout, split: bool) -> int:
    """Device bytes of masters' remainders and moments of one unit."""
    return align(layout.elements * 4) * 2 + (align(layout.elements * 2) if split else 0)


class DeviceMemory(UnitMemory):
    """A unit whose arrays are on the device: `buffer` in the layout of a parameter region, and state arrays."""

    on_device = True

    def __init__(self, unit: Unit, backend: Backend) -> None:
        super().__init__(unit)
        n = self.layout.elements
        split = any(p.trainable and p.dtype is torch.bfloat16 for p in unit.params)
        # Zeros, so that the gaps between parameters stay what they are in the arena.
        self.buffer = backend.alloc_device(self.layout.nbytes).zero_()
        self.arrays = {
            kind: backend.alloc_device(n * dtype.itemsize).zero_().view(dtype)[:n]
            for kind, dtype in (("lo", torch.int16), ("m", torch.float32), ("v", torch.float32))
            if n and (kind != "lo" or split)
        }

        self.written = backend.event()
        """Behind the latest kernels that wrote here, for readers on other threads."""
        self.backend = backend

    def note_write(self) -> None:
        self.backend.compute.record(self.written)

    def release(self) -> None:
        """Let go of the device memory."""
        self.buffer, self.arrays = torch.empty(0, dtype=torch.uint8), {}

    def device_param(self, p: Param) -> torch.Tensor:
        return self.buffer_param(self.buffer, p)

    def array(self, kind: str, p: Param) -> torch.Tensor:
        """`p`'s part of a state array, flat, on the device."""
        start = self.layout.places[p.index].element
        return self.arrays[kind][start : start + p.numel]

    def master(self, p: Param) -> torch.Tensor:
        """A copy of the master on the CPU, fp32 for trainable parameters."""
        self.written.synchronize()
        value = self.device_param(p)
        if p.trainable and p.dtype is torch.bfloat16:
            out = torch.empty(p.numel, dtype=torch.float32, device=value.device)
            _hostmath_torch.join_master(value, self.array("lo", p), out)
            value = out.view(p.shape)
        return value.detach().to("cpu", copy=True)

    def set_master(self, p: Param, value: torch.Tensor) -> None:
        """Write a master from the CPU, in any float dtype."""
        with torch.no_grad():
            target = self.device_param(p)
            if p.trainable and p.dtype is torch.bfloat16:
                master = value.detach().float().contiguous().to(target.device)
                _hostmath_torch.split_master(master, target, self.array("lo", p))
            else:
                target.copy_(value)

    def forget_remainders(self, before: torch.Tensor) -> None:
        """After an edit: parameters whose value differs from what `before` (bytes on the CPU) holds are exactly their
        bf16 value."""
        for p in self.unit.params:
            if p.trainable and p.dtype is torch.bfloat16:
                offset = self.layout.places[p.index].offset
                was = before[offset : offset + p.nbytes].view(torch.int16).to(self.buffer.device)
                now = self.device_param(p).view(-1).view(torch.int16)
                self.array("lo", p).masked_fill_(was != now, 0)


class DeviceUpdate(AdamUpdate):
    """AdamW and Adam of one unit on the device. `run` launches kernels and returns."""

    kept: Kept
    """Where the gradients are; set when they are laid out."""

    def __init__(self, memory: DeviceMemory, params: list[Param], decoupled: bool) -> None:
        super().__init__(memory, params, decoupled)
        self._device = memory
        self._fused = memory.backend.fused_adam()

    def run(self, part: Sequence[Param], summed: bool, hypers: Hypers, scale: float) -> None:
        groups, enabled = self._take(part)
        for run, on in zip(groups, enabled, strict=True):
            if on:
                hyper = self._hyper(run[0], hypers, scale, True)
                if self._fused is not None:
                    self._fused.update(self._arrays(run), hyper)
                else:
                    _hostmath_torch.adam(self._arrays(run), hyper, BLOCK)
        self._device.note_write()

    def _arrays(self, run: list[Param]) -> AdamArrays:
        places = self._device.layout.places
        first, last = run[0], run[-1]
        begin = places[first.index].offset
        end = places[last.index].offset + last.nbytes
        el0, el1 = places[first.index].element, places[last.index].element + last.numel
        arrays = self._device.arrays
        if self.kept.wide:
            grad = self.kept.buffer.view(torch.float32)[el0:el1]
        else:
            grad = self.kept.buffer[begin:end].view(first.dtype)
        return AdamArrays(
            grad=grad,
            param=self._device.buffer[begin:end].view(first.dtype),
            lo=arrays["lo"][el0:el1] if first.dtype is torch.bfloat16 else None,
            exp_avg=arrays["m"][el0:el1],
            exp_avg_sq=arrays["v"][el0:el1],
        )

    def state_of(self, p: Param) -> dict[str, Any]:
        if not self.steps[p.index]:
            return {}
        self._device.written.synchronize()
        return {
            "step": torch.tensor(float(self.steps[p.index])),
            "exp_avg": self._device.array("m", p).view(p.shape).to("cpu", copy=True),
            "exp_avg_sq": self._device.array("v", p).view(p.shape).to("cpu", copy=True),
        }

    def load_state(self, p: Param, state: Mapping[str, Any]) -> None:
        for kind, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            array = self._device.array(kind, p)
            if state:
                array.view(p.shape).copy_(state[key])
            else:
                array.zero_()
        self.steps[p.index] = int(state["step"]) if state else 0


def norms_bytes(indices: Iterable[int]) -> int:
    """Bytes of host memory for the norms of gradients that never leave the device: an fp32 number a parameter, by index."""
    return 4 * (max(indices) + 1)


def norm_into(out: torch.Tensor, grad: torch.Tensor, backend: Backend) -> None:
    """Write the Euclidean norm of a device gradient, summed in double precision, to `out` (one fp32 element)."""
    fused = backend.fused_adam()
    if fused is not None:
        fused.norm_into(out, grad.detach())
        return
    flat = grad.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), BLOCK):
        total += flat[start : start + BLOCK].double().square_().sum()
    out.copy_(total.sqrt_())
