"""Train a small GPT on text twice, with the engine and with plain PyTorch and fp32 masters, and compare the losses.

    python tools/convergence.py --steps 300 --out docs/benchmarks/convergence.json

Both train in bf16 with fp32 masters, from one initialisation, on the same batches. The plan mixes all four modes.
"""

from __future__ import annotations

import argparse
import argparse as _text_source
import copy
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memferry_ascend as mf
from memferry_ascend import files
from memferry_ascend.planner import LayerPlan, Mode, Plan
from memferry_ascend.train import data, engines, models
from memferry_ascend.train import options as train_options

SHAPE = models.Shape(layers=2, width=32, heads=2, context=32)
BATCH, TAIL = 8, 50

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=2e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=2e-3),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=5e-4),
}


def losses(engine: Any, corpus: data.Corpus, steps: int, accumulate: int) -> list[float]:
    """The training loss of each step, nats per byte."""
    out = []
    for step in range(steps):
        batch = corpus.batch(step, batch=BATCH, context=SHAPE.context)
        total = 0.0
        for k in range(accumulate):
            rows = slice(k * BATCH // accumulate, (k + 1) * BATCH // accumulate)
            loss = engine.model(batch["tokens"][rows], batch["targets"][rows]).loss / accumulate
            loss.backward()
            total += float(loss.detach())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        out.append(total)
    return out


def train_plain(
    name: str, clip: float | None, accumulate: int, steps: int, model: nn.Module | None = None
) -> list[float]:
    """Plain PyTorch's losses."""
    model = models.build(SHAPE, seed=1) if model is None else model
    options = train_options.TrainOptions(backend="cpu", precision="bf16", max_grad_norm=clip)
    plain = engines.PlainEngine(model, OPTIMIZERS[name](model.parameters()), options)
    found = losses(plain, data.load(_text_source.__file__), steps, accumulate)
    plain.close()
    return found


def compare(name: str, clip: float | None, accumulate: int, steps: int) -> dict[str, Any]:
    """One optimizer both ways: mean loss of the last steps, and how far apart the two ever were."""
    torch.manual_seed(0)
    model = models.build(SHAPE, seed=1)
    want = train_plain(name, clip, accumulate, steps, copy.deepcopy(model))
    turn = itertools.cycle(Mode)
    plan = Plan(tuple(LayerPlan(n, next(turn)) for n in _layers(model)))
    config = mf.Config(precision="bf16", max_grad_norm=clip, accumulate=accumulate)
    optimizer = OPTIMIZERS[name](model.parameters())
    with mf.ferry(model, optimizer, config=config, plan=plan) as engine:
        got = losses(engine, data.load(_text_source.__file__), steps, accumulate)
    return {
        "optimizer": name,
        "clip": clip,
        "accumulate": accumulate,
        "steps": steps,
        "first_loss": want[0],
        "plain_loss": end_of(want),
        "ferry_loss": end_of(got),
        "largest_difference_of_a_step": max(abs(a - b) for a, b in zip(got, want, strict=True)),
    }


def end_of(curve: list[float]) -> float:
    """The mean of the last steps."""
    tail = curve[-TAIL:]
    return sum(tail) / len(tail)


def spread(steps: int) -> dict[str, list[float]]:
    """Where plain PyTorch alone ends when its norm limit changes by a few parts in a million: what rounding in the sum
    of a norm does to these runs, and the yardstick for the clipped ones."""
    limits = (0.5, 0.5000005, 0.4999995, 0.500001)
    return {name: [end_of(train_plain(name, limit, 1, steps)) for limit in limits] for name in OPTIMIZERS}


def _layers(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if any(p is not None for p in m._parameters.values())]


def cases() -> list[tuple[str, float | None, int]]:
    """Every optimizer, with and without clipping, in one and in four backwards a step."""
    return list(itertools.product(OPTIMIZERS, (None, 0.5), (1, 4)))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="write the numbers here (JSON)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    mf.init(backend="cpu")
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()

    def write(**more: Any) -> None:
        if given.out is not None:
            document = {
                "model": f"GPT {SHAPE.layers} layers, width {SHAPE.width}, {SHAPE.parameters} parameters, bf16",
                "losses": f"nats per byte, mean of the last {TAIL} steps",
                "torch": torch.__version__,
                "cases": rows,
                "complete": len(rows) == len(cases()),
                "seconds": round(time.perf_counter() - began, 1),
            }
            files.write_json(given.out, document | more)

    for case in cases():
        rows.append(compare(*case, given.steps))
        print(json.dumps(rows[-1]), flush=True)
        write()
    write(spread_of_plain_pytorch=spread(given.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
