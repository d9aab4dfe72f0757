"""The training loop: arm the model, step, evaluate, record, checkpoint, stop cleanly."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from memferry_ascend import files, runtime, saving
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.train import checkpoints, data, engines, metrics, models, plots
from memferry_ascend.train.options import TrainOptions
from memferry_ascend.train.screen import Screen

RECORDED = 4
"""Steps that are recorded at the beginning, when the first one is over, and again at the end."""

Arm = Callable[[nn.Module, torch.optim.Optimizer, data.Batch, TrainOptions], engines.Engine]


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started."""

    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    size: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))

    def micro_batches(self, batch: data.Batch, accumulate: int) -> Iterator[data.Batch]:
        """This rank's rows of each of the `accumulate` backwards that make up a global batch."""
        rows = len(batch["tokens"]) // (accumulate * self.size)
        for i in range(accumulate):
            first = (i * self.size + self.rank) * rows
            yield {name: tensor[first : first + rows] for name, tensor in batch.items()}

    def mean(self, value: torch.Tensor, stop: bool = False) -> tuple[float, bool]:
        """The mean over ranks, and whether any of them was asked to stop: all must stop at the same step."""
        total, stops = float(value.detach()), float(stop)
        ranks = runtime.current().ranks if self.size > 1 else None
        if ranks is not None:
            total, stops = ranks.sum([total, stops])
        return total / self.size, stops > 0


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a wish to stop after this step; a second one interrupts."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def learning_rate(step: int, options: TrainOptions) -> float:
    """The factor on --lr of update `step` (from 0): linear warm-up, then a cosine down to a tenth."""
    warmup = options.steps // 20 if options.warmup is None else options.warmup
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, options.steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))


class Run:
    """One run: holds what its steps share. Only rank 0 writes files and speaks."""

    def __init__(
        self, options: TrainOptions, out: Path, *, resume: Path | None, overwrite: bool, arm: Arm
    ) -> None:
        self.options, self.out, self.world = options, out, World()
        if options.batch % (options.accumulate * self.world.size):
            raise ConfigError(
                f"--batch {options.batch} must be a multiple of {options.accumulate} backwards on "
                f"{self.world.size} devices"
            )
        self.corpus = data.load(options.text)
        self.shape = models.shape_of(options.model, options.context)
        self.corpus.check(self.shape.context)
        self.entropy = self.corpus.unigram_entropy
        self.folder = out / "checkpoints"
        self.step = checkpoints.step_of(resume) if resume else 0
        self._saving: saving.Save | None = None
        if self.step >= options.steps:
            raise ConfigError(
                f"{resume} has done its {options.steps} steps: nothing is left; give a larger --steps"
            )
        continues = resume is not None and resume.parent.parent.resolve() == out.resolve()
        if not continues and not overwrite and self._holds_a_run():
            raise ConfigError(
                f"{out} already holds a run: give another --out, --overwrite, or --resume {out}"
            )
        state = checkpoints.training_state(resume) if resume else {}
        model = models.build(self.shape, options.seed)
        optimizer = make_optimizer(model, options)
        torch.manual_seed(options.seed)
        self.engine = arm(model, optimizer, next(self._micro_batches(self._batch(0))), options)
        self.device = next(self.engine.model.parameters()).device
        self._first = self.step
        try:
            if state:
                self.engine.load_state_dict(state["engine"])
                self._restore_rng(state["rng"])
            self.schedule = self._schedule()
            if self.world.rank == 0:
                self._prepare(resume, continues)
        except BaseException:
            self.engine.close()
            raise

    def _holds_a_run(self) -> bool:
        return (self.out / "metrics.jsonl").exists() or checkpoints.latest(self.folder) is not None

    def _prepare(self, resume: Path | None, continues: bool) -> None:
        """Makes the folder hold what this run starts from, nothing else; last, when nothing can be refused."""
        self.out.mkdir(parents=True, exist_ok=True)
        if continues:
            checkpoints.set_aside_after(self.folder, self.step)
        else:
            for other in checkpoints.complete(self.folder):
                checkpoints.remove(other)
        path = self.out / "metrics.jsonl"
        metrics.cut(resume.parent.parent / "metrics.jsonl" if resume else path, path, self.step)

    def _schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        """A schedule that needs no state of its own: it starts at the resumed step."""
        for group in self.engine.optimizer.param_groups:
            group["initial_lr"] = self.options.lr
        return torch.optim.lr_scheduler.LambdaLR(
            self.engine.optimizer, lambda step: learning_rate(step, self.options), last_epoch=self.step - 1
        )

    def _batch(self, step: int) -> data.Batch:
        o = self.options
        return self.corpus.batch(step, batch=o.batch, context=self.shape.context, seed=o.seed)

    def _micro_batches(self, batch: data.Batch) -> Iterator[data.Batch]:
        return self.world.micro_batches(batch, self.options.accumulate)

    def _on_device(self, batch: data.Batch) -> data.Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def train(self, screen: Screen, stop: StopRequest) -> bool:
        """Runs the steps that are left. Returns whether it was stopped before the last one."""
        path = self.out / "metrics.jsonl" if self.world.rank == 0 else Path(os.devnull)
        start: metrics.Record = {"held_out_start": self.evaluate()} if self.step == 0 else {}
        with metrics.MetricsFile(path) as log:
            while self.step < self.options.steps:
                lr = float(self.schedule.get_last_lr()[0])
                self._record_now()
                began = time.perf_counter()
                loss, stopping = self.world.mean(self._train_step(), bool(stop.signal))
                seconds = time.perf_counter() - began
                self.step += 1
                self._must_be_finite("loss", loss)
                record = self._record(loss, lr, seconds) | start
                start = {}
                last = self.step == self.options.steps
                if last or self.step % self.options.eval_every == 0:
                    record["held_out"] = self.evaluate()
                log.write(record)
                screen.step(record)
                every = self.options.save_every
                if every != 0 and (last or stopping or (every and self.step % every == 0)):
                    self._save()
                if self._saving is not None and (last or stopping or self._saving.done()):
                    self._saving.result()
                    self._saving = None
                if stopping and not last:
                    return True
        return False

    def _record_now(self) -> None:
        """Record a few early steps, so that a stopped run has a trace, and the last ones, which replace them."""
        recorder = getattr(self.engine, "recorder", None)
        if recorder is None:
            return
        if self.step in (self._first + 1, max(self._first + 1, self.options.steps - RECORDED)):
            recorder.start()
        elif recorder.enabled and self.step == self._first + 1 + RECORDED:
            recorder.stop()

    def _train_step(self) -> torch.Tensor:
        """One update. Returns this rank's mean loss, on the device: reading it waits for the backward."""
        losses = []
        for micro in self._micro_batches(self._batch(self.step)):
            loss = self.engine.model(**self._on_device(micro)).loss
            (loss / self.options.accumulate).backward()
            losses.append(loss.detach())
        self.engine.optimizer.step()
        self.schedule.step()
        self.engine.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def _record(self, loss: float, lr: float, seconds: float) -> metrics.Record:
        report = self.engine.memory_report()
        record = {
            "step": self.step,
            "loss": loss,
            "tokens_per_s": self.options.batch * self.shape.context / seconds,
            "device_bytes": sum(size for place, _, size in report if place.startswith("device")),
            "host_bytes": sum(size for place, _, size in report if place.startswith("host")),
            "lr": lr,
        }
        norm = getattr(self.engine, "grad_norm", None)
        return record if norm is None else record | {"grad_norm": float(norm)}

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the held-out batches, nats per byte."""
        self.engine.model.eval()
        batches = self.corpus.held_out_batches(
            self.options.eval_batches, batch=self.options.batch, context=self.shape.context
        )
        losses = [
            self.engine.model(**self._on_device(micro)).loss
            for batch in batches
            for micro in self._micro_batches(batch)
        ]
        self.engine.model.train()
        loss = self.world.mean(torch.stack(losses).mean())[0]
        self._must_be_finite("held-out loss", loss)
        return loss

    def _must_be_finite(self, what: str, loss: float) -> None:
        if math.isfinite(loss):
            return
        saved = checkpoints.latest(self.folder)
        back = f", resuming from {saved}" if saved else ""
        raise FerryError(
            f"the {what} became {loss} at step {self.step}: try a lower --lr (it is {self.options.lr:g}), "
            f"a longer --warmup or --clip 1.0{back}"
        )

    def _save(self) -> None:
        """Beside training where the engine can, otherwise now."""
        meta = {"options": self.options.as_dict()}
        begin = getattr(self.engine, "save_async", None)
        if begin is not None and self.world.size == 1:
            if self._saving is not None:
                self._saving.result()
            state_file = checkpoints.begin(self.folder, self.step)
            if state_file is not None:
                commit = partial(checkpoints.commit, state_file, meta, keep=self.options.keep)
                self._saving = begin(state_file, key="engine", extra={"rng": self._rng()}, then=commit)
            return
        state = {"engine": self.engine.state_dict(), "rng": self._rng()}  # every rank: it may communicate
        if self.world.rank == 0:
            checkpoints.save(self.folder, self.step, state, meta, keep=self.options.keep)

    def _rng(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            states["device"] = torch.get_device_module(self.device).get_rng_state()
        return states

    def _restore_rng(self, states: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self.device.type != "cpu" and "device" in states:
            torch.get_device_module(self.device).set_rng_state(states["device"])

    def finish(self, screen: Screen) -> dict[str, Any]:
        """Writes plan, trace and plots. Returns the summary that --json prints."""
        self.engine.synchronize()
        records = metrics.read(self.out / "metrics.jsonl")
        notes = [plots.save_loss(self.out / "loss.png", records, self.entropy)]
        if hasattr(getattr(self.engine, "recorder", None), "save"):
            notes += self.engine.recorder.save(self.out)  # type: ignore[attr-defined]
        if hasattr(self.engine.plan, "save"):  # after the recording: the plan then says what it measured
            self.engine.plan.save(self.out / "plan.json")
        held_out = [r["held_out"] for r in records if "held_out" in r]
        seconds = sum(1 / r["tokens_per_s"] for r in records)
        summary = {
            "step": self.step,
            "steps": self.options.steps,
            "model": self.options.model,
            "parameters": self.shape.parameters,
            "final_loss": records[-1]["loss"],
            "held_out_loss": held_out[-1] if held_out else None,
            "unigram_entropy": self.entropy,
            "tokens_per_s": len(records) / seconds,
            "memory": [list(row) for row in self.engine.memory_report()],
            "peak_device_bytes": engines.peak_device_bytes(self.engine),
            "paths": self._paths(),
        }
        files.write_json(self.out / "summary.json", summary)
        for note in filter(None, notes):
            screen.say(note)
        return summary

    def _paths(self) -> dict[str, str]:
        names = ("metrics.jsonl", "loss.png", "plan.json", "profile.json", "trace.json", "timeline.png")
        found = {name.partition(".")[0]: str(self.out / name) for name in names if (self.out / name).exists()}
        newest = checkpoints.latest(self.folder)
        return {"out": str(self.out)} | found | ({"checkpoint": str(newest)} if newest else {})
