"""One number of bytes decides the plan, and is kept."""

from __future__ import annotations

import gc
import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import assert_same, batches, plan_of, train
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from placements import Conv1D, direct_model
from torch import nn

import memferry_ascend as mf
from memferry_ascend import arming, budget, placement, planning
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.layers import collect, distant, units
from memferry_ascend.planner import Grad, LayerPlan, Mode, Plan, Update
from memferry_ascend.trial import Trial

pytestmark = pytest.mark.usefixtures("cpu")

SETTINGS = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)


class Stack(nn.Module):
    """An embedding and linear layers of given widths; every second one behind a norm, the head tied if asked."""

    def __init__(self, widths: list[int], vocab: int = 300, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, widths[0])
        steps = itertools.pairwise(widths)
        self.norms = nn.ModuleList(nn.LayerNorm(a) for a in widths[::2])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in steps)
        self.head = nn.Linear(widths[-1], vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(self.norms[i // 2](x) if i % 2 == 0 else x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), tokens.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def ferry(model: nn.Module, nbytes: int | str, **fields: Any) -> mf.Engine:
    config = mf.Config(device_memory=nbytes, planner="rules", **fields)
    return mf.ferry(model, adamw(model), sample_batch=batches(1)[0], config=config)


def smallest(model: nn.Module, **fields: Any) -> int:
    with pytest.raises(mf.FerryError, match="smallest workable") as caught:
        ferry(model, 1, **fields)
    found = re.search(r"smallest workable device_memory is (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


def everything(model: nn.Module) -> int:
    """Bytes with which nothing has to leave the device: 16 a parameter, alignment, staging."""
    return 40 * sum(p.numel() for p in model.parameters()) + 100 * 512 * len(list(model.parameters()))


WIDTHS = [64, 96, 64, 128, 64, 64, 32, 64, 200, 64]


def test_the_smallest_budget_works_and_one_byte_less_is_refused() -> None:
    for tied in (False, True):
        model = Stack(WIDTHS, tied=tied)
        least = smallest(model)
        with pytest.raises(mf.FerryError, match="smallest workable"):
            ferry(model, least - 1)
        mf.current().backend.reset_peak()
        engine = ferry(model, least)
        assert engine._sizing.slots == 2
        for batch in batches(2):
            engine.model(batch).backward()
            engine.optimizer.step()
        assert mf.current().backend.memory_stats().peak <= least
        engine.close()
        del engine
        gc.collect()


@SETTINGS
@given(
    widths=st.lists(st.sampled_from([8, 32, 64, 200]), min_size=2, max_size=9),
    tied=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
    accumulate=st.sampled_from([1, 2]),
    reserve=st.sampled_from([None, 0.0, 0.3, 1.0]),
    place=st.floats(0, 1),
    frozen=st.booleans(),
)
def test_the_budget_is_kept(
    widths: list[int], tied: bool, precision: str, accumulate: int, reserve: float | None, place: float, frozen: bool
) -> None:  # fmt: skip
    """The engine holds no more than it counted, which is no more than it was given, anywhere between the extremes."""
    torch.manual_seed(0)
    widths = [*widths, widths[0]]
    model = Stack(widths, tied=tied)
    if frozen:
        model.layers[0].requires_grad_(False)
    fields = {"precision": precision, "accumulate": accumulate, "reserve": reserve}
    backend = mf.current().backend
    least = smallest(model, **fields)
    limit = least + int(place * everything(model))
    gc.collect()
    backend.reset_peak()
    assert backend.memory_stats().allocated == 0
    engine = ferry(model, limit, **fields)
    for batch in batches(2):
        engine.model(batch).backward()
        engine.optimizer.step()
    found = budget.need(engine._units, slots=engine._sizing.slots, accumulate=accumulate)
    assert found.total + engine._sizing.window <= limit or engine._sizing.window == 0
    assert found.total <= limit
    held = sum(n for place, _, n in engine.memory_report() if place == "device")
    slots = len(engine._ring.slots) if engine._ring is not None else 0
    exact = budget.need(engine._units, slots=slots, accumulate=accumulate)
    workspace = budget.workspace_bytes([r.memory.layout for r in engine._residents if r.memory.on_device])
    assert held == exact.resident + exact.ring + exact.kept + exact.state - workspace
    assert backend.memory_stats().peak == held
    engine.close()
    del engine
    gc.collect()


def test_more_memory_never_moves_more_bytes() -> None:
    model = Stack(WIDTHS)
    least, most = smallest(model), everything(model)
    moved = []
    for k in range(11):
        engine = ferry(model, least + (most - least) * k // 10)
        counted = 0
        for unit in engine._units:
            if unit.plan.update is Update.HOST:
                counted += unit.nbytes * {Mode.STREAM: 3, Mode.DHA: 1}.get(unit.plan.mode, 2)
        moved.append(counted)
        engine.close()
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0  # plain training
    assert moved[0] > 0


def test_training_under_any_budget_gives_the_same_bits() -> None:
    """Device updates apart, which round as the device does: they are left out here."""

    def run(nbytes: int | None, reserve: float | None) -> Any:
        torch.manual_seed(0)
        model = Stack(WIDTHS)
        layers = collect(model, "fp32", ())
        rules = planning.rule_plan(layers, mf.current().backend)
        plan = rules if nbytes is None else budget.fit(
            rules, layers, nbytes, mf.current().backend, reserve=reserve, device_updates=False
        )  # fmt: skip
        return train(model, plan, steps=3, unit_bytes=1 << 22)

    model = Stack(WIDTHS)
    want = run(None, None)
    for reserve in (None, 0.0, 0.5, 1.0):
        least = smallest(model, precision="fp32", reserve=reserve)
        for nbytes in (least, 2 * least, everything(model)):
            assert_same(want, run(nbytes, reserve))


def test_need_is_what_the_arena_lays_out() -> None:
    model = direct_model(0)
    layers = collect(model, "bf16", ("first",))
    arming.assign_groups([p for layer in layers for p in layer.params], adamw(model))
    for mode, grad, update in (
        (Mode.GFGB, Grad.KEEP, Update.HOST),
        (Mode.GFGB, Grad.KEEP, Update.DEVICE),
        (Mode.STREAM, Grad.STAGE, Update.HOST),
    ):
        by_name = {layer.name: LayerPlan(layer.name, mode, grad, update) for layer in layers}
        built = units(layers, by_name, alone=distant(layers))
        found = budget.need(built, slots=2)
        aligned = sum(math.ceil(p.nbytes / 512) * 512 for layer in layers for p in layer.params)
        assert found.resident == (aligned if mode is Mode.GFGB else 0)
        assert found.kept == (aligned if grad is Grad.KEEP else 0)
        assert found.ring == (2 * aligned if mode is Mode.STREAM else 0)
        assert budget.need(built, slots=2, accumulate=2).kept >= found.kept


def kinds(plan: Plan) -> dict[Grad, list[str]]:
    return {g: [x.name for x in plan.layers if x.grad is g] for g in Grad}


@pytest.mark.parametrize("reserve", [0, 0.25, 0.5, 1])
def test_reserve_keeps_its_share(reserve: float) -> None:
    model = direct_model(0)
    engine = mf.ferry(model, adamw(model), config=mf.Config(reserve=reserve, planner="rules"))
    size = {layer.name: sum(p.numel() for p in layer.module.parameters(recurse=False))
            for unit in engine._units for layer in unit.layers}  # fmt: skip
    found = kinds(engine.plan)
    kept = sum(size[name] for name in found[Grad.KEEP])
    assert kept <= reserve * sum(size.values())
    smallest_left = min((size[n] for n in found[Grad.DIRECT]), default=math.inf)
    assert kept + smallest_left > reserve * sum(size.values()) or reserve == 1
    assert not found[Grad.STAGE]
    assert ("kept gradients" in {what for _, what, _ in engine.memory_report()}) == (kept > 0)
    engine.close()


def test_what_has_no_kernel_stages_and_says_so() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[1].weight
    plan = mf.ferry(model, adamw(model), config=mf.Config(reserve=0, planner="rules")).plan
    assert (plan["0"].grad, plan["1"].grad) == (Grad.STAGE, Grad.STAGE)
    assert "no kernel of Conv1d" in plan["0"].why
    assert "tied" in plan["1"].why


def test_why_says_what_the_room_is_used_for() -> None:
    model = Stack(WIDTHS)
    engine = ferry(model, everything(model))
    assert ["optimizer state" in x.why for x in engine.plan.layers] == [True] * len(engine.plan.layers)
    engine.close()


def test_a_plan_over_the_budget_is_refused() -> None:
    model = Stack(WIDTHS)
    config = mf.Config(device_memory="20KiB")
    with pytest.raises(
        mf.FerryError, match=r"the plan needs .* over device_memory = 20.00 KiB; the smallest"
    ):
        mf.ferry(
            model, adamw(model), sample_batch=batches(1)[0], config=config, plan=plan_of(model, Mode.GFGB)
        )
    mf.ferry(model, adamw(model)).close()  # nothing was changed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reserve": -0.1}, "from 0 to 1"),
        ({"reserve": 1.5}, "from 0 to 1"),
        ({"reserve": float("nan")}, "from 0 to 1"),
        ({"reserve": True}, "from 0 to 1"),
        ({"reserve": "half"}, "from 0 to 1"),
        ({"device_memory": "16G"}, "ambiguous"),
        ({"device_memory": "16 parsecs"}, "unknown unit"),
        ({"device_memory": 16.0}, "a size is"),
        ({"device_memory": "nan"}, "cannot read"),
        ({"device_memory": 0}, "more than zero"),
    ],
    ids=str,
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(mf.ConfigError, match=message):
        mf.Config(**fields)


def test_a_budget_needs_a_sample_batch() -> None:
    model = Stack(WIDTHS)
    with pytest.raises(mf.ConfigError, match="sample_batch"):
        mf.ferry(model, adamw(model), config=mf.Config(device_memory="1GiB"))


def test_transformers_linear_is_known_by_its_name() -> None:
    layers = collect(nn.Sequential(Conv1D(8, 4)), "bf16", ())
    assert placement.direct_obstacle(layers[0], mf.current().backend) is None


def test_rules_leave_room_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that counts activations: what the trial's passes take is kept free by the plan, or it is refused."""
    taken = 8 << 10
    model = Stack(WIDTHS)
    least = smallest(model)
    real = CpuBackend.memory_stats
    passes: list[int] = []

    def stats(self: CpuBackend) -> Any:
        found = real(self)
        return replace(found, peak=found.peak + taken) if passes else found

    run = Trial.run

    def counted(self: Trial, marks: Any) -> None:
        run(self, marks)
        passes.append(1)

    monkeypatch.setattr(CpuBackend, "memory_stats", stats)
    monkeypatch.setattr(Trial, "run", counted)
    with pytest.raises(mf.FerryError, match=r"activations 8\.00 KiB"):
        ferry(model, least + taken - 1)
    assert passes
    passes.clear()
    engine = ferry(model, least + taken)
    assert engine.plan.device_bytes == least + taken
    engine.close()
    passes.clear()
    mf.ferry(model, adamw(model), config=mf.Config(planner="rules")).close()
    assert not passes  # nothing is measured without a budget
