"""`device_memory` alone decides modes, ring, staging and update placement, without measurements.

What a plan needs is counted exactly as it will be allocated: units, and in them 512-byte aligned layouts. What is to be
chosen follows from bytes moved, in this order:

1. The smallest plan: what can be read in host memory is, everything else is streamed; a layer too large for two ring
   slots stays on the device instead, and a gradient too large for two staging buffers is kept in one.
2. The first layers, as many as fit, stay on the device between forward and backward (GFGB): each saves its second
   upload, a byte of link a byte of memory. The ring keeps the last layers until the backward asks for them anyway.
3. When all do, the first layers, as many as fit, are updated on the device: each saves upload, download and host update
   for about six bytes of memory a byte of parameters. The next forward waits for the first layers.

Steps 2 and 3 leave room for a third ring slot and for a gradient more under way. More memory never moves more bytes.

Gradients of host-updated layers are kept only where `reserve` says so: a kept gradient leaves after the backward
instead of beside it, so without a measurement nothing is known to be gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memferry_ascend import sizes
from memferry_ascend.arena import Layout
from memferry_ascend.backends.base import Backend
from memferry_ascend.deviceupdate import state_bytes, workspace_bytes
from memferry_ascend.errors import FerryError
from memferry_ascend.kept import kept_bytes
from memferry_ascend.layers import Layer, Unit, distant, units
from memferry_ascend.limits import RING_SLOTS as SLOTS
from memferry_ascend.placement import keep_by_reserve
from memferry_ascend.planner.plan import Grad, LayerPlan, Mode, Plan, Update

FEWEST_SLOTS = 2

WINDOW = 256 << 20
"""Bytes of device gradients whose download may be outstanding, where there is room."""

PATIENCE = 64
"""A longer run of changed layers may fit although a shorter one does not: units are cut elsewhere."""


@dataclass(frozen=True)
class Need:
    """Device bytes by purpose.

    base: activations, buffers, workspace. resident: parameter buffers of GFGB and DFGB units. ring: slots of STREAM.
    kept: gradients that stay. state: remainders and moments of device updates, and their temporaries. staged: short-
    lived gradients: two units' worth, one being produced and one leaving, what autograd holds of tied ones, and
    `window`.
    """

    base: int
    resident: int
    ring: int
    kept: int
    state: int
    staged: int

    @property
    def total(self) -> int:
        return self.base + self.resident + self.ring + self.kept + self.state + self.staged

    def __str__(self) -> str:
        parts = {
            "activations": self.base,
            "parameters": self.resident,
            "ring slots": self.ring,
            "kept gradients": self.kept,
            "optimizer state": self.state,
            "staged gradients": self.staged,
        }
        return ", ".join(f"{k} {sizes.fmt(v)}" for k, v in parts.items() if v)


@dataclass(frozen=True)
class Sizing:
    """How large the ring (slots) and the staging window (bytes) are."""

    slots: int
    window: int


def need(units: Sequence[Unit], *, slots: int, accumulate: int = 1, base: int = 0, window: int = 0) -> Need:
    """What these units take on the device."""
    wide = accumulate > 1
    resident = ring = kept = state = largest = passing = tied = leaving = 0
    on_device = []
    for unit in units:
        layout = Layout(unit)
        trainable = [p for p in unit.params if p.trainable]
        device = unit.plan.update is Update.DEVICE
        if device or unit.plan.mode in (Mode.GFGB, Mode.DFGB):
            resident += layout.nbytes
        elif unit.plan.mode is Mode.STREAM:
            ring = max(ring, layout.nbytes)
        if device:
            on_device.append(layout)
            state += state_bytes(layout, any(p.dtype.itemsize == 2 for p in trainable))
        if not trainable:
            continue
        if device or unit.plan.grad is Grad.KEEP:
            kept += kept_bytes(layout, wide)
            passing = max(passing, *(p.nbytes for p in trainable))
        else:
            # Direct gradients too: what comes before the first step is staged.
            own = sum(p.nbytes for p in trainable)
            largest, leaving = max(largest, own), leaving + own
        tied += sum(p.nbytes for p in trainable if p.aliases)
    return Need(
        base=base,
        resident=resident,
        ring=slots * ring,
        kept=kept,
        state=state + workspace_bytes(on_device),
        staged=max(min(2 * largest, leaving), passing) + tied + (window if largest else 0),
    )


def sizing(units: Sequence[Unit], limit: int | None, *, accumulate: int = 1, base: int = 0) -> Sizing:
    """The ring and window that fit beside everything else; the last check that a plan fits.

    Raises:
        FerryError: the plan does not fit; names what it needs.
    """
    if limit is None:
        return Sizing(SLOTS, WINDOW)
    for slots in range(SLOTS, FEWEST_SLOTS - 1, -1):
        found = need(units, slots=slots, accumulate=accumulate, base=base)
        if found.total <= limit:
            return Sizing(slots, min(WINDOW, limit - found.total))
    raise FerryError(
        f"device memory: the plan needs {sizes.fmt(found.total)} ({found}), over device_memory = {sizes.fmt(limit)}; "
        f"the smallest that works for it is {found.total} bytes: allow that, or stream more layers"
    )


def fit(
    rules: Plan,
    layers: list[Layer],
    limit: int,
    backend: Backend,
    *,
    accumulate: int = 1,
    base: int = 0,
    reserve: float | None = None,
    device_updates: bool = True,
) -> Plan:
    """A plan within `limit` bytes that moves as little as static rules can tell.

    rules: the plan without a budget, for what may be read in host memory. base: bytes of activations, buffers and
    workspace. reserve: see `keep_by_reserve`. device_updates: the optimizer can be run on the device.

    Raises:
        FerryError: nothing fits; names the smallest workable budget.
    """
    return _Fit(rules, layers, limit, backend, accumulate, base, reserve).run(device_updates)


Change = Callable[[LayerPlan], LayerPlan]


class _Fit:
    def __init__(
        self, rules: Plan, layers: list[Layer], limit: int, backend: Backend, accumulate: int, base: int,
        reserve: float | None,
    ) -> None:  # fmt: skip
        self.rules, self.layers, self.limit, self.backend = rules, layers, limit, backend
        self.accumulate, self.base, self.reserve = accumulate, base, reserve
        self.alone = distant(layers)
        self.bytes = {layer.name: sum(p.nbytes for p in layer.params) for layer in layers}

    def placed(self, plan: Plan) -> Plan:
        """The plan with its gradients placed by the reserve."""
        return (
            plan if self.reserve is None else keep_by_reserve(plan, self.layers, self.backend, self.reserve)
        )

    def need(self, plan: Plan, slots: int) -> Need:
        by_name = {x.name: x for x in self.placed(plan).layers}
        return need(
            units(self.layers, by_name, alone=self.alone),
            slots=slots,
            accumulate=self.accumulate,
            base=self.base,
        )

    def fits(self, plan: Plan) -> bool:
        found = self.need(plan, SLOTS)
        return found.total + found.staged // 2 <= self.limit

    def run(self, device_updates: bool) -> Plan:
        plan = self.smallest()
        least = self.need(plan, FEWEST_SLOTS)
        if least.total > self.limit:
            raise FerryError(
                f"device memory: no plan fits {sizes.fmt(self.limit)}: the smallest needs {sizes.fmt(least.total)} "
                f"({least}); the smallest workable device_memory is {least.total} bytes: allow that, or make the batch "
                "or the largest layer smaller"
            )
        order = [i for i, layer in enumerate(self.layers) if layer.params]
        streamed = [i for i in order if plan.layers[i].mode is Mode.STREAM]
        plan, all_changed = self.promote(plan, streamed, self.resident)
        if device_updates and all_changed:
            trainable = [i for i in order if any(p.trainable for p in self.layers[i].params)]
            plan, _ = self.promote(plan, trainable, self.on_device)
        plan = self.placed(plan)
        return replace(plan, device_bytes=self.need(plan, FEWEST_SLOTS).total)

    def smallest(self) -> Plan:
        """Layers of up to some size streamed, larger ones resident, gradients of up to some size staged, larger ones
        kept: at the sizes that need least."""

        def least(candidates: list[Plan]) -> Plan:
            return min(candidates, key=lambda plan: self.need(plan, FEWEST_SLOTS).total)

        limits = sorted({0, *self.bytes.values()})
        plan = least([self.streamed(limit) for limit in limits])
        return (
            plan if self.reserve is not None else least([self.staged(plan, limit) for limit in limits[::-1]])
        )

    def staged(self, plan: Plan, limit: int) -> Plan:
        large = [i for i, layer in enumerate(self.layers) if self.bytes[layer.name] > limit]
        why = "two gradients of its size under way would take more than one kept"
        return self.changed(plan, large, lambda x: replace(x, grad=Grad.KEEP, why=f"{x.why}; {why}"))

    def streamed(self, limit: int) -> Plan:
        def decide(decided: LayerPlan) -> LayerPlan:
            if decided.mode is Mode.DHA or not self.bytes[decided.name]:
                return decided
            if self.bytes[decided.name] <= limit:
                return replace(
                    decided, mode=Mode.STREAM, why="the budget has no room for it between its uses"
                )
            return replace(
                decided, mode=Mode.GFGB, why="two ring slots of its size would take more than itself"
            )

        return replace(self.rules, layers=tuple(decide(x) for x in self.rules.layers))

    def resident(self, decided: LayerPlan) -> LayerPlan:
        saved = sizes.fmt(self.bytes[decided.name])
        return replace(decided, mode=Mode.GFGB, why=f"room on the device: saves a second upload of {saved}")

    def on_device(self, decided: LayerPlan) -> LayerPlan:
        saved = sizes.fmt(2 * self.bytes[decided.name])
        why = f"room for its optimizer state: saves {saved} over the link and a host update"
        return replace(decided, mode=Mode.GFGB, grad=Grad.KEEP, update=Update.DEVICE, why=why)

    def promote(self, plan: Plan, order: list[int], change: Change) -> tuple[Plan, bool]:
        """Change the longest run of `order` that fits; True if that is all of it."""
        best, failed = 0, 0
        for count in range(1, len(order) + 1):
            if self.fits(self.changed(plan, order[:count], change)):
                best, failed = count, 0
            else:
                failed += 1
                if failed == PATIENCE:
                    break
        return self.changed(plan, order[:best], change), best == len(order)

    @staticmethod
    def changed(plan: Plan, positions: list[int], change: Change) -> Plan:
        layers = list(plan.layers)
        for i in positions:
            layers[i] = change(layers[i])
        return replace(plan, layers=tuple(layers))
