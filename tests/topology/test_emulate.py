"""The link clock is the simulator step by step; emulated links block threads as it says."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from memferry_ascend.topology.emulate import EmulatedLinks, LinkClock, LinksClosed
from memferry_ascend.topology.fabric import Fabric
from memferry_ascend.topology.fabric_sim import Flow, simulate
from memferry_ascend.topology.load import load
from memferry_ascend.topology.strategies import DynamicDispatch

MIB = 1 << 20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["pcie4", "h200x8"])
def test_the_clock_agrees_with_the_simulator(name: str, seed: int) -> None:
    fabric = load(name)
    assert isinstance(fabric, Fabric)
    rng = random.Random(seed)
    flows = []
    for _ in range(20):
        device, peer = rng.sample(fabric.devices, 2)
        path = fabric.path(device, via=rng.choice([None, peer]))
        flows.append(Flow(path, rng.randrange(0, 32 * MIB), rng.random() * 2e-3))
    flows.sort(key=lambda f: f.start)
    expected = simulate(flows, fabric.capacity).finish
    clock = LinkClock(dict(fabric.capacity))
    transfers = []
    for flow in flows:
        transfers.append(
            clock.join(flow.start, flow.nbytes, flow.path.latency, flow.path.uses, flow.path.bandwidth)
        )
        clock.advance(flow.start + rng.random() * 1e-6)  # looking more often changes nothing
    clock.advance(1.0)
    assert [t.end for t in transfers] == pytest.approx(list(expected), rel=1e-9)
    assert not clock.moving
    assert not clock.waiting


def test_the_clock_by_hand() -> None:
    clock = LinkClock({"a": 10.0, "b": 4.0})
    first = clock.join(0.0, 100, 1.0, {"a": 1.0})
    second = clock.join(0.0, 20, 2.0, {"a": 1.0, "b": 1.0})
    # 1 s of latency; 10 bytes/s for 1 s; then 6 beside the second's 4, which needs 5 s; then 10 again.
    clock.advance(100.0)
    assert second.end == pytest.approx(7.0)
    assert first.end == pytest.approx(1 + 1 + 5 + (100 - 10 - 30) / 10)
    # A link that slows halfway: 10 bytes at 4, the other 10 at 2.
    third = clock.join(100.0, 20, 0.0, {"b": 1.0})
    clock.set_capacity(102.5, "b", 2.0)
    clock.advance(200.0)
    assert third.end == pytest.approx(107.5)
    # In a lane the second's latency passes while the first moves.
    one = clock.join(200.0, 20, 1.0, {"b": 1.0})
    two = clock.join(200.0, 20, 1.0, {"b": 1.0}, previous=one)
    late = clock.join(200.0, 2, 30.0, {"b": 1.0}, previous=two)
    clock.advance(300.0)
    assert (one.end, two.end, late.end) == pytest.approx((211.0, 221.0, 231.0))
    assert clock.join(300.0, 0, 5.0, {"b": 1.0}).end == 300.0


def test_threads_get_what_the_model_says() -> None:
    """Eight threads over two shared links: none ends before its links could have carried its bytes."""
    links = {"x": (1e-4, 50e6), "y": (2e-4, 20e6)}
    with EmulatedLinks(links) as emulated, ThreadPoolExecutor(8) as pool:
        jobs = [(["x"], 100_000), (["y"], 50_000), (["x", "y"], 80_000), (["x"], 0)] * 2
        taken = list(pool.map(lambda job: emulated.transfer(*job), jobs))
        assert emulated.in_flight == 0
    for (names, nbytes), seconds in zip(jobs, taken, strict=True):
        alone = nbytes / min(links[n][1] for n in names) + sum(links[n][0] for n in names)
        assert seconds >= (alone if nbytes else 0) * (1 - 1e-9)
    assert taken[3] == 0


def in_flight(links: EmulatedLinks, count: int) -> None:
    while links.in_flight < count:
        threading.Event().wait(0.001)


def test_a_smaller_transfer_on_the_same_link_ends_first() -> None:
    # Nothing moves to speak of until both are in flight, so late threads change nothing.
    with EmulatedLinks({"x": (0.0, 1e-3)}) as links, ThreadPoolExecutor(2) as pool:
        large = pool.submit(links.transfer, ["x"], 500_000)
        in_flight(links, 1)
        small = pool.submit(links.transfer, ["x"], 100_000)
        in_flight(links, 2)
        links.set_bandwidth("x", 10e6)
        # 20 ms for both halves of 0.2 MB, 40 ms more for what is left of the large one, which also started
        # earlier.
        assert large.result(timeout=60) - small.result(timeout=60) >= 0.04 * (1 - 1e-3)


def test_a_sleeper_is_woken_when_its_link_gets_faster() -> None:
    """At the first bandwidth the transfer would take days."""
    with EmulatedLinks({"x": (0.0, 1.0)}) as links, ThreadPoolExecutor(1) as pool:
        job = pool.submit(links.transfer, ["x"], 1_000_000)
        in_flight(links, 1)
        links.set_bandwidth("x", 1e9)
        job.result(timeout=60)


def test_close_ends_transfers_in_flight() -> None:
    links = EmulatedLinks({"x": (0.0, 1.0)})
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(links.transfer, ["x"], 1_000_000) for _ in range(2)]
        in_flight(links, 2)
        links.close()
        links.close()
        for job in jobs:
            with pytest.raises(LinksClosed, match="in flight"):
                job.result(timeout=60)
    with pytest.raises(LinksClosed):
        links.transfer(["x"], 1)


def test_paths_of_a_fabric_carry_a_dispatched_transfer() -> None:
    """Two threads per path, as a relay with two buffers; together no faster than both paths' bandwidths
    allow.
    """
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    paths = fabric.paths("node0/npu0/die0", via=["node0/npu4/die0"]).paths
    size = 64 * MIB
    transfer = DynamicDispatch(4 * MIB).begin(size, paths)
    with EmulatedLinks(fabric, time_scale=50.0) as links:

        def work(index: int) -> float:
            path, spent = paths[index], 0.0
            while (chunk := transfer.next_chunk(path.name, wait=True)) is not None:
                spent += links.transfer(path, chunk[1])
                transfer.complete(path.name, chunk)
            return spent

        with ThreadPoolExecutor(4) as pool:
            spent = list(pool.map(work, (0, 1, 0, 1)))
    assert transfer.done
    moved = transfer.moved
    assert sum(moved.values()) == size
    for i, path in enumerate(paths):
        assert moved[path.name] / path.bandwidth <= (spent[i] + spent[i + 2]) * (1 + 1e-9)


def test_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="time scale"):
        EmulatedLinks({"x": (0.0, 1.0)}, time_scale=0)
    with pytest.raises(ValueError, match="bandwidth above 0"):
        EmulatedLinks({"x": (0.0, 0.0)})
    with pytest.raises(ValueError, match="latency of 0"):
        EmulatedLinks({"x": (-1.0, 1.0)})
    with EmulatedLinks({"x": (0.0, 1.0)}) as links:
        with pytest.raises(KeyError, match="unknown link 'z'"):
            links.transfer(["z"], 1)
        with pytest.raises(KeyError, match="unknown link 'z'"):
            links.set_bandwidth("z", 1.0)
        with pytest.raises(ValueError, match="bandwidth above 0"):
            links.set_bandwidth("x", 0.0)
        with pytest.raises(ValueError, match="0 bytes or more"):
            links.transfer(["x"], -1)
        with pytest.raises(ValueError, match="list of link names"):
            links.transfer([], 1)
        with pytest.raises(ValueError, match="list of link names"):
            links.transfer("x", 1)
