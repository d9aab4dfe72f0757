"""Decisions: which layer runs how, where its gradient goes and where it is updated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How a layer's parameters are read (paper section IV-B; STREAM is ours)."""

    GFGB = "GFGB"
    DHA = "DHA"
    DFGB = "DFGB"
    STREAM = "STREAM"


class Grad(StrEnum):
    """Where a layer's gradient is produced and kept."""

    KEEP = "keep"
    STAGE = "stage"
    DIRECT = "direct"


class Update(StrEnum):
    """Where a layer's optimizer state lives and is updated."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True)
class LayerPlan:
    """One layer's decisions; `name` is the qualified module name ("" for the root)."""

    name: str
    mode: Mode = Mode.GFGB
    grad: Grad = Grad.STAGE
    update: Update = Update.HOST
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """The plan of a model: one LayerPlan per layer, in execution order."""

    layers: tuple[LayerPlan, ...]
    t_res: float = 0.0
    tag: int = -1
