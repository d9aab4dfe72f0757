"""Units: how layers are grouped for transfers and updates."""

from __future__ import annotations

import torch
from torch import nn

from memferry_ascend.layers import collect, units
from memferry_ascend.planner import LayerPlan, Mode


def grouped(modes: list[Mode], widths: list[int], **kwargs: int) -> list[tuple[str, int, int]]:
    model = nn.Sequential(*(nn.Linear(w, w, bias=False) for w in widths))
    layers = collect(model, "fp32", ())
    plan = {str(i): LayerPlan(str(i), m) for i, m in enumerate(modes)}
    return [(str(u.plan.mode), len(u.layers), len(u.aliased)) for u in units(layers, plan, **kwargs)]


def test_tiny_dha_layers_ride_in_their_neighbours_unit() -> None:
    g, d = Mode.GFGB, Mode.DHA
    sizes = {"smallest": 1 << 20, "largest": 1 << 22, "tiny": 100}
    assert grouped([d, g, d, g], [4, 32, 4, 32], **sizes) == [("GFGB", 4, 2)]
    assert grouped([g, d, g], [32, 32, 32], **sizes) == [("GFGB", 1, 0), ("DHA", 1, 0), ("GFGB", 1, 0)]
    assert grouped([d, d], [4, 4], **sizes) == [("DHA", 2, 0)]
    assert grouped([d, Mode.STREAM, d], [4, 32, 4], **sizes) == [("STREAM", 3, 2)]


def test_units_stay_between_their_bounds() -> None:
    g = Mode.GFGB
    assert grouped([g] * 4, [16] * 4, smallest=2048, largest=4096) == [("GFGB", 2, 0), ("GFGB", 2, 0)]
    assert grouped([g] * 3, [16, 64, 16], smallest=2048, largest=4096) == [("GFGB", 1, 0)] * 3


def test_tied_parameters_belong_to_the_first_layer() -> None:
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    first, second = collect(nn.Sequential(a, b), "bf16", ())
    assert [p.name for p in first.params] == ["0.weight"]
    assert second.params == []
    assert second.reads == first.params
    assert first.params[0].aliases == ["1.weight"]
    assert first.params[0].dtype is torch.bfloat16
