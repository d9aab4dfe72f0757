"""Fabric files and probe results: what is wrong is named, with its line."""

import json
from pathlib import Path as FilePath

import pytest
from memferry_ascend.topology.load import load, parse
from memferry_ascend.topology.measured import Figures, Measured, MeasuredPath, Shared
from memferry_ascend.topology.yaml_marks import FabricError

GOOD = """\
name: small
hosts: [cpu]
devices:
  - {name: npu, count: 2}
switches: [sw, up]
links:
  - {ends: [cpu, sw], kind: pcie, bandwidth: 32 GB/s, latency: 1 us}
  - {ends: [sw, "npu*"], kind: pcie, bandwidth: 16 GB/s, latency: 500 ns, count: 2}
"""


def test_a_good_file_and_its_units() -> None:
    fabric = parse(GOOD)
    assert fabric.devices == ("npu0", "npu1")
    path = fabric.path("npu1")
    assert path.bandwidth == 32e9
    assert path.latency == pytest.approx(1.5e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth: 32 GB/s", "bandwidth: 0 GB/s", r"7: .*bandwidth above zero"),
        ("bandwidth: 32 GB/s, ", "", r"7: missing 'bandwidth'"),
        ("bandwidth: 32 GB/s", "bandwidth: -3e9", r"7: .*above zero"),
        ("bandwidth: 32 GB/s", "bandwidth: 32 GBs", r"7: .*'56 GB/s'.*found '32 GBs'"),
        ("bandwidth: 32 GB/s", "bandwidth: .inf", r"7: .*found '.inf'"),
        ("bandwidth: 32 GB/s", "bandwidth: 1e999", r"7: expected a bandwidth"),
        ("latency: 500 ns", "latency: -1 us", r"8: .*latency of zero or more"),
        ("latency: 500 ns", "latency: soon", r"8: expected a time"),
        ("count: 2}\nswitches", "count: 0}\nswitches", r"4: expected a whole number from 1"),
        ("[cpu, sw]", "[cpu, swx]", r"7: unknown node 'swx'"),
        ('"npu*"', '"gpu*"', r"8: no node matches 'gpu\*'"),
        ("[cpu, sw]", "[cpu, cpu]", r"7: cpu is linked to itself"),
        ("[cpu, sw]", "[cpu]", r"7: expected two ends"),
        ("kind: pcie, bandwidth: 32", "kind: isa, bandwidth: 32", r"7: unknown link kind 'isa'"),
        ("switches: [sw, up]", "switches: [sw, sw]", r"5: switch 'sw': the name is taken \(line 5\)"),
        ("switches: [sw, up]", "switches: [sw, npu1]", r"5: .*taken \(line 4\)"),
        ("switches: [sw, up]", "switches: [sw, 'a/b']", r"5: expected a name of letters"),
        ("switches:", "switchs:", r"5: unknown key 'switchs'; did you mean 'switches'"),
        ("latency: 1 us}", "latency: 1 us, latencey: 2}", r"7: unknown key 'latencey'"),
        ("name: small\n", "", r"1: missing 'name'"),
        ("hosts: [cpu]", "hosts: cpu", r"2: expected a list, found 'cpu'"),
        ("hosts: [cpu]\n", "hosts: [cpu]\nhosts: [cpu2]\n", r"3: 'hosts' appears twice"),
        ("hosts: [cpu]", "hosts: [cpu", r"\d: not YAML"),
        ("count: 2}\n", "count: 2}\n  - lone\n", r"5: no links lead from any host to device lone"),
        ("latency: 1 us}", "latency: 1 us, duplex: 90 GB/s}", r"7: expected full, half, or one to two times"),
        ("latency: 1 us}", "latency: 1 us, flow: 33 GB/s}", r"7: one transfer \(flow\) cannot exceed"),
    ],
)
def test_a_mistake_is_named_with_its_line(old: str, new: str, message: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(FabricError, match=r"^small\.yaml:" + message):
        parse(text, "small.yaml")


def test_pcie_switches_in_a_ring_are_refused() -> None:
    ring = GOOD + "".join(
        f"  - {{ends: [{a}, {b}], kind: pcie, bandwidth: 1 GB/s, latency: 0 s}}\n"
        for a, b in (("sw", "up"), ("up", "cpu"))
    )
    with pytest.raises(FabricError, match=r"x:10: PCIe links form a cycle that up to cpu closes"):
        parse(ring, "x")
    # The same ring of UB links is a fabric like any other.
    parse(ring.replace("pcie", "ub"), "x")


def test_the_same_link_twice_is_refused() -> None:
    twice = GOOD + "  - {ends: [sw, cpu], kind: pcie, bandwidth: 1 GB/s, latency: 0 s}\n"
    with pytest.raises(FabricError, match=r"x:9: a second pcie link sw to cpu \(line 7\); use `count`"):
        parse(twice, "x")


def test_a_template_within_itself_is_refused() -> None:
    text = GOOD + (
        "templates:\n"
        "  rack:\n"
        "    use:\n"
        "      - {template: shelf, name: s}\n"
        "  shelf:\n"
        "    use:\n"
        "      - {template: rack, name: r}\n"
    )
    with pytest.raises(FabricError, match=r"x:15: template 'rack' contains itself: rack > shelf > rack"):
        parse(text, "x")
    with pytest.raises(FabricError, match=r"x:12: unknown template 'shelves'"):
        parse(text.replace("template: shelf", "template: shelves"), "x")


def test_counts_cannot_fill_memory() -> None:
    text = (
        "name: bomb\nhosts: [cpu]\n"
        "templates:\n"
        "  a: {devices: [{name: d, count: 999999}]}\n"
        "  b: {use: [{template: a, name: a, count: 999999}]}\n"
        "use: [{template: b, name: b, count: 999999}]\n"
    )
    with pytest.raises(FabricError, match="at most 100000 nodes"):
        parse(text)


def test_homes_must_be_hosts_and_devices() -> None:
    with pytest.raises(FabricError, match=r"f:10: expected one host, found sw"):
        parse(GOOD + "homes:\n  - {host: sw, devices: [npu0]}\n", "f")
    with pytest.raises(FabricError, match=r"f:10: expected devices, found switch up"):
        parse(GOOD + "homes:\n  - {host: cpu, devices: [up]}\n", "f")
    with pytest.raises(FabricError, match=r"f:11: npu0 has a home already"):
        parse(GOOD + "homes:\n  - {host: cpu, devices: [npu0]}\n  - {host: cpu, devices: ['npu*']}\n", "f")


@pytest.mark.parametrize("text", ["", "[]", "3", "name: x\n", "? [a]\n: b\n", "a: &x [*x]\n"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(FabricError, match=r"^f:1"):
        parse(text, "f")


def test_an_unknown_name_lists_what_there_is(tmp_path: FilePath) -> None:
    with pytest.raises(FileNotFoundError, match="cm384"):
        load("cm385")
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    assert load(file).name == "small"


def probed() -> Measured:
    h2d = Figures(1e-5, 55e9, ((65536, 2.2e-5), (1 << 20, 3e-5)))
    via = Figures(3e-5, 40e9)
    return Measured(
        "node-17",
        (
            MeasuredPath("direct", "host", "cuda:0", None, h2d, Figures(1e-5, 52e9)),
            MeasuredPath("via cuda:1", "host", "cuda:0", "cuda:1", via, None),
            MeasuredPath("direct", "host", "cuda:1", None, h2d, None),
        ),
        (Shared((("cuda:0", "direct"), ("cuda:0", "via cuda:1")), "h2d", 60e9),),
        "2026-05-01T12:00:00Z",
        {"backend": "cuda"},
    )


def test_a_probe_result_is_read_back(tmp_path: FilePath) -> None:
    file = tmp_path / "probe.json"
    probed().save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["probe.json"]
    measured = load(file)
    assert measured == probed()
    assert measured.devices == ("cuda:0", "cuda:1")
    paths = measured.paths("cuda:0")
    assert [p.name for p in paths.paths] == ["direct", "via cuda:1"]
    assert paths.joint_bandwidth() == pytest.approx(60e9)
    assert sum(paths.split(64 << 20)) == 64 << 20
    alone = measured.paths("cuda:1")  # shares nothing
    assert alone.joint_bandwidth() == 55e9
    assert alone.split(1000) == [1000]
    assert len(measured.paths("cuda:0", via=[])) == 1
    assert measured.paths("cuda:0", direction="d2h").paths[0].bandwidth == 52e9
    with pytest.raises(KeyError, match="no d2h path"):
        measured.paths("cuda:1", direction="d2h")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "expected version 1, found 2"),
        (lambda d: d.pop("format"), "expected a probe's JSON"),
        (
            lambda d: d["paths"][0]["h2d"].update(bandwidth=0),
            r"paths\[0\].h2d: expected a bandwidth above zero",
        ),
        (lambda d: d["paths"][0]["h2d"].pop("bandwidth"), r"paths\[0\].h2d: missing 'bandwidth'"),
        (lambda d: d["paths"][1]["h2d"].update(latency=-1), r"paths\[1\].h2d: expected a latency of zero"),
        (lambda d: d["paths"][0]["h2d"].update(samples=[[1]]), r"samples \[bytes, seconds\]"),
        (lambda d: d["paths"][2].update(device="cuda:0"), r"paths\[2\]: 'direct' of cuda:0 appears twice"),
        (lambda d: d["shared"][0].update(direction="up"), "h2d or d2h"),
        (lambda d: d["shared"][0].update(paths=[["cuda:0", "x"]]), "unknown path"),
        (lambda d: d.update(paths={}), "expected a list"),
    ],
)
def test_a_bad_probe_result_is_refused(tmp_path: FilePath, change: object, message: str) -> None:
    document = json.loads(probed().to_json())
    change(document)  # type: ignore[operator]
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(document))
    with pytest.raises(FabricError, match=message):
        load(file)
    file.write_text("{")
    with pytest.raises(FabricError, match=r"probe\.json:1: not JSON"):
        load(file)
