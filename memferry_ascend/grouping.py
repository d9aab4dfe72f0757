"""A profile and a plan in the engine's units: neighbouring layers of one decision, measured as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memferry_ascend.layers import LARGEST_UNIT, SMALLEST_UNIT, TINY
from memferry_ascend.planner import LayerProfile, Mode, Plan, Profile
from memferry_ascend.planner.launches import added, missing


def tied_groups(profile: Profile) -> list[list[int]]:
    """Positions of layers that read one tied parameter, the owner first."""
    found = []
    for owner, readers in enumerate(profile.readers):
        if len(readers) > 1:
            found.append([owner, *(r for r in readers if r != owner)])
    return found


def grouped(profile: Profile, plan: Plan) -> tuple[Profile, Plan]:
    """Profile and plan with neighbouring layers of one decision merged as `layers.units` merges them."""
    plan.check_layers([x.name for x in profile.layers])
    runs = _runs(profile, plan)
    merged = [_merged(profile, plan, run, core) for run, core in runs]
    decided = [
        replace(plan.layers[core], name=m.name, bytes=m.bytes)
        for (_, core), m in zip(runs, merged, strict=True)
    ]
    names = {profile.layers[run[0]].name: m.name for (run, _), m in zip(runs, merged, strict=True)}
    merged = [replace(m, shares=names[m.shares]) if m.shares is not None else m for m in merged]
    units = replace(profile, layers=tuple(merged), parameters=(), launches={})
    return units, replace(plan, layers=tuple(decided))


def _runs(profile: Profile, plan: Plan) -> list[tuple[list[int], int]]:
    """Positions of the layers of each unit, and of the one whose decision it has: small DHA layers ride along."""
    tied = {i for group in tied_groups(profile) for i in group}
    out: list[tuple[list[int], int]] = []
    run: list[int] = []
    core = -1
    for i, layer in enumerate(profile.layers):
        rides = plan.layers[i].mode is Mode.DHA and layer.bytes <= TINY and i not in tied
        if run:
            head = plan.layers[core if core >= 0 else run[0]]
            mine, before = plan.layers[i], profile.layers[run[0]]
            size = sum(profile.layers[j].bytes for j in run)
            if (
                (mine.grad, mine.update) != (head.grad, head.update)
                or not (rides or core < 0 or mine.mode is head.mode)
                or (layer.trainable, layer.recompute, layer.itemsize)
                != (before.trainable, before.recompute, before.itemsize)
                or size >= SMALLEST_UNIT
                or size + layer.bytes > LARGEST_UNIT
                or i in tied
                or run[0] in tied
            ):
                out.append((run, core if core >= 0 else run[0]))
                run, core = [], -1
        if not rides and core < 0:
            core = i
        run.append(i)
    out.append((run, core if core >= 0 else run[0]))
    return out


def _merged(profile: Profile, plan: Plan, run: Sequence[int], core: int) -> LayerProfile:
    """One layer that stands for a unit: times add up, the gaps inside become its own, and its launching is that of its
    layers as they are decided. A unit smaller than usual is one more than the layers were measured with."""
    parts = [profile.layers[i] for i in run]
    if plan.layers[core].mode is not Mode.DHA:  # riders read host memory although the unit is copied
        for k, i in enumerate(run):
            x = parts[k]
            if plan.layers[i].mode is Mode.DHA:
                parts[k] = replace(x, t_fp=x.t_fp_dha, t_bp=x.t_bp_dha)
    first, last = parts[0], parts[-1]
    inner_fp = sum(x.t_gap_fp for x in parts[:-1])
    inner_bp = sum(x.t_gap_bp for x in parts[:-1])  # a backward gap lies before its layer's backward

    def total(field: str) -> Any:
        return sum(getattr(x, field) for x in parts)

    chosen = [(x.mode, x.grad, x.update) for x in map(plan.layers.__getitem__, run)]
    more = [added(profile.launches, x, missing(total("bytes")) / len(run)) for x in chosen]
    first = replace(
        first,
        t_host_fp=total("t_host_fp") + inner_fp + sum(x[0] for x in more),
        t_host_bp=total("t_host_bp") + inner_bp + sum(x[1] for x in more),
    )
    if len(parts) == 1:
        return first
    return replace(
        first,
        name=f"{first.name}..{last.name}",
        bytes=total("bytes"),
        t_trans=profile.link.latency + total("bytes") / profile.link.h2d,
        t_fp=total("t_fp") + inner_fp,
        t_bp=total("t_bp") + inner_bp,
        t_fp_dha=total("t_fp_dha") + inner_fp,
        t_bp_dha=total("t_bp_dha") + inner_bp,
        t_bp_grad_direct=total("t_bp_grad_direct") + inner_bp,
        t_gap_fp=last.t_gap_fp,
        t_gap_bp=last.t_gap_bp,
        t_update=total("t_update"),
        dha_bytes=total("dha_bytes"),
        t_update_device=None if any(x.t_update_device is None for x in parts) else total("t_update_device"),
    )
