"""`memferry bench`: the systems for each model in turn on this machine, each in a process of its own."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memferry_ascend.errors import ConfigError, unknown
from memferry_ascend.files import write_json

from .measure import SYSTEMS, Timing, machine, versions
from .models import MODELS, find
from .processes import spawn
from .systems import OURS, Setup

DEFAULT = (
    "plain", "native-offload", "memferry-step", "memferry-backward", "memferry-go", "deepspeed-z2", "deepspeed-z3",
    "fsdp2", "torchao",
)  # fmt: skip
CURVE_TOKENS = (2048, 4096, 8192, 16384, 24576, 32768, 65536)


def register(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]:
    """Adds the command's arguments; returns its `run`."""
    add = parser.add_argument
    add("--model", nargs="+", default=["bert-base"], help=f"of {', '.join(MODELS)}")
    add(
        "--system",
        nargs="+",
        default=list(DEFAULT),
        help=f"of {', '.join(SYSTEMS)}; default: all but plain-bf16",
    )
    add("--out", type=Path, default=Path("runs/bench"), help="folder for MODEL.json and the figures")
    add("--batch", nargs="+", type=int, help="sequences a micro-batch (default: the model's)")
    add("--seq", type=int, help="tokens a sequence (default: the model's)")
    add("--clip", nargs="+", default=["none", "1.0"], help="global norm limits, or none (default: none 1.0)")
    add("--accumulate", nargs="+", type=int, default=[1], help="backwards a step (default 1)")
    add("--iterations", type=int, default=12, help="timed iterations; the median counts (default 12)")
    add("--warmup", type=int, default=5, help="iterations before (default 5)")
    add("--losses", type=int, default=0, help="train at least this many steps and keep every loss")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=300, help="seconds for one system's process (default 300)")
    add("--backend", choices=("cpu", "cuda"), help="default: what the machine has")
    add("--threads", nargs="+", type=int, help="host update threads of our systems (default: the engine's)")
    add("--ranks", nargs="+", type=int, default=[1], help="processes, one a device (default 1)")
    add("--assist", nargs="+", type=int, default=[], help="devices that assist device 0, for our systems")
    add("--topology", default="auto", help="fabric or probe file that says how they are reached")
    add("--trace", type=Path, help="folder for the engine's own recording of a few more iterations")
    add("--planner", help="the engine's planner, with a sample batch (default: its rules, without one)")
    add("--device-memory", help='the engine\'s device budget, such as "24GiB"')
    add(
        "--curve",
        action="store_true",
        help="instead: plain and the pipeline from 2,048 to 65,536 tokens a step",
    )
    add("--no-bound", action="store_true", help="leave the bound out")
    add("--no-profile", action="store_true", help="leave the busy shares out")
    add("--no-figures", action="store_true", help="leave the figures out")
    add(
        "--merge",
        action="store_true",
        help="keep rows that MODEL.json has already and that are not run again",
    )
    return run


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Runs every row, writing each model's JSON after every system. Returns 0 if every row ended as a result (also
    "does not fit" and "unavailable"), 1 if any failed or ran out of time."""
    backend = arguments.backend or ("cuda" if torch.cuda.is_available() else "cpu")
    for name in arguments.model:
        find(name)
    for name in arguments.system:
        if name not in SYSTEMS:
            raise unknown("system", name, SYSTEMS)
    if arguments.iterations < 1 or arguments.warmup < 1:
        raise ConfigError("--iterations and --warmup must be at least 1")
    timing = Timing(
        arguments.warmup, arguments.iterations, arguments.losses, arguments.seed, not arguments.no_profile
    )
    documents = {}
    for name in arguments.model:
        if arguments.curve:
            documents[name] = _curve(name, backend, timing, arguments)
        else:
            documents[name] = _model(name, backend, timing, arguments)
    if not arguments.no_figures:
        from .plot import draw

        for line in draw(arguments.out):
            _say(line)
    ends = {r["status"] for d in documents.values() for r in d["records"]}
    return int(bool(ends & {"failed", "timeout"})), {"models": documents}


def _setup(name: str, backend: str, a: argparse.Namespace, batch: int | None = None, **fields: Any) -> Setup:
    model = find(name)
    return Setup(
        batch=batch or model.batch, seq=a.seq or model.seq, backend=backend, planner=a.planner,
        device_memory=a.device_memory, assist=tuple(a.assist), topology=a.topology,
        **{"threads": a.threads[0] if a.threads else None, "trace": str(a.trace) if a.trace else None} | fields,
    )  # fmt: skip


def _clip(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise ConfigError(f"--clip: expected numbers or none, got {text!r}") from None


def _model(name: str, backend: str, timing: Timing, a: argparse.Namespace) -> dict[str, Any]:
    clips = [_clip(c) for c in a.clip]
    setups = [
        _setup(name, backend, a, b, clip=c, accumulate=k, ranks=n, threads=t)
        for n, b, k, c, t in itertools.product(
            a.ranks, a.batch or [None], a.accumulate, clips, a.threads or [None]
        )
    ]
    path = a.out / f"{name}.json"
    document = _document(name, path, a.merge)
    if not a.no_bound:
        shapes = list(dict.fromkeys((s.batch, s.accumulate) for s in setups))
        plain = [_setup(name, backend, a, b, accumulate=k) for b, k in shapes]
        for found in spawn(name, "bound", plain, timing, a.timeout):
            if found.get("bound_ms") is None:
                found["reason"] = found.get("reason", "no bound")
            document["bounds"] = [x for x in document["bounds"] if _shape(x) != _shape(found)] + [found]
            _say(f"{name}: bound {_ms(found.get('bound_ms'))} ({found.get('bound_by', found.get('reason'))})")
    for system in a.system:
        _rows(document, name, system, setups, timing, a.timeout)
        a.out.mkdir(parents=True, exist_ok=True)
        write_json(path, document)
    return document


def _curve(name: str, backend: str, timing: Timing, a: argparse.Namespace) -> dict[str, Any]:
    """Tokens a step from 2,048 to 65,536, by batch and by accumulation of the model's own batch, clipped at 1.0."""
    model = find(name)
    seq = a.seq or model.seq
    setups = []
    for tokens in CURVE_TOKENS:
        whole = max(1, tokens // seq)
        setups.append(_setup(name, backend, a, whole, clip=1.0, accumulate=1))
        own = min(a.batch[0] if a.batch else model.batch, whole)
        if whole > own and whole % own == 0:
            setups.append(_setup(name, backend, a, own, clip=1.0, accumulate=whole // own))
    path = a.out / f"{name}-curve.json"
    document = _document(name, path, a.merge)
    systems = a.system if a.system != list(DEFAULT) else ["plain", "memferry-backward"]
    for system in systems:
        _rows(document, name, system, setups, timing, a.timeout)
        base = {(r["batch"], r["accumulate"]): r for r in document["records"] if r["system"] == "plain"}
        for r in document["records"]:
            plain = base.get((r["batch"], r["accumulate"]))
            if plain and plain["iter_ms"] and r["iter_ms"]:
                r["share_of_plain"] = plain["iter_ms"] / r["iter_ms"]
        a.out.mkdir(parents=True, exist_ok=True)
        write_json(path, document)
    return document


def _document(name: str, path: Path, merge: bool) -> dict[str, Any]:
    if merge and path.exists():
        old: dict[str, Any] = json.loads(path.read_text())
        return old
    return {
        "benchmark": "iteration time of training systems, one machine, one run",
        "model": name,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "bounds": [],
        "records": [],
    }


def _shape(x: dict[str, Any]) -> tuple[Any, ...]:
    return x["batch"], x["seq"], x["accumulate"]


def _key(r: dict[str, Any]) -> tuple[Any, ...]:
    more = (r.get("threads"), r.get("ranks", 1), tuple(r.get("assist", ())))
    return (*_shape(r), r["system"], r["clip"], *more)


def _rows(
    document: dict[str, Any], name: str, system: str, setups: Sequence[Setup], timing: Timing, timeout: float
) -> None:
    """Run one system's rows and put them into the document."""
    ours = system in OURS  # the others keep process-wide state
    if not system.startswith("memferry"):
        setups = [replace(s, assist=(), threads=None) for s in setups]
        setups = list(dict.fromkeys(setups))
    alone = ours and all(s.ranks == 1 for s in setups)
    jobs = [list(setups)] if alone else [[s] for s in setups]
    for job in jobs:
        for record in spawn(name, system, job, timing, timeout * (1 if not ours else max(1, len(job) / 2))):
            bounds = document["bounds"] if record["ranks"] == 1 else []  # measured for one
            bound: dict[str, Any] = next((b for b in bounds if _shape(b) == _shape(record)), {})
            record["bound_ms"] = bound.get("bound_ms")
            if record["bound_ms"] and record["iter_ms"]:
                record["over_bound"] = record["iter_ms"] / record["bound_ms"]
            document["records"] = [r for r in document["records"] if _key(r) != _key(record)] + [record]
            _say(_line(record))


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} ms"


def _line(r: dict[str, Any]) -> str:
    head = f"{r['model']} {r['system']:18} {r['batch']}x{r['seq']}x{r['accumulate']} clip {r['clip']}"
    head += f" threads {r['threads']}" if r["threads"] else ""
    head += f" ranks {r['ranks']}" if r["ranks"] > 1 else ""
    head += f" assist {r['assist']}" if r["assist"] else ""
    if r["status"] != "ok":
        return f"{head}: {r['status']}: {r['reason']}"
    gib = "" if r["peak_device_gib"] is None else f"  device {r['peak_device_gib']:.2f} GiB"
    share = "" if r["busy_share"] is None else f"  busy {r['busy_share']:.0%}"
    over = f"  {r['over_bound']:.2f} x bound" if r.get("over_bound") else ""
    return (
        f"{head}: {r['iter_ms']:.1f} ms (mean {r['mean_ms']:.1f}){gib}  host {r['host_gib']:.2f} GiB{share}{over}"
        f"  loss {r['losses'][0]} to {r['losses'][-1]}"
    )


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is for --json."""
    print(text, file=sys.stderr, flush=True)
