"""Several ranks, an emulated NPU each: `launch` runs the cases of tests/parallel/world.py there.

All processes are forked from one that has imported torch_npu. Every rank's streams are delayed in a way of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import emulator
import torch

TESTS = Path(__file__).resolve().parents[1]
Cases = list[tuple[str, dict[str, Any]]]
Worlds = Sequence[tuple[int, dict[str, str], Cases, Path]]
"""Ranks, what is in their environment besides, what they run, and where results go."""


def program(call: str) -> list[str]:
    """Python's arguments for an expression of this module that gives an exit code."""
    paths = [str(TESTS), str(TESTS / "ascend")]
    return ["-c", f"import sys; sys.path[:0] = {paths!r}\nimport ranks\nsys.exit(ranks.{call})"]


def launch(worlds: Worlds, cache: Path, jitter: int = 0) -> list[list[list[Any]]]:
    """Results by world, case and rank. One task in eight waits up to `jitter` microseconds."""
    for _, _, cases, folder in worlds:
        (folder / "cases.json").write_text(json.dumps(cases))
    learn(cache)
    starts = [(size, more, str(folder)) for size, more, _, folder in worlds]
    said = emulator.run(
        program(f"run({starts!r}, {jitter})"),
        devices=4,
        hbm=1 << 30,
        timeout=240.0,
        environ={"MEMFERRY_CACHE": str(cache), "MEMFERRY_BACKEND": "ascend"},
    )
    print(said.stdout)
    out = []
    for size, _, _, folder in worlds:
        by_rank = [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(size)]
        out.append([list(results) for results in zip(*by_rank, strict=True)])
    return out


def learn(cache: Path) -> None:
    """What the device can do goes into the cache, so that not every rank tries it."""
    call = "__import__('memferry_ascend').init(backend='ascend').backend.capabilities()"
    emulator.run(["-c", call], environ={"MEMFERRY_CACHE": str(cache)})


def end_with_parent() -> None:
    """Tests that are stopped leave nothing running."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(starts: Sequence[tuple[int, dict[str, str], str]], jitter: int) -> int:
    """In the emulated process: fork the ranks of all worlds and wait."""
    from parallel import world

    def one(more: dict[str, str], folder: str) -> Callable[[int], int]:
        def main(rank: int) -> int:
            end_with_parent()
            os.environ |= {"EMU_JITTER": f"{jitter}:{rank + 1}"} | more
            ctypes.CDLL("libascendcl.so").emuReadSettings()
            return world.main(Path(folder))

        return main

    pids = [pid for size, more, folder in starts for pid in world.start(size, one(more, folder))]
    return max(map(abs, world.wait(pids)))


# -- ranks that end as programs do -------------------------------------------------------------------------------------
def endings(folder: str, kinds: Sequence[str]) -> int:
    """For each of `kinds` two ranks train; how they ended goes to FOLDER/KIND-RANK.json, what they said to .txt."""
    import time

    from parallel.world import free_port, torchrun_environment

    children = {}
    for kind in kinds:
        port = free_port()
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                end_with_parent()
                os.environ.update(torchrun_environment(rank, 2, port))
                out = os.open(f"{folder}/{kind}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1), os.dup2(out, 2)
                script(kind)
                sys.exit(0)  # as programs end, not by os._exit
            children[pid] = (kind, rank)
    for _ in range(len(children)):
        pid, status = os.wait()
        kind, rank = children[pid]
        ended = {"code": os.waitstatus_to_exitcode(status), "time": time.monotonic()}
        Path(folder, f"{kind}-{rank}.json").write_text(json.dumps(ended))
    return 0


def script(kind: str) -> None:
    """A training program. At its third step rank 1 is `killed` before it gathers what it updated, which leaves the other
    rank's device waiting for it, or is killed `late`, when the other's device is free, or `raises`. `unclosed` ends without
    closing anything; of `destroyed` rank 0 outlives its process groups and rank 1."""
    from harness import make_model, small_units
    from parallel.world import plan_for, rows_of

    import memferry_ascend as mf
    from memferry_ascend import causes, runtime, sharded_units, vigil

    torch.set_num_threads(1)
    causes.PATIENCE = vigil.GRACE = 2.0
    rt = runtime.init(backend="ascend")
    model = make_model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with small_units(1500):
        engine = mf.ferry(model, optimizer, config=mf.Config(precision="fp32"), plan=plan_for(model, "GFGB"))
    assert rt.ranks is not None and rt.ranks._vigil is not None

    def close() -> None:
        with contextlib.suppress(mf.FerryError):  # what had failed before
            engine.close()
        print("closed", flush=True)

    with contextlib.ExitStack() as stack:
        if kind == "late":
            stack.callback(close)
        for step in range(5):
            if step == 2 and rt.rank == 1:
                if kind == "killed":
                    sharded_units.ShardedResident.spread = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
                elif kind == "late":
                    engine.synchronize()
                    os.kill(os.getpid(), signal.SIGKILL)
                elif kind == "raises":
                    raise ValueError("the data set of rank 1 is damaged")
            elif step == 2 and kind == "late":
                engine.synchronize()
                rt.ranks._vigil._thread.join()  # has heard of it, and found the device free
            loss = engine.model(rows_of(step).to(rt.backend.device))
            print("loss", float(loss.detach()), flush=True)
            loss.backward()
            engine.optimizer.step()
    if kind == "destroyed":
        engine.close()
        torch.distributed.destroy_process_group()
        if rt.rank == 0:
            rt.ranks._vigil._thread.join()  # rank 1 has ended
            assert rt.ranks._vigil.heard is None
    print("the end", flush=True)


# -- `memferry train`, killed and resumed -------------------------------------------------------------------------------
def trained(size: int, folder: str) -> int:
    """parallel/train_tiny.py in the emulated process."""
    from parallel import train_tiny

    command = train_tiny.run

    def run(words: list[str]) -> int:
        end_with_parent()
        return command(words)

    train_tiny.run = run
    sys.argv = ["train_tiny", str(size), folder]
    return train_tiny.main()
