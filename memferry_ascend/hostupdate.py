"""Host updates of one unit: the native one-pass AdamW, or the user's own torch optimizer on host views.

Masters are always in the arena: fp32 parameters as they are, bf16 ones as upper half plus 16-bit remainder. A torch
optimizer works on a scratch buffer that holds one unit's masters and gradients in fp32; only its own state (momentum
buffers and the like) is kept per parameter.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memferry_ascend import hostmath
from memferry_ascend.arena import UnitMemory
from memferry_ascend.errors import FerryError
from memferry_ascend.layers import Param

Hypers = Sequence[dict[str, Any]]
"""Per param group, everything but its parameters, as it was when the update was handed over."""


def snapshot(groups: Sequence[dict[str, Any]]) -> Hypers:
    """Copy the hyperparameters: `scheduler.step()` runs while the workers still compute."""
    return [
        {
            k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for k, v in g.items()
            if k != "params"
        }
        for g in groups
    ]


def is_native(optimizer: torch.optim.Optimizer) -> bool:
    """True if the one-pass kernel computes what this optimizer does."""
    return type(optimizer) in (torch.optim.AdamW, torch.optim.Adam) and not any(
        g.get("amsgrad") or g.get("differentiable") for g in optimizer.param_groups
    )


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise for optimizers whose update of one parameter needs the others, or sparse gradients."""
    if isinstance(optimizer, list | tuple | dict):
        raise FerryError(
            f"ferry: expected one torch.optim.Optimizer, got a {type(optimizer).__name__}; several optimizers are not "
            "supported: use one with several param groups"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise FerryError(
            "LBFGS looks at all parameters at once and calls the closure repeatedly; use AdamW or SGD"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise FerryError("SparseAdam needs sparse gradients, which ferry does not produce; use AdamW or Adam")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FerryError(f"ferry: expected one torch.optim.Optimizer, got {type(optimizer).__name__}")


class UnitUpdate(ABC):
    """Updates a unit's masters in the arena. Called by the worker only, one unit at a time."""

    def __init__(self, memory: UnitMemory, params: list[Param]) -> None:
        self.memory = memory
        self.params = params
        self.steps = {p.index: 0 for p in params}

    @abstractmethod
    def run(self, part: Sequence[Param], summed: bool, hypers: Hypers, scale: float) -> None:
        """One update of the parameters in `part`. `summed` says whether the gradient is the fp32 sum or what arrived;
        `scale` multiplies it (clipping)."""

    @abstractmethod
    def state_of(self, p: Param) -> dict[str, Any]:
        """Optimizer state under torch's names: fp32 host tensors in the parameter's shape, and plain numbers."""

    @abstractmethod
    def load_state(self, p: Param, state: Mapping[str, Any]) -> None:
        """Take what `state_of` gave; an empty state is that of a parameter that was never updated."""

    def hand_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Give every parameter's state to the user's optimizer, unit by unit as the engine closes."""
        for p in self.params:
            optimizer.state.pop(p.param, None)
            state = self.state_of(p)
            if state:
                optimizer.state[p.param] = {k: _own(k, v, p.param.dtype) for k, v in state.items()}

    def check_state(self, p: Param, state: Any) -> None:
        """Raise unless `load_state` would accept it; changes nothing.

        Raises:
            FerryError: no mapping, a shape that cannot belong to this parameter, or `step` is no whole number.
        """
        if not isinstance(state, Mapping):
            raise FerryError(
                f"optimizer state of {p.name!r}: expected a mapping, found {type(state).__name__}"
            )
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not _belongs(value, p):
                raise FerryError(
                    f"optimizer state of {p.name!r}: {key} has shape {tuple(value.shape)}, expected {tuple(p.shape)}"
                )
        try:
            steps = float(state.get("step", 0))
        except (TypeError, ValueError, RuntimeError):
            steps = math.nan
        if not (steps >= 0 and steps.is_integer()):
            raise FerryError(
                f"optimizer state of {p.name!r}: expected step to be a whole number, found {state['step']!r}"
            )


def _own(key: str, value: Any, dtype: torch.dtype) -> Any:
    """As `Optimizer.load_state_dict` would have it: per-element state in the parameter's dtype."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(dtype if value.is_floating_point() and key != "step" else value.dtype, copy=True)


def _belongs(value: torch.Tensor, p: Param) -> bool:
    """Per element, factored over some dimensions (Adafactor), or one number."""
    return value.numel() == 1 or (
        value.dim() == len(p.shape) and all(a in (1, b) for a, b in zip(value.shape, p.shape, strict=True))
    )


class AdamUpdate(UnitUpdate):
    """AdamW and Adam, wherever the memory is. Neighbouring parameters with equal hyperparameters are one segment."""

    def __init__(self, memory: UnitMemory, params: list[Param], decoupled: bool) -> None:
        super().__init__(memory, params)
        self._decoupled = decoupled
        self._runs = self._merge(params)
        self._single = [[p] for p in params]

    def _merge(self, params: list[Param]) -> list[list[Param]]:
        """Runs of parameters that are adjacent in both layouts; the gaps between them hold zeros and stay zero."""
        runs: list[list[Param]] = []
        for p in params:
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and last.index + 1 == p.index
                and last.group == p.group
                and last.dtype == p.dtype
            ):
                runs[-1].append(p)
            else:
                runs.append([p])
        return runs

    def _take(self, part: Sequence[Param]) -> tuple[list[list[Param]], list[bool]]:
        """Count one more step of `part`: the segments to update, and which of them take part."""
        taking = {p.index for p in part}
        merged = len(taking) == len(self.params) and len(set(self.steps.values())) <= 1
        groups = self._runs if merged else self._single
        for p in part:
            self.steps[p.index] += 1
        return groups, [run[0].index in taking for run in groups]

    def _hyper(self, p: Param, hypers: Hypers, scale: float, on: bool) -> hostmath.AdamHyper:
        h = hypers[p.group]
        beta1, beta2 = h["betas"]
        return hostmath.AdamHyper(
            lr=float(h["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=h["eps"],
            weight_decay=h["weight_decay"],
            step=self.steps[p.index] if on else 1,
            decoupled=bool(h.get("decoupled_weight_decay", self._decoupled)),
            maximize=bool(h.get("maximize")),
            grad_scale=scale,
        )

    def check_state(self, p: Param, state: Any) -> None:
        super().check_state(p, state)
        missing = {"step", "exp_avg", "exp_avg_sq"} - set(state)
        if state and missing:
            raise FerryError(
                f"optimizer state of {p.name!r}: expected exp_avg, exp_avg_sq and step, missing {sorted(missing)}"
            )
        for key in ("exp_avg", "exp_avg_sq") if state else ():
            if not isinstance(state[key], torch.Tensor) or state[key].shape != p.shape:
                raise FerryError(
                    f"optimizer state of {p.name!r}: {key} is no tensor of shape {tuple(p.shape)}"
                )


class NativeUpdate(AdamUpdate):
    """In one native pass over the arena."""

    def __init__(self, memory: UnitMemory, params: list[Param], decoupled: bool) -> None:
        super().__init__(memory, params, decoupled)
        self._programs: dict[tuple[bool, bool], hostmath.AdamProgram] = {}
        self._program(False, True)

    def _program(self, summed: bool, merged: bool) -> hostmath.AdamProgram:
        key = (summed, merged)
        if key not in self._programs:
            groups = self._runs if merged else self._single
            self._programs[key] = hostmath.AdamProgram([self._segment(run, summed) for run in groups])
        return self._programs[key]

    def _segment(self, run: list[Param], summed: bool) -> hostmath.AdamSegment:
        places = self.memory.layout.places
        first, last = run[0], run[-1]
        item = first.dtype.itemsize
        byte0, byte1 = places[first.index].offset, places[last.index].offset + last.numel * item
        el0, el1 = places[first.index].element, places[last.index].element + last.numel

        def state(kind: str, dtype: torch.dtype) -> torch.Tensor:
            return self.memory.state[kind].host.view(dtype)[el0:el1]

        assert self.memory.grad is not None
        grad = (
            state("acc", torch.float32)
            if summed
            else self.memory.grad.host[byte0 : byte0 + (byte1 - byte0)].view(first.dtype)
        )
        return hostmath.AdamSegment(
            grad=grad,
            param=self.memory.param.host[byte0:byte1].view(first.dtype),
            lo=state("lo", torch.int16) if first.dtype is torch.bfloat16 else None,
            exp_avg=state("m", torch.float32),
            exp_avg_sq=state("v", torch.float32),
        )

    def run(self, part: Sequence[Param], summed: bool, hypers: Hypers, scale: float) -> None:
        program, rows, enabled = self._rows(part, summed, hypers, scale)
        program.run(rows, enabled)

    def prepare(self, part: Sequence[Param], summed: bool, hypers: Hypers) -> tuple[int, int]:
        """For the native worker, which brings the scale itself: the table's address and rows."""
        program, rows, enabled = self._rows(part, summed, hypers, 1.0)
        return program.prepare(rows, enabled)

    def _rows(
        self, part: Sequence[Param], summed: bool, hypers: Hypers, scale: float
    ) -> tuple[hostmath.AdamProgram, list[hostmath.AdamHyper], list[bool]]:
        groups, enabled = self._take(part)
        rows = [self._hyper(run[0], hypers, scale, on) for run, on in zip(groups, enabled, strict=True)]
        return self._program(summed, groups is self._runs), rows, enabled

    def state_of(self, p: Param) -> dict[str, Any]:
        if not self.steps[p.index]:
            return {}  # as in plain PyTorch before its first update
        return {
            "step": torch.tensor(float(self.steps[p.index])),
            "exp_avg": self.memory.host_state("m", p).view(p.shape),
            "exp_avg_sq": self.memory.host_state("v", p).view(p.shape),
        }

    def load_state(self, p: Param, state: Mapping[str, Any]) -> None:
        if not state:
            self.memory.host_state("m", p).zero_()
            self.memory.host_state("v", p).zero_()
            self.steps[p.index] = 0
            return
        for kind, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            self.memory.host_state(kind, p).view(p.shape).copy_(state[key])
        self.steps[p.index] = int(state["step"])


class Scratch:
    """fp32 masters and gradients of one unit at a time, shared by all units of an engine."""

    def __init__(self, elements: int) -> None:
        self.param = torch.zeros(elements, dtype=torch.float32)
        self.grad = torch.zeros(elements, dtype=torch.float32)


class TorchUpdate(UnitUpdate):
    """Any per-parameter torch optimizer: a copy of the user's, over this unit's masters."""

    def __init__(
        self, memory: UnitMemory, params: list[Param], optimizer: torch.optim.Optimizer, scratch: Scratch
    ) -> None:
        super().__init__(memory, params)
        self._scratch = scratch
        self._optimizer = copy.copy(optimizer)
        for key, value in vars(
            optimizer
        ).items():  # what a subclass keeps on itself; torch's copy leaves it out
            if key != "step":  # a scheduler's or our own wrapper of the original
                vars(self._optimizer).setdefault(key, value)
        # The user's hooks run once a step, around FerryOptimizer.step.
        self._optimizer._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer._optimizer_step_post_hooks = OrderedDict()
        self._optimizer.state = defaultdict(dict)
        self._masters: dict[int, torch.nn.Parameter] = {}
        self._grads: dict[int, torch.Tensor] = {}
        groups: dict[int, list[torch.nn.Parameter]] = {}
        for p in params:
            at = memory.layout.places[p.index].element
            flat = (
                memory.host_param(p).view(-1)
                if p.dtype is torch.float32
                else scratch.param[at : at + p.numel]
            )
            master = torch.nn.Parameter(flat.view(p.shape))
            self._masters[p.index] = master
            self._grads[p.index] = scratch.grad[at : at + p.numel].view(p.shape)
            groups.setdefault(p.group, []).append(master)
        self._groups = sorted(groups)
        self._optimizer.param_groups = [
            {**optimizer.param_groups[g], "params": groups[g]} for g in self._groups
        ]

    def run(self, part: Sequence[Param], summed: bool, hypers: Hypers, scale: float) -> None:
        for group, g in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(hypers[g])
        with torch.no_grad():
            for p in part:
                self.steps[p.index] += 1
                master, grad = self._masters[p.index], self._grads[p.index]
                source = (
                    self.memory.host_state("acc", p).view(p.shape) if summed else self.memory.host_grad(p)
                )
                grad.copy_(source)
                if scale != 1.0:
                    grad.mul_(scale)
                if p.dtype is torch.bfloat16:
                    hostmath.join_master(
                        self.memory.host_param(p).view(-1),
                        self.memory.host_state("lo", p),
                        master.data.view(-1),
                    )
                master.grad = grad
            self._optimizer.step()
            for p in part:
                master = self._masters[p.index]
                master.grad = None
                if p.dtype is torch.bfloat16:
                    hostmath.split_master(
                        master.data.view(-1),
                        self.memory.host_param(p).view(-1),
                        self.memory.host_state("lo", p),
                    )

    def state_of(self, p: Param) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._masters[p.index], {}))

    def load_state(self, p: Param, state: Mapping[str, Any]) -> None:
        fresh: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value = value.detach().to("cpu", copy=True)
                if value.is_floating_point():
                    value = value.float()
            fresh[key] = value
        self._optimizer.state.pop(self._masters[p.index], None)
        if fresh:
            self._optimizer.state[self._masters[p.index]] = fresh
        step = state.get("step", 0)
        self.steps[p.index] = int(step)
