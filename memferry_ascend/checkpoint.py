"""State dicts under the original names: tensors and numbers only, loadable with or without the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memferry_ascend.deviceupdate import DeviceMemory
from memferry_ascend.errors import FerryError
from memferry_ascend.windows import Hook

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine
    from memferry_ascend.shadow import Resident

FORMAT = 1


def state_dict(engine: Engine) -> dict[str, Any]:
    """Masters, buffers, optimizer state and counters; every tensor is a copy on the CPU."""
    engine.synchronize()
    state = common_state(engine)
    buffers = state["model"]
    state["model"], state["optimizer"] = {}, {}
    for r in engine._residents:
        masters, moments = unit_state(engine, r)
        state["model"] |= masters
        state["optimizer"] |= moments
    state["model"] |= buffers
    return state


def unit_state(engine: Engine, r: Resident) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """One unit's masters and optimizer state, copied. The caller has made sure that no update of it is running."""
    model: dict[str, torch.Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for p in r.unit.params:
        value = r.master(p)
        for name in (p.name, *p.aliases):
            model[name] = value
        if p.trainable:
            state = engine._updates[r.unit.index].state_of(p)
            optimizer[p.name] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return model, optimizer


def common_state(engine: Engine) -> dict[str, Any]:
    """What is not a unit's: buffers (under "model"), hyperparameters and the format."""
    groups = [
        {
            **{k: _plain(v) for k, v in g.items() if k != "params"},
            "params": [_name(engine, p) for p in g["params"]],
        }
        for g in engine.optimizer.param_groups
    ]
    return {
        "format": FORMAT,
        "model": {name: b.detach().to("cpu", copy=True) for name, b in persistent_buffers(engine.model)},
        "optimizer": {},
        "optimizer_class": type(engine.optimizer.inner).__name__,
        "param_groups": groups,
    }


def _plain(value: Any) -> Any:
    """Hyperparameters of the moment: a tensor learning rate goes on changing."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _name(engine: Engine, param: nn.Parameter) -> str:
    return next(p.name for p in engine._params if p.param is param)


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that belong in a state dict."""
    out = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                out.append((f"{prefix}.{name}" if prefix else name, buffer))
    return out


def load_state_dict(engine: Engine, state: Mapping[str, Any]) -> None:
    """Check everything first, then write masters, buffers, moments and hyperparameters."""
    if not isinstance(state, Mapping) or "format" not in state or "model" not in state:
        raise FerryError(
            'engine state: expected a mapping with "format" and "model", as engine.state_dict() gives'
        )
    if state["format"] != FORMAT:
        raise FerryError(
            f"engine state: expected format {FORMAT}, found {state['format']!r}; another version wrote it"
        )
    values, moments = state["model"], state.get("optimizer", {})
    if not isinstance(values, Mapping) or not isinstance(moments, Mapping):
        raise FerryError('engine state: expected "model" and "optimizer" to map parameter names')
    buffers = dict(persistent_buffers(engine.model))
    wanted = {p.name: p.shape for p in engine._params} | {k: b.shape for k, b in buffers.items()}
    missing = sorted(set(wanted) - set(values))
    extra = sorted(set(values) - set(wanted) - {a for p in engine._params for a in p.aliases})
    if missing or extra:
        raise FerryError(f"engine state of another model: missing {missing[:5]}, unexpected {extra[:5]}")
    for name, shape in wanted.items():
        if not isinstance(values[name], torch.Tensor):
            raise FerryError(
                f"engine state: expected {name!r} to be a tensor, found {type(values[name]).__name__}"
            )
        if values[name].shape != shape:
            raise FerryError(
                f"engine state: {name!r} has shape {tuple(values[name].shape)}, expected {tuple(shape)}"
            )
    ours, theirs = type(engine.optimizer.inner).__name__, state.get("optimizer_class")
    if theirs is not None and ours != theirs:
        raise FerryError(
            f"engine state: its optimizer is {theirs}, this one is {ours}; load it into the same class"
        )
    for r in engine._residents:
        for p in r.unit.params:
            if p.trainable:
                engine._updates[r.unit.index].check_state(p, moments.get(p.name, {}))
    groups = _groups_for(engine, state)
    with torch.no_grad(), engine._writing():
        for r in engine._residents:
            for p in r.unit.params:
                r.set_master(p, values[p.name])
                if p.trainable and "optimizer" in state:
                    engine._updates[r.unit.index].load_state(p, moments.get(p.name, {}))
        for name, buffer in buffers.items():
            buffer.copy_(values[name])
    refresh(engine, engine._residents)
    for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update(saved)


def _groups_for(engine: Engine, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hyperparameters for each of the engine's param groups; as they are when the state holds none.

    Raises:
        FerryError: other groups, or amsgrad where the engine was armed without it (or the reverse).
    """
    ours = engine.optimizer.param_groups
    if "param_groups" not in state:
        return [{} for _ in ours]
    saved = state["param_groups"]
    names = [sorted(_name(engine, p) for p in g["params"]) for g in ours]
    found = [sorted(g["params"]) for g in saved]
    if names != found:
        raise FerryError(
            f"engine state: its param groups hold {[len(g) for g in found]} parameters, this optimizer's "
            f"{[len(g) for g in names]}, or others; make the optimizer with the same groups"
        )
    for mine, other in zip(ours, saved, strict=True):
        if bool(mine.get("amsgrad")) != bool(other.get("amsgrad")):
            raise FerryError(
                "engine state: amsgrad differs from the armed optimizer's; ferry it with the same"
            )
    return [{k: v for k, v in g.items() if k != "params"} for g in saved]


def refresh(engine: Engine, residents: list[Resident]) -> None:
    """The arena has new values: bring device copies up to date and bind parameters to their places again."""
    for r in residents:
        r.generation += 1
        r.forget()
        r.upload()
        r.bind_rest()
    engine._backend.synchronize()
    torch.autograd.graph.increment_version([p.param for r in residents for p in r.unit.params])
    engine._integrity.note()


def reconcile(engine: Engine, before: list[torch.Tensor]) -> None:
    """After an edit: the master of every element whose value changed is exactly that value."""
    for r, old in zip(engine._residents, before, strict=True):
        if isinstance(r.memory, DeviceMemory):
            r.memory.forget_remainders(old)
            for p in r.unit.params:
                if p.param.data_ptr() != r.memory.device_param(p).data_ptr():  # `p.data = x`
                    r.memory.set_master(p, p.param.detach().cpu())
            continue
        for p in r.unit.params:
            if p.param.data_ptr() != r.memory.device_param(p).data_ptr():  # `p.data = x`
                r.set_master(p, p.param.detach().cpu())
                continue
            if not p.trainable or p.dtype is not torch.bfloat16:
                continue
            place = r.memory.layout.places[p.index].offset
            was = old[place : place + p.nbytes].view(torch.int16)
            now = r.memory.host_param(p).view(-1).view(torch.int16)
            r.memory.host_state("lo", p)[was != now] = 0
    refresh(engine, engine._residents)


def install_state_dict_hooks(engine: Engine) -> list[RemovableHandle]:
    """`model.state_dict()` is a consistent snapshot; `model.load_state_dict()` is an edit."""
    edits: list[Any] = []

    def before_save(*_: Any) -> None:
        engine.synchronize()

    def after_save(module: nn.Module, out: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, value in list(out.items()):
            if isinstance(value, torch.Tensor) and name.startswith(prefix):
                out[name] = value.detach().to("cpu", copy=True)

    def before_load(_module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise FerryError(
                "load_state_dict(assign=True) would replace the parameters that the engine updates; leave assign out"
            )
        edit = engine.edit()
        edit.__enter__()
        edits.append(edit)

    def after_load(*_: Any) -> None:
        if edits:
            edits.pop().__exit__(None, None, None)

    model = engine.model
    return [
        model.register_state_dict_pre_hook(Hook(before_save)),
        model.register_state_dict_post_hook(Hook(after_save)),
        model.register_load_state_dict_pre_hook(Hook(before_load)),
        model.register_load_state_dict_post_hook(Hook(after_load)),
    ]
