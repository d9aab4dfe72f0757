"""What really ran when: on every stream, on the worker and in every layer, at no cost while off.

`start()` puts hooks and wrappers in place and `stop()` takes them away, so a training step outside pays one attribute
test per host update. While recording, a copy is put between two timing events of its own stream, a layer's passes
between marks on the compute stream, and host work between two readings of the clock. Nothing waits for any of it:
events are read when `stop()` has let everything finish.

Start and stop between steps; two steps make a period.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from memferry_ascend import files
from memferry_ascend.backends.base import Backend, Event, Stream
from memferry_ascend.errors import FerryError
from memferry_ascend.jobs import PythonJobs, Upload
from memferry_ascend.layers import Layer
from memferry_ascend.marks import NOBODY, Marks, ancestors, attribute
from memferry_ascend.nativejobs import NativeJobs
from memferry_ascend.planner.simulator import Timeline
from memferry_ascend.recording import Interval, Recording, trace_events
from memferry_ascend.windows import Hook
from memferry_ascend.worker import Priority

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine

_KINDS = ("update", "fold", "norm")  # as the native worker numbers them


@dataclass(frozen=True)
class _Copy:
    """One call of copy or copy_many: addresses tell the unit later."""

    stream: str
    begin: Event
    end: Event
    addresses: tuple[int, ...]
    sizes: tuple[int, ...]


class Recorder:
    """Collects what happens between `start()` and `stop()`; `attach` tells it whose engine it is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._local = threading.local()
        self.enabled = False
        self.recording: Recording | None = None
        """What the last `stop()` resolved."""
        self._origin = 0.0
        self._engine: weakref.ref[Engine] | None = None
        self._layers: Sequence[Layer] = ()
        self._host: list[Interval] = []
        self._copies: list[_Copy] = []
        self._memory: list[tuple[float, int]] = []
        self._wrapped: list[tuple[Any, str]] = []
        self._handles: list[RemovableHandle] = []
        self._marks: Marks | None = None
        self._jobs: Any = None

    def attach(self, engine: Engine, layers: Sequence[Layer]) -> None:
        """Record this engine; its layers are what compute is broken down by."""
        self._engine, self._layers = weakref.ref(engine), layers

    # -- on and off ------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Forget what was recorded and begin. Blocks until the device is idle, so that its clock and the host's have
        one origin.

        Raises:
            FerryError: the engine is closed.
        """
        self._off()
        engine = self._target()
        self._host, self._copies, self._memory = [], [], []
        self.recording = None
        self._backend.synchronize()
        self._start_event = self._backend.event(timing=True)
        self._backend.compute.record(self._start_event)
        self._start_event.synchronize()
        self._origin = time.perf_counter()
        self._marks = Marks(self._layers, self._backend, recording=True)
        self._marks.install()
        model = engine.model
        self._handles += [
            model.register_forward_pre_hook(Hook(lambda *_: self._mark("forward")), prepend=True),
            model.register_forward_hook(Hook(lambda *_: self._mark("loss"))),
            engine.optimizer.register_step_pre_hook(lambda *_: self._mark("step")),
        ]
        for name in ("upload", "reload", "download"):
            self._backend.stream(name)
        for stream in list(self._backend._streams.values()):
            self._wrap(stream, "copy", self._one_copy(stream))
            self._wrap(stream, "copy_many", self._many_copies(stream))
            # The family's own version may be one native call, into which no timing event fits.
            self._wrap(stream, "copy_behind", functools.partial(Stream.copy_behind, stream))
        self._jobs = jobs = engine._jobs
        if isinstance(jobs, NativeJobs):
            jobs.observe = self._uploading
            jobs.worker.record(True)
        else:
            assert isinstance(jobs, PythonJobs)
            self._wrap(jobs.worker, "submit", self._submitting(jobs.worker.submit))
            self._wrap(self._backend, "_at", self._passing(self._backend._at))
        self.enabled = True

    def stop(self) -> Recording:
        """End the recording: wait for what is in flight, then resolve it. Sets the plan's `measured_period` when two
        steps or more were recorded.

        Raises:
            FerryError: it was not started, or a host update failed meanwhile.
        """
        if not self.enabled:
            raise FerryError("recorder: expected start() before stop()")
        engine = self._target()
        try:
            engine.synchronize()
        finally:
            self._off()
        self.recording = self._resolve(engine)
        if len(self.recording.steps) > 1:
            engine.plan = replace(engine.plan, measured_period=self.recording.period)
        return self.recording

    def close(self) -> None:
        """Take everything away without resolving it. What `stop()` made stays."""
        self._off()
        self._engine, self._layers = None, ()

    def _off(self) -> None:
        self.enabled = False
        for target, name in self._wrapped:
            with contextlib.suppress(AttributeError):
                delattr(target, name)
        self._wrapped.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        jobs, self._jobs = self._jobs, None
        if isinstance(jobs, NativeJobs):
            jobs.observe = None
            self._host += [
                Interval(
                    "host", _KINDS[kind], str(slot % jobs.units), begin - self._origin, end - self._origin
                )
                for slot, kind, begin, end in jobs.worker.take_intervals()
            ]
            jobs.worker.record(False)
        if self._marks is not None:
            self._marks.remove()

    def _target(self) -> Engine:
        engine = self._engine() if self._engine is not None else None
        if engine is None or engine._closed:
            raise FerryError("recorder: the engine is closed")
        return engine

    def _wrap(self, target: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """An attribute of the object hides the method of its class until `_off` deletes it."""
        setattr(target, name, wrapper)
        self._wrapped.append((target, name))

    # -- what is recorded ------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def host(self, what: str, name: str, nbytes: int = 0) -> Iterator[None]:
        """Record the body's time on the host."""
        if not self.enabled:
            yield
            return
        start = time.perf_counter()
        yield
        self._add_host(what, name, start, nbytes)

    def _add_host(self, what: str, name: str, start: float, nbytes: int = 0) -> None:
        end = time.perf_counter()
        with self._lock:
            self._host.append(Interval("host", what, name, start - self._origin, end - self._origin, nbytes))

    def _mark(self, what: str) -> None:
        assert self._marks is not None
        self._marks.put(what)
        self._memory.append((time.perf_counter() - self._origin, _resident_bytes()))

    def _one_copy(self, stream: Stream) -> Callable[..., None]:
        plain = stream.copy

        def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
            self._copying(stream, [(dst, src)], lambda: plain(dst, src))

        return copy

    def _many_copies(self, stream: Stream) -> Callable[..., None]:
        plain = stream.copy_many

        def copy_many(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
            self._copying(stream, pairs, lambda: plain(pairs))

        return copy_many

    def _copying(
        self, stream: Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], run: Callable[[], None]
    ) -> None:
        if getattr(self._local, "copying", False) or not pairs:
            run()  # one call of a stream that is made of others
            return
        self._local.copying = True
        try:
            begin, end = self._backend.event(timing=True), self._backend.event(timing=True)
            stream.record(begin)
            run()
            stream.record(end)
        finally:
            self._local.copying = False
        sizes = tuple(dst.numel() * dst.element_size() for dst, _ in pairs)
        with self._lock:
            first = pairs[0]
            self._copies.append(
                _Copy(stream.name, begin, end, (first[0].data_ptr(), first[1].data_ptr()), sizes)
            )

    def _uploading(self, upload: Upload) -> tuple[int, int]:
        """An upload that native code will start: the events to put around it."""
        begin, end = self._backend.event(timing=True), self._backend.event(timing=True)
        addresses = (upload.dst.data_ptr(), upload.src.data_ptr())
        with self._lock:
            self._copies.append(_Copy(upload.stream.name, begin, end, addresses, (upload.src.nbytes,)))
        return begin.handle, end.handle

    def _submitting(self, plain: Callable[..., None]) -> Callable[..., None]:
        def submit(priority: int, job: Callable[[], None], *more: Any, **named: Any) -> None:
            plain(priority, self._fold(job) if priority == Priority.FOLD else job, *more, **named)

        return submit

    def _fold(self, job: Callable[[], None]) -> Callable[[], None]:
        def fold() -> None:
            self._local.began = None
            job()
            if self._local.began is not None and self.enabled:
                self._add_host("fold", "", self._local.began)

        return fold

    def _passing(self, plain: Callable[[str], None]) -> Callable[[str], None]:
        def at(point: str) -> None:
            plain(point)
            if point == "fold":  # the waiting is over, the work begins
                self._local.began = time.perf_counter()

        return at

    # -- making seconds of it --------------------------------------------------------------------------------------
    def _resolve(self, engine: Engine) -> Recording:
        names = {str(r.unit.index): r.unit.name for r in engine._residents}
        intervals = [
            replace(x, name="" if x.what == "norm" else names.get(x.name, x.name)) for x in self._host
        ]
        assert self._marks is not None
        regions = _regions(engine)
        starts = [start for start, _, _ in regions]
        for c in self._copies:
            direction = "d2h" if c.stream == "download" else "h2d"
            name = next((n for a in c.addresses if (n := _unit_at(regions, starts, a)) is not None), "")
            begin, end = self._start_event.elapsed(c.begin), self._start_event.elapsed(c.end)
            intervals.append(Interval(direction, c.stream, name, begin, end, sum(c.sizes), c.sizes))
        marks = [(m.what, m.layer, self._start_event.elapsed(m.event)) for m in self._marks.found]
        spent = attribute(marks, ancestors(self._layers))
        for layer, what, start, end in spent.spans:
            name = self._layers[layer].name if layer != NOBODY else ""
            if end > start:
                intervals.append(Interval("compute", what, name, start, end))
        intervals.sort(key=lambda x: (x.start, x.end))
        steps = tuple(t for what, _, t in marks if what == "step")
        device = tuple(
            (t, m.memory) for (_, _, t), m in zip(marks, self._marks.found, strict=True) if m.memory >= 0
        )
        return Recording(
            intervals=tuple(intervals),
            steps=steps,
            phases=tuple(_phases(marks, intervals)),
            device_memory=device,
            host_memory=tuple(self._memory),
            update=engine.config.update,
            device=self._backend.identity(),
            predicted=self._predicted(engine),
        )

    @staticmethod
    def _predicted(engine: Engine) -> Timeline | None:
        if engine.profile is None:
            return None
        from memferry_ascend.profile_plan import predict

        return predict(engine.profile, engine.plan, engine.config.update)

    # -- what users ask --------------------------------------------------------------------------------------------
    def timeline(self) -> Timeline:
        """The recorded steps in the simulator's terms, to compare with its prediction.

        Raises:
            FerryError: nothing, or fewer than two steps, was recorded.
        """
        return self._recorded().timeline()

    def save(self, folder: Path | str) -> list[str]:
        """Write trace.json (ui.perfetto.dev opens it) and, with matplotlib, timeline.png into `folder`, and profile.json
        where there is a profile. Ends a recording that is still on. Returns notes on what was not written and why."""
        folder = Path(folder)
        if self.enabled:
            self.stop()
        if self.recording is None:
            return ["no trace.json: nothing was recorded (engine.recorder.start(), some steps, stop())"]
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / "trace.json", trace_events(self.recording))
        engine = self._engine() if self._engine is not None else None
        if engine is not None and engine.profile is not None:
            engine.profile.save(folder / "profile.json")
        from memferry_ascend import report

        note = report.draw_timeline(self.recording, folder / "timeline.png")
        return [note] if note else []

    def _recorded(self) -> Recording:
        if self.enabled:
            return self.stop()
        if self.recording is None:
            raise FerryError("recorder: nothing was recorded; call start(), run some steps, then stop()")
        return self.recording


def _phases(
    marks: Sequence[tuple[str, int, float]], intervals: Sequence[Interval]
) -> Iterator[tuple[str, float, float]]:
    """Forward, backward and update phases from the marks of whole passes."""
    begun, loss = None, None
    steps = [t for what, _, t in marks if what == "step"]
    for place, (what, _, at) in enumerate(marks):
        if what in ("forward", "step"):
            if loss is not None:
                last = max(
                    (t for w, _, t in marks[:place] if w in ("begin", "end") and t >= loss), default=loss
                )
                yield ("backward", loss, last)
            begun, loss = (at if what == "forward" else None), None
        elif what == "loss" and begun is not None:
            yield ("forward", begun, at)
            loss = at
    for i, at in enumerate(steps):
        until = steps[i + 1] if i + 1 < len(steps) else float("inf")
        ends = [
            x.end for x in intervals if x.resource == "host" and x.what == "update" and at <= x.start < until
        ]
        if ends:
            yield ("update", at, max(ends))


def _regions(engine: Engine) -> list[tuple[int, int, str]]:
    """Host address ranges of parameters and gradients, by unit."""
    found = []
    for r in engine._residents:
        if r.memory.on_device:  # nothing of it is in the arena, no copy touches it
            continue
        # With several ranks a unit that is gathered on the device has only this rank's chunk in the arena.
        for region in (getattr(r.memory, "param", r.shard.param), r.shard.grad):
            if region is not None:
                start = region.host.data_ptr()
                found.append((start, start + region.nbytes, r.unit.name))
    return sorted(found)


def _unit_at(regions: Sequence[tuple[int, int, str]], starts: Sequence[int], address: int) -> str | None:
    at = bisect.bisect(starts, address) - 1
    if at >= 0 and address < regions[at][1]:
        return regions[at][2]
    return None


def _resident_bytes() -> int:
    """Memory of this process in RAM (bytes), 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return 0
