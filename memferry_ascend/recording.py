"""A recording: what ran when in the recorded steps, resolved to seconds; what reports and plots are made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from memferry_ascend.errors import FerryError
from memferry_ascend.planner.files import read_json
from memferry_ascend.planner.simulator import Timeline

RESOURCES = ("compute", "h2d", "d2h", "host")
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Interval:
    """Seconds on one resource ("compute", "h2d", "d2h", "host"), from the recorder's start.

    what: "forward", "backward", "recompute", "forward gap", "backward gap", "wait" on compute; the stream's name for a
    copy; "update" or "fold" on the host. name: of the layer or unit. nbytes: moved. sizes: of each tensor moved.
    """

    resource: str
    what: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recording:
    """intervals: in order of start. steps: when `step()` was called. phases: ("forward" | "backward" | "update", start,
    end); an update phase ends with its last host update and overlaps the next forward. device_memory, host_memory:
    (seconds, bytes) as allocated when work was queued. predicted: the simulator's timeline of the plan, None without a
    profile."""

    intervals: tuple[Interval, ...] = ()
    steps: tuple[float, ...] = ()
    phases: tuple[tuple[str, float, float], ...] = ()
    device_memory: tuple[tuple[float, int], ...] = ()
    host_memory: tuple[tuple[float, int], ...] = ()
    update: str = "step"
    device: Mapping[str, str] = field(default_factory=dict)
    predicted: Timeline | None = None

    @property
    def period(self) -> float:
        """Seconds per iteration: the mean distance of calls of `step()`.

        Raises:
            FerryError: fewer than two steps were recorded.
        """
        if len(self.steps) < 2:
            raise FerryError(
                f"recording: expected at least two optimizer steps to tell a period, found {len(self.steps)}; record "
                "longer: start() before, stop() after some steps"
            )
        return (self.steps[-1] - self.steps[0]) / (len(self.steps) - 1)

    def timeline(self) -> Timeline:
        """The recorded iterations as the simulator would describe them: from the first `step()` to the last.

        `critical_path` shares each moment's time: compute while it runs, otherwise what runs meanwhile (copies down,
        host, copies up), otherwise compute. Waiting inside a layer's backward counts as its backward.
        """
        count, period = len(self.steps) - 1, self.period
        begin, end = self.steps[0], self.steps[-1]
        found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in RESOURCES}
        for x in self.intervals:
            start, stop = max(x.start, begin), min(x.end, end)
            if stop > start and x.what != "wait":
                label = f"{x.what} {x.name}".rstrip()
                found[x.resource].append((start - begin, stop - begin, label))
        spans = {name: tuple(sorted(values)) for name, values in found.items()}
        path = _exposed(spans, end - begin)
        return Timeline(
            period=period,
            update=self.update,
            intervals=spans,
            busy={name: covered(values) / count for name, values in spans.items()},
            critical=max(RESOURCES, key=lambda name: path[name]),
            critical_path={name: seconds / count for name, seconds in path.items()},
            device_bytes=tuple((t - begin, n) for t, n in self.device_memory if begin <= t <= end)
            or ((0.0, 0),),
            cycle=count,
            iterations=count,
            converged=True,
        )

    def last_iteration(self) -> dict[str, list[tuple[float, float, str]]]:
        """Intervals (start, end, label) by resource between the last two calls of `step()`, from the first of them."""
        begin, end = self.steps[-2], self.steps[-1]
        found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in RESOURCES}
        for x in self.intervals:
            if x.end > begin and x.start < end and x.what != "wait":
                start, stop = max(x.start, begin) - begin, min(x.end, end) - begin
                found[x.resource].append((start, stop, f"{x.what} {x.name}".rstrip()))
        return found

    def throughput(self) -> dict[str, dict[str, float]]:
        """Phase -> direction ("h2d", "d2h") -> bytes/s while that phase lasts; a copy's bytes are spread evenly over
        its time."""
        out: dict[str, dict[str, float]] = {}
        for phase in ("forward", "backward", "update"):
            spans = [(a, b) for name, a, b in self.phases if name == phase and b > a]
            lasted = sum(b - a for a, b in spans)
            out[phase] = {}
            for direction in ("h2d", "d2h"):
                moved = 0.0
                for x in self.intervals:
                    if x.resource != direction or x.end <= x.start:
                        continue
                    inside = sum(max(0.0, min(b, x.end) - max(a, x.start)) for a, b in spans)
                    moved += x.nbytes * inside / (x.end - x.start)
                out[phase][direction] = moved / lasted if lasted else 0.0
        return out

    def transfer_sizes(self, direction: str) -> list[tuple[int, int]]:
        """(upper bound in bytes, how many tensors) by powers of two, of the tensors copied in one direction."""
        counts: dict[int, int] = {}
        for x in self.intervals:
            if x.resource == direction:
                for nbytes in x.sizes or (x.nbytes,):
                    bound = 1 << max(0, nbytes - 1).bit_length()
                    counts[bound] = counts.get(bound, 0) + 1
        return sorted(counts.items())

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        document: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("intervals", "predicted")
        }
        document["intervals"] = [asdict(x) for x in self.intervals]
        document["predicted"] = self.predicted.to_json() if self.predicted is not None else None
        return {
            "format": "memferry recording",
            "version": FORMAT_VERSION,
            **document,
            "device": dict(self.device),
        }

    @classmethod
    def from_json(cls, document: Any) -> Recording:
        """The inverse of `to_json`.

        Raises:
            FerryError: it is no recording, or of another version.
        """
        if not isinstance(document, Mapping) or document.get("format") != "memferry recording":
            raise FerryError(
                "expected a recording, found something else; was the trace written by `memferry train`?"
            )
        if document.get("version") != FORMAT_VERSION:
            raise FerryError(
                f"expected recording version {FORMAT_VERSION}, found {document.get('version')!r}; record it again"
            )
        try:
            rows = [{**x, "sizes": tuple(x.get("sizes", ()))} for x in document["intervals"]]
            predicted = document["predicted"]
            return cls(
                intervals=tuple(Interval(**row) for row in rows),
                steps=tuple(document["steps"]),
                phases=tuple((n, a, b) for n, a, b in document["phases"]),
                device_memory=tuple((t, n) for t, n in document["device_memory"]),
                host_memory=tuple((t, n) for t, n in document["host_memory"]),
                update=document["update"],
                device=document["device"],
                predicted=None if predicted is None else Timeline.from_json(predicted),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise FerryError(f"the recording is damaged ({type(e).__name__}: {e}); record it again") from e


def load(path: Path) -> Recording:
    """The recording inside a trace.json, or inside the folder that holds one.

    Raises:
        FerryError: there is none.
    """
    file = path / "trace.json" if path.is_dir() else path
    if not file.exists():
        raise FerryError(
            f"{file}: no such trace; expected the folder of a `memferry train` run, or engine.recorder.save(folder)"
        )
    try:
        document = read_json(file, "trace")
    except ValueError as e:
        raise FerryError(str(e)) from e
    if not isinstance(document, Mapping) or "memferry" not in document:
        raise FerryError(f"{file}: expected a trace written by memferry, found another one")
    return Recording.from_json(document["memferry"])


def trace_events(recording: Recording) -> dict[str, Any]:
    """The Chrome trace (ui.perfetto.dev opens it): measured and predicted as two processes, memory as counters, and the
    recording itself under "memferry"."""
    events: list[dict[str, Any]] = []

    def rows(pid: int, name: str, tracks: Sequence[str]) -> None:
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for tid, track in enumerate(tracks):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})

    tracks = sorted(
        {_track(x) for x in recording.intervals}, key=lambda t: (RESOURCES.index(t.split()[0]), t)
    )
    rows(1, "measured", tracks)
    for x in recording.intervals:
        event = _slice(1, tracks.index(_track(x)), x.what, x.name, x.start, x.end)
        if x.nbytes:
            event["args"] |= {"bytes": x.nbytes, "GB/s": x.nbytes / max(1e-9, x.end - x.start) / 1e9}
        events.append(event)
    for name, samples in (("device memory", recording.device_memory), ("host memory", recording.host_memory)):
        for t, nbytes in samples:
            events.append({"ph": "C", "name": name, "pid": 1, "ts": t * 1e6, "args": {"bytes": nbytes}})
    for t in recording.steps:
        events.append({"ph": "i", "s": "p", "name": "step()", "pid": 1, "tid": 0, "ts": t * 1e6})
    if recording.predicted is not None:
        rows(2, "predicted, from the first step()", RESOURCES)
        shift = recording.steps[0] if recording.steps else 0.0
        for tid, resource in enumerate(RESOURCES):
            for a, b, label in recording.predicted.intervals.get(resource, ()):
                what, _, name = label.partition(" ")
                events.append(_slice(2, tid, what, name, a + shift, b + shift))
    return {"traceEvents": events, "displayTimeUnit": "ms", "memferry": recording.to_json()}


def _track(x: Interval) -> str:
    return x.resource if x.resource in ("compute", "host") else f"{x.resource} ({x.what})"


def _slice(pid: int, tid: int, what: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": f"{what} {name}".rstrip(),
        "cat": what,
        "ts": start * 1e6,
        "dur": max(0.0, end - start) * 1e6,
        "args": {},
    }


def covered(spans: Iterable[tuple[float, float, str]]) -> float:
    """Seconds in at least one of the spans, which are sorted by start."""
    total, reach = 0.0, float("-inf")
    for start, end, _ in spans:
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def _exposed(spans: Mapping[str, Sequence[tuple[float, float, str]]], length: float) -> dict[str, float]:
    """Each moment from 0 to `length` given to one resource; the seconds of each."""
    order = ("compute", "h2d", "host", "d2h")
    edges: list[tuple[float, str, int]] = []
    for name, values in spans.items():
        for a, b, _ in values:
            edges += [(a, name, +1), (b, name, -1)]
    running = dict.fromkeys(RESOURCES, 0)
    out = dict.fromkeys(RESOURCES, 0.0)
    last = 0.0
    for at, name, change in [*sorted(edges), (length, "compute", 0)]:
        owner = next((r for r in order if running[r]), "compute")
        out[owner] += max(0.0, at - last)
        last = max(last, at)
        running[name] += change
    return out
