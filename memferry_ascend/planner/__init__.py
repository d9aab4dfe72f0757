"""Profiles, plans, the paper's algorithms, the simulator and the search. Everything here is pure."""

from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Plan, Update

__all__ = ["Grad", "LayerPlan", "Mode", "Plan", "Update"]
