"""Memory and cores near the device, on made-up machines; and what the one machine at hand really does."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from memferry_ascend import hostmath, numa
from memferry_ascend.backends.hostmem import Pages

MINE = sorted(os.sched_getaffinity(0))


def machine(root: Path, nodes: dict[int, str], device: str = "1") -> Path:
    for node, cpulist in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist + "\n")
    folder = root / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(device + "\n")
    return root


def test_cores_of_a_node(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-3,8,10-11", 1: ""})
    assert numa.cores(0, system) == {0, 1, 2, 3, 8, 10, 11}
    assert numa.nodes(system) == [0, 1]
    assert numa.nodes(tmp_path / "elsewhere") == []
    assert numa.cores(1, system) == numa.cores(7, system) == frozenset()


@pytest.mark.parametrize(("said", "node"), [("1", 1), ("0", 0), ("-1", None)])
def test_the_node_of_a_device(tmp_path: Path, said: str, node: int | None) -> None:
    system = machine(tmp_path, {0: "0"}, said)
    assert numa.node_of("0000:3B:00.0", system) == node
    assert numa.node_of("0000:99:00.0", system) is None
    assert numa.node_of(None, system) is None


@pytest.mark.skipif(len(MINE) < 2, reason="needs two cores")
def test_a_node_is_chosen_where_that_costs_no_thread(tmp_path: Path) -> None:
    half = len(MINE) // 2
    near, far = MINE[:half], MINE[half:]
    system = machine(tmp_path, {0: ",".join(map(str, far)), 1: ",".join(map(str, near))})
    assert numa.choose("0000:3b:00.0", len(near), system) == 1
    assert numa.choose("0000:3b:00.0", len(near) + 1, system) is None  # one rank keeps both sockets
    assert numa.choose(None, 1, system) is None


def test_one_node_needs_no_choice(tmp_path: Path) -> None:
    system = machine(tmp_path, {1: ",".join(map(str, MINE))})
    assert numa.choose("0000:3b:00.0", 1, system) is None


def test_threads_started_near_a_node_run_there_and_their_maker_does_not(tmp_path: Path) -> None:
    system = machine(tmp_path, {1: str(MINE[0])})
    seen: list[set[int]] = []
    with numa.near(1, system):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{MINE[0]}]
    assert sorted(os.sched_getaffinity(0)) == MINE
    for node in (None, 5):
        with numa.near(node, system):
            assert sorted(os.sched_getaffinity(0)) == MINE


@pytest.mark.skipif(not hostmath.NATIVE, reason="the fallback has no threads of its own")
def test_the_host_threads_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = machine(tmp_path, {1: str(MINE[-1])})
    near = numa.near
    monkeypatch.setattr(numa, "near", lambda node: near(node, system))
    before = hostmath.threads()

    def bound() -> int:
        count = 0
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # threads of earlier tests are still ending
                count += os.sched_getaffinity(int(task)) == {MINE[-1]}
        return count

    others = bound()
    try:
        hostmath.set_threads(3, node=1)
        assert bound() - others == (2 if len(MINE) > 1 else 0)  # the third is the caller
        hostmath.set_threads(3)
        assert bound() == others
    finally:
        hostmath.set_threads(before)


def test_pages_come_from_the_node_asked_for() -> None:
    if not numa.cores(0):
        pytest.skip("the system shows no NUMA nodes")
    pages = Pages(1 << 20, node=0)
    try:
        if not numa.prefer(pages.tensor, 0):
            pytest.skip("the system refuses memory policies")
        pages.tensor.fill_(1)
        start = pages.tensor.data_ptr() // 4096 * 4096
        policies = {
            int(line.split()[0], 16): line.split()[1]
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
        }
        assert policies[start] == "prefer:0"
    finally:
        pages.close()


def test_a_node_that_is_not_there_changes_nothing() -> None:
    pages = torch.zeros(4096, dtype=torch.uint8)
    assert not numa.prefer(pages, 63)
    assert not numa.prefer(pages, 64)
