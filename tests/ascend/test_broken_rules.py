"""What if the backend did not keep CANN's rules? Each test takes a precaution out of it and expects the emulator's verdict.

docs/ascend.md lists the rules. A test here fails when the emulator would let a broken backend pass, or when the precaution
has moved and is no longer what keeps the rule.
"""

from __future__ import annotations

import emulator
import pytest
from test_degradation import script

COMMON = """
import ctypes, os
from memferry_ascend.backends import acl as acl_module, ascend, ascend_queues, ascend_relay
from memferry_ascend.backends.acl import Acl
from memferry_ascend.backends.ascend import AscendBackend
acl = ctypes.CDLL("libascendcl.so")
def start(route="registered"):
    os.environ["MEMFERRY_ASCEND_ROUTE"] = route
    runtime.reset()
    return mf.init(backend="ascend").backend
def fails(call, code):
    try:
        call()
    except RuntimeError as error:
        assert str(code) in str(error), error
        return str(error)
    raise AssertionError(f"expected {code}")
"""


@pytest.fixture(autouse=True)
def _emulator_runs_here() -> None:
    if emulator.why_not():
        pytest.skip(emulator.why_not() or "")


def test_host_memory() -> None:
    """Alignment, registering once, unregistering what is registered, and before freeing."""
    script(
        COMMON
        + """
b = start()
pages = b.acl.allocate(8192, "registered")
fails(lambda: b.acl._register(pages.address + 64, 4096, "x"), 107000)  # 4 KiB aligned
fails(lambda: b.acl._register(pages.address, 8192, "x"), 507910)  # once
b.acl.free(pages)
fails(lambda: b.acl._unregister(pages.address), 507911)  # only what is
locked = b.acl.allocate(8192, "locked")
unregister, Acl._unregister = Acl._unregister, lambda self, address: None
fails(lambda: b.acl.free(locked), 107000)  # unregister first
Acl._unregister = unregister
b.acl.free(locked)
flags, acl_module._MAPPED, acl_module._PINNED = acl_module._MAPPED, 0, 0
fails(lambda: b.acl.allocate(4096, "registered"), 107000)  # mapped or pinned
"""
    )


def test_operands_of_copies() -> None:
    """The device address of mapped memory, pageable memory, and operands that leave their allocation."""
    script(
        COMMON
        + """
b = start()
slab = b.alloc_host(4096, mapped=True)
AscendBackend.check_operand = lambda self, t: None
up = b.stream("upload")
def copy(dst, src):
    up.copy(dst, src)
    up.synchronize()
other = b.alloc_host(4096, mapped=True)
fails(lambda: copy(other.host, slab.device), 107000)
"""
    )
    script(
        COMMON
        + """
b = start()
AscendBackend.check_operand = lambda self, t: None
device, pageable = b.alloc_device(4096), torch.ones(4096, dtype=torch.uint8)
up = b.stream("upload")
acl.emuHoldStream(ctypes.c_void_p(up.handle), 1)
import threading
released = threading.Event()
def release():
    released.set()
    acl.emuReleaseAll()
late = threading.Timer(0.5, release)
late.start()
up.copy(device, pageable)
up.flush()
assert released.is_set()  # pageable memory: the copy blocked its caller until the stream went on
late.join()
"""
    )


def test_a_kernel_gets_the_devices_address() -> None:
    script(
        COMMON
        + """
real = Acl.allocate
def swapped(self, *arguments):
    block = real(self, *arguments)
    block.device_address = block.address
    return block
Acl.allocate = swapped
b = start()
assert "507035" in b.coherence_failure, b.coherence_failure  # and no direct host access is planned then
assert not b.coherent
"""
    )


def test_memory_outlives_the_copies_from_it() -> None:
    script(
        COMMON
        + """
b = start()
slab, device = b.alloc_host(4096, mapped=True), b.alloc_device(4096)
up = b.stream("upload")
AscendBackend.synchronize = lambda self: None
acl.emuHoldStream(ctypes.c_void_p(up.handle), 1)
up.copy(device, slab.host)
up.flush()
b.free_host(slab)
acl.emuReleaseAll()
fails(up.synchronize, 507899)
"""
    )


def test_peers_are_opened_and_each_leg_runs_on_its_device() -> None:
    """No access, access in one direction, the wrong current device, and the host leg on the wrong side."""
    body = (
        COMMON
        + """
b = start()
slab, device = b.alloc_host(4096, mapped=True), b.alloc_device(4096)
up, down = b.stream("upload"), b.stream("download")
to = lambda: b.relay(up, device, slab.host, peer=1, chunk=512)
back = lambda: b.relay(down, slab.host, device, peer=1, chunk=512)
"""
    )
    script(
        body
        + """
AscendBackend.open_peer = lambda self, peer: True
fails(to, 107000)
fails(back, 107000)
from memferry_ascend import _ops
to_peer = b.acl
to_peer.call("aclrtSetDevice", ctypes.c_int32(1))
assert acl.aclrtDeviceEnablePeerAccess(0, 0) == 0  # only the other way
to_peer.bind()
fails(to, 107000)
"""
    )
    script(
        body
        + """
from memferry_ascend import _ops
real = _ops.Relay
class Here:  # both legs with the caller's device current
    def __new__(cls, first, second, *rest):
        mine = _ops.Driver("ascend", "", 0)
        return real(mine, mine, *rest)
_ops.Relay = Here
fails(to, "StreamWaitEvent failed with error 107003")
"""
    )
    script(
        body
        + """
theirs = ascend_relay._Side(1)
b.open_peer(1)
theirs.acl.bind()
far = theirs.buffer(4096)
b.acl.bind()
mine = ascend_relay._Side(0).driver
fails(lambda: mine.copy(far, slab.host.data_ptr(), 512, 1, up.handle), 107000)  # host to a peer's memory, from here
"""
    )


def test_streams_order_what_depends_on_each_other() -> None:
    """Without the wait for the peer's legs the stream goes on with what was there before."""
    script(
        COMMON
        + """
b = start()
slab, device = b.alloc_host(4096, mapped=True), b.alloc_device(4096)
up = b.stream("upload")
b.relay(up, device, slab.host, peer=1, chunk=512)
b.synchronize()
AscendBackend.relays_done = lambda self, stream: None
relay = b.relays._made["upload", 1, True][2]
slab.host.fill_(5)
device.zero_()
b.synchronize()
acl.emuHoldStream(ctypes.c_void_p(relay._second), 1)
b.relay(up, device, slab.host, peer=1, chunk=512)
b.relays_done(up)
done = b.event()
up.record(done)
done.synchronize()  # too early: nothing has come
seen = device.clone().cpu()
acl.emuReleaseAll()
assert not seen.any()
"""
    )


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("aclrtRecordEvent", 507899),
        ("aclrtStreamWaitEvent", 507899),
        ("aclrtMemcpyAsync", 507899),
        ("aclrtSynchronizeEvent", 507899),
        ("aclrtSynchronizeDevice", 507899),
    ],
)
def test_a_failing_runtime_call_has_our_name(call: str, code: int) -> None:
    """Whatever fails under the engine comes out as its error, or as torch's from an operator of the model: with the code,
    and never as wrong numbers."""
    script(
        COMMON
        + f"""
b = start("unified")
engine = ferry(every(Mode.STREAM))
acl.emuFail(b"{call}:1+:{code}")
try:
    steps(engine, 20)
except RuntimeError as error:
    assert isinstance(error, mf.FerryError) or not raised_by_us(error), repr(error)
    assert "{code}" in str(error), error
else:
    raise AssertionError("expected an error")
os._exit(0)  # torch_npu's own shutdown meets the same fault
"""
    )
