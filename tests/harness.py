"""The equality harness: random models and plans, delays at every hand-over, poisoned buffers.

Every later test of "a plan changes when things happen, never what is computed" uses `train` and `assert_same`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import memferry_ascend as mf
from memferry_ascend import engine as engine_module
from memferry_ascend import layers as layers_module
from memferry_ascend import outline, runtime
from memferry_ascend.nativejobs import NativeJobs
from memferry_ascend.planner import LayerPlan, Mode, Plan
from memferry_ascend.ring import Ring, Slot

VOCAB, WIDTH, LENGTH, BATCH = 23, 16, 6, 3


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        if kind == "mlp":
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        elif kind == "attention":
            self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        elif kind == "conv":
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        elif kind == "scale":
            self.gain = nn.Parameter(torch.ones(WIDTH))
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if self.kind == "mlp":
            return x + self.down(F.gelu(self.up(h)))
        if self.kind == "attention":
            return x + self.mix(h, h, h, need_weights=False)[0]
        if self.kind == "conv":
            return x + self.conv(h.transpose(1, 2)).transpose(1, 2)
        return x + self.inner(h * self.gain)


class RandomModel(nn.Module):
    """Embedding, a few random blocks (some called twice), an output head that may be tied."""

    def __init__(self, seed: int, checkpoint: str | None = None) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(VOCAB, WIDTH)
        kinds = [rng.choice(("mlp", "attention", "conv", "scale")) for _ in range(rng.randint(1, 4))]
        self.blocks = nn.ModuleList(Block(k) for k in kinds)
        self.calls = list(range(len(kinds))) + ([rng.randrange(len(kinds))] if rng.random() < 0.4 else [])
        self.final = nn.LayerNorm(WIDTH)
        self.head_style = rng.choice(("free", "tied", "functional"))
        if self.head_style != "functional":
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            if self.head_style == "tied":
                self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i in self.calls:
            if self.checkpoint is not None and self.training:
                x = torch.utils.checkpoint.checkpoint(
                    self.blocks[i], x, use_reentrant=self.checkpoint == "reentrant"
                )
            else:
                x = self.blocks[i](x)
        x = self.final(x)
        logits = F.linear(x, self.embed.weight) if self.head_style == "functional" else self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_model(seed: int, **kwargs: Any) -> RandomModel:
    torch.manual_seed(seed)
    return RandomModel(seed, **kwargs)


def batches(steps: int, seed: int = 1, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (BATCH, LENGTH), generator=g).to(device) for _ in range(steps)]


def layer_names(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if any(p is not None for p in m._parameters.values())]


def plan_of(model: nn.Module, modes: Mode | Callable[[str], Mode], **fields: Any) -> Plan:
    """A plan with one mode for all layers, or what `modes(name)` says."""
    pick = (lambda _n: modes) if isinstance(modes, Mode) else modes
    return Plan(tuple(LayerPlan(n, pick(n), **fields) for n in layer_names(model)))


def random_plan(model: nn.Module, seed: int, modes: tuple[Mode, ...] = tuple(Mode)) -> Plan:
    rng = random.Random(seed)
    return plan_of(model, lambda _n: rng.choice(modes))


@dataclass
class Result:
    losses: list[float]
    state: dict[str, Any]


class Delays:
    """Sleeps before hand-overs. `points` are prefixes; each waits up to `most` seconds, drawn from `seed`."""

    def __init__(self, points: tuple[str, ...], seed: int, most: float = 0.002) -> None:
        self.points, self.most = points, most
        self._rng, self._lock = random.Random(seed), threading.Lock()
        self.hits = 0

    def __call__(self, point: str) -> None:
        if point.startswith(self.points):
            with self._lock:
                self.hits += 1
                pause = self._rng.random() * self.most
            time.sleep(pause)


class DeviceDelays(Delays):
    """Spins on the stream the hand-over is queued on, instead of the host thread that queues it."""

    def __call__(self, point: str) -> None:
        if point.startswith("copy:") and point.startswith(self.points):
            with self._lock:
                self.hits += 1
                cycles = int(self._rng.random() * self.most * 1.5e9)
            torch.cuda._sleep(cycles)
        else:
            super().__call__(point)


ALL_POINTS = ("forward", "copy:upload", "copy:reload", "copy:download", "update", "fold")


@contextmanager
def poisoned() -> Iterator[None]:
    """Device memory starts as NaN, and a ring slot becomes NaN the moment its forward window closes."""
    backend = runtime.current().backend
    alloc, release = type(backend).alloc_device, Ring.release

    def alloc_nan(self: Any, nbytes: int) -> torch.Tensor:
        poison = alloc(self, nbytes).fill_(255)
        self.compute.synchronize()  # the first copy into it waits for nobody
        return poison

    def release_nan(self: Ring, slot: Slot) -> None:
        release(self, slot)
        with self._lock:
            if slot.pins == 0 and slot.unit is not None and slot.unit is not self._lease:
                slot.loaded.synchronize()
                self._backend.compute.synchronize()
                self._by_unit.pop(id(slot.unit), None)
                slot.unit = None
                slot.bytes.fill_(255)
                self._backend.compute.record(slot.read)

    type(backend).alloc_device = alloc_nan  # type: ignore[method-assign]
    Ring.release = release_nan  # type: ignore[method-assign]
    try:
        yield
    finally:
        type(backend).alloc_device = alloc  # type: ignore[method-assign]
        Ring.release = release  # type: ignore[method-assign]


def toy_fabric(devices: int, host: int) -> str:
    """A fabric file: NPUs on one bus, each with 50 GB/s of its own to a host whose way to the bus has `host` GB/s."""
    return f"""
name: toy
hosts: [cpu]
switches: [bus]
devices: [{{name: npu, count: {devices}}}]
links:
  - {{ends: [cpu, bus], kind: ub, bandwidth: {host} GB/s, latency: 0 s}}
  - {{ends: ["npu*", bus], kind: ub, bandwidth: 200 GB/s, latency: 0 s, flow: 50 GB/s}}
"""


@contextmanager
def small_units(nbytes: int = 1500) -> Iterator[None]:
    """Units of a few layers although the layers are tiny."""
    before = layers_module.units

    def tiny(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **{"smallest": nbytes, "largest": 4 * nbytes, "tiny": nbytes // 10, **kwargs})

    engine_module.units = outline.units = tiny  # what arms units, and what counts their bytes when planning
    try:
        yield
    finally:
        engine_module.units = outline.units = before


def train(
    model: nn.Module,
    plan: Plan | None,
    *,
    steps: int = 6,
    config: mf.Config | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    disturb: Callable[[str], None] | None = None,
    serial: bool = False,
    micro: int = 1,
    unit_bytes: int = 1500,
    between: Callable[[mf.Engine], None] | None = None,
    sample_batch: Any = None,
) -> Result:
    """Train `steps` steps on fixed batches; `micro` backwards a step; `serial` waits for everything after each step.
    `between` is called between backward and step. Without a plan, `config` and `sample_batch` decide."""
    config = config or mf.Config(precision="fp32")
    make = optimizer or (lambda ps: torch.optim.AdamW(ps, lr=1e-2))
    rt = runtime.current()
    opt = make([p for p in model.parameters() if p.requires_grad])
    with small_units(unit_bytes):
        engine = mf.ferry(model, opt, config=config, plan=plan, sample_batch=sample_batch)
    rt.backend.disturb = disturb
    if disturb is not None:
        for module in model.modules():  # the launching thread itself may be slow anywhere in a forward
            if not list(module.children()):
                module.register_forward_pre_hook(lambda *_: disturb("forward"))
    if disturb is not None and isinstance(engine._jobs, NativeJobs):
        engine._jobs.worker.delay(0.003, 7)  # the native worker has no hand-over points of its own in Python
    losses = []
    try:
        data = batches(steps * micro, device=rt.backend.device)
        for step in range(steps):
            total = 0.0
            for k in range(micro):
                loss = engine.model(data[step * micro + k]) / micro
                loss.backward()
                total += float(loss.detach())
            if between is not None:
                between(engine)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if serial:
                engine.synchronize()
            losses.append(total)
        state = engine.state_dict()
    finally:
        rt.backend.disturb = None
        engine.close()
    return Result(losses, state)


def copies(engine: mf.Engine, data: list[torch.Tensor]) -> list[str]:
    """Train a step on each batch; the copies over the link until everything has settled, by their hand-over points."""
    points: list[str] = []
    backend = runtime.current().backend
    backend.disturb = points.append
    for batch in data:
        engine.model(batch).backward()
        engine.optimizer.step()
    engine.synchronize()
    backend.disturb = None
    return [p for p in points if p.startswith("copy:")]


def assert_same(a: Result, b: Result) -> None:
    """Losses, masters and moments are bit-identical."""
    assert a.losses == b.losses
    assert a.state["model"].keys() == b.state["model"].keys()
    for name, value in a.state["model"].items():
        assert torch.equal(value, b.state["model"][name]), f"{name} differs"
    for name, state in a.state["optimizer"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b.state["optimizer"][name][key])), (
                name,
                key,
            )
