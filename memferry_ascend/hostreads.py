"""Which layers may read host memory: their results are compared, on the user's own inputs, with those from the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memferry_ascend.tracing import tensors_in
from memferry_ascend.trial import Trial

CLOSE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 1e-3)}
"""Relative and absolute difference up to which a DHA result counts as right: kernels may add in another order."""


def check_host_reads(trial: Trial, unusable: Mapping[int, str]) -> tuple[dict[int, str], list[str]]:
    """Run each layer's forward on the same input from device and from host memory. A kind of layer whose outputs
    differ, or which raises, is not usable.

    Returns why, by layer number, for layers not in `unusable` yet, and notes for the user. Needs `trial.place()`.
    """
    backend, layers = trial.backend, trial.layers
    kinds = backend.capabilities().dha_kinds
    found: dict[int, str] = {}
    wrong: dict[str, str] = {}
    other_bits: set[str] = set()
    checking: list[int] = []

    def check(i: int) -> Any:
        layer = layers[i]

        def hook(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            if checking or layer.kind in wrong or i in unusable:
                return
            checking.append(i)
            bound = [p.param.data for p in trial.reads[i]]
            try:
                with torch.no_grad():
                    trial.bind(i, False)
                    with trial.same_randomness():
                        on_device = _copies(module.forward(*args, **kwargs))
                    trial.bind(i, True)
                    with trial.same_randomness():
                        on_host = _copies(module.forward(*args, **kwargs))
                    backend.synchronize()
                if not all(map(torch.equal, on_device, on_host)):
                    other_bits.add(layer.kind)
                if not _alike(on_device, on_host):
                    wrong[layer.kind] = f"{layer.name!r} computes other numbers from host memory"
            except Exception as e:
                wrong[layer.kind] = f"{layer.name!r} fails on host memory: {type(e).__name__}: {e}"
            finally:
                for p, data in zip(trial.reads[i], bound, strict=True):
                    p.param.data = data
                checking.clear()

        return hook

    handles = []
    for i, layer in enumerate(layers):
        if not (_supports(kinds, layer.kind)):
            found.setdefault(i, f"the {backend.name} backend has no direct access for it")
        elif i not in unusable:
            handles.append(layer.module.register_forward_hook(check(i), with_kwargs=True))
    try:
        with trial.same_randomness():
            trial.forward()
    finally:
        for handle in handles:
            handle.remove()
    for i, layer in enumerate(layers):
        if layer.kind in wrong:
            found[i] = wrong[layer.kind]
    notes = []
    for kind in sorted(other_bits - set(wrong)):
        notes.append(f"{kind} gives other bits from host memory (the same numbers up to rounding)")
    for kind, reason in wrong.items():
        notes.append(f"direct host access is not usable for {kind}: {reason}")
    return found, notes


def _supports(kinds: frozenset[str], kind: str) -> bool:
    return "*" in kinds or kind in kinds


def _copies(output: Any) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors_in(output)]


def _alike(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Bit for bit, or as close as another order of additions would be."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if torch.equal(x, y):
            continue
        if not x.is_floating_point():
            return False
        rtol, atol = CLOSE.get(x.dtype, (0.0, 0.0))
        if not torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True):
            return False
    return True
