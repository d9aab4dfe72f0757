"""Profiles, plans, the paper's algorithms, the simulator and the search. Everything here is pure."""

from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Plan, Update
from memferry_ascend.planner.profile import LayerProfile, LinkProfile, Profile

__all__ = ["Grad", "LayerPlan", "LayerProfile", "LinkProfile", "Mode", "Plan", "Profile", "Update"]
