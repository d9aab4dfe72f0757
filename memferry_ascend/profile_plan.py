"""From a profile to a plan the engine can run: the planner's algorithms, held to what the engine does.

The planner decides layer by layer; the engine groups layers into units, gives a tied parameter one mode for all its
readers, and may not offer every placement. So the profile is narrowed before the search, and what it finds is predicted
again unit by unit: that is the `predicted_period` of the plan. Pure, so that `memferry plan` works from a file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from memferry_ascend import sizes
from memferry_ascend.errors import FerryError
from memferry_ascend.layers import LARGEST_UNIT, SMALLEST_UNIT, TINY
from memferry_ascend.limits import RING_SLOTS
from memferry_ascend.placement import exchanged
from memferry_ascend.planner import (
    Grad,
    LayerPlan,
    LayerProfile,
    Mode,
    Plan,
    Profile,
    Timeline,
    Update,
    device_bytes,
    host_bytes,
    plan_backward,
    plan_forward,
    plan_gradients,
    search,
    simulate,
)

ENGINE_GRADS = frozenset({Grad.STAGE})
ENGINE_UPDATES = frozenset({Update.HOST})
"""Placements the engine runs. What the planner chooses beyond them becomes staging and the host's update."""

HANDICAP = 0.02
"""How much faster a plan must be predicted to be preferred although more of its layers change storage (DFGB, STREAM):
what autograd saves of those costs launch time that the simulator does not count, and measurements are not exact."""
_MOVING = (Mode.DFGB, Mode.STREAM)

ROUNDS = 6
"""How often a plan that outgrows the budget in the engine's units is searched again with less."""


def plan_profile(
    profile: Profile,
    planner: str = "search",
    *,
    device_memory: int | None = None,
    reserve: float | None = None,
    update: str = "step",
    accumulate: int = 1,
    direct_kinds: Collection[str] = frozenset(),
) -> Plan:
    """A plan of `profile`'s layers, in its order, with `predicted_period`, bytes and "why" per layer.

    planner: "search" or "paper". device_memory: bytes, None = no limit. reserve: the paper's reserve factor, None = all
    gradients are staged. direct_kinds: kinds of layers whose gradient a kernel can write to host memory ("*" = all).

    Raises:
        FerryError: nothing fits `device_memory`, naming the smallest that works; or an argument makes no sense.
    """
    narrowed = narrow(profile, direct_kinds)
    try:
        if planner == "search":
            return _search(narrowed, device_memory, update, accumulate)
        if planner != "paper":
            raise FerryError(f'planner: expected "search" or "paper", found {planner!r}')
        one = narrowed.as_one()
        plan = plan_backward(one, plan_forward(one))
        if reserve is not None and profile.fabric is None:
            plan = plan_gradients(narrowed, reserve, plan)
        plan = finish(narrowed, runnable(narrowed, plan), update, accumulate)
    except ValueError as e:
        raise e if isinstance(e, FerryError) else FerryError(str(e)) from e
    if device_memory is not None and plan.device_bytes is not None and plan.device_bytes > device_memory:
        raise FerryError(
            f'planner="paper": its plan needs {sizes.fmt(plan.device_bytes)} ({plan.device_bytes} bytes) on the device, '
            f'over device_memory {sizes.fmt(device_memory)}; raise it, or use planner="search", which keeps a budget'
        )
    return plan


def _search(profile: Profile, budget: int | None, update: str, accumulate: int) -> Plan:
    """The search, again with less memory as long as the engine's units need more than the budget; then the fastest, in
    units, of what was found and the plain plans."""
    plan: Plan | None = None
    allowed, previous, failed, least = budget, budget or 0, 0, 0
    for round_ in range(ROUNDS):
        try:
            found = search(
                profile,
                allowed,
                update=update,
                slots=RING_SLOTS,
                accumulate=accumulate,
                device_updates=Update.DEVICE in ENGINE_UPDATES,
            )
        except ValueError:
            if round_ == 0 or budget is None or allowed is None:
                raise
            failed, allowed = allowed, (allowed + previous) // 2
            continue
        done = finish(profile, runnable(profile, found), update, accumulate)
        assert done.device_bytes is not None
        if budget is None or allowed is None or done.device_bytes <= budget:
            plan = done
            break
        least = min(least or done.device_bytes, done.device_bytes)
        previous = allowed
        allowed = max(allowed - (done.device_bytes - budget), (failed + allowed) // 2)
    if plan is None:
        raise FerryError(
            f"device_memory {sizes.fmt(budget or 0)} ({budget} bytes): the smallest plan found needs {least} bytes in "
            "whole units; allow that much, or make the batch smaller"
        )
    rivals, one = [plan], profile.as_one()
    for name, other in (
        ("the paper's plan", plan_backward(one, plan_forward(one))),
        ("", host_reads_where_faster(profile)),
        ("all GFGB", all_of(profile, Mode.GFGB)),
    ):
        rival = finish(profile, runnable(profile, other), update, accumulate)
        assert rival.device_bytes is not None
        if budget is None or rival.device_bytes <= budget:
            reason = f"{name} is as fast, with fewer moves" if name else ""
            layers = tuple(replace(x, why="; ".join(w for w in (x.why, reason) if w)) for x in rival.layers)
            rivals.append(replace(rival, layers=layers))
    return _preferred(rivals)


def _preferred(plans: Sequence[Plan]) -> Plan:
    """The plan with the fewest layers that change storage among those predicted within HANDICAP of the fastest; of
    equals the faster, then the earlier."""

    def seconds(plan: Plan) -> float:
        return plan.predicted_period if plan.predicted_period is not None else float("inf")

    fastest = min(map(seconds, plans))
    near = [plan for plan in plans if seconds(plan) <= fastest * (1 + HANDICAP)]
    return min(near, key=lambda plan: (sum(x.mode in _MOVING for x in plan.layers), seconds(plan)))


def host_reads_where_faster(profile: Profile) -> Plan:
    """DHA for each layer whose passes from host memory take no longer than its copy and its passes on the device."""
    chosen = []
    for x in profile.as_one().layers:
        gain = x.t_trans + x.t_fp + x.t_bp - x.t_fp_dha - x.t_bp_dha
        if gain >= 0:
            decided = LayerPlan(x.name, Mode.DHA, why=f"host reads beat copy and compute by {gain:.3g} s")
        elif x.dha_usable and x.dha_backward_usable:
            decided = LayerPlan(x.name, why=f"copy and compute beat host reads by {-gain:.3g} s")
        else:
            decided = LayerPlan(x.name, why="host reads are not usable, or slower for a tied parameter")
        chosen.append(replace(decided, kind=x.kind, bytes=x.bytes))
    return Plan(tuple(chosen))


def all_of(profile: Profile, mode: Mode) -> Plan:
    """Every layer in `mode`, or GFGB where the profile says that it cannot read host memory."""
    chosen = []
    for x in profile.layers:
        usable = x.dha_usable and (mode is Mode.DFGB or x.dha_backward_usable)
        one = mode if mode in (Mode.GFGB, Mode.STREAM) or usable else Mode.GFGB
        chosen.append(LayerPlan(x.name, one, kind=x.kind, bytes=x.bytes))
    return Plan(tuple(chosen))


def narrow(profile: Profile, direct_kinds: Collection[str]) -> Profile:
    """The profile without what the engine cannot do: direct gradients of other kinds or of several ranks, and host
    reads of a tied parameter by all its readers unless that was measured faster than its copy and reads on the device."""
    layers = list(profile.layers)
    if profile.fabric is not None:
        direct_kinds = ()
    for i, x in enumerate(layers):
        if "*" not in direct_kinds and x.kind not in direct_kinds:
            layers[i] = replace(x, t_bp_grad_direct=float("inf"))
    one = profile.as_one().layers
    for group in tied_groups(profile):
        on_host = sum(layers[i].t_fp_dha + layers[i].t_bp_dha for i in group)
        copied = one[group[0]].t_trans + sum(layers[i].t_fp + layers[i].t_bp for i in group)
        if not on_host < copied:
            for i in group:
                layers[i] = replace(layers[i], t_fp_dha=float("inf"), t_bp_dha=float("inf"))
    return replace(profile, layers=tuple(layers))


def tied_groups(profile: Profile) -> list[list[int]]:
    """Positions of layers that read one tied parameter, the owner first."""
    found = []
    for owner, readers in enumerate(profile.readers):
        if len(readers) > 1:
            found.append([owner, *(r for r in readers if r != owner)])
    return found


def runnable(profile: Profile, plan: Plan) -> Plan:
    """`plan` with every decision one that the engine runs: known placements, one mode for the readers of a tie."""
    layers = []
    for x in plan.layers:
        grad = x.grad if x.grad in ENGINE_GRADS else Grad.STAGE
        update = x.update if x.update in ENGINE_UPDATES else Update.HOST
        why = x.why
        if (grad, update) != (x.grad, x.update):
            wanted = "an update on the device" if update is not x.update else f"grad {x.grad}"
            why = "; ".join(w for w in (why, f"{wanted} is not run by the engine: staged") if w)
        layers.append(replace(x, grad=grad, update=update, why=why))
    plan = replace(plan, layers=tuple(layers))
    for group in tied_groups(profile):
        modes = {plan.layers[i].mode for i in group}
        if len(modes) > 1:
            plan = _agree(profile, plan, group, sorted(modes))
    return plan


def _agree(profile: Profile, plan: Plan, group: Sequence[int], modes: Sequence[Mode]) -> Plan:
    """One mode for all readers of a tied parameter: the one whose plan is predicted fastest."""
    best: tuple[float, Plan] | None = None
    for mode in (*modes, *(m for m in (Mode.GFGB,) if m not in modes)):
        layers = list(plan.layers)
        for i in group:
            layers[i] = replace(
                layers[i], mode=mode, why=f"one mode for every reader of {layers[group[0]].name!r}"
            )
        other = replace(plan, layers=tuple(layers))
        try:
            seconds = simulate(profile, other, slots=RING_SLOTS).period
        except ValueError:  # one of the readers cannot read host memory
            continue
        if best is None or seconds < best[0]:
            best = (seconds, other)
    assert best is not None  # GFGB always runs
    return best[1]


def finish(profile: Profile, plan: Plan, update: str, accumulate: int = 1) -> Plan:
    """`plan` with the period and the bytes of the engine's units."""
    units, in_units = grouped(profile, plan)
    parts = device_bytes(units, in_units, slots=RING_SLOTS, accumulate=accumulate)
    return replace(
        plan,
        predicted_period=simulate(units, in_units, update, slots=RING_SLOTS).period,
        device_bytes=parts.total - parts.staged + _in_flight(units),
        host_bytes=host_bytes(units, in_units),
    )


def _in_flight(units: Profile) -> int:
    """Device bytes that `budget.need` asks for gradients on their way to the host, when nothing more is to be had: two
    of the largest unit, and what tied layers hold until their last reader's backward."""
    own = [n for n, x in zip(units.own_bytes, units.layers, strict=True) if x.trainable]
    owners = {x.shares for x in units.layers if x.shares is not None}
    tied = sum(
        n for n, x in zip(units.own_bytes, units.layers, strict=True) if x.trainable and x.name in owners
    )
    return min(2 * max(own, default=0), sum(own)) + tied


def predict(profile: Profile, plan: Plan, update: str = "step") -> Timeline:
    """What the engine is expected to do with `plan`, unit by unit. Raises ValueError when they do not fit together."""
    if profile.fabric is not None:
        plan = exchanged(plan)
    plan = ordered(plan, [x.name for x in profile.layers])
    return simulate(*grouped(profile, plan), update, slots=RING_SLOTS)


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
    return replace(profile, layers=tuple(merged)), replace(plan, layers=tuple(decided))


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
    """One layer that stands for a unit: times add up, the gaps inside become its own."""
    parts = [profile.layers[i] for i in run]
    if plan.layers[core].mode is not Mode.DHA:  # riders read host memory although the unit is copied
        for k, i in enumerate(run):
            x = parts[k]
            if plan.layers[i].mode is Mode.DHA:
                parts[k] = replace(x, t_fp=x.t_fp_dha, t_bp=x.t_bp_dha)
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0], parts[-1]
    inner_fp = sum(x.t_gap_fp for x in parts[:-1])
    inner_bp = sum(x.t_gap_bp for x in parts[:-1])  # a backward gap lies before its layer's backward

    def total(field: str) -> Any:
        return sum(getattr(x, field) for x in parts)

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
        t_update_device=None,
    )


def ordered(plan: Plan, names: Sequence[str]) -> Plan:
    """`plan` with its layers in the order of `names`; `tag` still means the same layer.

    Raises:
        ValueError: the names are not the plan's.
    """
    if set(names) != {x.name for x in plan.layers}:
        plan.check_layers(names)
    tagged = plan.layers[plan.tag].name if plan.tag >= 0 else None
    layers = tuple(plan[name] for name in names)
    return replace(plan, layers=layers, tag=-1 if tagged is None else list(names).index(tagged))
