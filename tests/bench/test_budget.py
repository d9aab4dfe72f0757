"""The curves over reserve and budget, and the climb to the largest model, on the CPU backend at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from memferry_ascend.bench import budget, measure, size
from memferry_ascend.bench.measure import GIB, Timing
from memferry_ascend.bench.systems import Setup


def test_the_curves_run_and_every_budget_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    words = "--model tiny --backend cpu --iterations 2 --warmup 1 --budgets 3"
    assert budget.main([*words.split(), "--json", str(out), "--plot", str(tmp_path / "curves.png")]) == 0
    (found,) = json.loads(out.read_text())["models"]
    assert [r["reserve"] for r in found["reserve"]] == list(budget.RESERVES)
    assert found["budget"][0]["budget"] == found["smallest"]
    assert [r["kept"] for r in found["budget"]] == [True] * 5
    # More of the gradients kept, more memory; a larger budget, more of it used.
    for rows in (found["reserve"], found["budget"]):
        peaks = [r["peak_device_gib"] for r in rows]
        assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    assert found["findings"]["budgets_not_kept"] == found["findings"]["rows_that_failed"] == []
    assert (tmp_path / "curves.png").stat().st_size > 0


def point(**fields: Any) -> dict[str, Any]:
    return {"iter_ms": 1.0, "peak_device_gib": 1.0, "status": "ok", "reason": "", "kept": True, **fields}


def test_findings_say_where_the_curves_fall_short() -> None:
    document = {
        "plain": point(iter_ms=8.0),
        "reserve": [point(reserve=r, peak_device_gib=p) for r, p in ((0.0, 1.0), (0.5, 1.6), (1.0, 2.0))],
        "budget": [
            point(budget=1, iter_ms=12.0),
            point(budget=2, iter_ms=13.0, kept=False),
            point(budget=3, iter_ms=10.0),
            point(budget=4, iter_ms=None, status="failed", reason="why"),
        ],
    }
    found = budget.findings(document)
    assert found["peak_over_reserve_off_the_line"] == pytest.approx(0.1)
    assert found["budgets_slower_than_a_smaller_one"] == found["budgets_not_kept"] == [2]
    assert found["last_budget_over_plain"] == 1.25
    assert found["rows_that_failed"] == ["why"]


def test_a_peak_over_the_budget_is_seen() -> None:
    assert budget.kept({"peak_device_gib": 1.0, "peak_device_gib_with_start": 2.0}, GIB) is False
    assert budget.kept({"peak_device_gib": 1.0}, GIB) is True
    assert budget.kept({"peak_device_gib": None}, GIB) is None


@pytest.mark.usefixtures("less_work")
def test_a_climb_ends_at_what_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing(warmup=1, iterations=2, profile=False)
    capped = Setup(2, 8, backend="cpu", threads=1, device_cap=1 << 20)
    asked: list[Setup] = []

    def spawn(
        name: str, system: str, setups: list[Setup], timing: Timing, timeout: float
    ) -> list[dict[str, Any]]:
        asked.extend(setups)
        return [measure.row(name, system, s, timing) for s in setups]

    monkeypatch.setattr(size, "spawn", spawn)
    rows = size.climb("memferry-backward", ["tiny", "tiny"], capped, timing, 60)
    rows += size.climb("native-offload", ["tiny", "gpt2-h64-l1x", "tiny"], capped, timing, 60)
    assert [r["status"] for r in rows] == [
        "ok",
        "ok",
        "ok",
        "failed",
    ]  # a name that is no model ends the climb
    assert asked[0].device_memory == str(1 << 20) and asked[0].planner == "rules"
    found = size.findings(rows)
    parameters = rows[0]["parameters"]
    assert {k: v["largest"] for k, v in found.items()} == {
        "memferry-backward": parameters,
        "native-offload": parameters,
    }
    assert found["native-offload"]["host_bytes_a_parameter"] == 14
    assert "gpt2-h64-l1x" in found["native-offload"]["ended_by"]
    ratio = rows[2]["iter_ms"] / rows[1]["iter_ms"]
    assert found["native-offload"]["iteration_over_the_first_system"] == pytest.approx(ratio)
