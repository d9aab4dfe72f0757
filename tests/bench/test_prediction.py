"""Predicted and measured iteration times of three plans, on the CPU backend at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from memferry_ascend.bench import prediction


def test_it_predicts_and_measures_three_plans(tmp_path: Path) -> None:
    prediction.main(f"--model tiny --backend cpu --steps 4 --warmup 1 --rounds 1 --out {tmp_path}".split())
    found = json.loads((tmp_path / "prediction-tiny.json").read_text())
    assert list(found["plans"]) == ["all-gfgb", "paper", "search"]
    for plan in found["plans"].values():
        assert plan["predicted"] > 0 and len(plan["steps"]) == 4
        assert plan["error"] == pytest.approx(plan["predicted"] / plan["measured"] - 1)
    assert found["plans"]["search"]["predicted"] <= min(p["predicted"] for p in found["plans"].values()) * (
        1 + 1e-9
    )


@pytest.mark.parametrize(
    ("measured", "predicted", "right"),
    [((1.0, 2.0), (1.0, 3.0), True), ((1.0, 2.0), (3.0, 1.0), False), ((1.0, 1.01), (3.0, 1.0), True)],
)
def test_ranks(measured: tuple[float, float], predicted: tuple[float, float], right: bool) -> None:
    """Plans measured within 2 % of each other may be predicted in any order."""
    outcomes: dict[str, Any] = {
        name: prediction.Outcome(SimpleNamespace(predicted_period=p), [m] * 4)  # type: ignore[arg-type]
        for name, m, p in zip("ab", measured, predicted, strict=True)
    }
    assert prediction.ranked(outcomes)[0] is right
