"""What `ferry` refuses: models, optimizers, plans, and machines without room."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import torch
from harness import plan_of, small_units
from torch import nn

import memferry_ascend as mf
from memferry_ascend import limits, runtime
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import LayerPlan, Mode, Plan

from .world import FP32, World, case, cases


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
