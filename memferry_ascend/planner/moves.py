"""What the search may change: the decisions a layer may take, blocks of layers that change together, and
overlays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from memferry_ascend.planner.memory import Decision
from memferry_ascend.planner.plan import Grad, Mode, Update
from memferry_ascend.planner.profile import Profile

Change = Mode | Grad | Update
Block = tuple[int, ...]


class Choices:
    """The decisions each layer of a profile may take. Device updates only where `device_updates`, and the profile does
    not say otherwise."""

    def __init__(self, profile: Profile, device_updates: bool) -> None:
        self.profile = profile
        self.options: list[tuple[Decision, ...]] = []
        for i, layer in enumerate(profile.layers):
            modes = [Mode.GFGB, Mode.STREAM]
            if layer.dha_usable:
                modes.append(Mode.DFGB)
                if layer.dha_backward_usable:
                    modes.append(Mode.DHA)
            grads = [Grad.STAGE]
            if layer.trainable and profile.own_bytes[i] > 0 and profile.fabric is None:
                grads.append(Grad.KEEP)
                if layer.direct_usable and not profile.tied[i]:
                    grads.append(Grad.DIRECT)
            found = [(mode, grad, Update.HOST) for mode in modes for grad in grads]
            usable = layer.trainable and layer.device_update_usable
            if device_updates and usable and profile.fabric is None:
                found.append((Mode.GFGB, Grad.KEEP, Update.DEVICE))
            self.options.append(tuple(found))
        self._allowed = [frozenset(x) for x in self.options]

    def changed(self, i: int, decision: Decision, change: Change) -> Decision:
        """Layer `i`'s decision after `change`, or as it was where that is not usable."""
        mode, grad, update = decision
        if isinstance(change, Update):
            on_device = change is Update.DEVICE
            new = (Mode.GFGB, Grad.KEEP if on_device else Grad.STAGE, change)
        else:
            if update is Update.DEVICE:
                grad = Grad.STAGE
            new = (change, grad, Update.HOST) if isinstance(change, Mode) else (mode, change, Update.HOST)
        return new if new in self._allowed[i] else decision

    def apply(self, chosen: Sequence[Decision], block: Block, change: Change) -> list[Decision]:
        """`chosen` with every layer of the block changed where that is usable."""
        new = list(chosen)
        for i in block:
            new[i] = self.changed(i, new[i], change)
        return self.settle(new)

    def settle(self, chosen: list[Decision]) -> list[Decision]:
        """Give readers of a tied parameter updated on the device the only mode that reads it there."""
        for i, owner in enumerate(self.profile.owners):
            if owner != i and chosen[owner][2] is Update.DEVICE and chosen[i][0] is not Mode.GFGB:
                chosen[i] = (Mode.GFGB, chosen[i][1], chosen[i][2])
        return chosen


ALL_CHANGES: tuple[Change, ...] = (*Mode, *Grad, *Update)


def blocks(profile: Profile) -> list[Block]:
    """Sets of layers worth changing together, large ones first: all, layers of one kind, layers measured
    alike, and
    halves, quarters, ... down to sixteenths of each from either end; then every single layer, by size."""
    by_kind: dict[object, list[int]] = {}
    alike: dict[object, list[int]] = {}
    for i, x in enumerate(profile.layers):
        by_kind.setdefault(x.kind, []).append(i)
        alike.setdefault((x.kind, x.bytes, x.t_fp, x.t_bp, x.t_fp_dha, x.t_update, x.trainable), []).append(i)
    families = [list(range(len(profile.layers))), *by_kind.values(), *alike.values()]
    found: dict[Block, None] = {}
    for family in families:
        size = len(family)
        while size > 1 and size * 16 >= len(family):
            found[tuple(family[:size])] = None
            found[tuple(family[-size:])] = None
            size //= 2
    ordered = sorted(found, key=lambda block: (-len(block), block))
    by_size = sorted(range(len(profile.layers)), key=lambda i: (-profile.layers[i].bytes, i))
    return [*ordered, *((i,) for i in by_size)]


def neighbours(
    choices: Choices, chosen: Sequence[Decision], among: Sequence[Block]
) -> Iterator[tuple[Block, Change, list[Decision]]]:
    """Every plan that differs from `chosen` by one change of one block, after what changes."""
    base = list(chosen)
    for block in among:
        for change in ALL_CHANGES:
            new = choices.apply(base, block, change)
            if new != base:
                yield block, change, new


def subsets(count: int) -> list[Block]:
    """Every set of two or more of `count` layers, large ones first."""
    return [block for size in range(count, 1, -1) for block in combinations(range(count), size)]


def pairs(choices: Choices, chosen: Sequence[Decision]) -> Iterator[list[Decision]]:
    """Every plan that differs from `chosen` in one layer or two: promote one, demote another."""
    count = len(chosen)
    for i in range(count):
        for first in choices.options[i]:
            one = [*chosen[:i], first, *chosen[i + 1 :]]
            if first != chosen[i]:
                yield choices.settle(list(one))
            for j in range(i + 1, count):
                if first != chosen[i]:
                    for second in choices.options[j]:
                        if second != chosen[j]:
                            yield choices.settle([*one[:j], second, *one[j + 1 :]])


def overlay(
    choices: Choices,
    base: Sequence[Decision],
    over: Sequence[Decision],
    order: Sequence[int],
    fits: Callable[[Sequence[Decision]], bool],
) -> list[Decision]:
    """`base` with as many layers as fit, in `order`, replaced by those of `over` (bisected)."""

    def blend(count: int) -> list[Decision]:
        new = list(base)
        for i in order[:count]:
            new[i] = over[i]
        return choices.settle(new)

    low, high = 0, len(order)
    if fits(blend(high)):
        return blend(high)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(blend(middle)):
            low = middle
        else:
            high = middle
    return blend(low)
