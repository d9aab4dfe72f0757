"""Runs cases on several ranks: `launch` starts `python -m parallel.world SIZE FOLDER ...`, which forks one process a rank.

A case is a function of this module that takes keyword arguments and returns something `torch.save` can write; all cases
of one launch run one after the other in one process group.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import LENGTH, VOCAB, layer_names, make_model, small_units

import memferry_ascend as mf
from memferry_ascend import runtime
from memferry_ascend.backends.cpu import CpuStream
from memferry_ascend.placement import supports
from memferry_ascend.planner import LayerPlan, Mode, Plan

Case = tuple[str, dict[str, Any]]

ROWS = 24
"""Rows of a global batch: whole on 1, 2, 3 and 4 ranks."""


HANG = 200
"""Seconds after which a rank prints where its threads are and gives up."""


def environment(more: dict[str, str]) -> dict[str, str]:
    """For a process that runs modules of the tests."""
    here = Path(__file__).parent.parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MEMFERRY_BACKEND": "cpu"} | more


def torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(
    size: int, cases: list[Case], folder: Path, *, timeout: float = 240, **more: str
) -> list[list[Any]]:
    """Results by case, then by rank. Raises with the output of the ranks if any of them fails."""
    return launch_all([(size, cases, folder)], timeout=timeout, **more)[0]


def launch_all(
    worlds: list[tuple[int, list[Case], Path]], *, timeout: float = 240, **more: str
) -> list[list[list[Any]]]:
    """Several worlds at the same time, (ranks, cases, folder) each: starting Python and torch takes longer than a case."""
    for _, cases, folder in worlds:
        (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "parallel.world"),
            *(word for size, _, folder in worlds for word in (str(size), str(folder))),
        ],
        env=environment(more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise AssertionError((done.stdout + done.stderr)[-12000:])
    out = []
    for size, _, folder in worlds:
        by_rank = [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(size)]
        out.append([list(results) for results in zip(*by_rank, strict=True)])
    return out


def fork(size: int, call: Callable[[int], int], outputs: list[Path] | None = None) -> list[int]:
    """Run `call(rank)` in one process a rank, with torchrun's environment, and return exit codes (negative: signals).
    The processes share what this one has imported, which must not have started threads yet."""
    return wait(start(size, call, outputs))


def start(size: int, call: Callable[[int], int], outputs: list[Path] | None = None) -> list[int]:
    """`fork` without waiting: process numbers."""
    port = free_port()
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ.update(torchrun_environment(rank, size, port))
                if outputs is not None:
                    os.dup2(os.open(outputs[rank], os.O_WRONLY | os.O_CREAT), 1)
                    os.dup2(1, 2)
                code = call(rank)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    return children


def wait(children: list[int]) -> list[int]:
    """Their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


# -- what cases are made of --------------------------------------------------------------------------------------------
def rows_of(step: int) -> torch.Tensor:
    """The global batch of a step."""
    g = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=g)


def plan_for(model: torch.nn.Module, modes: str, seed: int = 0) -> Plan:
    """One mode for all layers, or "random"; STREAM where the device has no direct host access for a kind of layer."""
    rng = random.Random(seed)
    kinds, modules = runtime.current().backend.capabilities().dha_kinds, dict(model.named_modules())

    def mode(name: str) -> Mode:
        wanted = rng.choice(list(Mode)) if modes == "random" else Mode(modes)
        reads = wanted in (Mode.DHA, Mode.DFGB)
        return Mode.STREAM if reads and not supports(kinds, type(modules[name]).__name__) else wanted

    return Plan(tuple(LayerPlan(n, mode(n)) for n in layer_names(model)))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """One hash of all bytes."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach()
        if t.device.type == "npu":
            t = t * 1  # mapped host memory is no copy's operand there
        h.update(t.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


class RankDelays:
    """Sleeps at every hand-over, longest on rank `slow`."""

    def __init__(self, rank: int, seed: int, most: float) -> None:
        self._rng, self._lock = random.Random(seed * 100 + rank), threading.Lock()
        self._most = most * (4 if rank == seed % 4 else 1)

    def __call__(self, point: str) -> None:
        with self._lock:
            pause = self._rng.random() * self._most
        time.sleep(pause)


class LinkBytes:
    """Counts bytes that stream copies move, by stream."""

    def __init__(self) -> None:
        self.by_stream: dict[str, int] = {}

    def __enter__(self) -> LinkBytes:
        self._copy = CpuStream.copy
        counted = self

        def copy(stream: CpuStream, dst: torch.Tensor, src: torch.Tensor) -> None:
            counted.by_stream[stream.name] = counted.by_stream.get(stream.name, 0) + src.nbytes
            counted._copy(stream, dst, src)

        CpuStream.copy = copy  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        CpuStream.copy = self._copy  # type: ignore[method-assign]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
}


def train(
    seed: int = 0,
    modes: str = "GFGB",
    steps: int = 4,
    micro: int = 1,
    config: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
    delays: float = 0.0,
    unit_bytes: int = 1500,
    checkpoint: str | None = None,
    no_sync: bool = False,
    clip: float | None = None,
    zeros: bool = False,
    load: Any = None,
    first: int = 0,
) -> dict[str, Any]:
    """Train on this rank's rows of the global batches. The same call works with one rank."""
    rt = runtime.current()
    rank, size = rt.rank, rt.world
    model = make_model(seed, checkpoint=checkpoint)
    plan = plan_for(model, modes, seed)
    settings = mf.Config(**{"precision": "fp32", "accumulate": micro} | (config or {}))
    opt = OPTIMIZERS[optimizer](model.parameters())
    losses, hashes, norms = [], [], []
    with small_units(unit_bytes):
        engine = mf.ferry(model, opt, config=settings, plan=plan)
    try:
        if load is not None:
            engine.load_state_dict(load)
        if delays:
            rt.backend.disturb = RankDelays(rank, seed, delays)
        with LinkBytes() as link:
            for step in range(first, first + steps):
                total = torch.zeros((), device=rt.backend.device)
                each = ROWS // (size * micro)
                for k in range(micro):
                    at = (k * size + rank) * each
                    rows = rows_of(step)[at : at + each].to(rt.backend.device)
                    if no_sync and k < micro - 1:
                        with engine.no_sync():
                            loss = engine.model(rows) / micro
                            loss.backward()
                    else:
                        loss = engine.model(rows) / micro
                        loss.backward()
                    total += loss.detach()
                if clip is not None:
                    norms.append(float(engine.clip_grad_norm_(clip)))
                engine.optimizer.step()
                engine.optimizer.zero_grad(set_to_none=not zeros)
                mean = rt.ranks.sum([float(total)])[0] / size if rt.ranks is not None else float(total)
                losses.append(mean)
                if settings.max_grad_norm is not None:
                    norms.append(engine.grad_norm)
                if not delays:
                    with torch.no_grad():
                        hashes.append(digest(dict(engine.model.named_parameters())))
            engine.synchronize()
        state = engine.state_dict()
        report = engine.memory_report()
    finally:
        rt.backend.disturb = None
        engine.close()
    return {
        "losses": losses,
        "hashes": hashes,
        "norms": norms,
        "state": state,
        "report": report,
        "link": link.by_stream,
        "closed": digest(dict(model.named_parameters())),
    }


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG, exit=True)
    if "WORLD_DETERMINISTIC" in os.environ:
        torch.use_deterministic_algorithms(True)
    rt = runtime.init()
    import importlib

    cases = json.loads((folder / "cases.json").read_text())
    results = []
    for name, arguments in cases:
        module, _, function = name.rpartition(":")
        call = getattr(importlib.import_module(module or "parallel.world"), function)
        torch.manual_seed(0)
        began = time.perf_counter()
        results.append(call(**arguments))
        print(f"{name} {arguments}: {time.perf_counter() - began:.2f} s", flush=True)
    torch.save(results, folder / f"rank-{rt.rank}.pt")
    return 0


if __name__ == "__main__":
    # What optimizers import at their first step: once here instead of in every rank. Where there is a device it might
    # wake it, which a fork does not survive.
    if os.environ["MEMFERRY_BACKEND"] == "cpu":
        import torch._dynamo
    worlds = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    pids = [pid for size, to in worlds for pid in start(int(size), lambda _rank: main(Path(to)))]
    sys.exit(max(map(abs, wait(pids))))
