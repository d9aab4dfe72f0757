"""Several passes made into one: medians over passes and over equal layers, less what measuring itself cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from memferry_ascend.layers import Layer
from memferry_ascend.marks import Spent


class Averages:
    """`plain` passes ran without marks, `marked` ones with them, which is how their cost is known; `shapes` are the shapes
    of each layer's inputs.

    Marks and their hooks take the launching thread's time. Where that is what a pass waits for (BERT-base on an H200: 41
    ms were found for what takes 23) the layers' times must still add up to the pass without marks.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        shapes: Mapping[int, tuple[Any, ...]],
        plain: Sequence[Spent],
        marked: Sequence[Spent],
    ) -> None:
        self._layers, self._shapes = layers, shapes
        visits = max(1, len(marked[0].order))
        typical = median_spent(marked)
        self._costs, self._factors = [], []
        for k in (0, 1):
            without = statistics.median(x.totals[k] for x in plain)
            cost = max(0.0, typical.totals[k] - without) / (2 * visits)  # per mark and its hook
            times = (typical.forward, typical.backward)[k], (typical.gap_forward, typical.gap_backward)[k]
            left = sum(_less(values[i], cost) for values in times for i in typical.order)
            self._factors.append(without / left if left and without else 1.0)
            self._costs.append(cost)

    def of(self, passes: Sequence[Spent]) -> Spent:
        """The typical pass."""
        spent = median_spent(passes)
        for cost, factor, times, gaps in (
            (self._costs[0], self._factors[0], spent.forward, spent.gap_forward),
            (self._costs[1], self._factors[1], spent.backward, spent.gap_backward),
        ):
            for i in spent.order:  # half of a layer's marks fall into the layer, half into the gap
                times[i] = _less(times[i], cost) * factor
                gaps[i] = _less(gaps[i], cost) * factor
        self.pool(spent)
        return spent

    def pool(self, spent: Spent) -> None:
        """Layers of one kind with equal parameters and inputs do the same work: each gets the median of them all. So a
        moment in which the machine was busy does not make one of twenty equal layers look special."""
        order = spent.order
        keys = {
            i: (
                self._layers[i].kind,
                tuple((tuple(p.shape), p.dtype, p.trainable) for p in self._layers[i].reads),
                self._shapes.get(i),
                i in spent.recomputed,
                self._layers[i].params == self._layers[i].reads,
            )
            for i in order
        }
        follows = {i: (keys[i], keys.get(j)) for i, j in zip(order, [*order[1:], -1], strict=True)}
        for values, alike in (
            (spent.forward, keys),
            (spent.backward, keys),
            (spent.gap_forward, follows),
            (spent.gap_backward, follows),
        ):
            pools: dict[Any, list[int]] = {}
            for i in order:
                pools.setdefault(alike[i], []).append(i)
            for members in pools.values():
                middle = statistics.median(values[i] for i in members)
                for i in members:
                    values[i] = middle


def _less(seconds: float, cost: float) -> float:
    """Without what the marks cost on average: a layer that took hardly more has a tenth of what was found, not nothing."""
    return max(0.1 * seconds, seconds - cost)


def median_spent(passes: Sequence[Spent]) -> Spent:
    """Layer by layer; order and recomputation are the same in every pass."""
    first = passes[0]

    def medians(name: str) -> list[float]:
        return [statistics.median(x) for x in zip(*(getattr(p, name) for p in passes), strict=True)]

    totals = tuple(statistics.median(p.totals[k] for p in passes) for k in (0, 1))
    return Spent(
        medians("forward"),
        medians("backward"),
        medians("gap_forward"),
        medians("gap_backward"),
        first.order,
        first.recomputed,
        totals=(totals[0], totals[1]),
    )
