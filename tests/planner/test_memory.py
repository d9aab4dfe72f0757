"""Bytes by plan, counted by hand."""

from dataclasses import replace

import pytest

from memferry_ascend.planner import (
    LayerParams,
    LayerPlan,
    ParamProfile,
    Plan,
    device_bytes,
    host_bytes,
    search,
)
from tests.planner.helpers import layer, profile_of


def planned(profile, *decisions):
    return Plan(tuple(LayerPlan(x.name, *d) for x, d in zip(profile.layers, decisions, strict=True)))


def test_every_mode_counts_what_it_holds():
    sizes = {"a": 100, "b": 200, "c": 400, "d": 800}
    profile = profile_of(*(layer(name, bytes=size) for name, size in sizes.items()), base_bytes=7)
    plan = planned(
        profile, ("GFGB", "direct"), ("DFGB", "direct"), ("STREAM", "direct"), ("STREAM", "direct")
    )
    found = device_bytes(profile, plan)
    assert (found.base, found.resident, found.ring) == (7, 300, 2 * 800)
    assert (found.kept, found.staged, found.state) == (0, 0, 0)
    assert found.total == 7 + 300 + 1600
    assert device_bytes(profile, plan, slots=3).ring == 2400
    assert device_bytes(profile, planned(profile, *[("DHA", "direct")] * 4)).total == 7


def test_direct_gradients_need_staging_room_where_the_engine_stages_first():
    usable = {"t_fp_dha": 1.0, "t_bp_dha": 2.0, "t_bp_grad_direct": 2.0}
    profile = profile_of(layer("a", bytes=100, **usable), layer("b", bytes=200, **usable))
    plan = planned(profile, ("DHA", "direct"), ("DHA", "direct"))
    assert device_bytes(profile, plan).staged == 0
    assert device_bytes(profile, plan, direct_stages=True).staged == 2 * 200
    assert search(profile, 0).device_bytes == 0
    assert search(profile, 300, direct_stages=True).device_bytes == 300  # both kept
    with pytest.raises(ValueError, match="the smallest needs 300 bytes"):
        search(profile, 299, direct_stages=True)


def test_what_stays_is_counted_aligned_where_parameters_are_known():
    owns = (ParamProfile(0, 50, 2, True, False), ParamProfile(1, 300, 2, True, False))
    params = (LayerParams("a", owns, (0, 1)),)
    profile = replace(profile_of(layer("a", bytes=700)), parameters=params)
    plan = planned(profile, ("GFGB", "keep", "device"))
    found = device_bytes(profile, plan)
    assert (found.resident, found.kept, found.state) == (512 + 1024, 512 + 1024, 768 * (2 + 8))
    assert device_bytes(profile, planned(profile, ("STREAM", "stage"))).ring == 2 * 1536


def test_gradients_count_where_they_are_kept():
    profile = profile_of(layer("a", bytes=100), layer("b", bytes=200), layer("c", bytes=60, trainable=False))
    plan = planned(profile, ("DHA", "keep"), ("DHA", "stage"), ("DHA", "keep"))
    assert device_bytes(profile, plan).kept == 100
    assert device_bytes(profile, plan, accumulate=4).kept == 100 // 2 * 4
    assert device_bytes(profile, plan).staged == 2 * 200


def test_a_device_update_holds_parameters_gradient_remainder_and_moments():
    profile = profile_of(layer("half", bytes=100), layer("single", bytes=100, itemsize=4))
    plan = planned(profile, ("GFGB", "keep", "device"), ("GFGB", "keep", "device"))
    found = device_bytes(profile, plan)
    assert (found.resident, found.kept) == (200, 200)
    assert found.state == 50 * (2 + 8) + 25 * 8
    assert device_bytes(profile, plan, state_bytes=4).state == 50 * (2 + 4) + 25 * 4


def test_a_tied_parameter_counts_once():
    profile = profile_of(layer("emb", bytes=100), layer("head", bytes=110, shares="emb"))
    found = device_bytes(profile, planned(profile, ("DHA", "direct"), ("GFGB", "direct")))
    assert found.resident == 110
    assert found.staged == 110  # tied gradients live from the first backward use to the last
    assert device_bytes(profile, planned(profile, ("DHA", "keep"), ("STREAM", "keep"))).ring == 2 * 110
    assert device_bytes(profile, planned(profile, ("GFGB", "keep"), ("STREAM", "keep"))).ring == 2 * 10


def test_host_bytes_hold_parameters_and_what_the_host_updates():
    profile = profile_of(layer("a", bytes=100), layer("b", bytes=100), layer("c", bytes=60, trainable=False))
    plan = planned(profile, ("GFGB", "stage"), ("GFGB", "keep", "device"), ("DHA", "stage"))
    assert host_bytes(profile, plan) == (100 + 100 + 50 * 10) + 100 + 60
