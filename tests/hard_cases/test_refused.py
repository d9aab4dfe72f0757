"""What ordinary training code may not do, and that nothing is changed by having tried."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memferry_ascend as mf
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import Mode

from .helpers import FP32, adamw, branches, ferry, plan_for, tokens


def test_what_is_refused_before_ferry() -> None:
    model = branches()
    before = copy.deepcopy(model.state_dict())
    halves = [list(model.parameters())[:4], list(model.parameters())[4:]]
    with pytest.raises(FerryError, match="several optimizers"):
        mf.ferry(model, [adamw(h) for h in halves])  # type: ignore[arg-type]
    with pytest.raises(FerryError, match="trainable but not in the optimizer"):
        mf.ferry(model, adamw(halves[0]))
    with pytest.raises(FerryError, match="LBFGS"):
        mf.ferry(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(FerryError, match="SparseAdam"):
        mf.ferry(model, torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(FerryError, match=r"torch.compile"):
        mf.ferry(torch.compile(model), adamw(model.parameters()))
    inner = branches()
    inner.parts[1].compile()
    with pytest.raises(FerryError, match=r"torch.compile'd one \(at 'parts.1'\)"):
        mf.ferry(inner, adamw(inner.parameters()))
    norm = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    with pytest.raises(FerryError, match="max_norm"):
        mf.ferry(norm, adamw(norm.parameters()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with ferry(model), pytest.raises(FerryError, match="ferried already"):
        ferry(model)


def test_what_is_refused_after_ferry(mode: Mode | str) -> None:
    model = branches()
    optimizer = adamw(model.parameters())
    engine = mf.ferry(model, optimizer, config=FP32, plan=plan_for(model, mode))
    x = tokens(1)[0]
    with engine:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(FerryError, match="autocast"):
            engine.model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            engine.model(x)
        engine.model(x).backward()
        with pytest.raises(FerryError, match="original optimizer"):
            optimizer.step()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(engine.model(x)).backward()
        with pytest.raises(FerryError, match="GradScaler"):
            scaler.step(engine.optimizer)
        with pytest.raises(FerryError, match="add_param_group"):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(FerryError, match="assign=True"):
            engine.model.load_state_dict(branches().state_dict(), assign=True)
        engine.optimizer.zero_grad()
        with pytest.raises(FerryError, match="at least one parameter with a gradient"):
            engine.optimizer.step()
        engine.model.head.requires_grad_(False)
        engine.model(x).backward()
        with pytest.raises(FerryError, match="requires_grad was toggled"):
            engine.optimizer.step()
        engine.model.head.requires_grad_(True)
        engine.optimizer.zero_grad()
        engine.model(x).backward()
        engine.optimizer.step()
    with pytest.raises(FerryError, match="closed"):
        engine.optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    model(x).backward()
    optimizer.step()  # the model and its optimizer are plain again
