"""Alg. 1, on examples worked by hand (seconds), and on the paper's machine."""

import math

import pytest

from memferry_ascend.planner import LinkProfile, Mode, plan_backward, plan_forward
from memferry_ascend.planner.forward import transfer_time
from tests.planner.helpers import bert_on_pcie3, layer, profile_of, random_profile


def modes(plan):
    return [x.mode for x in plan.layers]


def test_dha_when_it_is_no_slower_than_copy_and_compute():
    plan = plan_forward(profile_of(layer(t_trans=4.0, t_fp=1.0, t_fp_dha=5.0)))
    assert modes(plan) == [Mode.DHA]
    assert (plan.t_res, plan.tag) == (5.0, -1)
    assert modes(plan_forward(profile_of(layer(t_trans=4.0, t_fp=1.0, t_fp_dha=5.1)))) == [Mode.GFGB]


def test_line_3_counts_only_the_part_of_the_copy_that_nothing_hides():
    plan = plan_forward(
        profile_of(layer("a", t_trans=20.0, t_fp_dha=10.0), layer("b", t_trans=4.0, t_fp_dha=3.0))
    )
    # As printed, max(T_trans, 0), b would be DHA although its copy is free behind a's 10 s.
    assert modes(plan) == [Mode.DHA, Mode.GFGB]
    assert (plan.t_res, plan.tag) == (10.0 + 1.0 - 4.0, 1)


def test_backtracking_turns_an_earlier_layer_to_dha_and_carries_its_time():
    profile = profile_of(
        layer("a", t_trans=10.0, t_fp_dha=6.0), layer("b", t_trans=5.0, t_fp_dha=3.0), layer("c", t_trans=8.0)
    )
    plan = plan_forward(profile)
    # Before c: T_all 7, T_res 2. As it stands c ends at 7 + 8 + 1 - 2 = 14; with b in DHA at 10, and its
    # T_res of 9 hides c's copy of 8.
    assert modes(plan) == [Mode.DHA, Mode.DHA, Mode.GFGB]
    assert (plan.t_res, plan.tag) == (max(9.0 - 8.0, 0.0) + 1.0, 2)
    assert "'c'" in plan["b"].why


def test_line_25_scores_the_second_candidate_with_the_first_ones_added_time():
    profile = profile_of(
        layer("z", t_trans=20.0, t_fp_dha=10.0), layer("a", t_trans=5.0, t_fp_dha=3.0),
        layer("b", t_trans=5.0, t_fp_dha=5.8), layer("c", t_trans=13.0),
    )  # fmt: skip
    plan = plan_forward(profile)
    # Before c: T_all 12, T_res 2. With a in DHA c ends at 19; with b too at 14 + 4.8 + 1 = 19.8, but 17.8
    # had a's added 2 been forgotten.
    assert modes(plan) == [Mode.DHA, Mode.DHA, Mode.GFGB, Mode.GFGB]
    assert (plan.t_res, plan.tag) == (1.0, 2)


def test_backtracking_with_no_tag_starts_at_the_first_layer():
    plan = plan_forward(profile_of(layer("a", t_trans=4.0, t_fp_dha=6.0), layer("b", t_trans=8.0)))
    assert modes(plan) == [Mode.DHA, Mode.GFGB]
    assert (plan.t_res, plan.tag) == (3.0, 1)


def test_backtracking_never_reaches_the_layer_it_is_for():
    plan = plan_forward(profile_of(layer("a", t_trans=4.0, t_fp_dha=5.5)))
    assert modes(plan) == [Mode.GFGB]
    assert (plan.t_res, plan.tag) == (1.0, -1)


def test_gaps_hide_copies():
    plan = plan_forward(profile_of(layer("a", t_gap_fp=10.0), layer("b", t_trans=4.0, t_fp_dha=4.0)))
    assert modes(plan) == [Mode.GFGB, Mode.GFGB]
    assert (plan.t_res, plan.tag) == (1.0 + 10.0 + 1.0 - 4.0, 1)


def test_frozen_layers_stay_on_the_device_and_cost_no_copy():
    plan = plan_forward(profile_of(layer(trainable=False, t_trans=100.0, t_fp=1.0, t_fp_dha=2.0)))
    assert modes(plan) == [Mode.GFGB]


def test_a_tied_parameter_is_loaded_once():
    profile = profile_of(layer("emb"), layer("head", shares="emb"))
    assert transfer_time(profile, 1, [Mode.GFGB, None]) == 0.0
    assert transfer_time(profile, 1, [Mode.DHA, None]) == 4.0
    assert transfer_time(profile, 0, [Mode.GFGB, Mode.GFGB]) == 0.0


@pytest.mark.parametrize("seed", range(60))
def test_dha_is_never_planned_where_it_is_not_usable(seed):
    profile = random_profile(seed, 8)
    forward = plan_forward(profile)
    both = plan_backward(profile, forward)
    assert math.isfinite(forward.t_res)
    assert forward.t_res >= 0
    for x, first, second in zip(profile.layers, forward.layers, both.layers, strict=True):
        assert first.mode in (Mode.GFGB, Mode.DHA)
        assert first.mode is Mode.GFGB or x.dha_usable
        assert second.mode is not Mode.DHA or x.dha_backward_usable


def test_on_the_papers_machine_the_word_embedding_is_dha_and_the_linears_are_copied():
    profile = bert_on_pcie3()
    plan = plan_backward(profile, plan_forward(profile))
    assert plan["embeddings.word"].mode is Mode.DHA
    assert {x.mode for x in plan.layers if x.kind == "Linear"} == {Mode.GFGB}


def test_one_layer_of_no_size_and_no_time_is_planned():
    nothing = layer(bytes=0, t_trans=0.0, t_fp=0.0, t_bp=0.0, t_update=0.0)
    link = LinkProfile(h2d=1e9, d2h=1e9, duplex=1e9, latency=0.0)
    assert modes(plan_forward(profile_of(nothing, link=link))) == [Mode.GFGB]
