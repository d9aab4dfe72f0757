"""`memferry train` under torchrun: one voice, and all ranks fail together and resume where they were."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


Run = tuple[list[str], dict[str, str]]
"""Words of `memferry`, and what is in the environment besides."""


def tiny(folder: Path, size: int, runs: list[Run]) -> list[tuple[list[int], list[str]]]:
    """Exit codes and outputs by rank, by run. After a death every rank must be gone in time."""
    folder.mkdir(exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    subprocess.run(
        [sys.executable, "-m", "parallel.train_tiny", str(size), str(folder)],
        env=environment({}),
        check=True,
        timeout=90 * len(runs),
        capture_output=True,
    )
    out = []
    for number, (codes, seconds) in enumerate(json.loads((folder / "results.json").read_text())):
        if seconds is not None:
            print(f"the last rank was gone {seconds:.2f} s after the death")
            assert seconds < BOUND
        out.append((codes, [(folder / f"{number}-rank-{r}.txt").read_text() for r in range(size)]))
    return out


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in r.items() if k != "tokens_per_s"} for r in metrics.read(folder / "metrics.jsonl")
    ]


class Death:
    """One rank of three is killed at a random point, and the job resumed."""

    def __init__(self, folder: Path, seed: int, **env: str) -> None:
        rng = random.Random(seed)
        self.victim, at = rng.randrange(3), rng.randrange(3, STEPS - 1)
        self.out = folder / f"killed{seed}"
        training = words(folder, self.out.name, "--steps", str(STEPS), "--save-every", "2")
        self.runs: list[Run] = [
            (training, {"TINY_DIE": f"{self.victim} {at} {rng.random() * 0.1}", **env}),
            (["train", "--resume", str(self.out)], {}),
        ]

    def check(self, results: list[tuple[list[int], list[str]]], want: list[dict[str, Any]]) -> None:
        codes, said = results[0]
        assert codes[self.victim] == -signal.SIGKILL
        for rank in {0, 1, 2} - {self.victim}:
            assert codes[rank] == 2, said[rank]
            lost = (
                f"rank {self.victim} no longer answers"
                if self.victim
                else "the rank that holds the store (rank 0"
            )
            assert lost in said[rank]
        codes, said = results[1]
        assert codes == [0, 0, 0], said
        assert recorded(self.out) == want
        assert "tokens/s" in said[0]
        assert said[1].strip() == said[2].strip() == ""


def test_torchrun_speaks_with_one_voice_and_resumes_after_a_death(tmp_path: Path) -> None:
    death = Death(tmp_path, 9, TINY_LATE="1", TINY_PATIENCE="2")
    failing: Run = (words(tmp_path, "failed", "--steps", "4"), {"TINY_FAIL": "1"})
    with ThreadPoolExecutor(1) as beside:
        forked = beside.submit(tiny, tmp_path / "forked", 3, [*death.runs, failing])
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
    *died, failed = forked.result()
    death.check(died, want)
    _names_the_first_cause(*failed)


def _names_the_first_cause(codes: list[int], said: list[str]) -> None:
    assert codes == [2, 2, 2]
    assert "the memory of the moments is gone" in said[1]
    for rank in (0, 2):
        assert "first cause: rank 1: " in said[rank]
        assert "the memory of the moments is gone" in said[rank]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_deaths_at_random_points(tmp_path: Path, seed: int) -> None:
    death = Death(tmp_path, seed)
    whole: Run = (words(tmp_path, "whole", "--steps", str(STEPS)), {})
    first, *died = tiny(tmp_path / "forked", 3, [whole, *death.runs])
    assert first[0] == [0, 0, 0], first[1]
    death.check(died, recorded(tmp_path / "whole"))
