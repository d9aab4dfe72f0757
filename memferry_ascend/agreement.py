"""What ranks must have in common before they train: optimizers that work on parts, and the same model, settings and plan."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch

from memferry_ascend.errors import FerryError
from memferry_ascend.layers import Layer
from memferry_ascend.parallel import Ranks
from memferry_ascend.planner.plan import Plan

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
)
"""torch optimizers that update each element from its own gradient and state: they work on any part of a parameter."""


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that must see whole parameters.

    Raises:
        FerryError: the class is not known to work element by element and does not say so (`elementwise = True`).
    """
    kind = type(optimizer)
    known = kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim")
    if not known and not getattr(optimizer, "elementwise", False):
        raise FerryError(
            f"data parallel cuts parameters between ranks, and {kind.__name__} is not known to update each element by "
            f"itself; use one of {', '.join(sorted(ELEMENTWISE))}, or set {kind.__name__}.elementwise = True if it does"
        )


def meet(
    ranks: Ranks,
    layers: list[Layer],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Any,
    plan: Plan | None,
) -> None:
    """Raise on every rank, naming the difference, unless all were given the same."""
    from memferry_ascend import __version__

    refuse(optimizer)
    params = [p for layer in layers for p in layer.params]
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("threads", "assist_devices")}
    groups = {
        f"group {i} {k}": v if not isinstance(v, torch.Tensor) else v.tolist()
        for i, g in enumerate(optimizer.param_groups)
        for k, v in g.items()
        if k != "params"
    }
    must_agree(
        ranks,
        {
            "version": {"memferry_ascend": __version__, "torch": torch.__version__},
            "config": settings,
            "model": {
                p.name: (tuple(p.shape), str(p.param.dtype), p.trainable, tuple(p.aliases)) for p in params
            },
            "optimizer": {"class": type(optimizer).__name__, **groups}
            | {f"group of {p.name}": p.group for p in params},
            "plan": plan_entries(plan),
        },
    )
    buffers = {f"buffer {n}": b for n, b in model.named_buffers()}
    values = {p.name: p.param.detach() for p in params} | buffers
    must_agree(ranks, {"initial value": {k: _checksum(v) for k, v in values.items()}})


def plan_entries(plan: Plan | None) -> dict[str, Any]:
    """What ranks must agree on in a plan."""
    if plan is None:
        return {}
    return {lp.name: (str(lp.mode), str(lp.grad), str(lp.update)) for lp in plan.layers}


def _checksum(t: torch.Tensor) -> int:
    """A sum of the bit patterns: enough to tell seeds apart, at memory speed."""
    flat = t.detach().contiguous().reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return int(words.sum(dtype=torch.int64)) ^ (int(words[::7].sum(dtype=torch.int64)) << 1)


def choose(ranks: Ranks, given: Plan | None, found: Plan) -> Plan:
    """The plan that all ranks run: what they were given, or what rank 0 found (measurements differ by rank)."""
    return found if given is not None else ranks.from_first(found)


def must_agree(ranks: Ranks, what: dict[str, dict[str, Any]]) -> None:
    """Raise on every rank unless all were given the same. `what` maps a section (model, config, ...) to its entries.

    Digests travel first, entries only of a section that differs.

    Raises:
        FerryError: names the section, the entry, both values and the ranks.
    """
    digests = ranks.gather_objects({k: _digest(v) for k, v in what.items()})
    for section, entries in what.items():
        if all(d.get(section) == digests[0].get(section) for d in digests):
            continue
        everyone = ranks.gather_objects({k: repr(v) for k, v in entries.items()})
        first = everyone[0]
        for rank, other in enumerate(everyone):
            for key in [*first, *(k for k in other if k not in first)]:
                mine, theirs = first.get(key, "nothing"), other.get(key, "nothing")
                if mine != theirs:
                    raise FerryError(
                        f"data parallel: ranks were given different {section}s: {key} is {_short(mine)} on rank 0 and "
                        f"{_short(theirs)} on rank {rank}; give every rank the same {section}"
                    )


def _digest(entries: dict[str, Any]) -> str:
    return hashlib.sha256(repr(sorted((k, repr(v)) for k, v in entries.items())).encode()).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
