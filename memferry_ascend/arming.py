"""Arming: everything that is allocated, computed and bound once, before the first step."""

from __future__ import annotations

import torch
from torch import nn

from memferry_ascend import hostmath, limits
from memferry_ascend.arena import Arena, UnitMemory
from memferry_ascend.backends.base import Backend
from memferry_ascend.deviceupdate import DeviceMemory, DeviceUpdate
from memferry_ascend.errors import FerryError
from memferry_ascend.hostupdate import NativeUpdate, Scratch, TorchUpdate, UnitUpdate, is_native
from memferry_ascend.layers import Param, Unit
from memferry_ascend.planner.plan import Update
from memferry_ascend.ring import Ring
from memferry_ascend.weights import Source, bind


def refuse_model(model: nn.Module) -> None:
    """Raise for models whose forward does not run module by module."""
    if not isinstance(model, nn.Module):
        raise FerryError(f"ferry: expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise FerryError(
                f"ferry: expected a plain module, got a torch.compile'd one (at {name or 'the root'!r}); ferry it "
                "uncompiled"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise FerryError(f"ferry: expected a plain module, {name or 'the root'!r} is a TorchScript one")


def assign_groups(params: list[Param], optimizer: torch.optim.Optimizer) -> None:
    """Give every trainable parameter its param group.

    Raises:
        FerryError: the optimizer holds a parameter twice, one that is not in the model, or misses a trainable one.
    """
    by_id = {id(p.param): p for p in params}
    seen: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for t in group["params"]:
            if id(t) not in by_id:
                raise FerryError(
                    f"the optimizer's group {number} holds a parameter of shape {tuple(t.shape)} that is not in the "
                    "model; make the optimizer from model.parameters()"
                )
            if id(t) in seen:
                raise FerryError(f"the optimizer holds parameter {by_id[id(t)].name!r} twice; list it once")
            seen.add(id(t))
            by_id[id(t)].group = number
    for p in params:
        if p.group < 0:
            if p.trainable:
                raise FerryError(
                    f"parameter {p.name!r} is trainable but not in the optimizer; add it, or set requires_grad=False"
                )
        elif not p.trainable:
            p.group = -1  # frozen: listed by habit, never updated


def fill(
    units: list[Unit],
    arena: Arena,
    backend: Backend,
    native: bool,
    source: Source,
    out: list[UnitMemory],
    originals: dict[int, torch.Tensor],
) -> None:
    """Allocate every unit's regions and move the model's values in; the module's own memory is let go unit by unit.

    `out` grows with every unit, so that a failure can be undone. `originals` keeps, by parameter index, the values that
    the arena holds rounded (frozen fp32 parameters that become bf16); everything else can be read back.
    """
    left = limits.expected(units, native)
    for unit in units:
        if unit.plan.update is Update.DEVICE:
            out.append(DeviceMemory(unit, backend))
            _move_in(out[-1], source, originals)
            continue
        memory = UnitMemory(unit)
        for kind, nbytes, mapped in limits.regions(unit, native):
            region = arena.region(kind, nbytes, mapped=mapped, expect=left[kind])
            left[kind] -= nbytes
            if kind == "param":
                memory.param = region
            elif kind == "grad":
                memory.grad = region
            else:
                memory.state[kind] = region
        out.append(memory)
        _move_in(memory, source, originals)
    source.finish()


def _move_in(memory: UnitMemory, source: Source, originals: dict[int, torch.Tensor]) -> None:
    for layer in memory.unit.layers:
        with source.values(layer) as values:
            for p in layer.params:
                set_master(memory, p, values.pop(p.index))
                if not p.trainable and p.param.dtype is not p.dtype and not p.param.is_meta:
                    originals[p.index] = p.param.data
                p.param.grad = None
                bind(p.param, memory.device_param(p))


def set_master(memory: UnitMemory, p: Param, value: torch.Tensor) -> None:
    """Write a master value (any float dtype, CPU) into the unit's memory."""
    if isinstance(memory, DeviceMemory):
        memory.set_master(p, value)
        return
    target = memory.host_param(p)
    if p.dtype is torch.bfloat16 and p.trainable:
        flat = value.detach().float().contiguous().view(-1)
        hostmath.split_master(flat, target.view(-1), memory.host_state("lo", p))
    else:
        with torch.no_grad():
            target.copy_(value)


def get_master(memory: UnitMemory, p: Param) -> torch.Tensor:
    """A copy of a parameter's master: fp32 for trainable parameters, the stored dtype for frozen ones."""
    if isinstance(memory, DeviceMemory):
        return memory.master(p)
    if p.dtype is torch.bfloat16 and p.trainable:
        out = torch.empty(p.numel, dtype=torch.float32)
        hostmath.join_master(memory.host_param(p).view(-1), memory.host_state("lo", p), out)
        return out.view(p.shape)
    return memory.host_param(p).clone()


def make_updates(
    memories: list[UnitMemory], optimizer: torch.optim.Optimizer, *, load: bool = True
) -> dict[int, UnitUpdate]:
    """The host update of each unit that has trainable parameters, by unit index, with the optimizer's state if `load`."""
    out: dict[int, UnitUpdate] = {}
    native = is_native(optimizer)
    scratch = None if native else Scratch(max((m.layout.elements for m in memories), default=0))
    for memory in memories:
        params = [p for p in memory.unit.params if p.trainable]
        if not params:
            continue
        update: UnitUpdate
        if isinstance(memory, DeviceMemory):
            update = DeviceUpdate(memory, params, type(optimizer) is torch.optim.AdamW)
        elif native:
            update = NativeUpdate(memory, params, type(optimizer) is torch.optim.AdamW)
        else:
            assert scratch is not None
            update = TorchUpdate(memory, params, optimizer, scratch)
        for p in params:
            if load and optimizer.state.get(p.param):
                update.check_state(p, optimizer.state[p.param])
                update.load_state(p, optimizer.state[p.param])
        out[memory.unit.index] = update
    return out


def make_ring(units: list[Unit], backend: Backend, slots: int) -> Ring | None:
    """A ring of at most `slots` slots that holds the largest streamed unit, or None when nothing is streamed."""
    shape = limits.ring_shape(units, slots)
    return None if shape is None else Ring(backend, *shape)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers keep their dtype and follow the parameters to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
