"""Max-min fair sharing of links between transfers under way: the one bandwidth model of this package.

Every transfer has a rate it cannot exceed (its cap) and uses some resources, each with a weight: a resource
is one direction of a link, or both together where they share. All rates grow alike until a resource is full
or a cap is reached; those transfers are settled, the others go on. No transfer can then be faster without a
slower one losing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

SETTLED = (
    1e-12  # relative: constraints that close together count as one, so symmetric transfers get equal rates
)


class Sharing:
    """The constraints of a fixed list of transfers; `rates` solves for any subset that is active.

    `caps` are bytes/s per transfer, `uses` maps each transfer's resources to weights, `capacity` is bytes/s
    per resource. Only resources that some transfer uses need a capacity; a missing one raises KeyError.
    """

    def __init__(
        self,
        caps: Sequence[float],
        uses: Sequence[Mapping[str, float]],
        capacity: Mapping[str, float],
    ) -> None:
        self.resources = sorted({name for use in uses for name in use})
        index = {name: i for i, name in enumerate(self.resources)}
        self.capacity = np.array([capacity[name] for name in self.resources], dtype=np.float64)
        self.caps = np.asarray(caps, dtype=np.float64)
        entries = [(i, index[name], weight) for i, use in enumerate(uses) for name, weight in use.items()]
        self.transfer = np.array([e[0] for e in entries], dtype=np.intp)
        self.resource = np.array([e[1] for e in entries], dtype=np.intp)
        self.weight = np.array([e[2] for e in entries], dtype=np.float64)

    def rates(self, active: np.ndarray) -> np.ndarray:
        """Bytes/s per transfer, 0 for those that `active` (bool) leaves out."""
        rate = np.zeros(len(self.caps))
        growing = active.copy()
        spare = self.capacity.copy()
        size = len(self.capacity)
        level = 0.0
        while growing.any():
            weight = np.where(growing[self.transfer], self.weight, 0.0)
            demand = np.bincount(self.resource, weight, minlength=size)
            room = np.full(size, np.inf)
            np.divide(spare, demand, out=room, where=demand > 0)
            to_cap = np.where(growing, self.caps - level, np.inf)
            step = max(0.0, min(room.min(initial=np.inf), to_cap.min()))
            slack = step * SETTLED + 1e-9  # bytes/s
            level += step
            spare -= demand * step
            rate[growing] = level
            full = (demand > 0) & (room <= step + slack)
            settled = np.zeros(len(growing), dtype=bool)
            settled[self.transfer[full[self.resource] & (weight > 0)]] = True
            settled |= growing & (to_cap <= step + slack)
            growing &= ~settled
        return rate

    def load(self, rate: np.ndarray) -> np.ndarray:
        """Bytes/s through each of `resources` when the transfers run at `rate`."""
        return np.bincount(self.resource, self.weight * rate[self.transfer], minlength=len(self.capacity))


def max_min_rates(
    caps: Sequence[float], uses: Sequence[Mapping[str, float]], capacity: Mapping[str, float]
) -> list[float]:
    """Bytes/s of each transfer when all of them are under way."""
    return [float(r) for r in Sharing(caps, uses, capacity).rates(np.ones(len(caps), dtype=bool))]
