"""planner="rules": a plan without measurements."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memferry_ascend.planner.plan import LayerPlan, Mode, Plan

_GATHERS_AND_NORMS = ("embedding", "norm")


def plan_rules(layers: Sequence[tuple[str, str]], dha_kinds: Collection[str]) -> Plan:
    """Embeddings and norms by DHA where that is supported, everything else GFGB (MemFerry paper, section
    III-B).

    layers: (name, kind) in forward order, the kind being the module's class name. dha_kinds: the kinds whose
    forward and backward give right numbers from host memory on this device. No times are known, so `why`
    names the rule. Raises ValueError when a name appears twice.
    """
    decided = []
    for name, kind in layers:
        reads_once = any(word in kind.lower() for word in _GATHERS_AND_NORMS)
        if reads_once and kind in dha_kinds:
            mode, why = Mode.DHA, f"rule: {kind} reads little or once"
        elif reads_once:
            mode, why = Mode.GFGB, f"rule: {kind} would be DHA, but that is not supported here"
        else:
            mode, why = Mode.GFGB, f"rule: {kind} reads its parameters often"
        decided.append(LayerPlan(name, mode, why=why, kind=kind))
    return Plan(tuple(decided))
