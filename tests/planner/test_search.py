"""The search against the exhaustive yardstick, against the paper's plan, and at its limits."""

import contextlib
import random
import re
from dataclasses import replace

import pytest

from memferry_ascend.planner import (
    Grad,
    LayerPlan,
    Mode,
    Plan,
    Update,
    device_bytes,
    plan_backward,
    plan_forward,
    search,
    simulate,
)
from memferry_ascend.planner.moves import Choices
from tests.planner.exhaustive import best_of_all, every_plan
from tests.planner.helpers import bert_on_pcie3, layer, profile_of, random_profile


def budget_of(profile, seed):
    """None, or bytes from far too few for all GFGB to enough for device updates."""
    rng = random.Random(seed)
    resident = device_bytes(profile, [(Mode.GFGB, Grad.STAGE, Update.HOST)] * len(profile.layers)).total
    room = resident - profile.base_bytes
    return rng.choice([None, None, profile.base_bytes + int(room * rng.uniform(0.1, 1.2)), 3 * resident])


def measure(seeds, most, full, update):
    """Per seed, how much longer the search's and the paper's periods are than the best of all, as fractions.

    Gradient placements are part of the yardstick up to `full` layers; beyond, modes and update placements.
    """
    gaps, paper_gaps = {}, {}
    for seed in seeds:
        profile = random_profile(seed, most)
        budget = budget_of(profile, seed)
        best = best_of_all(profile, budget, grads=len(profile.layers) <= full, update=update)
        if best is None:
            with contextlib.suppress(
                ValueError
            ):  # direct gradients, where the yardstick has none, may still fit
                search(profile, budget, update=update)
            continue
        plan = search(profile, budget, update=update)
        period = simulate(profile, plan, update).period
        assert plan.predicted_period == period
        assert plan.device_bytes == device_bytes(profile, plan).total
        assert budget is None or plan.device_bytes <= budget
        if best[0] > 0:
            gaps[seed] = period / best[0] - 1
        paper = plan_backward(profile, plan_forward(profile))
        if budget is None or device_bytes(profile, paper).total <= budget:
            paper_period = simulate(profile, paper, update).period
            assert period <= paper_period
            if best[0] > 0:
                paper_gaps[seed] = paper_period / best[0] - 1
    return gaps, paper_gaps


def check(gaps, paper_gaps, least):
    assert len(gaps) >= least
    late = {seed: gap for seed, gap in gaps.items() if gap > 0.10}
    assert not late
    assert sum(max(0.0, gap) for gap in gaps.values()) / len(gaps) <= 0.02
    assert max(paper_gaps.values()) > 0.10  # the yardstick can tell plans apart


def test_the_search_is_close_to_the_best_of_all_plans_and_never_worse_than_the_paper():
    gaps, paper_gaps = measure(range(225), most=5, full=3, update="step")
    check(gaps, paper_gaps, least=200)


def test_so_it_is_when_updates_start_in_backward():
    gaps, paper_gaps = measure(range(30), most=4, full=2, update="backward")
    check(gaps, paper_gaps, least=25)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["step", "backward"])
def test_six_layers_too(update):
    gaps, paper_gaps = measure(range(1000, 1060), most=6, full=4, update=update)
    check(gaps, paper_gaps, least=50)


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_too_small_is_refused_with_the_smallest_that_works(seed):
    profile = random_profile(seed, 3)
    least = min(device_bytes(profile, x).total for x in every_plan(profile, grads=True, device_updates=True))
    if least == 0:
        assert search(profile, 0).device_bytes == 0
        return
    with pytest.raises(ValueError, match=r"no plan fits.*smallest needs \d+ bytes") as caught:
        search(profile, least - 1)
    named = int(re.search(r"smallest needs (\d+) bytes", str(caught.value)).group(1))
    assert named == least
    assert search(profile, named).device_bytes == named


def test_no_dha_is_a_fine_plan_and_says_why():
    slow = {"t_fp_dha": 100.0, "t_bp_dha": 100.0}
    plan = search(profile_of(layer("a", **slow), layer("b")))
    assert all(x.mode in (Mode.GFGB, Mode.STREAM) for x in plan.layers)
    assert "not usable by DHA" in plan["b"].why
    assert all(x.why for x in plan.layers)


def test_room_for_device_updates_is_used_and_without_a_budget_it_is_not():
    profile = bert_on_pcie3(2)
    ample = search(profile, 2**40)
    assert {x.update for x in ample.layers} >= {Update.DEVICE}
    assert {x.update for x in search(profile).layers} == {Update.HOST}
    resident = simulate(profile, Plan(tuple(LayerPlan(x.name) for x in profile.layers))).period
    assert ample.predicted_period < resident


def test_what_the_profile_marks_is_no_choice():
    marked = layer("a", t_update_device=float("inf"), t_bp_grad_direct=2.0)
    choices = Choices(profile_of(marked, replace(marked, name="b", t_update_device=0.0)), device_updates=True)
    assert [any(x[2] is Update.DEVICE for x in options) for options in choices.options] == [False, True]
    assert search(profile_of(marked), 2**40)["a"].update is Update.HOST


@pytest.mark.parametrize("reserve", [-0.1, 1.1, float("nan")])
def test_a_bad_reserve_is_refused(reserve):
    with pytest.raises(ValueError, match="reserve must be the part"):
        search(profile_of(layer()), reserve=reserve)


def test_a_tight_budget_streams_and_says_what_did_not_fit():
    profile = profile_of(*(layer(f"l{i}", t_fp=4.0, t_bp=8.0, t_trans=4.0) for i in range(12)))
    tight = 2 * 1000 + 2 * 1000 + 3 * 1000  # ring, staging room, and three layers of twelve
    plan = search(profile, tight)
    assert Mode.STREAM in {x.mode for x in plan.layers}
    assert device_bytes(profile, plan).total <= tight
    assert any("does not fit" in x.why for x in plan.layers)


def test_more_memory_never_makes_the_first_plan_unreachable():
    profile = bert_on_pcie3(1)
    small = search(profile, profile.base_bytes + 60 * 2**20)
    assert device_bytes(profile, small).total <= profile.base_bytes + 60 * 2**20
    assert search(profile, 2**40).predicted_period <= small.predicted_period


def test_the_same_profile_gives_the_same_plan():
    profile = random_profile(7, count=12)
    assert search(profile, 2**40) == search(profile, 2**40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "later"}, "'step', 'backward'"),
        ({"slots": 0}, "at least 1"),
        ({"accumulate": 0}, "at least 1"),
        ({"effort": 0}, "effort"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        search(profile_of(layer()), **options)
