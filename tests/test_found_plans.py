"""Plans found from a profile, with every placement: never refused when armed, the same bits, the budget kept."""

from __future__ import annotations

import contextlib
import gc
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness import assert_same, batches, make_model, plan_of, poisoned, small_units, train
from placements import direct_model, freeze_some
from random_times import Make, adamw, random_times, sgd
from torch import nn

import memferry_ascend as mf
from memferry_ascend import budget, placement, planning, profile_plan, profiler
from memferry_ascend.backends.base import DIRECT_KINDS, Capabilities
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.layers import Layer, collect
from memferry_ascend.limits import RING_SLOTS
from memferry_ascend.outline import engine_bytes, stand_ins
from memferry_ascend.planner import Grad, LayerPlan, Mode, Plan, Profile, Update

pytestmark = pytest.mark.usefixtures("less_work")


@pytest.fixture
def young() -> Iterator[None]:
    """Collections look at what the test itself made, which takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
