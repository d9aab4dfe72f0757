"""The emulated CANN runtime keeps the documented rules of copies, streams, events and notifies.

Every test body runs in a child process without torch (tests/ascend/runtime.py has the calls).
"""

from __future__ import annotations

import pytest
from children import child, in_child

# ruff: noqa: F821 (the bodies see the names of runtime.py)
# mypy: ignore-errors


@in_child()
def test_copies_go_where_their_kind_says() -> None:
    set_device(0)
    host, near, far = malloc_host(8192)[1], malloc(8192)[1], malloc(8192)[1]
    ctypes.memset(host, 7, 8192)
    assert copy(near, host, 8192, H2D) == 0
    assert copy(far, near, 8192, D2D) == 0
    assert device_bytes(far, 8192) == b"\7" * 8192
    assert copy(near, host, 8192, DEFAULT) == 0
    assert copy(host, near, 8192, H2D) == PARAMETER
    assert copy(near, host, 8192, D2H) == PARAMETER
    assert copy(near, host, 8192, D2D) == PARAMETER
    assert copy(near, host, 8192, H2H) == PARAMETER
    assert copy(near, host, 8192, H2D, room=4096) == PARAMETER
    assert copy(near + 4096, host, 8192, H2D) == PARAMETER
    assert copy(near, 0, 16, H2D) == PARAMETER
    assert fill(near, 1, 16) == 0
    assert device_bytes(near, 17) == b"\1" * 16 + b"\7"


@in_child()
def test_pinned_copies_are_asynchronous() -> None:
    set_device(0)
    stream, event = new_stream(), new_event()
    host, memory = malloc_host(4096)[1], malloc(4096)[1]
    ctypes.memset(host, 1, 4096)
    hold(stream, True)
    assert copy_async(memory, host, 4096, H2D, stream) == 0
    assert record(event, stream) == 0
    assert not reached(event)
    assert not idle(stream)
    assert device_bytes(memory, 1) == b"\xff"
    ctypes.memset(host, 2, 4096)  # the copy has not read yet: this is what arrives
    hold(stream, False)
    assert synchronize(stream) == 0
    assert reached(event)
    assert idle(stream)
    assert device_bytes(memory, 4096) == b"\2" * 4096


@in_child()
def test_pageable_copies_block() -> None:
    import threading

    set_device(0)
    stream, memory, source = new_stream(), malloc(4096)[1], pages(4096)
    ctypes.memset(source, 3, 4096)
    hold(stream, True)
    returned = threading.Event()

    def run() -> None:
        set_device(0)
        assert copy_async(memory, source, 4096, H2D, stream) == 0
        returned.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert not returned.wait(0.05)
    hold(stream, False)
    thread.join()
    assert returned.is_set()
    assert device_bytes(memory, 1) == b"\3"
    assert copy_async(memory, source, 4096, H2D, stream) == 0
    assert idle(stream)  # nothing was left to do when the call returned


@in_child()
def test_registering_makes_copies_asynchronous() -> None:
    set_device(0)
    stream, memory, source = new_stream(), malloc(4096)[1], pages(4096)
    assert register(source, 4096, PINNED) == 0
    assert device_pointer(source)[0] == PARAMETER  # pinned, not mapped
    hold(stream, True)
    assert copy_async(memory, source, 4096, H2D, stream) == 0
    assert not idle(stream)
    hold(stream, False)
    assert synchronize(stream) == 0


@in_child()
def test_events_order_streams() -> None:
    set_device(0)
    first, second, event = new_stream(), new_stream(), new_event()
    host, out, memory = malloc_host(4096)[1], malloc_host(4096)[1], malloc(4096)[1]
    ctypes.memset(host, 5, 4096)
    hold(first, True)
    assert copy_async(memory, host, 4096, H2D, first) == 0
    assert record(event, first) == 0
    assert wait(second, event) == 0
    assert copy_async(out, memory, 4096, D2H, second) == 0
    assert not idle(second)
    hold(first, False)
    assert synchronize(second) == 0
    assert host_bytes(out, 4096) == b"\5" * 4096
    assert acl.aclrtSynchronizeEvent(c_void_p(event)) == 0
    later = new_event()
    assert elapsed(event, later)[0] == 107006  # never recorded
    assert record(later, second) == 0
    assert synchronize(second) == 0
    error, milliseconds = elapsed(event, later)
    assert error == 0
    assert milliseconds >= 0


@in_child()
def test_a_stream_belongs_to_its_device() -> None:
    set_device(0)
    stream, host, memory = new_stream(), malloc_host(4096)[1], malloc(4096)[1]
    set_device(1)
    assert copy_async(memory, host, 4096, H2D, stream) == OTHER_CONTEXT
    assert synchronize(stream) == OTHER_CONTEXT
    assert copy(memory, host, 4096, H2D) == PARAMETER  # memory of device 0
    assert synchronize(12345) == PARAMETER


@in_child()
def test_memory_freed_under_a_copy_is_found() -> None:
    set_device(0)
    stream, host, memory = new_stream(), malloc_host(4096)[1], malloc(4096)[1]
    hold(stream, True)
    assert copy_async(memory, host, 4096, H2D, stream) == 0
    assert free(memory) == 0
    hold(stream, False)
    assert synchronize(stream) == DRIVER


@pytest.mark.parametrize("seed", [1, 2])
def test_jitter_keeps_the_order_within_a_stream(seed: int) -> None:
    def body() -> None:
        set_device(0)
        streams = [new_stream() for _ in range(3)]
        memory = [malloc(4096)[1] for _ in streams]
        hosts = [[malloc_host(4096)[1] for _ in range(8)] for _ in streams]
        for i in range(8):
            for stream, to, host in zip(streams, memory, hosts, strict=True):
                ctypes.memset(host[i], i, 4096)
                assert copy_async(to, host[i], 4096, H2D, stream) == 0
        for stream, to in zip(streams, memory, strict=True):
            assert synchronize(stream) == 0
            assert device_bytes(to, 4096) == b"\x07" * 4096

    child(body, jitter=f"300:{seed}")


@in_child(delay="0:200000")
def test_a_delayed_stream_comes_last() -> None:
    set_device(0)
    slow, fast, memory = new_stream(), new_stream(), malloc(4096)[1]
    hosts = [malloc_host(4096)[1] for _ in range(2)]
    for value, (stream, host) in enumerate(zip((slow, fast), hosts, strict=True)):
        ctypes.memset(host, value, 4096)
        assert copy_async(memory, host, 4096, H2D, stream) == 0
    assert synchronize(fast) == 0
    assert device_bytes(memory, 1) == b"\1"
    assert synchronize(slow) == 0
    assert device_bytes(memory, 1) == b"\0"


@in_child()
def test_batched_copies_go_one_way() -> None:
    set_device(0)
    stream = new_stream()
    hosts = [malloc_host(4096)[1] for _ in range(3)]
    memory = [malloc(4096)[1] for _ in range(3)]
    for i, host in enumerate(hosts):
        ctypes.memset(host, i + 1, 4096)
    device, host_place = Location(0, 1), Location(0, 0)

    def batch(to, source, up: list[bool]) -> tuple[int, int]:
        count = len(to)
        attributes = (BatchAttribute * count)(
            *[BatchAttribute(device, host_place) if u else BatchAttribute(host_place, device) for u in up]
        )
        failed = c_size_t()
        error = acl.aclrtMemcpyBatchAsync(
            (c_void_p * count)(*to),
            (c_size_t * count)(*[4096] * count),
            (c_void_p * count)(*source),
            (c_size_t * count)(*[4096] * count),
            c_size_t(count),
            attributes,
            (c_size_t * count)(*range(count)),
            c_size_t(count),
            byref(failed),
            c_void_p(stream),
        )
        return error, failed.value

    assert batch(memory, hosts, [True] * 3) == (0, 2**64 - 1)
    assert synchronize(stream) == 0
    assert [device_bytes(m, 1)[0] for m in memory] == [1, 2, 3]
    assert batch([memory[0], hosts[1]], [hosts[0], memory[1]], [True, False]) == (PARAMETER, 1)


@in_child(devices=2)
def test_a_stream_waits_for_a_notify_that_is_recorded_later() -> None:
    """Once: waiting clears it. It belongs to its device, and is not destroyed under a waiting stream."""
    set_device(1)
    other = new_stream()
    set_device(0)
    waiting, recording, memory, host = new_stream(), new_stream(), malloc(4096)[1], malloc_host(4096)[1]
    notify = c_void_p()
    assert acl.aclrtCreateNotify(byref(notify), ctypes.c_uint64(0)) == 0
    for value in (1, 2):
        ctypes.memset(host, value, 4096)
        assert acl.aclrtWaitAndResetNotify(notify, c_void_p(waiting), ctypes.c_uint32(0)) == 0
        assert copy_async(memory, host, 4096, H2D, waiting) == 0
        assert acl.aclrtDestroyNotify(notify) == PARAMETER
        assert synchronize(recording) == 0
        assert device_bytes(memory, 1)[0] != value
        assert acl.aclrtRecordNotify(notify, c_void_p(recording)) == 0
        assert synchronize(waiting) == 0
        assert device_bytes(memory, 1)[0] == value
    set_device(1)
    assert acl.aclrtRecordNotify(notify, c_void_p(other)) == PARAMETER
    set_device(0)
    assert acl.aclrtWaitAndResetNotify(notify, c_void_p(waiting), ctypes.c_uint32(5)) == PARAMETER
    assert acl.aclrtDestroyNotify(notify) == 0
    assert acl.aclrtRecordNotify(notify, c_void_p(recording)) == PARAMETER
