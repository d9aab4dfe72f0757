"""Fabric model, probe and dispatcher. Installed as `memferry_ascend.topology`."""

from .dispatch import Path, finish_time, split, threshold

__all__ = ["Path", "finish_time", "split", "threshold"]
