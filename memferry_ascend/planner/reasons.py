"""Why each layer's decision was taken: which alternative it beats and by how many seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memferry_ascend.planner.estimate import Estimate
from memferry_ascend.planner.memory import Decision
from memferry_ascend.planner.moves import Choices
from memferry_ascend.planner.plan import Mode, Update
from memferry_ascend.planner.profile import Profile


def reasons(
    profile: Profile,
    chosen: Sequence[Decision],
    choices: Choices,
    estimate: Estimate,
    fits: Callable[[Sequence[Decision]], bool],
) -> list[str]:
    """One sentence per layer, by the estimate without contention of the plan with only that layer changed.

    Of layers measured alike and decided alike the first is asked; the others refer to it.
    """
    here = estimate.period(chosen)
    asked: dict[object, tuple[str, str]] = {}
    found = []
    for i, layer in enumerate(profile.layers):
        key = (replace(layer, name=""), chosen[i])
        if key in asked:
            found.append("like {}: {}".format(*asked[key]))
            continue
        found.append(_reason(profile, chosen, i, here, choices, estimate, fits))
        asked[key] = (layer.name, found[-1])
    return found


def _reason(
    profile: Profile,
    chosen: Sequence[Decision],
    i: int,
    here: float,
    choices: Choices,
    estimate: Estimate,
    fits: Callable[[Sequence[Decision]], bool],
) -> str:
    current = chosen[i]
    beaten: tuple[float, str, list[Decision]] | None = None
    too_large: tuple[float, str] | None = None
    for change in (*Mode, Update.DEVICE):
        new = choices.changed(i, current, change)
        if new[0] is current[0] and new[2] is current[2]:
            continue
        other = choices.settle([*chosen[:i], new, *chosen[i + 1 :]])
        lost = estimate.period(other) - here
        name = "a device update" if new[2] is Update.DEVICE else str(new[0])
        if lost < 0 and not fits(other):
            too_large = min(too_large or (lost, name), (lost, name))
        elif beaten is None or lost < beaten[0]:
            beaten = (lost, name, other)
    parts = []
    if beaten is not None:
        lost, name, other = beaten
        small = 1e-9 * here
        if lost < -small:
            parts.append(f"beats {name} by what they would share; alone it would save {-lost:.3g} s")
        else:
            parts.append(f"beats {name} by {lost:.3g} s" if lost > small else f"as fast as {name}")
            if lost > small and profile.launches:
                free = Estimate(replace(profile, launches={}), estimate.slots)
                if free.period(other) - free.period(chosen) <= small:
                    parts[-1] += ", which launching it costs"
    if too_large is not None:
        parts.append(f"{too_large[1]} would save {-too_large[0]:.3g} s but does not fit")
    if not profile.layers[i].dha_usable:
        parts.append("not usable by DHA")
    return "; ".join(parts)
