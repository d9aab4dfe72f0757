"""The native worker's protocol on a CUDA runtime made of threads: the host runs ahead, and nothing deadlocks or tears.

The loop below is the engine's: per iteration the compute stream waits for each unit's word, "computes" (copies the
parameters into the gradients), and each unit's gradient leaves for the host, where a job updates it and uploads it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
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
        self.gates: list[Gate] = []
        self.kept: list[torch.Tensor] = []
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
    for gate in m.gates:
        gate.open()
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


@pytest.mark.parametrize(("piece", "copies"), [(1 << 20, 1), (512, 3), (1199, 2), (256, 5)])
def test_a_large_unit_is_uploaded_in_pieces_with_the_same_bits(
    machine: Machine, piece: int, copies: int
) -> None:
    """A unit of 300 fp32 elements: cuts fall on multiples of 64 of them."""
    machine.jobs.worker.piece(piece)
    before = machine.lib.fake_copies()
    for step in range(1, 6):
        machine.iteration(step)
    machine.jobs.drain()
    machine.lib.fake_synchronize(machine.upload.handle)
    assert machine.lib.fake_copies() - before == 5 * UNITS * (2 + copies)
    for u, want in zip(machine.units, serial(5), strict=True):
        assert torch.equal(u.host, want)
        assert torch.equal(u.buffer, want)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_pieces_of_several_segments_are_updated_before_they_leave(
    machine: Machine, order: tuple[int, ...]
) -> None:
    """Three segments with gaps between them, in memory's order or not, and one of them not updated at all."""
    u = machine.units[0]
    part = [slice(0, 90), slice(100, 190), slice(200, 300)]
    segments = [AdamSegment(u.grad[s], u.host[s], None, u.m[s], u.v[s]) for s in (part[i] for i in order)]
    program = AdamProgram(segments)
    enabled = [i != 1 for i in order]
    u.grad.fill_(1.0)
    before = u.host.clone()
    machine.jobs.worker.piece(256)
    update = SimpleNamespace(prepare=lambda *_: program.prepare([AdamHyper(lr=0.01, step=1)] * 3, enabled))
    upload = SimpleNamespace(dst=u.buffer, src=u.host, stream=machine.upload, after=None, done=u.uploaded)
    u.buffer.fill_(float("nan"))
    machine.submit(0, update, upload, [])
    machine.jobs.drain()
    machine.lib.fake_synchronize(machine.upload.handle)
    assert torch.equal(u.buffer, u.host)
    changed = u.host != before
    assert changed[part[0]].all()
    assert changed[part[2]].all()
    assert not changed[90:200].any()


class Gate:
    """An event that is reached when the gate is opened."""

    def __init__(self, machine: Machine) -> None:
        self.word = ctypes.c_int(0)
        machine.gates.append(self)
        self.stream, self.event = machine.stream(), machine.event()
        machine.lib.fake_hold.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        machine.lib.fake_hold(self.stream.handle, ctypes.byref(self.word))
        machine.driver.record(self.event.handle, self.stream.handle)

    def open(self) -> None:
        self.word.value = 1


class Order:
    """Hands jobs over while a norm holds all of them, and tells the order in which they then run."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.first = Gate(machine)
        machine.jobs.worker.record(True)
        self.norm(self.first)

    def gate(self) -> Gate:
        return Gate(self.machine)

    def update(self, unit: int, gate: Gate | None = None) -> None:
        program = self.machine.units[unit].program
        update = SimpleNamespace(
            prepare=lambda part, summed, hypers: program.prepare([AdamHyper(lr=0.01, step=1)])
        )
        self.machine.submit(unit, update, None, [gate.event] if gate is not None else [])

    def fold(self, unit: int, gate: Gate | None = None) -> None:
        acc, grad = torch.zeros(NUMEL), torch.ones(NUMEL)
        self.machine.kept += [acc, grad]
        waits = [gate.event] if gate is not None else []
        self.machine.jobs.fold(unit, waits, [Fold(acc, grad, True, False)])

    def norm(self, gate: Gate | None = None) -> None:
        grad = torch.ones(NUMEL)
        self.machine.kept.append(grad)
        self.machine.jobs.norm([gate.event] if gate is not None else [], [(0, grad)], 1.0)

    def ran(self, *slots: int) -> list[tuple[str, int]]:
        """What ran, and about which unit, until the jobs of these slots have. Fails if they never do."""
        self.first.open()
        worker = self.machine.jobs.worker
        waiter = threading.Thread(target=lambda: [worker.wait(slot) for slot in slots], daemon=True)
        waiter.start()
        waiter.join(20.0)
        assert not waiter.is_alive(), "a job that could run waits behind one that cannot"
        found = [(("update", "fold", "norm")[kind], slot) for slot, kind, _, _ in worker.take_intervals()]
        assert found[0] == ("norm", 2 * UNITS)
        return found[1:]

    def finish(self) -> None:
        for gate in self.machine.gates:
            gate.open()
        self.machine.jobs.drain()


FOLD_OF, NORM = UNITS, 2 * UNITS


def test_a_gradient_on_its_way_holds_up_no_other_update(machine: Machine) -> None:
    order = Order(machine)
    order.update(4)
    order.update(3)
    order.update(0, order.gate())  # the newest, needed first, and not there yet
    assert order.ran(4, 3) == [("update", 3), ("update", 4)]
    order.finish()
    assert machine.jobs.updated(0)


def test_what_was_handed_over_first_is_waited_for_where_nothing_can_run(machine: Machine) -> None:
    order = Order(machine)
    soon = order.gate()
    order.update(3, soon)
    order.update(0, order.gate())
    order.first.open()
    machine.jobs.worker.wait(NORM)
    soon.open()
    assert order.ran(3) == [("update", 3)]
    order.finish()


def test_jobs_of_one_unit_keep_their_order(machine: Machine) -> None:
    order = Order(machine)
    order.fold(0, order.gate())
    order.update(0)  # would be wrong before the sum is complete
    order.fold(1)
    order.update(1)
    assert order.ran(1) == [("fold", FOLD_OF + 1), ("update", 1)]
    assert not machine.jobs.updated(0)
    order.finish()


def test_nothing_passes_a_norm_and_it_passes_nothing(machine: Machine) -> None:
    order = Order(machine)
    last = order.gate()
    order.fold(3)
    order.fold(2, last)
    order.norm()  # of both sums
    order.update(1)
    order.fold(4)
    assert order.ran(FOLD_OF + 3) == [("fold", FOLD_OF + 3)]
    order.finish()
    ran = [slot for slot, _, _, _ in machine.jobs.worker.take_intervals()]
    assert ran == [FOLD_OF + 2, NORM, FOLD_OF + 4, 1]


def test_a_later_step_passes_no_earlier_one(machine: Machine) -> None:
    order = Order(machine)
    order.update(5)
    order.update(3, order.gate())
    machine.jobs.next_epoch()
    order.update(0)
    assert order.ran(5) == [("update", 5)]
    assert not machine.jobs.updated(0)
    order.finish()
    assert [slot for slot, _, _, _ in machine.jobs.worker.take_intervals()] == [3, 0]


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
