"""Ways to train on one device that are ours: plain, the serial offload baseline, and the engine in its variants.

All use AdamW with torch's defaults, learning rate 1e-4, fp32 masters and fp32 moments (`plain-bf16` says otherwise),
and sum several backwards in fp32. Bytes a parameter, and where, are each class's `states`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import memferry_ascend as mf
from memferry_ascend import hostmath, report
from memferry_ascend.backends.base import Backend, Event, HostSlab, align
from memferry_ascend.config import host_threads

from .models import Unavailable

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """One row's settings; `clip` is the global norm limit or None, `threads` those of host updates."""

    batch: int
    seq: int
    clip: float | None = None
    accumulate: int = 1
    backend: str = "cuda"
    threads: int | None = None
    planner: str | None = None
    device_memory: str | None = None
    reserve: float | None = None
    device_cap: int | None = None
    """Bytes that the allocator may take at most, whatever the system."""
    ranks: int = 1
    """Processes, one a device; `batch` is each one's."""
    assist: tuple[int, ...] = ()
    topology: str = "auto"
    trace: str | None = None
    """Folder for what the engine's recorder saw of a few more iterations."""

    @property
    def rank(self) -> int:
        return int(os.environ["LOCAL_RANK"]) if self.ranks > 1 else 0


class System:
    """Trains `model`. Every row is one System from start to close."""

    states = ""
    note = ""
    reusable = True
    """Several may follow each other in one process."""
    parallel = False
    """Trains on several ranks too."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self.model, self.setup = model, setup
        if setup.ranks > 1 and not self.parallel:
            raise Unavailable("it trains on one device")

    @property
    def device(self) -> torch.device:
        return (
            torch.device("cpu")
            if self.setup.backend == "cpu"
            else torch.device(self.setup.backend, self.setup.rank)
        )

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss / self.setup.accumulate

    def backwards(self, micro: list[Batch]) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss, on the device."""
        total: Tensor | None = None
        for batch in micro:
            loss = self.forward(batch)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def step(self, micro: list[Batch]) -> Tensor:
        """One iteration; the loss may still be on its way."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait for work that runs beside the device's streams."""

    def host_bytes(self) -> int | None:
        """Host memory held for training, where it is known exactly."""
        return None

    def device_rows(self) -> dict[str, int] | None:
        """Bytes held on the device by purpose, where they are known exactly."""
        return None

    def peak_bytes(self) -> int | None:
        """The most that the device held, for backends whose allocator is not torch's."""
        return None

    def trace(self, step: Callable[[int], Any], count: int = 3) -> dict[str, Any] | None:
        """What ran when in `count` more iterations, for systems that can say so."""
        return None

    def close(self) -> None:
        """Let everything go."""


class Plain(System):
    """Everything on the device, fp32 masters: what training costs without offload."""

    states = "device 16 B/parameter: bf16 parameter and gradient, fp32 master and moments"
    PIECE = 64 << 20
    """Parameters updated at once: bounds the fp32 copy of gradients."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        model.to(self.device)
        self.groups: list[list[nn.Parameter]] = [[]]
        size = 0
        for p in model.parameters():
            if self.groups[-1] and size + p.numel() > self.PIECE:
                self.groups.append([])
                size = 0
            self.groups[-1].append(p)
            size += p.numel()
        self.masters = [[p.detach().float() for p in g] for g in self.groups]
        self.m = [[torch.zeros_like(x) for x in g] for g in self.masters]
        self.v = [[torch.zeros_like(x) for x in g] for g in self.masters]
        self.steps = [[torch.zeros((), device=self.device) for _ in g] for g in self.groups]
        self.sums: dict[int, Tensor] = {}
        if setup.accumulate > 1:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(self._sum)

    def _sum(self, p: Tensor) -> None:
        assert p.grad is not None
        if id(p) in self.sums:
            self.sums[id(p)] += p.grad
        else:
            self.sums[id(p)] = p.grad.float()
        p.grad = None

    @torch.no_grad()
    def step(self, micro: list[Batch]) -> Tensor:
        with torch.enable_grad():
            loss = self.backwards(micro)
        grads = [[self.sums[id(p)] if self.sums else p.grad for p in g] for g in self.groups]
        scale: Tensor | None = None
        if self.setup.clip is not None:
            flat = [x for g in grads for x in g if x is not None]
            norm = torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float32)).norm()
            scale = (self.setup.clip / (norm + 1e-6)).clamp(max=1.0)
        for params, masters, m, v, steps, given in zip(
            self.groups, self.masters, self.m, self.v, self.steps, grads, strict=True
        ):
            wide = [x.float() for x in given if x is not None]
            if scale is not None:
                torch._foreach_mul_(wide, scale)
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                masters, wide, m, v, [], steps,
                lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY, eps=EPS, amsgrad=False, maximize=False,
            )  # fmt: skip
            torch._foreach_copy_(params, masters)
            for p in params:
                p.grad = None
        self.sums.clear()
        return loss


class PlainBf16(System):
    """torch's fused AdamW on a bf16 model: the fastest plain training there is, with bf16 masters and moments."""

    states = "device 8 B/parameter: everything bf16, no fp32 master"
    note = "other arithmetic: no fp32 master"

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        model.to(self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def step(self, micro: list[Batch]) -> Tensor:
        loss = self.backwards(micro)
        if self.setup.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class ForwardBackward(System):
    """No optimizer at all: the device's own part of an iteration."""

    states = "device 4 B/parameter: bf16 parameter and gradient"

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        model.to(self.device)

    def step(self, micro: list[Batch]) -> Tensor:
        loss = self.backwards(micro)
        self.model.zero_grad(set_to_none=True)
        return loss


def ours(setup: Setup) -> Backend:
    """The engine's backend of this row."""
    return mf.init(backend=setup.backend, topology=setup.topology).backend


class NativeOffload(System):
    """The paper's baseline: parameters on the device, optimizer on the host, one phase after the other.

    As in ZeRO-Offload a gradient is copied to pinned host memory as soon as its layer's backward made it, so that part
    runs beside backward. When all are there, AdamW runs over all parameters (the same native one-pass kernel and split
    masters as the engine, on all cores); when that is done, all parameters are copied back; then the next forward may
    start.
    """

    states = "device 2 B/parameter: bf16 parameter; host 14: gradient, split master, fp32 moments"

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        self.backend = backend = ours(setup)
        hostmath.set_threads(host_threads(1, setup.threads))
        self.up, self.down = backend.stream("upload"), backend.stream("download")
        self.params = list(model.parameters())
        self.slabs: list[HostSlab] = []
        self._open: dict[bool, tuple[HostSlab, int]] = {}
        self.hi, self.grad, self.acc = {}, {}, {}  # type: dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]
        segments = []
        for p in self.params:
            n = p.numel()
            hi, grad = self._host(2 * n, torch.bfloat16), self._host(2 * n, torch.bfloat16)
            lo = self._host(2 * n, torch.int16, mapped=False)
            m, v = (self._host(4 * n, torch.float32, mapped=False) for _ in range(2))
            hi.copy_(p.detach().view(-1))
            if setup.accumulate > 1:
                self.acc[id(p)] = self._host(4 * n, torch.float32, mapped=False)
            self.hi[id(p)], self.grad[id(p)] = hi, grad
            segments.append(hostmath.AdamSegment(self.acc.get(id(p), grad), hi, lo, m, v))
            p.register_post_accumulate_grad_hook(self._left)
        self.program = hostmath.AdamProgram(segments)
        model.to(self.device)
        self.held: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.done = 0

    def _host(self, nbytes: int, dtype: torch.dtype, mapped: bool = True) -> Tensor:
        """Part of a slab: registering memory piece by piece takes longer."""
        room = align(nbytes)
        slab, at = self._open.get(mapped, (None, 0))
        if slab is None or at + room > slab.nbytes:
            size = max(room, (1 if self.setup.backend == "cpu" else 256) << 20)
            slab, at = self.backend.alloc_host(size, mapped=mapped), 0
            self.slabs.append(slab)
        self._open[mapped] = (slab, at + room)
        return slab.host[at : at + nbytes].view(dtype)

    def _left(self, p: Tensor) -> None:
        grad = p.grad
        assert grad is not None
        if self.setup.clip is not None and self.setup.accumulate == 1:
            self.norms.append(torch.linalg.vector_norm(grad, dtype=torch.float32))
        flat = grad.contiguous().view(-1)
        made: Event = self.backend.event()
        self.backend.compute.record(made)
        self.down.wait(made)
        self.down.copy(self.grad[id(p)], flat)
        self._release(flat)
        p.grad = None

    def _release(self, grad: Tensor) -> None:
        """A gradient's memory is free for reuse once its copy ran."""
        stream = getattr(self.down, "stream", None)
        if stream is not None:
            grad.record_stream(stream)
        else:
            self.held.append(grad)

    def step(self, micro: list[Batch]) -> Tensor:
        total: Tensor | None = None
        for k, batch in enumerate(micro):
            loss = self.forward(batch)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            self.down.synchronize()
            self.held.clear()
            for key, acc in self.acc.items():
                hostmath.accumulate(acc, self.grad[key], first=k == 0)
        assert total is not None
        self.done += 1
        hyper = hostmath.AdamHyper(
            LR, *BETAS, eps=EPS, weight_decay=DECAY, step=self.done, grad_scale=self._scale()
        )
        self.program.run([hyper] * len(self.params))
        used, here = self.backend.event(), self.backend.event()
        self.backend.compute.record(used)
        self.up.wait(used)
        with torch.no_grad():
            self.up.copy_many([(p.detach().view(-1), self.hi[id(p)]) for p in self.params])
        self.up.record(here)
        self.backend.compute.wait(here)
        return total

    def _scale(self) -> float:
        if self.setup.clip is None:
            return 1.0
        if self.acc:
            norm = sum(hostmath.sum_squares(a) for a in self.acc.values()) ** 0.5
        else:
            norm = float(torch.stack(self.norms).norm())
            self.norms.clear()
        return min(1.0, self.setup.clip / (norm + 1e-6))

    def drain(self) -> None:
        self.backend.synchronize()

    def host_bytes(self) -> int | None:
        per = 14 + (4 if self.acc else 0)
        return sum(p.numel() for p in self.params) * per

    def close(self) -> None:
        self.backend.synchronize()
        del self.program
        for store in (self.hi, self.grad, self.acc):
            store.clear()
        self._open.clear()
        for slab in self.slabs:
            self.backend.free_host(slab)
        self.slabs.clear()


class Memferry(System):
    """The engine. Everything on the host unless a device budget is set."""

    states = "host 14 B/parameter: bf16 gradient, split master (its upper half is what the device reads), fp32 moments"
    update = "step"
    reserve: float | None = None
    parallel = True

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        ours(setup)
        options: dict[str, Any] = {}
        reserve = self.reserve if setup.reserve is None else setup.reserve
        sample = None
        if setup.planner is not None:
            options["planner"] = setup.planner
        if setup.device_memory is not None:
            options["device_memory"] = setup.device_memory
        if setup.device_memory is not None or setup.planner not in (None, "rules"):
            ids = torch.zeros(setup.batch, setup.seq, dtype=torch.long) + 5
            sample = {"input_ids": ids.to(self.device), "labels": ids.to(self.device)}
        self.engine = mf.ferry(
            model,
            torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
            sample_batch=sample,
            config=mf.Config(
                update=self.update,
                accumulate=setup.accumulate,
                max_grad_norm=setup.clip,
                reserve=reserve,
                threads=setup.threads,
                assist_devices=tuple(setup.assist),
                **options,
            ),
        )
        self._check_plan()

    def _check_plan(self) -> None:
        if self.reserve == 0 and not any(lp.grad == "direct" for lp in self.engine.plan.layers):
            self.engine.close()
            raise Unavailable(
                "the plan made with reserve=0 has no layer whose gradient kernel writes host memory: it would be "
                f"{type(self).update!r} under another name"
            )

    def step(self, micro: list[Batch]) -> Tensor:
        loss = self.backwards(micro)
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        return loss

    def drain(self) -> None:
        self.engine.synchronize()

    def host_bytes(self) -> int | None:
        return sum(nbytes for place, _, nbytes in self.engine.memory_report() if place.startswith("host"))

    def device_rows(self) -> dict[str, int] | None:
        return {what: nbytes for place, what, nbytes in self.engine.memory_report() if place == "device"}

    def peak_bytes(self) -> int | None:
        return mf.current().backend.memory_stats().peak

    def trace(self, step: Callable[[int], Any], count: int = 3) -> dict[str, Any] | None:
        if self.setup.trace is None or self.setup.rank:
            return None
        self.engine.recorder.start()
        for i in range(count):
            step(i)
        recording = self.engine.recorder.stop()
        self.engine.recorder.save(self.setup.trace)
        return report.summary(recording)

    def close(self) -> None:
        self.engine.close()


class MemferryBackward(Memferry):
    update = "backward"


class MemferryGo(MemferryBackward):
    """GO-MemFerry: no gradient is kept on the device (reserve factor 0), kernels write them to host memory."""

    reserve = 0.0


OURS: dict[str, Callable[[nn.Module, Setup], System]] = {
    "plain": Plain,
    "plain-bf16": PlainBf16,
    "native-offload": NativeOffload,
    "memferry-step": Memferry,
    "memferry-backward": MemferryBackward,
    "memferry-go": MemferryGo,
}
