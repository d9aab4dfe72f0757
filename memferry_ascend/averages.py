"""Several passes made into one: medians over passes and over equal layers, less what measuring itself cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from memferry_ascend.layers import Layer
from memferry_ascend.marks import Spent


class Averages:
    """`plain` passes ran without marks, `marked` ones with them, which is how their cost is known; `mark_cost` (seconds)
    is what putting one costs the host, `shapes` the shapes of each layer's inputs."""

    def __init__(
        self,
        layers: Sequence[Layer],
        shapes: Mapping[int, tuple[Any, ...]],
        plain: Sequence[Spent],
        marked: Sequence[Spent],
        mark_cost: float,
    ) -> None:
        self._layers, self._shapes = layers, shapes
        # Per mark and its hook, at most what a mark costs the host: nothing where the device is what takes the time.
        visits = max(1, len(marked[0].order))
        self._costs = []
        for k in (0, 1):
            with_marks = statistics.median(x.totals[k] for x in marked)
            cost = with_marks - statistics.median(x.totals[k] for x in plain)
            self._costs.append(min(mark_cost, max(0.0, cost) / (2 * visits)))

    def of(self, passes: Sequence[Spent]) -> Spent:
        """The typical pass."""
        spent = median_spent(passes)
        for cost, times, gaps in (
            (self._costs[0], spent.forward, spent.gap_forward),
            (self._costs[1], spent.backward, spent.gap_backward),
        ):
            for i in spent.order:  # half of a layer's marks fall into the layer, half into the gap
                times[i] = max(0.0, times[i] - cost)
                gaps[i] = max(0.0, gaps[i] - cost)
        self._pool(spent)
        return spent

    def _pool(self, spent: Spent) -> None:
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
