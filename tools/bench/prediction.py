"""How right the planner is: predicted and measured iteration time of three plans of one model, in one process.

    all-gfgb   every layer copied to the device before its forward
    paper      the paper's algorithms on the measured profile
    search     what `Config(planner="search")` runs

Run as `python -m memferry_ascend.bench.prediction --model bert-base gpt2-xl --out FOLDER`. A model is measured once, each
plan is armed, warmed up and timed in turn, twice over, so that what else the machine does is spread over all of them;
medians of single steps are reported, and whether the plans rank as predicted (plans that were measured within the
larger of 2 % and their own spread of one another count as equal).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memferry_ascend as mf
from memferry_ascend import commands, planning, profile_plan, profiler, runtime
from memferry_ascend.files import write_json
from memferry_ascend.layers import collect
from memferry_ascend.planner import Mode, Plan, Profile
from memferry_ascend.trial import call, loss_of, to_device

EQUAL = 0.02


@dataclass
class Outcome:
    """One plan: what was predicted and every measured step (seconds)."""

    plan: Plan
    steps: list[float] = field(default_factory=list)
    recorded: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles over the median."""
        low, _, high = statistics.quantiles(self.steps, n=4)
        return (high - low) / 2 / self.measured

    @property
    def error(self) -> float:
        assert self.plan.predicted_period is not None
        return self.plan.predicted_period / self.measured - 1


def plans_of(profile: Profile, names: list[str], config: mf.Config, rt: mf.Runtime) -> dict[str, Plan]:
    """The three plans, in the model's order, each with its prediction in the engine's units."""
    direct = rt.backend.capabilities().direct_kinds
    narrowed = profile_plan.narrow(profile, direct)
    gfgb = profile_plan.finish(narrowed, profile_plan.all_of(narrowed, Mode.GFGB), config.update)
    paper = profile_plan.plan_profile(profile, "paper", update=config.update, direct_kinds=direct)
    budget = config.device_bytes or int(rt.backend.memory_stats().free * (1 - planning.DEVICE_MARGIN))
    searched = profile_plan.plan_profile(
        profile, "search", device_memory=budget, update=config.update, direct_kinds=direct
    )
    found = {"all-gfgb": gfgb, "paper": paper, "search": searched}
    return {name: profile_plan.ordered(plan, names) for name, plan in found.items()}


def measure(
    model: nn.Module, batch: Any, plan: Plan, config: mf.Config, warmup: int, steps: int
) -> tuple[list[float], Any]:
    """Seconds of `steps` iterations in the steady state, and the summary of a few recorded ones after them."""
    from memferry_ascend import report

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    engine = mf.ferry(model, optimizer, config=config, plan=plan)
    backend = runtime.current().backend
    here = to_device(batch, backend.device)

    def step() -> None:
        loss_of(call(engine.model, here)).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    try:
        for _ in range(warmup):
            step()
        marks = [backend.event(timing=True) for _ in range(steps + 1)]
        backend.compute.record(marks[0])
        for mark in marks[1:]:  # nothing waits between steps: the next forward meets the updates of the last
            step()
            backend.compute.record(mark)
        engine.synchronize()
        times = [a.elapsed(b) for a, b in itertools.pairwise(marks)]
        engine.recorder.start()
        for _ in range(3):
            step()
        recording = engine.recorder.stop()
        summary = report.summary(recording)
        return times, {k: summary[k] for k in ("busy", "waits_for", "throughput", "peak_device_bytes")}
    finally:
        engine.close()


def ranked(outcomes: dict[str, Outcome]) -> tuple[bool, list[str]]:
    """Whether no pair of plans is predicted in the wrong order, and the pairs that are."""
    wrong = []
    names = list(outcomes)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            x, y = outcomes[a], outcomes[b]
            tolerance = max(EQUAL, x.spread, y.spread)
            assert x.plan.predicted_period is not None and y.plan.predicted_period is not None
            if abs(x.measured / y.measured - 1) <= tolerance:
                continue
            if abs(x.plan.predicted_period / y.plan.predicted_period - 1) <= 1e-9:
                continue
            if (x.measured < y.measured) != (x.plan.predicted_period < y.plan.predicted_period):
                wrong.append(f"{a} and {b}")
    return not wrong, wrong


def draw(path: Path, title: str, outcomes: dict[str, Outcome]) -> None:
    """Predicted and measured bars, one pair a plan."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    at = range(len(outcomes))
    predicted = [(x.plan.predicted_period or 0) * 1e3 for x in outcomes.values()]
    axes.bar([i - 0.2 for i in at], predicted, 0.4, label="predicted")
    axes.bar([i + 0.2 for i in at], [x.measured * 1e3 for x in outcomes.values()], 0.4, label="measured")
    for i, x in enumerate(outcomes.values()):
        axes.annotate(f"{x.error:+.1%}", (i, max(predicted[i], x.measured * 1e3)), ha="center", va="bottom")
    axes.set_xticks(list(at), list(outcomes))
    axes.set_ylabel("ms per iteration")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)


def model_and_batch(name: str, arguments: argparse.Namespace) -> tuple[nn.Module, Any]:
    """A model of the harness (docs/benchmarks/README.md) or a preset of `memferry train`, and a batch for it."""
    from memferry_ascend.bench import models

    if name in models.MODELS:
        model, shape = models.build(name), models.find(name)
        size, seq = arguments.batch or shape.batch, arguments.context or shape.seq
        return model, models.batches(model, 1, size, seq, torch.device("cpu"))[0]
    preset = argparse.Namespace(
        factory=None, model=name, batch=arguments.batch or 4, context=arguments.context
    )
    return commands._model_and_batch(preset)


def predict(name: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Outcome]]:
    """Profile one model, run its three plans and compare."""
    rt = mf.init(backend=arguments.backend)
    config = mf.Config(
        precision=arguments.precision, update=arguments.update, device_memory=arguments.device_memory
    )
    running = mf.Config(precision=arguments.precision, update=arguments.update)
    model, batch = model_and_batch(name, arguments)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    began = time.perf_counter()
    measured = profiler.profile(model, optimizer, batch, rt, config, refresh=True)
    took = time.perf_counter() - began
    names = [layer.name for layer in collect(model, config.precision, config.keep_fp32)]
    outcomes = {plan: Outcome(x) for plan, x in plans_of(measured.profile, names, config, rt).items()}
    for _ in range(arguments.rounds):
        for outcome in outcomes.values():
            times, outcome.recorded = measure(
                model, batch, outcome.plan, running, arguments.warmup, arguments.steps
            )
            outcome.steps += times
    right, wrong = ranked(outcomes)
    print(f"profiled in {took:.1f} s; {name}, {rt.backend.name}")
    for plan, x in outcomes.items():
        modes = {m: sum(layer.mode is m for layer in x.plan.layers) for m in Mode}
        shown = ", ".join(f"{n} {m}" for m, n in modes.items() if n)
        print(
            f"{plan:9} predicted {(x.plan.predicted_period or 0) * 1e3:9.3f} ms  measured {x.measured * 1e3:9.3f} ms "
            f"(spread {x.spread:.1%})  error {x.error:+.1%}  [{shown}]"
        )
    print("ranked as measured" if right else f"NOT ranked as measured: {'; '.join(wrong)}", flush=True)
    document = {
        "model": name,
        "batch": {k: list(v.shape) for k, v in batch.items()},
        "precision": arguments.precision,
        "update": arguments.update,
        "device": rt.backend.identity(),
        "torch": torch.__version__,
        "memferry": mf.__version__,
        "python": platform.python_version(),
        "profile_seconds": took,
        "ranked_as_measured": right,
        "plans": {
            plan: {
                "predicted": x.plan.predicted_period,
                "measured": x.measured,
                "spread": x.spread,
                "error": x.error,
                "steps": x.steps,
                "recorded": x.recorded,
                "plan": x.plan.to_json(),
            }
            for plan, x in outcomes.items()
        },
        "profile": measured.profile.to_json(),
        "notes": measured.notes,
    }
    return document, outcomes


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=["gpt-1m"],
        help="models of `memferry bench`, or presets of `memferry train`",
    )
    parser.add_argument("--batch", type=int, help="default: the model's; 4 for a preset")
    parser.add_argument("--context", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--update", default="step")
    parser.add_argument("--device-memory")
    parser.add_argument("--backend")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for prediction-MODEL.json and prediction-MODEL.png")
    arguments = parser.parse_args(words)
    for name in arguments.model:
        document, outcomes = predict(name, arguments)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_json(arguments.out / f"prediction-{name}.json", document)
            with contextlib.suppress(ImportError):  # the figures of a file are the same where matplotlib is
                draw(arguments.out / f"prediction-{name}.png", name, outcomes)
        runtime.reset()


if __name__ == "__main__":
    main()
