"""Alg. 2, on examples worked by hand (seconds)."""

import math

import pytest

from memferry_ascend.planner import LayerPlan, Mode, Plan, plan_backward, plan_forward
from tests.planner.helpers import layer, profile_of


def dha(name, **changes):
    return layer(name, **{"t_trans": 4.0, "t_bp": 1.0, "t_fp_dha": 1.0, **changes})


def planned(profile, modes, t_res, tag):
    chosen = tuple(LayerPlan(x.name, mode) for x, mode in zip(profile.layers, modes, strict=True))
    return plan_backward(profile, Plan(chosen, t_res=t_res, tag=tag))


def modes(plan):
    return [x.mode for x in plan.layers]


def test_the_largest_gain_takes_the_idle_link_first():
    profile = profile_of(dha("a", t_bp_dha=9.0), dha("b", t_bp_dha=7.0), layer("c", t_bp=5.0))
    plan = planned(profile, [Mode.DHA, Mode.DHA, Mode.GFGB], t_res=0.0, tag=1)
    # Idle is c's backward, 5 s: room for one copy of 4 s. In the order found (L to 1) it would have been b's.
    assert modes(plan) == [Mode.DFGB, Mode.DHA, Mode.GFGB]
    assert plan.t_res == 1.0


def test_the_backward_of_the_layers_after_tag_and_their_gaps_are_idle():
    profile = profile_of(dha("a", t_bp_dha=9.0), layer("b", t_bp=3.0, t_gap_bp=0.5))
    assert modes(planned(profile, [Mode.DHA, Mode.GFGB], t_res=0.4, tag=0)) == [Mode.DHA, Mode.GFGB]
    assert modes(planned(profile, [Mode.DHA, Mode.GFGB], t_res=0.6, tag=0)) == [Mode.DFGB, Mode.GFGB]
    # with tag = -1 every layer's backward counts, a's own too
    assert modes(planned(profile, [Mode.DHA, Mode.GFGB], t_res=0.0, tag=-1)) == [Mode.DFGB, Mode.GFGB]


def test_what_gains_nothing_and_what_is_copied_anyway_stay():
    profile = profile_of(dha("a", t_bp_dha=5.0), layer("b", t_bp=50.0, t_bp_dha=500.0))
    assert modes(planned(profile, [Mode.DHA, Mode.GFGB], t_res=9.0, tag=-1)) == [Mode.DHA, Mode.GFGB]


def test_a_backward_that_cannot_run_by_dha_is_copied_whatever_the_idle_time():
    profile = profile_of(dha("a", t_bp_dha=math.inf, t_trans=100.0))
    assert modes(planned(profile, [Mode.DHA], t_res=0.0, tag=0)) == [Mode.DFGB]


def test_a_recomputed_forward_counts_in_the_backward():
    recomputed = dha("a", recompute=True, t_fp=0.0, t_fp_dha=3.0, t_bp_dha=4.0)
    profile = profile_of(recomputed)  # 1 + 4 against 4 + 3
    assert modes(planned(profile, [Mode.DHA], t_res=9.0, tag=0)) == [Mode.DFGB]


def test_a_plan_for_other_layers_is_refused():
    with pytest.raises(ValueError, match="plan lacks 'a'"):
        plan_backward(profile_of(layer("a")), plan_forward(profile_of(layer("b"))))
