"""A short campaign of kills; the full one's summary is docs/benchmarks/campaign.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_killed_runs_resume_to_the_same_end(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/campaign.py"), "--runs", "5", "--seed", "1"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "summary.json")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["problems"] == []
    assert summary["runs"] == summary["counts"]["identical to the uninterrupted run"] == 5
    assert summary["kills"] >= 3 and summary["counts"]["checkpoints read"] > 0
