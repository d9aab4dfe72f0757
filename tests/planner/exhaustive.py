"""The yardstick: the best of every plan of a small model, found without the search's moves or starts."""

from __future__ import annotations

import itertools

from memferry_ascend.planner import LayerPlan, Mode, Plan, Profile, Update, device_bytes
from memferry_ascend.planner.estimate import Estimate
from memferry_ascend.planner.simulator import period
from tests.planner.helpers import usable_decisions


def runnable(profile: Profile, chosen) -> bool:
    """A tied parameter updated on the device is read there by all its readers."""
    names = {x.name: i for i, x in enumerate(profile.layers)}
    return all(
        x.shares is None or chosen[names[x.shares]][2] is Update.HOST or decision[0] is Mode.GFGB
        for x, decision in zip(profile.layers, chosen, strict=True)
    )


def every_plan(profile: Profile, *, grads: bool, device_updates: bool):
    options = [
        [d for d in usable_decisions(profile, i, grads=grads) if device_updates or d[2] is Update.HOST]
        for i in range(len(profile.layers))
    ]
    return (chosen for chosen in itertools.product(*options) if runnable(profile, chosen))


def best_of_all(
    profile: Profile, budget: int | None, *, grads: bool, update: str = "step"
) -> tuple[float, tuple] | None:
    """The shortest period within the budget and its plan, or None when nothing fits.

    Every plan is considered; those whose lower bound is no better than the best found are not simulated.
    """
    estimate = Estimate(profile)
    bound = estimate.period if update == "step" else estimate.busy
    plans = []
    for chosen in every_plan(profile, grads=grads, device_updates=budget is not None):
        if budget is None or device_bytes(profile, chosen).total <= budget:
            plans.append((bound(chosen), len(plans), chosen))
    best = None
    for least, _, chosen in sorted(plans, key=lambda item: item[:2]):
        if best is not None and least >= best[0]:
            break
        seconds = period(profile, chosen, update)
        if best is None or seconds < best[0]:
            best = (seconds, chosen)
    return best


def plan_of(profile: Profile, chosen) -> Plan:
    return Plan(tuple(LayerPlan(x.name, *d) for x, d in zip(profile.layers, chosen, strict=True)))
