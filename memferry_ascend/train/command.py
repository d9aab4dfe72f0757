"""`memferry train`: arguments to options, one run, and what it says at the end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memferry_ascend.errors import ConfigError
from memferry_ascend.train import checkpoints, engines
from memferry_ascend.train import options as train_options
from memferry_ascend.train.loop import Arm, Run, StopRequest
from memferry_ascend.train.models import shape_of
from memferry_ascend.train.screen import Screen

DESCRIPTION = """Train a byte-level GPT on text. Writes metrics.jsonl, loss.png, plan.json, trace.json,
timeline.png, summary.json and checkpoints into --out. Ctrl-C stops after the step and keeps a checkpoint."""


def register(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[int, dict[str, Any]]]:
    """Adds the flags of `memferry train`; returns the function that runs it."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--out", type=Path, help="folder of the run (default: runs/train, or the resumed run's)"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on from a run's folder or one checkpoint"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with any of the options below")
    parser.add_argument("--overwrite", action="store_true", help="start anew in an --out that holds a run")
    train_options.add_arguments(parser.add_argument_group("options, also keys of --config"))
    return run


def run(arguments: argparse.Namespace, arm: Arm = engines.arm) -> tuple[int, dict[str, Any]]:
    """Trains. Returns the exit code (130 after Ctrl-C, 143 after SIGTERM) and the summary."""
    given = {k: v for k, v in vars(arguments).items() if k in train_options.FIELDS}
    from_file = train_options.read_yaml(arguments.config) if arguments.config else {}
    resume = checkpoints.find(arguments.resume) if arguments.resume else None
    resumed = checkpoints.options_of(resume) if resume else {}
    options = train_options.resolve(given, from_file, resumed)
    if resumed and shape_of(options.model, options.context) != shape_of(resumed["model"], resumed["context"]):
        raise ConfigError(
            f"{resume} was trained with --model {resumed['model']} and --context {resumed['context']}, not "
            f"{options.model} and {options.context}: leave them out or start a new run"
        )
    out = arguments.out or (resume.parent.parent if resume else Path("runs/train"))
    training = Run(options, out, resume=resume, overwrite=arguments.overwrite, arm=arm)
    quiet = arguments.json or training.world.rank != 0
    try:
        with StopRequest() as stop:
            with Screen(options.steps, training.step, quiet=quiet) as screen:
                _introduce(screen, training)
                stopped = training.train(screen, stop)
            summary = _conclude(screen, training, stopped)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(training)) from None
    finally:
        training.engine.close()
    return (128 + (stop.signal or 2) if stopped else 0), summary


def _introduce(screen: Screen, training: Run) -> None:
    o, corpus = training.options, training.corpus
    screen.say(
        f"{o.model}: {training.shape.parameters:,} parameters, context {training.shape.context}, "
        f"batch {o.batch}"
    )
    screen.say(
        f"{corpus.source}: {len(corpus.train):,} bytes to train on and {corpus.held_out:,} held out, from "
        f"{corpus.files} files; unigram entropy {training.entropy:.3f} nats"
    )


def _conclude(screen: Screen, training: Run, stopped: bool) -> dict[str, Any]:
    if training.world.rank != 0:
        return {}
    summary = training.finish(screen) | {"stopped": stopped}
    screen.plan(training.engine.plan)
    screen.memory(training.engine.memory_report())
    if summary["held_out_loss"] is not None:
        screen.say(
            f"held-out loss {summary['held_out_loss']:.3f} nats per byte; without context (unigram entropy) "
            f"it would be {training.entropy:.3f}"
        )
    screen.say(f"{summary['tokens_per_s']:,.0f} tokens/s; files in {training.out}{os.sep}")
    if stopped:
        screen.say(_how_to_resume(training))
    return summary


def _how_to_resume(training: Run) -> str:
    newest = checkpoints.latest(training.folder)
    if newest is None:
        return f"stopped after step {training.step}; no checkpoint was written, so it cannot be resumed"
    return f"stopped after step {training.step}; go on with: memferry train --resume {newest.parent.parent}"
