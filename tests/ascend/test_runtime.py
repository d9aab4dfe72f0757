"""The emulated CANN runtime keeps the documented rules: each broken rule gives the documented error.

Every test body runs in a child process without torch (tests/ascend/runtime.py has the calls).
"""

from __future__ import annotations

import inspect
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import emulator
import pytest

HERE = Path(__file__).parent


def child(
    body: Callable[[], None], check: bool = True, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run the source of a function's body in an emulated process."""
    lines = inspect.getsource(body).splitlines()
    start = next(i for i, line in enumerate(lines) if line.rstrip().endswith("-> None:"))
    source = textwrap.dedent("\n".join(lines[start + 1 :]))
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\nfrom runtime import *\n{source}"
    return emulator.run(["-c", script], check=check, timeout=60.0, **settings)


def in_child(**settings: object) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a test of a function by running its body in a child with these settings."""

    def decorate(body: Callable[[], None]) -> Callable[[], None]:
        def test() -> None:
            child(body, **settings)

        test.__doc__ = body.__doc__
        return test

    return decorate


# ruff: noqa: F821 (the bodies see the names of runtime.py)
# mypy: ignore-errors


@in_child(devices=2, hbm=16 << 20)
def test_memory_is_limited_per_device() -> None:
    assert set_device(0) == 0
    assert memory() == (16 * MIB, 16 * MIB)
    error, first = malloc(10 * MIB)
    assert error == 0
    assert memory() == (6 * MIB, 16 * MIB)
    assert malloc(7 * MIB)[0] == OUT_OF_MEMORY
    set_device(1)
    assert malloc(10 * MIB)[0] == 0
    assert memory() == (6 * MIB, 16 * MIB)
    set_device(0)
    assert free(first) == 0
    assert memory() == (16 * MIB, 16 * MIB)
    assert free(first) == PARAMETER


@in_child()
def test_a_thread_without_device_has_no_context() -> None:
    assert malloc(4096)[0] == NO_CONTEXT
    assert malloc_host(4096)[0] == NO_CONTEXT
    assert set_device(2) == DEVICE
    assert set_device(-1) == DEVICE
    assert set_device(1) == 0


@in_child()
def test_fresh_device_memory_is_poisoned() -> None:
    set_device(0)
    assert device_bytes(malloc(4096)[1], 4) == b"\xff" * 4


def test_host_access_to_device_memory_faults() -> None:
    def stray() -> None:
        set_device(0)
        memory = malloc(4096)[1]
        print("allocated", flush=True)
        host_bytes(memory, 1)
        print("read", flush=True)

    done = child(stray, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "allocated\n"


def test_host_access_to_a_mapped_device_pointer_faults() -> None:
    def stray() -> None:
        set_device(0)
        host = pages(4096)
        assert register(host, 4096) == 0
        error, mapped = device_pointer(host)
        assert error == 0
        assert mapped != host
        host_bytes(host, 1)
        print("host address", flush=True)
        host_bytes(mapped, 1)

    done = child(stray, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "host address\n"


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


@in_child()
def test_registration_rules() -> None:
    set_device(0)
    host = pages(16384)
    assert register(host + 64, 4096) == PARAMETER  # 4 KiB alignment
    assert register(host, 4096, 0) == PARAMETER
    assert register(host, 4096, 0x8) == PARAMETER
    assert device_pointer(host)[0] == PARAMETER
    assert register(host, 8192) == 0
    assert register(host, 8192) == ALREADY_REGISTERED
    assert register(host + 4096, 8192) == ALREADY_REGISTERED
    assert device_pointer(host + 4096)[0] == PARAMETER
    assert unregister(host + 4096) == NOT_REGISTERED
    assert unregister(host) == 0
    assert unregister(host) == NOT_REGISTERED
    assert register(malloc(4096)[1], 4096) == PARAMETER
    mapped = c_void_p()
    assert acl.aclrtHostRegister(c_void_p(host), c_uint64(4096), c_int(0), byref(mapped)) == 0
    assert mapped.value == device_pointer(host)[1]


@in_child()
def test_host_allocations_promise_64_bytes() -> None:
    set_device(0)
    host = malloc_host(8192)[1]
    assert host % 64 == 0
    assert register(host, 4096) == PARAMETER  # not page aligned
    page = (host + 4095) // 4096 * 4096
    assert register(page, 4096) == 0
    assert free_host(host) == PARAMETER  # still registered
    assert unregister(page) == 0
    assert free_host(host) == 0
    assert free_host(host) == PARAMETER


@in_child()
def test_a_mapped_device_pointer_is_no_copy_operand() -> None:
    set_device(0)
    host, memory = pages(4096), malloc(4096)[1]
    assert register(host, 4096) == 0
    mapped = device_pointer(host)[1]
    for kind in (H2D, D2D, DEFAULT):
        assert copy(memory, mapped, 4096, kind) == PARAMETER
    for kind in (D2H, D2D, DEFAULT):
        assert copy(mapped, memory, 4096, kind) == PARAMETER
    assert copy(memory, host, 4096, H2D) == 0


@in_child()
def test_va_flag_gives_one_address() -> None:
    set_device(0)
    error, host = malloc_host(4096, unified=True)
    assert error == 0
    memory = malloc(4096)[1]
    assert register(host, 4096) == 0
    assert device_pointer(host) == (0, host)
    ctypes.memset(host, 9, 4096)
    for kind in (H2D, D2D, DEFAULT):
        assert copy(memory, host, 4096, kind) == 0
    assert device_bytes(memory, 1) == b"\x09"
    plain = malloc_host(8192, unified=False)[1]
    page = (plain + 4095) // 4096 * 4096
    assert register(page, 4096) == 0
    assert device_pointer(page)[1] != page


@in_child(unified=False)
def test_a_driver_without_va_flag() -> None:
    set_device(0)
    assert malloc_host(4096, unified=True)[0] == UNSUPPORTED
    assert malloc_host(4096, unified=False)[0] == 0


@in_child()
def test_one_buffer_mapped_on_two_devices() -> None:
    host = pages(4096)
    set_device(0)
    assert register(host, 4096) == 0
    set_device(1)
    assert unregister(host) == NOT_REGISTERED  # registration belongs to the device
    assert device_pointer(host)[0] == PARAMETER
    assert register(host, 4096) == 0
    there = device_pointer(host)[1]
    set_device(0)
    assert device_pointer(host)[1] != there


@in_child(map_once=True)
def test_a_driver_that_maps_on_one_device_only() -> None:
    host = pages(4096)
    set_device(0)
    assert register(host, 4096) == 0
    set_device(1)
    assert register(host, 4096) == DRIVER


@in_child(old_kernel=True)
def test_an_old_kernel_registers_runtime_memory_only() -> None:
    set_device(0)
    assert register(pages(4096), 4096) == DRIVER
    assert register(malloc_host(4096, unified=True)[1], 4096) == 0


@in_child(devices=3, peers="0-1")
def test_peer_access_is_one_directional() -> None:
    def can(device: int, peer: int) -> int:
        out = c_int32()
        assert acl.aclrtDeviceCanAccessPeer(byref(out), c_int32(device), c_int32(peer)) == 0
        return out.value

    assert [can(0, 1), can(1, 0), can(0, 0), can(0, 2)] == [1, 1, 0, 0]
    set_device(1)
    there = malloc(4096)[1]
    fill(there, 4, 4096)
    set_device(0)
    here = malloc(4096)[1]
    assert copy(here, there, 4096, D2D) == PARAMETER
    set_device(1)
    assert acl.aclrtDeviceEnablePeerAccess(c_int32(0), c_uint32(0)) == 0  # the other direction
    set_device(0)
    assert copy(here, there, 4096, D2D) == PARAMETER
    assert acl.aclrtDeviceEnablePeerAccess(c_int32(1), c_uint32(1)) == PARAMETER
    assert acl.aclrtDeviceEnablePeerAccess(c_int32(2), c_uint32(0)) == UNSUPPORTED
    assert acl.aclrtDeviceEnablePeerAccess(c_int32(9), c_uint32(0)) == DEVICE
    assert acl.aclrtDeviceEnablePeerAccess(c_int32(1), c_uint32(0)) == 0
    assert copy(here, there, 4096, D2D) == 0
    assert device_bytes(here, 1) == b"\4"
    assert acl.aclrtDeviceDisablePeerAccess(c_int32(1)) == 0
    assert copy(here, there, 4096, D2D) == PARAMETER
    topology = c_uint64()
    assert acl.aclrtGetDevicesTopo(c_uint32(0), c_uint32(1), byref(topology)) == 0
    assert topology.value == 0x20


def test_ipc_shares_memory_between_processes() -> None:
    """The exporter names the importer; the importer sees and writes the same bytes; importers close first."""

    def exporter() -> None:
        import subprocess
        import sys

        set_device(0)
        memory = malloc(8192)[1]
        fill(memory, 6, 8192)
        error, key = export_key(memory + 4096, 4096)
        assert error == 0
        assert allow_import(b"emu:nonsense", 1) == PARAMETER
        code = (
            "import os, sys; sys.path.insert(0, sys.argv[1])\n"
            "from runtime import *\n"
            "key = sys.argv[2].encode(); set_device(1)\n"
            "assert import_key(key)[0] == PARAMETER  # not named yet\n"
            "print(os.getpid(), flush=True); input()\n"
            "error, there = import_key(key); assert error == 0\n"
            "host, mine = malloc_host(4096)[1], malloc(4096)[1]\n"
            "assert copy(host, there, 4096, D2H) == PARAMETER  # imported: no operand of a host copy\n"
            "assert copy(there, host, 4096, H2D) == PARAMETER\n"
            "assert copy(mine, there, 4096, D2D) == PARAMETER  # no peer access yet\n"
            "assert acl.aclrtDeviceEnablePeerAccess(c_int32(0), c_uint32(0)) == 0\n"
            "assert copy(mine, there, 4096, D2D) == 0\n"
            "assert device_bytes(mine, 4096) == bytes([6]) * 4096\n"
            "assert free(there) == PARAMETER\n"
            "fill(mine, 8, 4096); assert copy(there, mine, 4096, D2D) == 0\n"
            "print('open', flush=True); input()\n"
            "assert close_key(key) == 0; assert close_key(key) == PARAMETER\n"
            "print('closed', flush=True); input()\n"
        )
        folder = sys.path[0]
        other = subprocess.Popen(
            [sys.executable, "-c", code, folder, key.decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def go_on() -> None:
            other.stdin.write("\n")
            other.stdin.flush()

        assert allow_import(key, int(other.stdout.readline())) == 0
        go_on()
        assert other.stdout.readline() == "open\n"
        assert device_bytes(memory + 4096, 4096) == b"\x08" * 4096
        assert device_bytes(memory, 4096) == b"\6" * 4096
        assert close_key(key) == PARAMETER  # the importer has it open
        go_on()
        assert other.stdout.readline() == "closed\n"
        assert close_key(key) == 0
        go_on()
        assert other.wait() == 0

    child(exporter)


@in_child(fail="aclrtMalloc:2:207001,aclrtSynchronizeStream:1+:507899")
def test_calls_fail_on_request() -> None:
    set_device(0)
    assert [malloc(4096)[0] for _ in range(4)] == [0, OUT_OF_MEMORY, 0, 0]
    stream = new_stream()
    assert [synchronize(stream) for _ in range(2)] == [DRIVER, DRIVER]


@in_child(lost="1:3")
def test_a_lost_device_refuses_everything() -> None:
    set_device(1)
    memory = malloc(4096)[1]
    assert fill(memory, 0, 4096) == 0
    assert malloc(4096)[0] == 0
    assert malloc(4096)[0] == LOST
    assert free(memory) == LOST
    assert set_device(1) == LOST


@in_child()
def test_what_is_not_emulated_says_so_and_fails() -> None:
    assert acl.rtKernelLaunch() == 100024
    assert acl.aclrtReserveMemAddress() == 100024
    assert acl.aclopCreateAttr() == 0  # a null handle


def test_what_is_not_emulated_is_named() -> None:
    def body() -> None:
        acl.rtKernelLaunch()

    assert "rtKernelLaunch is not emulated" in child(body).stderr


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
