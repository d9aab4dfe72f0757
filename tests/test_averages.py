"""What a layer takes, from passes with marks and passes without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memferry_ascend.averages import Averages
from memferry_ascend.layers import Layer, Param
from memferry_ascend.marks import Spent


def layers(count: int) -> list[Layer]:
    """Layers of different kinds, so that none is pooled with another."""
    out = []
    for i in range(count):
        p = Param(i, f"p{i}", nn.Parameter(torch.zeros(i + 1)), torch.float32, True)
        out.append(Layer(f"l{i}", nn.Module(), [p], [p]))
    return out


def a_pass(work: list[float], per_mark: float) -> Spent:
    """Marks cost `per_mark` seconds each: one in the layer, one in the gap behind it. A backward is twice as long."""
    n = len(work)
    forward = [w + per_mark for w in work]
    backward = [2 * w + per_mark for w in work]
    gaps = [per_mark] * n
    totals = (sum(forward) + sum(gaps), sum(backward) + sum(gaps))
    return Spent(forward, backward, list(gaps), list(gaps), list(range(n)), totals=totals)


def test_times_are_what_they_are_without_marks() -> None:
    work = [1.0, 3.0, 0.5]
    plain = [a_pass(work, 0.0)] * 3
    found = Averages(layers(3), {}, plain, [a_pass(work, 0.7)] * 3).of([a_pass(work, 0.7)] * 3)
    assert found.forward == pytest.approx(work, rel=0.05)
    assert found.backward == pytest.approx([2 * w for w in work], rel=0.05)
    assert max(found.gap_forward) < 0.1


@pytest.mark.parametrize("overlapped", [0.0, 0.4, 0.9])
def test_they_add_up_to_the_pass_without_marks(overlapped: float) -> None:
    """Marks may cost less than they take the host: the device works meanwhile. Some layers took less than a mark."""
    work = [0.01, 3.0, 0.02, 1.0]
    marked = [a_pass(work, 0.7 * (1 - overlapped))] * 3
    plain = [a_pass(work, 0.0)] * 3
    found = Averages(layers(4), {}, plain, marked).of(marked)
    for times, gaps, total in (
        (found.forward, found.gap_forward, sum(work)),
        (found.backward, found.gap_backward, 2 * sum(work)),
    ):
        assert sum(times) + sum(gaps) == pytest.approx(total)
        assert min(times) > 0 and min(gaps) >= 0


def test_other_passes_lose_what_marks_cost_these() -> None:
    """Passes from host memory have no counterpart without marks: equal layers must still compare as equal."""
    work, slower = [1.0, 3.0, 0.5], [1.0, 6.0, 0.5]
    marked = [a_pass(work, 0.7)] * 3
    averages = Averages(layers(3), {}, [a_pass(work, 0.0)] * 3, marked)
    found = averages.of([a_pass(slower, 0.7)] * 3)
    assert found.forward == pytest.approx(slower, rel=0.05)
    assert found.backward == pytest.approx([2 * w for w in slower], rel=0.05)
