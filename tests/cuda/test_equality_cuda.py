"""The equality harness on a CUDA device, with deterministic algorithms."""

from __future__ import annotations

import pytest
import torch
from harness import ALL_POINTS, DeviceDelays, assert_same, make_model, plan_of, poisoned, random_plan, train

import memferry_ascend as mf
from memferry_ascend.planner import Mode

pytestmark = pytest.mark.usefixtures("moves")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpoint", [None, "plain", "reentrant"])
@pytest.mark.parametrize("seed", range(6))
def test_random_models_and_plans(seed: int, precision: str, checkpoint: str | None) -> None:
    config = mf.Config(precision=precision)
    model = make_model(seed, checkpoint=checkpoint)
    want = train(model, plan_of(model, Mode.GFGB), config=config, serial=True)
    model = make_model(seed, checkpoint=checkpoint)
    with poisoned():
        got = train(model, random_plan(model, seed + 1), config=config)
    assert_same(want, got)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("point", [*ALL_POINTS, "all"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_delays_on_streams(mode: Mode, point: str, update: str) -> None:
    micro = 2 if point in ("fold", "all") else 1
    model = make_model(5)
    want = train(
        model, plan_of(model, Mode.GFGB), config=mf.Config(accumulate=micro), micro=micro, serial=True
    )
    model = make_model(5)
    delays = DeviceDelays(ALL_POINTS if point == "all" else (point,), seed=3, most=0.005)
    config = mf.Config(accumulate=micro, update=update)
    with poisoned():
        got = train(model, plan_of(model, mode), config=config, micro=micro, disturb=delays, unit_bytes=1)
    assert_same(want, got)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_clipping(update: str) -> None:
    for seed in range(4):
        model = make_model(seed)
        config = mf.Config(max_grad_norm=0.1)
        want = train(model, plan_of(model, Mode.GFGB), config=config, serial=True)
        model = make_model(seed)
        config = mf.Config(max_grad_norm=0.1, update=update)
        delays = DeviceDelays(ALL_POINTS, seed=seed, most=0.003)
        assert_same(want, train(model, random_plan(model, seed), config=config, disturb=delays))


def test_torch_clipping_reads_and_writes_published_gradients() -> None:
    def clip(engine: mf.Engine) -> None:
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 0.1)

    model = make_model(1)
    want = train(model, plan_of(model, Mode.GFGB), serial=True, between=clip)
    model = make_model(1)
    delays = DeviceDelays(ALL_POINTS, seed=1, most=0.003)
    assert_same(want, train(model, random_plan(model, 2), between=clip, disturb=delays))


def test_unregistered_memory_is_refused(cuda: mf.Runtime) -> None:
    stream = cuda.backend.stream("upload")
    with pytest.raises(mf.FerryError, match="not in registered memory"):
        stream.copy(cuda.backend.alloc_device(4096), torch.zeros(4096, dtype=torch.uint8))


def test_mapped_memory_is_one_memory(cuda: mf.Runtime) -> None:
    slab = cuda.backend.alloc_host(1 << 20, mapped=True)
    assert slab.device is not None
    for value in range(50):
        slab.host.fill_(value)
        assert int(slab.device.max()) == int(slab.device.min()) == value
        slab.device.fill_(value + 100)
        torch.cuda.synchronize()
        assert int(slab.host[-1]) == int(slab.host[0]) == value + 100
    cuda.backend.free_host(slab)


def test_a_model_on_the_device_is_refused() -> None:
    model = torch.nn.Linear(2, 2, device="cuda")
    with pytest.raises(mf.FerryError, match=r"is on cuda:0; expected a model on the CPU"):
        mf.ferry(model, torch.optim.AdamW(model.parameters()))
