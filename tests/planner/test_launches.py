"""What launching costs, in seconds by hand, and what the search makes of it."""

import json
import math
import random
from dataclasses import replace

import pytest

from memferry_ascend.planner import (
    Grad,
    LayerPlan,
    LinkProfile,
    Mode,
    Plan,
    Profile,
    Update,
    search,
    simulate,
)
from memferry_ascend.planner.estimate import Estimate
from memferry_ascend.planner.launches import ALTERNATIVES, UNIT, WHOLE_UNIT
from memferry_ascend.planner.memory import decisions
from tests.planner.helpers import bert_on_pcie3, layer, profile_of, random_profile

FREE = LinkProfile(h2d=1000.0, d2h=500.0, duplex=4000.0, latency=0.0)  # 1000 bytes: down 1 s, up 2 s
COSTS = {"DHA": (0.5, 0.25), "DFGB": (1.5, 2.0), "STREAM": (4.0, 3.0), "keep": (0.0, 1.0), "direct": (2.0, 2.0),
         "device": (0.0, 6.0)}  # fmt: skip


def whole(name="a", **changes):
    """1000 bytes; copy 1 s down and 2 s up, forward 3 (launched in 2), backward 5 (in 4), update 7."""
    values = {"bytes": 1000, "t_trans": 1.0, "t_fp": 3.0, "t_bp": 5.0, "t_update": 7.0, "t_fp_dha": 4.0,
              "t_bp_dha": 6.0, "t_bp_grad_direct": 5.5, "t_host_fp": 2.0, "t_host_bp": 4.0, **changes}  # fmt: skip
    return layer(name, **values)


def seconds(profile, *decided):
    plan = Plan(tuple(LayerPlan(x.name, *d) for x, d in zip(profile.layers, decided, strict=True)))
    for update in ("step", "backward"):
        period = simulate(profile, plan, update).period
        if update == "step":
            assert period == pytest.approx(Estimate(profile).period(decisions(plan)))
            found = period
    return found


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (("GFGB", "stage"), 7 + 1 + 3 + 5 + 2),  # launched in 2 and 4 seconds
        (("DHA", "stage"), 7 + 4 + 6 + 2),  # in 2.5 and 4.25
        (("DFGB", "stage"), 7 + 4 + 6 + 2),  # in 3.5 and 6, where the device needs 4 and 5
        (("STREAM", "stage"), 7 + 1 + 6 + 7 + 2),
        (("GFGB", "keep"), 7 + 1 + 3 + 5 + 2),
        (("STREAM", "keep"), 7 + 1 + 6 + 8 + 2),
        (("GFGB", "direct"), 7 + 1 + 4 + 6),
        (("GFGB", "keep", "device"), 7 / 16 + 3 + 10),  # without what keeping a gradient for the host adds
    ],
)
def test_a_pass_takes_as_long_as_its_launching(decision, expected):
    assert seconds(replace(profile_of(whole(), link=FREE), launches=COSTS), decision) == pytest.approx(
        expected
    )


def test_a_recomputed_forward_is_launched_again():
    profile = replace(profile_of(whole(recompute=True), link=FREE), launches=COSTS)
    assert seconds(profile, ("GFGB", "stage")) == pytest.approx(7 + 1 + 3 + 8 + 2)
    assert seconds(profile, ("STREAM", "stage")) == pytest.approx(7 + 1 + 6 + (4 + 3 + 2 + 4) + 2)


def test_a_layer_decided_differently_from_the_one_before_begins_a_unit():
    both = [whole(x, t_update=0.0, trainable=False, bytes=WHOLE_UNIT // 2, t_trans=0.0) for x in "ab"]
    profile = replace(profile_of(*both, link=FREE), launches={UNIT: (4.0, 8.0)})
    assert seconds(profile, ("GFGB", "stage"), ("GFGB", "stage")) == pytest.approx(3 + 3 + 5 + 5)
    # half a unit more: 2 + 2 and 4 + 4 seconds for the second layer
    assert seconds(profile, ("GFGB", "stage"), ("STREAM", "stage")) == pytest.approx(3 + 4 + 8 + 5)
    assert seconds(profile, ("GFGB", "stage"), ("DHA", "stage")) == pytest.approx(
        3 + 4 + 6 + 5
    )  # it rides along
    assert seconds(profile, ("GFGB", "stage"), ("DHA", "keep")) == pytest.approx(3 + 4 + 8 + 5)  # not so
    large = replace(profile, layers=tuple(replace(x, bytes=WHOLE_UNIT) for x in profile.layers))
    assert seconds(large, ("GFGB", "stage"), ("STREAM", "stage")) == pytest.approx(3 + 3 + 5 + 5)


REAL = {"DHA": (1e-5, 1e-5), "DFGB": (6e-5, 6e-5), "STREAM": (7e-5, 8e-5), "keep": (0.0, 1e-5),
        "direct": (2e-5, 2e-5), "device": (0.0, 8e-5), UNIT: (1e-4, 2e-4)}  # fmt: skip
COUNTS = [*range(1, 9), 20]


def launch_bound(seed, count):
    """Copies and updates so short that nothing they could gain is worth a launch."""
    small = random_profile(seed, count=count, contention=False)
    layers = [
        replace(
            x, t_host_fp=1e-3, t_host_bp=2e-3, t_fp=1e-3, t_bp=2e-3, t_trans=1e-9, t_update=1e-9,
            t_fp_dha=min(x.t_fp_dha, 1e-3) if x.dha_usable else math.inf,
            t_bp_dha=min(x.t_bp_dha, 2e-3) if x.dha_backward_usable else math.inf, t_bp_grad_direct=2e-3,
            shares=None, bytes=64, dha_bytes=0, t_update_device=1e-9,
        )
        for x in small.layers
    ]  # fmt: skip
    return replace(small, layers=tuple(layers), link=replace(small.link, latency=0.0), launches=REAL)


@pytest.mark.parametrize("seed", range(9))
def test_where_launching_is_all_there_is_to_wait_for_everything_is_gfgb(seed):
    profile = launch_bound(seed, COUNTS[seed])
    found = decisions(search(profile, 2**40))
    assert set(found) == {(Mode.GFGB, Grad.STAGE, Update.HOST)}
    free = decisions(search(replace(profile, launches={}), 2**40))
    assert any(x != (Mode.GFGB, Grad.STAGE, Update.HOST) for x in free)


@pytest.mark.parametrize("seed", range(30))
def test_where_the_device_is_all_there_is_to_wait_for_nothing_changes(seed):
    profile = random_profile(seed, 6)
    rng = random.Random(seed)
    costs = {name: (rng.random() * 1e-6, rng.random() * 1e-6) for name in ALTERNATIVES}
    layers = [
        replace(x, t_fp=x.t_fp + 1e-5, t_bp=x.t_bp + 1e-5, t_fp_dha=x.t_fp_dha + 1e-5, t_bp_dha=x.t_bp_dha + 1e-5,
                t_bp_grad_direct=x.t_bp_grad_direct + 1e-5, t_host_fp=1e-6, t_host_bp=1e-6)
        for x in profile.layers
    ]  # fmt: skip
    free = replace(profile, layers=tuple(layers), launches={})
    budget = rng.choice([None, 2**40])
    found, before = search(replace(free, launches=costs), budget), search(free, budget)
    assert found == before


def test_why_names_what_lost_by_launching_alone():
    """What loads a layer twice beside its passes costs nothing but launches."""
    layers = [whole(x, trainable=False, t_trans=0.0, t_fp_dha=math.inf, t_bp_dha=math.inf) for x in "ab"]
    profile = profile_of(*layers, link=FREE)
    costly = replace(profile, launches={"STREAM": (4.0, 3.0)})
    assert search(costly)["a"].why.startswith("beats STREAM by 5 s, which launching it costs")
    slow = replace(profile, layers=tuple(replace(x, t_trans=9.0) for x in layers))
    for x in search(replace(slow, launches={"STREAM": (0.5, 0.5)})).layers:
        assert x.mode is Mode.GFGB and "launching" not in x.why


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (3, "seconds by alternative"),
        ({"GFGB": (0.0, 0.0)}, "unknown 'GFGB'; known are DHA"),
        ({"DHA": 1.0}, "DHA must be two finite numbers"),
        ({"DHA": (1.0,)}, "DHA must be two"),
        ({"keep": (0.0, -1.0)}, "keep must be two"),
        ({"keep": (0.0, math.nan)}, "keep must be two"),
        ({"unit": (0.0, math.inf)}, "unit must be two"),
        ({"unit": (0.0, True)}, "unit must be two"),
        ({"unit": "ab"}, "unit must be two"),
    ],
)
def test_costs_that_make_no_sense_are_refused(found, message):
    with pytest.raises(ValueError, match=f"launches: .*{message}"):
        Profile((layer(),), FREE, launches=found)


def test_files_keep_launching_and_older_ones_have_none():
    profile = replace(bert_on_pcie3(1), launches=COSTS)
    document = json.loads(json.dumps(profile.to_json(), allow_nan=False))
    assert Profile.from_json(document) == profile
    del document["launches"]
    for x in document["layers"]:
        del x["t_host_fp"], x["t_host_bp"]
    older = Profile.from_json(document)
    assert older.launches == {} and older.layers[0].t_host_bp == 0.0
