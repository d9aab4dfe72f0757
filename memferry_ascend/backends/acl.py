"""CANN's runtime library by ctypes, and the routes to host memory that an NPU can read.

No CANN header is needed: prototypes are the documented ones, and a function that this CANN lacks is asked for with
`has`. Every call is made with the device set on the calling thread, because registration belongs to its context.

A mapped slab comes by one of three routes, tried in this order:

    unified      aclrtMallocHostWithCfg with VA_FLAG = 1, then registered: one address for host and device, and a copy
                 may take it from either side
    registered   our own pages, registered where they are: the device has its own address, which kernels may read and
                 copies may not
    locked       aclrtMallocHost, then registered: kernels up to 5.10 register no other memory

Freeing goes backwards: unregister, then free. The other way round CANN refuses (the block is still registered), or the
driver keeps a mapping of pages that are gone.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from memferry_ascend import sizes
from memferry_ascend.backends.base import align
from memferry_ascend.backends.hostmem import Pages
from memferry_ascend.errors import FerryError

PAGE = 4096
ROUTES = ("unified", "registered", "locked")

_MAPPED, _PINNED = 0x2, 0x10000000
_VA_FLAG = 3
_MEANING = {
    107000: "a wrong parameter",
    107001: "no such device",
    107002: "no device is set on this thread",
    207000: "not supported by this driver",
    207001: "out of memory",
    507010: "the device is lost",
    507899: "the driver refused",
    507910: "registered already",
    507911: "not registered",
}


class _Attribute(ctypes.Structure):
    """aclrtMallocAttribute: which, and a union of 8 bytes."""

    _fields_ = (("attribute", c_int), ("value", c_uint32), ("rest", c_uint32))


class _Config(ctypes.Structure):
    """aclrtMallocConfig"""

    _fields_ = (("attributes", POINTER(_Attribute)), ("count", c_size_t))


def describe(code: int) -> str:
    """An ACL error code with its meaning, where it is a known one."""
    return f"ACL error {code}" + (f" ({_MEANING[code]})" if code in _MEANING else "")


@dataclass
class Block:
    """One mapped slab: where the host sees it and where the device does, and what to undo."""

    nbytes: int
    host: torch.Tensor
    address: int
    device_address: int
    pages: Pages | None = None
    base: int = 0
    """What aclrtFreeHost takes; 0 for our own pages."""


class Acl:
    """libascendcl with `device` current. Raises FerryError for every call that fails."""

    def __init__(self, device: int) -> None:
        self.device = device
        try:
            self._library = ctypes.CDLL("libascendcl.so")
        except OSError as error:
            raise FerryError(f"CANN is missing: {error}; source CANN's set_env.sh") from error

    def has(self, *names: str) -> bool:
        """True if this CANN exports all of these functions."""
        return all(hasattr(self._library, name) for name in names)

    def code(self, name: str, *arguments: Any) -> int:
        """Call and return the error code."""
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any, doing: str = "") -> None:
        """Call and raise unless it returned 0; `doing` says what for."""
        code = self.code(name, *arguments)
        if code:
            raise FerryError(f"{doing or 'ascend'}: {name} failed with {describe(code)}")

    def bind(self) -> None:
        """Make the device current on the calling thread."""
        self.call("aclrtSetDevice", c_int32(self.device))

    # -- mapped host memory ----------------------------------------------------------------------------------------
    def choose(self, forced: str | None) -> tuple[str, list[str]]:
        """The first route that works here, and why those before it did not.

        Raises:
            FerryError: none works; names the reason of each.
        """
        if forced is not None and forced not in ROUTES:
            raise FerryError(f"MEMFERRY_ASCEND_ROUTE={forced!r}: expected one of {', '.join(ROUTES)}")
        refused: list[str] = []
        for route in ROUTES if forced is None else (forced,):
            try:
                self.free(self.allocate(PAGE, route))
                return route, refused
            except FerryError as error:
                refused.append(f"{route}: {error}")
        raise FerryError(
            "backend 'ascend': this CANN cannot map host memory into the NPU's address space; expected CANN 8.5 or "
            f"newer on Atlas A2, A3 or later with a driver to match ({'; '.join(refused)})"
        )

    def allocate(self, nbytes: int, route: str, pages: Pages | None = None) -> Block:
        """Zeroed host memory that is mapped into the device's address space, 4 KiB aligned. `pages` of the caller's, which
        other processes have mapped too, are registered where they are, whatever the route; they are the block's then."""
        size = align(nbytes, PAGE)
        if not self.has("aclrtHostUnregister") or not (
            self.has("aclrtHostRegisterV2", "aclrtHostGetDevicePointer") or self.has("aclrtHostRegister")
        ):
            raise FerryError("host memory: this CANN has no aclrtHostRegister")
        self.bind()
        what = f"host memory: {sizes.fmt(nbytes)}"
        if pages is not None or route == "registered":
            pages = pages or Pages(size)
            try:
                address = pages.tensor.data_ptr()
                return Block(size, pages.tensor, address, self._register(address, size, what), pages=pages)
            except BaseException:
                pages.close()
                raise
        base = c_void_p()
        if route == "unified":
            if not self.has("aclrtMallocHostWithCfg"):
                raise FerryError("host memory: this CANN has no aclrtMallocHostWithCfg")
            attribute = _Attribute(_VA_FLAG, 1, 0)
            config = _Config(ctypes.pointer(attribute), 1)
            self.call("aclrtMallocHostWithCfg", byref(base), c_uint64(size), byref(config), doing=what)
        else:
            self.call("aclrtMallocHost", byref(base), c_size_t(size + PAGE), doing=what)
        assert base.value is not None
        address = align(base.value, PAGE)
        try:
            if route == "unified" and address != base.value:
                raise FerryError(f"{what}: aclrtMallocHostWithCfg gave an address that is not 4 KiB aligned")
            there = self._register(address, size, what)
            if route == "unified" and there != address:
                self._unregister(address)
                raise FerryError(f"{what}: VA_FLAG was accepted, but the device has another address")
        except BaseException:
            self.code("aclrtFreeHost", base)
            raise
        ctypes.memset(address, 0, size)
        host = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        return Block(size, host, address, there, base=base.value)

    def free(self, block: Block) -> None:
        """Unregister, then return the memory. Nobody may use it any more, copies in flight included."""
        self.bind()
        self._unregister(block.address)
        if block.pages is not None:
            block.host = torch.empty(0, dtype=torch.uint8)
            block.pages.close()
        else:
            self.call("aclrtFreeHost", c_void_p(block.base), doing="host memory")

    def _register(self, address: int, nbytes: int, what: str) -> int:
        """Map host pages on this device; returns their address there."""
        there = c_void_p()
        if self.has("aclrtHostRegisterV2", "aclrtHostGetDevicePointer"):
            flags = c_uint32(_MAPPED | _PINNED)
            self.call("aclrtHostRegisterV2", c_void_p(address), c_uint64(nbytes), flags, doing=what)
            try:
                self.call(
                    "aclrtHostGetDevicePointer", c_void_p(address), byref(there), c_uint32(0), doing=what
                )
            except FerryError:
                self.code("aclrtHostUnregister", c_void_p(address))
                raise
        else:
            self.call(
                "aclrtHostRegister", c_void_p(address), c_uint64(nbytes), c_int(0), byref(there), doing=what
            )
        if not there.value:
            self.code("aclrtHostUnregister", c_void_p(address))
            raise FerryError(f"{what}: registered, but the device has no address for it")
        return there.value

    def _unregister(self, address: int) -> None:
        self.call("aclrtHostUnregister", c_void_p(address), doing="host memory")

    def version(self, package: int) -> str:
        """The version of CANN (0) or of the driver (7), "unknown" where this CANN does not tell."""
        if not self.has("aclsysGetCANNVersion"):
            return "unknown"
        found = ctypes.create_string_buffer(1024)
        if self.code("aclsysGetCANNVersion", c_int(package), found):
            return "unknown"
        return found.value.decode(errors="replace") or "unknown"

    # -- peers -----------------------------------------------------------------------------------------------------
    def reachable(self, count: int) -> list[int]:
        """Which of the host's `count` devices this one could open access to."""
        if not self.has("aclrtDeviceCanAccessPeer"):
            return []
        found = []
        for other in range(count):
            can = c_int32()
            if other == self.device:
                continue
            code = self.code("aclrtDeviceCanAccessPeer", byref(can), c_int32(self.device), c_int32(other))
            if code == 0 and can.value:
                found.append(other)
        return found

    def reach(self, other: int) -> bool:
        """Open access from this device to another, which belongs to another process and is not touched."""
        can = c_int32()
        code = self.code("aclrtDeviceCanAccessPeer", byref(can), c_int32(self.device), c_int32(other))
        self.bind()
        return (
            code == 0
            and can.value != 0
            and self.code("aclrtDeviceEnablePeerAccess", c_int32(other), c_uint32(0)) == 0
        )

    def open_peer(self, other: int) -> bool:
        """Open access between this device and another, both ways: either is opened by the one that will use it. torch_npu
        never hears of the other device: autograd would switch to a default stream there that nobody made, and the end of
        the process would fail with a device that is lost."""
        try:
            code = self.code("aclrtSetDevice", c_int32(other))
            there = code or self.code("aclrtDeviceEnablePeerAccess", c_int32(self.device), c_uint32(0))
        finally:
            self.bind()
        here = self.code("aclrtDeviceEnablePeerAccess", c_int32(other), c_uint32(0))
        return here == 0 and there == 0


class Held:
    """Streams, events and memory of one device that were made past torch_npu, and are given back together."""

    _SYNC_EVENT = 1
    """ACL_EVENT_SYNC: orders streams, and takes no time stamp."""

    def __init__(self, device: int) -> None:
        self.acl = Acl(device)
        self._made: list[tuple[str, int]] = []

    def _make(self, name: str, undo: str, *arguments: Any) -> int:
        out = c_void_p()
        self.acl.call(name, byref(out), *arguments, doing=f"a relay on device {self.acl.device}")
        assert out.value is not None
        self._made.append((undo, out.value))
        return out.value

    def stream(self) -> int:
        return self._make("aclrtCreateStream", "aclrtDestroyStream")

    def event(self) -> int:
        return self._make("aclrtCreateEventWithFlag", "aclrtDestroyEvent", c_uint32(self._SYNC_EVENT))

    def notify(self) -> int:
        return self._make("aclrtCreateNotify", "aclrtDestroyNotify", c_uint64(0))

    def buffer(self, nbytes: int) -> int:
        return self._make("aclrtMalloc", "aclrtFree", c_size_t(nbytes), c_int32(0))

    def undo(self) -> None:
        """Give everything back; a device that is lost takes it with it."""
        if self.acl.code("aclrtSetDevice", c_int32(self.acl.device)) == 0:
            for name, handle in reversed(self._made):
                self.acl.code(name, c_void_p(handle))
        self._made.clear()
