"""Bytes by plan, on the device and on the host: the one place that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memferry_ascend.planner.plan import Decision, Grad, Mode, Plan, Update
from memferry_ascend.planner.profile import Profile

SLOTS = 2  # ring slots: one being read, one being filled
STAGED = 2  # staging room in gradients of the largest layer: one being produced, one being copied away
STATE_BYTES = 8  # optimizer state per parameter: AdamW's two fp32 moments
MASTER_BYTES = 4  # an fp32 master per parameter, of which the device dtype is a part


@dataclass(frozen=True)
class DeviceBytes:
    """Device bytes by purpose.

    base: activations, buffers, workspace. resident: parameters of GFGB and DFGB layers. ring: slots of
    STREAM. kept: gradients that stay on the device. staged: short-lived gradients. state: what device
    updates need beside the parameters. exchange: buffers of the collectives of several ranks.
    """

    base: int
    resident: int
    ring: int
    kept: int
    staged: int
    state: int
    exchange: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.base + self.resident + self.ring + self.kept + self.staged + self.state + self.exchange


def decisions(plan: Plan) -> list[Decision]:
    """The plan's decisions, without names."""
    return [(x.mode, x.grad, x.update) for x in plan.layers]


def resident_owners(profile: Profile, chosen: Sequence[Decision]) -> set[int]:
    """Positions of the layers whose own parameters have a device copy for the whole iteration: a reader is
    GFGB.

    A tied parameter has one such copy, which its STREAM and DFGB readers then use.
    """
    found: set[int] = set()
    for i, decision in enumerate(chosen):
        if decision[0] is Mode.GFGB:
            found.update((i, profile.owners[i]))
    return found


def writes_directly(profile: Profile, i: int, decision: Decision) -> bool:
    """True when the layer's backward writes its gradient to host memory: a tied parameter stages instead."""
    return decision[1] is Grad.DIRECT and profile.layers[i].trainable and not profile.tied[i]


def stages(profile: Profile, i: int, decision: Decision) -> bool:
    """True when the layer's gradient passes through the staging room. A tied one lives too long for that."""
    to_host = profile.layers[i].trainable and decision[2] is Update.HOST
    return to_host and decision[1] is Grad.STAGE and not profile.tied[i]


def staging_bytes(profile: Profile, chosen: Sequence[Decision]) -> int:
    """Room for short-lived gradients: backward waits when it is full: a slow link costs time, not memory."""
    sizes = (own for i, own in enumerate(profile.own_bytes) if stages(profile, i, chosen[i]))
    return STAGED * max(sizes, default=0)


def device_bytes(
    profile: Profile,
    plan: Plan | Sequence[Decision],
    *,
    slots: int = SLOTS,
    accumulate: int = 1,
    state_bytes: int = STATE_BYTES,
    direct_stages: bool = False,
) -> DeviceBytes:
    """Device bytes of `plan`, by purpose.

    slots: ring slots, each as large as the largest streamed layer. accumulate: backwards per step; above 1 a
    kept gradient is fp32. state_bytes: optimizer state per parameter. A tied parameter counts once. A
    device-updated layer keeps its gradient until the update, so it counts as kept. direct_stages: gradients
    written directly need the staging room too (an engine that stages them before its first step). What stays is
    counted as it is laid out (`Profile.stored_bytes`).
    """
    chosen = decisions(plan) if isinstance(plan, Plan) else plan
    owners, own_bytes, tied = profile.owners, profile.own_bytes, profile.tied
    stored_bytes = profile.stored_bytes
    resident = resident_owners(profile, chosen)
    buffered, ring, kept, largest, shared, state = set(resident), 0, 0, 0, 0, 0
    for i, (layer, (mode, grad, update)) in enumerate(zip(profile.layers, chosen, strict=True)):
        own, stored = own_bytes[i], stored_bytes[i]
        if mode is Mode.DFGB:
            buffered.update((i, owners[i]))
        elif mode is Mode.STREAM:
            ring = max(ring, sum(stored_bytes[s] for s in {i, owners[i]} if s not in resident))
        if not layer.trainable:
            continue
        if update is Update.DEVICE:
            state += stored // layer.itemsize * (max(0, MASTER_BYTES - layer.itemsize) + state_bytes)
        if grad is Grad.KEEP or update is Update.DEVICE:
            kept += stored if accumulate == 1 else stored // layer.itemsize * 4
        elif tied[i]:
            shared += own  # from its first backward use to its last
        elif (grad is Grad.STAGE or direct_stages) and own > largest:
            largest = own
    return DeviceBytes(
        base=profile.base_bytes,
        resident=sum(stored_bytes[i] for i in buffered),
        ring=slots * ring,
        kept=kept,
        staged=STAGED * largest + shared,
        state=state,
        exchange=_exchange_bytes(profile, chosen),
    )


def _exchange_bytes(profile: Profile, chosen: Sequence[Decision]) -> int:
    """What is sent and received of the largest gradient, two results of it, and a landing place for loads."""
    if profile.fabric is None:
        return 0
    gradient = max(
        (n for n, x in zip(profile.own_bytes, profile.layers, strict=True) if x.trainable), default=0
    )
    moving = (n for n, x in zip(profile.own_bytes, chosen, strict=True) if x[0] in (Mode.DFGB, Mode.STREAM))
    return 2 * gradient + 2 * -(-gradient // profile.shards) + max(moving, default=0)


def host_bytes(profile: Profile, plan: Plan, *, state_bytes: int = STATE_BYTES) -> int:
    """Host bytes of `plan`: parameters, and for host-updated layers gradient, master remainder and state."""
    total = 0
    for i, (layer, decided) in enumerate(zip(profile.layers, plan.layers, strict=True)):
        own = profile.own_bytes[i]
        total += own
        if layer.trainable and decided.update is Update.HOST:
            total += own + own // layer.itemsize * (max(0, MASTER_BYTES - layer.itemsize) + state_bytes)
    return total
