"""Several ranks: shards of every copy and update, collectives on the fabric, one rank as before."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memferry_ascend import profile_plan
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
    device_bytes,
    search,
    simulate,
)
from memferry_ascend.planner.estimate import Estimate
from tests.planner.exhaustive import best_of_all, plan_of, runnable
from tests.planner.helpers import bert_on_pcie3, layer, profile_of, random_profile, usable_decisions

FREE = LinkProfile(h2d=1000.0, d2h=500.0, duplex=4000.0, latency=0.0)
FABRIC = FabricProfile(ranks=2, bandwidth=500.0, latency=0.25)  # 1000 bytes: 1.25 s


def whole(name="a", **changes):
    """1000 bytes; copy 1 s down and 2 s up, forward 3, backward 5, update 7."""
    values = {"bytes": 1000, "t_trans": 1.0, "t_fp": 3.0, "t_bp": 5.0, "t_update": 7.0, "t_fp_dha": 4.0,
              "t_bp_dha": 6.0, **changes}  # fmt: skip
    return layer(name, **values)


def on(profile: Profile, fabric: FabricProfile | None) -> Profile:
    return replace(profile, fabric=fabric)


def random_fabric(seed: int, h2d: float) -> FabricProfile:
    rng = random.Random(seed)
    return FabricProfile(
        rng.choice([2, 3, 8]), h2d * rng.choice([0.5, 3.0]), rng.choice([0.0, 1e-5]), rng.choice([1, 1, 4]), h2d, 1e-5
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "fabric", "expected"),
    [
        ("GFGB", FABRIC, 3.5 + 0.5 + 1.25 + 3 + 5 + 1.25 + 1),
        ("STREAM", FABRIC, 3.5 + 0.5 + 1.25 + 3 + 5 + 1.25 + 1),  # the reload runs beside the forward
        ("DFGB", FABRIC, 3.5 + 4 + 5 + 1.25 + 1),
        ("DHA", FABRIC, 3.5 + 4 + 6 + 1.25 + 1),  # whole layers are read over the link
        # Across nodes the chunk's gradient, 500 bytes of bf16, is 1000 of fp32: half of them travel, twice.
        ("DHA", FabricProfile(2, 500.0, 0.25, 2, 250.0, 0.5), 3.5 + 4 + 6 + 1.25 + 2 * (0.5 + 2) + 1),
    ],
)
def test_one_layer_by_hand(mode, fabric, expected):
    profile = on(profile_of(whole(), link=FREE), fabric)
    timeline = simulate(profile, Plan((LayerPlan("a", mode),)))
    assert timeline.period == pytest.approx(expected)
    assert sum(timeline.critical_path.values()) == pytest.approx(expected)
    assert timeline.busy["fabric"] == pytest.approx(
        sum(end - start for start, end, _ in timeline.intervals["fabric"])
    )


def test_the_next_copy_runs_while_the_fabric_gathers():
    profile = on(profile_of(whole("a", t_update=0.0), whole("b", t_update=0.0), link=FREE), FABRIC)
    timeline = simulate(profile, Plan(tuple(LayerPlan(n) for n in "ab")))
    # a is there after 0.5 + 1.25, b's gather ends while a computes; both gradients leave behind the last backward.
    assert timeline.period == pytest.approx(1.75 + 3 + 3 + 5 + 5 + 1.25 + 1)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("update", ["step", "backward"])
def test_one_rank_on_a_fabric_is_one_rank(seed, update):
    profile = random_profile(seed, 6)
    rng = random.Random(seed)
    chosen = [
        rng.choice([d for d in usable_decisions(profile, i) if d[1:] == (Grad.STAGE, Update.HOST)])
        for i in range(len(profile.layers))
    ]
    one = simulate(profile, plan_of(profile, chosen), update)
    assert "fabric" not in one.busy
    on_fabric = simulate(on(profile, FabricProfile(1, 1.0, 1.0)), plan_of(profile, chosen), update)
    assert on_fabric.period == pytest.approx(one.period, rel=1e-9, abs=1e-15)
    assert on_fabric.busy == pytest.approx({**one.busy, "fabric": 0.0}, rel=1e-9, abs=1e-15)


def test_a_profile_without_a_fabric_says_nothing_of_one():
    profile = random_profile(3)
    assert "fabric" not in profile.to_json()
    assert profile.shards == 1
    assert profile.as_one() is profile
    assert profile.copy_times == tuple(
        x.t_trans * f for x, f in zip(profile.layers, profile.own_fraction, strict=True)
    )


@st.composite
def planned(draw):
    profile = random_profile(draw(st.integers(0, 10**6)), 6)
    profile = on(profile, random_fabric(draw(st.integers(0, 10**6)), profile.link.h2d))
    chosen = [
        draw(st.sampled_from([d for d in usable_decisions(profile, i) if d[1:] == (Grad.STAGE, Update.HOST)]))
        for i in range(len(profile.layers))
    ]
    assume(runnable(profile, chosen))
    return profile, chosen


@settings(max_examples=150, deadline=None)
@given(planned(), st.sampled_from(["step", "backward"]))
def test_accounts_add_up_and_the_estimate_stays_below(case, update):
    profile, chosen = case
    plan, ranks = plan_of(profile, chosen), profile.fabric.ranks
    timeline = simulate(profile, plan, update)
    exchanged = updated = 0.0
    for i, x in enumerate(profile.layers):
        if x.trainable and profile.own_bytes[i]:
            updated += x.t_update * profile.own_fraction[i] / ranks
            exchanged += profile.fabric.exchange(profile.own_bytes[i], x.itemsize)
    assert timeline.busy["fabric"] >= exchanged * (1 - 1e-6)
    assert timeline.busy["host"] >= updated * (1 - 1e-6)
    for work in timeline.busy.values():
        assert work <= timeline.period * (1 + 1e-6)
    assert sum(timeline.critical_path.values()) == pytest.approx(timeline.period, rel=1e-6, abs=1e-12)
    assert timeline.peak_bytes <= device_bytes(profile, plan).total
    if update == "step":
        assert Estimate(profile).period(chosen) <= timeline.period * (1 + 1e-9)
    assert Estimate(profile).busy(chosen) <= timeline.period * (1 + 1e-9)


def _layer(name, nbytes, **fields):
    values = {
        "t_trans": nbytes / 1e9, "t_fp": 1e-5, "t_bp": 2e-5, "t_fp_dha": 1e-5, "t_bp_dha": 2e-5, "t_bp_grad_direct": 2e-5,
        "t_gap_fp": 0.0, "t_gap_bp": 0.0, "t_update": nbytes * 1e-8, "dha_bytes": 0,
    } | fields  # fmt: skip
    return LayerProfile(name=name, kind="Linear", bytes=nbytes, **values)


@pytest.mark.parametrize(
    ("layers", "modes"),
    [
        # The upload of what the streamed layer shares goes before its own copy, and does not wait for its own update.
        (
            (_layer("a", 40000), _layer("b", 80000, shares="a"), _layer("c", 40000, shares="a")),
            (Mode.DHA, Mode.STREAM, Mode.GFGB),
        ),
        # Nothing moves but what is frozen: it was fetched beside the end of the iteration before, in both passes.
        (
            (_layer("a", 40000), _layer("b", 4000000, trainable=False, t_fp=3e-3, t_bp=6e-3)),
            (Mode.DHA, Mode.STREAM),
        ),
    ],
)
def test_the_estimate_stays_below_where_copies_overtake(layers, modes):
    link = LinkProfile(h2d=1e9, d2h=1e9, duplex=2e9, latency=0.0)
    profile = Profile(layers=layers, link=link)
    chosen = [(mode, Grad.STAGE, Update.HOST) for mode in modes]
    assert Estimate(profile).period(chosen) <= simulate(profile, plan_of(profile, chosen)).period * (1 + 1e-9)


def test_link_bytes_and_updates_are_a_ranks_own_part():
    profile = bert_on_pcie3(blocks=2)
    for mode in (Mode.GFGB, Mode.STREAM):
        plan = Plan(tuple(LayerPlan(x.name, mode) for x in profile.layers))
        one = simulate(profile, plan)
        four = simulate(on(profile, FabricProfile(4, 100e9, 0.0)), plan)
        latency = 3 * len(profile.layers) * profile.link.latency
        for name in ("h2d", "d2h", "host"):
            assert one.busy[name] / 4 <= four.busy[name] <= one.busy[name] / 4 + latency
        assert four.period < one.period


def test_the_search_is_close_to_the_best_of_all_plans():
    gaps = []
    for seed in range(60):
        profile = random_profile(seed, 4)
        profile = on(profile, random_fabric(seed, profile.link.h2d))
        best = best_of_all(profile, None, grads=False)
        plan = search(profile)
        assert all((x.grad, x.update) == (Grad.STAGE, Update.HOST) for x in plan.layers)
        if best[0] > 0:
            gaps.append(plan.predicted_period / best[0] - 1)
    assert max(gaps) <= 0.10
    assert sum(gaps) / len(gaps) <= 0.02


def test_a_slow_fabric_changes_the_plan():
    """Reading a layer where it is costs its whole bytes on the link, copying it 1/N of them and the fabric."""
    profile = profile_of(whole(t_fp_dha=3.5, t_bp_dha=5.5, t_update=0.0), link=FREE)

    def best(fabric):
        return profile_plan.plan_profile(on(profile, fabric)).layers[0].mode

    assert best(None) in (Mode.DHA, Mode.DFGB)  # half a second saved
    assert best(FabricProfile(8, 1e9, 0.0)) is Mode.GFGB
    assert best(FabricProfile(8, 100.0, 0.0)) in (Mode.DHA, Mode.DFGB)


def test_what_several_ranks_cannot_do_is_refused_or_staged():
    profile = on(profile_of(whole(t_bp_grad_direct=5.5), link=FREE), FABRIC)
    for decision in (("GFGB", "keep"), ("GFGB", "direct"), ("GFGB", "keep", "device")):
        plan = Plan((LayerPlan("a", *decision),))
        with pytest.raises(ValueError, match="several ranks exchange gradients"):
            simulate(profile, plan)
        staged = Plan((LayerPlan("a", "GFGB"),))
        assert profile_plan.predict(profile, plan).period == simulate(profile, staged).period


def test_the_fabric_goes_through_json_and_bad_ones_are_named():
    profile = on(random_profile(1), FabricProfile(4, 1e9, 1e-5, 2, 5e8, 2e-5))
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    for values, named in (
        ({"ranks": 0}, "ranks must be a whole number >= 1, found 0"),
        ({"bandwidth": 0.0}, "bandwidth must be a finite number > 0"),
        ({"latency": float("inf")}, "latency must be a finite number >= 0"),
        ({"nodes": 2}, "bandwidth_across is needed"),
    ):
        with pytest.raises(ValueError, match=named):
            FabricProfile(**{"ranks": 2, "bandwidth": 1.0, "latency": 0.0} | values)
    document = profile.to_json() | {"fabric": {"ranks": 2}}
    with pytest.raises(ValueError, match="fabric: missing"):
        Profile.from_json(document)


def test_device_bytes_count_the_collectives_buffers():
    profile = profile_of(whole("a"), whole("b", bytes=600), link=FREE)
    plan = Plan((LayerPlan("a"), LayerPlan("b", Mode.STREAM)))
    more = device_bytes(on(profile, FABRIC), plan).total - device_bytes(profile, plan).total
    assert more == 2 * 1000 + 2 * 500 + 600  # sent and received, two results, where loads land
