"""Training loops that go wrong, and faults beneath them."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memferry_ascend import runtime
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.saving import SaveError

from .world import World, case


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
