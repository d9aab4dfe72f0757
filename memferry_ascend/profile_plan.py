"""From a profile to a plan the engine can run: the planner's algorithms, held to what the engine does.

The planner decides layer by layer; the engine groups layers into units, gives a tied parameter one mode for all its
readers, and may not offer every placement. So the profile is narrowed before the search, and what it finds is predicted
again unit by unit: that is the `predicted_period` of the plan. Pure, so that `memferry plan` works from a file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from memferry_ascend import sizes
from memferry_ascend.backends.base import DIRECT_KINDS
from memferry_ascend.errors import FerryError
from memferry_ascend.grouping import grouped, tied_groups
from memferry_ascend.layers import Layer
from memferry_ascend.limits import RING_SLOTS
from memferry_ascend.outline import engine_bytes, stand_ins
from memferry_ascend.placement import exchanged
from memferry_ascend.planner import (
    Grad,
    LayerPlan,
    Mode,
    Plan,
    Profile,
    Timeline,
    Update,
    host_bytes,
    plan_backward,
    plan_forward,
    plan_gradients,
    search,
    simulate,
)

HANDICAP = 0.02
"""How much faster a plan must be predicted to be preferred although more of its layers change storage (DFGB, STREAM) or
keep or write their gradients: the latter are estimated, and measurements are not exact."""
_MOVING = (Mode.DFGB, Mode.STREAM)

ROUNDS = 6
"""How often a plan that outgrows the budget in the engine's units is searched again with less, or with more."""
CLOSE, REFINEMENTS = 0.02, 2
"""The part of the budget at which what fits and what does not are close enough, and how often closer is tried for."""
EFFORT_AGAIN = 0.5
"""The work of such a search, as a part of the first one's."""


def plan_profile(
    profile: Profile,
    planner: str = "search",
    *,
    device_memory: int | None = None,
    reserve: float | None = None,
    update: str = "step",
    accumulate: int = 1,
    direct_kinds: Collection[str] = DIRECT_KINDS,
    layers: Sequence[Layer] | None = None,
) -> Plan:
    """A plan of `profile`'s layers, in its order, with `predicted_period`, bytes and "why" per layer. What the engine
    would refuse must be "not usable" (inf) in the profile (`placement.offered`): then it is in no plan.

    planner: "search" or "paper". device_memory: bytes, None = no limit; parameters may then be resident, but nothing is
    updated on the device. reserve: the paper's reserve factor. With "paper" it places the gradients (kept, written
    directly, or staged where they cannot); None = all are staged. With "search" it is the most of the host-updated
    layers' gradient bytes that may be kept; None = as many as help. direct_kinds: kinds of layers whose gradient a
    kernel can write to host memory ("*" = all). layers: the model's, in its own order, by which bytes are counted; None =
    as the profile describes them.

    Raises:
        FerryError: nothing fits `device_memory`, naming the smallest that works; or an argument makes no sense.
    """
    narrowed = narrow(profile, direct_kinds)
    layers = stand_ins(profile) if layers is None else layers
    try:
        if planner == "search":
            return _Search(narrowed, layers, device_memory, update, accumulate, reserve).run()
        if planner != "paper":
            raise FerryError(f'planner: expected "search" or "paper", found {planner!r}')
        one = narrowed.as_one()
        plan = plan_backward(one, plan_forward(one))
        if reserve is not None and profile.fabric is None:
            plan = plan_gradients(narrowed, reserve, plan)
        plan = finish(narrowed, runnable(narrowed, plan), update, accumulate, layers)
    except ValueError as e:
        raise e if isinstance(e, FerryError) else FerryError(str(e)) from e
    if device_memory is not None and plan.device_bytes is not None and plan.device_bytes > device_memory:
        raise FerryError(
            f'planner="paper": its plan needs {sizes.fmt(plan.device_bytes)} ({plan.device_bytes} bytes) on the device, '
            f'over device_memory {sizes.fmt(device_memory)}; raise it, or use planner="search", which keeps a budget'
        )
    return plan


class _Search:
    """`search`, held to the engine's units and bytes; then the fastest of what was found and the plain plans."""

    def __init__(
        self,
        profile: Profile,
        layers: Sequence[Layer],
        budget: int | None,
        update: str,
        accumulate: int,
        reserve: float | None,
    ) -> None:
        self.profile, self.layers, self.budget = profile, layers, budget
        self.update, self.accumulate, self.reserve = update, accumulate, reserve
        self.least: int | None = None
        self.over = 0
        self.refused: ValueError | None = None

    def run(self) -> Plan:
        found = self.search()
        plans = [] if found is None else [found]
        one = self.profile.as_one()
        rivals = [
            ("the paper's plan", plan_backward(one, plan_forward(one))),
            ("", host_reads_where_faster(self.profile)),
            ("all GFGB", all_of(self.profile, Mode.GFGB)),
        ]
        if self.budget is not None:
            rivals.append(("plain training", all_on_device(self.profile)))
        if found is None:
            rivals += [("", all_of(self.profile, Mode.STREAM)), ("", all_of(self.profile, Mode.DHA))]
        elif any(x.grad is not Grad.STAGE and x.update is Update.HOST for x in found.layers):
            rivals.append(("staging every gradient", staged(found)))
        for name, other in rivals:
            rival = self.fitting(other)
            if rival is not None:
                reason = f"{name} is as fast, with fewer moves" if name else ""
                layers = tuple(
                    replace(x, why="; ".join(w for w in (x.why, reason) if w)) for x in rival.layers
                )
                plans.append(replace(rival, layers=layers))
        if not plans:
            if self.refused is not None:
                raise self.refused
            raise FerryError(
                f"device_memory {sizes.fmt(self.budget or 0)} ({self.budget} bytes): the smallest plan found needs "
                f"{self.least} bytes in whole units; allow that much, or make the batch smaller"
            )
        return _preferred(plans)

    def fitting(self, plan: Plan) -> Plan | None:
        """The plan as the engine runs it, or None when that is too large."""
        done = finish(self.profile, runnable(self.profile, plan), self.update, self.accumulate, self.layers)
        assert done.device_bytes is not None
        if self.budget is None or done.device_bytes <= self.budget:
            return done
        self.least = done.device_bytes if self.least is None else min(self.least, done.device_bytes)
        self.over = done.device_bytes - self.budget
        return None

    def search(self) -> Plan | None:
        """The search, again with less memory as long as the engine's units need more than the budget, and with more when
        that was too little; the fastest that fits."""
        best: Plan | None = None
        low, high, step = 0, self.budget or 0, 0  # what was little enough, or too little; what was too much
        allowed, refined = self.budget, 0
        for round_ in range(ROUNDS):
            try:
                found = search(
                    self.profile,
                    allowed,
                    update=self.update,
                    slots=RING_SLOTS,
                    accumulate=self.accumulate,
                    reserve=self.reserve,
                    effort=1.0 if round_ == 0 else EFFORT_AGAIN,
                    direct_stages=True,
                )
            except ValueError as e:
                if round_ == 0 or allowed is None:
                    self.refused = e
                    return None
                low, allowed = allowed, (allowed + high) // 2
                continue
            done = self.fitting(found)
            if allowed is None:
                return done
            if done is None:
                # A little less than what is too much may give the same plan again.
                high, step = allowed, max(self.over + self.over // 8, step // 4)
                allowed = max(allowed - step, (low + allowed) // 2)
                continue
            best = min((x for x in (best, done) if x is not None), key=_seconds)
            low = allowed
            if high - low <= CLOSE * high or refined == REFINEMENTS:
                break
            refined += 1
            allowed = (low + high) // 2
        return best


def staged(plan: Plan) -> Plan:
    """The plan with every gradient of a host-updated layer staged."""
    layers = tuple(
        x
        if x.update is Update.DEVICE or x.grad is Grad.STAGE
        else replace(
            x, grad=Grad.STAGE, why=f"{x.why}; its gradient would gain nothing elsewhere".lstrip("; ")
        )
        for x in plan.layers
    )
    return replace(plan, layers=layers)


def _seconds(plan: Plan) -> float:
    return plan.predicted_period if plan.predicted_period is not None else float("inf")


def _preferred(plans: Sequence[Plan]) -> Plan:
    """Of the plans predicted within HANDICAP of the fastest the one with the fewest layers that change storage or place
    their gradients specially, then with the fewest that the host updates; of equals the faster, then the earlier."""

    fastest = min(map(_seconds, plans))
    near = [plan for plan in plans if _seconds(plan) <= fastest * (1 + HANDICAP)]

    def moves(plan: Plan) -> tuple[int, int]:
        on_host = [x for x in plan.layers if x.update is Update.HOST]
        placed = sum(x.grad is not Grad.STAGE for x in on_host)
        return sum(x.mode in _MOVING for x in plan.layers) + placed, len(on_host)

    return min(near, key=lambda plan: (*moves(plan), _seconds(plan)))


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


def all_on_device(profile: Profile) -> Plan:
    """Every layer as in plain training: parameters, gradient and optimizer state on the device, where that is usable."""
    chosen = []
    for x in all_of(profile, Mode.GFGB).layers:
        measured = profile[x.name]
        if measured.trainable and measured.device_update_usable:
            x = replace(x, grad=Grad.KEEP, update=Update.DEVICE)
        chosen.append(x)
    return Plan(tuple(chosen))


def narrow(profile: Profile, direct_kinds: Collection[str]) -> Profile:
    """The profile without what the engine does not do: direct gradients of other kinds or of several ranks, updates on
    the device of several ranks or where their time was not measured, and host reads of a tied parameter by all its
    readers unless that was measured faster than its copy and reads on the device."""
    layers = list(profile.layers)
    if profile.fabric is not None:
        direct_kinds = ()
    for i, x in enumerate(layers):
        if "*" not in direct_kinds and x.kind not in direct_kinds:
            layers[i] = replace(x, t_bp_grad_direct=float("inf"))
        if x.t_update_device is None or profile.fabric is not None:
            layers[i] = replace(layers[i], t_update_device=float("inf"))
    one = profile.as_one().layers
    for group in tied_groups(profile):
        on_host = sum(layers[i].t_fp_dha + layers[i].t_bp_dha for i in group)
        copied = one[group[0]].t_trans + sum(layers[i].t_fp + layers[i].t_bp for i in group)
        if not on_host < copied:
            for i in group:
                layers[i] = replace(layers[i], t_fp_dha=float("inf"), t_bp_dha=float("inf"))
    return replace(profile, layers=tuple(layers))


def runnable(profile: Profile, plan: Plan) -> Plan:
    """`plan` as the engine runs it: one mode for the readers of a tie."""
    for group in tied_groups(profile):
        modes = {plan.layers[i].mode for i in group}
        if len(modes) > 1:
            plan = _agree(profile, plan, group, sorted(modes))
    return plan


def _agree(profile: Profile, plan: Plan, group: Sequence[int], modes: Sequence[Mode]) -> Plan:
    """One mode for all readers of a tied parameter: the one whose plan is predicted fastest. Another than GFGB takes
    updates back to the host."""
    best: tuple[float, Plan] | None = None
    for mode in (*modes, *(m for m in (Mode.GFGB,) if m not in modes)):
        layers = list(plan.layers)
        for i in group:
            why = f"one mode for every reader of {layers[group[0]].name!r}"
            if layers[i].update is Update.DEVICE and mode is not Mode.GFGB:
                layers[i] = replace(layers[i], grad=Grad.STAGE, update=Update.HOST)
            layers[i] = replace(layers[i], mode=mode, why=why)
        other = replace(plan, layers=tuple(layers))
        try:
            seconds = simulate(profile, other, slots=RING_SLOTS).period
        except ValueError:  # one of the readers cannot read host memory
            continue
        if best is None or seconds < best[0]:
            best = (seconds, other)
    assert best is not None  # GFGB always runs
    return best[1]


def finish(
    profile: Profile, plan: Plan, update: str, accumulate: int = 1, layers: Sequence[Layer] | None = None
) -> Plan:
    """`plan` with the period of the engine's units, and the bytes that the engine counts for it. `layers`: as for
    `plan_profile`."""
    units, in_units = grouped(profile, plan)
    layers = stand_ins(profile) if layers is None else layers
    local = None if profile.fabric is None else profile.fabric.ranks
    counted = engine_bytes(layers, plan, accumulate=accumulate, base=profile.base_bytes, local=local)
    return replace(
        plan,
        predicted_period=simulate(units, in_units, update, slots=RING_SLOTS).period,
        device_bytes=counted,
        host_bytes=host_bytes(units, in_units),
    )


def predict(profile: Profile, plan: Plan, update: str = "step") -> Timeline:
    """What the engine is expected to do with `plan`, unit by unit. Raises ValueError when they do not fit together."""
    if profile.fabric is not None:
        plan = exchanged(plan)
    plan = ordered(plan, [x.name for x in profile.layers])
    return simulate(*grouped(profile, plan), update, slots=RING_SLOTS)


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
