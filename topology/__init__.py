"""Fabric model, probe and dispatcher. Installed as `memferry_ascend.topology`."""

from .dispatch import Path, finish_time, split, threshold
from .emulate import EmulatedLinks, LinkClock, LinksClosed
from .fabric import Fabric, Link
from .fabric_sim import Flow, SimResult, simulate
from .fit import Bottleneck, Fit, fit, shared_bottlenecks
from .load import FabricError, load, shipped
from .measured import Figures, Measured, MeasuredPath, Shared
from .node_plan import NodePlan, plan_node
from .paths import FabricPath, PathSet
from .probe import probe
from .strategies import DynamicDispatch, StaticDispatch, Transfer, TransferFailed

__all__ = [
    "Bottleneck",
    "DynamicDispatch",
    "EmulatedLinks",
    "Fabric",
    "FabricError",
    "FabricPath",
    "Figures",
    "Fit",
    "Flow",
    "Link",
    "LinkClock",
    "LinksClosed",
    "Measured",
    "MeasuredPath",
    "NodePlan",
    "Path",
    "PathSet",
    "Shared",
    "SimResult",
    "StaticDispatch",
    "Transfer",
    "TransferFailed",
    "finish_time",
    "fit",
    "load",
    "plan_node",
    "probe",
    "shared_bottlenecks",
    "shipped",
    "simulate",
    "split",
    "threshold",
]
