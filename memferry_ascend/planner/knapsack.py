"""The 0/1 knapsack, exactly, for hundreds of items and sizes in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STATE_LIMIT = 1 << 18  # undominated states per item before exactness is given up: gigabytes would follow
RELATIVE = 1e-12  # gains closer than this are equal: sums of floats in another order differ by as much


@dataclass(frozen=True)
class Packing:
    """taken: per item. gain: their sum. gap: relative distance to the optimum, at most; 0 = exact (to
    1e-12).
    """

    taken: tuple[bool, ...]
    gain: float
    gap: float


def pack(sizes: Sequence[int], gains: Sequence[float], capacity: int) -> Packing:
    """The subset of items with the largest total gain whose sizes sum to at most `capacity`.

    Nemhauser and Ullmann's list of undominated (size, gain) states, after dividing sizes by their greatest
    common divisor, with the states dropped whose fractional (Dantzig) bound does not beat the best packing
    known. Items go by gain per byte, so that bound is tight early. Equal layers make equal sums, which
    dominate each other. The worst case (hundreds of unrelated sizes, gains proportional to them) has
    exponentially many states: past STATE_LIMIT, states that could improve by less than a growing tolerance
    are dropped, and `gap` says so.

    Items that gain nothing are never taken. Raises ValueError on a negative size or a gain that is not
    finite.
    """
    for i, (size, gain) in enumerate(zip(sizes, gains, strict=True)):
        if size < 0 or not math.isfinite(gain):
            raise ValueError(f"item {i}: expected size >= 0 and a finite gain, found {size} and {gain}")
    taken = [gain > 0 and size == 0 for size, gain in zip(sizes, gains, strict=True)]
    items = [i for i, gain in enumerate(gains) if gain > 0 and 0 < sizes[i] <= capacity]
    gap = 0.0
    if sum(sizes[i] for i in items) <= capacity:
        for i in items:
            taken[i] = True
    else:
        items.sort(key=lambda i: (-gains[i] / sizes[i], i))
        unit = math.gcd(*(sizes[i] for i in items))
        chosen, gap = _search([sizes[i] // unit for i in items], [gains[i] for i in items], capacity // unit)
        for i in chosen:
            taken[items[i]] = True
    return Packing(tuple(taken), math.fsum(g for g, t in zip(gains, taken, strict=True) if t), gap)


def _search(sizes: list[int], gains: list[float], room: int) -> tuple[list[int], float]:
    """Indices of the best subset of items sorted by gain per byte, and how far from the optimum it may be."""
    size_before = np.concatenate(([0], np.cumsum(np.array(sizes, dtype=np.int64))))
    gain_before = np.concatenate(([0.0], np.cumsum(np.array(gains))))
    per_byte = np.append(np.array(gains) / np.array(sizes), 0.0)
    weight, value = np.zeros(1, dtype=np.int64), np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = []  # per item: parent, taken or not
    best, best_at = -1.0, (0, 0, 0)  # (a, b, c): state b after a items, then items a to c - 1
    tolerance = worst = RELATIVE
    for item in range(len(sizes) + 1):
        # Greedy completion of every state: whole items in order while they fit, then a fraction of the next.
        fits = np.searchsorted(size_before, size_before[item] + room - weight, side="right") - 1
        whole = value + gain_before[fits] - gain_before[item]
        bound = whole + (size_before[item] + room - weight - size_before[fits]) * per_byte[fits]
        top = int(np.argmax(whole))
        if whole[top] > best:
            best, best_at = float(whole[top]), (item, top, int(fits[top]))
        if item == len(sizes):
            break
        keep = np.flatnonzero(bound > best * (1 + tolerance))
        while len(keep) > STATE_LIMIT:
            tolerance *= 10
            worst = tolerance
            keep = np.flatnonzero(bound > best * (1 + tolerance))
        if len(keep) == 0:
            break
        weight, value, parents, took = _extend(
            weight[keep], value[keep], keep, sizes[item], gains[item], room
        )
        history.append((parents, took))
    count, state, upto = best_at
    chosen = list(range(count, upto))
    for item in reversed(range(count)):
        parents, took = history[item]
        if took[state]:
            chosen.append(item)
        state = int(parents[state])
    return chosen, 0.0 if worst == RELATIVE else worst


def _extend(
    weight: NDArray[np.int64],
    value: NDArray[np.float64],
    index: NDArray[np.int64],
    size: int,
    gain: float,
    room: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """The undominated states with and without one more item; `weight` ascending, and `value` with it."""
    fit = int(np.searchsorted(weight, room - size, side="right"))
    weights = np.concatenate((weight, weight[:fit] + size))
    values = np.concatenate((value, value[:fit] + gain))
    order = np.lexsort((-values, weights))
    values = values[order]
    earlier = np.concatenate(([-np.inf], np.maximum.accumulate(values)[:-1]))
    order = order[values > earlier]
    took = order >= len(weight)
    parents = index[np.where(took, order - len(weight), order)]
    return weights[order], np.concatenate((value, value[:fit] + gain))[order], parents, took
