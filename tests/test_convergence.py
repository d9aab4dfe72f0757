"""Training ends where plain PyTorch with fp32 masters ends, whatever the optimizer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cpu")


def tool(name: str) -> Any:
    path = Path(__file__).parents[1] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"tools_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


convergence = tool("convergence")


@pytest.mark.pairwise
@pytest.mark.parametrize(("name", "clip", "accumulate"), convergence.cases())
def test_the_first_steps_are_the_same(name: str, clip: float | None, accumulate: int) -> None:
    row = convergence.compare(name, clip, accumulate, steps=6)
    assert row["largest_difference_of_a_step"] < 2e-3, row
    assert row["ferry_loss"] < row["first_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "clip", "accumulate"), convergence.cases())
def test_300_steps_end_at_the_same_loss(name: str, clip: float | None, accumulate: int) -> None:
    row = convergence.compare(name, clip, accumulate, steps=300)
    # Without clipping SGD, Adagrad and RMSprop are equal to the bit, and the native Adam is within rounding of torch's.
    # A clipped run's norm is summed in another order here; plain PyTorch alone ends up to 0.02 elsewhere when its limit
    # changes by a millionth (docs/benchmarks/convergence.json).
    tolerance = 0.04 if clip is not None else 0.02 if name.startswith("Adam") else 0.0
    assert row["ferry_loss"] == pytest.approx(row["plain_loss"], abs=tolerance, rel=0), row
    assert row["ferry_loss"] < row["first_loss"] - 1.0  # and it has learnt something
