"""The simulator: iterations worked by hand in whole seconds, then properties on random profiles."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memferry_ascend.planner import (
    LayerPlan,
    LayerProfile,
    LinkProfile,
    Mode,
    Plan,
    Profile,
    Timeline,
    Update,
    device_bytes,
    plan_backward,
    plan_forward,
    simulate,
)
from memferry_ascend.planner.estimate import Estimate
from memferry_ascend.planner.launches import UNIT
from memferry_ascend.planner.memory import decisions, staging_bytes
from tests.planner.exhaustive import plan_of, runnable
from tests.planner.helpers import bert_on_pcie3, layer, profile_of, random_profile, usable_decisions

FREE = LinkProfile(h2d=1000.0, d2h=500.0, duplex=4000.0, latency=0.0)  # 1000 bytes: down 1 s, up 2 s


def whole(name="a", **changes):
    """1000 bytes; copy 1 s down and 2 s up, forward 3, backward 5, update 7."""
    values = {"bytes": 1000, "t_trans": 1.0, "t_fp": 3.0, "t_bp": 5.0, "t_update": 7.0, "t_fp_dha": 4.0,
              "t_bp_dha": 6.0, "t_bp_grad_direct": 5.5, **changes}  # fmt: skip
    return layer(name, **values)


def seconds(profile, *decisions, update="step", **options):
    chosen = tuple(LayerPlan(x.name, *d) for x, d in zip(profile.layers, decisions, strict=True))
    return simulate(profile, Plan(chosen), update, **options).period


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (("GFGB", "stage"), 7 + 1 + 3 + 5 + 2),
        (("GFGB", "keep"), 7 + 1 + 3 + 5 + 2),
        (("GFGB", "direct"), 7 + 1 + 3 + 5.5),
        (("DHA", "stage"), 7 + 4 + 6 + 2),
        (("DHA", "direct"), 7 + 4 + 6.5),
        (("DFGB", "stage"), 7 + 4 + 5 + 2),  # its copy runs beside the forward
        (("STREAM", "stage"), 7 + 1 + 3 + 5 + 2),  # and so does the reload, into the second slot
        (("GFGB", "keep", "device"), 7 / 16 + 3 + 5),
    ],
)
def test_one_layer_by_hand(decision, expected):
    profile = profile_of(whole(), link=FREE)
    for update in ("step", "backward"):
        assert seconds(profile, decision, update=update) == pytest.approx(expected)


def test_with_one_slot_the_reload_waits_for_the_forward():
    profile = profile_of(whole(), link=FREE)
    assert seconds(profile, ("STREAM", "stage"), slots=1) == pytest.approx(7 + 1 + 3 + 1 + 5 + 2)


def test_frozen_layers_move_and_update_nothing():
    profile = profile_of(whole(trainable=False), link=FREE)
    for mode, expected in (("GFGB", 8), ("DHA", 10), ("DFGB", 9), ("STREAM", 8)):
        assert seconds(profile, (mode, "stage")) == pytest.approx(expected)


def test_recomputed_layers_run_forward_twice():
    profile = profile_of(whole(recompute=True), link=FREE)
    assert seconds(profile, ("GFGB", "stage")) == pytest.approx(7 + 1 + 3 + 3 + 5 + 2)
    assert seconds(profile, ("DHA", "stage")) == pytest.approx(7 + 4 + 4 + 6 + 2)


def test_gaps_count_in_both_passes():
    profile = profile_of(whole(t_gap_fp=10.0, t_gap_bp=20.0), link=FREE)
    assert seconds(profile, ("GFGB", "stage")) == pytest.approx(7 + 1 + 3 + 10 + 20 + 5 + 2)


def test_first_needed_first_lets_forward_start_while_later_layers_update():
    profile = profile_of(whole("a"), whole("b"), link=FREE)
    # a: updated 7, uploaded 8, fp 11; b: updated 14, uploaded 15, fp 18; bp b 23, a 28, its gradient 30.
    assert seconds(profile, ("GFGB", "stage"), ("GFGB", "stage")) == pytest.approx(30)


def test_update_in_backward_overlaps_the_host_with_the_device():
    profile = profile_of(whole("a"), whole("b"), link=FREE)
    step = seconds(profile, ("GFGB", "stage"), ("GFGB", "stage"))
    # Backward ends at 0: b's gradient is up at -5 + 2 and its update ends at 4, a's runs 4 to 11, forward a
    # 12 to 15, b 15 to 18, backward b 18 to 23, a 23 to 28.
    assert seconds(profile, ("GFGB", "stage"), ("GFGB", "stage"), update="backward") == pytest.approx(28)
    assert seconds(profile, ("GFGB", "stage"), ("GFGB", "stage"), update="backward") < step


def test_a_tied_parameter_is_updated_and_copied_once_and_downloaded_after_its_last_use():
    profile = profile_of(whole("emb"), whole("head", shares="emb"), link=FREE)
    assert seconds(profile, ("GFGB", "stage"), ("GFGB", "stage")) == pytest.approx(7 + 1 + 3 + 3 + 5 + 5 + 2)
    timeline = simulate(profile, plan_of(profile, [(Mode.GFGB, "stage", "host")] * 2))
    labels = [label for spans in timeline.intervals.values() for _, _, label in spans]
    assert sorted(x for x in labels if not x.startswith(("forward", "backward"))) == [
        "download emb", "update emb", "upload emb"
    ]  # fmt: skip
    begins = {label: start for start, _, label in timeline.intervals["compute"]}
    assert timeline.device_bytes == ((0.0, 1000), (begins["backward head"], 2000))


def test_a_dha_read_and_a_copy_share_the_link():
    link = LinkProfile(h2d=1000.0, d2h=1e9, duplex=1e9, latency=0.0)
    reader = whole("a", t_fp_dha=4.0, dha_bytes=4000, t_update=0.0, trainable=False)
    copied = whole("b", bytes=4000, t_trans=4.0, t_update=0.0)
    # Both want all of the link for 4 s: together they take 8. Then b's forward 3, backwards 5 and 6.
    period = seconds(profile_of(reader, copied, link=link), ("DHA", "stage"), ("GFGB", "stage"))
    assert period == pytest.approx(8 + 3 + 5 + 6 + 4, rel=0.2)
    free = seconds(
        profile_of(replace(reader, dha_bytes=0), copied, link=link), ("DHA", "stage"), ("GFGB", "stage")
    )
    assert free == pytest.approx(period - 4, rel=1e-5)


def test_host_updates_and_copies_share_host_memory():
    def period(host_memory):
        link = LinkProfile(h2d=1000.0, d2h=1e9, duplex=1e9, latency=0.0, host_memory=host_memory)
        first = whole("a", bytes=7000, t_trans=7.0, t_update=0.0)
        second = whole("b", bytes=1000, t_trans=0.0, t_update=7.0)
        return seconds(profile_of(first, second, link=link), ("GFGB", "stage"), ("DHA", "stage"))

    assert period(2000.0) > period(None)
    assert period(1e9) == pytest.approx(period(None))


def test_backward_waits_when_short_lived_gradients_have_no_room():
    slow_up = LinkProfile(h2d=1000.0, d2h=10.0, duplex=4000.0, latency=0.0)  # 100 s up
    profile = profile_of(*(whole(x, t_update=0.0) for x in "abc"), link=slow_up)
    plan = plan_of(profile, [(Mode.GFGB, "stage", "host")] * 3)
    timeline = simulate(profile, plan)
    starts = {label: start for start, _, label in timeline.intervals["compute"]}
    ends = {label: end for _, end, label in timeline.intervals["d2h"]}
    assert starts["backward a"] == pytest.approx(ends["download c"])
    assert timeline.peak_bytes == device_bytes(profile, plan).total == 3000 + 2000
    for update in ("step", "backward"):
        kept = simulate(profile, plan_of(profile, [(Mode.GFGB, "keep", "host")] * 3), update)
        compute = {label: (start, end) for start, end, label in kept.intervals["compute"]}
        assert compute["backward a"][0] == pytest.approx(compute["backward b"][1])


def test_kept_gradients_leave_at_the_step_first_needed_first():
    """As the engine does: staged ones beside the backward, kept ones when it has ended."""
    profile = profile_of(whole("a"), whole("b"), link=FREE)
    both = ("GFGB", "keep")
    # Up a 2, b 4; a updated 9, uploaded 10, forward 13; b updated 16, uploaded 17, forward 20, backward 25, a 30.
    assert seconds(profile, both, both) == pytest.approx(30)
    # b leaves beside a's backward: up a 2, then as before.
    assert seconds(profile, both, ("GFGB", "stage")) == pytest.approx(30)
    # a's 2 s are beside nothing: a updated 7, b's kept gradient has arrived meanwhile.
    assert seconds(profile, ("GFGB", "stage"), both) == pytest.approx(28 + 2)
    # A long way up: the host waits for it in its order, instead of updating what is needed later.
    far = profile_of(whole("a"), whole("b"), link=replace(FREE, d2h=100.0))
    starts = {}
    timeline = simulate(far, plan_of(far, [(Mode.GFGB, "keep", "host"), (Mode.GFGB, "direct", "host")]))
    for spans in timeline.intervals.values():
        starts |= {label: (start, end) for start, end, label in spans}
    assert starts["download a"] == pytest.approx((0, 10))
    assert starts["update a"] == pytest.approx((10, 17))
    assert starts["update b"] == pytest.approx((17, 24))
    # With update="backward" nothing waits for a step.
    chosen = {"update": "backward"}
    assert seconds(profile, both, both, **chosen) == seconds(
        profile, ("GFGB", "stage"), ("GFGB", "stage"), **chosen
    )


def test_a_device_update_can_be_unusable():
    profile = profile_of(whole(t_update_device=math.inf), link=FREE)
    with pytest.raises(ValueError, match=r"layer 'a': update device, but t_update_device is inf"):
        seconds(profile, ("GFGB", "keep", "device"))


def test_the_critical_resource_is_named_and_its_path_sums_to_the_period():
    profile = profile_of(whole("a"), whole("b", t_update=100.0), link=FREE)
    timeline = simulate(profile, plan_of(profile, [(Mode.GFGB, "stage", "host")] * 2))
    assert timeline.critical == "host"
    assert timeline.critical_path["host"] == pytest.approx(107)
    assert sum(timeline.critical_path.values()) == pytest.approx(timeline.period)


def test_the_timeline_goes_through_json():
    profile = bert_on_pcie3(1)
    timeline = simulate(profile, plan_backward(profile, plan_forward(profile)), "backward")
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json(), allow_nan=False))) == timeline
    with pytest.raises(ValueError, match="timeline"):
        Timeline.from_json({"format": "memferry timeline", "version": 1})


@pytest.mark.parametrize(
    ("decision", "options", "message"),
    [
        (("DHA", "stage"), {}, "layer 'a': mode DHA.*t_fp_dha is inf"),
        (("DFGB", "stage"), {}, "layer 'a': mode DFGB.*t_fp_dha is inf"),
        (("GFGB", "direct"), {}, "layer 'a': grad direct.*t_bp_grad_direct is inf"),
        (("GFGB", "stage"), {"update": "never"}, "'step', 'backward'.*'never'"),
        (("GFGB", "stage"), {"slots": 0}, "slots must be at least 1, found 0"),
    ],
)
def test_what_cannot_run_is_refused(decision, options, message):
    with pytest.raises(ValueError, match=message):
        seconds(profile_of(layer("a")), decision, **options)


def test_dha_with_no_backward_by_dha_a_stale_reader_and_other_layers_are_refused():
    with pytest.raises(ValueError, match="layer 'a': mode DHA needs a backward"):
        seconds(profile_of(layer("a", t_fp_dha=1.0)), ("DHA", "stage"))
    tied = profile_of(layer("emb"), layer("head", shares="emb", t_fp_dha=1.0, t_bp_dha=1.0))
    with pytest.raises(ValueError, match=r"layer 'head': shares 'emb'.*updated on the device"):
        seconds(tied, ("GFGB", "keep", "device"), ("DHA", "stage"))
    with pytest.raises(ValueError, match="plan lacks 'a'"):
        simulate(profile_of(layer("a")), Plan((LayerPlan("b"),)))


# ---- properties ----

seeds = st.integers(0, 10**6)


@st.composite
def planned_profiles(draw, contention=True):
    """A random profile of up to six layers and a random plan it can run."""
    profile = random_profile(draw(seeds), 6, contention=contention)
    chosen = [draw(st.sampled_from(usable_decisions(profile, i))) for i in range(len(profile.layers))]
    assume(runnable(profile, chosen))
    return profile, chosen


def nominal(profile, chosen):
    """Seconds of work per resource, written apart from the simulator; a lower bound even for tied layers."""
    compute = host = down = up = 0.0
    for x, (mode, grad, update) in zip(profile.layers, chosen, strict=True):
        tied = x.shares is not None or any(y.shares == x.name for y in profile.layers)
        more = [a + b for a, b in zip(*(profile.launches.get(str(name), (0.0, 0.0))
                for name in (mode, update if update is Update.DEVICE else grad)), strict=True)]  # fmt: skip
        forward = x.t_fp_dha if mode in (Mode.DHA, Mode.DFGB) else x.t_fp
        compute += x.t_gap_fp + x.t_gap_bp + max(forward, x.t_host_fp + more[0])
        backward = x.t_bp_dha if mode is Mode.DHA else x.t_bp
        if x.recompute:
            backward += x.t_fp_dha if mode is Mode.DHA else x.t_fp
        if grad == "direct" and not tied:
            backward += x.t_bp_grad_direct - x.t_bp
        again = x.t_host_fp + more[0] if x.recompute else 0.0
        compute += max(0.0, backward, x.t_host_bp + more[1] + again)
        if tied or not x.bytes:
            continue
        if mode is Mode.STREAM:
            down += 2 * x.t_trans
        if x.trainable and update is Update.HOST:
            host += x.t_update
            down += x.t_trans if mode in (Mode.GFGB, Mode.DFGB) else 0.0
            up += profile.link.latency + x.bytes / profile.link.d2h if grad != "direct" else 0.0
    return {"compute": compute, "host": host, "h2d": down, "d2h": up}


@settings(max_examples=150, deadline=None)
@given(planned_profiles(), st.sampled_from(["step", "backward"]))
def test_the_period_is_never_below_a_resources_work_and_accounts_add_up(case, update):
    profile, chosen = case
    plan = plan_of(profile, chosen)
    timeline = simulate(profile, plan, update)
    for name, work in nominal(profile, chosen).items():
        assert timeline.busy[name] >= work * (1 - 1e-6) - 1e-12
        assert timeline.period >= work * (1 - 1e-6) - 1e-12
        assert timeline.busy[name] <= timeline.period * (1 + 1e-6)
    for spans in timeline.intervals.values():
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))
    assert sum(timeline.critical_path.values()) == pytest.approx(timeline.period, rel=1e-6, abs=1e-12)
    assert timeline.peak_bytes <= device_bytes(profile, plan).total
    assert simulate(profile, plan, update) == timeline


@settings(max_examples=150, deadline=None)
@given(planned_profiles())
def test_the_estimate_is_a_lower_bound(case):
    profile, chosen = case
    estimate = Estimate(profile)
    period = simulate(profile, plan_of(profile, chosen)).period
    assert estimate.period(chosen) <= period * (1 + 1e-9)
    assert estimate.busy(chosen) <= period * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(planned_profiles(contention=False))
def test_without_contention_the_estimate_is_exact_unless_frozen_layers_stream(case):
    profile, chosen = case
    names = {x.name: x for x in profile.layers}
    assume(all(d[0] is not Mode.STREAM or (x.trainable and names[x.shares or x.name].trainable)
               for x, d in zip(profile.layers, chosen, strict=True)))  # fmt: skip
    assert simulate(profile, plan_of(profile, chosen)).period == pytest.approx(
        Estimate(profile).period(chosen), rel=1e-9, abs=1e-15
    )


def with_faster_link(profile: Profile, factor: float) -> Profile:
    link = profile.link
    faster = LinkProfile(
        link.h2d * factor, link.d2h * factor, link.duplex * factor, link.latency, link.host_memory
    )

    def copy(x: LayerProfile) -> LayerProfile:
        moved = (x.t_trans - link.latency) / factor + link.latency if x.t_trans else 0.0
        return replace(x, t_trans=moved)

    return replace(profile, layers=tuple(copy(x) for x in profile.layers), link=faster)


@settings(max_examples=150, deadline=None)
@given(planned_profiles(contention=False), st.floats(1.0, 4.0))
def test_with_updates_at_step_more_bandwidth_never_makes_an_iteration_longer(case, factor):
    profile, chosen = case
    plan = plan_of(profile, chosen)
    before = simulate(profile, plan).period
    assert simulate(with_faster_link(profile, factor), plan).period <= before * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(planned_profiles(contention=False), st.data())
def test_with_updates_at_step_one_layer_less_never_makes_an_iteration_longer(case, data):
    profile, chosen = case
    untied = [i for i in range(len(profile.layers)) if not profile.tied[i]]
    assume(untied and len(profile.layers) > 1)
    gone = data.draw(st.sampled_from(untied))
    rest = [d for i, d in enumerate(chosen) if i != gone]
    # A layer that begins a unit pays for it; without that layer the next one may, with less to hide it behind.
    profile = replace(profile, launches={k: v for k, v in profile.launches.items() if k != UNIT})
    shorter = replace(profile, layers=tuple(x for i, x in enumerate(profile.layers) if i != gone))
    assume(
        staging_bytes(shorter, rest) == staging_bytes(profile, chosen)
    )  # the largest layer sizes the staging room
    before = simulate(profile, plan_of(profile, chosen)).period
    assert simulate(shorter, plan_of(shorter, rest)).period <= before * (1 + 1e-9)


def test_the_plan_of_the_paper_runs_on_the_papers_machine():
    profile = bert_on_pcie3()
    plan = plan_backward(profile, plan_forward(profile))
    timeline = simulate(profile, plan)
    assert timeline.converged
    assert timeline.period >= max(timeline.busy.values())
    assert math.isclose(timeline.period, Estimate(profile).period(decisions(plan)), rel_tol=0.1)
