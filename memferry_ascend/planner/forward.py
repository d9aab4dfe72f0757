"""Alg. 1 of the MemFerry paper: which layers compute straight from host memory in the forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from memferry_ascend.planner.plan import LayerPlan, Mode, Plan
from memferry_ascend.planner.profile import Profile


def plan_forward(profile: Profile) -> Plan:
    """The paper's Algorithm 1 (section IV-B): each layer GFGB or DHA, with backtracking.

    Walks forward with T_all, the time so far, and T_res, the time in which the link may still run ahead of
    computation. A layer whose DHA forward takes no longer than computing and the part of its copy that
    nothing hides becomes DHA. A GFGB layer whose copy T_res does not hide sends `backtrack` to turn earlier
    GFGB layers into DHA, as long as that shortens the forward pass.

    Where the text is ambiguous or misprinted we chose as docs/planner.md argues: line 3 reads
    `max(T_trans - T_res, 0)`; `base` and `baseline` are one; with tag = -1 backtrack scans the GFGB layers
    since the start, skips layers already DHA and never reaches i = l; line 25 also carries the added DHA
    time into T_all; line 29 assigns. Beyond the paper: frozen layers stay on the device, so their T_trans is
    0; a tied parameter another GFGB layer has loaded costs nothing again; an infinite time is never chosen.

    Returns a plan with `t_res` (seconds) and `tag` (position from 0) for Alg. 2. A layer whose backward
    cannot run by DHA is DHA here and becomes DFGB in `plan_backward`.
    """
    layers, count = profile.layers, len(profile.layers)
    modes: list[Mode | None] = [None] * count
    why = [""] * count
    t_all, t_res, tag = 0.0, 0.0, -1
    for current, layer in enumerate(layers):
        t_trans = transfer_time(profile, current, modes)
        exposed = max(t_trans - t_res, 0.0)
        if layer.t_fp_dha <= layer.t_fp + exposed:
            modes[current] = Mode.DHA
            saved = layer.t_fp + exposed - layer.t_fp_dha
            why[current] = f"DHA forward beats the copy nothing hides by {saved:.3g} s"
            t_all, t_res = t_all + layer.t_fp_dha, t_res + layer.t_fp_dha
        else:
            modes[current] = Mode.GFGB
            lost = layer.t_fp_dha - layer.t_fp - exposed
            why[current] = (
                f"copy and compute beat a DHA forward by {lost:.3g} s" if layer.dha_usable else _NO_DHA
            )
            if t_trans < t_res:
                if tag == -1:
                    tag = current
                t_all, t_res = t_all + layer.t_fp, t_res + layer.t_fp - t_trans
            else:
                t_all, t_res, tag = _backtrack(profile, current, t_trans, t_all, t_res, tag, modes, why)
        t_all, t_res = t_all + layer.t_gap_fp, t_res + layer.t_gap_fp
    chosen = tuple(
        LayerPlan(x.name, mode or Mode.GFGB, why=text, kind=x.kind, bytes=x.bytes)
        for x, mode, text in zip(layers, modes, why, strict=True)
    )
    return Plan(chosen, t_res=t_res, tag=tag)


_NO_DHA = "not usable by DHA"


def _backtrack(
    profile: Profile,
    current: int,
    t_trans: float,
    t_all: float,
    t_res: float,
    tag: int,
    modes: list[Mode | None],
    why: list[str],
) -> tuple[float, float, int]:
    """Lines 18 to 29: T_all, T_res and tag after layer `current`; earlier layers become DHA where it pays."""
    t_fp = profile.layers[current].t_fp
    base = t_all + t_trans + t_fp - t_res
    for i in range(max(tag, 0), current):
        layer = profile.layers[i]
        if modes[i] is not Mode.GFGB or not layer.dha_usable:
            continue
        added = layer.t_fp_dha - layer.t_fp
        gain = transfer_time(profile, i, modes) + added
        candidate = max(t_trans - t_res - gain, 0.0) + t_all + added + t_fp
        if candidate < base:
            modes[i] = Mode.DHA
            why[i] = f"DHA hides the copy of {profile.layers[current].name!r}: {base - candidate:.3g} s less"
            tag, base = i + 1, candidate
            t_all, t_res = t_all + added, t_res + gain
            if t_res >= t_trans:
                break
    return base, max(t_res - t_trans, 0.0) + t_fp, tag


def transfer_time(profile: Profile, i: int, modes: Sequence[Mode | None]) -> float:
    """Seconds of link time that layer `i` in GFGB costs per iteration, given what the others do.

    Its own parameters, and those of the owner it shares with unless another GFGB layer loads them; nothing
    when frozen, because what is on the device is never out of date.
    """
    total = 0.0
    for store in {i, profile.owners[i]}:
        others = (r for r in profile.readers[store] if r != i and modes[r] is Mode.GFGB)
        if profile.layers[store].trainable and next(others, None) is None:
            total += profile.layers[store].t_trans * profile.own_fraction[store]
    return total
