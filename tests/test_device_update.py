"""Layers updated on the device: the host's arithmetic to 2 ulp a step, and nothing over the link."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    ALL_POINTS,
    Delays,
    assert_same,
    batches,
    copies,
    make_model,
    plan_of,
    poisoned,
    small_units,
    train,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ops.adam_cases import tolerances
from placements import direct_model, freeze_some, placed_plan
from torch import nn

import memferry_ascend as mf
from memferry_ascend import hostmath
from memferry_ascend.planner import Mode, Update

pytestmark = pytest.mark.usefixtures("cpu")

SETTINGS = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)
DEVICE: dict[str, Any] = {"grad": "keep", "update": "device"}


@pytest.mark.skipif(not hostmath.NATIVE, reason="the extension was not built")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_step_is_within_two_ulp_of_the_native_one(precision: str, decoupled: bool) -> None:
    """Each step starts from the same state; `tolerances` says what 2 ulp mean where numbers cancel."""
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    engines = []
    for fields in ({}, DEVICE):
        model = direct_model(1)
        optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.1, maximize=not decoupled)
        plan = plan_of(model, Mode.GFGB, **fields)
        with poisoned():
            engines.append(mf.ferry(model, optimizer, config=mf.Config(precision=precision), plan=plan))
    host, device = engines
    for step, batch in enumerate(batches(4), start=1):
        before = host.state_dict()
        device.load_state_dict(before)
        for engine in engines:
            engine.model(batch).backward()
        grads = {n: p.grad.float().view(-1) for n, p in host.model.named_parameters()}
        assert all(torch.equal(grads[n], p.grad.float().view(-1)) for n, p in device.model.named_parameters())
        grads = {n: g.clone() for n, g in grads.items()}
        for engine in engines:
            engine.optimizer.step()
        a, b = host.state_dict(), device.state_dict()
        hyper = hostmath.AdamHyper(
            lr=1e-2, weight_decay=0.1, step=step, decoupled=decoupled, maximize=not decoupled
        )
        for name, grad in grads.items():
            nothing = torch.zeros_like(grad)
            old = {"param": before["model"][name], **before["optimizer"][name]}
            data = {
                "grad": grad,
                **{k: old.get(k, nothing).view(-1) for k in ("param", "exp_avg", "exp_avg_sq")},
            }
            allowed = tolerances(data, hyper)
            for key in ("param", "exp_avg", "exp_avg_sq"):
                x, y = (s["model"][name] if key == "param" else s["optimizer"][name][key] for s in (a, b))
                far = (x.double() - y.double()).abs().view(-1).numpy()
                assert (far <= allowed[key]).all(), (step, name, key)
    for engine in engines:
        engine.close()


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    own=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
    micro=st.sampled_from([1, 2, 5]),
    declared=st.booleans(),
    limit=st.sampled_from([None, 0.05]),
    frozen=st.booleans(),
    share=st.sampled_from([0.3, 1.0]),
)
def test_random_placements(
    torch_arithmetic: None, seed: int, own: bool, precision: str, micro: int, declared: bool, limit: float | None,
    frozen: bool, share: float,
) -> None:  # fmt: skip
    """On a device that computes as the host does, even the bits are the same."""

    def model() -> nn.Module:
        m = direct_model(seed, twice=seed % 2 == 1) if own else make_model(seed)
        return freeze_some(m, seed) if frozen else m

    base, steps = model(), 3
    config = {"precision": precision, "max_grad_norm": limit}
    want = train(
        base, plan_of(base, Mode.GFGB), config=mf.Config(**config, accumulate=micro), micro=micro, steps=steps
    )
    other = model()
    with poisoned():
        got = train(
            other,
            placed_plan(other, seed, device=share),
            config=mf.Config(**config, accumulate=micro if declared else 1),
            micro=micro,
            steps=steps,
            disturb=Delays(ALL_POINTS, seed, most=0.0005),
        )
    assert_same(want, got)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("limit", [None, 0.05])
def test_update_in_backward(torch_arithmetic: None, micro: int, limit: float | None) -> None:
    config = {"accumulate": micro, "max_grad_norm": limit}
    model = direct_model(3)
    want = train(model, plan_of(model, Mode.GFGB), config=mf.Config(**config), micro=micro)
    for share in (0.5, 1.0):
        model = direct_model(3)
        plan = placed_plan(model, 1, device=share)
        got = train(model, plan, config=mf.Config(**config, update="backward"), micro=micro)
        assert_same(want, got)


def test_nothing_crosses_the_link() -> None:
    model = direct_model(0)
    engine = mf.ferry(
        model, torch.optim.AdamW(model.parameters()), plan=plan_of(model, Mode.GFGB, **DEVICE),
        config=mf.Config(max_grad_norm=1.0),
    )  # fmt: skip
    assert not copies(engine, batches(3))
    places = {(place, what) for place, what, _ in engine.memory_report()}
    assert ("device", "masters and moments") in places
    assert {what for place, what in places if place == "host"} == {"gradient norms of device updates"}
    assert engine.grad_norm is not None and engine.grad_norm > 0
    engine.close()


def test_device_memory_is_given_back() -> None:
    backend = mf.current().backend
    model = direct_model(0)
    elements = sum(p.numel() for p in model.parameters())
    with small_units(1 << 20):
        engine = mf.ferry(
            model, torch.optim.AdamW(model.parameters()), plan=plan_of(model, Mode.GFGB, **DEVICE)
        )
    # bf16 parameter, remainder and gradient, two fp32 moments; the rest is alignment
    assert 14 * elements <= backend.memory_stats().allocated < 14 * elements + 14 * 512 * 14
    engine.close()
    del engine
    gc.collect()
    assert backend.memory_stats().allocated == 0


def run_steps(engine: mf.Engine, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in data:
        loss = engine.model(batch)
        loss.backward()
        engine.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_moves_between_host_and_device_plans(precision: str) -> None:
    data = batches(6)
    config = mf.Config(precision=precision)

    def arm(model: nn.Module, update: Update) -> mf.Engine:
        fields = DEVICE if update is Update.DEVICE else {}
        return mf.ferry(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), config=config,
            plan=plan_of(model, Mode.GFGB, **fields),
        )  # fmt: skip

    first = arm(direct_model(0), Update.DEVICE)
    run_steps(first, data[:3])
    state = first.state_dict()
    own = first.optimizer.state_dict()["state"][0]
    assert all(t.device.type == "cpu" for t in state["model"].values())
    again = arm(direct_model(1), Update.DEVICE)
    again.load_state_dict(state)
    assert all(torch.equal(v, again.state_dict()["model"][k]) for k, v in state["model"].items())
    host = arm(direct_model(2), Update.HOST)
    host.load_state_dict(state)
    want = run_steps(first, data[3:])
    assert run_steps(again, data[3:]) == want
    assert run_steps(host, data[3:]) == pytest.approx(want, rel=1e-4)
    back = arm(direct_model(3), Update.DEVICE)
    back.load_state_dict(host.state_dict())
    back.optimizer.load_state_dict(host.optimizer.state_dict())
    assert torch.equal(
        back.state_dict()["optimizer"]["head.weight"]["exp_avg"],
        host.state_dict()["optimizer"]["head.weight"]["exp_avg"],
    )
    assert own["exp_avg"].dtype is torch.float32
    master = first.state_dict()["model"]["head.weight"]
    model = first.model
    first.close()
    assert torch.equal(model.head.weight, master)  # a plain fp32 CPU model again
    for engine in (again, host, back):
        engine.close()


def test_edit_resets_only_the_masters_it_changed() -> None:
    model = direct_model(0)
    engine = mf.ferry(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan_of(model, Mode.GFGB, **DEVICE)
    )
    run_steps(engine, batches(1))
    before = engine.state_dict()["model"]
    with engine.edit() as m, torch.no_grad():
        m.head.weight[0, 0] = 1.5
    after = engine.state_dict()["model"]
    assert float(after["head.weight"][0, 0]) == 1.5
    before["head.weight"][0, 0] = 1.5
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert float(model.head.weight[0, 0]) == 1.5
    engine.close()


def test_readers_between_step_and_forward_see_the_new_value() -> None:
    model = direct_model(0)
    twin = copy.deepcopy(model)
    config = mf.Config(precision="fp32", max_grad_norm=0.1)
    engine = mf.ferry(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), config=config,
        plan=plan_of(model, Mode.GFGB, **DEVICE),
    )  # fmt: skip
    run_steps(engine, batches(1))
    value = model.head.weight.detach().clone()
    assert not torch.equal(value, twin.head.weight)
    engine.synchronize()
    assert torch.equal(value, model.head.weight)
    engine.close()


def test_learning_rates_are_those_of_the_step() -> None:
    def run(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
        model = direct_model(0)
        optimizer = torch.optim.AdamW(
            [{"params": model.head.parameters(), "lr": 1e-3}, {"params": [p for n, p in model.named_parameters()
             if n != "head.weight"]}], lr=1e-2,
        )  # fmt: skip
        engine = mf.ferry(
            model, optimizer, plan=plan_of(model, Mode.GFGB, **fields),
            config=mf.Config(precision="fp32", max_grad_norm=1.0),
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        for batch in batches(4):
            engine.model(batch).backward()
            engine.optimizer.step()
            scheduler.step()  # before anybody has waited for the update
        state = engine.state_dict()["model"]
        engine.close()
        return state

    want, got = run({}), run(DEVICE)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("limit", [None, 0.1])
def test_a_save_under_way_holds_the_state_of_its_moment(tmp_path: Path, limit: float | None) -> None:
    model = direct_model(0)
    engine = mf.ferry(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=placed_plan(model, 4, device=0.5),
        config=mf.Config(max_grad_norm=limit),
    )  # fmt: skip
    run_steps(engine, batches(1))
    save = engine.save_async(tmp_path / "state.pt")
    run_steps(engine, batches(3, seed=2))
    found = torch.load(save.result())
    engine.close()
    model = direct_model(0)
    engine = mf.ferry(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=placed_plan(model, 4, device=0.5),
        config=mf.Config(max_grad_norm=limit),
    )  # fmt: skip
    run_steps(engine, batches(1))
    want = engine.state_dict()
    engine.close()
    assert all(torch.equal(v, found["model"][k]) for k, v in want["model"].items())
    for name, state in want["optimizer"].items():
        assert all(torch.equal(v, found["optimizer"][name][k]) for k, v in state.items())


def test_optimizers_without_a_device_update_are_refused() -> None:
    model = direct_model(0)
    with pytest.raises(mf.FerryError, match=r"update 'device'.*SGD.*'host'"):
        mf.ferry(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan_of(model, Mode.GFGB, **DEVICE))


def test_engine_clip_grad_norm() -> None:
    def run(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = direct_model(0)
        engine = mf.ferry(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), config=mf.Config(precision="fp32"),
            plan=plan_of(model, Mode.GFGB, **fields),
        )  # fmt: skip
        norms = []
        for batch in batches(3):
            engine.model(batch).backward()
            norms.append(float(engine.clip_grad_norm_(0.01)))
            engine.optimizer.step()
        state = engine.state_dict()["model"]
        engine.close()
        return norms, state

    (want, a), (got, b) = run({}), run(DEVICE)
    assert got == pytest.approx(want, rel=1e-6)
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-6)
