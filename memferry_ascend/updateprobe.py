"""The optimizer's own updates, timed on scratch memory: on the host, and as kernels on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memferry_ascend import arming
from memferry_ascend.arena import Arena, UnitMemory
from memferry_ascend.backends.base import Backend, align
from memferry_ascend.deviceupdate import BLOCK, TEMPORARIES, DeviceMemory, DeviceUpdate
from memferry_ascend.hostupdate import UnitUpdate, snapshot
from memferry_ascend.kept import Kept
from memferry_ascend.layers import SMALLEST_UNIT, Layer, Param, Unit
from memferry_ascend.linkprobe import median
from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Update

MAX_UPDATE = 16 << 20
"""Elements of the largest host update measured; larger ones are extrapolated from the rate."""
COLD = 512 << 20
"""Bytes that updates are measured over, if the model has as many: in training an update finds nothing of its unit in the
processor's caches. GPT-2 medium's updates take 64 ms an iteration on an H200's host, and 27 over and over the same layer."""


@dataclass
class Rates:
    """How long updates take: `overhead` seconds a call and `rate` elements/s; `traffic` bytes an element moves."""

    overhead: float
    rate: float
    traffic: int

    @classmethod
    def of(cls, small: tuple[int, float], large: tuple[int, float]) -> Rates:
        """From two updates: elements and seconds of each."""
        (n0, t0), (n1, t1) = small, large
        rate = (n1 - n0) / (t1 - t0) if n1 > n0 and t1 > t0 else n1 / t1
        return cls(max(0.0, t0 - n0 / rate), rate, 24)

    def seconds(self, elements: int, nbytes: int) -> float:
        """One layer's update. Layers smaller than a unit share a call with their neighbours."""
        return elements / self.rate + self.overhead * min(1.0, nbytes / SMALLEST_UNIT) if elements else 0.0


def _state(p: Param) -> int:
    """Bytes that an update of a parameter reads or writes, at least."""
    return max(1, p.numel * (2 * p.dtype.itemsize + 10))


class HostUpdates:
    """Times the optimizer's own host update, on scratch memory with the shapes of the model's parameters."""

    def __init__(
        self, layers: Sequence[Layer], optimizer: torch.optim.Optimizer, backend: Backend, native: bool
    ) -> None:
        self._hypers = snapshot(optimizer.param_groups)
        self._arena = Arena(backend)
        self._updates: list[tuple[int, list[tuple[UnitUpdate, list[Param]]]]] = []
        self._turn = 0
        self.traffic = 0
        params = sorted((p for layer in layers for p in layer.params if p.trainable), key=lambda p: p.numel)
        fitting = [p for p in params if 0 < p.numel <= MAX_UPDATE] or params[:1]
        chosen = {p.numel: p for p in (fitting[0], fitting[-1])} if fitting else {}
        model = sum(p.numel for p in params)
        try:
            for p in chosen.values():
                alike = (
                    1 if p is not fitting[-1] else max(1, min(COLD // _state(p), model // max(1, p.numel)))
                )
                self._updates.append((p.numel, [self._make(p, optimizer, native) for _ in range(alike)]))
        except BaseException:
            self._arena.close()
            raise

    def _make(
        self, like: Param, optimizer: torch.optim.Optimizer, native: bool
    ) -> tuple[UnitUpdate, list[Param]]:
        stand_in = torch.nn.Parameter(torch.empty(like.shape, device="meta"))
        p = Param(0, like.name, stand_in, like.dtype, True, group=like.group)
        layer = Layer(like.name, torch.nn.Module(), [p], [p])
        memory = UnitMemory(Unit(0, [layer], LayerPlan(like.name), [p]))
        layout = memory.layout
        memory.param = self._arena.region("param", layout.nbytes, mapped=False)
        memory.grad = self._arena.region("grad", layout.nbytes, mapped=False)
        if p.dtype is torch.bfloat16:
            memory.state["lo"] = self._arena.region("lo", layout.elements * 2, mapped=False)
        for kind in ("m", "v") if native else ():
            memory.state[kind] = self._arena.region(kind, layout.elements * 4, mapped=False)
        update = arming.make_updates([memory], optimizer)[0]
        self.traffic = align(p.numel * (24 + p.dtype.itemsize))
        return update, [p]

    def run_largest(self) -> None:
        """One update of the largest stand-in, of those alike the one that was longest ago."""
        self._run(self._updates[-1][1])

    def _run(self, alike: Sequence[tuple[UnitUpdate, list[Param]]]) -> None:
        update, params = alike[self._turn % len(alike)]
        self._turn += 1
        update.run(params, False, self._hypers, 1.0)

    def rates(self) -> Rates | None:
        """Overhead and rate from the smallest and largest; None when nothing is trainable."""
        if not self._updates:
            return None
        found = []
        for numel, alike in self._updates:

            def once(alike: Sequence[tuple[UnitUpdate, list[Param]]] = alike) -> float:
                start = time.perf_counter()
                self._run(alike)
                return time.perf_counter() - start

            for _ in alike:  # their pages come at the first write
                self._run(alike)
            found.append((numel, median(once, 3)))
        return Rates.of(found[0], found[-1])

    def close(self) -> None:
        self._updates.clear()
        self._arena.close()


def device_update_rates(
    layers: Sequence[Layer], optimizer: torch.optim.Optimizer, backend: Backend, budget: int
) -> Rates | None:
    """How long `DeviceUpdate` takes for the smallest and the largest parameter, in the dtype of the latter; None when
    nothing is trainable. budget: device bytes, of which half may be taken. An optimizer without one is not asked for."""
    params = [p for layer in layers for p in layer.params if p.trainable and p.numel]
    if not params:
        return None
    like = max(params, key=lambda p: p.numel)
    each = 2 * like.dtype.itemsize + 2 + 8 + 4 * TEMPORARIES  # parameter, gradient, remainder, moments
    most = max(1, min(BLOCK, budget // 2 // each))
    found = [
        (n, _device_update(like, n, optimizer, backend))
        for n in sorted({min(most, min(p.numel for p in params)), min(most, like.numel)})
    ]
    return Rates.of(found[0], found[-1])


def _device_update(like: Param, numel: int, optimizer: torch.optim.Optimizer, backend: Backend) -> float:
    """Seconds on the compute stream of one update of `numel` elements."""
    stand_in = torch.nn.Parameter(torch.empty(numel, device="meta"))
    p = Param(0, like.name, stand_in, like.dtype, True, group=like.group)
    plan = LayerPlan(like.name, Mode.GFGB, Grad.KEEP, Update.DEVICE)
    memory = DeviceMemory(Unit(0, [Layer(like.name, torch.nn.Module(), [p], [p])], plan, [p]), backend)
    update = arming.make_updates([memory], optimizer)[0]
    assert isinstance(update, DeviceUpdate)
    update.kept = Kept(backend, memory.layout, [p], wide=False)
    hypers = snapshot(optimizer.param_groups)
    start, end = backend.event(timing=True), backend.event(timing=True)

    def once() -> float:
        backend.synchronize()
        backend.compute.record(start)
        with torch.no_grad():
            update.run([p], False, hypers, 1.0)
        backend.compute.record(end)
        end.synchronize()
        return start.elapsed(end)

    try:
        return median(once, 3)
    finally:
        backend.synchronize()
        update.kept.release()
        memory.release()
