"""Right before fast: whatever the plan, the same bits."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from harness import (
    ALL_POINTS,
    Delays,
    assert_same,
    batches,
    make_model,
    plan_of,
    poisoned,
    random_plan,
    train,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import memferry_ascend as mf
from memferry_ascend.jobs import PythonJobs
from memferry_ascend.planner import Mode

pytestmark = pytest.mark.usefixtures("moves", "cpu")

SETTINGS = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)


def reference(seed: int, config: mf.Config, **kwargs: Any) -> Any:
    """The serial all-GFGB plan."""
    model = make_model(seed, checkpoint=kwargs.pop("checkpoint", None))
    return train(model, plan_of(model, Mode.GFGB), config=config, serial=True, **kwargs)


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    plan_seed=st.integers(0, 10_000),
    precision=st.sampled_from(["fp32", "bf16"]),
    unit_bytes=st.sampled_from([1, 1500, 1 << 20]),
    checkpoint=st.sampled_from([None, None, "plain", "reentrant"]),
)
def test_random_models_and_plans(
    seed: int, plan_seed: int, precision: str, unit_bytes: int, checkpoint: str | None
) -> None:
    config = mf.Config(precision=precision)
    want = reference(seed, config, checkpoint=checkpoint, steps=10)
    model = make_model(seed, checkpoint=checkpoint)
    with poisoned():
        got = train(model, random_plan(model, plan_seed), config=config, unit_bytes=unit_bytes, steps=10)
    assert_same(want, got)


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("point", [*ALL_POINTS, "all"])
def test_delays_at_every_hand_over(mode: Mode, point: str) -> None:
    micro = 2 if point in ("fold", "all") else 1
    config = mf.Config(precision="bf16", accumulate=micro)
    want = reference(5, config, micro=micro)
    delays = Delays(ALL_POINTS if point == "all" else (point,), seed=3)
    model = make_model(5)
    with poisoned():
        got = train(model, plan_of(model, mode), config=config, micro=micro, disturb=delays, unit_bytes=1)
    assert_same(want, got)
    if point == "copy:upload":
        assert delays.hits > 0 or mode in (Mode.DHA, Mode.DFGB)
    elif point != "copy:reload":
        assert delays.hits > 0


@SETTINGS
@given(seed=st.integers(0, 10_000), micro=st.sampled_from([1, 2, 5]), declared=st.booleans())
def test_accumulation(seed: int, micro: int, declared: bool) -> None:
    config = mf.Config(precision="bf16", accumulate=micro if declared else 1)
    want = reference(seed, mf.Config(precision="bf16", accumulate=micro), micro=micro, steps=4)
    model = make_model(seed)
    got = train(
        model,
        random_plan(model, seed + 1),
        config=config,
        micro=micro,
        steps=4,
        disturb=Delays(ALL_POINTS, seed, most=0.001),
    )
    assert_same(want, got)


@pytest.mark.pairwise
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("limit", [None, 0.05])
def test_update_in_backward_equals_update_in_step(micro: int, limit: float | None) -> None:
    for seed in range(6):
        want = reference(seed, mf.Config(accumulate=micro, max_grad_norm=limit), micro=micro, steps=5)
        model = make_model(seed)
        got = train(
            model,
            random_plan(model, seed + 7),
            config=mf.Config(accumulate=micro, max_grad_norm=limit, update="backward"),
            micro=micro,
            steps=5,
            disturb=Delays(ALL_POINTS, seed, most=0.001),
        )
        assert_same(want, got)


@pytest.mark.parametrize("seed", range(8))
def test_fp32_losses_equal_plain_pytorch(seed: int) -> None:
    model = make_model(seed)
    plain = copy.deepcopy(model)
    got = train(model, random_plan(model, seed), steps=10)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for loss_got, batch in zip(got.losses, batches(10), strict=True):
        loss = plain(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss_got == pytest.approx(float(loss.detach()), rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_bf16_losses_equal_plain_pytorch_with_fp32_masters(seed: int) -> None:
    model = make_model(seed)
    masters = copy.deepcopy(model)
    got = train(model, random_plan(model, seed), config=mf.Config(precision="bf16"), steps=10)
    shadow = copy.deepcopy(masters).bfloat16()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    for loss_got, batch in zip(got.losses, batches(10), strict=True):
        with torch.no_grad():
            for s, m in zip(shadow.parameters(), masters.parameters(), strict=True):
                bits = m.view(torch.int32) + 0x8000 >> 16  # ties away from zero, as the arena stores it
                s.copy_(bits.to(torch.int16).view(torch.bfloat16))
        loss = shadow(batch)
        loss.backward()
        for s, m in zip(shadow.parameters(), masters.parameters(), strict=True):
            m.grad = None if s.grad is None else s.grad.float()
        optimizer.step()
        shadow.zero_grad()
        assert loss_got == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_late_offer_does_not_wait_for_the_next_update() -> None:
    """The worker tells the ring of an update after everybody else may know: the next one can be handed over by then."""
    model = make_model(1)
    engine = mf.ferry(
        model,
        torch.optim.AdamW(model.parameters()),
        config=mf.Config(precision="fp32"),
        plan=plan_of(model, Mode.STREAM),
    )
    ring, jobs = engine._ring, engine._jobs
    assert ring is not None and isinstance(jobs, PythonJobs)
    unit = ring.units[0]
    ring.drop(unit)
    ring.expect_forward()
    jobs._updates[unit.unit.index] += 1
    late = threading.Thread(target=ring.offer, args=(unit,))
    late.start()
    late.join(5.0)
    stuck = late.is_alive()
    jobs._updates[unit.unit.index] -= 1
    jobs.worker.notify()
    late.join()
    engine.close()
    assert not stuck


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.DFGB])
def test_nodes_of_exchanged_units_find_them_on_the_device(mode: Mode) -> None:
    backend = mf.current().backend
    if not backend.swaps:
        pytest.skip("saved-tensor hooks bind nothing in a backward pass")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    engine = mf.ferry(
        model,
        torch.optim.AdamW(model.parameters()),
        config=mf.Config(precision="fp32"),
        plan=plan_of(model, mode),
    )
    rest = {m: m.weight.data_ptr() for m in model}
    seen: list[bool] = []
    for _ in range(3):
        handles = [
            m.register_forward_hook(
                lambda m, _i, out: (
                    out.register_hook(lambda _g, m=m: seen.append(m.weight.data_ptr() != rest[m])) and None
                )
            )
            for m in model
        ]
        engine.model(torch.ones(2, 8)).sum().backward()
        assert all(m.weight.data_ptr() == rest[m] for m in model)
        engine.optimizer.step()
        for h in handles:
            h.remove()
    engine.close()
    assert seen == [True] * 18
