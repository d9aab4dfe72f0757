"""Shipped fabrics give the figures they were fitted to, and joint capacity counts each link once."""

import pytest
from memferry_ascend.topology.dispatch import split, threshold
from memferry_ascend.topology.fabric import Fabric
from memferry_ascend.topology.load import load, parse, shipped
from memferry_ascend.topology.paths import PathSet

MIB = 1 << 20
TARGET, PEER = "node0/npu0/die0", "node0/npu4/die0"


@pytest.fixture(scope="module")
def cm384() -> Fabric:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    return fabric


@pytest.fixture(scope="module")
def pair(cm384: Fabric) -> PathSet:
    return cm384.paths(TARGET, via=[PEER])


def test_every_shipped_fabric_loads() -> None:
    assert {"cm384", "pcie4", "pcie5", "h200x8", "a2"} <= set(shipped())
    for name in shipped():
        fabric = load(name)
        assert fabric.name == name
        assert len(fabric.paths(fabric.devices[-1], via=[fabric.devices[0]])) == 2


def test_cm384_is_the_whole_supernode(cm384: Fabric) -> None:
    assert len(cm384.devices) == 768
    assert len(cm384.hosts) == 192
    assert cm384.home("node47/npu7/die1") == "node47/cpu3"
    assert sum(hop.link.latency for hop in cm384.route(TARGET, PEER)) == pytest.approx(0.7e-6)
    assert sum(hop.link.latency for hop in cm384.route(TARGET, "node5/npu0/die0")) == pytest.approx(2.1e-6)
    assert [hop.link.kind for hop in cm384.route(TARGET, "node0/npu0/die1")] == ["sio"]


@pytest.mark.parametrize(("size", "direct", "assisted", "both"), [(16_000_000, 53.0, 43.0, 86.0)])
def test_cm384_gives_the_papers_figures(
    pair: PathSet, size: int, direct: float, assisted: float, both: float
) -> None:
    d, a = pair.paths
    assert size / d.seconds(size) / 1e9 == pytest.approx(direct, rel=0.01)
    assert size / a.seconds(size) / 1e9 == pytest.approx(assisted, rel=0.01)
    assert size / pair.seconds(pair.split(size)) / 1e9 == pytest.approx(both, rel=0.01)


def test_cm384_adaptive_against_each_path_alone(pair: PathSet) -> None:
    d, a = pair.paths
    adaptive = pair.seconds(pair.split(16 * MIB))
    assert d.seconds(16 * MIB) / adaptive >= 1.5
    assert a.seconds(16 * MIB) / adaptive >= 1.9
    assert pair.seconds(pair.split(64 << 10)) <= d.seconds(64 << 10)
    for mib in (16, 32, 64, 128, 256):
        size = mib * MIB
        alone = size / d.seconds(size) + size / a.seconds(size)
        assert size / pair.seconds(pair.split(size)) >= 0.85 * alone
    assert pair.split(int(threshold(d, a))) == [int(threshold(d, a)), 0]


def test_paths_without_a_shared_bottleneck_split_as_plain_paths(pair: PathSet) -> None:
    for size in (0, 1000, 3 * MIB, 77 * MIB + 13):
        assert pair.split(size) == split(size, pair.paths)
    assert pair.joint_bandwidth() == pytest.approx(sum(p.bandwidth for p in pair.paths))


def test_more_peers_are_bounded_by_the_cpus_links(cm384: Fabric) -> None:
    peers = [f"node0/npu{i}/die0" for i in range(1, 8)]
    many = cm384.paths(TARGET, via=peers)
    assert many.joint_bandwidth() == pytest.approx(160e9)
    assert sum(p.bandwidth for p in many.paths) > 400e9
    shares = many.split(256 * MIB)
    assert sum(shares) == 256 * MIB
    assert 256 * MIB / many.seconds(shares) <= 160e9


def test_a_shared_pcie_switch_is_not_counted_twice() -> None:
    fabric = load("pcie4")
    target = "socket0/board0/gpu0"
    sibling = fabric.paths(target, via=["socket0/board0/gpu1"])
    other = fabric.paths(target, via=["socket0/board1/gpu0"])
    assert sibling.joint_bandwidth() == pytest.approx(26e9)
    assert sibling.split(256 * MIB) == [256 * MIB, 0]
    assert other.joint_bandwidth() > 45e9
    assert min(other.split(256 * MIB)) > 0


def test_a_peer_behind_the_targets_own_link_does_not_help() -> None:
    pcie5 = load("pcie5")
    assert pcie5.paths("gpu0").split(256 * MIB) == [256 * MIB, 0]


def test_both_directions_and_duplex() -> None:
    pcie5 = load("pcie5")
    assert isinstance(pcie5, Fabric)
    down = pcie5.path("gpu0")
    up = pcie5.path("gpu0", direction="d2h")
    assert down.bandwidth == up.bandwidth
    assert set(down.uses) & set(up.uses) == {"pcie cpu<>gpu0"}
    assert pcie5.capacity["pcie cpu<>gpu0"] == 95e9


def test_a_half_duplex_link_crossed_twice_halves_the_path() -> None:
    fabric = parse(
        """
        name: bus
        hosts: [cpu]
        devices: [a, b]
        switches: [hub]
        links:
          - {ends: [cpu, hub], kind: host, bandwidth: 100 GB/s, latency: 0 s}
          - {ends: [a, hub], kind: pcie, bandwidth: 10 GB/s, latency: 0 s, duplex: half}
          - {ends: [b, hub], kind: pcie, bandwidth: 40 GB/s, latency: 0 s}
        """
    )
    assert fabric.path("b", via="a").bandwidth == pytest.approx(5e9)
    assert fabric.path("a").bandwidth == pytest.approx(10e9)


def test_bad_questions_are_refused(cm384: Fabric) -> None:
    with pytest.raises(KeyError, match="node99"):
        cm384.path("node99/npu0/die0")
    with pytest.raises(ValueError, match="cannot assist"):
        cm384.path(TARGET, via=TARGET)
    with pytest.raises(ValueError, match="cannot assist"):
        cm384.path(TARGET, via="node0/cpu1")
