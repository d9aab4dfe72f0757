"""The search: from the paper's plan and a few plain ones to a faster one, within a byte budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, combinations, islice

from memferry_ascend.planner.backward import plan_backward
from memferry_ascend.planner.estimate import Estimate
from memferry_ascend.planner.forward import plan_forward
from memferry_ascend.planner.iteration import UPDATES, check_decisions
from memferry_ascend.planner.memory import (
    SLOTS,
    STAGED,
    STATE_BYTES,
    Decision,
    decisions,
    device_bytes,
    host_bytes,
)
from memferry_ascend.planner.moves import Block, Choices, blocks, neighbours, overlay, pairs, subsets
from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Plan, Update
from memferry_ascend.planner.profile import Profile
from memferry_ascend.planner.reasons import reasons
from memferry_ascend.planner.simulator import period

# Work allowed, in layers times evaluations: a plan depends on the profile, not on the machine's speed.
ESTIMATE_WORK = 800_000
SIMULATE_WORK = {"step": 14_000, "backward": 6_000}
SMALL = 8  # up to so many layers, any two may change together, and any subset alike


def search(
    profile: Profile,
    device_memory: int | None = None,
    *,
    update: str = "step",
    slots: int = SLOTS,
    accumulate: int = 1,
    state_bytes: int = STATE_BYTES,
    effort: float = 1.0,
    device_updates: bool = True,
    reserve: float | None = None,
    direct_stages: bool = False,
) -> Plan:
    """The fastest plan found that needs at most `device_memory` bytes on the device.

    device_memory: bytes; None = no limit is known: parameters may stay on the device, as in the paper, but
    optimizer state stays on the host. update: "step" or "backward", as for simulate. slots, accumulate,
    state_bytes, direct_stages: as for device_bytes. effort: multiplies the work allowed; at 1, 400 layers take seconds.
    device_updates: False = no layer may be updated on the device, whatever the budget (an engine that cannot).
    reserve: the most of all gradient bytes of host-updated layers, 0 to 1, that may be kept on the device (the
    paper's reserve factor as a bound); None = as many as help.

    Starts from the paper's plan, all GFGB, all STREAM, the smallest plan, and what fits of each laid over
    the smallest; climbs by changing blocks of layers as long as the estimate without contention improves,
    then by changes the simulator confirms. With update="step" a change whose estimate is no better than the
    best plan is not simulated: it cannot win. Never worse than the paper's plan when that fits.
    Deterministic; the amount of work is bounded.

    Returns a plan with `why`, `device_bytes`, `host_bytes` and `predicted_period`. Raises ValueError when
    `device_memory` is too small, naming the smallest budget that works, or when an argument makes no sense.
    """
    if update not in UPDATES:
        raise ValueError(f"update must be one of {', '.join(map(repr, UPDATES))}, found {update!r}")
    if slots < 1 or accumulate < 1:
        raise ValueError(f"slots and accumulate must be at least 1, found {slots} and {accumulate}")
    if reserve is not None and not 0 <= reserve <= 1:
        raise ValueError(f"reserve must be the part of the gradients to keep, 0 to 1, found {reserve!r}")
    if not effort > 0:
        raise ValueError(f"effort multiplies the work allowed and must be > 0, found {effort}")
    one = profile.as_one()
    paper = plan_backward(one, plan_forward(one))
    found = _Search(
        profile, device_memory, update, slots, accumulate, state_bytes, effort, device_updates, reserve,
        direct_stages,
    )  # fmt: skip
    return found.go(decisions(paper)).plan(paper)


class _Search:
    def __init__(
        self,
        profile: Profile,
        budget: int | None,
        update: str,
        slots: int,
        accumulate: int,
        state_bytes: int,
        effort: float,
        device_updates: bool,
        reserve: float | None,
        direct_stages: bool,
    ) -> None:
        self.profile, self.budget, self.update, self.slots = profile, budget, update, slots
        self.accumulate, self.state_bytes = accumulate, state_bytes
        self.direct_stages = direct_stages
        self.reserve = None if reserve is None else Fraction(reserve)
        self.estimate = Estimate(profile, slots)
        self.choices = Choices(profile, device_updates=device_updates and budget is not None)
        count = len(profile.layers)
        self.estimates_left = max(int(effort * ESTIMATE_WORK / count), 200)
        self.simulations_left = max(int(effort * SIMULATE_WORK[update] / count), 20)
        self.simulated: dict[tuple[Decision, ...], float] = {}
        self.best: list[Decision] = []
        self.best_period, self.best_bytes = float("inf"), 0

    def bytes(self, chosen: Sequence[Decision]) -> int:
        self.estimates_left -= 1  # it takes about as long
        return device_bytes(
            self.profile, chosen, slots=self.slots, accumulate=self.accumulate, state_bytes=self.state_bytes,
            direct_stages=self.direct_stages,
        ).total  # fmt: skip

    def fits(self, chosen: Sequence[Decision]) -> bool:
        if self.reserve is not None and not self.within_reserve(chosen, self.reserve):
            return False
        return self.budget is None or self.bytes(chosen) <= self.budget

    def within_reserve(self, chosen: Sequence[Decision], reserve: Fraction) -> bool:
        kept = total = 0
        for own, layer, (_, grad, update) in zip(
            self.profile.own_bytes, self.profile.layers, chosen, strict=True
        ):
            if layer.trainable and update is Update.HOST:
                total += own
                kept += own if grad is Grad.KEEP else 0
        return kept <= reserve * total

    def bound(self, chosen: Sequence[Decision]) -> float:
        """A lower bound of the period."""
        return self.estimate.period(chosen) if self.update == "step" else self.estimate.busy(chosen)

    def simulate(self, chosen: Sequence[Decision]) -> float:
        key = tuple(chosen)
        if key not in self.simulated:
            self.simulated[key] = period(self.profile, chosen, self.update, self.slots)
            self.simulations_left -= 1
        return self.simulated[key]

    def offer(self, chosen: Sequence[Decision]) -> bool:
        """Make `chosen`, which fits, the best plan if it is faster, or as fast with fewer bytes."""
        seconds = self.simulate(chosen)
        if seconds > self.best_period:
            return False
        nbytes = self.bytes(chosen)
        if seconds < self.best_period or nbytes < self.best_bytes:
            self.best, self.best_period, self.best_bytes = list(chosen), seconds, nbytes
            return True
        return False

    def go(self, paper: Sequence[Decision]) -> _Search:
        smallest = self.smallest()
        if not self.fits(smallest):
            raise ValueError(
                f"no plan fits device_memory = {self.budget} bytes: the smallest needs "
                f"{self.bytes(smallest)} bytes, {self.profile.base_bytes} of them for activations, buffers "
                "and workspace. Allow that much, or make the batch smaller"
            )
        starts = self.starts(paper, smallest)
        ranked = sorted(range(len(starts)), key=lambda i: (self.estimate.period(starts[i]), i))
        if self.fits(paper):
            self.offer(paper)
        for i in ranked[:3]:
            self.offer(starts[i])
        if len(self.profile.layers) <= SMALL:
            shapes = subsets(len(self.profile.layers))
            while self.simulations_left > 0:
                here = self.best
                alike = (new for _, _, new in neighbours(self.choices, here, shapes))
                if not self.confirm(chain(pairs(self.choices, here), alike)):
                    break
        else:
            shapes = blocks(self.profile)
            for i in ranked[:2]:
                self.offer(self.climb(starts[i], shapes, self.estimates_left // 3))
            while self.simulations_left > 0 and self.confirm_blocks(shapes):
                pass
        return self

    def smallest(self) -> list[Decision]:
        """The plan with the fewest device bytes.

        A tied parameter is read layer by layer or copied once for all: up to four are tried both ways.
        """
        groups = [readers for readers in self.profile.readers if len(readers) > 1]
        some = chain.from_iterable(combinations(groups, n) for n in range(len(groups) + 1))
        plans = (self._smallest(set(chain.from_iterable(whole))) for whole in islice(some, 16))
        return min(plans, key=self.bytes)

    def _smallest(self, whole: set[int]) -> list[Decision]:
        """The same with the layers `whole` in GFGB and the others DHA where usable.

        Up to some size the rest stream, and up to some size gradients are staged: ring slots and staging room
        are as large as the largest, so the largest may be better off whole.
        """
        layers, own, options = self.profile.layers, self.profile.own_bytes, self.choices.options
        count = len(layers)
        by_dha = [i not in whole and any(x[0] is Mode.DHA for x in options[i]) for i in range(count)]
        grads = [{x[1] for x in options[i] if x[2] is Update.HOST} for i in range(count)]
        if self.direct_stages:  # then it is no smaller than staging
            grads = [x - {Grad.DIRECT} for x in grads]
        copied = [i for i in range(count) if not by_dha[i] and i not in whole]
        offered = [
            i
            for i in range(count)
            if Grad.KEEP in grads[i] and Grad.DIRECT not in grads[i] and self.reserve is None
        ]
        ring = _limit([layers[i].bytes for i in copied], self.slots)
        staging = _limit([own[i] for i in offered if not self.profile.tied[i]], STAGED)
        found: list[Decision] = []
        for i in range(count):
            mode = Mode.STREAM if i not in whole and layers[i].bytes <= ring else Mode.GFGB
            grad = Grad.KEEP if i in offered and own[i] > staging and not self.profile.tied[i] else Grad.STAGE
            grad = Grad.DIRECT if Grad.DIRECT in grads[i] else grad
            found.append((Mode.DHA if by_dha[i] else mode, grad, Update.HOST))
        return found

    def starts(self, paper: Sequence[Decision], smallest: list[Decision]) -> list[list[Decision]]:
        """Plans that fit to begin with: plain ones, and as much of them as fits laid over the smallest."""
        count = len(self.profile.layers)

        def all_of(change: Mode | Update) -> list[Decision]:
            base: list[Decision] = [(Mode.GFGB, Grad.STAGE, Update.HOST)] * count
            return self.choices.apply(base, tuple(range(count)), change)

        by_dha = all_of(Mode.GFGB)
        for i, layer in enumerate(self.profile.layers):
            if layer.t_fp_dha + layer.t_bp_dha <= layer.t_fp + layer.t_bp + layer.t_trans:
                by_dha[i] = self.choices.changed(i, by_dha[i], Mode.DHA)
        plain = [list(paper), all_of(Mode.GFGB), by_dha, all_of(Mode.STREAM)]
        if self.budget is None:
            return [*plain, smallest]
        front = list(range(count))
        orders = [front, front[::-1]]
        found = [smallest, *(x for x in plain if self.fits(x))]
        staged = [(mode, Grad.STAGE, update) for mode, _, update in smallest]
        bases = [smallest, overlay(self.choices, smallest, staged, front[::-1], self.fits)]
        if self.fits(plain[-1]):
            bases.append(plain[-1])
        device = all_of(Update.DEVICE)
        for base in bases:
            layered = [
                overlay(self.choices, base, x, order, self.fits) for x in plain[1:3] for order in orders
            ]
            found += layered
            for x in (base, *layered[::2]):
                found += [overlay(self.choices, x, device, order, self.fits) for order in orders]
        return list({tuple(x): x for x in found}.values())

    def climb(self, start: Sequence[Decision], shapes: Sequence[Block], work: int) -> list[Decision]:
        """Change blocks as long as the estimate falls; the first change that helps is taken."""
        here, value = list(start), self.estimate.period(start)
        stop = self.estimates_left - work
        improved = True
        while improved:
            improved = False
            for block in shapes:
                for _, _, new in neighbours(self.choices, here, [block]):
                    if self.estimates_left <= stop:
                        return here
                    self.estimates_left -= 1
                    seconds = self.estimate.period(new)
                    if seconds < value * (1 - 1e-9) and self.fits(new):
                        here, value, improved = new, seconds, True
        return here

    def confirm(self, moves: Iterable[list[Decision]]) -> bool:
        """Simulate the most promising moves that fit until one beats the best plan. False when none does."""
        ranked = []
        for position, new in enumerate(moves):
            seconds = self.bound(new)
            if seconds <= self.best_period and tuple(new) not in self.simulated:
                ranked.append((seconds, position, new))
        ranked.sort(key=lambda item: item[:2])
        for seconds, _, new in ranked:
            if self.simulations_left <= 0 or seconds > self.best_period:
                return False
            if self.fits(new) and self.offer(new):
                return True
        return False

    def confirm_blocks(self, shapes: Sequence[Block]) -> bool:
        """Rank changes of blocks by estimate, then try each, in that order, on the best plan so far."""
        ranked = []
        for position, (block, change, new) in enumerate(neighbours(self.choices, self.best, shapes)):
            if self.estimates_left <= 0:
                break
            self.estimates_left -= 1
            ranked.append((self.estimate.period(new), position, block, change))
        ranked.sort(key=lambda item: item[:2])
        improved = False
        for _, _, block, change in ranked:
            if self.simulations_left <= 0:
                break
            new = self.choices.apply(self.best, block, change)
            worth = tuple(new) not in self.simulated and self.bound(new) < self.best_period
            if worth and self.fits(new) and self.offer(new):
                improved = True
        return improved

    def plan(self, paper: Plan) -> Plan:
        """The best plan, with reasons and figures."""
        check_decisions(self.profile, self.best)
        why = reasons(self.profile, self.best, self.choices, self.estimate, self.fits)
        layers = tuple(
            LayerPlan(x.name, *decision, why=text, kind=x.kind, bytes=x.bytes)
            for x, decision, text in zip(self.profile.layers, self.best, why, strict=True)
        )
        found = replace(paper, layers=layers, device_bytes=self.best_bytes, predicted_period=self.best_period)
        return replace(found, host_bytes=host_bytes(self.profile, found, state_bytes=self.state_bytes))


def _limit(sizes: Sequence[int], room: int) -> int:
    """The size up to which it is best to share `room` times the largest, larger ones staying whole."""
    whole, best = sum(sizes), (sum(sizes), 0)
    for size in sorted(sizes):
        whole -= size
        best = min(best, (whole + room * size, size))
    return best[1]
