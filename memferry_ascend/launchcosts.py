"""What launching takes on this machine: each layer of a model, and what a plan's alternatives add for a layer.

Seconds of the threads that launch kernels (the user's, and autograd's in the backward pass), with nothing that they would
wait for. The layers are those of the trial; the alternatives are timed with the engine itself, on a model so small that
launching it is all it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import nn

from memferry_ascend.averages import Averages, median_spent
from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.config import Config
from memferry_ascend.layers import Layer
from memferry_ascend.marks import NOBODY, Mark, Marks, Spent
from memferry_ascend.placement import supports
from memferry_ascend.planner.launches import UNIT, Launches
from memferry_ascend.planner.plan import Decision, Grad, LayerPlan, Mode, Plan, Update
from memferry_ascend.runtime import Runtime
from memferry_ascend.trial import Trial

COUNT, WIDTH, ROWS = 24, 64, 8
"""Linear layers of the small model, their width, and the rows of its batch."""
WARMUP, STEPS, ROUNDS, QUICK = 3, 12, 2, 1.0
"""Iterations under each plan, and how often all plans are run; no round begins after QUICK seconds."""

_PLAIN: Decision = (Mode.GFGB, Grad.STAGE, Update.HOST)
_ALTERNATIVES: dict[str, Decision] = {
    Mode.DHA: (Mode.DHA, Grad.STAGE, Update.HOST),
    Mode.DFGB: (Mode.DFGB, Grad.STAGE, Update.HOST),
    Mode.STREAM: (Mode.STREAM, Grad.STAGE, Update.HOST),
    Grad.KEEP: (Mode.GFGB, Grad.KEEP, Update.HOST),
    Grad.DIRECT: (Mode.GFGB, Grad.DIRECT, Update.HOST),
    Update.DEVICE: (Mode.GFGB, Grad.KEEP, Update.DEVICE),
}


class _Instant(Event):
    """A moment of the host's clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed(self, later: Event) -> float:
        assert isinstance(later, _Instant)
        return later.at - self.at


class HostMarks(Marks):
    """Marks on the launching threads' time. At each the clock stands still until the device has run everything: where
    kernels take longer than launching them, a full queue would otherwise make the thread wait for them."""

    def __init__(self, layers: Sequence[Layer], backend: Backend) -> None:
        super().__init__(layers, backend)
        self._stood = 0.0

    def put(self, what: str, layer: int = NOBODY) -> None:
        if not self.active:
            return
        now = perf_counter()
        self.found.append(Mark(what, layer, _Instant(now - self._stood)))
        self._backend.synchronize()
        self._stood += perf_counter() - now


def of_layers(trial: Trial, read: Callable[[Marks], Spent], averages: Averages, passes: int) -> Spent:
    """The launching threads' seconds in each layer, medians over passes and equal layers; zeros where they run the kernels
    themselves. `read` makes a pass's marks into seconds."""
    if not trial.backend.queues:
        zeros = [0.0] * len(trial.layers)
        return Spent(zeros, zeros, zeros, zeros)
    marks, found = HostMarks(trial.layers, trial.backend), []
    for _ in range(passes):
        marks.install()
        trial.run(marks)
        marks.remove()
        found.append(read(marks))
    spent = median_spent(found)
    averages.pool(spent)
    return spent


def measure(runtime: Runtime, config: Config, *, device_updates: bool) -> dict[str, tuple[float, float]]:
    """The profile's `launches`: seconds more a layer in the forward, and in the backward and the step, than with all layers
    in GFGB, staged and updated on the host. Empty where kernels run on the thread that launches them, and where no other
    mode runs. device_updates: this stack has them."""
    can = runtime.backend.capabilities()
    if not runtime.backend.queues or not can.coherent:
        return {}
    alike = {"": _PLAIN, **_ALTERNATIVES}
    for name, usable in (
        (Mode.DHA, supports(can.dha_kinds, "Linear")),
        (Mode.DFGB, supports(can.dha_kinds, "Linear")),
        (Grad.DIRECT, supports(can.direct_kinds, "Linear")),
        (Update.DEVICE, device_updates),
    ):
        if not usable:
            del alike[name]
    plans = {name: [decision] * COUNT for name, decision in alike.items()}
    plans[UNIT] = [_PLAIN, _ALTERNATIVES[Grad.KEEP]] * (
        COUNT // 2
    )  # no layer shares a unit with its neighbour
    start = perf_counter()
    runs: list[dict[str, tuple[float, float]]] = []
    while not runs or (len(runs) < ROUNDS and perf_counter() - start < QUICK):
        runs.append({name: _seconds(runtime, config, plan) for name, plan in plans.items()})
    best = {name: [min(x) for x in zip(*(run[name] for run in runs), strict=True)] for name in plans}
    plain, kept, apart = best.pop(""), best[Grad.KEEP], best.pop(UNIT)
    found = {name: _more(seconds, plain, COUNT) for name, seconds in best.items()}
    between = [(a + b) / 2 for a, b in zip(plain, kept, strict=True)]
    return {**found, UNIT: _more(apart, between, COUNT - 1)}


def describe(launches: Launches) -> str:
    """A line for a person."""
    costs = (f"{name} {a * 1e6:.0f} + {b * 1e6:.0f}" for name, (a, b) in launches.items())
    return f"launching beside GFGB, us a layer, forward + backward and step: {', '.join(costs)}"


def _more(found: Sequence[float], plain: Sequence[float], count: int) -> tuple[float, float]:
    forward, backward = (max(0.0, a - b) / count for a, b in zip(found, plain, strict=True))
    return forward, backward


def _seconds(runtime: Runtime, config: Config, chosen: Sequence[Decision]) -> tuple[float, float]:
    """Least of several iterations of the small model: its forward, and its backward with the step. What else a machine does
    only adds to it."""
    from memferry_ascend.engine import Engine  # which plans with what is measured here

    with torch.random.fork_rng(devices=()):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="cpu") for _ in chosen))
    plan = Plan(tuple(LayerPlan(str(i), *decision) for i, decision in enumerate(chosen)))
    alone = replace(runtime, ranks=None)  # several ranks would have to do this together
    small = Config(precision=config.precision, threads=config.threads)
    forward, backward = [], []
    with Engine(model, torch.optim.AdamW(model.parameters()), alone, small, plan, None) as engine:
        batch = torch.ones(ROWS, WIDTH, device=runtime.backend.device, dtype=next(model.parameters()).dtype)
        for _ in range(WARMUP + STEPS):
            engine._jobs.drain()  # so that nothing is waited for
            runtime.backend.synchronize()
            began = perf_counter()
            loss = model(batch).sum()
            between = perf_counter()
            loss.backward()
            engine.optimizer.step()
            forward.append(between - began)
            backward.append(perf_counter() - between)
    return min(forward[WARMUP:]), min(backward[WARMUP:])
