"""A trial: the user's model on the device for a few passes of a sample batch, and as it was afterwards.

Nothing of the engine exists yet. Every layer's parameters are copied to temporary mapped host memory, in the dtype they
will have; a layer then reads them there (DHA) or from device memory. When the model's parameters fit they are all on
the device; when they do not, each layer's are copied into a slot just before its forward, before the mark that starts
its clock. Its backward then reads what the slot holds by then: other numbers, but as many and from the same memory.

Gradients are staged as the engine stages them, unit by unit to host memory that nobody reads: where launching kernels
is what takes the time, that is part of the backward pass.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memferry_ascend.arena import Arena, UnitMemory
from memferry_ascend.backends.base import Backend, align
from memferry_ascend.errors import FerryError
from memferry_ascend.layers import SMALLEST_UNIT, Layer, Param, Unit
from memferry_ascend.marks import Marks, ancestors
from memferry_ascend.planner.plan import LayerPlan
from memferry_ascend.tracing import tensors_in


def to_device(value: Any, device: torch.device) -> Any:
    """A batch with its tensors on `device`; containers are rebuilt, anything else is kept."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(v, device) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(v, device) for v in value)
    return value


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output: a mapping gives keyword arguments, a tuple positional ones, anything else the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return model(*batch)
    return model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """What to call backward on: the output's `loss`, a scalar output, or the sum of everything that has a gradient.

    Raises:
        FerryError: nothing in the output requires a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [t for t in tensors_in(output if loss is None else loss) if t.requires_grad]
    if not found:
        raise FerryError(
            "sample_batch: nothing in the model's output requires a gradient, so its backward cannot be measured; pass "
            "the batch with which the training loop gets its loss, outside torch.inference_mode()"
        )
    if len(found) == 1 and found[0].numel() == 1:
        return found[0]
    return torch.stack([t.float().sum() for t in found]).sum()


class RandomState:
    """Every random generator a model may use: torch's, the device's, Python's, numpy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._torch = torch.get_rng_state()
        self._on_device = torch.get_device_module(device).get_rng_state(device) if self._device else None
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class Trial:
    """`with Trial(...) as trial:` then `trial.place(...)` and `trial.run()` as often as needed.

    `budget` (bytes) bounds the device memory that parameters take here: half of it decides between resident and
    streamed, the other half is the activations'.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], backend: Backend, batch: Any, budget: int
    ) -> None:
        self.model, self.layers, self.backend = model, layers, backend
        self._batch = batch
        self._undo = contextlib.ExitStack()
        self._memory: dict[int, tuple[UnitMemory, Param]] = {}
        self._resident: dict[int, torch.Tensor] = {}
        self._slots: list[torch.Tensor] = []
        self._next_slot = 0
        self._read, self._loaded = backend.event(), backend.event()
        self._on_alias: frozenset[int] = frozenset()
        self._windows: list[RemovableHandle] = []
        self.reads = [list(layer.reads) for layer in layers]
        """Per layer, the parameters its forward reads: also those of modules whose own forward is never called."""
        needed = sum(align(p.nbytes) for layer in layers for p in layer.params)
        self.streamed = needed > budget // 2
        self.held_bytes = 0
        """Device bytes of parameters that `place` took."""

    # -- coming and going ------------------------------------------------------------------------------------------
    def __enter__(self) -> Trial:
        try:
            self._enter()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _enter(self) -> None:
        device = self.backend.device
        self._undo.callback(RandomState(device).restore)
        self._undo.callback(self._free_device)
        arena = Arena(self.backend)
        self._undo.callback(arena.close)
        params = [p for layer in self.layers for p in layer.params]
        for p in params:
            self._undo.callback(self._restore, p.param, p.param.data, p.param.grad)
        left = sum(align(p.nbytes) for p in params)
        largest = max((p.nbytes for p in params if p.trainable), default=0)
        room = SMALLEST_UNIT + align(largest)
        self._staging = _Staging(self.backend, arena.region("grad", room, mapped=True, expect=room).host)
        self._undo.callback(self.backend.synchronize)  # before the arena goes: copies may be under way
        for i, layer in enumerate(self.layers):
            if not layer.params:
                continue
            memory = UnitMemory(Unit(i, [layer], LayerPlan(layer.name), list(layer.params)))
            memory.param = arena.region("param", memory.layout.nbytes, mapped=True, expect=left)
            left -= memory.layout.nbytes
            for p in layer.params:
                self._memory[p.index] = (memory, p)
                with torch.no_grad():
                    memory.host_param(p).copy_(p.param.detach())
                p.param.grad = None
                p.param.data = memory.device_param(p)
                if p.trainable:
                    handle = p.param.register_post_accumulate_grad_hook(self._staging.arrive)
                    self._undo.callback(handle.remove)
        moved: dict[int, torch.Tensor] = {}
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    # A copy even on the same device: what a forward changes (running statistics) is thrown away.
                    copy = moved.setdefault(id(buffer), buffer.detach().to(device, copy=True))
                    self._undo.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = copy
        self._batch = to_device(self._batch, device)
        self._undo.callback(self._unplace)

    @staticmethod
    def _restore(param: nn.Parameter, data: torch.Tensor, grad: torch.Tensor | None) -> None:
        param.grad = None
        param.data = data
        param.grad = grad

    def _free_device(self) -> None:
        self.backend.synchronize()
        self._resident.clear()
        self._slots.clear()
        self._batch = None

    # -- placing ---------------------------------------------------------------------------------------------------
    def alias(self, p: Param) -> torch.Tensor:
        memory, _ = self._memory[p.index]
        return memory.device_param(p)

    def also_reads(self, i: int, p: Param) -> None:
        """Layer `i` was seen to read a parameter of a module that is not called itself. Call `place` afterwards."""
        self.reads[i].append(p)
        self.held_bytes -= sum(slot.numel() for slot in self._slots)
        self._slots.clear()

    def place(self, on_alias: frozenset[int] = frozenset()) -> None:
        """Let the layers numbered in `on_alias` read host memory and all others device memory, in both passes: autograd
        may save the parameter itself, so what it is bound to in the backward pass counts too. Only the backward of a
        tied parameter whose readers differ reads where it rests."""
        self._unplace()
        self._on_alias = on_alias
        if not self.streamed and not self._resident:
            for p in (p for layer in self.layers for p in layer.params):
                raw = self.backend.alloc_device(p.nbytes) if p.nbytes else self.alias(p).view(-1)
                view = raw[: p.nbytes].view(p.dtype).view(p.shape) if p.nbytes else self.alias(p)
                with torch.no_grad():
                    view.copy_(self._memory[p.index][0].host_param(p))
                self._resident[p.index] = view
                self.held_bytes += align(p.nbytes)
        if self.streamed and not self._slots:
            size = max(sum(align(p.nbytes) for p in reads) for reads in self.reads)
            depth = max(len(a) for a in ancestors(self.layers))
            self._slots = [self.backend.alloc_device(size) for _ in range(depth + 1)]
            self.held_bytes += sum(slot.numel() for slot in self._slots)
        readers: dict[int, set[int]] = {}
        for i, reads in enumerate(self.reads):
            for p in reads:
                readers.setdefault(p.index, set()).add(i)
        for i, layer in enumerate(self.layers):
            for p in layer.params:
                alias = self.streamed or readers[p.index] <= on_alias
                p.param.data = self.alias(p) if alias else self._resident[p.index]
            everyone = set().union(*(readers[p.index] for p in self.reads[i]))
            if everyone <= on_alias or (not self.streamed and not everyone & on_alias):
                continue  # it rests where it is wanted
            enter, leave = self._window(i)
            self._windows.append(layer.module.register_forward_pre_hook(enter, prepend=True))
            self._windows.append(layer.module.register_forward_hook(leave, always_call=True))

    def _unplace(self) -> None:
        for handle in self._windows:
            handle.remove()
        self._windows.clear()

    def _window(self, i: int) -> tuple[Any, Any]:
        before: list[list[torch.Tensor]] = []

        def enter(_module: nn.Module, _args: Any) -> None:
            before.append([p.param.data for p in self.reads[i]])
            self.bind(i, i in self._on_alias)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if self.streamed:
                before.clear()  # it stays bound to the slot for the backward pass
            elif before:
                for p, data in zip(self.reads[i], before.pop(), strict=True):
                    p.param.data = data

        return enter, leave

    def bind(self, i: int, on_alias: bool) -> None:
        """Bind what layer `i` reads to host memory, or to device memory (a slot filled now, when streamed)."""
        reads = self.reads[i]
        if on_alias or not self.streamed:
            for p in reads:
                p.param.data = self.alias(p) if on_alias else self._resident[p.index]
            return
        slot, at = self._slots[self._next_slot % len(self._slots)], 0
        self._next_slot += 1
        upload = self.backend.stream("upload")
        self.backend.compute.record(self._read)  # kernels queued so far may still read the slot
        upload.wait(self._read)
        for p in reads:
            view = slot[at : at + p.nbytes].view(p.dtype).view(p.shape)
            if p.nbytes:
                upload.copy(view, self._memory[p.index][0].host_param(p))
            p.param.data = view
            at += align(p.nbytes)
        upload.record(self._loaded)
        self.backend.compute.wait(self._loaded)

    # -- running ---------------------------------------------------------------------------------------------------
    def forward(self) -> Any:
        """The model's output for the sample batch. Raises FerryError naming what the model raised."""
        try:
            with torch.enable_grad():
                return call(self.model, self._batch)
        except FerryError:
            raise
        except torch.OutOfMemoryError as e:
            raise _too_little(e) from e
        except Exception as e:
            raise FerryError(
                f"sample_batch: the model's forward failed with {type(e).__name__}: {e}; pass the batch as the training "
                "loop does: a dict for keyword arguments, a tuple for positional ones, or one tensor"
            ) from e

    def run(self, marks: Marks) -> None:
        """One forward and backward pass with its own marks; blocks until it is done."""
        marks.found = []
        self.backend.synchronize()
        marks.put("forward")
        output = self.forward()
        marks.put("loss")
        try:
            with torch.enable_grad():
                loss_of(output).backward()
        except torch.OutOfMemoryError as e:
            raise _too_little(e) from e
        self._staging.flush()
        marks.put("done")
        self.backend.synchronize()

    @contextlib.contextmanager
    def same_randomness(self) -> Iterator[None]:
        """What the body draws is drawn again afterwards."""
        state = RandomState(self.backend.device)
        try:
            yield
        finally:
            state.restore()


def _too_little(e: torch.OutOfMemoryError) -> FerryError:
    return FerryError(
        f"sample_batch: the device has too little memory for its activations ({e}); make the batch smaller, or "
        "checkpoint activations"
    )


class _Staging:
    """Takes gradients from autograd and copies them to the same host bytes again and again, a unit at a time."""

    def __init__(self, backend: Backend, room: torch.Tensor) -> None:
        self._backend = backend
        self._room = room
        self._stream = backend.stream("download")
        self._ready, self._done = backend.event(), backend.event()
        self._grads: list[torch.Tensor] = []
        self._nbytes = 0
        self._leaving: list[torch.Tensor] = []

    def arrive(self, param: torch.Tensor) -> None:
        """A gradient is complete."""
        if param.grad is None:
            return
        grad = param.grad.detach()
        param.grad = None
        grad = grad.to_dense() if grad.is_sparse else grad.contiguous()
        self._grads.append(grad)
        self._nbytes += align(grad.numel() * grad.element_size())
        if self._nbytes >= SMALLEST_UNIT:
            self.flush()

    def flush(self) -> None:
        """Queue the copy of what has arrived; let go of what the copy before has carried away."""
        if not self._grads:
            return
        pairs, at = [], 0
        for grad in self._grads:
            nbytes = grad.numel() * grad.element_size()
            pairs.append((self._room[at : at + nbytes].view(grad.dtype).view(grad.shape), grad))
            at += align(nbytes)
        if self._leaving:
            self._backend.compute.wait(self._done)
        self._stream.copy_behind(self._backend.compute, pairs, self._ready, self._done)
        self._leaving, self._grads, self._nbytes = self._grads, [], 0
