"""What the engine runs where: the reasons against modes, gradient placements and device updates of a layer.

One place knows them. An armed plan is refused by them (`settle`, `refuse_modes`), and planners offer nothing they speak
against: `offered` narrows a profile, `keep_by_reserve` is the reserve without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from memferry_ascend.backends.base import Backend
from memferry_ascend.direct import why_not
from memferry_ascend.errors import FerryError
from memferry_ascend.hostupdate import is_native
from memferry_ascend.layers import Layer
from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Plan, Update
from memferry_ascend.planner.profile import Profile


def supports(kinds: frozenset[str], kind: str) -> bool:
    """True if a backend's set of layer kinds contains `kind`; "*" stands for all of them."""
    return "*" in kinds or kind in kinds


def direct_obstacle(layer: Layer, backend: Backend) -> str | None:
    """None if the layer's gradient may be written to the host by its kernels on this backend, else the reason."""
    reason = why_not(layer.module)
    kinds = backend.capabilities().direct_kinds
    if reason is None and not supports(kinds, layer.kind):
        reason = f"no kernel of {layer.kind} may write host memory on {backend.name}"
    return reason


def mode_obstacle(layer: Layer, mode: Mode, backend: Backend) -> str | None:
    """None if the backend runs the layer in `mode`, else the reason. DFGB reads host memory in its forward, as DHA does;
    DFGB and STREAM rest in mapped memory, which is worth nothing without coherence."""
    can = backend.capabilities()
    if mode is Mode.GFGB:
        return None
    if not can.coherent:
        return f"{backend.device} and the host do not see each other's writes to mapped memory; only GFGB layers run here"
    if mode is not Mode.STREAM and not supports(can.dha_kinds, layer.kind):
        return (
            f"{layer.kind} has no direct host access on the {backend.name} backend; plan it as GFGB or STREAM"
        )
    return None


def device_update_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """None if layers may be updated on the device with this optimizer, else the reason."""
    if is_native(optimizer):
        return None
    return f"which AdamW and Adam without amsgrad can, found {type(optimizer).__name__}"


def offered(
    profile: Profile, layers: Sequence[Layer], backend: Backend, optimizer: torch.optim.Optimizer
) -> Profile:
    """The profile with "not usable" (inf) for everything that the engine would refuse, or run otherwise, for these
    layers: no plan made from it is refused when it is armed."""
    no_update = device_update_obstacle(optimizer) is not None
    by_name = {layer.name: layer for layer in layers}
    out = []
    for x in profile.layers:
        layer = by_name[x.name]
        if mode_obstacle(layer, Mode.DHA, backend) is not None:
            x = replace(x, t_fp_dha=math.inf, t_bp_dha=math.inf)
        if tied(layer) or direct_obstacle(layer, backend) is not None:
            x = replace(x, t_bp_grad_direct=math.inf)
        if no_update:
            x = replace(x, t_update_device=math.inf)
        out.append(x)
    return replace(profile, layers=tuple(out))


def tied(layer: Layer) -> bool:
    """True if another layer reads a parameter of this one, or owns one that this one reads."""
    return any(p.aliases for p in layer.reads)


def settle(plan: Plan, layers: list[Layer], backend: Backend, optimizer: torch.optim.Optimizer) -> Plan:
    """The plan as it will run: what is known beforehand to be staged instead says so in `why`.

    Raises:
        FerryError: the plan asks for what cannot be done: a direct gradient of a layer without such a kernel, a device
            update by an optimizer that has none.
    """
    by_name = {layer.name: layer for layer in layers}
    out: list[LayerPlan] = []
    for decided in plan.layers:
        layer = by_name[decided.name]
        if any(p.trainable for p in layer.params):
            if decided.grad is Grad.DIRECT:
                reason = direct_obstacle(layer, backend)
                if reason is not None:
                    raise FerryError(
                        f"plan: layer {decided.name!r} has grad 'direct', but {reason}; plan it as 'stage' or 'keep'"
                    )
                if tied(layer):
                    decided = replace(
                        decided, why=_join(decided.why, "its tied gradient is staged, not direct")
                    )
            reason = device_update_obstacle(optimizer)
            if decided.update is Update.DEVICE and reason is not None:
                raise FerryError(
                    f"plan: layer {decided.name!r} has update 'device', {reason}; plan it as 'host'"
                )
        out.append(decided)
    return replace(plan, layers=tuple(out))


def refuse_modes(plan: Plan, layers: Sequence[Layer], backend: Backend, alone: str | None = None) -> None:
    """Raise unless the backend can run every layer in its mode. `alone`: why several ranks cannot share host memory.

    Raises:
        FerryError: names the first layer and what to plan instead.
    """
    for layer, decided in zip(layers, plan.layers, strict=True):
        reason = mode_obstacle(layer, decided.mode, backend) if layer.params else None
        if alone is not None and layer.params and decided.mode is not Mode.GFGB:
            reason = f"only GFGB layers run with several ranks here: {alone}"
        if reason is not None:
            raise FerryError(f"plan: layer {layer.name!r} is {decided.mode}, but {reason}")


def exchanged(plan: Plan) -> Plan:
    """The plan for several ranks: gradients are exchanged as they are produced and every rank updates its shard on the
    host, so that they are staged and updated there whatever the plan says."""
    why = "several ranks exchange gradients: staged, updated on the host"
    return replace(
        plan,
        layers=tuple(
            x
            if (x.grad, x.update) == (Grad.STAGE, Update.HOST)
            else replace(x, grad=Grad.STAGE, update=Update.HOST, why=_join(x.why, why))
            for x in plan.layers
        ),
    )


def keep_by_reserve(plan: Plan, layers: list[Layer], backend: Backend, reserve: float) -> Plan:
    """The paper's reserve factor without a profile: keep up to `reserve` (0 to 1) of all gradient bytes on the device,
    let kernels write the rest to the host where they can, and stage what they cannot.

    With nothing measured every byte counts alike. Layers are kept in the order of the forward pass, as far as they
    fit: their gradients come last, when little backward is left to hide a slower kernel or a copy behind. Gradients of
    layers updated on the device stay there anyway and are not counted.
    """
    here = []
    for i, (layer, decided) in enumerate(zip(layers, plan.layers, strict=True)):
        if decided.update is Update.HOST and any(p.trainable for p in layer.params):
            here.append(i)
    size = {i: sum(p.nbytes for p in layers[i].params if p.trainable) for i in here}
    left = math.floor(Fraction(reserve) * sum(size.values()))
    out = list(plan.layers)
    for i in here:
        if size[i] <= left:
            left -= size[i]
            grad, why = Grad.KEEP, "gradient within the reserve"
        else:
            reason = direct_obstacle(layers[i], backend)
            if reason is None and tied(layers[i]):
                reason = "the parameter is tied"
            grad = Grad.DIRECT if reason is None else Grad.STAGE
            why = f"gradient staged: {reason}" if reason else "gradient written to the host by its kernel"
        out[i] = replace(out[i], grad=grad, why=_join(out[i].why, why))
    return replace(plan, layers=tuple(out))


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
