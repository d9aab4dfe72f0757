"""The simulator: seconds per iteration of any plan in the steady state, and what ran when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memferry_ascend.planner.files import check_document
from memferry_ascend.planner.fluid import Record, Steady, run
from memferry_ascend.planner.iteration import (
    UPDATES,
    Iteration,
    check_decisions,
)
from memferry_ascend.planner.memory import SLOTS, Decision, decisions, device_bytes, writes_directly
from memferry_ascend.planner.plan import Grad, Plan, Update
from memferry_ascend.planner.profile import Profile

FORMAT_VERSION = 1

Interval = tuple[float, float, str]


@dataclass(frozen=True)
class Timeline:
    """The steady state, from 0 to `cycle * period` seconds; `cycle` is 1 unless iterations differ.

    period: seconds per iteration. update: when updates start, "step" or "backward".
    intervals: resource ("compute", "h2d", "d2h", "host", with several ranks "fabric") -> busy intervals
    (start, end, label) in seconds, in order, each label "what layer-name". busy: resource -> busy seconds per
    iteration.
    critical: the resource that spends most time on the critical path; critical_path: resource -> its seconds
    there, which sum to the period: speeding up a resource that is not on it gains nothing.
    device_bytes: (seconds, bytes) wherever the bytes on the device change.
    iterations: how many were simulated. converged: False when the schedule alternates and `period` is an
    average.
    """

    period: float
    update: str
    intervals: dict[str, tuple[Interval, ...]]
    busy: dict[str, float]
    critical: str
    critical_path: dict[str, float]
    device_bytes: tuple[tuple[float, int], ...]
    cycle: int
    iterations: int
    converged: bool

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device at any time."""
        return max(nbytes for _, nbytes in self.device_bytes)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {"format": "memferry timeline", "version": FORMAT_VERSION, **self.__dict__}

    @classmethod
    def from_json(cls, document: Any) -> Timeline:
        """The inverse of to_json. Raises ValueError naming what is missing."""
        names = list(cls.__dataclass_fields__)
        found = {name: check_document(document, "timeline", FORMAT_VERSION, names)[name] for name in names}
        found["intervals"] = {k: tuple((a, b, c) for a, b, c in v) for k, v in found["intervals"].items()}
        found["device_bytes"] = tuple((a, b) for a, b in found["device_bytes"])
        return cls(**found)


def simulate(profile: Profile, plan: Plan, update: str = "step", *, slots: int = SLOTS) -> Timeline:
    """Simulate iterations of `plan` until the period is steady (the rules are in docs/planner.md).

    update: "step" = host updates start when every gradient is on the host; "backward" = each as soon as its
    own is. slots: ring slots of STREAM, at least 1. Deterministic. Raises ValueError when the plan is for
    other layers, uses what the profile says is not usable, or an argument makes no sense.
    """
    chosen = _checked(profile, plan, update, slots)
    built = Iteration(profile, chosen, update, slots)
    record = Record()
    steady = run(built.template, built.capacity, record)
    intervals = _intervals(profile, built, record, steady)
    busy = {n: sum(end - start for start, end, _ in spans) / steady.cycle for n, spans in intervals.items()}
    path = _critical_path(built, record, steady)
    return Timeline(
        period=steady.period,
        update=update,
        intervals=intervals,
        busy=busy,
        critical=max(built.resources, key=lambda name: path[name]),
        critical_path=path,
        device_bytes=_bytes_over_time(profile, chosen, built, record, steady, slots),
        cycle=steady.cycle,
        iterations=steady.iterations,
        converged=steady.converged,
    )


def period(profile: Profile, chosen: Sequence[Decision], update: str = "step", slots: int = SLOTS) -> float:
    """Only the seconds per iteration, of decisions known to be usable: what the search calls."""
    built = Iteration(profile, chosen, update, slots)
    return run(built.template, built.capacity).period


def _checked(profile: Profile, plan: Plan, update: str, slots: int) -> list[Decision]:
    if update not in UPDATES:
        raise ValueError(f"update must be one of {', '.join(map(repr, UPDATES))}, found {update!r}")
    if slots < 1:
        raise ValueError(f"slots must be at least 1, found {slots}")
    plan.check_layers([layer.name for layer in profile.layers])
    chosen = decisions(plan)
    check_decisions(profile, chosen)
    return chosen


def _intervals(
    profile: Profile, built: Iteration, record: Record, steady: Steady
) -> dict[str, tuple[Interval, ...]]:
    """The record, clipped to the window, by resource."""
    found: dict[str, list[Interval]] = {name: [] for name in built.resources}
    for (_, task), (start, end, _) in record.spans.items():
        start, end = max(start, steady.start), min(end, steady.end)
        if end > start:
            what, layer = built.template.label[task]
            label = f"{what} {profile.layers[layer].name}".rstrip()
            name = built.resources[built.template.server[task]]
            found[name].append((start - steady.start, end - steady.start, label))
    return {name: tuple(sorted(spans)) for name, spans in found.items()}


def _critical_path(built: Iteration, record: Record, steady: Steady) -> dict[str, float]:
    """Walk back from the end of the window along what let each task start, adding up seconds by resource."""
    path = dict.fromkeys(built.resources, 0.0)
    inside = [(who, span) for who, span in record.spans.items() if span[1] <= steady.end]
    if not inside:
        return path
    who = max(inside, key=lambda item: (item[1][1], item[0]))[0]
    here = None if steady.end <= steady.start else who
    while here is not None:
        start, end, cause = record.spans[here]
        path[built.resources[built.template.server[here[1]]]] += max(
            0.0, min(end, steady.end) - max(start, steady.start)
        )
        here = cause if start > steady.start else None
    return {name: seconds / steady.cycle for name, seconds in path.items()}


def _bytes_over_time(
    profile: Profile,
    chosen: Sequence[Decision],
    built: Iteration,
    record: Record,
    steady: Steady,
    slots: int,
) -> tuple[tuple[float, int], ...]:
    """What stays for the iteration, plus each staged gradient from the start of its backward to the end of
    its copy, or of its exchange with other ranks.
    """
    parts = device_bytes(profile, chosen, slots=slots)
    fixed = parts.total - parts.staged
    changes: dict[float, int] = {steady.start: 0}
    task_of = {label: task for task, label in enumerate(built.template.label)}
    iterations = {iteration for iteration, _ in record.spans}
    for store, layer in enumerate(profile.layers):
        own, (_, grad, update) = profile.own_bytes[store], chosen[store]
        direct = writes_directly(profile, store, chosen[store])
        if not layer.trainable or not own or direct or grad is Grad.KEEP or update is Update.DEVICE:
            continue
        readers = profile.readers[store] or (store,)
        leaves = "download" if profile.fabric is None else "exchange"
        born, gone = task_of["backward", readers[-1]], task_of[leaves, store]
        for iteration in iterations:
            if (iteration, born) in record.spans:
                start = record.spans[iteration, born][0]
                end = record.spans[iteration, gone][1] if (iteration, gone) in record.spans else steady.end
                if end > steady.start and start < steady.end:
                    start = max(start, steady.start)
                    changes[start] = changes.get(start, 0) + own
                    if end < steady.end:
                        changes[end] = changes.get(end, 0) - own
    steps, level = [], fixed
    for when in sorted(changes):
        level += changes[when]
        steps.append((when - steady.start, level))
    return tuple(steps)
