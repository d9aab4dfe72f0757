"""Profiles, plans, the paper's algorithms, the simulator and the search. Everything here is pure."""

from memferry_ascend.planner.backward import plan_backward
from memferry_ascend.planner.fabric import FabricProfile
from memferry_ascend.planner.forward import plan_forward
from memferry_ascend.planner.gradients import plan_gradients
from memferry_ascend.planner.memory import DeviceBytes, device_bytes, host_bytes
from memferry_ascend.planner.parameters import LayerParams, ParamProfile
from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Plan, Update
from memferry_ascend.planner.profile import LayerProfile, LinkProfile, Profile
from memferry_ascend.planner.rules import plan_rules
from memferry_ascend.planner.search import search
from memferry_ascend.planner.simulator import Timeline, simulate

__all__ = [
    "DeviceBytes",
    "FabricProfile",
    "Grad",
    "LayerParams",
    "LayerPlan",
    "LayerProfile",
    "LinkProfile",
    "Mode",
    "ParamProfile",
    "Plan",
    "Profile",
    "Timeline",
    "Update",
    "device_bytes",
    "host_bytes",
    "plan_backward",
    "plan_forward",
    "plan_gradients",
    "plan_rules",
    "search",
    "simulate",
]
