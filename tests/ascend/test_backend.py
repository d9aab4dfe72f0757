"""The Ascend backend's contract on emulated NPUs: mapped memory by each route, queues, memory, and what it refuses."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from memferry_ascend import runtime
from memferry_ascend.backends.acl import ROUTES
from memferry_ascend.backends.ascend import AscendBackend
from memferry_ascend.backends.base import DeviceOutOfMemory, HostSlab
from memferry_ascend.errors import FerryError

EMULATED = {"devices": 2}
MIB = 1 << 20


@pytest.fixture(params=ROUTES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AscendBackend:
    """The backend with its memory mapped by each of the routes; "registered" and "locked" have two addresses."""
    monkeypatch.setenv("MEMFERRY_ASCEND_ROUTE", request.param)
    made = runtime.init(backend="ascend").backend
    assert isinstance(made, AscendBackend)
    assert made.route == request.param
    return made


@pytest.fixture
def slab(backend: AscendBackend) -> Iterator[HostSlab]:
    made = backend.alloc_host(MIB + 4, mapped=True)
    yield made
    if made.device is not None:
        backend.free_host(made)


def hold(stream: torch.npu.Stream | int, on: bool) -> None:
    """While a stream is held it starts no task. A stream's handle does as well as the stream."""
    library = ctypes.CDLL("libascendcl.so")
    handle = stream if isinstance(stream, int) else stream.npu_stream
    assert library.emuHoldStream(ctypes.c_void_p(handle), ctypes.c_int(on)) == 0


def test_both_faces_are_the_same_bytes(backend: AscendBackend, slab: HostSlab) -> None:
    assert slab.device is not None
    assert slab.host.numel() == slab.device.numel() == MIB + 4
    assert not slab.host.any()
    assert slab.host.data_ptr() % 4096 == 0
    assert slab.device.data_ptr() % 512 == 0
    assert (slab.host.data_ptr() == slab.device.data_ptr()) == (backend.route == "unified")
    host, device = slab.host.view(torch.float32), slab.device.view(torch.float32)
    host.copy_(torch.arange(host.numel()))
    assert torch.equal((device + 1).cpu(), host + 1)
    device.mul_(2)
    backend.compute.synchronize()
    assert torch.equal(host, torch.arange(host.numel()) * 2.0)
    assert backend.coherent


def test_copies_take_the_host_face_and_do_not_block(backend: AscendBackend, slab: HostSlab) -> None:
    upload, download = backend.stream("upload"), backend.stream("download")
    buffer = backend.alloc_device(MIB)
    assert buffer.data_ptr() % 512 == 0
    slab.host[:MIB].fill_(7)
    backend.synchronize()
    there, back = backend.event(), backend.event()
    hold(upload.stream, True)
    try:
        upload.copy(buffer, slab.host[:MIB])
        upload.record(there)
        assert not there.query()
        download.wait(there)
        other = backend.alloc_host(MIB, mapped=True)
        download.copy(other.host, buffer)
        download.record(back)
        assert not back.query()
        assert not other.host.any()
    finally:
        hold(upload.stream, False)
    back.synchronize()
    assert there.query()
    assert other.host.eq(7).all()
    backend.free_host(other)


def test_copies_follow_the_compute_stream_and_it_follows_them(backend: AscendBackend, slab: HostSlab) -> None:
    upload = backend.stream("upload")
    buffer = backend.alloc_device(MIB)
    ready, done = backend.event(), backend.event()
    current = torch.npu.current_stream()
    slab.host[:MIB].fill_(1)
    backend.synchronize()
    hold(current, True)
    try:
        buffer.fill_(9)
        backend.compute.record(ready)
        upload.wait(ready)
        upload.copy(buffer, slab.host[:MIB])
        upload.record(done)
        assert not done.query()
        backend.compute.wait(done)
        total = buffer.sum()
    finally:
        hold(current, False)
    assert int(total) == MIB


def test_threads_that_wait_for_the_task_queue_let_others_run(backend: AscendBackend) -> None:
    """The queue stands still when a copy of pageable memory waits for its stream, as it does behind a collective that waits
    for a rank that is gone. A thread that then waits with the interpreter lock keeps everybody from noticing."""
    reached = backend.event()

    def copy() -> None:
        torch.ones(4).to(backend.device, non_blocking=True)

    def wait() -> None:
        assert not reached.query() or released.is_set()
        reached.synchronize()
        assert released.is_set()

    def start(call: Callable[[], None]) -> Future[None]:
        begun = threading.Event()

        def run() -> None:
            backend.bind_thread()
            begun.set()
            call()

        future = threads.submit(run)
        begun.wait()
        return future

    released = threading.Event()
    handle = int(torch.npu.current_stream().npu_stream)
    faulthandler.dump_traceback_later(60, exit=True)  # nothing else ends a process that stands still
    with ThreadPoolExecutor(8) as threads:
        hold(handle, True)
        try:
            backend.compute.record(reached)
            futures = [start(call) for call in [copy] * 4 + [wait] * 4]
        finally:
            released.set()
            hold(handle, False)
        for future in futures:
            future.result()
    faulthandler.cancel_dump_traceback_later()
    assert reached.query()


def test_gradients_leave_behind_the_kernels_that_made_them(backend: AscendBackend, slab: HostSlab) -> None:
    current = torch.npu.current_stream()
    ready, done = backend.event(), backend.event()
    grad = torch.zeros(1024, device=backend.device)
    backend.synchronize()
    hold(current, True)
    try:
        grad.fill_(3.0)
        pairs = [(slab.host[:4096].view(torch.float32), grad)]
        backend.stream("download").copy_behind(backend.compute, pairs, ready, done)
        assert not done.query()
    finally:
        hold(current, False)
    done.synchronize()
    assert slab.host[:4096].view(torch.float32).eq(3).all()


def test_memory_that_is_not_registered_is_refused(backend: AscendBackend) -> None:
    buffer = backend.alloc_device(4096)
    plain = backend.alloc_host(4096, mapped=False)
    for host in (torch.zeros(4096, dtype=torch.uint8), plain.host):
        with pytest.raises(FerryError, match="not in registered memory"):
            backend.stream("upload").copy(buffer, host)
        with pytest.raises(FerryError, match="not in registered memory"):
            backend.stream("upload").copy(host, buffer)
    assert plain.device is None
    backend.free_host(plain)


def test_a_mapped_address_is_no_copy_operand(backend: AscendBackend, slab: HostSlab) -> None:
    assert slab.device is not None
    buffer = backend.alloc_device(4096)
    copy = backend.stream("upload").copy
    if backend.route == "unified":
        copy(buffer, slab.device[:4096])
        backend.synchronize()
        return
    with pytest.raises(FerryError, match="host face"):
        copy(buffer, slab.device[:4096])
    with pytest.raises(RuntimeError):  # what CANN says to it
        slab.device[:4096].cpu()


def test_copies_of_unequal_size_are_refused(backend: AscendBackend, slab: HostSlab) -> None:
    with pytest.raises(FerryError, match="equal size, got 4096 <- 512 bytes"):
        backend.stream("upload").copy(backend.alloc_device(4096), slab.host[:512])


def test_registered_memory_is_registered_once_and_freed_in_order(
    backend: AscendBackend, slab: HostSlab
) -> None:
    block = slab.handle
    with pytest.raises(FerryError, match=r"507910 \(registered already\)"):
        backend.acl._register(block.address, block.nbytes, "twice")
    if block.base:
        with pytest.raises(FerryError, match="107000"):
            backend.acl.call("aclrtFreeHost", ctypes.c_void_p(block.base))
    backend.free_host(slab)
    with pytest.raises(FerryError, match=r"507911 \(not registered\)"):
        backend.acl.free(block)


def test_freed_memory_is_not_copied_any_more(backend: AscendBackend) -> None:
    made = backend.alloc_host(4096, mapped=True)
    host = made.host
    backend.free_host(made)
    with pytest.raises(FerryError, match="not in registered memory"):
        backend.stream("upload").copy(backend.alloc_device(4096), host)


def test_a_failed_registration_gives_everything_back(backend: AscendBackend, slab: HostSlab) -> None:
    """Many slabs come and go: nothing stays registered under the next one's address."""
    for _ in range(8):
        made = backend.alloc_host(64 << 10, mapped=True)
        backend.free_host(made)
    with pytest.raises(FerryError, match="host memory"):
        backend.alloc_host(1 << 60, mapped=True)


def test_device_memory_is_counted_and_limited(backend: AscendBackend) -> None:
    before = backend.memory_stats()
    buffer = backend.alloc_device(8 * MIB)
    after = backend.memory_stats()
    assert 8 * MIB == buffer.numel() <= after.allocated - before.allocated <= 8 * MIB + 4096
    assert after.limit == 8 << 30
    assert after.peak >= after.allocated
    assert backend.allocated_bytes() == after.allocated
    with pytest.raises(DeviceOutOfMemory, match=r"asked for 16\.00 GiB"):
        backend.alloc_device(16 << 30)
    del buffer
    backend.reset_peak()
    assert backend.memory_stats().peak < after.peak


def test_threads_are_bound_to_the_device(backend: AscendBackend, slab: HostSlab) -> None:
    buffer = backend.alloc_device(4096)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            backend.bind_thread()
            backend.stream("upload").copy(buffer, slab.host[:4096])
            done = backend.event()
            backend.stream("upload").record(done)
            done.synchronize()
        except BaseException as error:
            errors.append(error)

    slab.host.fill_(5)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert buffer.eq(5).all().item()


def test_timed_events(backend: AscendBackend) -> None:
    first, last = backend.event(timing=True), backend.event(timing=True)
    backend.compute.record(first)
    torch.ones(64, 64, device=backend.device) @ torch.ones(64, 64, device=backend.device)
    backend.compute.record(last)
    last.synchronize()
    assert first.elapsed(last) >= 0


def test_peers_are_opened_both_ways(backend: AscendBackend) -> None:
    assert backend.peers() == (1,)
    assert backend.open_peer(1)
    assert not backend.open_peer(2)
    library, status = ctypes.CDLL("libascendcl.so"), ctypes.c_int32()
    for here, there in ((0, 1), (1, 0)):
        assert library.aclrtDevicePeerAccessStatus(here, there, ctypes.byref(status)) == 0
        assert status.value == 1
    assert torch.npu.current_device() == 0


def test_what_it_can_do(backend: AscendBackend) -> None:
    can = backend.capabilities()
    assert {"Embedding", "LayerNorm", "Linear"} <= can.dha_kinds
    assert can.peers == 1
    assert f"host memory: route {backend.route}" in can.notes
    assert any("CANN 8.5.0" in note for note in can.notes)


def test_a_second_device_is_a_rank_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    made = runtime.init(backend="ascend").backend
    assert str(made.device) == "npu:1"
    assert made.alloc_device(512).device.index == 1
    torch.npu.set_device(0)


def test_a_rank_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(FerryError, match="rank wants device 2, the machine has 2"):
        runtime.init(backend="ascend")


def test_unknown_routes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFERRY_ASCEND_ROUTE", "fast")
    with pytest.raises(FerryError, match="expected one of unified, registered, locked"):
        runtime.init(backend="ascend")
