"""What bad inputs are tried on, and the table of cases; the modules beside this one fill it when they are imported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plan_of, small_units
from torch import nn

import memferry_ascend as mf
from memferry_ascend import cli, runtime
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import Mode
from memferry_ascend.train import checkpoints

FP32 = mf.Config(precision="fp32")


class Said(Exception):
    """The command line ended with code 2 and this sentence."""


class World:
    """A model with gradients and moments, an engine armed on first use, a run with two checkpoints, and a temporary
    folder that holds them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.folder, self.patch, self._capsys = folder, patch, capsys
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(3, 4)
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.model(self.x).sum().backward()
        self._engine: mf.Engine | None = None

    def ferry(self, **kwargs: Any) -> mf.Engine:
        arguments = {"config": FP32, "plan": plan_of(self.model, Mode.STREAM), **kwargs}
        with small_units(100):
            self._engine = mf.ferry(self.model, arguments.pop("optimizer", self.optimizer), **arguments)
        return self._engine

    @property
    def engine(self) -> mf.Engine:
        """Armed, one step behind it, nothing in flight; from here on its state must not change."""
        if self._engine is None:
            engine = self.ferry()
            self._warm(engine)
        assert self._engine is not None
        return self._engine

    def armed(self, **config: Any) -> mf.Engine:
        self._warm(engine := self.ferry(config=mf.Config(precision="fp32", **config)))
        return engine

    def _warm(self, engine: mf.Engine) -> None:
        engine.optimizer.zero_grad()
        for _ in range(engine.config.accumulate):
            engine.model(self.x).sum().backward()
        engine.optimizer.step()
        engine.synchronize()
        self.state = engine.state_dict()

    def backward(self) -> None:
        self.engine.model(self.x).sum().backward()

    def cli(self, *words: str) -> None:
        code = cli.main([str(w) for w in words])
        out, err = self._capsys.readouterr()
        assert code == 2, (code, out, err)
        assert "Traceback" not in err
        assert len(err.strip().splitlines()) == 1, err
        raise Said(err)

    def train(self, *words: Any, text: str = "text") -> None:
        base = f"train --model gpt-bad --steps 4 --batch 2 --backend cpu --precision fp32 --text {self.folder / text}"
        self.cli(*base.split(), *words)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def newest(self) -> Path:
        return checkpoints.find(self.run)

    def resume(self, *words: Any) -> None:
        self.snapshot = files_of(self.folder)
        self.cli("train", "--resume", self.run, *words)

    # -- what must not have changed --------------------------------------------------------------------------------------
    def remember(self) -> None:
        self.snapshot = files_of(self.folder)
        self.weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.moments = {
            k: {n: torch.as_tensor(t).clone() for n, t in s.items()}
            for k, s in self.optimizer.state_dict()["state"].items()
        }

    def check(self, may_add: str) -> None:
        now = files_of(self.folder)
        assert {k: now.get(k) for k in self.snapshot} == self.snapshot, "files changed"
        added = [k for k in now if k not in self.snapshot and not (may_add and k.startswith(may_add))]
        assert not added, f"files added: {added}"
        with suppress(FerryError):  # a stream says once more what it said
            runtime.current().backend.synchronize()
        if self._engine is not None and not self._engine._closed and self._engine._jobs.failure() is None:
            assert same(self._engine.state_dict(), self.state), "parameters or moments changed"
            self._engine.optimizer.zero_grad()
            for _ in range(self._engine.config.accumulate):
                self._engine.model(self.x).sum().backward()  # training goes on
            self._engine.optimizer.step()
            self._engine.close()
        elif self._engine is not None:
            if not self._engine._closed:
                with pytest.raises(FerryError):
                    self._engine.close()
            assert same(dict(self.model.named_parameters()), self.state["model"]), "parameters changed"
        else:
            assert same(dict(self.model.state_dict()), self.weights), "parameters changed"
            for p, g in zip(self.model.parameters(), self.grads, strict=True):
                assert (p.grad is None) == (g is None) and (g is None or torch.equal(p.grad, g)), (
                    "gradient changed"
                )
            moments = self.optimizer.state_dict()["state"]
            assert same({k: dict(s) for k, s in moments.items()}, self.moments), "moments changed"
            self.optimizer.step()
        self.model(self.x).sum().backward()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.detach(), b.detach())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
        for p in sorted(folder.rglob("*"))
    }


@dataclass
class Case:
    name: str
    error: type[BaseException]
    match: str
    do: Callable[[World], Any]
    may_add: str = ""


CASES: list[Case] = []


def case(
    name: str, error: type[BaseException], match: str, may_add: str = ""
) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    def add(do: Callable[[World], Any]) -> Callable[[World], Any]:
        CASES.append(Case(name, error, match, do, may_add))
        return do

    return add


def cases(
    error: type[BaseException], table: dict[str, tuple[str, Callable[[World], Any]]], may_add: str = ""
) -> None:
    for name, (match, do) in table.items():
        CASES.append(Case(name, error, match, do, may_add))


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = path

    def change(state: dict[str, Any]) -> None:
        here: Any = state
        for step in way:
            here = here[step]
        if value is None:
            del here[last]
        else:
            here[last] = value

    return change
