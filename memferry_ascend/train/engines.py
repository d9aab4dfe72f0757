"""What trains the model: the ferry engine, or plain PyTorch with the same arithmetic to compare it with."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase as fnmatch
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.train.data import Batch

if TYPE_CHECKING:
    from memferry_ascend.train.options import TrainOptions

Parameter = nn.Parameter


class Engine(Protocol):
    """What the training loop needs of an engine.

    `model(**batch).loss` is the loss; `optimizer` a true torch optimizer whose step also clips when
    `max_grad_norm` is set; `plan` prints as a table; batches go where the model's parameters are. Used when
    present: `grad_norm` (the last global norm), `plan.save(path)`, and `recorder.save(folder)`, which writes
    `trace.json` and `timeline.png`.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def plan(self) -> Any: ...
    def memory_report(self) -> list[tuple[str, str, int]]:
        """(place, what, bytes) of everything the engine holds; places start with "device" or "host"."""
        ...

    def synchronize(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def arm(
    model: nn.Module, optimizer: torch.optim.Optimizer, sample_batch: Batch, options: TrainOptions
) -> Engine:
    """The engine that `options` ask for, ready to train `model` (fp32, on the CPU) with `optimizer`."""
    if options.plain:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError("--plain trains on one device: start it without torchrun")
        return PlainEngine(model, optimizer, options)
    mf: Any = importlib.import_module("memferry_ascend")
    mf.init(topology=options.topology, backend=options.backend)
    config = mf.Config(**options.engine_config())
    engine: Engine = mf.ferry(model, optimizer, sample_batch=sample_batch, config=config)
    return engine


def peak_device_bytes(engine: Engine) -> int | None:
    """The most that the device's allocator held since the process started; None where there is no device."""
    if isinstance(engine, PlainEngine):
        if engine.device.type == "cpu":
            return None
        return int(torch.get_device_module(engine.device).max_memory_allocated(engine.device))
    mf: Any = importlib.import_module("memferry_ascend")
    return int(mf.current().backend.memory_stats().peak)


class PlainEngine:
    """Plain PyTorch on one device: everything resident, fp32 masters when the precision is bf16.

    Its arithmetic is the reference: gradients of several backwards are summed in fp32, updates are made to
    fp32 masters, and masters become bf16 rounding ties away from zero.
    """

    plan = "plain PyTorch: every layer resident, no transfers"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: TrainOptions) -> None:
        self.device = _device(options.backend)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self.grad_norm: Tensor | None = None
        self._max_grad_norm = options.max_grad_norm
        self._masters: dict[Parameter, Tensor] = {}
        self._sums: dict[Parameter, Tensor] = {}
        if (options.precision or "bf16") == "bf16":
            kept = options.keep_fp32 or ()
            for name, module in model.named_modules():
                if not any(fnmatch(name, k) or fnmatch(type(module).__name__, k) for k in kept):
                    self._masters |= {p: p.data for p in module.parameters(recurse=False)}
        hooks = [p.register_post_accumulate_grad_hook(self._sum) for p in self._masters if p.requires_grad]
        hooks.append(optimizer.register_step_pre_hook(self._before_step))
        hooks.append(optimizer.register_step_post_hook(self._after_step))
        self._hooks = hooks
        self._round()

    def _sum(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert isinstance(parameter, Parameter)
        assert gradient is not None
        parameter.grad = None
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.float()

    def _before_step(self, *_: Any) -> None:
        self._unround()
        for parameter, gradient in self._sums.items():
            parameter.grad = gradient
        self._sums.clear()
        if self._max_grad_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)

    def _after_step(self, *_: Any) -> None:
        self.optimizer.zero_grad()
        self._round()

    def _unround(self) -> None:
        for parameter, master in self._masters.items():
            parameter.data = master

    def _round(self) -> None:
        for parameter, master in self._masters.items():
            bits = master.view(torch.int32)
            parameter.data = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)

    @contextmanager
    def _masters_bound(self) -> Iterator[None]:
        self._unround()
        try:
            yield
        finally:
            self._round()

    def memory_report(self) -> list[tuple[str, str, int]]:
        """Bytes of parameters, masters, gradients and optimizer state, all in one place."""
        place = "host" if self.device.type == "cpu" else "device"
        parameters = list(self.model.parameters())
        gradients = [self._sums.get(p, p.grad) for p in parameters]
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [
            (place, what, sum(t.nbytes for t in tensors))
            for what, tensors in (
                ("parameters", parameters),
                ("fp32 masters", list(self._masters.values())),
                ("gradients", [g for g in gradients if g is not None]),
                ("optimizer state", state),
            )
        ]

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the fp32 parameters and buffers, under their names, and of the optimizer's state."""
        with self._masters_bound():
            return {
                "model": {k: v.detach().clone() for k, v in self.model.state_dict().items()},
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises FerryError when it is of another model."""
        with self._masters_bound():  # torch casts optimizer state to the parameter's dtype
            try:
                self.model.load_state_dict(state["model"])
            except RuntimeError as error:
                reason = str(error).splitlines()[-1].strip()
                raise FerryError(f"the checkpoint is of another model: {reason}") from error
            self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Removes the hooks and leaves the model in fp32. Closing twice is allowed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._unround()
        self._masters.clear()


def _device(backend: str | None) -> torch.device:
    """The torch device of a backend name; None means the accelerator of this machine, or the CPU."""
    if backend == "ascend":
        from memferry_ascend.backends.ascend import import_npu

        import_npu()
    if backend is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device({"ascend": "npu"}.get(backend, backend))
