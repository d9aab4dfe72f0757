"""Gradient placements, device updates and the byte budget on a CUDA device, with deterministic algorithms."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness import (
    ALL_POINTS,
    DeviceDelays,
    Result,
    assert_same,
    batches,
    make_model,
    plan_of,
    poisoned,
    small_units,
    train,
)
from placements import Conv1D, direct_model, placed_plan, tables
from torch import nn

import memferry_ascend as mf
from memferry_ascend import budget, direct
from memferry_ascend.planner import Grad, LayerPlan, Mode, Plan

DEVICE: dict[str, Any] = {"grad": "keep", "update": "device"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_placements(seed: int, precision: str, micro: int, declared: bool) -> None:
    for make in (lambda: make_model(seed), lambda: direct_model(seed, twice=seed % 2 == 1)):
        model = make()
        config = mf.Config(precision=precision, accumulate=micro)
        want = train(model, plan_of(model, Mode.GFGB), config=config, micro=micro, steps=3, serial=True)
        model = make()
        config = mf.Config(precision=precision, accumulate=micro if declared else 1)
        delays = DeviceDelays(ALL_POINTS, seed=seed, most=0.003)
        with poisoned():
            got = train(
                model, placed_plan(model, seed + 1), config=config, micro=micro, steps=3, disturb=delays
            )
        assert_same(want, got)


@pytest.mark.parametrize("placement", list(Grad))
@pytest.mark.parametrize("limit", [None, 0.1])
def test_update_in_backward(placement: Grad, limit: float | None) -> None:
    model = direct_model(1)
    want = train(model, plan_of(model, Mode.GFGB), config=mf.Config(max_grad_norm=limit), serial=True)
    model = direct_model(1)
    config = mf.Config(max_grad_norm=limit, update="backward")
    plan = plan_of(model, Mode.STREAM, grad=placement)
    delays = DeviceDelays(ALL_POINTS, seed=2, most=0.003)
    assert_same(want, train(model, plan, config=config, disturb=delays))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 100, 3071, 3073, 20_000])
@pytest.mark.parametrize("padding", [-1, 3])
def test_scattered_rows_have_the_bits_of_the_dense_gradient(
    dtype: torch.dtype, tokens: int, padding: int
) -> None:
    """torch has one kernel for up to 3072 indices and another, which sorts, for more."""
    rows, width = 1000, 96
    g = torch.Generator(device="cuda").manual_seed(tokens)
    indices = torch.randint(0, rows, (tokens,), generator=g, device="cuda")
    indices[: tokens // 3] = 3  # one row far more often than the others
    grad = torch.randn((tokens, width), generator=g, device="cuda").to(dtype)
    want = torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding, False)
    out = torch.full((rows, width), float("nan"), dtype=dtype, device="cuda")
    assert torch.equal(direct._scatter_rows(grad, indices, padding, out), want)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("grad", [Grad.STAGE, Grad.DIRECT])
def test_touched_rows_give_the_bits_of_the_dense_gradient(update: str, micro: int, grad: Grad) -> None:
    model = tables()
    config = mf.Config(accumulate=micro)
    plan = plan_of(model, Mode.GFGB, grad=Grad.KEEP)
    want = train(model, plan, config=config, micro=micro, serial=True)
    model = tables()
    config = mf.Config(accumulate=micro, update=update)
    delays = DeviceDelays(ALL_POINTS, seed=3, most=0.003)
    assert_same(
        want, train(model, plan_of(model, Mode.DHA, grad=grad), config=config, micro=micro, disturb=delays)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D", "LayerNorm", "RMSNorm", "Embedding"])
def test_direct_gradients_of_real_sizes_equal_autograds(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make: dict[str, Any] = {
        "Linear": lambda: nn.Linear(768, 3072),
        "Conv1D": lambda: Conv1D(3072, 768),
        "LayerNorm": lambda: nn.LayerNorm(768),
        "RMSNorm": lambda: nn.RMSNorm(768),
        "Embedding": lambda: nn.Embedding(30522, 768, padding_idx=0),
    }
    model = nn.Sequential(make[kind]())
    grads: dict[Grad, list[list[torch.Tensor]]] = {}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for grad in (Grad.STAGE, Grad.DIRECT):
        model = nn.Sequential(make[kind]())
        model.load_state_dict(state)
        precision = "fp32" if dtype is torch.float32 else "bf16"
        engine = mf.ferry(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0),
            config=mf.Config(precision=precision),
            plan=Plan((LayerPlan("0", Mode.GFGB, grad),)),
        )
        grads[grad] = []
        g = torch.Generator(device="cuda").manual_seed(1)
        for _ in range(3):
            if kind == "Embedding":
                x: torch.Tensor = torch.randint(0, 30522, (16, 512), generator=g, device="cuda")
            else:
                x = torch.randn(16, 512, 768, generator=g, device="cuda").to(dtype)
            engine.model(x).float().square().sum().backward()
            grads[grad].append([p.grad.clone() for p in model.parameters()])
            engine.optimizer.step()
        engine.close()
    for a, b in zip(grads[Grad.STAGE], grads[Grad.DIRECT], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Wide(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().square().mean()


def peak_of(plan: Plan, layers: int, width: int, steps: int = 4) -> tuple[int, int, list[float]]:
    """(allocator peak of the later steps, bytes held between steps, losses)."""
    torch.manual_seed(0)
    model = Wide(layers, width)
    engine = mf.ferry(model, torch.optim.AdamW(model.parameters()), plan=plan)
    backend = mf.current().backend
    x = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
    losses = []
    for step in range(steps):
        if step == 2:
            engine.synchronize()
            gc.collect()
            backend.reset_peak()
        loss = engine.model(x)
        loss.backward()
        engine.optimizer.step()
        losses.append(float(loss.detach()))
    engine.synchronize()
    peak, held = backend.memory_stats().peak, backend.memory_stats().allocated
    engine.close()
    del engine, model
    gc.collect()
    return peak, held, losses


def test_direct_layers_have_no_device_gradient() -> None:
    """Eight layers of 32 MiB: a gradient that existed for a moment would show in the peak."""
    layers, width = 8, 4096
    model = Wide(layers, width)
    peaks = {grad: peak_of(plan_of(model, Mode.GFGB, grad=grad), layers, width) for grad in Grad}
    one = 2 * width * width
    assert peaks[Grad.DIRECT][2] == peaks[Grad.STAGE][2] == peaks[Grad.KEEP][2]
    assert peaks[Grad.DIRECT][0] - peaks[Grad.DIRECT][1] < one
    assert peaks[Grad.STAGE][0] - peaks[Grad.STAGE][1] >= one
    assert peaks[Grad.KEEP][1] - peaks[Grad.DIRECT][1] >= layers * one


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_the_allocators_peak_stays_under_the_budget(share: float) -> None:
    """Activations are small here (64 rows of 2048) but measured: the plan must fit beside them."""
    sample = torch.ones(64, 2048, dtype=torch.bfloat16)
    layers, width = 12, 2048
    base = 96 << 20  # and the libraries' workspaces
    everything = 40 * layers * width * width
    torch.manual_seed(0)
    model = Wide(layers, width)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(mf.FerryError, match="smallest workable") as caught:
        mf.ferry(
            model, optimizer, sample_batch=sample,
            config=mf.Config(device_memory=1, planner="rules"),
        )  # fmt: skip
    least = int(str(caught.value).split("smallest workable device_memory is ")[1].split(" bytes")[0])
    limit = least + int(share * everything)
    backend = mf.current().backend
    gc.collect()
    torch.cuda.empty_cache()
    before = backend.memory_stats().allocated
    backend.reset_peak()
    engine = mf.ferry(
        model, optimizer, sample_batch=sample,
        config=mf.Config(device_memory=limit, planner="rules"),
    )  # fmt: skip
    x = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        engine.model(x).backward()
        engine.optimizer.step()
    engine.synchronize()
    peak = backend.memory_stats().peak - before
    need = budget.need(engine._units, slots=engine._sizing.slots)
    engine.close()
    assert peak <= limit + base, f"peak {peak}, limit {limit}, need {need}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_device_updates_have_the_hosts_bits(precision: str) -> None:
    assert mf.current().backend.fused_adam() is not None
    engines = []
    for fields in ({}, DEVICE):
        model = direct_model(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        engines.append(
            mf.ferry(
                model,
                optimizer,
                config=mf.Config(precision=precision),
                plan=plan_of(model, Mode.GFGB, **fields),
            )
        )
    host, device = engines
    for step, batch in enumerate(batches(4, device="cuda"), start=1):
        before = host.state_dict()
        device.load_state_dict(before)
        for engine in engines:
            engine.model(batch).backward()
        for engine in engines:
            engine.optimizer.step()
        a, b = host.state_dict(), device.state_dict()
        for name in a["model"]:
            assert torch.equal(a["model"][name], b["model"][name]), (step, name)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(a["optimizer"][name][key], b["optimizer"][name][key]), (step, name, key)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("limit", [None, 0.05])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_device_updates_train_as_host_updates(limit: float | None, update: str) -> None:
    def run(plan: Plan, model: nn.Module) -> Result:
        config = mf.Config(precision="fp32", max_grad_norm=limit, update=update)
        delays = DeviceDelays(ALL_POINTS, seed=1, most=0.003)
        with small_units():
            return train(model, plan, config=config, disturb=delays, steps=8)

    model = direct_model(2)
    want = run(plan_of(model, Mode.GFGB), model)
    for share in (0.5, 1.0):
        model = direct_model(2)
        got = run(placed_plan(model, 3, device=share), model)
        assert got.losses == pytest.approx(want.losses, rel=1e-4)


def test_a_meta_model_is_armed() -> None:
    with torch.device("meta"):
        model = Wide(4, 256)
    engine = mf.ferry(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    first = float(engine.model(x).detach())
    for _ in range(3):
        engine.model(x).backward()
        engine.optimizer.step()
    assert float(engine.model(x).detach()) < first
    engine.close()
