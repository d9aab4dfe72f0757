"""Fabric model, probe and dispatcher. Installed as `memferry_ascend.topology`."""
