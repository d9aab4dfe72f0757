"""The largest GPT that trains under a cap of device memory, by system: batch 1 x 1024, activations recomputed.

Each system climbs the given numbers of layers until one does not fit, every step in a process of its own whose allocator
may take no more than the cap (`torch.cuda.set_per_process_memory_fraction`; the engine gets the cap as `device_memory`).
What ends a climb is a result: memory of the device, memory of the host, or the time limit.

    python -m memferry_ascend.bench.size --cap 6GiB --hidden 2560 --layers 16 24 32 48 64 88 --json OUT.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memferry_ascend import sizes
from memferry_ascend.errors import unknown
from memferry_ascend.files import write_json

from .measure import GIB, SYSTEMS, Timing, machine
from .models import find
from .processes import spawn
from .systems import OURS, Setup

DEFAULT = ("memferry-backward", "deepspeed-z2", "deepspeed-z3")


def climb(
    system: str, names: Sequence[str], setup: Setup, timing: Timing, timeout: float
) -> list[dict[str, Any]]:
    """Rows of one system, from the smallest model to the first that does not train."""
    if system in OURS and setup.device_cap is not None:
        setup = replace(setup, device_memory=str(setup.device_cap), planner=setup.planner or "rules")
    rows = []
    for name in names:
        (found,) = spawn(name, system, [setup], timing, timeout)
        rows.append(found)
        ms = f"{found['iter_ms']:.0f} ms" if found["iter_ms"] else f"{found['status']}: {found['reason']}"
        print(f"{system} {name}: {ms}", file=sys.stderr, flush=True)
        if found["status"] != "ok":
            break
    return rows


def findings(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every system: parameters of the largest that trained, its host bytes a parameter, what ended the climb; and how
    much longer an iteration of each other system takes at the largest size that both trained."""
    out: dict[str, Any] = {}
    for system in dict.fromkeys(r["system"] for r in rows):
        mine = [r for r in rows if r["system"] == system]
        fit = [r for r in mine if r["status"] == "ok"]
        out[system] = {
            "largest": fit[-1]["parameters"] if fit else 0,
            "host_bytes_a_parameter": fit[-1]["host_gib"] * GIB / fit[-1]["parameters"] if fit else None,
            "ended_by": mine[-1]["reason"] if mine[-1]["status"] != "ok" else "the list of sizes",
        }
        first = {r["model"]: r for r in rows if r["system"] == rows[0]["system"] and r["status"] == "ok"}
        common = [r for r in fit if r["model"] in first]
        if common:
            out[system]["iteration_over_the_first_system"] = (
                common[-1]["iter_ms"] / first[common[-1]["model"]]["iter_ms"]
            )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--system", nargs="+", default=list(DEFAULT), help="the first is what the others are compared with")
    add("--cap", default="6GiB", help='device memory a process may take, "none" for all of it (default 6GiB)')
    add("--hidden", type=int, default=2560, help="width (default 2560: 79 M parameters a layer)")
    add("--layers", nargs="+", type=int, default=[16, 24, 32, 48, 64, 88])
    add("--batch", type=int, default=1)
    add("--seq", type=int, default=1024)
    add("--iterations", type=int, default=3)
    add("--warmup", type=int, default=2)
    add("--planner", help='of our systems (default "rules")')
    add("--timeout", type=float, default=300, help="seconds a process (default 300)")
    add("--backend", choices=("cpu", "cuda"))
    add("--json", type=Path)
    given = parser.parse_args(arguments)
    for name in given.system:
        if name not in SYSTEMS:
            raise unknown("system", name, SYSTEMS)
    backend = given.backend or ("cuda" if torch.cuda.is_available() else "cpu")
    names = [f"gpt2-h{given.hidden}-l{layers}" for layers in sorted(given.layers)]
    for name in names:
        find(name)
    cap = None if given.cap == "none" else sizes.parse(given.cap)
    setup = Setup(given.batch, given.seq, backend=backend, device_cap=cap, planner=given.planner)
    timing = Timing(given.warmup, given.iterations, profile=False)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"benchmark": "largest model under a cap", "cap": cap, "machine": machine()}
    for system in given.system:
        rows += climb(system, names, setup, timing, given.timeout)
        result |= {"findings": findings(rows), "records": rows}
        if given.json:
            write_json(given.json, result)
    print(result["findings"], file=sys.stderr, flush=True)
    return int(any(r["status"] == "failed" for r in rows))


if __name__ == "__main__":
    sys.exit(main())
