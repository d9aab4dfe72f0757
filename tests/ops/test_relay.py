"""The native relay on a CUDA runtime made of threads: order, staging, and a runtime that refuses."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memferry_ascend import hostmath

pytestmark = pytest.mark.skipif(
    not hostmath.NATIVE or shutil.which("g++") is None, reason="needs the extension and g++"
)

CHUNK = 1000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("cudart") / "libfake_cudart_relay.so"
    source = Path(__file__).with_name("fake_cudart.cpp")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", str(source), "-o", str(out)], check=True
    )
    return str(out)


class Machine:
    def __init__(self, library: str, slots: int) -> None:
        from memferry_ascend import _ops

        self.lib = ctypes.CDLL(library)
        for name in ("fake_stream", "fake_event"):
            getattr(self.lib, name).restype = ctypes.c_void_p
        self.lib.fake_idle.argtypes = [ctypes.c_void_p, ctypes.c_double]
        self.lib.fake_synchronize.argtypes = [ctypes.c_void_p]
        self.lib.fake_hold.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        self.driver = _ops.Driver("cuda", library, 0)
        self.user, self.first, self.second = (self.lib.fake_stream() for _ in range(3))
        self.after, self.done = self.lib.fake_event(), self.lib.fake_event()
        self.stage = [torch.zeros(CHUNK, dtype=torch.uint8) for _ in range(slots)]
        rows = [(s.data_ptr(), self.lib.fake_event(), self.lib.fake_event()) for s in self.stage]
        self.relay = _ops.Relay(self.driver, self.driver, rows, CHUNK, self.first, self.second)

    def queue(self, dst: torch.Tensor, src: torch.Tensor, to_device: bool = True, step: int = CHUNK) -> None:
        self.driver.record(self.after, self.user)
        self.relay.queue(dst.data_ptr(), src.data_ptr(), src.numel(), to_device, self.after, self.done, step)
        self.driver.wait(self.user, self.done)

    def finish(self) -> None:
        assert self.lib.fake_idle(self.user, 20.0), "the user's stream waits for ever"


@pytest.fixture(params=[1, 2, 4])
def machine(library: str, request: pytest.FixtureRequest) -> Iterator[Machine]:
    m = Machine(library, request.param)
    yield m
    m.lib.fake_fail_after(-1)


def random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 25_300])
def test_all_bytes_arrive(machine: Machine, nbytes: int, to_device: bool) -> None:
    src, dst = random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    machine.queue(dst, src, to_device)
    machine.finish()
    assert torch.equal(dst, src)
    assert machine.relay.chunks == -(-nbytes // CHUNK)


@pytest.mark.parametrize("step", [1, 300, 1000])
def test_a_copy_goes_in_chunks_smaller_than_a_buffer(machine: Machine, step: int) -> None:
    src, dst = random_bytes(2500), torch.zeros(2500, dtype=torch.uint8)
    machine.queue(dst, src, step=step)
    machine.finish()
    assert torch.equal(dst, src)
    assert machine.relay.chunks == -(-2500 // step)


@pytest.mark.parametrize("step", [0, CHUNK + 1])
def test_chunks_that_no_buffer_holds_are_refused(machine: Machine, step: int) -> None:
    src, dst = random_bytes(2500), torch.zeros(2500, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="whole buffer"):
        machine.queue(dst, src, step=step)


def test_relays_follow_each_other_through_the_same_buffers(machine: Machine) -> None:
    sources = [random_bytes(7_700) for _ in range(20)]
    targets = [torch.zeros_like(s) for s in sources]
    for dst, src in zip(targets, sources, strict=True):
        machine.queue(dst, src)
    machine.finish()
    assert all(torch.equal(d, s) for d, s in zip(targets, sources, strict=True))


def test_nothing_starts_before_the_event_and_queuing_does_not_wait(machine: Machine) -> None:
    word = ctypes.c_int(0)
    machine.lib.fake_hold(machine.user, ctypes.byref(word))
    src, dst = random_bytes(9_000), torch.zeros(9_000, dtype=torch.uint8)
    machine.queue(dst, src)  # returns although the user's stream is held
    assert not machine.lib.fake_idle(machine.second, 0.0)
    assert not dst.any()
    word.value = 1
    machine.finish()
    assert torch.equal(dst, src)


def test_a_refused_copy_is_raised_and_done_covers_what_was_queued(machine: Machine) -> None:
    src, dst = random_bytes(9_000), torch.zeros(9_000, dtype=torch.uint8)
    machine.lib.fake_fail_after(7)
    machine.driver.record(machine.after, machine.user)
    with pytest.raises(RuntimeError, match="MemcpyAsync failed with error 700"):
        machine.relay.queue(dst.data_ptr(), src.data_ptr(), 9_000, True, machine.after, machine.done, CHUNK)
    machine.driver.wait(machine.user, machine.done)
    machine.finish()
    assert torch.equal(dst[:3000], src[:3000])
    assert not dst[3000:].any()
    machine.lib.fake_fail_after(-1)
    machine.queue(dst, src)  # and it can be used again
    machine.finish()
    assert torch.equal(dst, src)


def test_it_refuses_no_slots(library: str) -> None:
    with pytest.raises(RuntimeError, match="at least one slot"):
        Machine(library, 0)
