"""Two ranks with an emulated NPU each lend to each other: the bits of ranks that do not. Coordinated by gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emulator
import pytest
import ranks
import torch

EACH_OTHER = [[1], [0]]
RUNS: list[dict[str, Any]] = [
    {"wishes": [], "modes": "GFGB", "precision": "fp32"},
    {"wishes": EACH_OTHER, "modes": "GFGB", "precision": "fp32"},
    {"wishes": EACH_OTHER, "modes": "random", "precision": "fp32", "update": "backward"},
]


def test_ranks_that_lend_have_the_bits_of_ranks_that_do_not(tmp_path: Path, profile_cache: Path) -> None:
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")
    report = tmp_path / "report"
    cases: ranks.Cases = [("parallel.lending_cases:lent", run) for run in RUNS]
    cases += [("parallel.lending_cases:leaves_early", {"first": 1})]
    more = {"MEMFERRY_COLLECTIVES": "gloo", "EMU_REPORT": str(report)}
    (found,) = ranks.launch([(2, more, cases, tmp_path)], profile_cache, jitter=100)
    plain, *others, early = found
    for run, results in zip(RUNS[1:], others, strict=True):
        for rank, (got, want) in enumerate(zip(results, plain, strict=True)):
            assert got["losses"] == want["losses"], run
            for name, value in want["state"]["model"].items():
                assert torch.equal(got["state"]["model"][name], value), (run, name)
            assert got["moved"]["direct"] > 0 and got["moved"][f"via npu{1 - rank}"] > 0
            assert got["lent"] and not got["told"] and not got["threads"]
    for rank, got in enumerate(early):
        assert got["moved"][f"via npu{1 - rank}"] > 0 and not got["threads"]
    said = report.read_text().splitlines() if report.exists() else []
    # Asking which layer kinds may read host memory meets operators that nobody emulates.
    assert [line for line in said if "is not emulated" not in line] == []
