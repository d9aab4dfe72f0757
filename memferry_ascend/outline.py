"""A model's layers without the model: what a profile keeps of their parameters, and layers made from that again.

The rules for units and for device bytes ask layers and parameters for names, sizes and ties only. With these stand-ins
a plan made from a file is counted by the very code that counts it when it is armed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memferry_ascend import budget, sharded
from memferry_ascend.layers import Layer, Param, distant, units
from memferry_ascend.limits import RING_SLOTS
from memferry_ascend.placement import exchanged
from memferry_ascend.planner.parameters import LayerParams, ParamProfile
from memferry_ascend.planner.plan import Plan
from memferry_ascend.planner.profile import Profile


def outline(layers: Sequence[Layer]) -> tuple[LayerParams, ...]:
    """What `stand_ins` needs of `layers`, in their order, which is the model's."""
    return tuple(
        LayerParams(
            layer.name,
            tuple(
                ParamProfile(p.index, p.numel, p.dtype.itemsize, p.trainable, bool(p.aliases))
                for p in layer.params
            ),
            tuple(p.index for p in layer.reads),
        )
        for layer in layers
    )


def shared_owners(layers: Sequence[Layer]) -> dict[int, str]:
    """Per layer (its position) that reads parameters of others, the owner of the largest; an owner does not share itself."""
    owners = {p.index: layer for layer in layers for p in layer.params}
    found: dict[int, str] = {}
    sharing: set[str] = set()
    for i, layer in enumerate(layers):
        foreign = [p for p in layer.reads if owners[p.index] is not layer]
        candidates = [p for p in foreign if owners[p.index].name not in sharing]
        if candidates:
            found[i] = owners[max(candidates, key=lambda p: p.numel).index].name
            sharing.add(layer.name)
    return found


def stand_ins(profile: Profile) -> list[Layer]:
    """Layers as large as the profile's, in the model's order. Of a profile that knows no parameters each layer has one,
    as large as what it owns, in forward order."""
    described = profile.parameters or _guessed(profile)
    params = {}
    for layer in described:
        for p in layer.owns:
            dtype = torch.bfloat16 if p.itemsize == 2 else torch.float32
            numel = p.elements if dtype.itemsize == p.itemsize else -(-p.bytes // dtype.itemsize)
            empty = nn.Parameter(torch.empty(numel, device="meta"), requires_grad=False)
            name = f"{layer.name}.{p.index}"
            params[p.index] = Param(p.index, name, empty, dtype, p.trainable, [name] if p.shared else [])
    return [
        Layer(x.name, nn.Module(), [params[p.index] for p in x.owns], [params[i] for i in x.reads])
        for x in described
    ]


def _guessed(profile: Profile) -> tuple[LayerParams, ...]:
    out = []
    for i, (x, own, owner) in enumerate(zip(profile.layers, profile.own_bytes, profile.owners, strict=True)):
        shared = owner == i and len(profile.readers[i]) > 1
        owns = (ParamProfile(i, -(-own // x.itemsize), x.itemsize, x.trainable, shared),) if own else ()
        reads = [i] if own else []
        if owner != i and profile.own_bytes[owner]:
            reads.append(owner)
        out.append(LayerParams(x.name, owns, tuple(reads)))
    return tuple(out)


def engine_bytes(
    layers: Sequence[Layer], plan: Plan, *, accumulate: int = 1, base: int = 0, local: int | None = None
) -> int:
    """Device bytes that the engine counts for `plan` before it arms it (`budget.need`, and of several ranks
    `sharded.device_need`), with a full ring and nothing under way that need not be. `layers` in the model's order; the
    plan in any. local: ranks of a node, None = there is one rank."""
    plan = plan if local is None else exchanged(plan)
    by_name = {x.name: x for x in plan.layers}
    made = units(list(layers), by_name, alone=distant(list(layers)))
    exchange = 0 if local is None else sharded.device_need(made, local)
    return budget.need(made, slots=RING_SLOTS, accumulate=accumulate, base=base).total + exchange
