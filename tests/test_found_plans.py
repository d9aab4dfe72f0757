"""Plans found from a profile, with every placement: never refused when armed, the same bits, the budget kept."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same, batches, make_model, plan_of, poisoned, small_units, train
from placements import direct_model, freeze_some
from planner.helpers import bert_on_pcie3, layer, profile_of
from torch import nn

import memferry_ascend as mf
from memferry_ascend import budget, cli, placement, planning, profile_plan, profiler, sharded
from memferry_ascend.arming import assign_groups
from memferry_ascend.backends.base import DIRECT_KINDS, Capabilities
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.deviceupdate import DeviceUpdate
from memferry_ascend.layers import Layer, collect, distant, units
from memferry_ascend.limits import RING_SLOTS
from memferry_ascend.outline import engine_bytes, outline, shared_owners, stand_ins
from memferry_ascend.planner import (
    FabricProfile,
    Grad,
    LayerPlan,
    LayerProfile,
    LinkProfile,
    Mode,
    Plan,
    Profile,
    Update,
)

Make = Callable[[Any], torch.optim.Optimizer]
LINK = LinkProfile(h2d=1e9, d2h=1e9, duplex=1.5e9, latency=1e-6)


@pytest.fixture(autouse=True)
def less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A found plan need not be the best one here, nor a measurement exact."""
    search = sys.modules["memferry_ascend.planner.search"]
    monkeypatch.setattr(search, "SIMULATE_WORK", {"step": 600, "backward": 300})
    monkeypatch.setattr(search, "ESTIMATE_WORK", 20_000)
    monkeypatch.setattr(profile_plan, "REFINEMENTS", 0)
    for name in ("PASSES", "DHA_PASSES", "MORE_PASSES"):
        monkeypatch.setattr(profiler, name, 1)
    monkeypatch.setattr("memferry_ascend.linkprobe.LARGE", 1 << 20)
    monkeypatch.setattr("memferry_ascend.linkprobe.REPEATS", 1)


@pytest.fixture
def young() -> Iterator[None]:
    """Collections look at what the test itself made, which takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def random_times(layers: list[Layer], seed: int, base_bytes: int = 0) -> Profile:
    """A profile of real layers with times drawn so that every placement is worth it somewhere. Nothing is held back that
    an engine might refuse."""
    rng = random.Random(seed)
    shares, out = shared_owners(layers), []
    host, device = rng.choice([0.1, 1.0, 10.0]), rng.choice([0.05, 1.0, 20.0])
    for i, x in enumerate(layers):
        nbytes = sum(p.nbytes for p in x.reads)
        t = nbytes / LINK.h2d + 1e-6
        fp, bp = t * rng.choice([0.1, 1.0, 3.0]), t * rng.choice([0.2, 2.0, 4.0])
        out.append(
            LayerProfile(
                name=x.name, kind=x.kind, bytes=nbytes, t_trans=t, t_fp=fp, t_bp=bp,
                t_fp_dha=fp + t * rng.choice([0.0, 0.1, 3.0]), t_bp_dha=bp + t * rng.choice([0.0, 0.1, 3.0]),
                t_bp_grad_direct=bp * rng.choice([0.2, 1.02, 1.5]), t_gap_fp=0.0, t_gap_bp=0.0,
                t_update=t * host * rng.choice([0.5, 2.0]), dha_bytes=nbytes, shares=shares.get(i),
                trainable=any(p.trainable for p in x.reads), itemsize=x.reads[0].dtype.itemsize,
                t_update_device=t * device,
            )
        )  # fmt: skip
    if rng.random() < 0.3:  # forward order is not always the order of registration
        rng.shuffle(out)
    return Profile(tuple(out), LINK, base_bytes, parameters=outline(layers))


@dataclass
class Case:
    """One random model, machine and request."""

    seed: int
    config: mf.Config
    micro: int
    make: Make
    kinds: Capabilities

    def model(self) -> nn.Module:
        rng = random.Random(self.seed)
        own = rng.random() < 0.5
        model: nn.Module = direct_model(self.seed, twice=rng.random() < 0.4) if own else make_model(self.seed)
        return freeze_some(model, self.seed) if rng.random() < 0.4 else model

    def layers(self, model: nn.Module) -> list[Layer]:
        return collect(model, self.config.precision, self.config.keep_fp32)

    def profile(self, model: nn.Module) -> Profile:
        return random_times(self.layers(model), self.seed, base_bytes=self.seed % 3 * 5000)


def case_of(seed: int) -> Case:
    rng = random.Random(seed * 7919)
    micro = rng.choice([1, 1, 2, 3])
    probe = Case(seed, mf.Config(), micro, adamw, Capabilities(frozenset(), frozenset()))
    params = sum(p.numel() for p in probe.model().parameters())
    config = mf.Config(
        precision=rng.choice(["fp32", "bf16"]),
        accumulate=micro,
        update=rng.choice(["step", "backward"]),
        planner=rng.choice(["search", "search", "paper"]),
        reserve=rng.choice([None, None, 0.0, 0.4, 1.0]),
        device_memory=int(rng.uniform(4, 70) * params) + 30_000,
    )
    kinds = Capabilities(
        dha_kinds=frozenset(rng.choice([{"*"}, {"Embedding", "LayerNorm"}, set()])),
        direct_kinds=frozenset(rng.choice([DIRECT_KINDS, DIRECT_KINDS, {"Linear"}, set()])),
    )
    return Case(seed, config, micro, rng.choice([adamw, adamw, sgd]), kinds)


REFUSALS = (
    "no plan fits device_memory",
    "the smallest plan found needs",
    'planner="paper": its plan needs',
)
"""How planning says that nothing fits. Whatever else arming raises is a plan that was found and then refused."""


class NothingFits(Exception):
    pass


@contextlib.contextmanager
def only_refusals() -> Iterator[None]:
    try:
        yield
    except mf.FerryError as e:
        if any(refusal in str(e) for refusal in REFUSALS):
            raise NothingFits from e
        raise


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> Plan | None:
    """Arm what is found through `ferry` itself, train, and compare with all GFGB. None: nothing fits."""
    monkeypatch.setattr(CpuBackend, "capabilities", lambda self: case.kinds)
    common: dict[str, Any] = {"steps": 3, "micro": case.micro, "optimizer": case.make}
    model = case.model()
    profile, layers = case.profile(model), case.layers(case.model())
    monkeypatch.setattr(profiler, "measure", lambda *_, **__: profiler.Measured(profile))
    gc.collect()
    backend, limit = mf.current().backend, case.config.device_bytes
    assert backend.memory_stats().allocated == 0 and limit is not None
    backend.reset_peak()
    plans = []

    def look(engine: mf.Engine) -> None:
        """The budget holds by the engine's own count, which is what the plan says, and by what was allocated."""
        plans.append(engine.plan)
        placement.refuse_modes(engine.plan, layers, backend)
        counted = budget.need(engine._units, slots=RING_SLOTS, accumulate=case.micro, base=profile.base_bytes)
        assert engine.plan.device_bytes == counted.total <= limit
        held = sum(n for place, _, n in engine.memory_report() if place == "device")
        assert held + profile.base_bytes <= counted.total
        assert backend.memory_stats().peak + profile.base_bytes <= limit

    with contextlib.suppress(NothingFits), poisoned(), only_refusals():
        got = train(model, None, config=case.config, sample_batch=batches(1)[0], between=look, **common)
    if not plans:
        return None
    base = case.model()
    plain = replace(case.config, device_memory=None)
    assert_same(train(base, plan_of(base, Mode.GFGB), config=plain, **common), got)
    return plans[0]


def kept_share(case: Case, plan: Plan) -> float:
    """Kept over all gradient bytes of host-updated layers, counted apart from the planner."""
    size = {x.name: sum(p.nbytes for p in x.params) if any(p.trainable for p in x.params) else 0
            for x in case.layers(case.model())}  # fmt: skip
    host = [x for x in plan.layers if x.update is Update.HOST]
    total = sum(size[x.name] for x in host)
    return sum(size[x.name] for x in host if x.grad is Grad.KEEP) / total if total else 0.0


def check_all(seeds: range, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Counter[tuple[str, ...]]]:
    """How many cases had a plan, and how often each placement was in one, by planner."""
    plans, found = 0, Counter[tuple[str, ...]]()
    for seed in seeds:
        case = case_of(seed)
        try:
            plan = check(case, monkeypatch)
            if plan is not None and case.config.reserve is not None:
                assert kept_share(case, plan) <= case.config.reserve
        except BaseException as e:
            e.add_note(f"seed {seed}: {case}")
            raise
        plans += plan is not None
        for x in plan.layers if plan is not None else ():
            found[case.config.planner, str(x.grad), str(x.update)] += 1
            found[case.config.planner, str(x.mode)] += 1
    return plans, found


@pytest.mark.usefixtures("cpu", "torch_arithmetic", "young")
def test_found_plans_arm_and_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, found = check_all(range(16), monkeypatch)
    assert plans > 8
    for placed in (("keep", "host"), ("stage", "host"), ("direct", "host")):
        assert found["paper", *placed] > 0 and found["search", *placed] > 0, found
    assert found["search", "keep", "device"] > 0
    assert all(found["search", str(mode)] > 0 for mode in Mode), found


@pytest.mark.slow
@pytest.mark.usefixtures("cpu", "torch_arithmetic", "young")
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_so_do_many_more(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, _ = check_all(range(first, first + 50), monkeypatch)
    assert plans > 25


# -- bytes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(12))
def test_a_profile_counts_bytes_as_the_model_does(seed: int) -> None:
    """Also after a round through JSON, and whatever is decided."""
    case = case_of(seed)
    case.config = replace(case.config, keep_fp32=("LayerNorm",))
    model = case.model()
    layers = case.layers(model)
    profile = Profile.from_json(json.loads(json.dumps(case.profile(model).to_json())))
    assert profile == case.profile(model)
    rng = random.Random(seed)
    for _ in range(4):
        plan = Plan(
            tuple(
                LayerPlan(x.name, "GFGB", "keep", "device")  # type: ignore[arg-type]
                if rng.random() < 0.3
                else LayerPlan(x.name, rng.choice(list(Mode)), rng.choice(list(Grad)))
                for x in layers
            )
        )
        with small_units():
            for accumulate in (1, 3):
                want = engine_bytes(layers, plan, accumulate=accumulate, base=17)
                assert engine_bytes(stand_ins(profile), plan, accumulate=accumulate, base=17) == want
        in_order = profile_plan.ordered(plan, [x.name for x in profile.layers])
        done = profile_plan.finish(profile_plan.narrow(profile, {"*"}), _usable(in_order), "step")
        assert done.device_bytes == engine_bytes(layers, _usable(plan)) + profile.base_bytes


def _usable(plan: Plan) -> Plan:
    """Without what the simulator refuses: readers of a tie apart from its device-updated owner."""
    return Plan(tuple(replace(x, mode=Mode.GFGB) for x in plan.layers))


@pytest.mark.usefixtures("cpu")
def test_a_plan_from_a_file_is_the_plan_of_the_model() -> None:
    """`memferry plan` without the model finds what `ferry` would, and counts the same bytes."""
    model = direct_model(3)
    layers = collect(model, "bf16", ())
    profile = random_times(layers, 8)
    config = mf.Config(device_memory=400_000)
    armed = planning.measured_plan(profile, layers, config, mf.current().backend, adamw(model.parameters()))
    offline = profile_plan.plan_profile(
        Profile.from_json(profile.to_json()), device_memory=config.device_bytes
    )
    assert profile_plan.ordered(offline, [x.name for x in layers]) == armed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["parameters"].pop(), "each of the profile's layers once"),
        (lambda d: d["parameters"][0].update(reads=[99]), "reads number 99, which no layer owns"),
        (lambda d: d["parameters"][0].update(owns=[[0, -1, 2, True, False]]), "elements must be"),
        (lambda d: d["parameters"][0].update(owns=[[0, 1]]), "lists of index, elements"),
        (lambda d: d["parameters"][0].pop("owns"), "expected name, owns"),
        (lambda d: d["layers"][0].update(t_update_device=-1), "layer '.*': t_update_device must be >= 0"),
    ],
)
def test_bad_parameters_of_a_profile_are_named(change: Any, message: str) -> None:
    document = random_times(collect(direct_model(0), "bf16", ()), 0).to_json()
    change(document)
    with pytest.raises(ValueError, match=message):
        Profile.from_json(document)


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
    points: list[str] = []
    mf.current().backend.disturb = points.append
    for batch in batches(2):
        engine.model(batch).backward()
        engine.optimizer.step()
    engine.synchronize()
    mf.current().backend.disturb = None
    assert not [p for p in points if p.startswith("copy:")]
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
