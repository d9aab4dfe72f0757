"""Marks on the compute stream: when each layer's forward and backward began and ended.

A mark is a timing event and what happened there. Marks are put by module hooks and by tensor hooks, so nothing is
inserted into the user's graph and nothing waits; `attribute` turns a pass's marks into seconds per layer once the
device has reached them. Profiler and recorder share this.

    arrive           a layer's module is called, nothing has been waited for yet (recorder only)
    enter, leave     a layer's module is called, returns (also when its forward is recomputed in the backward pass)
    begin            the gradient of a layer's output is there: its backward starts
    end              the gradient of its input, or of its last parameter, is there: its backward is over
    forward, loss, done, step    a forward pass starts, ends; a backward pass is over; `step()` was called

A module may contain others that own parameters themselves: time counts for the innermost one that is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memferry_ascend.backends.base import Backend, Event
from memferry_ascend.layers import Layer
from memferry_ascend.tracing import tensors_in
from memferry_ascend.windows import Hook

NOBODY = -1
"""The layer of a mark that belongs to no layer."""


@dataclass(frozen=True)
class Mark:
    """`what` happened to layer number `layer` at `event`; `memory` is what was allocated then (bytes, -1: not asked)."""

    what: str
    layer: int
    event: Event
    memory: int = -1


class Marks:
    """Puts marks while installed. `layers` are numbered by their position."""

    def __init__(self, layers: Sequence[Layer], backend: Backend, *, recording: bool = False) -> None:
        self.found: list[Mark] = []
        self.shapes: dict[int, tuple[Any, ...]] = {}
        """Per layer, the shapes of its inputs at its first call."""
        self.active = True
        """False: hooks that live in a graph still put nothing."""
        self._layers = layers
        self._backend = backend
        self._recording = recording
        self._handles: list[RemovableHandle] = []

    def put(self, what: str, layer: int = NOBODY) -> None:
        """Mark this point of the compute stream."""
        if not self.active:
            return
        event = self._backend.event(timing=True)
        self._backend.compute.record(event)
        memory = self._backend.allocated_bytes() if self._recording else -1
        self.found.append(Mark(what, layer, event, memory))

    def install(self) -> None:
        """Hook the layers' modules and parameters. Enter marks come after other pre-hooks, leave marks before other
        hooks: waiting for a copy is not the layer's time."""
        self.active = True
        for i, layer in enumerate(self._layers):
            self._handles.append(
                layer.module.register_forward_pre_hook(Hook(self._entering(i)), with_kwargs=True)
            )
            self._handles.append(layer.module.register_forward_hook(Hook(self._leaving(i)), prepend=True))
            if self._recording:
                hook = Hook(self._hook("arrive", i))
                self._handles.append(layer.module.register_forward_pre_hook(hook, prepend=True))
            trainable = [p.param for p in layer.params if p.trainable]
            arrived = [0]
            for param in trainable:
                self._handles.append(
                    param.register_post_accumulate_grad_hook(self._arriving(i, arrived, len(trainable)))
                )

    def remove(self) -> None:
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entering(self, i: int) -> Any:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                for t in tensors_in((args, kwargs)):
                    if t.requires_grad:
                        t.register_hook(self._hook("end", i))
            if i not in self.shapes:
                self.shapes[i] = tuple(tuple(t.shape) for t in tensors_in((args, kwargs)))
            self.put("enter", i)

        return enter

    def _leaving(self, i: int) -> Any:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self.put("leave", i)
            for t in tensors_in(output):
                if t.requires_grad and t.grad_fn is not None:
                    t.register_hook(self._hook("begin", i))

        return leave

    def _hook(self, what: str, i: int) -> Any:
        def hook(*_: Any) -> None:
            self.put(what, i)

        return hook

    def _arriving(self, i: int, arrived: list[int], expected: int) -> Any:
        def arrive(_param: torch.Tensor) -> None:
            arrived[0] += 1
            if arrived[0] % expected == 0:
                self.put("end", i)

        return arrive


@dataclass
class Spent:
    """Seconds per layer of one pass, by layer number. `order`: layers by their first call. `recomputed`: whose forward
    ran again in the backward pass. `spans`: (layer, what, start, end) in seconds, `what` being "forward", "backward",
    "recompute", "forward gap", "backward gap" or "wait" (for parameters, before a forward)."""

    forward: list[float]
    backward: list[float]
    gap_forward: list[float]
    gap_backward: list[float]
    order: list[int] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    spans: list[tuple[int, str, float, float]] = field(default_factory=list)
    totals: tuple[float, float] = (0.0, 0.0)
    """The whole forward and the whole backward pass, where the caller fills it in."""


def ancestors(layers: Sequence[Layer]) -> list[frozenset[int]]:
    """Per layer, the numbers of the layers whose modules contain its module."""
    number = {id(layer.module): i for i, layer in enumerate(layers)}
    found: list[set[int]] = [set() for _ in layers]
    for i, layer in enumerate(layers):
        for child in layer.module.modules():
            j = number.get(id(child))
            if j is not None and j != i:
                found[j].add(i)
    return [frozenset(x) for x in found]


def attribute(marks: Sequence[tuple[str, int, float]], inside: Sequence[frozenset[int]]) -> Spent:
    """Share the time between consecutive marks (what, layer, seconds) of one pass among `len(inside)` layers.

    Time in no layer is a gap: in the forward pass of the layer left last, in the backward pass of the one that begins
    next, as the planner counts A_{l,l+1}. What precedes the first layer counts for it; what follows the last backward
    counts for that one. `inside` is what `ancestors` gives.
    """
    count = len(inside)
    spent = Spent([0.0] * count, [0.0] * count, [0.0] * count, [0.0] * count)
    running: list[int] = []  # forward: layers entered; also in the backward pass, when recomputing
    backward: list[int] = []  # backward: layers begun
    left, in_backward, pending, prologue, last_begun = NOBODY, False, 0.0, 0.0, NOBODY
    seen: set[int] = set()
    waiting = NOBODY
    since = 0.0  # when the gap of the backward pass began
    for place, (what, layer, at) in enumerate(marks):
        if what in ("forward", "step"):
            running, backward, left, in_backward, pending = [], [], NOBODY, False, 0.0
        elif what in ("loss", "done"):
            running, in_backward = [], True
            if what == "done":
                backward = []
        elif what == "arrive":
            waiting = layer
        elif what == "enter":
            waiting = NOBODY
            running.append(layer)
            if in_backward:
                spent.recomputed.add(layer)
            elif layer not in seen:
                seen.add(layer)
                spent.order.append(layer)
        elif what == "leave":
            while running and running.pop() != layer:
                pass
            left = layer
        elif what == "begin":
            in_backward = True
            if layer in backward:
                del backward[backward.index(layer) + 1 :]
            else:
                while backward and backward[-1] not in inside[layer]:
                    backward.pop()
                backward.append(layer)
            spent.gap_backward[layer] += pending
            if pending:
                spent.spans.append((layer, "backward gap", since, at))
            pending, last_begun = 0.0, layer
        elif what == "end" and layer in backward:
            del backward[backward.index(layer) :]
        if place + 1 == len(marks):
            break
        end = marks[place + 1][2]
        seconds = max(0.0, end - at)
        if waiting != NOBODY:
            spent.spans.append((waiting, "wait", at, end))
        elif not in_backward:
            if running:
                spent.forward[running[-1]] += seconds
                spent.spans.append((running[-1], "forward", at, end))
            elif left != NOBODY:
                spent.gap_forward[left] += seconds
                spent.spans.append((left, "forward gap", at, end))
            elif not seen:
                prologue += seconds
        elif running:
            spent.spans.append((running[-1], "recompute", at, end))
        elif backward:
            spent.backward[backward[-1]] += seconds
            spent.spans.append((backward[-1], "backward", at, end))
        else:
            since = at if not pending else since
            pending += seconds
    if spent.order:
        spent.forward[spent.order[0]] += prologue
    if last_begun != NOBODY:
        spent.backward[last_begun] += pending
    return spent
