"""The way back: a model that was armed, or half armed when something failed, becomes plain CPU parameters again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from memferry_ascend import arming
from memferry_ascend.deviceupdate import DeviceMemory
from memferry_ascend.errors import FerryError
from memferry_ascend.guard import ReadGuard

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine

MOMENTS = ("m", "v")


def undo(engine: Engine) -> None:
    """`ferry` failed: give the model back as it was, whatever had been done to it. Never raises."""
    engine._jobs.close()
    with contextlib.suppress(Exception):
        engine._backend.synchronize()
    _unhook(engine)
    for memory in engine._memories:
        for p in memory.unit.params:
            if p.param.data_ptr() == memory.device_param(p).data_ptr() or engine._residents:
                original = engine._originals.get(p.index)
                value = arming.get_master(memory, p) if original is None else original
                p.param.grad = None
                p.param.data = value.to(engine._dtypes[p.index])
    for p in engine._params:
        p.param.grad = engine._grads_before.get(p.index)
    arming.move_buffers(engine.model, torch.device("cpu"))
    _release(engine)


def close(engine: Engine) -> BaseException | None:
    """`Engine.close`: can be called again if it was interrupted. Returns what had gone wrong before."""
    engine._jobs.close()
    failure = engine._jobs.failure()
    error: BaseException | None = None if failure is None else FerryError(failure)
    if engine._saving is not None:
        error = error or engine._saving.unseen_failure()
        engine._saving = None
    try:
        engine._backend.synchronize()
    except Exception as e:
        error = error or e
    _unhook(engine)
    arena = engine._arena
    for r in engine._residents:  # the parameters first, then what must not be in memory twice at once
        for p in r.unit.params:
            p.param.grad = None
            p.param.data = r.last_value(p).to(engine._dtypes[p.index])
    for r in engine._residents:  # a graph that is still around must raise, not read what is given back here
        r.generation += 1
    torch.autograd.graph.increment_version([p.param for p in engine._params])
    arena.release([kind for kind in arena.bytes_by_kind if kind not in MOMENTS])
    for r in engine._residents:
        update = engine._updates.get(r.unit.index)
        if update is not None:
            update.hand_back(engine.optimizer.inner)
    arming.move_buffers(engine.model, torch.device("cpu"))
    _release(engine)
    return error


def _unhook(engine: Engine) -> None:
    for handle in engine._handles:
        handle.remove()
    reads = engine.__dict__.get("_reads")
    if reads is not None:
        reads.close()
    direct = engine.__dict__.get("_direct")
    if direct is not None:
        direct.remove()
    if engine.optimizer is not None:
        engine.optimizer._detach()


def _release(engine: Engine) -> None:
    """Let go of every tensor over the arena and of all device memory, then give the pages back."""
    if engine._transfers is not None:
        engine._transfers.close()
    for r in engine._residents:  # by hand: hooks, graphs and frames may hold on to them for a while
        r.let_go()
        if isinstance(r.memory, DeviceMemory):
            r.memory.release()
    gradients = engine.__dict__.get("_gradients")
    for ug in gradients.units if gradients is not None else ():
        if ug.kept is not None:
            ug.kept.release()
    ring = engine.__dict__.get("_ring")
    if ring is not None:
        ring.close()
    engine._handles, engine._residents, engine._updates, engine._ring = [], [], {}, None
    engine._memories, engine._originals, engine._grads_before = [], {}, {}
    engine._guard = ReadGuard(
        lambda _key: None, lambda: False
    )  # the old one's callbacks hold the engine in a cycle
    engine.__dict__.pop("_gradients", None)
    engine.__dict__.pop("_clipper", None)
    engine._arena.close()
    engine.recorder.close()
