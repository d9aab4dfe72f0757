"""Peak device memory under checkpointing, in modes that move units and in one that does not."""

from __future__ import annotations

import gc

import pytest
import torch
from harness import plan_of
from test_activation_memory import Blocks

import memferry_ascend as mf
from memferry_ascend.planner import Mode


def peak(mode: Mode, how: str) -> int:
    """Bytes above what is held between steps, at the peak of a later step."""
    torch.manual_seed(0)
    model = Blocks(how)
    engine = mf.ferry(model, torch.optim.AdamW(model.parameters()), plan=plan_of(model, mode))
    x = torch.randn(4096, 64, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for step in range(4):
        if step == 2:
            engine.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        engine.model(x).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    found = torch.cuda.max_memory_allocated() - before
    engine.close()
    gc.collect()
    return found


@pytest.mark.parametrize("how", ["plain", "reentrant"])
@pytest.mark.parametrize("mode", [Mode.DFGB, Mode.STREAM])
def test_checkpointing_saves_as_much_as_without_moves(moves: None, mode: Mode, how: str) -> None:
    resident, moving, all_kept = peak(Mode.GFGB, how), peak(mode, how), peak(mode, "none")
    assert all_kept > 2 * resident
    assert moving <= resident * 1.02
