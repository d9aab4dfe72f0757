"""The emulated CANN runtime keeps the documented rules of memory, devices and peers: each broken rule gives the documented
error. test_runtime_streams.py has those of copies, streams and events.

Every test body runs in a child process without torch (tests/ascend/runtime.py has the calls).
"""

from __future__ import annotations

import signal

from children import child, in_child

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
