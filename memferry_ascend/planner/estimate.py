"""The period without contention, by recurrence: exact where nothing is shared, else a lower bound.

With update="step" every server takes its tasks in an order fixed by the plan, so the iteration is a marked
graph: each start is the maximum of a few ends. Walking it once takes about a thirtieth of the simulator's
time. Contention only lengthens tasks, and in a marked graph that never shortens the period; hence the bound.
Frozen layers that stream may be fetched before the iteration starts; such a copy counts as done, which keeps
the bound and loses a little.
"""

from __future__ import annotations

from collections.abc import Sequence

from memferry_ascend.planner.iteration import backward_time, download_time, forward_time, leaves_at_step
from memferry_ascend.planner.launches import UNIT, beginnings
from memferry_ascend.planner.memory import SLOTS, STAGED, Decision, stages, writes_directly
from memferry_ascend.planner.plan import Mode, Update
from memferry_ascend.planner.profile import Profile

_GFGB, _STREAM, _DFGB, _DHA = Mode.GFGB, Mode.STREAM, Mode.DFGB, Mode.DHA
_DEVICE = Update.DEVICE
_Costs = tuple[float, float, bool, bool, bool]


class Estimate:
    """Periods of many plans of one profile; seconds."""

    def __init__(self, profile: Profile, slots: int = SLOTS) -> None:
        self.profile, self.slots = profile, slots
        count = len(profile.layers)
        self.stores = [(i,) if o == i else (i, o) for i, o in enumerate(profile.owners)]
        self.own_time = profile.copy_times
        self.has_gradient = [
            x.trainable and (profile.own_bytes[i] > 0 or profile.owners[i] == i)
            for i, x in enumerate(profile.layers)
        ]
        self.update_time = [
            t if g else 0.0 for t, g in zip(profile.update_times, self.has_gradient, strict=True)
        ]
        self.exchange = [profile.exchange_time(i) for i in range(count)]
        self.gather = [profile.gather_time(n) for n in profile.own_bytes]
        self.device_time = [
            x.device_update_time * f if g else 0.0
            for x, f, g in zip(profile.layers, profile.own_fraction, self.has_gradient, strict=True)
        ]
        first = [profile.readers[i][0] if profile.owners[i] == i else i for i in range(count)]
        self.need_order = [
            s for s in sorted(range(count), key=lambda s: (first[s], s)) if self.has_gradient[s]
        ]
        self.final_at: list[list[int]] = [
            [] for _ in range(count)
        ]  # layer -> stores final after its backward
        for i in range(count):
            self.final_at[i] = [s for s in self.stores[i] if self.has_gradient[s] and first[s] == i]
        self.download = [download_time(profile, i) for i in range(count)]
        self._costs: list[dict[tuple[Decision, bool], _Costs]] = [{} for _ in range(count)]

    def costs(self, chosen: Sequence[Decision]) -> list[_Costs]:
        """What `_cost` says of each layer."""
        begins = beginnings(chosen) if UNIT in self.profile.launches else [False] * len(chosen)
        return [self._cost(i, x, first) for i, (x, first) in enumerate(zip(chosen, begins, strict=True))]

    def _cost(self, i: int, decision: Decision, begins: bool) -> _Costs:
        """Forward, backward, alone; whether the layer's gradient is staged; whether it is copied up; whether that
        happens after the backward, with update="step"."""
        found = self._costs[i].get((decision, begins))
        if found is None:
            profile = self.profile
            moves = self.has_gradient[i] and decision[2] is not _DEVICE and self.download[i] > 0.0
            found = (
                forward_time(profile, i, decision, begins),
                backward_time(profile, i, decision, begins),
                stages(profile, i, decision),
                moves and not writes_directly(profile, i, decision),
                moves and leaves_at_step(profile, i, decision),
            )
            self._costs[i][decision, begins] = found
        return found

    def period(self, chosen: Sequence[Decision]) -> float:
        """Seconds per iteration with update="step", nothing shared."""
        profile, layers, owners = self.profile, self.profile.layers, self.profile.owners
        own_bytes, own_time, stores, slots = profile.own_bytes, self.own_time, self.stores, self.slots
        count = len(layers)
        resident = [False] * count
        for i, decision in enumerate(chosen):
            if decision[0] is _GFGB:
                resident[i] = resident[owners[i]] = True
        updated = [0.0] * count
        host = compute = link = fabric = leaving = 0.0
        costs = self.costs(chosen)
        for s in self.need_order:
            if chosen[s][2] is _DEVICE:
                compute += self.device_time[s]
            else:
                if costs[s][4]:
                    leaving += self.download[s]
                    host = leaving if leaving > host else host
                host += self.update_time[s]
                updated[s] = host
        uploaded: list[float | None] = [None] * count
        freed: list[float] = []
        ring = 0
        for i, layer in enumerate(layers):
            mode = chosen[i][0]
            ready = compute
            if mode is _GFGB or mode is _STREAM:
                missing, nbytes, wait = 0.0, 0, 0.0
                for s in stores[i]:
                    if not resident[s]:
                        missing += own_time[s]
                        nbytes += own_bytes[s]
                        if updated[s] > wait:
                            wait = updated[s]  # of this copy alone: a shared parameter's own goes before it
                    elif own_bytes[s] and self.has_gradient[s] and chosen[s][2] is not _DEVICE:
                        end = uploaded[s]
                        if end is None:
                            link = (link if link > updated[s] else updated[s]) + own_time[s]
                            end = fabric = (fabric if fabric > link else link) + self.gather[s]
                            uploaded[s] = end
                        if end > ready:
                            ready = end
                if mode is _STREAM:
                    if wait > link:
                        link = wait
                    if ring >= slots and freed[ring - slots] > link:
                        link = freed[ring - slots]
                    ring += 1
                    if link > 0.0 or ring > slots:  # else frozen: the iteration before may have fetched it
                        link += missing
                        fabric = (fabric if fabric > link else link) + profile.gather_time(nbytes)
                    loaded = fabric if fabric > link else link
                    if loaded > ready:
                        ready = loaded
            else:
                for s in stores[i]:
                    if updated[s] > ready:
                        ready = updated[s]
            compute = ready + costs[i][0]
            if mode is _STREAM:
                freed.append(compute)
            compute += layer.t_gap_fp
        return self._backward(chosen, costs, resident, updated, freed, compute, link, fabric)

    def _backward(
        self,
        chosen: Sequence[Decision],
        costs: Sequence[_Costs],
        resident: Sequence[bool],
        updated: Sequence[float],
        freed: list[float],
        compute: float,
        link: float,
        fabric: float,
    ) -> float:
        own_bytes, own_time, stores = self.profile.own_bytes, self.own_time, self.stores
        layers, slots = self.profile.layers, self.slots
        room = STAGED * max((own_bytes[i] for i, cost in enumerate(costs) if cost[2]), default=0)
        staged: list[tuple[int, float]] = []  # bytes and end of download, those that may still be in the way
        in_flight, oldest = 0, 0
        ring, up = len(freed), 0.0
        one = self.profile.fabric is None
        exchanged = 0.0  # apart from the gathers: a lower bound
        copied: set[int] = set()
        for i in reversed(range(len(layers))):
            mode = chosen[i][0]
            _, seconds, stages, _, _ = costs[i]
            compute += layers[i].t_gap_bp
            if mode is _STREAM or mode is _DFGB:
                missing, nbytes, wait, any_updated = 0.0, 0, 0.0, False
                for s in stores[i]:
                    if not resident[s] and (mode is _STREAM or s not in copied):
                        missing += own_time[s]
                        nbytes += own_bytes[s]
                        any_updated = any_updated or self.has_gradient[s]
                        wait = max(wait, updated[s])
                        if mode is _DFGB:
                            copied.add(s)
                if mode is _STREAM:
                    if ring >= slots and freed[ring - slots] > wait:
                        wait = freed[ring - slots]
                    ring += 1
                # Frozen, and nothing to wait for: the iteration before may have fetched it, as in the forward pass.
                if any_updated or (mode is _STREAM and (wait > 0.0 or link > 0.0)):
                    link = max(link, wait) + missing
                    fabric = max(fabric, link) + self.profile.gather_time(nbytes)
                    if fabric > compute:
                        compute = fabric
            if stages:
                in_flight += own_bytes[i]
                while in_flight > room:
                    nbytes, end = staged[oldest]
                    oldest += 1
                    in_flight -= nbytes
                    if end > compute:
                        compute = end
            compute += seconds
            if mode is _STREAM:
                freed.append(compute)
            for s in self.final_at[i]:
                if costs[s][3] and not costs[s][4]:
                    exchanged = (compute if compute > exchanged else exchanged) + self.exchange[s]
                    up = (exchanged if exchanged > up else up) + self.download[s]
                    if s == i and stages:
                        staged.append((own_bytes[i], up if one else exchanged))
        return compute if compute > up else up

    def busy(self, chosen: Sequence[Decision]) -> float:
        """The busiest resource's seconds of work per iteration: a lower bound whenever updates start."""
        resident = [False] * len(chosen)
        for i, decision in enumerate(chosen):
            if decision[0] is _GFGB:
                resident[i] = resident[self.profile.owners[i]] = True
        compute = host = down = up = fabric = 0.0
        copied: set[int] = set()
        for i, (decision, cost) in enumerate(zip(chosen, self.costs(chosen), strict=True)):
            layer, (mode, _, update) = self.profile.layers[i], decision
            forward, backward, _, downloads, _ = cost
            compute += forward + backward + layer.t_gap_fp + layer.t_gap_bp
            if self.has_gradient[i]:
                if update is _DEVICE:
                    compute += self.device_time[i]
                else:
                    host += self.update_time[i]
                    if resident[i] and self.profile.own_bytes[i]:
                        down += self.own_time[i]
                        fabric += self.gather[i]
                    if downloads:
                        up += self.download[i]
                        fabric += self.exchange[i]
            for s in self.stores[i]:
                if mode is _STREAM and not resident[s]:
                    down += 2 * self.own_time[s]
                elif mode is _DFGB and not resident[s] and s not in copied and self.has_gradient[s]:
                    copied.add(s)
                    down += self.own_time[s]
        return max(compute, host, down, up, fabric)
