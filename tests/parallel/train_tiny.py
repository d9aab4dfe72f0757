"""`memferry` with a model that trains in no time, on several ranks; one of them may be told to die.

python -m parallel.train_tiny SIZE FOLDER    forks SIZE ranks for each entry of FOLDER/runs.json, one after the other; an
entry is the words of `memferry` and what to add to the environment. Each rank's output goes to FOLDER/RUN-rank-N.txt, exit
codes and the seconds from a death until the last rank was gone to FOLDER/results.json. With TINY_DIE="RANK STEP SECONDS"
that rank is killed so many seconds after it began that step; with TINY_LATE=SECONDS ranks other than 0 notice so much
later; TINY_PATIENCE is in place of theirs. Under torchrun: python -m parallel.train_tiny WORD...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from memferry_ascend import causes, cli, runtime
from memferry_ascend.train import command, loop, options

from .world import fork

command.train_options.PRESETS["gpt-tiny"] = loop.models.Shape(layers=2, width=16, heads=2, context=16)
assert "gpt-tiny" in options.PRESETS


def run(words: list[str]) -> int:
    """The command, with this rank's death arranged."""
    torch.set_num_threads(1)
    causes.PATIENCE = float(os.environ.get("TINY_PATIENCE", causes.PATIENCE))
    if "TINY_DIE" in os.environ:
        rank, at, seconds = os.environ["TINY_DIE"].split()
        before = loop.Run._train_step

        def die() -> None:
            Path(os.environ["TINY_DIED"]).write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        def step(self: Any) -> torch.Tensor:
            if self.world.rank == int(rank) and self.step == int(at):
                threading.Timer(float(seconds), die).start()
            return before(self)

        loop.Run._train_step = step  # type: ignore[method-assign]
    if "TINY_LATE" in os.environ:
        ask = causes.FirstCause._ask_around

        def late(self: causes.FirstCause, error: BaseException) -> None:
            time.sleep(float(os.environ["TINY_LATE"]) if self._rank else 0)
            ask(self, error)

        causes.FirstCause._ask_around = late  # type: ignore[method-assign]
    if "TINY_FAIL" in os.environ:

        def fail(point: str) -> None:
            if point == "update" and runtime.current().rank == int(os.environ["TINY_FAIL"]):
                raise OSError("the memory of the moments is gone")

        runtime.init(backend="cpu").backend.disturb = fail
    return cli.main(words)


def main() -> int:
    if "RANK" in os.environ:
        return run(sys.argv[1:])
    import torch._dynamo  # noqa: F401  # optimizers do at their first step: once here, instead of in every rank

    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    results = []
    before = dict(os.environ)
    for number, (words, more) in enumerate(json.loads((folder / "runs.json").read_text())):
        died = folder / f"{number}-died"
        os.environ.clear()
        os.environ.update(before | more | {"TINY_DIED": str(died)})
        outputs = [folder / f"{number}-rank-{r}.txt" for r in range(size)]
        codes = fork(size, lambda _rank, words=words: run(words), outputs)  # type: ignore[misc]
        seconds = time.monotonic() - float(died.read_text()) if died.exists() else None
        results.append((codes, seconds))
    (folder / "results.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
