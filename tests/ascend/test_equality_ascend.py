"""A plan changes when things happen, never what is computed: the equality harness on emulated NPUs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from harness import ALL_POINTS, Delays, Result, assert_same, make_model, plan_of, poisoned, train
from torch import nn

import memferry_ascend as mf
from memferry_ascend import runtime
from memferry_ascend.placement import supports
from memferry_ascend.planner import Mode, Plan

EMULATED = {"devices": 2}
SEEDS = (2, 5, 7)


@pytest.fixture(autouse=True, params=["unified", "registered"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One address for both sides, and two."""
    monkeypatch.setenv("MEMFERRY_ASCEND_ROUTE", request.param)
    runtime.init(backend="ascend")
    return request.param


def able(model: nn.Module, pick: Any) -> Plan:
    """A plan of `pick(name)`, with STREAM where this device has no direct host access for a kind of layer."""
    kinds = runtime.current().backend.capabilities().dha_kinds
    modules = dict(model.named_modules())

    def mode(name: str) -> Mode:
        wanted = pick(name)
        if wanted in (Mode.DHA, Mode.DFGB) and not supports(kinds, type(modules[name]).__name__):
            return Mode.STREAM
        return wanted

    return plan_of(model, mode)


def reference(seed: int, config: mf.Config, **kwargs: Any) -> Result:
    model = make_model(seed)
    return train(model, plan_of(model, Mode.GFGB), config=config, serial=True, **kwargs)


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_mode_has_the_bits_of_the_serial_plan(mode: Mode, precision: str) -> None:
    config = mf.Config(precision=precision)
    for seed in SEEDS[:2]:
        want = reference(seed, config, steps=4)
        model = make_model(seed)
        with poisoned():
            got = train(model, able(model, lambda _n: mode), config=config, steps=4)
        assert_same(want, got)
        assert all(torch.isfinite(torch.tensor(got.losses)))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_with_delays(seed: int) -> None:
    config = mf.Config(precision="bf16", accumulate=2)
    want = reference(seed, config, micro=2, steps=4)
    model, rng = make_model(seed), random.Random(seed)
    delays = Delays(ALL_POINTS, seed)
    with poisoned():
        got = train(
            model,
            able(model, lambda _n: rng.choice(list(Mode))),
            config=config,
            micro=2,
            steps=4,
            disturb=delays,
            unit_bytes=1,
        )
    assert_same(want, got)


@pytest.mark.parametrize("limit", [None, 0.05])
def test_update_in_backward(limit: float | None) -> None:
    want = reference(5, mf.Config(precision="fp32", max_grad_norm=limit), steps=4)
    model, rng = make_model(5), random.Random(1)
    config = mf.Config(precision="fp32", max_grad_norm=limit, update="backward")
    got = train(model, able(model, lambda _n: rng.choice(list(Mode))), config=config, steps=4)
    assert_same(want, got)


def test_another_optimizer() -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    want = reference(2, mf.Config(precision="fp32"), optimizer=sgd, steps=4)
    model = make_model(2)
    got = train(model, able(model, lambda _n: Mode.STREAM), optimizer=sgd, steps=4)
    assert_same(want, got)
