"""The emulated runtime called directly, for tests of its rules: no torch, so a process costs milliseconds.

A test's body runs in a child process with `from runtime import *`; every call returns its error code.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

PARAMETER, DEVICE, NO_CONTEXT, OTHER_CONTEXT = 107000, 107001, 107002, 107003
UNSUPPORTED, OUT_OF_MEMORY, DRIVER = 207000, 207001, 507899
ALREADY_REGISTERED, NOT_REGISTERED, LOST = 507910, 507911, 507010
H2H, H2D, D2H, D2D, DEFAULT = range(5)
MAPPED, PINNED = 0x2, 0x10000000
MIB = 1 << 20

acl = ctypes.CDLL(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0] + "/libascendcl.so")


class Attribute(ctypes.Structure):
    """aclrtMallocAttribute: attribute 3 is VA_FLAG."""

    _fields_ = (("attribute", c_int), ("value", c_uint32), ("rest", c_uint32))


class Config(ctypes.Structure):
    """aclrtMallocConfig"""

    _fields_ = (("attributes", ctypes.POINTER(Attribute)), ("count", c_size_t))


class Location(ctypes.Structure):
    """aclrtMemLocation: type 0 is host, 1 device."""

    _fields_ = (("id", c_uint32), ("type", c_int))


class BatchAttribute(ctypes.Structure):
    """aclrtMemcpyBatchAttr"""

    _fields_ = (("to", Location), ("source", Location), ("reserved", ctypes.c_uint8 * 16))


def set_device(device: int) -> int:
    return acl.aclrtSetDevice(c_int32(device))


def malloc(size: int) -> tuple[int, int | None]:
    """(error, device address)"""
    out = c_void_p()
    return acl.aclrtMalloc(byref(out), c_size_t(size), c_int(0)), out.value


def malloc_host(size: int, unified: bool | None = None) -> tuple[int, int | None]:
    """(error, host address); `unified` asks for VA_FLAG by aclrtMallocHostWithCfg."""
    out = c_void_p()
    if unified is None:
        return acl.aclrtMallocHost(byref(out), c_size_t(size)), out.value
    attribute = Attribute(3, int(unified), 0)
    config = Config(ctypes.pointer(attribute), 1)
    return acl.aclrtMallocHostWithCfg(byref(out), c_uint64(size), byref(config)), out.value


def free(address: int) -> int:
    return acl.aclrtFree(c_void_p(address))


def free_host(address: int) -> int:
    return acl.aclrtFreeHost(c_void_p(address))


def memory() -> tuple[int, int]:
    """(free, total) bytes of the current device."""
    free_bytes, total = c_size_t(), c_size_t()
    assert acl.aclrtGetMemInfo(c_int(1), byref(free_bytes), byref(total)) == 0
    return free_bytes.value, total.value


def pages(size: int) -> int:
    """Ordinary host memory, page aligned, not pinned."""
    import mmap

    area = mmap.mmap(-1, size)
    keep.append(area)
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


keep: list[object] = []


def register(address: int, size: int, flag: int = MAPPED | PINNED) -> int:
    return acl.aclrtHostRegisterV2(c_void_p(address), c_uint64(size), c_uint32(flag))


def unregister(address: int) -> int:
    return acl.aclrtHostUnregister(c_void_p(address))


def device_pointer(address: int) -> tuple[int, int | None]:
    out = c_void_p()
    return acl.aclrtHostGetDevicePointer(c_void_p(address), byref(out), c_uint32(0)), out.value


def copy(to: int, source: int, size: int, kind: int, room: int | None = None) -> int:
    room = size if room is None else room
    return acl.aclrtMemcpy(c_void_p(to), c_size_t(room), c_void_p(source), c_size_t(size), c_int(kind))


def copy_async(to: int, source: int, size: int, kind: int, stream: int | None) -> int:
    return acl.aclrtMemcpyAsync(
        c_void_p(to), c_size_t(size), c_void_p(source), c_size_t(size), c_int(kind), c_void_p(stream)
    )


def fill(address: int, value: int, size: int) -> int:
    return acl.aclrtMemset(c_void_p(address), c_size_t(size), c_int32(value), c_size_t(size))


def new_stream() -> int:
    out = c_void_p()
    assert acl.aclrtCreateStream(byref(out)) == 0
    return out.value or 0


def new_event() -> int:
    out = c_void_p()
    assert acl.aclrtCreateEventExWithFlag(byref(out), c_uint32(0x8 | 0x1)) == 0
    return out.value or 0


def hold(stream: int, on: bool) -> None:
    """While a stream is held it starts no task."""
    assert acl.emuHoldStream(c_void_p(stream), c_int(on)) == 0


def record(event: int, stream: int) -> int:
    return acl.aclrtRecordEvent(c_void_p(event), c_void_p(stream))


def wait(stream: int, event: int) -> int:
    return acl.aclrtStreamWaitEvent(c_void_p(stream), c_void_p(event))


def reached(event: int) -> bool:
    status = c_int()
    assert acl.aclrtQueryEventStatus(c_void_p(event), byref(status)) == 0
    return status.value == 1


def synchronize(stream: int) -> int:
    return acl.aclrtSynchronizeStream(c_void_p(stream))


def idle(stream: int) -> bool:
    status = c_int()
    assert acl.aclrtStreamQuery(c_void_p(stream), byref(status)) == 0
    return status.value == 0


def host_bytes(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def device_bytes(address: int, size: int) -> bytes:
    """A synchronous copy to the host."""
    buffer = ctypes.create_string_buffer(size)
    assert copy(ctypes.addressof(buffer), address, size, D2H) == 0
    return buffer.raw


def export_key(address: int, size: int, flags: int = 0) -> tuple[int, bytes]:
    key = ctypes.create_string_buffer(65)
    return acl.aclrtIpcMemGetExportKey(
        c_void_p(address), c_size_t(size), key, c_size_t(65), c_uint64(flags)
    ), key.value


def import_key(key: bytes, flags: int = 0) -> tuple[int, int | None]:
    out = c_void_p()
    return acl.aclrtIpcMemImportByKey(byref(out), c_char_p(key), c_uint64(flags)), out.value


def allow_import(key: bytes, *processes: int) -> int:
    array = (c_int32 * len(processes))(*processes)
    return acl.aclrtIpcMemSetImportPid(c_char_p(key), array, c_size_t(len(processes)))


def close_key(key: bytes) -> int:
    return acl.aclrtIpcMemClose(c_char_p(key))


def elapsed(first: int, second: int) -> tuple[int, float]:
    out = c_float()
    return acl.aclrtEventElapsedTime(byref(out), c_void_p(first), c_void_p(second)), out.value
