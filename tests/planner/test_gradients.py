"""The gradient algorithm equals exhaustive search, and the knapsack beneath it is exact."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_ascend.planner import Grad, LayerPlan, Plan, plan_gradients
from memferry_ascend.planner import knapsack as module
from memferry_ascend.planner.knapsack import pack
from tests.planner.helpers import layer, profile_of

sizes = st.one_of(st.integers(0, 12), st.sampled_from([0, 64, 64, 128]), st.integers(0, 2**40))
gains = st.one_of(st.sampled_from([0.0, -1.0, 1.0, 1.0, 0.5]), st.floats(-1, 1), st.floats(0, 1e-6))


def brute_force(items, capacity):
    best = 0.0
    for taken in itertools.product((False, True), repeat=len(items)):
        if sum(size for (size, _), t in zip(items, taken, strict=True) if t) <= capacity:
            best = max(best, math.fsum(gain for (_, gain), t in zip(items, taken, strict=True) if t))
    return best


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(sizes, gains), max_size=9), st.floats(0, 1.1))
def test_the_knapsack_equals_exhaustive_search(items, part):
    capacity = int(part * sum(size for size, _ in items))
    found = pack([s for s, _ in items], [g for _, g in items], capacity)
    assert sum(size for (size, _), t in zip(items, found.taken, strict=True) if t) <= capacity
    assert found.gap == 0.0
    assert found.gain == pytest.approx(brute_force(items, capacity), rel=1e-11, abs=1e-300)


def test_gain_in_proportion_to_size_still_finds_the_exact_fill():
    numbers = [3, 34, 4, 12, 5, 2]
    found = pack(numbers, [1e-9 * x for x in numbers], 9)
    assert found.gain == pytest.approx(9e-9)


def test_past_the_state_limit_the_gap_is_told_and_holds(monkeypatch):
    numbers = [1_000_003 * (i % 17 + 3) + i * i * 7919 for i in range(24)]
    gain = [1e-9 * x for x in numbers]
    capacity = sum(numbers) // 3
    exact = pack(numbers, gain, capacity)
    monkeypatch.setattr(module, "STATE_LIMIT", 8)
    rough = pack(numbers, gain, capacity)
    assert rough.gap > 0
    assert sum(n for n, t in zip(numbers, rough.taken, strict=True) if t) <= capacity
    assert exact.gain * (1 - rough.gap) <= rough.gain <= exact.gain * (1 + 1e-12)


@pytest.mark.parametrize(("size", "gain"), [(-1, 1.0), (1, math.inf), (1, math.nan)])
def test_a_bad_item_is_named(size, gain):
    with pytest.raises(ValueError, match="item 1"):
        pack([1, size], [1.0, gain], 5)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.floats(-0.5, 2.0), st.booleans(), st.booleans()),
        min_size=1,
        max_size=7,
    ),
    st.floats(0, 1),
)
def test_no_other_placement_within_the_reserve_is_faster(items, reserve):
    layers = [
        layer(
            f"l{i}",
            bytes=nbytes,
            t_bp=2.0,
            t_bp_grad_direct=2.0 + extra if usable else math.inf,
            trainable=trains,
        )
        for i, (nbytes, extra, usable, trains) in enumerate(items)
    ]
    plan = plan_gradients(profile_of(*layers), reserve)
    total = sum(x.bytes for x in layers if x.trainable)

    def seconds(x, grad):
        return x.t_bp_grad_direct if grad is Grad.DIRECT else x.t_bp

    kept = sum(x.bytes for x, d in zip(layers, plan.layers, strict=True) if d.grad is Grad.KEEP)
    assert kept <= reserve * total
    mine = sum(seconds(x, d.grad) for x, d in zip(layers, plan.layers, strict=True))
    # What is not kept is written directly where that is usable, staged otherwise.
    fallback = [Grad.DIRECT if x.trainable and math.isfinite(x.t_bp_grad_direct)
                else Grad.STAGE for x in layers]  # fmt: skip
    best = math.inf
    for keep in itertools.product((False, True), repeat=len(layers)):
        if any(k and not x.trainable for k, x in zip(keep, layers, strict=True)):
            continue
        if sum(x.bytes for k, x in zip(keep, layers, strict=True) if k) <= reserve * total:
            placed = [Grad.KEEP if k else f for k, f in zip(keep, fallback, strict=True)]
            best = min(best, sum(seconds(x, g) for x, g in zip(layers, placed, strict=True)))
    assert mine == pytest.approx(best, rel=1e-12)


def test_tied_unusable_and_device_updated_gradients_are_never_written_directly():
    profile = profile_of(
        layer("emb", t_bp_grad_direct=3.0), layer("head", shares="emb", t_bp_grad_direct=3.0),
        layer("none"), layer("device", t_bp_grad_direct=3.0), layer("free", t_bp_grad_direct=3.0),
    )  # fmt: skip
    before = Plan(
        tuple(LayerPlan(x.name, update="device" if x.name == "device" else "host") for x in profile.layers)
    )
    plan = plan_gradients(profile, 0.0, before)
    assert [x.grad for x in plan.layers] == [Grad.STAGE, Grad.STAGE, Grad.STAGE, Grad.STAGE, Grad.DIRECT]


def test_the_whole_reserve_keeps_every_gradient_that_gains():
    profile = profile_of(layer("a", t_bp_grad_direct=3.0), layer("b", t_bp_grad_direct=2.5))
    assert [x.grad for x in plan_gradients(profile, 1.0).layers] == [Grad.KEEP, Grad.KEEP]
    half = plan_gradients(profile, 0.5)
    assert [x.grad for x in half.layers] == [Grad.KEEP, Grad.DIRECT]
    assert "saves 1 s" in half["a"].why


@pytest.mark.parametrize("reserve", [-0.1, 1.1, math.nan])
def test_a_reserve_outside_0_to_1_is_refused(reserve):
    with pytest.raises(ValueError, match="0 to 1"):
        plan_gradients(profile_of(layer()), reserve)
