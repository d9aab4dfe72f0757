"""Which plan an engine runs: given by the user, a file, the rules, or searched on a measured profile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memferry_ascend import budget, fabricprobe, profile_plan, profiler, sharded
from memferry_ascend.backends.base import Backend
from memferry_ascend.config import Config
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.layers import Layer, distant, units
from memferry_ascend.placement import (
    device_update_obstacle,
    exchanged,
    keep_by_reserve,
    mode_obstacle,
    offered,
    refuse_modes,
)
from memferry_ascend.planner.plan import LayerPlan, Mode, Plan
from memferry_ascend.planner.profile import Profile
from memferry_ascend.runtime import Runtime
from memferry_ascend.weights import is_meta

DEVICE_MARGIN = 0.05
"""Share of the free device memory that no plan takes: fragmentation, and what other libraries allocate."""

_GATHERS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.RMSNorm)


def unshared(runtime: Runtime) -> str | None:
    """Why ranks cannot share host memory, so that only GFGB runs; None for one rank, and where they can. All ranks call."""
    if runtime.ranks is None:
        return None
    found = runtime.ranks.gather_objects(runtime.backend.sharing_failure())
    return next((failure for failure in found if failure is not None), None)


def rule_plan(layers: list[Layer], backend: Backend, *, shares: bool = True) -> Plan:
    """Embeddings and norms are read where they are if the backend can, everything else is copied to the device.
    `shares`: ranks, if there are several, can share host memory.

    A tied parameter counts for all its readers: an embedding whose table is also a projection's weight is copied,
    because no matrix product reads host memory unless that was measured faster.
    """
    readers: dict[int, list[Layer]] = {}
    for layer in layers:
        for p in layer.reads:
            readers.setdefault(p.index, []).append(layer)
    out = []
    for layer in layers:
        mode, why = Mode.GFGB, "a matrix product would read host memory once per tile"
        if isinstance(layer.module, _GATHERS + _NORMS):
            others = [r for p in layer.params for r in readers[p.index] if r is not layer]
            if others:
                why = f"tied with {others[0].name}"
            elif not shares:
                why = "ranks share no host memory here"
            elif mode_obstacle(layer, Mode.DHA, backend) is None:
                mode = Mode.DHA
                why = (
                    "a gather reads few rows"
                    if isinstance(layer.module, _GATHERS)
                    else "few bytes, read once"
                )
            else:
                why = f"direct host access is not usable for {layer.kind} on {backend.name}"
        out.append(
            LayerPlan(layer.name, mode, why=why, kind=layer.kind, bytes=sum(p.nbytes for p in layer.params))
        )
    return Plan(tuple(out))


def choose_plan(
    plan: Plan | None,
    layers: list[Layer],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    runtime: Runtime,
    config: Config,
    sample_batch: Any,
) -> tuple[Profile | None, Plan, int]:
    """The profile (None when no layer was measured), the plan to run, and the device bytes of activations, buffers and
    workspace: the profile's, or of a trial step where a budget bounds a plan without one; 0 without a budget.

    Raises:
        FerryError: a given plan is of another model.
    """
    if plan is None and config.planner not in ("search", "paper", "rules"):
        try:
            plan = Plan.load(config.planner)
        except (OSError, ValueError) as e:
            raise ConfigError(
                f'Config.planner: expected "search", "paper", "rules" or a plan file: {e}'
            ) from e
    refuse_publishing(runtime.backend, config)
    alone = unshared(runtime)
    if plan is not None:
        check_plan(plan, layers)
        refuse_modes(plan, layers, runtime.backend, alone)
        return None, plan, _base(model, layers, runtime, config, sample_batch)
    limited = alone is not None or not runtime.backend.capabilities().coherent
    if sample_batch is None or config.planner == "rules" or limited:
        rules = rule_plan(layers, runtime.backend, shares=alone is None)
        if config.device_bytes is not None:
            base = _base(model, layers, runtime, config, sample_batch)
            native = device_update_obstacle(optimizer) is None
            fitted = _fit(rules, layers, config.device_bytes, runtime, config, native, base)
            refuse_modes(fitted, layers, runtime.backend, alone)
            return None, fitted, base
        if config.reserve is not None:
            rules = keep_by_reserve(rules, layers, runtime.backend, config.reserve)
        return None, rules, 0
    measured = profiler.measure(model, layers, optimizer, runtime, config, sample_batch)
    profile = fabricprobe.with_ranks(measured.profile, runtime)
    plan = measured_plan(profile, layers, config, runtime.backend, optimizer)
    return profile, plan, profile.base_bytes


def _base(model: nn.Module, layers: list[Layer], runtime: Runtime, config: Config, sample_batch: Any) -> int:
    """What a trial step shows, the most of all ranks: they run one plan with one ring."""
    if config.device_bytes is None:
        return 0
    found = 0
    if sample_batch is not None and not is_meta(model):  # a meta model cannot run yet
        found = profiler.measure_base(model, layers, runtime.backend, sample_batch, config.device_bytes)
    return found if runtime.ranks is None else max(runtime.ranks.gather_objects(found))


def _fit(
    rules: Plan,
    layers: list[Layer],
    limit: int,
    runtime: Runtime,
    config: Config,
    device_updates: bool,
    base: int,
) -> Plan:
    """`budget.fit`, with room for the buffers of several ranks, which are as large as the plan's units."""
    exchange = 0
    while True:
        plan = budget.fit(
            rules, layers, limit, runtime.backend, accumulate=config.accumulate, reserve=config.reserve,
            device_updates=device_updates, base=base + exchange,
        )  # fmt: skip
        if runtime.ranks is None:
            return plan
        made = units(layers, {x.name: x for x in exchanged(plan).layers}, alone=distant(layers))
        need = sharded.device_need(made, runtime.ranks.local)
        if need <= exchange:
            return plan
        exchange = need


def measured_plan(
    profile: Profile,
    layers: list[Layer],
    config: Config,
    backend: Backend,
    optimizer: torch.optim.Optimizer,
) -> Plan:
    """The plan of `config.planner` ("search" or "paper") for a measured profile, in the order of `layers`. Without
    `device_memory` the budget is what is free on the device less a margin."""
    limit = config.device_bytes
    if limit is None and config.planner == "search":
        limit = int(backend.memory_stats().free * (1 - DEVICE_MARGIN))
    # A profile kept from an earlier run may offer what this one refuses: somebody has replaced a forward, for example.
    plan = profile_plan.plan_profile(
        offered(profile, layers, backend, optimizer),
        config.planner,
        device_memory=limit,
        reserve=config.reserve,
        update=config.update,
        accumulate=config.accumulate,
        direct_kinds=backend.capabilities().direct_kinds,
        layers=layers,
    )
    return profile_plan.ordered(plan, [layer.name for layer in layers])


def refuse_publishing(backend: Backend, config: Config) -> None:
    """Raise where `p.grad` would show a kernel something else than the arena holds.

    Raises:
        FerryError: update="step" on a device that is not coherent with the host.
    """
    if config.update == "step" and not backend.capabilities().coherent:
        raise FerryError(
            f"{backend.device} and the host do not see each other's writes to mapped memory, so gradients cannot be "
            'published as p.grad; use Config(update="backward"), where they are not (`memferry doctor` says more)'
        )


def check_plan(plan: Plan, layers: list[Layer]) -> None:
    """Raise unless the plan names exactly the model's layers.

    Raises:
        FerryError: names the layers that differ.
    """
    try:
        plan.check_layers([layer.name for layer in layers])
    except ValueError as e:
        raise FerryError(f"plan of another model: {e}") from None
