"""What planning offers and what it does not: generous and tight budgets, the reserve, and what an engine would refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import batches, copies, make_model
from placements import direct_model
from planner.helpers import bert_on_pcie3, layer, profile_of
from random_times import Make, adamw, random_times, sgd
from torch import nn

import memferry_ascend as mf
from memferry_ascend import budget, cli, placement, profile_plan, profiler, sharded
from memferry_ascend.arming import assign_groups
from memferry_ascend.backends.base import DIRECT_KINDS, Capabilities
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.deviceupdate import DeviceUpdate
from memferry_ascend.layers import collect, distant, units
from memferry_ascend.limits import RING_SLOTS
from memferry_ascend.outline import outline, stand_ins
from memferry_ascend.planner import (
    FabricProfile,
    Grad,
    LayerPlan,
    LinkProfile,
    Mode,
    Plan,
    Profile,
    Update,
)

pytestmark = pytest.mark.usefixtures("less_work")


# -- generous and tight ----------------------------------------------------------------------------------------------
def accelerator(profile: Profile) -> Profile:
    """Device updates cost a sixteenth of the host's: what was met on real devices."""
    layers = tuple(replace(x, t_update_device=x.t_update / 16) for x in profile.layers)
    return replace(profile, layers=layers)


def test_a_generous_budget_is_plain_training_and_a_tight_one_leaves_all_to_the_host() -> None:
    profile = accelerator(bert_on_pcie3(3))
    total = sum(profile.own_bytes)
    plenty = profile_plan.plan_profile(profile, device_memory=2**40)
    assert {(x.mode, x.grad, x.update) for x in plenty.layers} == {(Mode.GFGB, Grad.KEEP, Update.DEVICE)}
    assert plenty.device_bytes is not None and plenty.device_bytes > 4 * total
    tight = profile_plan.plan_profile(profile, device_memory=profile.base_bytes + total)
    assert {x.update for x in tight.layers} == {Update.HOST}
    between = profile_plan.plan_profile(profile, device_memory=profile.base_bytes + 3 * total)
    assert {x.update for x in between.layers} == {Update.HOST, Update.DEVICE}
    periods = [x.predicted_period or math.inf for x in (plenty, between, tight)]
    assert periods == sorted(periods)
    # No limit is known: parameters may be resident, nothing more is taken.
    assert {x.update for x in profile_plan.plan_profile(profile).layers} == {Update.HOST}


@pytest.mark.usefixtures("cpu")
def test_plain_training_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = direct_model(0)
    layers = collect(model, "fp32", ())
    quick = replace(random_times(layers, 1), layers=tuple(
        replace(x, t_update_device=0.0, t_update=1.0) for x in random_times(layers, 1).layers
    ))  # fmt: skip
    monkeypatch.setattr(profiler, "measure", lambda *_, **__: profiler.Measured(quick))
    engine = mf.ferry(
        model, adamw(model.parameters()), sample_batch=batches(1)[0], config=mf.Config(precision="fp32")
    )
    assert not copies(engine, batches(2))
    engine.close()


# -- what is not offered ---------------------------------------------------------------------------------------------
def test_an_old_profile_loads_and_offers_no_device_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = random_times(collect(direct_model(0), "bf16", ()), 3).to_json()
    del document["parameters"]
    for x in document["layers"]:
        del x["t_update_device"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = Profile.load(tmp_path / "old.json")
    assert old.parameters == () and {x.t_update_device for x in old.layers} == {None}
    plan = profile_plan.plan_profile(old, device_memory=2**40)
    assert {x.update for x in plan.layers} == {Update.HOST}
    words = ["plan", "--profile", str(tmp_path / "old.json"), "--device-memory", "1GiB", "--json"]
    assert cli.main(words) == 0
    assert {x["update"] for x in json.loads(capsys.readouterr().out)["layers"]} == {"host"}


def test_overriding_the_mode_of_a_device_updated_layer_takes_it_back_to_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator(bert_on_pcie3(1)).save(tmp_path / "p.json")
    words = ["plan", "--profile", str(tmp_path / "p.json"), "--device-memory", "1TiB", "--json"]
    assert cli.main([*words, "--set", "layer.0.*=STREAM"]) == 0
    found = json.loads(capsys.readouterr().out)
    for x in found["layers"]:
        moved = x["name"].startswith("layer.0.")
        want = ("STREAM", "stage", "host") if moved else ("GFGB", "keep", "device")
        assert (x["mode"], x["grad"], x["update"]) == want


def test_several_ranks_stage_and_update_on_the_host() -> None:
    profile = accelerator(bert_on_pcie3(1))
    profile = replace(profile, fabric=FabricProfile(4, 100e9, 1e-5))
    for planner, limit in (("search", 2**40), ("paper", None)):
        plan = profile_plan.plan_profile(profile, planner, device_memory=limit, reserve=0.5)
        assert {(x.grad, x.update) for x in plan.layers} == {(Grad.STAGE, Update.HOST)}
        layers = stand_ins(profile)
        made = units(layers, {x.name: x for x in plan.layers}, alone=distant(layers))
        counted = budget.need(made, slots=RING_SLOTS, base=profile.base_bytes).total
        assert plan.device_bytes == counted + sharded.device_need(made, 4)


def test_the_papers_reserve_places_gradients() -> None:
    """What the reserve holds is kept where that gains most, the rest is written directly, or staged where it cannot be."""
    profile = profile_of(
        layer("much", t_bp_grad_direct=4.0), layer("little", t_bp_grad_direct=2.5), layer("none", kind="Conv1d"),
    )  # fmt: skip
    grads = {
        reserve: [str(x.grad) for x in profile_plan.plan_profile(profile, "paper", reserve=reserve).layers]
        for reserve in (None, 0.0, 0.4, 1.0)
    }
    assert grads == {
        None: ["stage", "stage", "stage"],
        0.0: ["direct", "direct", "stage"],
        0.4: ["keep", "direct", "stage"],
        1.0: ["keep", "keep", "stage"],
    }


def test_the_search_keeps_no_more_than_the_reserve() -> None:
    """A slow link up: kept gradients leave first needed first, so that the first update need not wait for the last."""
    slow = LinkProfile(h2d=1e6, d2h=10.0, duplex=1e6, latency=0.0)
    profile = profile_of(*(layer(f"l{i}", t_trans=1e-3, t_update=100.0) for i in range(5)), link=slow)

    def kept(reserve: float | None) -> int:
        plan = profile_plan.plan_profile(profile, reserve=reserve)
        return sum(x.grad is Grad.KEEP for x in plan.layers)

    assert kept(None) > 2
    assert [kept(reserve) for reserve in (0.0, 0.2, 0.59)] == [0, 1, 2]


def test_staging_is_left_only_for_a_clear_gain() -> None:
    """Direct times are estimated: within 2 % of the best plan, gradients are staged. Also where a budget makes the plan
    one that no plain plan is near to."""
    size = 20 << 20

    def plan(direct: float, budget: int | None) -> Plan:
        quick = {"t_bp": 100.0, "t_trans": 1e-3, "t_update": 0.0, "t_bp_grad_direct": direct, "bytes": size}
        profile = profile_of(*(layer(f"l{i}", **quick) for i in range(8)))
        return profile_plan.plan_profile(profile, device_memory=budget)

    for room in (None, 9 * size):
        modes = {x.mode for x in plan(99.9, room).layers}
        assert modes == {Mode.GFGB} if room is None else Mode.STREAM in modes
        assert {x.grad for x in plan(99.9, room).layers} == {Grad.STAGE}
        assert {x.grad for x in plan(50.0, room).layers} == {Grad.DIRECT}


def test_a_reader_on_the_device_follows_its_owner_off_it() -> None:
    """One mode for all readers: an update on the device goes with GFGB only."""
    quick = {"t_fp_dha": 0.5, "t_bp_dha": 0.5, "t_update_device": 0.1}
    profile = profile_of(layer("embed", **quick), layer("head", bytes=1100, shares="embed", **quick))
    profile = profile_plan.narrow(profile, ())
    plan = Plan((LayerPlan("embed", Mode.DHA), LayerPlan("head", Mode.GFGB, Grad.KEEP, Update.DEVICE)))
    done = profile_plan.runnable(profile, plan)
    assert len({x.mode for x in done.layers}) == 1
    assert all(x.update is Update.HOST or x.mode is Mode.GFGB for x in done.layers)


@pytest.mark.usefixtures("cpu")
def test_what_an_engine_refuses_or_runs_otherwise_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Linear):
        """A Linear by kind only."""

    Odd.__name__ = "Linear"
    twice = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), Odd(4, 4), twice, nn.Conv1d(4, 4, 1), nn.LayerNorm(4), twice)
    model[0].forward = model[0].forward  # replaced, as hooks of other libraries do
    layers = collect(model, "bf16", ())
    profile = random_times(layers, 0)
    backend = mf.current().backend

    def usable(make: Make = adamw) -> list[list[str]]:
        found = placement.offered(profile, layers, backend, make(model.parameters()))
        return [
            [x.name for x in found.layers if getattr(x, name)]
            for name in ("dha_usable", "direct_usable", "device_update_usable")
        ]

    every = [x.name for x in profile.layers]
    assert usable() == [every, ["4"], every]
    assert usable(sgd) == [every, ["4"], []]
    kinds = Capabilities(frozenset({"Conv1d"}), frozenset({"Linear"}))
    monkeypatch.setattr(CpuBackend, "capabilities", lambda self: kinds)
    assert usable() == [["3"], [], every]
    monkeypatch.setattr(CpuBackend, "capabilities", lambda self: replace(kinds, coherent=False))
    assert usable()[0] == []


@pytest.mark.usefixtures("cpu")
def test_the_profiler_measures_device_updates_and_marks_what_the_engine_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMFERRY_CACHE", "")
    seed = next(
        s for s in range(60) if make_model(s).head_style == "functional" and len(make_model(s).calls) > 2
    )
    model = make_model(seed)

    def measured(make: Make) -> Profile:
        config = mf.Config(precision="fp32")
        return profiler.profile(model, make(model.parameters()), batches(1)[0], mf.current(), config).profile

    profile = measured(adamw)
    assert all(0 < (x.t_update_device or 0) < math.inf for x in profile.layers if x.trainable)
    layers = collect(model, "fp32", ())
    assign_groups([p for x in layers for p in x.params], adamw(model.parameters()))
    assert profile.parameters == outline(layers)
    kinds = {x.kind: x.direct_usable for x in profile.layers}
    assert not kinds["Embedding"]  # the root reads its table too
    assert kinds["LayerNorm"]
    assert not any(used for kind, used in kinds.items() if kind not in DIRECT_KINDS)
    assert {x.t_update_device for x in measured(sgd).layers} == {math.inf}


@pytest.mark.usefixtures("cpu")
def test_a_device_without_an_operator_of_the_update_gets_none_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMFERRY_CACHE", "")

    def fail(*_: Any) -> None:
        raise RuntimeError("aclnnLeftShifts not found")

    monkeypatch.setattr(DeviceUpdate, "run", fail)
    model = direct_model(0)
    measured = profiler.profile(model, adamw(model.parameters()), batches(1)[0], mf.current())
    assert {x.t_update_device for x in measured.profile.layers} == {math.inf}
    assert any("updates on the device are not usable here" in note for note in measured.notes)
    engine = mf.ferry(model, adamw(model.parameters()), sample_batch=batches(1)[0])
    assert {x.update for x in engine.plan.layers} == {Update.HOST}
    engine.model(batches(1)[0]).backward()
    engine.optimizer.step()
    engine.close()
