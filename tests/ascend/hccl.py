"""The emulated HCCL called directly, for tests of its rules: no torch. `ranks(n, body)` forks a process for each rank.

A body is called with the rank and a communicator of all; every call returns its error code.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p

from runtime import D2H, H2D, acl, copy, malloc, new_stream, set_device

PARAMETER, POINTER, UNSUPPORTED, TIMEOUT, CONNECT, RUNTIME = 1, 2, 5, 9, 11, 15
INT32, FP32, UINT8, FP64 = 2, 4, 7, 10
SUM, PROD, MAX, MIN = range(4)
EXECUTION_TIMEOUT, FAILED = 507048, 507899
"""What a stream keeps of a collective that no peer came to, and of one that was refused."""

lib = ctypes.CDLL(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0] + "/libhccl.so")


def root_info() -> bytes:
    info = ctypes.create_string_buffer(4108)
    assert lib.HcclGetRootInfo(info) == 0
    return info.raw


def join(size: int, info: bytes, rank: int) -> tuple[int, int | None]:
    """(error, communicator)"""
    out = c_void_p()
    code = lib.HcclCommInitRootInfo(
        c_uint32(size), ctypes.create_string_buffer(info, 4108), c_uint32(rank), byref(out)
    )
    return code, out.value


def all_reduce(
    send: int, receive: int, count: int, comm: int, stream: int, kind: int = FP32, op: int = SUM
) -> int:
    return lib.HcclAllReduce(
        c_void_p(send),
        c_void_p(receive),
        c_uint64(count),
        c_int(kind),
        c_int(op),
        c_void_p(comm),
        c_void_p(stream),
    )


def all_gather(send: int, receive: int, count: int, comm: int, stream: int, kind: int = FP32) -> int:
    return lib.HcclAllGather(
        c_void_p(send), c_void_p(receive), c_uint64(count), c_int(kind), c_void_p(comm), c_void_p(stream)
    )


def broadcast(buffer: int, count: int, root: int, comm: int, stream: int) -> int:
    return lib.HcclBroadcast(
        c_void_p(buffer), c_uint64(count), c_int(FP32), c_uint32(root), c_void_p(comm), c_void_p(stream)
    )


def all_to_all(
    send: int, counts: Sequence[int], receive: int, expected: Sequence[int], comm: int, stream: int
) -> int:
    """Bytes."""

    def words(values: Sequence[int]) -> ctypes.Array[c_uint64]:
        return (c_uint64 * len(values))(*values)

    def places(values: Sequence[int]) -> ctypes.Array[c_uint64]:
        return words([sum(values[:i]) for i in range(len(values))])

    return lib.HcclAlltoAllV(
        *(c_void_p(send), words(counts), places(counts), c_int(UINT8)),
        *(c_void_p(receive), words(expected), places(expected), c_int(UINT8)),
        *(c_void_p(comm), c_void_p(stream)),
    )


def barrier(comm: int, stream: int) -> int:
    return lib.HcclBarrier(c_void_p(comm), c_void_p(stream))


def send(buffer: int, count: int, peer: int, comm: int, stream: int) -> int:
    return lib.HcclSend(
        c_void_p(buffer), c_uint64(count), c_int(FP32), c_uint32(peer), c_void_p(comm), c_void_p(stream)
    )


def receive(buffer: int, count: int, peer: int, comm: int, stream: int) -> int:
    return lib.HcclRecv(
        c_void_p(buffer), c_uint64(count), c_int(FP32), c_uint32(peer), c_void_p(comm), c_void_p(stream)
    )


def async_error(comm: int) -> int:
    out = c_int()
    assert lib.HcclGetCommAsyncError(c_void_p(comm), byref(out)) == 0
    return out.value


def destroy(comm: int) -> int:
    return lib.HcclCommDestroy(c_void_p(comm))


def floats(*values: float) -> int:
    """Device memory with these numbers."""
    data = (ctypes.c_float * len(values))(*values)
    error, address = malloc(4 * len(values))
    assert error == 0 and address is not None
    assert copy(address, ctypes.addressof(data), 4 * len(values), H2D) == 0
    return address


def read(address: int, count: int) -> list[float]:
    data = (ctypes.c_float * count)()
    assert copy(ctypes.addressof(data), address, 4 * count, D2H) == 0
    return list(data)


def synchronize(stream: int) -> int:
    return acl.aclrtSynchronizeStream(c_void_p(stream))


def fork(size: int, body: Callable[[int, bytes], None]) -> list[int]:
    """Exit codes of `body(rank, root info)` in a process each; rank 0's device makes the root info."""
    read_end, write_end = os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if rank == 0:
                    assert set_device(0) == 0
                    info = root_info()
                    os.write(write_end, info[:64] * (size - 1))
                else:
                    info = os.read(read_end, 64).ljust(4108, b"\0")
                body(rank, info)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def ranks(size: int, body: Callable[[int, int, int], None]) -> None:
    """`body(rank, communicator, stream)` on a device each; all must end well."""

    def one(rank: int, info: bytes) -> None:
        assert set_device(rank) == 0
        error, comm = join(size, info, rank)
        assert error == 0 and comm is not None, error
        body(rank, comm, new_stream())

    codes = fork(size, one)
    assert codes == [0] * size, codes
