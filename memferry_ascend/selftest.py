"""`memferry doctor --selftest`: does this machine keep the promises that the engine builds on?

Four questions, on any backend: do host and device see each other's writes to mapped memory, which layer kinds compute
the right numbers from it, which write their gradients there, and does a small model end with the same bits in each of the
four modes and with gradients written directly. The answers and what
`doctor` found go into one JSON file, to be sent back by the first user of a new machine.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memferry_ascend import placement, runtime
from memferry_ascend.backends import ascend_probe, ascend_writes
from memferry_ascend.backends.base import Backend
from memferry_ascend.config import Config
from memferry_ascend.engine import Engine
from memferry_ascend.layers import collect
from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Plan

STEPS = 4


class SmallModel(nn.Module):
    """A few layers of the kinds that training is made of; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.relu(up(norm(x))))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def run(backend: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """All tests on `backend` (None: what `init` picks). Each result is {"ok": bool, "said": str, "seconds": float}.

    Nothing here raises for what the machine does wrong: that is a result.
    """
    device = runtime.init(backend=backend).backend
    results: dict[str, Any] = {}

    def test(name: str, call: Callable[[], tuple[bool, str]]) -> None:
        start = time.perf_counter()
        try:
            ok, said = call()
        except Exception as error:
            ok, said = False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        results[name] = {"ok": ok, "said": said, "seconds": round(time.perf_counter() - start, 3)}
        say(f"{'ok  ' if ok else 'FAIL'}  {name}: {said}")

    test("coherence", lambda: _coherence(device))
    test("direct host access", lambda: _kinds(device))
    test("direct gradients", lambda: _writes(device))
    wanted: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        for mode in (Mode.GFGB, Mode.DHA, Mode.DFGB, Mode.STREAM):
            test(f"{precision} {mode}", partial(_mode, device, mode, precision, wanted))
        test(
            f"{precision} direct gradients", partial(_mode, device, Mode.GFGB, precision, wanted, Grad.DIRECT)
        )
    can = device.capabilities()
    return {
        "backend": device.name,
        "device": str(device.device),
        "coherent": can.coherent,
        "dha_kinds": sorted(can.dha_kinds),
        "direct_kinds": sorted(can.direct_kinds),
        "peers": can.peers,
        "notes": list(can.notes),
        "tests": results,
        "ok": all(r["ok"] for r in results.values()),
    }


def _coherence(device: Backend) -> tuple[bool, str]:
    bad = ascend_probe.incoherence(device)
    return bad is None, bad or f"{ascend_probe.ROUNDS} rounds of writes were seen on either side"


def _kinds(device: Backend) -> tuple[bool, str]:
    """Never a failure: a kind that is not right is not used. Only no kind at all would be surprising."""
    can = device.capabilities()
    if "*" not in can.dha_kinds:
        kinds = can.dha_kinds
        return bool(kinds) or not can.coherent, f"right: {', '.join(sorted(kinds)) or 'none'}"
    wrong = []
    for kind in ascend_probe.KINDS:
        bad = ascend_probe.try_kind(device, kind)
        if bad is not None:
            wrong.append(f"{kind}: {bad}")
    return not wrong, "; ".join(wrong) or f"right: {', '.join(ascend_probe.KINDS)}"


def _writes(device: Backend) -> tuple[bool, str]:
    """As `_kinds`, for the kinds that write their gradients to mapped memory."""
    can = device.capabilities()
    if "*" not in can.dha_kinds:
        kinds = can.direct_kinds
        return bool(kinds) or not can.coherent, f"right: {', '.join(sorted(kinds)) or 'none'}"
    wrong = []
    for kind in sorted(can.direct_kinds):
        bad = ascend_writes.try_write(device, kind)
        if bad is not None:
            wrong.append(f"{kind}: {bad}")
    return not wrong, "; ".join(wrong) or f"right: {', '.join(sorted(can.direct_kinds))}"


def _mode(
    device: Backend, mode: Mode, precision: str, wanted: dict[str, Any], grad: Grad = Grad.STAGE
) -> tuple[bool, str]:
    """Train with every layer in `mode` and its gradient as in `grad`, where this machine can, and compare with the first
    mode, which ran serially."""
    torch.manual_seed(3)
    model = SmallModel()
    first = wanted.get(precision)
    can = device.capabilities()
    plan, instead = [], set()
    for layer in collect(copy.deepcopy(model), precision, ()):
        usable = placement.mode_obstacle(layer, mode, device) is None
        writes = grad is not Grad.DIRECT or placement.direct_obstacle(layer, device) is None
        if not usable or not writes:
            instead.add(layer.kind)
        plan.append(LayerPlan(layer.name, mode if usable else Mode.GFGB, grad if writes else Grad.STAGE))
    update = "step" if can.coherent else "backward"
    config = Config(precision=precision, update=update)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = Engine(model, optimizer, runtime.current(), config, Plan(tuple(plan)), None)
    draw = torch.Generator().manual_seed(4)
    try:
        for _ in range(STEPS):
            loss = engine.model(torch.randint(0, 32, (4, 9), generator=draw).to(device.device))
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if first is None:
                engine.synchronize()
        state = engine.state_dict()["model"]
    finally:
        engine.close()
    if first is None:
        first = wanted[precision] = state
    different = [name for name in state if not torch.equal(state[name], first[name])]
    said = f"differs in {', '.join(different)}" if different else f"{STEPS} steps end with the same bits"
    if state is first:
        said = f"{STEPS} steps, waiting after each, are what the others are compared with"
    if instead:
        said += f" ({'staged' if grad is Grad.DIRECT else 'GFGB'} for {', '.join(sorted(instead))})"
    finite = all(bool(torch.isfinite(v.float()).all()) for v in state.values())
    return not different and finite, said if finite else "the parameters are not finite"
