"""`memferry profile` and `memferry plan`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from memferry_ascend import profile_plan, sizes
from memferry_ascend.config import Config
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.planner import FabricProfile, Grad, LayerPlan, Mode, Plan, Profile, Update
from memferry_ascend.train.models import PRESETS, build, shape_of

Run = Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]


def register_profile(parser: argparse.ArgumentParser) -> Run:
    """Adds the arguments of `memferry profile`; returns the function that runs it."""
    parser.description = (
        "Measures a model's layers, the link and the host on this machine, and keeps the result for later runs. "
        "The model is a preset of `memferry train`, or your own."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", default="gpt-1m", help=f"preset: {', '.join(PRESETS)}")
    which.add_argument(
        "--factory",
        metavar="MODULE:FUNCTION",
        help="your function without arguments that returns (model, sample_batch), the model on the CPU",
    )
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="sequences (default: 16)")
    parser.add_argument(
        "--context", type=int, metavar="N", help="bytes a sequence (default: the preset's own)"
    )
    parser.add_argument("--precision", default="bf16", metavar="bf16|fp32", help="default: bf16")
    parser.add_argument("--device-memory", metavar="SIZE", help='device byte budget, such as "24GiB"')
    parser.add_argument("--threads", type=int, metavar="N", help="host update threads")
    parser.add_argument("--topology", default="auto", help="fabric: auto, a built-in name, or a YAML file")
    parser.add_argument(
        "--backend", metavar="NAME", help="cpu, cuda or ascend (default: what this machine has)"
    )
    parser.add_argument("--refresh", action="store_true", help="measure even if there is a kept profile")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the profile here")
    return run_profile


def run_profile(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Prints the profile as a table unless --json. Returns 0 and the profile with the notes of its measurement. Under
    torchrun rank 0 speaks, and the profile says what connects the ranks."""
    from memferry_ascend import fabricprobe, profile_table, profiler, runtime

    config = Config(
        precision=arguments.precision, device_memory=arguments.device_memory, threads=arguments.threads
    )
    model, batch = _model_and_batch(arguments)
    rt = runtime.init(arguments.topology, arguments.backend)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    measured = profiler.profile(model, optimizer, batch, rt, config, refresh=arguments.refresh)
    measured.profile = fabricprobe.with_ranks(measured.profile, rt)
    if rt.rank:
        return 0, {}
    if arguments.out is not None:
        measured.profile.save(arguments.out)
    if not arguments.json:
        console = Console(highlight=False)
        console.print(profile_table.describe(measured), markup=False, soft_wrap=True)
        if measured.profile.fabric is not None:
            console.print(str(measured.profile.fabric), markup=False)
        console.print("kept from an earlier measurement" if measured.cached else "measured now")
        if arguments.out is not None:
            console.print(
                f"written to {arguments.out}: memferry plan --profile {arguments.out}", markup=False
            )
    return 0, {**measured.profile.to_json(), "notes": measured.notes, "cached": measured.cached}


def _model_and_batch(arguments: argparse.Namespace) -> tuple[nn.Module, Any]:
    if arguments.factory is None:
        if arguments.batch < 1:
            raise ConfigError(f"--batch must be at least 1, not {arguments.batch}")
        shape = shape_of(arguments.model, arguments.context)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 256, (arguments.batch, shape.context + 1), generator=generator)
        return build(shape), {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    module_name, _, function = arguments.factory.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"--factory {arguments.factory}: expected MODULE:FUNCTION that can be imported: {e}"
        ) from e
    finally:
        sys.path.pop(0)
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ConfigError(
            f"--factory {arguments.factory}: expected it to return (model, sample_batch), got {type(made).__name__}"
        )
    return made


def register_plan(parser: argparse.ArgumentParser) -> Run:
    """Adds the arguments of `memferry plan`; returns the function that runs it."""
    parser.description = (
        "Makes a plan from a saved profile and predicts its iteration time; needs no device. The plan file goes to "
        "`memferry train --planner FILE` or Config(planner=FILE)."
    )
    parser.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="from memferry profile --out"
    )
    parser.add_argument("--planner", default="search", metavar="search|paper", help="default: search")
    parser.add_argument("--device-memory", metavar="SIZE", help='device byte budget, such as "24GiB"')
    parser.add_argument(
        "--reserve",
        type=float,
        metavar="X",
        help="the paper's reserve factor, 0 to 1: places gradients (paper), bounds what is kept (search)",
    )
    parser.add_argument("--update", default="step", metavar="step|backward", help="default: step")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="predict for N ranks of one node (default: the profile's)"
    )
    parser.add_argument(
        "--fabric",
        metavar="GB/S,US",
        help="with --ranks: bandwidth and latency of a rank's collectives, as in 170,26",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATTERN=MODE",
        help='override layers by name, such as "blocks.*.up=STREAM"; may be repeated',
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="another plan: show what changes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan here")
    return run_plan


def run_plan(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Prints the plan as a table unless --json. Returns 0, the plan, and what limits it."""
    if arguments.update not in ("step", "backward"):
        raise ConfigError(f"--update must be step or backward, not {arguments.update}")
    if arguments.reserve is not None and not 0 <= arguments.reserve <= 1:
        raise ConfigError(f"--reserve must be from 0 to 1, not {arguments.reserve}")
    try:
        profile = _for_ranks(Profile.load(arguments.profile), arguments.ranks, arguments.fabric)
        budget = None if arguments.device_memory is None else sizes.parse(arguments.device_memory)
        plan = profile_plan.plan_profile(
            profile,
            arguments.planner,
            device_memory=budget,
            reserve=arguments.reserve,
            update=arguments.update,
        )
        if arguments.set:
            plan = _with_modes(plan, dict(map(_assignment, arguments.set)))
            plan = profile_plan.finish(profile, plan, arguments.update)
        timeline = profile_plan.predict(profile, plan, arguments.update)
        difference = None
        if arguments.compare is not None:
            other = profile_plan.ordered(Plan.load(arguments.compare), [x.name for x in profile.layers])
            seconds = profile_plan.predict(profile, other, arguments.update).period
            difference = {"layers": other.diff(plan), "predicted_period": seconds}
    except ValueError as e:
        raise e if isinstance(e, FerryError) else FerryError(str(e)) from e
    if arguments.out is not None:
        plan.save(arguments.out)
    if not arguments.json:
        console = Console(highlight=False)
        console.print(str(plan), markup=False, soft_wrap=True)
        busy = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in timeline.busy.items())
        console.print(f"limited by {timeline.critical}; busy per iteration: {busy}", markup=False)
        if difference is not None:
            changed = str(difference["layers"]) or "  no layer"
            console.print(f"changed from {arguments.compare}:\n{changed}", markup=False)
            console.print(
                f"that plan is predicted at {float(str(difference['predicted_period'])) * 1e3:.3f} ms"
            )
        if arguments.out is not None:
            console.print(
                f"written to {arguments.out}: memferry train --planner {arguments.out}", markup=False
            )
    result = {
        **plan.to_json(),
        "ranks": profile.fabric.world if profile.fabric is not None else 1,
        "critical": timeline.critical,
        "busy": timeline.busy,
        "critical_path": timeline.critical_path,
    }
    return 0, result if difference is None else {**result, "compared": difference}


def _for_ranks(profile: Profile, ranks: int | None, fabric: str | None) -> Profile:
    """The profile with as many ranks, connected as `fabric` or the profile itself says."""
    if ranks is None and fabric is None:
        return profile
    known = profile.fabric
    count = ranks if ranks is not None else known.ranks if known is not None else 1
    if count == 1:
        return replace(profile, fabric=None)
    if fabric is None:
        if known is None:
            raise ConfigError(
                f"--ranks {count}: the profile says nothing about a fabric; pass --fabric GB/S,US, or measure it with "
                f"torchrun --nproc-per-node {count} -m memferry_ascend profile"
            )
        return replace(profile, fabric=replace(known, ranks=count))
    try:
        bandwidth, latency = map(float, fabric.split(","))
    except ValueError as e:
        raise ConfigError(f"--fabric must be GB/S,US, such as 170,26, not {fabric!r}") from e
    return replace(profile, fabric=FabricProfile(count, bandwidth * 1e9, latency * 1e-6))


def _with_modes(plan: Plan, modes: dict[str, str]) -> Plan:
    """The plan with the modes of layers overridden; one that is updated on the device and leaves it is no longer."""

    def leaves(x: LayerPlan) -> bool:
        return any(mode != Mode.GFGB and fnmatchcase(x.name, pattern) for pattern, mode in modes.items())

    layers = tuple(
        replace(x, grad=Grad.STAGE, update=Update.HOST) if x.update is Update.DEVICE and leaves(x) else x
        for x in plan.layers
    )
    return replace(plan, layers=layers).override({pattern: {"mode": mode} for pattern, mode in modes.items()})


def _assignment(text: str) -> tuple[str, str]:
    pattern, equals, mode = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(f'--set must be PATTERN=MODE, such as "blocks.*.up=STREAM", not {text!r}')
    return pattern, mode.upper()
