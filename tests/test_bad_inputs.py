"""Bad input and broken surroundings, a table: each ends in the named error and leaves files and parameters as they were."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plan_of, small_units
from torch import nn

import memferry_ascend as mf
from memferry_ascend import cli, files, limits, runtime, sizes
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.planner import LayerPlan, Mode, Plan
from memferry_ascend.saving import SaveError
from memferry_ascend.train import checkpoints, models
from memferry_ascend.train import options as train_options

FP32 = mf.Config(precision="fp32")
SHAPE = models.Shape(layers=1, width=8, heads=2, context=8)


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


# -- Config ----------------------------------------------------------------------------------------------
BAD_FIELDS: dict[str, list[Any]] = {
    "precision": ["fp16", None, 32, ""],
    "update": ["later", None],
    "dispatch": ["fast", 1],
    "planner": ["", None, 3],
    "device_memory": ["24G", "much", -1, 0, 1.5, True, "nanGiB", "-1GiB"],
    "host_memory": ["1 XiB", 0, -5, float("inf"), "GiB"],
    "keep_fp32": ["norm", 3, None],
    "assist_devices": ["1,2", 1],
    "reserve": [-0.1, 1.5, float("nan"), "half", True],
    "accumulate": [0, -1, 1.5, True, None, "2"],
    "max_grad_norm": [0, -1.0, float("inf"), float("nan"), "1", True],
    "threads": [0, -2, 1.5, True, "4"],
}
for name, values in BAD_FIELDS.items():
    for value in values:
        CASES.append(
            Case(
                f"Config.{name}={value!r}",
                ConfigError,
                f"Config.{name}",
                lambda w, name=name, value=value: mf.Config(**{name: value}),  # type: ignore[misc]
            )
        )

cases(
    ConfigError,
    {
        "an unknown key": (
            "did you mean 'precision'",
            lambda w: mf.Config.from_mapping({"precison": "bf16"}),
        ),
        "a key of nothing": ("unknown configuration key", lambda w: mf.Config.from_mapping({"zzz": 1})),
        "an unknown backend": ("unknown backend 'gpu'", lambda w: runtime.make_backend("gpu")),
        "a second init with another backend": ("init was called with", lambda w: mf.init(backend="cuda")),
        "a second init with another topology": ("init was called with", lambda w: mf.init("cm384", "cpu")),
        "a size without a unit's base": ("ambiguous", lambda w: sizes.parse("24G")),
        "a size that is no number": ("cannot read", lambda w: sizes.parse("a lot")),
        "a budget without a sample batch": (
            "sample_batch",
            lambda w: w.ferry(config=mf.Config(device_memory="1GiB")),
        ),
        "a plan file that is not there": (
            "none.json",
            lambda w: w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "none.json"))),
        ),
    },
)


@case("a plan file that is no JSON", ConfigError, "plan file")
def _(w: World) -> None:
    (w.folder / "p.json").write_text("{")
    w.remember()
    w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "p.json")))


@case("a plan file of another kind", ConfigError, "plan file")
def _(w: World) -> None:
    (w.folder / "p.json").write_text('{"format": "memferry profile", "version": 1, "layers": []}')
    w.remember()
    w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "p.json")))


@case("a plan file with an unknown mode", ConfigError, "mode must be one of")
def _(w: World) -> None:
    (w.folder / "p.json").write_text(
        '{"format": "memferry plan", "version": 1, "layers": [{"name": "0", "mode": "FAST"}]}'
    )
    w.remember()
    w.ferry(plan=None, config=mf.Config(planner=str(w.folder / "p.json")))


# -- ferry -----------------------------------------------------------------------------------------------
def plan(*names: str) -> Plan:
    return Plan(tuple(LayerPlan(n, Mode.GFGB) for n in names))


def other(model: nn.Module, optimizer: Any = None) -> Callable[[World], Any]:
    def do(w: World) -> Any:
        made = optimizer(model) if optimizer is not None else torch.optim.SGD(model.parameters(), lr=0.1)
        return mf.ferry(model, made, config=FP32)

    return do


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    return model


def foreign(w: World) -> torch.optim.Optimizer:
    return torch.optim.SGD([*w.model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


def twice(w: World) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(w.model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"].append(w.model[0].weight)
    return optimizer


def wrong_moments(w: World) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(w.model.parameters())
    optimizer.state[w.model[0].weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.zeros(3),
        "exp_avg_sq": torch.zeros(3),
    }
    return optimizer


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


cases(
    FerryError,
    {
        "float16": ("dtype torch.float16", other(nn.Linear(2, 2).half())),
        "float64": ("dtype torch.float64", other(nn.Linear(2, 2).double())),
        "complex": ("dtype torch.complex64", other(nn.Linear(2, 2, dtype=torch.complex64))),
        "a sparse parameter": ("layout torch.sparse", other(sparse())),
        "a lazy module": (
            "not initialised",
            other(nn.LazyLinear(2), lambda m: torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
        ),
        "no parameters": (
            "found none",
            other(nn.ReLU(), lambda m: torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
        ),
        "all frozen": ("all are frozen", other(nn.Linear(2, 2).requires_grad_(False))),
        "no module": ("expected a torch.nn.Module, got str", lambda w: mf.ferry("model", w.optimizer)),  # type: ignore[arg-type]
        "no optimizer": ("got str", lambda w: w.ferry(optimizer="adamw")),
        "several optimizers": ("several optimizers", lambda w: w.ferry(optimizer=[w.optimizer, w.optimizer])),
        "a foreign parameter": (
            r"shape \(3,\) that is not in the model",
            lambda w: w.ferry(optimizer=foreign(w)),
        ),
        "a duplicate parameter": ("'0.weight' twice", lambda w: w.ferry(optimizer=twice(w))),
        "a parameter left out": (
            "trainable but not in the optimizer",
            lambda w: w.ferry(optimizer=torch.optim.SGD([w.model[0].weight], lr=1)),
        ),
        "LBFGS": ("LBFGS", lambda w: w.ferry(optimizer=torch.optim.LBFGS(w.model.parameters()))),
        "SparseAdam": (
            "SparseAdam",
            lambda w: w.ferry(optimizer=torch.optim.SparseAdam(list(w.model.parameters()))),
        ),
        "moments of another shape": ("exp_avg has shape", lambda w: w.ferry(optimizer=wrong_moments(w))),
        "max_norm": ("max_norm", other(nn.Embedding(3, 3, max_norm=1.0))),
        "a compiled part": ("torch.compile", other(nn.Sequential(torch.compile(nn.Linear(2, 2))))),
        "ferry twice": ("ferried already", lambda w: (w.engine, mf.ferry(w.model, w.optimizer, config=FP32))),
        "a plan of another model": ("lacks '0'", lambda w: w.ferry(plan=plan("a", "b"))),
        "a plan with a layer less": ("lacks '2'", lambda w: w.ferry(plan=plan("0", "1"))),
        "a plan with a layer more": ("model lacks '3'", lambda w: w.ferry(plan=plan("0", "1", "2", "3"))),
        "a plan in another order": ("order differs", lambda w: w.ferry(plan=plan("0", "2", "1"))),
    },
)


def least_host(w: World) -> int:
    engine = w.ferry()
    need = engine._arena.nbytes
    engine.close()
    w._engine = None
    w.remember()
    return need


@case("host budget too small by one byte", FerryError, "smallest workable host_memory is")
def _(w: World) -> None:
    w.ferry(config=mf.Config(precision="fp32", host_memory=least_host(w) - 1))


@case("host budget of one byte", FerryError, "the largest: .*,.*,")
def _(w: World) -> None:
    w.ferry(config=mf.Config(host_memory=1))


@case("device too small by one byte", FerryError, "device memory: this plan keeps")
def _(w: World) -> None:
    backend = runtime.current().backend
    assert isinstance(backend, CpuBackend)
    with small_units(100):
        probe = mf.ferry(w.model, w.optimizer, config=FP32, plan=plan_of(w.model, Mode.GFGB))
    need = sum(limits.device_bytes(probe._units).values())
    probe.close()
    w.remember()
    backend.limit = need - 1
    w.ferry(plan=plan_of(w.model, Mode.GFGB))


@case("a cgroup that leaves nothing", FerryError, "free memory less a margin")
def _(w: World) -> None:
    root = w.folder / "fake"
    for name, text in {"memory.max": "4096", "memory.current": "1"}.items():
        (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    w.remember()
    real = limits.available_host_bytes
    w.patch.setattr(limits, "available_host_bytes", lambda: real(root))
    w.ferry()


@case("a locked-memory limit", FerryError, "locked memory: ")
def _(w: World) -> None:
    w.patch.setattr(CpuBackend, "locked_memory_limit", lambda self: 65)
    w.ferry()


@case("the system refuses host memory", FerryError, "the system refused")
def _(w: World) -> None:
    import mmap

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    w.patch.setattr(mmap, "mmap", refuse)
    w.ferry()


# -- the engine's states ---------------------------------------------------------------------------------
def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        state = w.engine.state_dict()
        replaced = change(state)
        w.engine.load_state_dict(state if replaced is None else replaced)

    return do


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


def optimizer_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        state = w.engine.optimizer.state_dict()
        replaced = change(state)
        w.engine.optimizer.load_state_dict(state if replaced is None else replaced)

    return do


NAN = torch.tensor(float("nan"))
cases(
    FerryError,
    {
        "state: a list": ("expected a mapping", edited(lambda s: [1])),  # type: ignore[arg-type,return-value]
        "state: empty": ("expected a mapping", edited(lambda s: {})),
        "state: of a plain model": ('"format"', edited(lambda s: s["model"])),
        "state: an older format": ("expected format 1, found 0", edited(put("format", 0))),
        "state: a newer format": ("expected format 1, found 9", edited(put("format", 9))),
        "state: no parameters": ('"format" and "model"', edited(put("model", None))),
        "state: parameters in a list": ("map parameter names", edited(put("model", [1]))),
        "state: a parameter missing": (r"missing \['0.bias'\]", edited(put("model", "0.bias", None))),
        "state: a parameter more": (
            r"unexpected \['9.bias'\]",
            edited(put("model", "9.bias", torch.zeros(1))),
        ),
        "state: a parameter of another shape": (
            "'0.bias' has shape",
            edited(put("model", "0.bias", torch.zeros(7))),
        ),
        "state: a number for a parameter": ("'0.bias' to be a tensor", edited(put("model", "0.bias", 3.0))),
        "state: of another optimizer": ("its optimizer is SGD", edited(put("optimizer_class", "SGD"))),
        "state: moments in a list": ("map parameter names", edited(put("optimizer", [1]))),
        "state: one parameter's moments are a number": (
            "'2.bias': expected a mapping",
            edited(put("optimizer", "2.bias", 1)),
        ),
        "state: moments of another shape": (
            "exp_avg.* of shape|exp_avg has shape",
            edited(put("optimizer", "2.bias", "exp_avg", torch.zeros(9))),
        ),
        "state: a moment missing": (
            r"missing \['exp_avg_sq'\]",
            edited(put("optimizer", "2.bias", "exp_avg_sq", None)),
        ),
        "state: a moment that is no tensor": (
            "exp_avg is no tensor",
            edited(put("optimizer", "2.bias", "exp_avg", 1.0)),
        ),
        "state: half a step": ("whole number", edited(put("optimizer", "2.bias", "step", 1.5))),
        "state: a negative step": ("whole number", edited(put("optimizer", "2.bias", "step", -1))),
        "state: a NaN step": ("whole number", edited(put("optimizer", "2.bias", "step", NAN))),
        "state: a step in words": ("whole number", edited(put("optimizer", "2.bias", "step", "two"))),
        "state: another group layout": ("param groups", edited(put("param_groups", []))),
        "state: a group of other parameters": (
            "param groups",
            edited(put("param_groups", 0, "params", ["0.weight"])),
        ),
        "state: amsgrad": ("amsgrad differs", edited(put("param_groups", 0, "amsgrad", True))),
        "optimizer: a list": ("expected a mapping", optimizer_state(lambda s: [])),  # type: ignore[arg-type,return-value]
        "optimizer: no groups": ('"param_groups"', optimizer_state(put("param_groups", None))),
        "optimizer: fewer groups": ("param groups of sizes", optimizer_state(put("param_groups", []))),
        "optimizer: a moment of another shape": (
            "exp_avg",
            optimizer_state(put("state", 5, "exp_avg", torch.zeros(5))),
        ),
        "optimizer: a moment missing": ("missing", optimizer_state(put("state", 5, "exp_avg", None))),
        "optimizer: half a step": ("whole number", optimizer_state(put("state", 5, "step", 0.5))),
    },
)


# -- training --------------------------------------------------------------------------------------------
@case("step without a gradient", FerryError, "at least one parameter with a gradient")
def _(w: World) -> None:
    w.engine.optimizer.step()


@case("the original optimizer's step", FerryError, "original optimizer")
def _(w: World) -> None:
    w.engine.optimizer.inner.step()


@case("a late param group", FerryError, "add_param_group after ferry")
def _(w: World) -> None:
    w.engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@case("load_state_dict with assign", FerryError, "assign=True")
def _(w: World) -> None:
    w.engine.model.load_state_dict(w.model.state_dict(), assign=True)


for bad in (0.0, -1.0, float("inf"), float("nan")):

    @case(f"clip_grad_norm_({bad})", FerryError, "positive finite max_norm")
    def _(w: World, bad: float = bad) -> None:
        w.backward()
        w.engine.clip_grad_norm_(bad)


@case("clipping twice", FerryError, "use one of the two")
def _(w: World) -> None:
    w.armed(max_grad_norm=1.0)
    w.backward()
    w.engine.clip_grad_norm_(1.0)


@case("create_graph", FerryError, "gradients of")
def _(w: World) -> None:
    w.engine.model(w.x).sum().backward(create_graph=True)


@case("a stale graph", FerryError, "before the last optimizer step")
def _(w: World) -> None:
    loss = w.engine.model(w.x).square().sum()
    w.backward()
    w.engine.optimizer.step()
    w.engine.synchronize()
    w.state = w.engine.state_dict()
    loss.backward()


@case("autocast with its cache", FerryError, "autocast")
def _(w: World) -> None:
    engine = w.engine
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.model(w.x)


@case("GradScaler", FerryError, "GradScaler")
def _(w: World) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(w.engine.model(w.x).sum()).backward()
    scaler.step(w.engine.optimizer)


@case("requires_grad toggled", FerryError, "requires_grad was toggled")
def _(w: World) -> None:
    w.backward()
    w.engine.model[0].requires_grad_(False)
    try:
        w.engine.optimizer.step()
    finally:
        w.engine.model[0].requires_grad_(True)


@case("more backwards than declared", FerryError, "accumulate=2")
def _(w: World) -> None:
    w.armed(update="backward", accumulate=2, max_grad_norm=1.0)
    w.backward()
    w.backward()
    w.backward()
    w.engine.optimizer.step()


@case("fewer backwards than declared", FerryError, "nothing of it was updated")
def _(w: World) -> None:
    w.armed(update="backward", accumulate=2)
    w.backward()
    try:
        w.engine.optimizer.step()
    finally:
        w.backward()
        w.engine.optimizer.step()
        w.engine.synchronize()
        w.state = w.engine.state_dict()


# -- faults ----------------------------------------------------------------------------------------------
def fail(point: str, error: BaseException) -> Callable[[str], None]:
    def disturb(here: str) -> None:
        if here.startswith(point):
            raise error

    return disturb


for point in ("update", "copy:download"):
    for error in (ValueError("torn"), MemoryError("torn"), OSError("torn"), SystemExit("torn")):

        @case(f"{type(error).__name__} at {point}", FerryError, "torn")
        def _(w: World, point: str = point, error: BaseException = error) -> None:
            engine = w.engine
            runtime.current().backend.disturb = fail(point, error)
            w.backward()
            engine.optimizer.step()
            engine.synchronize()


@case("the worker is killed", FerryError, "SystemExit|failed")
def _(w: World) -> None:
    worker = w.engine._jobs.worker  # type: ignore[attr-defined]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(worker._thread.ident), ctypes.py_object(SystemExit)
    )
    worker.notify()
    worker._thread.join(30)
    w.backward()
    w.engine.optimizer.step()
    w.engine.synchronize()


@case("device out of memory in the middle of a step", torch.OutOfMemoryError, "full")
def _(w: World) -> None:
    handle = w.engine.model[2].register_forward_hook(
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    )
    try:
        w.engine.model(w.x)
    finally:
        handle.remove()


@case("the model's forward raises", ZeroDivisionError, "division")
def _(w: World) -> None:
    handle = w.engine.model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        w.engine.model(w.x)
    finally:
        handle.remove()


@case("save into a folder that is not there", SaveError, "expected a folder")
def _(w: World) -> None:
    w.engine.save_async(w.folder / "none" / "a.pt")


@case("save beneath a file", SaveError, "expected a folder")
def _(w: World) -> None:
    w.engine.save_async(w.folder / "text" / "a.pt")


@case("save into a read-only folder", SaveError, r"saving /proc/a.pt failed|expected a folder")
def _(w: World) -> None:
    w.engine.save_async("/proc/a.pt").result()


@case("save with a size that is none", ConfigError, "ambiguous")
def _(w: World) -> None:
    w.engine.save_async(w.folder / "a.pt", staging="1G")


@case("disk full while saving", SaveError, "File too large|No space left")
def _(w: World) -> None:
    engine = w.engine
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # the kernel refuses the write in the middle
    try:
        engine.save_async(w.folder / "text").result()  # and what was there stays
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@case("disk full while the rename is made durable", SaveError, "No space left")
def _(w: World) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    w.patch.setattr(os, "fsync", full)
    w.engine.save_async(w.folder / "text").result()


# -- checkpoints of `memferry train` ---------------------------------------------------------------------
def damaged(name: str, change: Callable[[bytes], bytes]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        path = w.newest / name
        path.write_bytes(change(path.read_bytes()))
        w.resume("--steps", "9")

    return do


def flipped(at: float) -> Callable[[bytes], bytes]:
    return lambda b: b[: int(len(b) * at)] + bytes([b[int(len(b) * at)] ^ 16]) + b[int(len(b) * at) + 1 :]


READ = r"cannot read checkpoint .*step-000004 .*resume from an older one"
cases(
    Said,
    {
        **{
            f"state.pt cut at {at}": (READ, damaged("state.pt", lambda b, at=at: b[: int(len(b) * at)]))  # type: ignore[misc]
            for at in (0.0, 0.1, 0.5, 0.9, 0.999)
        },
        **{
            f"state.pt with a bit flipped at {at}": (READ, damaged("state.pt", flipped(at)))
            for at in (0.2, 0.4, 0.6)
        },
        "state.pt of noise": (READ, damaged("state.pt", lambda b: bytes(range(256)) * 20)),
        "state.pt of text": (READ, damaged("state.pt", lambda b: b"PK\x03\x04 hello")),
        "meta.json empty": (READ, damaged("meta.json", lambda b: b"")),
        "meta.json cut": (READ, damaged("meta.json", lambda b: b[: len(b) // 2])),
        "meta.json of another program": ("no options", damaged("meta.json", lambda b: b'{"a": 1}')),
        "meta.json with a list": ("no options", damaged("meta.json", lambda b: b"[1]")),
        "meta.json of another version": (
            "another version.*warp",
            damaged("meta.json", lambda b: json.dumps({"options": {"warp": 9}}).encode()),
        ),
        "meta.json with a bad option": (
            "--lr must be a number",
            damaged("meta.json", lambda b: json.dumps({"options": {"lr": "high"}}).encode()),
        ),
    },
)


def state_file(change: Callable[[dict[str, Any]], Any]) -> Callable[[World], Any]:
    def do(w: World) -> None:
        path = w.newest / "state.pt"
        state = torch.load(path, weights_only=True)
        replaced = change(state)
        torch.save(state if replaced is None else replaced, path)
        w.resume("--steps", "9")

    return do


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


cases(
    Said,
    {
        "a plain model's state": ("no training state", state_file(lambda s: s["engine"]["model"])),
        "a state without rng": ("no training state", state_file(put("rng", None))),
        "an older engine state": ("expected format 1, found 0", state_file(put("engine", "format", 0))),
        "another model's state": ("another model", state_file(put("engine", "model", "ln.weight", None))),
    },
)


@case("a state that runs code", Said, READ)
def _(w: World) -> None:
    torch.save({"engine": Evil(w.folder / "evil"), "rng": 1}, w.newest / "state.pt")
    w.resume("--steps", "9")  # and no file "evil" appears


@case("state.pt is missing", Said, READ)
def _(w: World) -> None:
    (w.newest / "state.pt").unlink()
    w.resume("--steps", "9")


@case("meta.json is missing", Said, READ)
def _(w: World) -> None:
    (w.newest / "meta.json").unlink()
    w.resume()


cases(
    Said,
    {
        "resume from nowhere": (
            "nothing to resume",
            lambda w: w.cli("train", "--resume", str(w.folder / "none")),
        ),
        "resume what is done": ("nothing is left", lambda w: w.resume()),
        "resume with another model": ("was trained with --model", lambda w: w.resume("--model", "gpt-1m")),
        "resume with another context": ("--context", lambda w: w.resume("--context", "4")),
        "resume in a folder of another run": (
            "already holds a run",
            lambda w: w.cli(
                "train", "--resume", str(w.newest), "--steps", "9", "--out", str(w.folder / "second")
            ),
        ),
        "a run that is there": ("already holds a run", lambda w: w.train("--out", str(w.run))),
        "no text": ("no text at", lambda w: w.train("--out", str(w.folder / "n"), text="none")),
        "empty text": ("is empty", lambda w: w.train("--out", str(w.folder / "n"), text="empty")),
        "text shorter than a sequence": (
            "too short",
            lambda w: w.train("--out", str(w.folder / "n"), text="short"),
        ),
        "a folder without text": (
            "no text files",
            lambda w: w.train("--out", str(w.folder / "n"), text="hollow"),
        ),
        "an unknown preset": (
            "unknown model preset 'gpt-2m'",
            lambda w: w.cli("train", "--model", "gpt-2m", "--out", str(w.folder / "n")),
        ),
        "an unknown flag": ("--wings", lambda w: w.train("--wings", "2")),
        "an unknown command": ("unknown command 'trian'.*'train'", lambda w: w.cli("trian")),
        "no number": ("--steps must be a whole number", lambda w: w.train("--steps", "ten")),
        "no steps": ("--steps must be at least 1", lambda w: w.train("--steps", "0")),
        "a negative rate": ("--lr must be above 0", lambda w: w.train("--lr", "-1")),
        "an unknown precision": ("bf16 or fp32", lambda w: w.train("--precision", "fp8")),
        "a bad size": ("--host-memory", lambda w: w.train("--host-memory", "9G")),
        "a batch that does not divide": ("multiple of 3", lambda w: w.train("--accumulate", "3")),
        "a budget of one byte": (
            "smallest workable host_memory",
            lambda w: w.train("--out", str(w.folder / "n"), "--host-memory", "1"),
        ),
        "a YAML file that is not there": (
            "cannot read --config",
            lambda w: w.train("--config", str(w.folder / "no")),
        ),
        "YAML that is none": ("is not YAML", lambda w: w.train("--config", str(w.folder / "bad.yaml"))),
        "YAML with a list": (
            "`key: value` lines",
            lambda w: w.train("--config", str(w.folder / "list.yaml")),
        ),
        "YAML with an unknown key": (
            "did you mean 'steps'",
            lambda w: w.train("--config", str(w.folder / "key.yaml")),
        ),
        "an output that is a file": ("text", lambda w: w.train("--out", str(w.folder / "text"))),
        "an output that cannot be written": ("/proc", lambda w: w.train("--out", "/proc/run")),
    },
)


@case("NaN gradients and loss", Said, "became nan at step .*--lr", may_add="n")
def _(w: World) -> None:
    w.train("--out", w.folder / "n", "--lr", "1e30", "--warmup", "0", "--steps", "8")


for asynchronous in (True, False):

    @case(
        f"disk full in training, {'beside' if asynchronous else 'between'} steps",
        Said,
        "No space left",
        may_add="n",
    )
    def _(w: World, asynchronous: bool = asynchronous) -> None:
        replacing = files.replacing

        def full(path: Path) -> Any:
            if path.name == "state.pt":
                raise OSError(errno.ENOSPC, "No space left on device")
            return replacing(path)

        w.patch.setattr(files, "replacing", full)
        w.train("--out", w.folder / "n", "--save-every", "1", *([] if asynchronous else ["--plain"]))


@case("disk full, the older checkpoints stay", Said, "No space left", may_add="run/checkpoints/.tmp")
def _(w: World) -> None:
    replacing = files.replacing

    def full(path: Path) -> Any:
        if path.name == "state.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(path)

    w.patch.setattr(files, "replacing", full)
    metrics = w.run / "metrics.jsonl"
    text = metrics.read_bytes()
    try:
        w.resume("--steps", "6", "--save-every", "1")
    finally:
        assert metrics.read_bytes().startswith(text)
        metrics.write_bytes(text)  # a step was trained and recorded, rightly


# -- the test --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with two checkpoints each, texts and YAML files."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "empty").write_bytes(b"")
    (folder / "short").write_bytes(b"short")
    (folder / "hollow").mkdir()
    (folder / "bad.yaml").write_text("a: [")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "key.yaml").write_text("stepz: 3\n")
    train_options.PRESETS["gpt-bad"] = SHAPE
    words = (
        f"train --model gpt-bad --steps 4 --batch 2 --save-every 2 --eval-batches 1 --text {folder / 'text'}"
    )
    words += " --backend cpu --precision fp32 --json"
    for name in ("run", "second"):
        assert cli.main([*words.split(), "--out", str(folder / name)]) == 0
    runtime.reset()
    return folder


@pytest.fixture
def world(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, request: Any
) -> Iterator[World]:
    folder = tmp_path / "world"
    shutil.copytree(prepared, folder)
    for meta in folder.rglob("meta.json"):
        meta.write_text(meta.read_text().replace(str(prepared), str(folder)))
    monkeypatch.setitem(train_options.PRESETS, "gpt-bad", SHAPE)
    if "init" in request.node.name:
        runtime.init("auto", "cpu")
    w = World(folder, monkeypatch, capsys)
    w.remember()
    yield w
    if runtime._current is not None:
        runtime.current().backend.disturb = None


def names() -> list[str]:
    return [c.name for c in CASES]


@pytest.mark.parametrize("bad", CASES, ids=lambda c: c.name)
def test_ends_in_the_named_error_and_changes_nothing(bad: Case, world: World) -> None:
    runtime.init(backend="cpu")
    with pytest.raises(bad.error, match=f"(?s){bad.match}"):
        bad.do(world)
    world.patch.undo()
    runtime.current().backend.disturb = None
    world.check(bad.may_add)


def test_there_are_at_least_a_hundred_different_ones() -> None:
    assert len(set(names())) == len(CASES) >= 100
