"""One training iteration as a task graph: what a plan makes device, link and host do, in what order.

An iteration starts with the host updates of the last iteration's gradients, and ends when backward has ended
(`update="step"`: and every gradient is on the host). A *store* is what one layer owns: its parameters, one
gradient, one update. A tied parameter is its owner's store, read by several layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from memferry_ascend.planner.fluid import NO_DEMAND, Capacity, Demand, Template
from memferry_ascend.planner.launches import added, beginnings, missing
from memferry_ascend.planner.memory import (
    SLOTS,
    Decision,
    resident_owners,
    stages,
    staging_bytes,
    writes_directly,
)
from memferry_ascend.planner.plan import Grad, Mode, Update
from memferry_ascend.planner.profile import Profile

COMPUTE, H2D, D2H, HOST, FABRIC = range(5)
RESOURCES = ("compute", "h2d", "d2h", "host", "fabric")
"""The last one only where there are several ranks."""
URGENT, PATIENT = 0, 1
UPDATES = ("step", "backward")


def capacity_of(profile: Profile) -> Capacity:
    """The shared bandwidths of the profile's link and host."""
    link = profile.link
    return Capacity(
        link.h2d, link.d2h, link.duplex, float("inf") if link.host_memory is None else link.host_memory
    )


def check_decisions(profile: Profile, chosen: Sequence[Decision]) -> None:
    """Raise ValueError naming the first layer whose decision the profile says cannot be run."""
    for i, (layer, (mode, grad, update)) in enumerate(zip(profile.layers, chosen, strict=True)):
        owner = profile.owners[i]
        if update is Update.DEVICE and not layer.device_update_usable:
            raise ValueError(f"layer {layer.name!r}: update device, but t_update_device is inf (not usable)")
        if profile.fabric is not None and (grad is not Grad.STAGE or update is not Update.HOST):
            raise ValueError(
                f"layer {layer.name!r}: several ranks exchange gradients, which are staged and updated on the host, "
                f"found grad {grad}, update {update}"
            )
        if mode in (Mode.DHA, Mode.DFGB) and not layer.dha_usable:
            raise ValueError(
                f"layer {layer.name!r}: mode {mode} reads host memory, but t_fp_dha is inf (not usable)"
            )
        if mode is Mode.DHA and not layer.dha_backward_usable:
            raise ValueError(f"layer {layer.name!r}: mode DHA needs a backward by DHA, but t_bp_dha is inf")
        if writes_directly(profile, i, chosen[i]) and not layer.direct_usable:
            raise ValueError(f"layer {layer.name!r}: grad direct, but t_bp_grad_direct is inf (not usable)")
        if chosen[owner][2] is Update.DEVICE and owner != i and mode is not Mode.GFGB:
            raise ValueError(
                f"layer {layer.name!r}: shares {profile.layers[owner].name!r}, whose parameters are updated "
                f"on the device, so only GFGB reads them, found {mode}"
            )


def forward_time(profile: Profile, i: int, decision: Decision, begins: bool = False) -> float:
    """Seconds of the forward pass, alone: of the device, or of the thread that launches it where that takes longer.
    `begins`: a unit begins here because the layer before is decided differently."""
    layer = profile.layers[i]
    time = layer.t_fp_dha if decision[0] in (Mode.DHA, Mode.DFGB) else layer.t_fp
    return max(time, layer.t_host_fp + added(profile.launches, decision, begins * missing(layer.bytes))[0])


def backward_time(profile: Profile, i: int, decision: Decision, begins: bool = False) -> float:
    """Seconds of the backward pass likewise, with the forward again when it is recomputed."""
    layer = profile.layers[i]
    forward, backward = added(profile.launches, decision, begins * missing(layer.bytes))
    host = layer.t_host_bp + backward
    by_dha = decision[0] is Mode.DHA
    time = layer.t_bp_dha if by_dha else layer.t_bp
    if writes_directly(profile, i, decision):
        time = max(0.0, time + layer.t_bp_grad_direct - layer.t_bp)
    if layer.recompute:
        time += layer.t_fp_dha if by_dha else layer.t_fp
        host += layer.t_host_fp + forward
    return max(time, host)


def download_time(profile: Profile, i: int) -> float:
    """Seconds to bring a rank's part of the layer's own gradient to the host, alone on the link; 0 when it has none."""
    own = profile.own_bytes[i] / profile.shards
    return profile.link.latency + own / profile.link.d2h if own and profile.layers[i].trainable else 0.0


def leaves_at_step(profile: Profile, i: int, decision: Decision) -> bool:
    """True when the layer's gradient stays on the device during the backward and goes to the host afterwards."""
    kept = decision[1] is Grad.KEEP and decision[2] is Update.HOST
    return kept and download_time(profile, i) > 0.0


class Iteration:
    """Builds the Template of one iteration of `chosen` on `profile`; `.template` is the result."""

    def __init__(
        self, profile: Profile, chosen: Sequence[Decision], update: str = "step", slots: int = SLOTS
    ) -> None:
        self.profile, self.chosen, self.slots = profile, chosen, slots
        self.by_step = update == "step"
        self.capacity = capacity_of(profile)
        self.resident = resident_owners(profile, chosen)
        self.count = len(profile.layers)
        self.resources = RESOURCES if profile.fabric is not None else RESOURCES[:FABRIC]
        self.template = Template(servers=len(self.resources))
        self.updated: dict[int, int] = {}  # store -> its update
        self.leaving: dict[int, int] = {}  # store -> download of its kept gradient at the step
        self.loaded: dict[int, list[int]] = {}  # layer -> copies its forward waits for
        self.reloaded: dict[int, int] = {}  # layer -> copy its backward waits for
        self.ring: list[int] = []  # ring copies in the order they take slots
        self.ring_users: list[int] = []  # for each, the compute task that frees its slot
        self.gradients: dict[
            int, int
        ] = {}  # store -> the task after which its gradient is where the update wants it
        self.staging = staging_bytes(profile, chosen)
        self.staged: list[tuple[int, int]] = []  # bytes and download of each staged gradient so far
        self.compute: list[int] = []
        self.copies: list[int] = []
        self._add_updates()
        self._add_forward_copies()
        self._add_backward_copies()
        self._add_compute_and_downloads()
        self._close()

    def _add(
        self,
        server: int,
        seconds: float,
        rank: tuple[int, int],
        label: tuple[str, int],
        after: Sequence[int] = (),
        nbytes: Demand = NO_DEMAND,
    ) -> int:
        """Add a task that moves `nbytes` (down, up, through host memory) while it runs."""
        demand = NO_DEMAND
        if seconds > 0 and nbytes != NO_DEMAND:
            demand = self.capacity.clip((nbytes[0] / seconds, nbytes[1] / seconds, nbytes[2] / seconds))
        return self.template.add(server, seconds, rank, label, after=after, demand=demand)

    def _copy(
        self, seconds: float, rank: int, what: str, layer: int, after: Sequence[int], nbytes: int
    ) -> int:
        """A copy down; with update="step" copies go strictly in order of need, so nothing overtakes. Of several ranks
        each copies its part of the bytes, and the rest is gathered behind it."""
        waits = [*after, *(self.copies[-1:] if self.by_step else ())]
        mine, place = nbytes / self.profile.shards, (rank, len(self.copies))
        task = self._add(H2D, seconds, place, (what, layer), waits, (mine, 0.0, mine))
        self.copies.append(task)
        if self.profile.fabric is None:
            return task
        return self._add(FABRIC, self.profile.gather_time(nbytes), place, ("gather", layer), [task])

    def _has_gradient(self, store: int) -> bool:
        return self.profile.layers[store].trainable and (
            self.profile.own_bytes[store] > 0 or self.profile.owners[store] == store
        )

    def _add_updates(self) -> None:
        """Host updates, first needed first. What they wait for is in the iteration before: see _close. With
        update="step" they are taken strictly in that order, so that more bandwidth never makes a period longer (the worker
        would not wait for the last downloads), and a kept gradient leaves only now."""
        stores = [s for s in range(self.count) if self._has_gradient(s) and self.chosen[s][2] is Update.HOST]
        if self.by_step:
            stores.sort(key=lambda s: (self._first_reader(s), s))
        before: list[int] = []
        for store in stores:
            layer = self.profile.layers[store]
            waits = list(before)
            if leaves_at_step(self.profile, store, self.chosen[store]) and self.by_step:
                own, seconds = self.profile.own_bytes[store], download_time(self.profile, store)
                place = (URGENT, len(self.leaving))
                self.leaving[store] = self._add(D2H, seconds, place, ("download", store), (), (0.0, own, own))
                waits.append(self.leaving[store])
            elements = self.profile.own_bytes[store] // layer.itemsize / self.profile.shards
            traffic = elements * (24 + layer.itemsize)  # moments and master read and written, gradient read
            seconds = self.profile.update_times[store]
            needed = self._first_reader(store)
            rank = (URGENT, needed * self.count + store)
            self.updated[store] = self._add(
                HOST, seconds, rank, ("update", store), waits, (0.0, 0.0, traffic)
            )
            before = [self.updated[store]] if self.by_step else []

    def _first_reader(self, store: int) -> int:
        return self.profile.readers[store][0] if self.profile.owners[store] == store else store

    def _own_time(self, store: int) -> float:
        return self.profile.copy_times[store]

    def _stores(self, layer: int) -> list[int]:
        """What the layer reads: its own store, and the owner's of the parameter it shares."""
        owner = self.profile.owners[layer]
        return [layer] if owner == layer else [layer, owner]

    def _add_forward_copies(self) -> None:
        """Uploads of resident layers after their update, and STREAM's loads, as the forward needs them."""
        uploads: dict[int, int] = {}
        for i in range(self.count):
            mode = self.chosen[i][0]
            if mode in (Mode.DHA, Mode.DFGB):
                continue
            waits = []
            for store in self._stores(i):
                if store not in self.resident or self.profile.own_bytes[store] == 0:
                    continue
                if store in self.updated and store not in uploads:
                    uploads[store] = self._copy(
                        self._own_time(store), URGENT, "upload", store, [self.updated[store]],
                        self.profile.own_bytes[store],
                    )  # fmt: skip
                if store in uploads:
                    waits.append(uploads[store])
            if mode is Mode.STREAM:
                waits.append(self._ring_copy(i, URGENT, "load"))
            self.loaded[i] = waits

    def _ring_copy(self, layer: int, rank: int, what: str) -> int:
        """A copy into a ring slot; what frees the slot is known only later: see _close."""
        stores = [s for s in self._stores(layer) if s not in self.resident]
        waits = [self.updated[s] for s in stores if s in self.updated]
        seconds = sum(self._own_time(s) for s in stores)
        rank = rank if waits else PATIENT  # what is frozen can be fetched any time
        task = self._copy(seconds, rank, what, layer, waits, sum(self.profile.own_bytes[s] for s in stores))
        self.ring.append(self.copies[-1])
        return task

    def _add_backward_copies(self) -> None:
        """Copies for the backward in the order it needs them, after the forward's: the link is idle then
        (Alg. 2).
        """
        done: set[int] = set()
        for i in reversed(range(self.count)):
            mode = self.chosen[i][0]
            if mode is Mode.STREAM:
                self.reloaded[i] = self._ring_copy(i, PATIENT, "reload")
            elif mode is Mode.DFGB:
                stores = [s for s in self._stores(i) if s not in self.resident and s not in done]
                waits = [self.updated[s] for s in stores if s in self.updated]
                done.update(stores)
                if waits:  # a frozen layer's copy is never out of date
                    seconds = sum(self._own_time(s) for s in stores)
                    nbytes = sum(self.profile.own_bytes[s] for s in stores)
                    self.reloaded[i] = self._copy(seconds, PATIENT, "reload", i, waits, nbytes)

    def _then(
        self, seconds: float, label: tuple[str, int], after: Sequence[int], nbytes: Demand = NO_DEMAND
    ) -> int:
        """The next task of the compute stream."""
        waits = [*after, *self.compute[-1:]]
        task = self._add(COMPUTE, seconds, (URGENT, len(self.compute)), label, waits, nbytes)
        self.compute.append(task)
        return task

    def _add_compute_and_downloads(self) -> None:
        layers, chosen, begins = self.profile.layers, self.chosen, beginnings(self.chosen)
        device = [s for s in range(self.count) if self._has_gradient(s) and chosen[s][2] is Update.DEVICE]
        if self.by_step:
            for store in device:
                self._device_update(store)
        for i, layer in enumerate(layers):
            mode = chosen[i][0]
            waits = list(self.loaded.get(i, ()))
            dha = layer.dha_bytes if mode in (Mode.DHA, Mode.DFGB) else 0
            if mode in (Mode.DHA, Mode.DFGB):
                waits += [self.updated[s] for s in self._stores(i) if s in self.updated]
            task = self._then(
                forward_time(self.profile, i, chosen[i], begins[i]), ("forward", i), waits, (dha, 0.0, dha)
            )
            if mode is Mode.STREAM:
                self.ring_users.append(task)
            if layer.t_gap_fp > 0:
                self._then(layer.t_gap_fp, ("forward gap", i), ())
        for i in reversed(range(self.count)):
            layer = layers[i]
            if layer.t_gap_bp > 0:
                self._then(layer.t_gap_bp, ("backward gap", i), ())
            waits = [self.reloaded[i]] if i in self.reloaded else []
            waits += self._room_for_gradient(i)
            task = self._then(
                backward_time(self.profile, i, chosen[i], begins[i]),
                ("backward", i),
                waits,
                self._backward_bytes(i),
            )
            if chosen[i][0] is Mode.STREAM:
                self.ring_users.append(task)
            for store in self._stores(i):
                if self._has_gradient(store) and self._first_reader(store) == i:
                    self._download(store, task)
                    if not self.by_step and store in device:
                        self._device_update(store)

    def _device_update(self, store: int) -> None:
        seconds = self.profile.layers[store].device_update_time * self.profile.own_fraction[store]
        self._then(seconds, ("device update", store), ())

    def _backward_bytes(self, i: int) -> Demand:
        """Bytes a backward moves: weights read by DHA (when that costs time), gradients written."""
        layer, decision = self.profile.layers[i], self.chosen[i]
        down = 0.0
        if decision[0] is Mode.DHA:
            down = (layer.dha_bytes if layer.t_bp_dha > layer.t_bp else 0) + layer.recompute * layer.dha_bytes
        up = self.profile.own_bytes[i] if writes_directly(self.profile, i, decision) else 0.0
        return (down, up, down + up)

    def _room_for_gradient(self, i: int) -> list[int]:
        """The download that must end before the layer's short-lived gradient has room on the device."""
        if not stages(self.profile, i, self.chosen[i]):
            return []
        room = self.staging - self.profile.own_bytes[i]
        for nbytes, task in reversed(self.staged):
            room -= nbytes
            if room < 0:
                return [task]
        return []

    def _download(self, store: int, backward: int) -> None:
        """The gradient's way to the host, in the order backward produces them."""
        self.gradients[store] = backward
        seconds, own = download_time(self.profile, store), self.profile.own_bytes[store]
        direct = writes_directly(self.profile, store, self.chosen[store])
        if self.chosen[store][2] is Update.DEVICE or direct or seconds == 0 or store in self.leaving:
            return
        rank, label, mine = (URGENT, len(self.gradients)), ("download", store), own / self.profile.shards
        if self.profile.fabric is not None:
            order = (PATIENT, len(self.gradients))
            backward = self._add(
                FABRIC, self.profile.exchange_time(store), order, ("exchange", store), [backward]
            )
        self.gradients[store] = self._add(D2H, seconds, rank, label, [backward], (0.0, mine, mine))
        if stages(self.profile, store, self.chosen[store]):
            gone = self.gradients[store] if self.profile.fabric is None else backward
            self.staged.append((own, gone))

    def _close(self) -> None:
        """Tie iterations together: barrier, gradients before updates, slots freed before filled."""
        template = self.template
        last = self.compute[-1]
        after = [last, *self.gradients.values()] if self.by_step else [last]
        template.marker = template.add(-1, 0.0, (URGENT, 0), ("end", -1), after=after)
        if self.by_step:
            # step() waits for all gradients, and the compute stream does too: user code may read p.grad
            template.release_next(template.marker, self.compute[0])
            for task in (*self.updated.values(), *self.leaving.values()):
                template.release_next(template.marker, task)
            if self.copies:
                template.release_next(self.copies[-1], self.copies[0])
        else:
            template.release_next(last, self.compute[0])
            for store, task in self.updated.items():
                template.release_next(self.gradients[store], task)
        for place, copy in enumerate(self.ring):
            if place >= self.slots:
                user = self.ring_users[place - self.slots]
                template.next[user].append(copy)
                template.waits[copy] += 1
            else:
                user = self.ring_users[(place - self.slots) % len(self.ring_users)]
                template.release_next(user, copy)
        for task in self.copies:  # a copy of frozen parameters waits for nothing else
            if template.waits[task] + template.waits_before[task] == 0:
                template.release_next(last, task)
