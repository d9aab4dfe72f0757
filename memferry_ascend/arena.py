"""The arena: host memory for parameters, masters, moments and gradients, laid out unit by unit.

Structure of arrays: every kind of array has its own slabs, and within a kind a unit is one contiguous region in which
each parameter starts 512-byte aligned. In the device dtype a unit's parameter and gradient regions share one layout,
so a whole unit moves in one copy; state arrays (remainder, moments, fp32 accumulator) share another, in elements.

    kind     dtype          mapped   bytes per parameter (bf16 / fp32)
    param    device dtype   yes      2 / 4    bf16: the upper half of the fp32 master
    grad     device dtype   yes      2 / 4
    shared   device dtype   yes      2 / 4    instead of `param`, once per node, where several ranks read one memory
    lo       int16          no       2 / 0    the master's remainder
    m, v     float32        no       4 + 4    AdamW's moments (other optimizers keep their own state)
    master   float32        no       4 / 0    instead of `lo`, for optimizers without a native kernel
    acc      float32        yes      4        only when several backwards precede a step
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memferry_ascend import sizes
from memferry_ascend.backends.base import ALIGNMENT, Backend, HostSlab, align
from memferry_ascend.borrower import Segments
from memferry_ascend.errors import FerryError
from memferry_ascend.layers import Param, Unit

CHUNK = 256 << 20
"""Bytes per slab where a kind needs more: slabs are registered one by one as the model's own memory is freed."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies inside its unit: bytes in the device dtype, and elements in state arrays (-1: frozen)."""

    offset: int
    element: int


class Layout:
    """Offsets of a unit's parameters, computed once. Pure arithmetic: also what predicts the arena's size."""

    def __init__(self, unit: Unit) -> None:
        self.places: dict[int, Place] = {}
        nbytes = elements = 0
        for p in unit.params:
            trainable = p.trainable
            self.places[p.index] = Place(nbytes, elements if trainable else -1)
            nbytes += align(p.nbytes)
            if trainable:
                elements += align(p.numel, ALIGNMENT // p.dtype.itemsize)  # the same gaps as in bytes
        self.nbytes = nbytes
        """Bytes of the parameter region."""
        self.grad_nbytes = nbytes if any(p.trainable for p in unit.params) else 0
        self.elements = elements
        """Elements of each state array."""


class Region:
    """A unit's part of one kind of array: bytes seen by host and, where mapped, by the device."""

    def __init__(self, slab: HostSlab, start: int, nbytes: int) -> None:
        self.host = slab.host[start : start + nbytes]
        self.device = None if slab.device is None else slab.device[start : start + nbytes]
        self.nbytes = nbytes

    def part(self, first: int, last: int) -> Region:
        """Bytes `first` to `last` of this region, as a region."""
        out = object.__new__(Region)
        out.host = self.host[first:last]
        out.device = None if self.device is None else self.device[first:last]
        out.nbytes = last - first
        return out


class Arena:
    """Allocates regions from slabs of at least `CHUNK` bytes, and counts every byte it took.

    `limit` (bytes) is checked before each slab. Nothing is freed before `close`.
    """

    def __init__(self, backend: Backend, limit: int | None = None, shared: str = "") -> None:
        self._backend = backend
        self._shared = shared
        self.shared_names: list[str] = []
        """Names of the slabs of kind "shared": all ranks of a node ask for the same ones in the same order."""
        self._limit = limit
        self.segments: Segments | None = None
        """Set before the first region: mapped slabs are memory that lenders of devices map too (`borrower.py`)."""
        self._slabs: list[tuple[str, HostSlab]] = []
        self._open: dict[str, tuple[HostSlab, int]] = {}
        self.bytes_by_kind: dict[str, int] = {}

    def region(self, kind: str, nbytes: int, *, mapped: bool, expect: int = 0) -> Region:
        """`nbytes` of zeroed memory of that kind. `expect` is how much of this kind is still to come (bytes), so that
        the last slab is no larger than needed.

        Raises:
            FerryError: the arena would outgrow its limit; names the largest kinds.
        """
        nbytes = align(max(nbytes, ALIGNMENT))
        slab, used = self._open.get(kind, (None, 0))
        if slab is None or used + nbytes > slab.nbytes:
            size = max(nbytes, min(CHUNK, max(expect, nbytes)))
            if self._limit is not None and self.nbytes + size > self._limit:
                top = sorted(self.bytes_by_kind.items(), key=lambda kv: -kv[1])[:3]
                named = ", ".join(f"{k} {sizes.fmt(v)}" for k, v in top) or "nothing yet"
                raise FerryError(
                    f"host memory: the arena holds {sizes.fmt(self.nbytes)} ({named}) and needs "
                    f"{sizes.fmt(size)} more for {kind}, over the limit of {sizes.fmt(self._limit)}"
                )
            name = None
            if kind == "shared":
                name = f"{self._shared}-{len(self.shared_names)}"
                self.shared_names.append(name)
            if self.segments is not None and mapped:
                slab, used = self.segments.alloc(size, name), 0
            else:
                slab, used = self._backend.alloc_host(size, mapped=mapped, shared=name), 0
            self._slabs.append((kind, slab))
            self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + size
        self._open[kind] = (slab, used + nbytes)
        return Region(slab, used, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes taken so far."""
        return sum(self.bytes_by_kind.values())

    def release(self, kinds: Iterable[str]) -> None:
        """Return the slabs of these kinds. Every tensor over them must have been let go."""
        gone = set(kinds)
        for kind, slab in self._slabs:
            if kind in gone:
                self._free(slab)
        self._slabs = [(kind, slab) for kind, slab in self._slabs if kind not in gone]
        for kind in gone:
            self._open.pop(kind, None)
            self.bytes_by_kind.pop(kind, None)

    def close(self) -> None:
        """Return all slabs. Every tensor over them must have been let go."""
        self._open.clear()
        for _, slab in self._slabs:
            self._free(slab)
        self._slabs.clear()
        self.bytes_by_kind.clear()

    def _free(self, slab: HostSlab) -> None:
        free = self._backend.free_host if self.segments is None else self.segments.free
        free(slab)


class UnitMemory:
    """One unit's regions and the views the engine works with."""

    on_device = False
    """The unit has nothing in the arena (`deviceupdate.py`)."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.layout = Layout(unit)
        self.param: Region
        self.grad: Region | None = None
        self.state: dict[str, Region] = {}

    def host_param(self, p: Param) -> torch.Tensor:
        """The arena's value of `p`, in its shape, as a CPU tensor."""
        return _view(self.param.host, self.layout.places[p.index].offset, p, p.dtype)

    def device_param(self, p: Param) -> torch.Tensor:
        """The same bytes as a device tensor."""
        assert self.param.device is not None
        return _view(self.param.device, self.layout.places[p.index].offset, p, p.dtype)

    def buffer_param(self, buffer: torch.Tensor, p: Param) -> torch.Tensor:
        """`p` inside a device buffer or slot that holds this unit."""
        return _view(buffer, self.layout.places[p.index].offset, p, p.dtype)

    def host_grad(self, p: Param) -> torch.Tensor:
        assert self.grad is not None
        return _view(self.grad.host, self.layout.places[p.index].offset, p, p.dtype)

    def device_grad(self, p: Param) -> torch.Tensor:
        assert self.grad is not None and self.grad.device is not None
        return _view(self.grad.device, self.layout.places[p.index].offset, p, p.dtype)

    def host_state(self, kind: str, p: Param) -> torch.Tensor:
        """`p`'s part of a state array, flat."""
        return self._state(self.state[kind].host, kind, p)

    def device_state(self, kind: str, p: Param) -> torch.Tensor:
        """The same through the device's alias, flat; only for mapped kinds."""
        device = self.state[kind].device
        assert device is not None
        return self._state(device, kind, p)

    def _state(self, raw: torch.Tensor, kind: str, p: Param) -> torch.Tensor:
        dtype = torch.int16 if kind == "lo" else torch.float32
        start = self.layout.places[p.index].element
        assert start >= 0, f"{p.name} is frozen and has no {kind}"
        return raw.view(dtype)[start : start + p.numel]


def _view(raw: torch.Tensor, offset: int, p: Param, dtype: torch.dtype) -> torch.Tensor:
    return raw[offset : offset + p.nbytes].view(dtype).view(p.shape)
