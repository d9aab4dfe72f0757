"""Streams and events of the Ascend backend: torch_npu's own, so that its task queue keeps their order.

The task queue raises a failed task's error in whichever call comes next, on any thread. So every call here is inside a
`naming` block, and one fault has one face.

A thread that waits until the queue is empty waits for the device where a copy's operand is pageable host memory. Asking for
a stream's handle waits as well, and keeps the interpreter lock while another thread is at it: every thread would stand
still. So events never ask for it: torch_npu itself knows whether a recording is still in the queue, and waits for it without
the lock (spinning until it has been handed over). Calls past the queue (relays, gates) still ask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ctypes import byref, c_int32, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import torch

from memferry_ascend.backends.acl import describe
from memferry_ascend.backends.base import Compute, Event, NotSupported, QueuedStream, Stream
from memferry_ascend.errors import FerryError

if TYPE_CHECKING:
    from memferry_ascend.backends.ascend import AscendBackend

_CODE = re.compile(r"(?<!\d)(?:107|207|507)\d{3}(?!\d)")
_ADVICE = ("Since the operator is called", "Note: ASCEND_LAUNCH_BLOCKING")


def _named(what: str, error: RuntimeError) -> FerryError:
    """A torch_npu error in one sentence; it prints advice, the C++ stack and CANN's log behind its first lines. CANN's code
    is named wherever it stands."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join([line for line in lines if not line.startswith(_ADVICE)][:2])[:300]
    code = _CODE.search(text)
    if code is not None and code[0] not in said:
        said += f" [{describe(int(code[0]))}]"
    return FerryError(f"{what} failed: {said}")


class naming:
    """What torch_npu raises in the block becomes a FerryError about `what`."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, (FerryError, torch.OutOfMemoryError)):
            raise _named(self._what, error) from error


class AscendEvent(Event):
    """torch_npu's event. It has a runtime handle only once it was recorded."""

    def __init__(self, timing: bool, native: bool) -> None:
        with naming("making an event on the NPU"):
            self.event = torch.npu.Event(enable_timing=timing)
            if native:
                self.event.record()
                self.handle = int(self.event.npu_event)

    def record(self, stream: Any) -> None:
        """Record on a torch_npu stream."""
        with naming("recording an event on the NPU"):
            self.event.record(stream)

    def synchronize(self) -> None:
        with naming("work before an event on the NPU"):
            self.event.synchronize()

    def query(self) -> bool:
        with naming("work before an event on the NPU"):
            return bool(self.event.query())  # False while the latest recording is in the queue

    def elapsed(self, later: Event) -> float:
        assert isinstance(later, AscendEvent)
        with naming("work between two events on the NPU"):
            return float(self.event.elapsed_time(later.event)) / 1e3


class AscendStream(QueuedStream):
    def __init__(self, backend: AscendBackend, name: str) -> None:
        self.name = name
        self._backend = backend
        with naming(f"making stream {name!r}"):
            self.stream = torch.npu.Stream(device=backend.device)
            self.handle = int(self.stream.npu_stream)

    def copy_direct(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._backend._at(f"copy:{self.name}")
        with naming(f"a copy on stream {self.name!r}"), torch.npu.stream(self.stream), torch.no_grad():
            for dst, src in pairs:
                if dst.nbytes != src.nbytes or not (dst.is_contiguous() and src.is_contiguous()):
                    raise FerryError(
                        f"copy: expected contiguous tensors of equal size, got {dst.nbytes} <- {src.nbytes} bytes"
                    )
                self._backend.check_operand(dst)
                self._backend.check_operand(src)
                dst.copy_(src, non_blocking=True)

    def record(self, event: Event) -> None:
        assert isinstance(event, AscendEvent)
        event.record(self.stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, AscendEvent)
        with naming(f"work before a wait on stream {self.name!r}"):
            self.stream.wait_event(event.event)

    def flush(self) -> None:
        """Have the task queue hand over what it holds: calls past it come behind that."""
        with naming(f"work on stream {self.name!r}"):
            _ = self.stream.npu_stream

    def synchronize(self) -> None:
        self._backend.relays.check()
        with naming(f"stream {self.name!r}"):
            self.stream.synchronize()


class AscendCompute(Compute):
    """torch_npu's current stream of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, event: Event) -> None:
        assert isinstance(event, AscendEvent)
        event.record(torch.npu.current_stream(self._device))

    def wait(self, event: Event) -> None:
        assert isinstance(event, AscendEvent)
        with naming("work before a wait on the compute stream"):
            torch.npu.current_stream(self._device).wait_event(event.event)

    def synchronize(self) -> None:
        with naming("the compute stream"):
            torch.npu.current_stream(self._device).synchronize()


class Gate:
    """Keeps streams from starting what is queued behind it until it is opened: they wait for a notify, the one thing that
    CANN lets a stream wait for before it was recorded (aclrtWaitAndResetNotify; an event that nobody has recorded yet holds
    nobody up). A stream of its own records it. Nothing spins."""

    def __init__(self, backend: AscendBackend) -> None:
        if not backend.acl.has("aclrtCreateNotify", "aclrtWaitAndResetNotify", "aclrtRecordNotify"):
            raise NotSupported(
                "this CANN has no notifies (aclrtCreateNotify), so that streams cannot be held"
            )
        self._acl = backend.acl
        self._notify, self._stream = c_void_p(), c_void_p()
        self._acl.bind()
        self._acl.call("aclrtCreateNotify", byref(self._notify), c_uint64(0), doing="a gate for streams")
        self._acl.call("aclrtCreateStream", byref(self._stream), doing="a gate for streams")
        self._shut = AscendEvent(False, native=False)

    def shut(self, streams: Sequence[Stream]) -> None:
        first, *others = streams
        assert isinstance(first, AscendStream)
        first.flush()  # the wait goes past torch_npu's queue: behind what is in it
        self._acl.bind()
        for_ever = c_uint32(0)
        self._acl.call(
            "aclrtWaitAndResetNotify", self._notify, c_void_p(first.handle), for_ever, doing="holding streams"
        )
        first.record(self._shut)
        for stream in others:
            stream.wait(self._shut)

    def open(self) -> None:
        self._acl.bind()
        self._acl.call("aclrtRecordNotify", self._notify, self._stream, doing="releasing held streams")

    def close(self) -> None:
        """Give both back; a device that is lost takes them with it."""
        if self._acl.code("aclrtSetDevice", c_int32(self._acl.device)) == 0:
            self._acl.code("aclrtDestroyStream", self._stream)
            self._acl.code("aclrtDestroyNotify", self._notify)
