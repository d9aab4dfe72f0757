"""Fabric model, probe and dispatcher. Installed as `memferry_ascend.topology`."""

from .dispatch import Path, finish_time, split, threshold
from .fabric import Fabric, Link
from .load import FabricError, load, shipped
from .measured import Figures, Measured, MeasuredPath, Shared
from .paths import FabricPath, PathSet
from .strategies import DynamicDispatch, StaticDispatch, Transfer, TransferFailed

__all__ = [
    "DynamicDispatch",
    "Fabric",
    "FabricError",
    "FabricPath",
    "Figures",
    "Link",
    "Measured",
    "MeasuredPath",
    "Path",
    "PathSet",
    "Shared",
    "StaticDispatch",
    "Transfer",
    "TransferFailed",
    "finish_time",
    "load",
    "shipped",
    "split",
    "threshold",
]
