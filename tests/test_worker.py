"""The order in which the host worker runs its jobs (tests/ops/test_native_jobs.py says the same of the native one)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from memferry_ascend.backends.base import Event
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.worker import LOOKS, Priority, Worker


class Gate(Event):
    """An event that is reached when the gate is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.asked = 0

    def open(self) -> None:
        self._open.set()

    def query(self) -> bool:
        self.asked += 1
        return self._open.is_set()

    def synchronize(self) -> None:
        assert self._open.wait(20.0)

    def elapsed(self, later: Event) -> float:
        raise NotImplementedError


class Order:
    """Hands jobs over while a first one, of no unit, holds all of them."""

    def __init__(self) -> None:
        self.backend = CpuBackend()
        self.worker = Worker(self.backend)
        self.ran: list[str] = []
        self.gates: list[Gate] = []
        self.first = self.gate()
        self.give("first", None, Priority.NORM, self.first)

    def gate(self) -> Gate:
        self.gates.append(Gate())
        return self.gates[-1]

    def give(self, name: str, unit: int | None, priority: int, *waits: Gate) -> None:
        def job() -> None:
            for gate in waits:
                gate.synchronize()
            self.ran.append(name)
            self.worker.notify()

        self.worker.submit(priority, job, unit, waits)

    def until(self, name: str) -> list[str]:
        """Open the first gate; what ran after it until `name` had."""
        self.first.open()
        assert self.worker.wait_for(lambda: name in self.ran, 20.0), f"{name} waits behind what cannot run"
        return self.ran[1:]

    def rest(self) -> list[str]:
        """Open every gate; everything that ran after the first job."""
        for gate in self.gates:
            gate.open()
        self.worker.drain()
        return self.ran[1:]


@pytest.fixture
def order() -> Iterator[Order]:
    found = Order()
    yield found
    found.rest()
    found.worker.close()
    found.backend.close()


def test_a_gradient_on_its_way_holds_up_no_other_update(order: Order) -> None:
    order.give("4", 4, 4)
    order.give("3", 3, 3)
    order.give("0", 0, 0, order.gate())
    assert order.until("4") == ["3", "4"]


def test_what_was_handed_over_first_is_waited_for_where_nothing_can_run(order: Order) -> None:
    soon = order.gate()
    order.give("3", 3, 3, soon)
    order.give("0", 0, 0, order.gate())
    order.until("first")
    soon.open()
    assert order.until("3") == ["3"]


def test_jobs_of_one_unit_keep_their_order(order: Order) -> None:
    order.give("sum 0", 0, Priority.FOLD, order.gate())
    order.give("update 0", 0, 0)
    order.give("sum 1", 1, Priority.FOLD)
    order.give("update 1", 1, 1)
    assert order.until("update 1") == ["sum 1", "update 1"]
    assert order.rest() == ["sum 1", "update 1", "sum 0", "update 0"]


def test_nothing_passes_a_norm_and_it_passes_nothing(order: Order) -> None:
    order.give("sum 2", 2, Priority.FOLD)
    order.give("sum 3", 3, Priority.FOLD, order.gate())
    order.give("norm", None, Priority.NORM)
    order.give("update 1", 1, 1)
    assert order.until("sum 2") == ["sum 2"]
    assert order.rest() == ["sum 2", "sum 3", "norm", "update 1"]


def test_few_looks_are_spent_on_what_is_not_ready(order: Order) -> None:
    began, oldest = threading.Event(), order.gate()

    def job() -> None:
        began.set()
        oldest.synchronize()

    order.worker.submit(50, job, 50, [oldest])
    later = [order.gate() for _ in range(30)]
    for unit, gate in enumerate(later):
        order.give(str(unit), unit, unit, gate)
    order.first.open()
    assert began.wait(20.0)
    assert sum(gate.asked for gate in later) == LOOKS - 1
