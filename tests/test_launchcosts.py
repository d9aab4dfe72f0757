"""What launching takes, measured: the arithmetic on a clock that only the test moves, and the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memferry_ascend as mf
from memferry_ascend import launchcosts, profiler, runtime
from memferry_ascend.backends.base import Backend, Capabilities
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.engine import Engine
from memferry_ascend.planner.launches import ALTERNATIVES
from memferry_ascend.planner.plan import Grad, Mode, Plan, Update

CONFIG = mf.Config(precision="fp32")


class Queueing(CpuBackend):
    """As if its kernels ran behind the launching thread."""

    queues = True
    kinds = frozenset({"*"})

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), dha_kinds=self.kinds, direct_kinds=self.kinds)


@pytest.fixture
def queueing() -> Iterator[runtime.Runtime]:
    backend = Queueing()
    yield runtime.Runtime(backend, "auto", None, 0, 1, 0, 1)
    backend.close()


COST = {"GFGB": (1, 2), "DHA": (1, 1), "DFGB": (2, 4), "STREAM": (4, 3), "keep": (0, 3), "direct": (2, 1),
        "device": (0, 7)}  # fmt: skip


class Spied:
    """An engine whose passes move the clock: so much a layer by its decision, so much a unit, a hiccup now and then, and
    waiting for an update where nobody has waited before."""

    now = 0.0
    plans: ClassVar[list[Plan]] = []

    def __init__(self, model: nn.Module, _o: Any, alone: Any, config: Any, plan: Plan, batch: Any) -> None:
        assert alone.ranks is None and config == CONFIG and batch is None
        Spied.plans.append(plan)
        self.plan, self._jobs, self.optimizer = plan, self, self
        self.passes, self.pending = 0, False
        model.register_forward_hook(lambda *_: self.take(0))
        model[0].weight.register_post_accumulate_grad_hook(lambda _: self.take(1))

    def take(self, which: int) -> None:
        units = sum(a[1:] != b[1:] for a, b in zip(self.decided, self.decided[1:], strict=False))
        spent = units * (5, 10)[which]
        spent += (
            300 * units * (len(Spied.plans) <= len(ALTERNATIVES) + 1)
        )  # the first round, on a busy machine
        for mode, grad, update in self.decided:
            placed = update if update is Update.DEVICE else grad
            spent += COST[mode][which] + COST.get(placed, (0, 0))[which]
        Spied.now += spent + units * (1000 * (self.passes % 3) + 500 * self.pending)
        self.passes += which

    @property
    def decided(self) -> list[tuple[Mode, Grad, Update]]:
        return [(x.mode, x.grad, x.update) for x in self.plan.layers]

    def drain(self) -> None:
        self.pending = False
        Spied.now += 10_000

    def step(self) -> None:
        self.pending = True
        Spied.now += 50

    def __enter__(self) -> Spied:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> None:
    Spied.now, Spied.plans = 0.0, []
    monkeypatch.setattr("memferry_ascend.engine.Engine", Spied)
    monkeypatch.setattr(launchcosts, "STEPS", 3)
    monkeypatch.setattr(launchcosts, "QUICK", 1e9)
    monkeypatch.setattr(launchcosts, "perf_counter", lambda: Spied.now)


@pytest.mark.usefixtures("spied")
def test_alternatives_are_compared_with_gfgb_layer_by_layer(queueing: runtime.Runtime) -> None:
    found = launchcosts.measure(queueing, CONFIG, device_updates=True)
    assert found == {
        "DHA": (0, 0),  # less is nothing
        "DFGB": (1, 2),
        "STREAM": (3, 1),
        "keep": (0, 3),
        "direct": (2, 1),
        "device": (0, 7),
        "unit": (5, 10),
    }
    assert set(found) == set(ALTERNATIVES)
    assert all(len(plan.layers) == launchcosts.COUNT for plan in Spied.plans)


@pytest.mark.usefixtures("spied")
def test_what_this_machine_cannot_run_is_not_tried(queueing: runtime.Runtime) -> None:
    queueing.backend.kinds = frozenset()  # type: ignore[attr-defined]
    found = launchcosts.measure(queueing, CONFIG, device_updates=False)
    assert set(found) == {"STREAM", "keep", "unit"}


@pytest.mark.usefixtures("spied")
def test_where_launching_a_kernel_is_running_it_nothing_is_measured(cpu: runtime.Runtime) -> None:
    assert Backend.queues and not cpu.backend.queues
    assert launchcosts.measure(cpu, CONFIG, device_updates=True) == {}
    assert Spied.plans == []


def test_the_engine_runs_every_alternative_and_nothing_is_left(
    queueing: runtime.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Engine] = []

    class Watched(Engine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("memferry_ascend.engine.Engine", Watched)
    monkeypatch.setattr(launchcosts, "ROUNDS", 1)
    monkeypatch.setattr(launchcosts, "STEPS", 2)
    torch.manual_seed(3)
    found = launchcosts.measure(queueing, CONFIG, device_updates=True)
    assert set(found) == set(ALTERNATIVES)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    assert len(made) == 1 + len(ALTERNATIVES) and all(engine._closed for engine in made)
    assert queueing.backend.memory_stats().allocated == 0
    for engine in made:
        decided = {(x.mode, x.grad, x.update) for x in engine.plan.layers}
        assert len(decided) == (2 if engine is made[-1] else 1)
        assert engine._steps == launchcosts.WARMUP + launchcosts.STEPS


class Timed(nn.Linear):
    """Launching it takes `launch` s of the test's clock, forward and backward each; waiting for its kernels 100 s."""

    now = 0.0
    launch = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Timed.now += self.launch
        out = super().forward(x)
        assert out.grad_fn is not None
        out.grad_fn.register_hook(self.back)
        return out

    def back(self, *_: Any) -> None:
        Timed.now += self.launch


def test_layers_are_launched_without_waiting_for_the_device(
    queueing: runtime.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(self: Queueing) -> None:
        Timed.now += 100.0
        CpuBackend.synchronize(self)

    monkeypatch.setattr(launchcosts, "perf_counter", lambda: Timed.now)
    monkeypatch.setattr(Queueing, "synchronize", wait)
    seen: list[Any] = []
    of_layers = launchcosts.of_layers
    monkeypatch.setattr(launchcosts, "of_layers", lambda *args: seen.append(of_layers(*args)) or seen[-1])
    for name in ("PASSES", "DHA_PASSES", "MORE_PASSES"):
        monkeypatch.setattr(profiler, name, 1)
    monkeypatch.setattr(launchcosts, "measure", lambda *_, **__: {"STREAM": (1.0, 2.0)})
    model = nn.Sequential(Timed(4, 4), nn.Tanh(), Timed(4, 4), nn.Tanh(), Timed(4, 4, bias=False))
    measured = profiler.profile(
        model, torch.optim.AdamW(model.parameters()), torch.randn(3, 4), queueing, CONFIG, refresh=True
    )
    (spent,) = seen
    assert spent.forward == pytest.approx([2.0, 2.0, 2.0])
    assert spent.backward == pytest.approx([2.0, 2.0, 2.0])
    for x in measured.profile.layers:  # no longer than what the device was seen to take with it
        assert (x.t_host_fp, x.t_host_bp) == (x.t_fp, x.t_bp)
    assert measured.profile.launches == {"STREAM": (1.0, 2.0)}


def test_on_the_cpu_layers_have_no_launching_of_their_own(cpu: runtime.Runtime) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    measured = profiler.profile(
        model, torch.optim.AdamW(model.parameters()), torch.randn(3, 4), cpu, CONFIG, refresh=True
    )
    assert [(x.t_host_fp, x.t_host_bp) for x in measured.profile.layers] == [(0.0, 0.0)]
    assert measured.profile.launches == {}
