"""torch's optimizers and schedulers, against plain PyTorch's numbers, in every mode and with slow workers and copies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import small_units
from torch import nn

import memferry_ascend as mf
from memferry_ascend.planner import Mode

from .helpers import FP32, adamw, branches, close_to, ferry, plan_for, some_steps, tokens

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_per_parameter_optimizer_equals_plain(name: str) -> None:
    """And its state goes to plain PyTorch and back through state_dict, and to plain PyTorch through close."""
    make = OPTIMIZERS[name]
    data = tokens(16)
    model = branches()
    plain, third = copy.deepcopy(model), branches()
    opt = make(plain.parameters())
    want = some_steps(plain, opt, data)

    with ferry(model, "mixed", optimizer=make) as engine:
        got = some_steps(engine.model, engine.optimizer, data[:4])
        weights, state = engine.model.state_dict(), engine.optimizer.state_dict()
        inner = engine.optimizer.inner
    third.load_state_dict(weights)  # to plain
    third_opt = make(third.parameters())
    third_opt.load_state_dict(state)
    got += some_steps(third, third_opt, data[4:8])
    with ferry(third, "mixed", optimizer=lambda p: third_opt) as engine:  # and back, with its state
        got += some_steps(engine.model, engine.optimizer, data[8:12])
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    got += some_steps(third, third_opt, data[12:])  # and plain again: close gave the state back
    assert got == pytest.approx(want, rel=5e-6)
    close_to(third, plain, rtol=2e-5)
    assert inner.state_dict()["state"].keys() == state["state"].keys()
    for number, entry in opt.state_dict()["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(
                torch.as_tensor(third_opt.state_dict()["state"][number][key]).float(),
                torch.as_tensor(value).float(),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, key=key: f"{name} {key}: {m}",
            )


def test_optimizer_hooks_and_groups(mode: Mode | str) -> None:
    model = branches()
    calls: list[str] = []
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{"params": matrices}, {"params": vectors, "lr": 0.0}], lr=0.1, momentum=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with mf.ferry(model, optimizer, config=FP32, plan=plan_for(model, mode)) as engine:
        engine.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        some_steps(engine.model, engine.optimizer, tokens(2))
    assert calls == ["before", "after"] * 2
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), before[name]) == (p.dim() == 1), name


@pytest.mark.pairwise
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [adamw, OPTIMIZERS["SGD momentum"]])
def test_schedulers_made_before_and_after_ferry(
    mode: Mode | str, when: str, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """The schedule moves on while workers compute: they must not see the next learning rate."""

    def schedule(opt: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1.0 if k % 2 else 0.1)

    def loop(model: nn.Module, opt: torch.optim.Optimizer, lr: Any) -> list[float]:
        rates = []
        for x in tokens(5):
            model(x).backward()
            opt.step()
            lr.step()
            opt.zero_grad()
            rates.append(lr.get_last_lr()[0])
        return rates

    model = branches()
    plain = copy.deepcopy(model)
    opt = make(plain.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()" would be wrong
        want = loop(plain, opt, schedule(opt))
        opt = make(model.parameters())
        early = schedule(opt) if when == "before" else None
        with small_units():
            engine = mf.ferry(model, opt, config=FP32, plan=plan_for(model, mode))
        with engine:
            assert loop(engine.model, engine.optimizer, early or schedule(engine.optimizer)) == want
        if early is not None:  # the scheduler's wrapper is back in its place
            model(tokens(1)[0]).backward()
            opt.step()
            early.step()
    if early is None:
        close_to(model, plain)


def test_loading_an_empty_optimizer_state_forgets(mode: Mode | str) -> None:
    model = branches()
    fresh = adamw(branches().parameters()).state_dict()
    start = copy.deepcopy(model.state_dict())
    with ferry(model, mode) as engine:
        first = some_steps(engine.model, engine.optimizer, tokens(3))
        engine.model.load_state_dict(start)
        engine.optimizer.load_state_dict(fresh)
        assert engine.optimizer.state_dict()["state"] == {}
        assert some_steps(engine.model, engine.optimizer, tokens(3)) == first
