"""Alg. 2 of the MemFerry paper: which DHA layers are copied for the backward pass after all."""

from __future__ import annotations

import math
from dataclasses import replace

from memferry_ascend.planner.forward import transfer_time
from memferry_ascend.planner.iteration import backward_time
from memferry_ascend.planner.plan import Grad, Mode, Plan, Update
from memferry_ascend.planner.profile import Profile


def plan_backward(profile: Profile, forward: Plan) -> Plan:
    """The paper's Algorithm 2 (section IV-B): turn DHA layers into DFGB while the link is idle.

    `forward` is what plan_forward returned, with its `t_res` and `tag`. The idle time is T_res and the
    backward of the layers after tag. Layers that gain from a copied backward are taken by gain, largest
    first, as long as the idle time holds their copy.

    Where the text is ambiguous we chose as docs/planner.md argues: line 8 sorts `load_dict` by gain,
    descending (it names T_res, a number); ties go to the later layer, which the backward needs first. Beyond
    the paper: a layer whose backward cannot run by DHA becomes DFGB whatever the idle time; recomputed
    layers count their second forward.

    Returns the plan with `t_res` less what was used. Raises ValueError when `forward` is for other layers.
    """
    forward.check_layers([layer.name for layer in profile.layers])
    layers, count = list(forward.layers), len(profile.layers)
    t_res = forward.t_res
    on_device = [backward_time(profile, i, (Mode.GFGB, Grad.STAGE, Update.HOST)) for i in range(count)]
    by_dha = [backward_time(profile, i, (Mode.DHA, Grad.STAGE, Update.HOST)) for i in range(count)]
    t_res += sum(on_device[i] + profile.layers[i].t_gap_bp for i in range(forward.tag + 1, count))
    load_dict: list[tuple[float, int, float]] = []
    for i in reversed(range(count)):
        if layers[i].mode is not Mode.DHA:
            continue
        t_trans = transfer_time(profile, i, [layer.mode for layer in layers])
        if t_trans + on_device[i] < by_dha[i]:
            load_dict.append((by_dha[i] - t_trans - on_device[i], i, t_trans))
    for gain, i, t_trans in sorted(load_dict, reverse=True):
        if t_res > t_trans or math.isinf(gain):
            reason = (
                "backward not usable by DHA" if math.isinf(gain) else f"copied backward: {gain:.3g} s less"
            )
            layers[i] = replace(layers[i], mode=Mode.DFGB, why=f"{layers[i].why}; {reason}".lstrip("; "))
            t_res = max(0.0, t_res - t_trans)
    return replace(forward, layers=tuple(layers), t_res=t_res)
