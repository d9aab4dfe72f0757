"""A process for each system, forked from a server that has imported what all of them need.

Importing torch and transformers takes longer than most rows; a worker of its own is still what keeps one system's state,
memory and failures from the next.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .measure import Timing, versions
from .ranks import environments
from .systems import Setup

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # "is there a GPU" must not start CUDA in the server
}


def spawn(
    name: str, system: str, setups: list[Setup], timing: Timing, timeout: float
) -> list[dict[str, Any]]:
    """Run a worker process; one result for each setup, also for those it did not live to see."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out.jsonl"), Path(folder, "log")
        job = {
            "model": name,
            "system": system,
            "timing": asdict(timing),
            "setups": [asdict(s) for s in setups],
        }
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.preload"])
        processes = []
        ranks = setups[0].ranks
        for environment in environments(ranks) if ranks > 1 else [{}]:
            rank = environment.get("RANK", "0")
            files = (str(out), str(log)) if rank == "0" else (f"{out}.{rank}", f"{log}.{rank}")
            processes.append(context.Process(target=_work, args=(job, *files, environment)))
            processes[-1].start()
        ended = "failed"
        try:
            code = _join(processes, timeout)
            reason = f"the process ended with {_code(code)}"
            if code == -signal.SIGKILL:
                ended, reason = (
                    "does not fit",
                    "the system killed the process, most likely for host memory",
                )
            elif code is None:
                ended, reason = "timeout", f"not done after {timeout:.0f} s"
        finally:
            for process in processes:
                _kill(process)
        results = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        tail = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        if any(r.get("status") == "failed" for r in results) or len(results) < len(setups):
            print(tail, file=sys.stderr)
        for setup in setups[len(results) :]:
            last = tail.strip().splitlines()[-1][:300] if tail.strip() else ""
            results.append(
                {
                    "model": name, "system": system, "batch": setup.batch, "seq": setup.seq, "clip": setup.clip,
                    "accumulate": setup.accumulate, "backend": setup.backend,
                    "threads": setup.threads, "ranks": setup.ranks, "assist": list(setup.assist),
                    "tokens": setup.batch * setup.seq * setup.accumulate * setup.ranks, "status": ended,
                    "reason": f"{reason}: {last}" if last else reason, "iter_ms": None, "peak_device_gib": None,
                    "host_gib": None, "busy_share": None, "versions": versions(system),
                }
            )  # fmt: skip
        return results


def _join(processes: Sequence[BaseProcess], timeout: float) -> int | None:
    """Exit code of the first process that fails, 0 if none does, None if they are not done in `timeout` seconds."""
    until, running = time.monotonic() + timeout, list(processes)
    while running:
        left = until - time.monotonic()
        if not connection.wait([p.sentinel for p in running], max(0.0, left)):
            return None
        for process in [p for p in running if p.exitcode is not None]:
            running.remove(process)
            if process.exitcode:
                return process.exitcode
    return 0


def _work(job: dict[str, Any], out: str, log: str, environment: dict[str, str]) -> None:
    """The worker: a session of its own, so that whatever it starts can be ended with it."""
    from .worker import run

    os.environ.update(environment)
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run(job, Path(out))
    sys.stdout.flush()
    os._exit(0)  # some systems' threads never end


def _kill(process: BaseProcess) -> None:
    """The worker and whatever it started: its own session and nothing else."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _code(code: int | None) -> str:
    return f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
