"""Kill short training runs by SIGKILL at random points, resume each until it is done, and compare.

    python tools/campaign.py --runs 1000 --out docs/benchmarks/campaign.json

A run trains a tiny GPT with the engine on the CPU backend and saves a checkpoint, asynchronously, every other step. It
is killed at a random moment of its life: by the clock (uniformly over an uninterrupted run's time), or at a random step
of saving (after so many bytes of the state file, before an fsync, before or after a rename, while an old checkpoint is
deleted), each half of the time. After every kill the newest checkpoint must be readable and whole. The run is then
resumed, and perhaps killed again, up to three times; at the end its metrics must be those of an uninterrupted run, bit
for bit, and so must its last checkpoint.

Runs are forked from a parent that has imported everything and started no thread, which makes one take a fraction of a
second. The numbers are true counts of what happened; nothing is extrapolated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from memferry_ascend import __version__ as version
from memferry_ascend import cli, files
from memferry_ascend.train import checkpoints, metrics, models, plots
from memferry_ascend.train import options as train_options

TEXT = b"the quick brown fox jumps over the lazy dog. " * 60
STEPS, EVERY, KILLS = 8, 2, 3
SHAPE = models.Shape(layers=2, width=16, heads=2, context=16)
IGNORED = ("tokens_per_s", "device_bytes", "host_bytes")


def arguments(folder: Path, out: Path, optimizer_steps: int = STEPS) -> list[str]:
    words = f"train --model gpt-campaign --steps {optimizer_steps} --batch 2 --eval-every 4 --eval-batches 1"
    words += (
        f" --backend cpu --planner rules --precision bf16 --save-every {EVERY} --keep 2 --threads 1 --json"
    )
    return [*words.split(), "--text", str(folder / "text"), "--out", str(out)]


class KillInSaving:
    """Kills this process at the `event`-th event of saving: a write of the state file, an fsync, a rename, a delete."""

    def __init__(self, event: int) -> None:
        self.left = event
        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            result = function(*args, **kwargs)
            self.tick()
            return result

        return call

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run(words: list[str], kill: dict[str, Any] | None) -> tuple[str, float]:
    """One process; how it ended ("done", "killed", or what it printed) and its life in seconds."""
    began = time.perf_counter()
    report, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(report)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(writer, 2)
            torch.set_num_threads(1)
            if kill is not None and kill["how"] == "event":
                _kill_in_saving(kill["at"])
            code = cli.main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    if kill is not None and kill["how"] == "clock":
        # From outside, so that it can hit native code and file system calls as well.
        _sleep_or_exit(pid, kill["at"])
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with os.fdopen(report) as stream:
        said = stream.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    return {0: "done", -signal.SIGKILL: "killed"}.get(code, f"exit {code}: {said.strip()[-800:]}"), seconds


def count_events(words: list[str]) -> int:
    """How many events of saving an uninterrupted run has."""
    report, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        torch.set_num_threads(1)
        killer = _kill_in_saving(0)
        cli.main(words)
        os.write(writer, str(-killer.left).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(report) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return int(said)


def _sleep_or_exit(pid: int, seconds: float) -> None:
    """Wait for the child's end, at most so long."""
    fd = os.pidfd_open(pid)
    try:
        select.select([fd], [], [], seconds)
    finally:
        os.close(fd)


def _kill_in_saving(event: int) -> KillInSaving:
    killer = KillInSaving(event)
    replacing = files.replacing

    class Stream:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def write(self, data: Any) -> int:
            half = len(data) // 2
            self._stream.write(data[:half])
            self._stream.flush()  # half a record is really in the file
            killer.tick()
            return half + self._stream.write(data[half:])

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    @contextmanager
    def counted(path: Path) -> Any:
        with replacing(path) as stream:
            yield Stream(stream) if path.name == "state.pt" else stream

    files.replacing = counted  # type: ignore[assignment]
    return killer


def recorded(out: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if k not in IGNORED}
        for record in metrics.read(out / "metrics.jsonl")
    ]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def campaign(runs: int, seed: int, folder: Path, most_seconds: float = float("inf")) -> dict[str, Any]:
    """Runs the campaign in `folder`; the summary. Stops early, saying so, after `most_seconds`."""
    train_options.PRESETS["gpt-campaign"] = SHAPE
    plots.save_loss = lambda *_: None  # 0.3 s a run, and nothing that a resumed run depends on
    models.build(SHAPE)  # imports, once, what building a model on the meta device imports
    (folder / "text").write_bytes(TEXT)
    rng = random.Random(seed)
    began = time.perf_counter()
    whole = folder / "whole"
    lives = []
    for _ in range(3):
        shutil.rmtree(whole, ignore_errors=True)
        ended, life = run(arguments(folder, whole), None)
        assert ended == "done", ended
        lives.append(life)
    life = min(lives)
    events = count_events([*arguments(folder, whole), "--overwrite"])
    want = recorded(whole)
    final = checkpoints.load(checkpoints.find(whole))[0]
    counts: Counter[str] = Counter()
    resumed_at: Counter[int] = Counter()
    problems: list[str] = []
    done = 0
    for number in range(runs):
        if time.perf_counter() - began > most_seconds:
            break
        out = folder / f"run-{number}"
        for attempt in range(KILLS + 1):
            kill: dict[str, Any] | None = None
            if attempt == 0 or (attempt < KILLS and rng.random() < 0.3):
                by_clock = rng.random() < 0.5
                at = rng.uniform(0, life) if by_clock else rng.randint(1, events)
                kill = {"how": "clock" if by_clock else "event", "at": at}
            newest = checkpoints.latest(out / "checkpoints")
            words = arguments(folder, out)
            if newest is not None:
                words = ["train", "--resume", str(out), "--json"]
                resumed_at[checkpoints.step_of(newest)] += 1
            elif attempt:
                words.append("--overwrite")
                resumed_at[0] += 1
            ended, _ = run(words, kill)
            if ended == "killed":
                assert kill is not None
                counts[f"killed by {kill['how']}"] += 1
                torn = list((out / "checkpoints").glob(".tmp-*")) if (out / "checkpoints").is_dir() else []
                counts["killed while a checkpoint was unfinished"] += bool(torn)
            elif ended == "done":
                counts["ended before its kill"] += kill is not None
            elif "nothing is left" in ended:  # killed after its last checkpoint: there is nothing to do
                counts["was finished when killed"] += 1
                ended = "done"
            else:
                problems.append(f"run {number}, attempt {attempt}: {ended}")
                break
            for checkpoint in checkpoints.complete(out / "checkpoints"):
                try:
                    checkpoints.load(checkpoint)
                    counts["checkpoints read"] += 1
                except Exception as error:
                    problems.append(
                        f"run {number}, attempt {attempt}: {checkpoint.name} is unreadable: {error}"
                    )
            if ended == "done":
                break
        if recorded(out) != want:
            got = recorded(out)
            first = next(((a, b) for a, b in zip(want, got, strict=False) if a != b), (len(want), len(got)))
            problems.append(f"run {number}: metrics differ from the uninterrupted run's: {first}")
        elif not equal(checkpoints.load(checkpoints.find(out))[0], final):
            problems.append(f"run {number}: the last checkpoint differs from the uninterrupted run's")
        else:
            counts["identical to the uninterrupted run"] += 1
        done += 1
        shutil.rmtree(out, ignore_errors=True)
    return {
        "runs_asked": runs,
        "runs": done,
        "kills": counts["killed by clock"] + counts["killed by event"],
        "counts": dict(sorted(counts.items())),
        "resumed_at_step": {str(k): v for k, v in sorted(resumed_at.items())},
        "problems": problems,
        "seconds": round(time.perf_counter() - began, 1),
        "uninterrupted_run_seconds": round(life, 3),
        "saving_events_of_a_run": events,
        "seed": seed,
        "steps": STEPS,
        "save_every": EVERY,
        "versions": {
            "memferry_ascend": version,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop early after so long")
    parser.add_argument("--out", type=Path, help="write the summary here (JSON)")
    given = parser.parse_args()
    memory = Path(
        "/dev/shm"
    )  # a killed process loses nothing that it wrote, on disk or in memory: the quicker one
    place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=place) as folder:
        summary = campaign(given.runs, given.seed, Path(folder), given.minutes * 60)
    if given.out is not None:
        files.write_json(given.out, summary)
    print(json.dumps(summary, indent=2))
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
