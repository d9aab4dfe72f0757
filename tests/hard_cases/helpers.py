"""A model with branches, and a training loop run on plain PyTorch's model and on an engine's."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Delays, layer_names, plan_of, small_units
from torch import nn
from torch.nn import functional as F

import memferry_ascend as mf
from memferry_ascend.planner import LayerPlan, Mode, Plan

FP32 = mf.Config(precision="fp32")
MODES = list(Mode)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def plan_for(model: nn.Module, mode: Mode | str) -> Plan:
    if mode == "mixed":
        turn = itertools.cycle(MODES)
        return Plan(tuple(LayerPlan(n, next(turn)) for n in layer_names(model)))
    return plan_of(model, Mode(mode))


def ferry(
    model: nn.Module,
    mode: Mode | str = Mode.GFGB,
    config: mf.Config = FP32,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> mf.Engine:
    with small_units():
        return mf.ferry(model, optimizer(model.parameters()), config=config, plan=plan_for(model, mode))


def close_to(a: nn.Module, b: nn.Module, rtol: float = 2e-6) -> None:
    """The plain model `b` holds what `a` holds."""
    want = b.state_dict()
    got = a.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def both(
    model: nn.Module,
    mode: Mode | str,
    loop: Callable[[nn.Module, torch.optim.Optimizer], Any],
    config: mf.Config = FP32,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> None:
    """Run `loop(model, optimizer)` on plain PyTorch and on an engine; results and parameters are the same."""
    plain = copy.deepcopy(model)
    want = loop(plain, optimizer(plain.parameters()))
    with ferry(model, mode, config, optimizer) as engine:
        got = loop(engine.model, engine.optimizer)
    assert got == pytest.approx(want, rel=2e-6, abs=1e-6)
    close_to(model, plain)


class Branches(nn.Module):
    """`pick` says which layers run; the head may be used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11)
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor, pick: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        h = self.embed(x)
        for i in pick:
            if i == self.fail_at:
                raise ValueError("halfway")
            h = h + torch.tanh(self.parts[i](h))
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def tokens(n: int, seed: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (2, 5), generator=g) for _ in range(n)]


def branches() -> Branches:
    torch.manual_seed(7)
    return Branches()


PICKS = [(0, 1, 2, 3), (0, 2), (1, 1, 3), (3, 0), (2,), (0, 1, 2, 3), (0, 0, 0)]


def some_steps(model: nn.Module, opt: torch.optim.Optimizer, data: list[torch.Tensor]) -> list[float]:
    return [one_step(model, opt, x) for x in data]


def one_step(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = model(x)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return float(loss.detach())


class SlowUpdates(Delays):
    """Every update takes its time, so that whoever reads without waiting reads the old value."""

    def __init__(self) -> None:
        super().__init__(("update",), seed=0)

    def __call__(self, point: str) -> None:
        if point == "update":
            time.sleep(0.02)
