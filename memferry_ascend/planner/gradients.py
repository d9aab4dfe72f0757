"""The gradient algorithm of the MemFerry paper, section IV-D: which gradients stay on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from memferry_ascend.planner.backward import plan_backward
from memferry_ascend.planner.forward import plan_forward
from memferry_ascend.planner.knapsack import pack
from memferry_ascend.planner.plan import Grad, Plan, Update
from memferry_ascend.planner.profile import Profile


def plan_gradients(profile: Profile, reserve: float, plan: Plan | None = None) -> Plan:
    """The paper's gradient offloading (section IV-D): keep what saves most, write the rest directly.

    reserve: the reserve factor S_req, 0 to 1: the part of all gradient bytes that may stay on the device.
    plan: whose modes to use; None = the paper's, plan_backward(plan_forward).

    The paper fills a table D[l, s] over bytes, D[i, j] = max(D[i-1, j], D[i-1, j-S_i] + T_GBP(i) -
    T_CBP(i)); with sizes in bytes that table has no end, so we keep its undominated entries only
    (knapsack.py): the same optimum. What is not kept is written directly, as in the paper's GO; where the
    profile says direct is not usable, or the parameter is tied (direct never reads back over the link), it
    is staged, and staging costs no compute time, so keeping it gains nothing. Gradients with no gain are not
    kept even where there is room. Frozen layers have none, device-updated layers keep theirs.

    Raises ValueError when reserve is not within 0 to 1 or `plan` is for other layers.
    """
    if not 0 <= reserve <= 1:
        raise ValueError(f"reserve must be the part of the gradients to keep, 0 to 1, found {reserve!r}")
    if plan is None:
        plan = plan_backward(profile, plan_forward(profile))
    plan.check_layers([layer.name for layer in profile.layers])
    offloadable = [
        layer.trainable and decided.update is Update.HOST
        for layer, decided in zip(profile.layers, plan.layers, strict=True)
    ]
    sizes = [own if x else 0 for own, x in zip(profile.own_bytes, offloadable, strict=True)]
    direct = [
        x and layer.direct_usable and not profile.tied[i]
        for i, (layer, x) in enumerate(zip(profile.layers, offloadable, strict=True))
    ]
    gains = [
        layer.t_bp_grad_direct - layer.t_bp if usable else 0.0
        for layer, usable in zip(profile.layers, direct, strict=True)
    ]
    capacity = math.floor(Fraction(reserve) * sum(sizes))
    packing = pack(sizes, gains, capacity)
    layers = []
    for i, decided in enumerate(plan.layers):
        grad, reason = decided.grad, ""
        if packing.taken[i]:
            grad, reason = Grad.KEEP, f"kept gradient saves {gains[i]:.3g} s over writing it to the host"
        elif direct[i]:
            grad, reason = Grad.DIRECT, f"gradient written to the host: {gains[i]:.3g} s, beyond the reserve"
            if gains[i] <= 0:
                reason = f"gradient written to the host: {-gains[i]:.3g} s less"
        elif offloadable[i]:
            grad, reason = Grad.STAGE, "gradient not usable written directly"
        layers.append(replace(decided, grad=grad, why="; ".join(x for x in (decided.why, reason) if x)))
    return replace(plan, layers=tuple(layers), device_bytes=None, host_bytes=None, predicted_period=None)
