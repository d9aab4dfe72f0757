"""Fabric model, probe and dispatcher. Installed as `memferry_ascend.topology`."""

from .dispatch import Path, finish_time, split, threshold
from .strategies import DynamicDispatch, StaticDispatch, Transfer, TransferFailed

__all__ = [
    "DynamicDispatch",
    "Path",
    "StaticDispatch",
    "Transfer",
    "TransferFailed",
    "finish_time",
    "split",
    "threshold",
]
