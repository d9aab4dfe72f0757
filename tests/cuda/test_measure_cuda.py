"""Profiler, planning and recorder on a CUDA device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import assert_same, batches, make_model, plan_of, train
from torch import nn

import memferry_ascend as mf
from memferry_ascend import profiler, recording, runtime
from memferry_ascend.planner import Mode


def measured(model: nn.Module, batch: torch.Tensor, config: mf.Config) -> profiler.Measured:
    optimizer = torch.optim.AdamW(model.parameters())
    return profiler.profile(model, optimizer, batch, runtime.current(), config, refresh=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_profile_is_complete_and_leaves_the_model_alone(precision: str) -> None:
    model = make_model(3)
    before = [(p.data_ptr(), p.detach().clone(), p.dtype) for p in model.parameters()]
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    allocated = torch.cuda.memory_allocated()
    found = measured(model, batches(1)[0], mf.Config(precision=precision))
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(
        states[1], torch.cuda.get_rng_state()
    )
    for p, (address, value, dtype) in zip(model.parameters(), before, strict=True):
        assert p.data_ptr() == address and p.dtype == dtype and torch.equal(p, value)
    assert torch.cuda.memory_allocated() <= allocated + (32 << 20)  # cuBLAS keeps its workspace
    called = [x for x in found.profile.layers if x.dha_usable]
    assert called and all(x.t_fp > 0 and math.isfinite(x.t_bp_dha) for x in called)
    assert found.profile.base_bytes > 0
    assert found.profile.link.h2d > 1e9 and found.profile.link.latency < 1e-3


def test_a_gather_from_host_memory_beats_its_copy_and_a_product_does_not() -> None:
    """What DHA is for: a table of which few rows are read; and what it is not for."""
    model = nn.Sequential(nn.Embedding(50_000, 1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024))
    found = measured(model, torch.randint(0, 50_000, (8, 512)), mf.Config()).profile
    table, up, _ = found.layers
    assert table.t_fp_dha < table.t_fp + table.t_trans
    assert up.t_fp_dha > up.t_fp


def test_parameters_that_do_not_fit_are_streamed() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
    total = sum(p.numel() * 2 for p in model.parameters())
    batch = torch.randn(64, 2048, dtype=torch.bfloat16)
    found = measured(model, batch, mf.Config(device_memory=total))
    assert any("through a slot" in note for note in found.notes)
    assert all(x.t_fp > 0 and x.t_bp > 0 for x in found.profile.layers)


@pytest.mark.parametrize("seed", [0, 4])
def test_the_searched_plan_changes_no_bit(seed: int) -> None:
    model = make_model(seed)
    want = train(model, plan_of(model, Mode.GFGB), config=mf.Config(), serial=True)
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with mf.ferry(model, optimizer, sample_batch=batches(1)[0]) as engine:
        plan = engine.plan
        assert engine.profile is not None and plan.predicted_period
    got = train(model, plan, config=mf.Config())
    assert_same(want, got)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_recording_orders_streams_on_one_clock(mode: Mode, tmp_path: Path) -> None:
    model = make_model(4)
    engine = mf.ferry(model, torch.optim.AdamW(model.parameters()), plan=plan_of(model, mode))
    with engine:
        for k, batch in enumerate(batches(5, device=runtime.current().backend.device)):
            if k == 2:
                engine.recorder.start()
            engine.model(batch).backward()
            engine.optimizer.step()
        engine.recorder.save(tmp_path)
    found = recording.load(tmp_path)
    assert len(found.steps) == 3 and found.period > 0
    for name in {x.name for x in found.intervals if x.what == "update"}:
        downs = [x for x in found.intervals if x.what == "download" and x.name == name]
        updates = [x for x in found.intervals if x.what == "update" and x.name == name]
        assert len(downs) == len(updates) == 3
        for down, update in zip(downs, updates, strict=True):
            assert down.end <= update.end + 1e-3  # host and device clocks agree to better than that
    uploads = [x for x in found.intervals if x.what == "upload" and x.name]
    if mode is Mode.GFGB:
        assert len(uploads) == 3 * len({x.name for x in found.intervals if x.what == "update"})
    assert all(x.end >= x.start >= -1e-3 for x in found.intervals)
