"""The native worker's protocol on a CUDA runtime made of threads: the host runs ahead, and nothing deadlocks or tears.

The loop below is the engine's: per iteration the compute stream waits for each unit's word, "computes" (copies the
parameters into the gradients), and each unit's gradient leaves for the host, where a job updates it and uploads it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memferry_ascend import hostmath
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.errors import FerryError
from memferry_ascend.hostmath import AdamHyper, AdamProgram, AdamSegment
from memferry_ascend.jobs import Fold, Update, combine, factor

pytestmark = pytest.mark.skipif(
    not hostmath.NATIVE or shutil.which("g++") is None, reason="needs the extension and g++"
)

UNITS, NUMEL = 6, 300


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("cudart") / "libfake_cudart.so"
    source = Path(__file__).with_name("fake_cudart.cpp")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", str(source), "-o", str(out)], check=True
    )
    return str(out)


class Machine:
    """Streams, units and jobs over the fake runtime."""

    def __init__(self, library: str) -> None:
        from memferry_ascend import _ops
        from memferry_ascend.nativejobs import NativeJobs

        self.lib = ctypes.CDLL(library)
        for name in ("fake_stream", "fake_event"):
            getattr(self.lib, name).restype = ctypes.c_void_p
        self.lib.fake_idle.argtypes = [ctypes.c_void_p, ctypes.c_double]
        self.lib.fake_fail_copies.argtypes = [ctypes.c_void_p]
        self.lib.fake_synchronize.argtypes = [ctypes.c_void_p]
        self.driver = _ops.Driver("cuda", library, 0)
        backend = CpuBackend()
        backend.device_waits = True
        self.jobs = NativeJobs(backend, self.driver, UNITS)
        self.compute, self.upload, self.download = (self.stream() for _ in range(3))
        g = torch.Generator().manual_seed(0)
        self.units = []
        for _ in range(UNITS):
            host = torch.randn(NUMEL, generator=g)
            state = SimpleNamespace(
                host=host,
                buffer=host.clone(),
                device_grad=torch.empty(NUMEL),
                grad=torch.zeros(NUMEL),
                m=torch.zeros(NUMEL),
                v=torch.zeros(NUMEL),
                events=[(self.event(), self.event()) for _ in range(2)],
                uploaded=self.event(),
                tickets=[0, 0],
            )
            state.program = AdamProgram([AdamSegment(state.grad, host, None, state.m, state.v)])
            self.units.append(state)

    def stream(self) -> Any:
        handle = self.lib.fake_stream()
        return SimpleNamespace(
            handle=handle, wait_word=lambda address, value: self.driver.wait_value(handle, address, value)
        )

    def event(self) -> Any:
        return SimpleNamespace(handle=self.lib.fake_event())

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        self.driver.copy(dst.data_ptr(), src.data_ptr(), dst.nbytes, 3, stream.handle)

    def iteration(self, step: int) -> None:
        for k, _ in enumerate(self.units):
            if step > 1:
                self.jobs.hold(k, self.compute)
        turn = step % 2
        for k in reversed(range(UNITS)):
            u = self.units[k]
            self.copy(u.device_grad, u.buffer, self.compute)
            ready, downloaded = u.events[turn]
            self.jobs.wait_ticket(k, u.tickets[turn])
            self.driver.batch(
                [(u.grad.data_ptr(), u.device_grad.data_ptr(), u.grad.nbytes)],
                2,
                self.download.handle,
                self.compute.handle,
                ready.handle,
                downloaded.handle,
            )
            self.driver.wait(self.compute.handle, downloaded.handle)
            update = SimpleNamespace(
                prepare=lambda part, summed, hypers, u=u: u.program.prepare([AdamHyper(lr=0.01, step=step)])
            )
            upload = SimpleNamespace(
                dst=u.buffer, src=u.host, stream=self.upload, after=downloaded, done=u.uploaded
            )
            self.submit(k, update, upload, [downloaded])
            u.tickets[turn] = self.jobs.ticket(k)
        self.jobs.next_epoch()

    def submit(self, k: int, update: Any, upload: Any, waits: list[Any]) -> None:
        import memferry_ascend.nativejobs as jobs_module

        native, jobs_module.NativeUpdate = jobs_module.NativeUpdate, object  # type: ignore[misc,assignment]
        try:
            scale, clear = self.jobs.new_scale(), [self.units[k].grad]
            self.jobs.update(Update(k, k, waits, update, [], False, [], scale, upload, None, None, clear))
        finally:
            jobs_module.NativeUpdate = native  # type: ignore[misc]


@pytest.fixture
def machine(library: str) -> Iterator[Machine]:
    m = Machine(library)
    yield m
    m.lib.fake_fail_copies(None)
    m.jobs.worker.close()
    for stream in (m.compute, m.upload, m.download):
        m.lib.fake_synchronize(stream.handle)  # they still write to what is freed next
    m.jobs.close()


def serial(steps: int) -> list[torch.Tensor]:
    out = []
    g = torch.Generator().manual_seed(0)
    for _ in range(UNITS):
        p, grad, m, v = (
            torch.randn(NUMEL, generator=g),
            torch.zeros(NUMEL),
            torch.zeros(NUMEL),
            torch.zeros(NUMEL),
        )
        program = AdamProgram([AdamSegment(grad, p, None, m, v)])
        for step in range(1, steps + 1):
            grad.copy_(p)
            program.run([AdamHyper(lr=0.01, step=step)])
        out.append(p)
    return out


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_running_ahead_neither_deadlocks_nor_tears(machine: Machine, delay: float) -> None:
    machine.jobs.worker.delay(delay, 1)
    for step in range(1, 13):
        machine.iteration(step)
    assert machine.lib.fake_idle(machine.compute.handle, 20.0), "the compute stream waits for ever"
    machine.jobs.drain()
    machine.lib.fake_synchronize(machine.upload.handle)
    for u, want in zip(machine.units, serial(12), strict=True):
        assert torch.equal(u.host, want)
        assert torch.equal(u.buffer, want)
        assert not u.grad.any()  # cleared when consumed, before the next one came


def test_the_norm_of_many_tensors_is_that_of_each_alone(machine: Machine) -> None:
    g = torch.Generator().manual_seed(1)
    sizes = [1, 16_384, 3, 40_000, 16_385, 7]
    pieces = [
        (9 - i, torch.randn(n, generator=g).to(torch.bfloat16 if i % 2 else torch.float32))
        for i, n in enumerate(sizes)
    ]
    want = combine({index: hostmath.sum_squares(grad) for index, grad in pieces})
    found = set()
    for threads in (1, 3):
        hostmath.set_threads(threads)
        scale = machine.jobs.norm([], pieces, 0.5)
        machine.jobs.wait_norm()
        found.add((scale.norm, scale.value))
    assert found == {(want, factor(0.5, want))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fold_clears_what_it_has_added(machine: Machine, dtype: torch.dtype) -> None:
    acc, total = torch.full((NUMEL,), float("nan")), torch.zeros(NUMEL)
    other, kept = torch.zeros(NUMEL), torch.ones(NUMEL, dtype=dtype)
    for k in range(3):
        grad = torch.randn(NUMEL).to(dtype)
        total += grad.float()
        machine.jobs.fold(0, [], [Fold(acc, grad, k == 0, True), Fold(other, kept, True, False)])
        machine.jobs.wait_folds(0)
        assert not grad.any()
        assert kept.all()
    torch.testing.assert_close(acc, total)


def test_a_failed_job_lets_the_device_go_and_is_raised(machine: Machine) -> None:
    machine.iteration(1)
    machine.jobs.drain()
    machine.lib.fake_fail_copies(machine.upload.handle)

    def go_on() -> None:
        for step in range(2, 6):
            machine.iteration(step)
            machine.jobs.drain()

    with pytest.raises(FerryError, match="MemcpyAsync failed with error 700"):
        go_on()
    assert machine.lib.fake_idle(machine.compute.handle, 20.0), "the compute stream waits for ever"
    with pytest.raises(FerryError, match="go back to the last checkpoint"):
        machine.jobs.check()


def test_uploads_are_put_between_two_events_and_updates_are_timed_while_somebody_records(
    machine: Machine,
) -> None:
    pairs: list[tuple[int, int]] = []

    def observe(upload: Any) -> tuple[int, int]:
        assert upload.src.nbytes == 4 * NUMEL
        pairs.append((machine.event().handle, machine.event().handle))
        return pairs[-1]

    machine.iteration(1)
    machine.jobs.drain()
    machine.jobs.observe = observe
    machine.jobs.worker.record(True)
    for step in (2, 3):
        machine.iteration(step)
    machine.jobs.drain()
    machine.jobs.observe = None
    found = machine.jobs.worker.take_intervals()
    machine.jobs.worker.record(False)
    machine.iteration(4)
    machine.jobs.drain()
    assert len(pairs) == 2 * UNITS
    for begin, end in pairs:
        machine.driver.synchronize(begin)
        machine.driver.synchronize(end)
    assert sorted(slot for slot, _, _, _ in found) == sorted([*range(UNITS)] * 2)
    assert all(kind == 0 and begin <= end for _, kind, begin, end in found)
    assert machine.jobs.worker.take_intervals() == []
