"""What the model is made of: layers (modules that own parameters), their parameters, and units of layers."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field

import torch
from torch import nn

from memferry_ascend.errors import FerryError
from memferry_ascend.planner.launches import WHOLE_UNIT
from memferry_ascend.planner.plan import LayerPlan, Mode

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(eq=False)
class Param:
    """One distinct parameter of the model, however many layers read it. Owned by the first of them."""

    index: int
    name: str
    """The first qualified name; `aliases` holds the others (tied parameters)."""
    param: nn.Parameter
    dtype: torch.dtype
    """What the device computes in, and what its gradient arrives in."""
    trainable: bool
    aliases: list[str] = field(default_factory=list)
    group: int = -1
    """Index of its param group; -1 when frozen."""

    @property
    def numel(self) -> int:
        return self.param.numel()

    @property
    def nbytes(self) -> int:
        """Bytes in the device dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def shape(self) -> torch.Size:
        return self.param.shape


@dataclass(eq=False)
class Layer:
    """A module that directly owns parameters (the paper's *l*)."""

    name: str
    module: nn.Module
    params: list[Param]
    """Owned here: tied parameters belong to the first layer that has them."""
    reads: list[Param]
    """All parameters registered on this module, owned or tied."""

    @property
    def kind(self) -> str:
        return type(self.module).__name__


def collect(model: nn.Module, precision: str, keep_fp32: tuple[str, ...]) -> list[Layer]:
    """The layers of `model` in registration order, every distinct parameter owned by the first that has it.

    Raises:
        FerryError: a parameter is neither float32 nor bfloat16, not on the CPU, not dense, or is a leaf of another
            type than nn.Parameter.
    """
    known: dict[int, Param] = {}
    visited: set[int] = set()
    layers = []
    for name, module in model.named_modules(remove_duplicate=False):
        own = [(n, p) for n, p in module._parameters.items() if p is not None]
        if not own:
            continue
        if id(module) in visited:  # a shared module: one layer, and every name that a state dict gives it
            for leaf, p in own:
                known[id(p)].aliases.append(f"{name}.{leaf}")
            continue
        visited.add(id(module))
        _check_module(name, module)
        fp32 = any(
            fnmatch.fnmatchcase(name, pat) or fnmatch.fnmatchcase(type(module).__name__, pat)
            for pat in keep_fp32
        )
        layer = Layer(name, module, [], [])
        for leaf, p in own:
            full = f"{name}.{leaf}" if name else leaf
            if id(p) in known:
                known[id(p)].aliases.append(full)
            else:
                _check(full, p)
                dtype = torch.float32 if precision == "fp32" or fp32 else torch.bfloat16
                known[id(p)] = Param(len(known), full, p, dtype, p.requires_grad)
                layer.params.append(known[id(p)])
            layer.reads.append(known[id(p)])
        layers.append(layer)
    if not layers:
        raise FerryError("ferry: expected a model with parameters, found none")
    return layers


def _check_module(name: str, module: nn.Module) -> None:
    if getattr(module, "max_norm", None) is not None:
        raise FerryError(
            f"ferry: {name!r} ({type(module).__name__}) has max_norm, which edits its weight during the forward pass; "
            "set max_norm=None and normalise inside engine.edit()"
        )


def _check(name: str, p: nn.Parameter) -> None:
    if isinstance(p, nn.parameter.UninitializedParameter):
        raise FerryError(f"ferry: parameter {name!r} is not initialised; run the lazy module once first")
    if p.dtype not in _DTYPES:
        raise FerryError(
            f"ferry: parameter {name!r} has dtype {p.dtype}; expected float32 or bfloat16: convert it first "
            "(model.float())"
        )
    if p.device.type not in ("cpu", "meta"):
        raise FerryError(
            f"ferry: parameter {name!r} is on {p.device}; expected a model on the CPU: build it there and let ferry "
            "place it, or call model.cpu() first"
        )
    if p.layout is not torch.strided:
        raise FerryError(
            f"ferry: parameter {name!r} has layout {p.layout}; expected a dense (strided) tensor"
        )


@dataclass(eq=False)
class Unit:
    """A run of layers with one decision: the granularity of transfers and of host updates.

    Layers of a few KiB that are read by DHA (norms, biases) ride in their neighbours' unit: they are updated, and
    uselessly copied, with it, but keep being read in the arena (`aliased`).
    """

    index: int
    layers: list[Layer]
    plan: LayerPlan
    params: list[Param]
    aliased: frozenset[int] = frozenset()
    """Parameters (by index) that are read by DHA although the unit has another mode."""

    @property
    def name(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return first if first == last else f"{first}..{last}"

    @property
    def nbytes(self) -> int:
        """Parameter bytes in the device dtype, without alignment gaps."""
        return sum(p.nbytes for p in self.params)


SMALLEST_UNIT = WHOLE_UNIT
LARGEST_UNIT = 64 << 20
"""Bytes. A copy reaches 90 % of the link from 4 MiB on, but every unit costs the launching thread about 0.25 ms a pass
(docs/notes.md); above 64 MiB a unit only delays its first layer."""

TINY = 64 << 10
"""Bytes. A DHA layer up to this size rides along: copying it takes less than starting a job for it."""


def units(
    layers: list[Layer],
    plan: dict[str, LayerPlan],
    *,
    smallest: int = SMALLEST_UNIT,
    largest: int = LARGEST_UNIT,
    tiny: int = TINY,
    alone: frozenset[str] = frozenset(),
) -> list[Unit]:
    """Group consecutive layers with the same decision until a unit holds `smallest` bytes, never beyond `largest`
    unless one layer alone is larger. Layers named in `alone` get a unit of their own (tied parameters that several
    layers read at distant times)."""
    out: list[Unit] = []
    run: list[Layer] = []
    core: LayerPlan | None = None

    def size(layer: Layer) -> int:
        return sum(p.nbytes for p in layer.params)

    def rides(layer: Layer) -> bool:
        return plan[layer.name].mode is Mode.DHA and size(layer) <= tiny and layer.name not in alone

    def fits(layer: Layer) -> bool:
        mine = plan[layer.name]
        head = core or plan[run[0].name]
        if (mine.grad, mine.update) != (head.grad, head.update):
            return not layer.params
        return not layer.params or rides(layer) or core is None or core.mode is mine.mode

    def close() -> None:
        if any(layer.params for layer in run):
            params = [p for layer in run for p in layer.params]
            head = core or plan[run[0].name]
            aliased = frozenset(
                p.index
                for layer in run
                if plan[layer.name].mode is Mode.DHA and head.mode is not Mode.DHA
                for p in layer.params
            )
            out.append(Unit(len(out), list(run), head, params, aliased))
        run.clear()

    for layer in layers:
        if run:
            grown = sum(size(x) for x in run)
            if (
                not fits(layer)
                or grown >= smallest
                or grown + size(layer) > largest
                or layer.name in alone
                or run[0].name in alone
            ):
                close()
                core = None
        if layer.params and not rides(layer) and core is None:
            core = plan[layer.name]
        run.append(layer)
    close()
    return out


def distant(layers: list[Layer]) -> frozenset[str]:
    """Layers that own a parameter other layers read too: each gets a unit of its own."""
    owners: dict[int, str] = {}
    out = set()
    for layer in layers:
        for p in layer.params:
            owners[p.index] = layer.name
        for p in layer.reads:
            if p not in layer.params:
                out.add(owners[p.index])
    return frozenset(out)
