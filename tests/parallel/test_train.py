"""`memferry train` under torchrun: one voice, and all ranks fail together and resume where they were."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memferry_ascend.train import metrics

from .world import environment

STEPS = 8
BOUND = 30
"""Seconds after a death within which no rank may be left: what users are promised, far above what it takes."""


def words(folder: Path, out: str, *more: str) -> list[str]:
    text = folder / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    common = f"train --text {text} --model gpt-tiny --context 16 --batch 12 --accumulate 2 "
    common += "--backend cpu --planner rules --clip 1"
    return [*common.split(), "--eval-every", "4", "--eval-batches", "2", "--out", str(folder / out), *more]


def tiny(folder: Path, size: int, *arguments: str, **env: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs by rank. After a death every rank must be gone in time."""
    for old in folder.glob("rank-*.txt"):
        old.unlink()
    subprocess.run(
        [sys.executable, "-m", "parallel.train_tiny", str(size), str(folder), *arguments],
        env=environment(env),
        check=True,
        timeout=90,
        capture_output=True,
    )
    found = json.loads((folder / "codes.json").read_text())
    if found["seconds"] is not None:
        print(f"the last rank was gone {found['seconds']:.2f} s after the death")
        assert found["seconds"] < BOUND
    return found["codes"], [(folder / f"rank-{r}.txt").read_text() for r in range(size)]


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in r.items() if k != "tokens_per_s"} for r in metrics.read(folder / "metrics.jsonl")
    ]


def test_torchrun_speaks_with_one_voice_and_resumes_after_a_death(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
            *("-m", "parallel.train_tiny", *words(tmp_path, "whole", "--steps", str(STEPS), "--json")),
        ],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    assert len(lines) == 1
    summary = json.loads(lines[0])
    assert summary["step"] == STEPS
    want = recorded(tmp_path / "whole")
    assert [r["step"] for r in want] == list(range(1, STEPS + 1))
    assert want[-1]["loss"] < want[0]["loss"]
    _dies_and_resumes(tmp_path, want, seed=9, TINY_LATE="1")


def _dies_and_resumes(tmp_path: Path, want: list[dict[str, Any]], seed: int, **env: str) -> None:
    rng = random.Random(seed)
    victim, at, seconds = rng.randrange(3), rng.randrange(3, STEPS - 1), rng.random() * 0.1
    arguments = words(tmp_path, f"killed{seed}", "--steps", str(STEPS), "--save-every", "2")
    codes, said = tiny(tmp_path, 3, *arguments, TINY_DIE=f"{victim} {at} {seconds}", **env)
    assert codes[victim] == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert codes[rank] == 2, said[rank]
        lost = f"rank {victim} no longer answers" if victim else "the rank that holds the store (rank 0"
        assert lost in said[rank]
    out = tmp_path / f"killed{seed}"
    codes, said = tiny(tmp_path, 3, "train", "--resume", str(out))
    assert codes == [0, 0, 0], said
    assert recorded(out) == want
    assert "tokens/s" in said[0]
    assert said[1].strip() == said[2].strip() == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_deaths_at_random_points(tmp_path: Path, seed: int) -> None:
    codes, said = tiny(tmp_path, 3, *words(tmp_path, "whole", "--steps", str(STEPS)))
    assert codes == [0, 0, 0], said
    _dies_and_resumes(tmp_path, recorded(tmp_path / "whole"), seed)


def test_the_first_cause_is_named_by_every_rank(tmp_path: Path) -> None:
    codes, said = tiny(tmp_path, 3, *words(tmp_path, "failed", "--steps", "4"), TINY_FAIL="1")
    assert codes == [2, 2, 2]
    assert "the memory of the moments is gone" in said[1]
    for rank in (0, 2):
        assert "first cause: rank 1: " in said[rank]
        assert "the memory of the moments is gone" in said[rank]
