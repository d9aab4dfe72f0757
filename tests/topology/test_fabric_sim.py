"""The simulator keeps to capacities, conserves bytes, and is deterministic; plans assign assistants that
help.
"""

import json
import random
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memferry_ascend.topology.fabric import Fabric
from memferry_ascend.topology.fabric_sim import Flow, simulate
from memferry_ascend.topology.fluid import max_min_rates
from memferry_ascend.topology.load import load
from memferry_ascend.topology.node_plan import beside, plan_node
from memferry_ascend.topology.paths import FabricPath

MIB = 1 << 20


def scaled(fabric: Fabric, factor: float) -> Fabric:
    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    links = tuple(
        replace(k, bandwidth=k.bandwidth * factor, both=times(k.both), flow=times(k.flow))
        for k in fabric.links
    )
    return replace(fabric, links=links)


def random_flows(fabric: Fabric, count: int, seed: int) -> list[Flow]:
    rng = random.Random(seed)
    flows = []
    for _ in range(count):
        device, peer = rng.sample(fabric.devices, 2)
        via = rng.choice([None, peer])
        direction = rng.choice(["h2d", "d2h"])
        path = fabric.path(device, via=via, direction=direction)  # type: ignore[arg-type]
        flows.append(Flow(path, rng.randrange(0, 64 * MIB), rng.choice([0.0, rng.random() * 1e-3])))
    return flows


@pytest.mark.parametrize("name", ["pcie4", "pcie5", "h200x8", "a2"])
@pytest.mark.parametrize("seed", [1, 2])
def test_capacity_is_kept_and_bytes_are_conserved(name: str, seed: int) -> None:
    fabric = load(name)
    assert isinstance(fabric, Fabric)
    flows = random_flows(fabric, 40, seed)
    result = simulate(flows, fabric.capacity)
    assert result.intervals
    for interval in result.intervals:
        used = result.sharing.load(interval.rates)
        assert (used <= result.sharing.capacity * (1 + 1e-9)).all()
        for rate, flow in zip(interval.rates, flows, strict=True):
            assert rate <= flow.path.bandwidth * (1 + 1e-9)
            assert rate == 0 or interval.begin >= flow.start + flow.path.latency
    carried = result.carried()
    for resource, nbytes in carried.items():
        expected = sum(f.nbytes * f.path.uses.get(resource, 0) for f in flows)
        assert nbytes == pytest.approx(expected, rel=1e-9, abs=1)
    for flow, finish in zip(flows, result.finish, strict=True):
        assert finish >= (flow.start + flow.path.seconds(flow.nbytes)) * (1 - 1e-9)


@given(
    st.integers(1, 6).flatmap(
        lambda k: st.tuples(
            st.lists(st.floats(1, 100), min_size=k, max_size=k),
            st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=k, max_size=k),
            st.fixed_dictionaries({name: st.floats(1, 100) for name in "abcd"}),
        )
    )
)
@settings(max_examples=200, deadline=None)
def test_max_min_rates_leave_no_one_who_could_have_more(case: tuple) -> None:
    caps, sets, capacity = case
    uses = [dict.fromkeys(s, 1.0) for s in sets]
    rates = max_min_rates(caps, uses, capacity)
    load_of = {n: sum(r for r, use in zip(rates, uses, strict=True) if n in use) for n in capacity}
    assert all(load_of[n] <= capacity[n] * (1 + 1e-9) + 1e-6 for n in capacity)
    for rate, cap, use in zip(rates, caps, uses, strict=True):
        # At its cap, or on a full resource where nobody is faster: the definition of max-min fairness.
        full = [n for n in use if load_of[n] >= capacity[n] * (1 - 1e-6) - 1e-6]
        fastest = {n: max(r for r, u in zip(rates, uses, strict=True) if n in u) for n in full}
        assert rate >= cap * (1 - 1e-6) or any(rate >= fastest[n] * (1 - 1e-6) - 1e-6 for n in full)


@pytest.mark.parametrize("name", ["pcie4", "h200x8", "a2"])
@pytest.mark.parametrize("factor", [1.01, 1.5, 8.0])
def test_more_bandwidth_everywhere_is_never_slower(name: str, factor: float) -> None:
    fabric = load(name)
    assert isinstance(fabric, Fabric)
    faster = scaled(fabric, factor)
    for seed in range(3):
        # All start at once: with staggered starts a faster fabric also changes who meets whom.
        flows = [replace(f, start=0.0) for f in random_flows(fabric, 25, seed)]
        flows = [replace(f, path=replace(f.path, latency=0.0)) for f in flows]
        quick = [replace(f, path=replace(f.path, bandwidth=f.path.bandwidth * factor)) for f in flows]
        before, after = simulate(flows, fabric.capacity), simulate(quick, faster.capacity)
        for a, b in zip(before.finish, after.finish, strict=True):
            assert b <= a * (1 + 1e-9)


@pytest.mark.parametrize("name", ["cm384", "pcie4", "h200x8", "a2"])
def test_one_faster_link_never_slows_a_planned_transfer(name: str) -> None:
    fabric = load(name)
    assert isinstance(fabric, Fabric)
    peers = fabric.devices[1:4]
    device = fabric.devices[0]
    before = fabric.paths(device, via=peers)
    base = before.seconds(before.split(64 * MIB))
    used = {name for path in before.paths for name in path.uses}
    for i, link in enumerate(fabric.links):
        if not any(f"{link.kind} {link.a}" in name or f">{link.b}" in name for name in used):
            continue
        flow = None if link.flow is None else link.flow * 2
        both = None if link.both is None else link.both * 2
        wide = replace(link, bandwidth=link.bandwidth * 2, flow=flow, both=both)
        faster = replace(fabric, links=(*fabric.links[:i], wide, *fabric.links[i + 1 :]))
        after = faster.paths(device, via=peers)
        assert after.seconds(after.split(64 * MIB)) <= base * (1 + 1e-6)


def test_sharing_by_hand() -> None:
    def path(cap: float, latency: float = 0.0) -> FabricPath:
        return FabricPath("p", latency, cap, uses={"link": 1.0})

    # 10 bytes/s shared: 5 + 5 until the first has its 10 bytes at t = 2, then 10 for the other's last 10.
    result = simulate([Flow(path(100.0), 10), Flow(path(100.0), 20)], {"link": 10.0})
    assert result.finish == pytest.approx((2.0, 3.0))
    # A cap of 2 leaves 8; the second starts a second late and has a latency of one more.
    result = simulate([Flow(path(2.0), 10), Flow(path(100.0, 1.0), 24, 1.0)], {"link": 10.0})
    assert result.finish == pytest.approx((5.0, 5.0))
    result = simulate([Flow(path(2.0), 0, 3.0)], {"link": 10.0})
    assert result.finish == (3.0,)
    with pytest.raises(ValueError, match="0 or more"):
        simulate([Flow(path(1.0), -1)], {"link": 10.0})
    with pytest.raises(KeyError, match="link"):
        simulate([Flow(path(1.0), 1)], {})


def test_a_whole_supernode_every_device_from_every_host() -> None:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    devices = fabric.devices[::2]
    assert len(devices) == 384
    flows = [Flow(fabric.path(d, host=h), MIB) for d in devices for h in fabric.hosts]
    result = simulate(flows, fabric.capacity)
    # 192 CPUs of 160 GB/s are the bottleneck: nothing ends before they have sent everything.
    total = len(flows) * MIB
    assert result.seconds >= total / (192 * 160e9)
    assert max(result.utilisation().values()) <= 1 + 1e-9
    assert sum(v for k, v in result.carried().items() if "/cpu" in k.split(">")[0]) == pytest.approx(total)


def test_every_die_of_a_supernode_loads_with_its_sibling_assisting_deterministically() -> None:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    flows = []
    for package in range(0, 768, 2):
        target, sibling = fabric.devices[package : package + 2]
        paths = fabric.paths(target, via=[sibling])
        flows += [Flow(p, n) for p, n in zip(paths.paths, paths.split(64 * MIB), strict=True)]
    first, second = simulate(flows, fabric.capacity), simulate(flows, fabric.capacity)
    assert first.finish == second.finish
    assert 384 * 64 * MIB / first.seconds <= 192 * 160e9


def test_the_papers_node_four_train_four_assist() -> None:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    plan = plan_node(fabric, ["node0/npu[0-3]/die0"], ["node0/npu[4-7]/die0"])
    assert [len(entry.assist) for entry in plan.loads] == [1, 1, 1, 1]
    assert len({peer for entry in plan.loads for peer in entry.assist}) == 4
    assert plan.idle == ()
    assert plan.seconds < plan.direct_seconds
    for entry in plan.loads:
        assert sum(entry.shares) == plan.nbytes
    table = plan.table()
    assert "node0/npu4/die0" in table
    document = json.loads(plan.to_json())
    assert document["loads"][0]["assist"] == list(plan.loads[0].assist)
    assert plan_node(fabric, ["node0/npu[0-3]/die0"], ["node0/npu[4-7]/die0"]) == plan


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_beside_the_others_a_device_sees_the_rates_of_the_whole_node(direction: str) -> None:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    trainers, helpers = ["node0/npu[0-3]/die0"], ["node0/npu[4-7]/die0"]
    loads = plan_node(fabric, trainers, helpers, direction=direction).loads  # type: ignore[arg-type]
    chosen = {load.device: load.assist for load in loads}
    paths = [
        path
        for device, peers in chosen.items()
        for path in fabric.paths(device, via=peers, direction=direction).paths  # type: ignore[arg-type]
    ]
    want = max_min_rates([p.bandwidth for p in paths], [p.uses for p in paths], fabric.capacity)
    got = [
        path.bandwidth
        for device in chosen
        for path in beside(fabric, chosen, device, direction).together()  # type: ignore[arg-type]
    ]
    assert got == pytest.approx(want)
    alone = fabric.paths(loads[0].device, via=loads[0].assist).joint_bandwidth()
    assert sum(got[:2]) < 0.9 * alone  # two training dies share a CPU's links


def test_an_assistant_that_only_takes_anothers_links_stays_idle() -> None:
    fabric = load("pcie4")
    assert isinstance(fabric, Fabric)
    one = plan_node(fabric, ["socket0/board0/gpu0"], ["socket0/board0/gpu1", "socket1/board0/gpu0"])
    assert one.loads[0].assist == ("socket1/board0/gpu0",)
    assert one.idle == ("socket0/board0/gpu1",)
    assert "idle: socket0/board0/gpu1" in one.table()
    # Every switch has a training device of its own: all ways down are taken.
    full = plan_node(fabric)
    assert all(not entry.assist for entry in full.loads)


@pytest.mark.parametrize("name", ["cm384", "h200x8", "a2"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_plan_is_never_slower_than_no_plan(name: str, direction: str) -> None:
    fabric = load(name)
    assert isinstance(fabric, Fabric)
    for nbytes in (64 << 10, 16 * MIB, 256 * MIB):
        plan = plan_node(fabric, nbytes=nbytes, direction=direction)  # type: ignore[arg-type]
        assert plan.seconds <= plan.direct_seconds * (1 + 1e-9)


def test_a_plan_is_drawn(tmp_path: FilePath) -> None:
    pytest.importorskip("matplotlib")
    fabric = load("h200x8")
    assert isinstance(fabric, Fabric)
    plan_node(fabric).draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_bad_roles_are_refused() -> None:
    fabric = load("pcie5")
    assert isinstance(fabric, Fabric)
    with pytest.raises(ValueError, match="no device matches 'npu7'"):
        plan_node(fabric, ["npu7"])
    with pytest.raises(ValueError, match="do not also assist"):
        plan_node(fabric, ["gpu0"], ["gpu0"])
    with pytest.raises(ValueError, match="some bytes"):
        plan_node(fabric, nbytes=0)
