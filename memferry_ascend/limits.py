"""What a run will need, exactly and before anything is allocated, against what there is.

Host memory is what the arena's slabs take plus the state of a torch optimizer that keeps its own; device memory is what
the plan's buffers and ring slots take. A refusal names the total, the bound and where it comes from, the three largest
consumers and the smallest setting that would work.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from memferry_ascend import sizes
from memferry_ascend.arena import Arena, Layout
from memferry_ascend.backends.base import Backend, HostSlab, align
from memferry_ascend.deviceupdate import norms_bytes
from memferry_ascend.deviceupdate import state_bytes as state_bytes_on_device
from memferry_ascend.errors import FerryError
from memferry_ascend.hostupdate import is_native
from memferry_ascend.kept import kept_bytes
from memferry_ascend.layers import Unit
from memferry_ascend.planner.plan import Grad, Mode, Update

MARGIN = 0.05
"""Share of what is free that stays free when no bound is given."""

RING_SLOTS = 3
"""One unit computes, one is loaded, one is about to be: a third slot hides the launch of the copy."""

NAMES = {
    "param": "parameters",
    "grad": "gradients",
    "lo": "master remainders",
    "m": "first moments",
    "v": "second moments",
    "acc": "fp32 gradient sums",
    "shared": "parameters, one memory for all ranks of the node",
    "unsynced": "gradient sums under no_sync",
    "state": "optimizer state",
    "norm": "gradient norms of device updates",
    "scratch": "one unit's fp32 masters and gradients",
}


def regions(unit: Unit, native: bool) -> list[tuple[str, int, bool]]:
    """The regions of a unit in the order they are taken: (kind, bytes, mapped)."""
    if unit.plan.update is Update.DEVICE:
        return []
    layout = Layout(unit)
    out = [("param", layout.nbytes, True)]
    if layout.grad_nbytes:
        out.append(("grad", layout.grad_nbytes, True))
    if any(p.trainable and p.dtype is torch.bfloat16 for p in unit.params):
        out.append(("lo", layout.elements * 2, False))
    if native and layout.elements:
        out += [("m", layout.elements * 4, False), ("v", layout.elements * 4, False)]
    return out


class Counting:
    """Stands for a backend: slabs are counted, not allocated."""

    def alloc_host(self, nbytes: int, *, mapped: bool, shared: str | None = None) -> HostSlab:
        nothing = torch.empty(0, dtype=torch.uint8)
        return HostSlab(nbytes, nothing, nothing)


def expected(units: Sequence[Unit], native: bool) -> dict[str, int]:
    """Bytes of all regions by kind, without the ends of slabs."""
    need: dict[str, int] = {}
    for unit in units:
        for kind, nbytes, _ in regions(unit, native):
            need[kind] = need.get(kind, 0) + nbytes
    return need


def arena_bytes(units: Sequence[Unit], native: bool, accumulate: int) -> dict[str, int]:
    """Bytes the arena's slabs will take, by kind: the arena itself lays them out, over nothing."""
    arena = Arena(Counting())  # type: ignore[arg-type]
    left = expected(units, native)
    for unit in units:
        for kind, nbytes, mapped in regions(unit, native):
            arena.region(kind, nbytes, mapped=mapped, expect=left[kind])
            left[kind] -= nbytes
    if accumulate > 1:
        here = [u for u in units if u.plan.update is Update.HOST]
        elements = [Layout(u).elements for u in here if any(p.trainable for p in u.params)]
        total = sum(elements) * 4
        for n in elements:
            arena.region("acc", n * 4, mapped=True, expect=total)
            total -= n * 4
    trainable = [(u.plan.update, p.index) for u in units for p in u.params if p.trainable]
    if any(update is Update.DEVICE for update, _ in trainable):
        arena.region("norm", norms_bytes(index for _, index in trainable), mapped=True)
    return arena.bytes_by_kind


def state_bytes(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes outside the arena that a torch optimizer's own state and our scratch take, by what.

    How many values per element an optimizer keeps is found by letting a copy of it step on one small parameter.
    """
    if is_native(optimizer):
        return {}
    probe = torch.nn.Parameter(torch.zeros(8, 8))
    probe.grad = torch.ones_like(probe)
    trial = copy.copy(optimizer)
    for key, value in vars(optimizer).items():
        if key != "step":
            vars(trial).setdefault(key, value)
    trial.state = defaultdict(dict)
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    trial.param_groups = [{**optimizer.param_groups[0], "params": [probe]}]
    trial.step()
    kept = [v for s in trial.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    per_element = sum(4 for v in kept if v.numel() == probe.numel())
    trained = sum(p.numel for u in units for p in u.params if p.trainable)
    scratch = max((Layout(u).elements for u in units), default=0) * 8
    return {"state": per_element * trained, "scratch": scratch}


def device_bytes(units: Sequence[Unit], slots: int = RING_SLOTS, accumulate: int = 1) -> dict[str, int]:
    """Bytes of the plan's device buffers and ring slots, by mode, and of what stays there for the step."""
    need: dict[str, int] = {}
    for unit in units:
        layout, device = Layout(unit), unit.plan.update is Update.DEVICE
        stays = 0
        if device or unit.plan.grad is Grad.KEEP:
            stays += kept_bytes(layout, accumulate > 1)
        if device:
            stays += state_bytes_on_device(layout, any(p.dtype is torch.bfloat16 for p in unit.params))
        if stays:
            need["kept for the step"] = need.get("kept for the step", 0) + stays
        if unit.plan.mode in (Mode.GFGB, Mode.DFGB):
            mode = str(unit.plan.mode)
            need[mode] = need.get(mode, 0) + align(Layout(unit).nbytes)
    ring = ring_shape(units, slots)
    if ring is not None:
        need[f"STREAM ring of {ring[0]}"] = ring[0] * ring[1]
    return need


def ring_shape(units: Sequence[Unit], slots: int = RING_SLOTS) -> tuple[int, int] | None:
    """Slots of the ring, at most `slots`, and bytes of each; None when nothing is streamed."""
    streamed = [Layout(u).nbytes for u in units if u.plan.mode is Mode.STREAM]
    return (min(slots, len(streamed)), align(max(streamed))) if streamed else None


def check_host(need: dict[str, int], limit: int | None) -> None:
    """Refuse before allocating. `limit`: Config.host_memory in bytes, None for what is free less a margin.

    Raises:
        FerryError: names the total, the bound, the three largest consumers and the smallest workable host_memory.
    """
    total = sum(need.values())
    source = "Config.host_memory"
    if limit is None:
        limit, source = int(available_host_bytes() * (1 - MARGIN)), "free memory less a margin of 5 %"
    if total > limit:
        raise FerryError(
            f"host memory: this model needs {sizes.fmt(total)} ({total} bytes; the largest: {_largest(need)}), over "
            f"{sizes.fmt(limit)} ({source}); the smallest workable host_memory is {total} bytes"
        )


def check_device(
    units: Sequence[Unit],
    backend: Backend,
    slots: int = RING_SLOTS,
    accumulate: int = 1,
    exchange: int = 0,
) -> None:
    """Refuse a plan whose buffers do not fit on the device. `exchange`: bytes that several ranks need besides.

    Raises:
        FerryError: names what the plan needs, what is free, the three largest consumers and what streaming would need.
    """
    need = device_bytes(units, slots, accumulate) | ({"buffers of exchanges": exchange} if exchange else {})
    total, stats = sum(need.values()), backend.memory_stats()
    if total > stats.free:
        largest = max(align(Layout(u).nbytes) for u in units)
        least = min(RING_SLOTS, len(units)) * largest
        raise FerryError(
            f"device memory: this plan keeps {sizes.fmt(total)} ({total} bytes; the largest: {_largest(need)}) on "
            f"{backend.device}, where {sizes.fmt(stats.free)} of {sizes.fmt(stats.limit)} are free; plan more layers "
            f"as DHA or STREAM: streaming all of them takes {least} bytes"
        )


def check_locked(need: dict[str, int], limit: int | None) -> None:
    """`limit`: bytes that this process may still lock, None where the backend's registration is not bound by it.

    Raises:
        FerryError: names the mapped bytes, the limit and the `ulimit` that would do.
    """
    mapped = {kind: nbytes for kind, nbytes in need.items() if kind in ("param", "shared", "grad", "acc")}
    total = sum(mapped.values())
    if limit is not None and total > limit:
        raise FerryError(
            f"locked memory: {sizes.fmt(total)} ({_largest(mapped)}) must be registered with the device, over the "
            f"limit of {sizes.fmt(limit)} (RLIMIT_MEMLOCK); the smallest workable setting is "
            f"`ulimit -l {-(-total // 1024)}` (KiB)"
        )


def _largest(need: dict[str, int]) -> str:
    top = sorted(need.items(), key=lambda kv: -kv[1])[:3]
    return ", ".join(f"{NAMES.get(k, k)} {sizes.fmt(v)}" for k, v in top) or "nothing"


def available_host_bytes(root: str | Path = "/") -> int:
    """Free RAM or what the tightest cgroup above this process leaves, whichever is less. `root`: of the file system.

    What a cgroup has in inactive file cache counts as free: the kernel takes it back before it refuses anything.
    """
    top = Path(root)
    free = 1 << 62
    for line in _read(top / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for folder, limit, used, cache in _cgroups(top):
        most, now = _read(folder / limit).strip(), _read(folder / used).strip()
        if not most.isdigit() or not now.isdigit():
            continue  # "max", or no such controller here
        reclaimable = 0
        for line in _read(folder / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == cache:
                reclaimable = int(value)
        free = min(free, max(0, int(most) - int(now) + reclaimable))
    return free


def _cgroups(top: Path) -> list[tuple[Path, str, str, str]]:
    """The memory cgroups from this process's own up to the root: (folder, limit file, usage file, cache key)."""
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    base = top / "sys/fs/cgroup"
    found: list[tuple[Path, str, str, str]] = [(base, *v2), (base / "memory", *v1)]
    for line in _read(top / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            hierarchy, files = base, v2
        elif "memory" in controllers.split(","):
            hierarchy, files = base / "memory", v1
        else:
            continue
        own = Path(path.lstrip("/"))
        found += [(hierarchy / p, *files) for p in (own, *own.parents) if p != Path(".")]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
