"""`memferry probe`: measure this machine's paths, or emulated ones, or plan who assists whom on a node."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import probe_report
from .fabric import Fabric
from .load import load
from .measured import Measured
from .node_plan import plan_node
from .probe import probe

DESCRIPTION = """Measure latency and bandwidth of each path between host memory and a device, alone and together, and
check the data. The file that --out writes is what init(topology=FILE) reads."""


def register(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]:
    """Adds the flags of `memferry probe`; returns the function that runs it."""
    parser.description = DESCRIPTION
    parser.add_argument("--backend", help="cpu, cuda or ascend (default: what the machine has)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="index of the device (default 0)")
    parser.add_argument("--fabric", metavar="NAME", help="a shipped fabric or a fabric file, with --emulate")
    parser.add_argument(
        "--emulate", action="store_true", help="measure the fabric's links as emulated on the cpu backend"
    )
    parser.add_argument("--target", metavar="DEVICE", help="emulated: the device (default: the first)")
    parser.add_argument("--via", metavar="DEVICE", action="append", help="emulated: a peer, may be repeated")
    parser.add_argument("--time-scale", type=float, metavar="X", help="emulated: slow the links X times")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help='bytes, or "64KiB" and the like')
    parser.add_argument(
        "--repeats", type=int, default=5, help="copies per size, the median counts (default 5)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw bandwidth over size, or the node's plan"
    )
    parser.add_argument("--plan-node", metavar="FABRIC", help="say who should assist whom on this fabric")
    parser.add_argument("--train", nargs="+", metavar="PATTERN", help="--plan-node: devices that train")
    parser.add_argument("--assist", nargs="+", metavar="PATTERN", help="--plan-node: devices that may assist")
    parser.add_argument(
        "--bytes", default="64MiB", metavar="SIZE", help="--plan-node: what each device loads"
    )
    return run


def run(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Probes or plans. Returns exit code 0 and the JSON result."""
    from memferry_ascend.errors import ConfigError

    try:
        if arguments.plot and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install 'memferry_ascend[plot]'")
        return _plan(arguments) if arguments.plan_node else _probe(arguments)
    except (ValueError, KeyError, FileNotFoundError) as error:
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ConfigError(f"probe: {message}") from error


def _probe(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from memferry_ascend import runtime, sizes
    from memferry_ascend.errors import ConfigError

    if bool(arguments.fabric) != arguments.emulate:
        raise ConfigError(
            "--fabric and --emulate go together: a fabric's links are not this machine's; leave both out to measure "
            "this machine"
        )
    for flag in ("train", "assist"):
        if getattr(arguments, flag):
            raise ConfigError(f"--{flag} belongs to --plan-node")
    fabric = None
    if arguments.fabric:
        if arguments.backend not in (None, "cpu"):
            raise ConfigError(f"--emulate runs on the cpu backend, not on {arguments.backend!r}")
        loaded = load(arguments.fabric)
        if not isinstance(loaded, Fabric):
            raise ConfigError(f"--fabric: {arguments.fabric} is a probe's result; expected a fabric")
        fabric = loaded
    name = "cpu" if fabric is not None else arguments.backend or runtime._choose()
    backend = runtime.make_backend(name, arguments.device)
    try:
        measured = probe(
            backend,
            fabric=fabric,
            target=arguments.target,
            via=arguments.via,
            sizes=[sizes.parse(_number(s)) for s in arguments.sizes] if arguments.sizes else None,
            repeats=arguments.repeats,
            time_scale=arguments.time_scale,
            say=lambda text: print(f"  {text}", file=sys.stderr),
        )
    finally:
        backend.close()
    if arguments.out:
        measured.save(arguments.out)
    if arguments.plot:
        probe_report.draw(measured, arguments.plot)
    if not arguments.json:
        _show(measured)
    return 0, json.loads(measured.to_json())


def _show(measured: Measured) -> None:
    print(probe_report.table(measured))
    print()
    print(probe_report.matrix(measured))


def _plan(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from memferry_ascend import sizes
    from memferry_ascend.errors import ConfigError

    fabric = load(arguments.plan_node)
    if not isinstance(fabric, Fabric):
        raise ConfigError(f"--plan-node: {arguments.plan_node} is a probe's result; expected a fabric")
    plan = plan_node(fabric, arguments.train, arguments.assist, nbytes=sizes.parse(_number(arguments.bytes)))
    if arguments.out:
        from .measured import write_text

        write_text(arguments.out, plan.to_json())
    if arguments.plot:
        plan.draw(arguments.plot)
    if not arguments.json:
        print(plan.table())
    return 0, json.loads(plan.to_json())


def _number(text: str) -> str | int:
    return int(text) if text.isdigit() else text
