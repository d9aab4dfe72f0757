"""Saving while native jobs update: they never call back, so the copies are made by the thread that calls `step()`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import batches, make_model, plan_of, small_units
from test_saving import same
from torch import nn

import memferry_ascend as mf
from memferry_ascend import runtime, torchfile
from memferry_ascend.nativejobs import NativeJobs
from memferry_ascend.planner import Mode

EMULATED = {"devices": 2, "environ": {"TASK_QUEUE_ENABLE": "0"}}
BATCHES = batches(9)


def ferry(model: nn.Module, mode: Mode) -> mf.Engine:
    runtime.init(backend="ascend")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with (
        small_units()
    ):  # one for each layer, so that training overtakes the writer in the middle of the model
        engine = mf.ferry(model, optimizer, plan=plan_of(model, mode), config=mf.Config(precision="bf16"))
    assert isinstance(engine._jobs, NativeJobs)
    return engine


def steps(engine: mf.Engine, data: list[torch.Tensor]) -> None:
    for x in data:
        engine.model(x.to(runtime.current().backend.device)).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


@pytest.mark.parametrize("mode", [Mode.GFGB, Mode.STREAM])
@pytest.mark.parametrize("staging", [None, 0])
def test_a_save_has_what_was_handed_over_before_it_and_nothing_after(
    mode: Mode, staging: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want: list[dict[str, Any]] = []
    engine = ferry(make_model(2), mode)
    for k in range(0, 9, 3):
        steps(engine, BATCHES[k : k + 3])
        want.append(engine.state_dict())
    engine.close()
    add = torchfile.TorchFile.add
    late = threading.Event()  # never set: every write is late

    def slow_add(this: torchfile.TorchFile, tensor: torch.Tensor) -> Any:
        late.wait(0.002)
        return add(this, tensor)

    monkeypatch.setattr(torchfile.TorchFile, "add", slow_add)
    engine = ferry(make_model(2), mode)
    engine._jobs.worker.delay(0.003, 7)
    saves = []
    for k in range(0, 9, 3):
        steps(engine, BATCHES[k : k + 3])
        saves.append(engine.save_async(tmp_path / f"{k}.pt", staging=staging))
    last = engine.state_dict()
    paths = [save.result() for save in saves]
    engine.close()
    assert same(last, want[-1])
    for path, state in zip(paths, want, strict=True):
        assert same(torch.load(path, weights_only=True), state)
