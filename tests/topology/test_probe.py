"""The probe: what it measures on emulated links, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from memferry_ascend.topology import Fabric, Measured, MeasuredPath, load, probe
from memferry_ascend.topology.measured import Figures
from memferry_ascend.topology.probe import Way, best_peers
from memferry_ascend.topology.probe_report import matrix, table

from memferry_ascend import runtime
from memferry_ascend.backends.base import HostSlab
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.cli import main
from memferry_ascend.errors import FerryError

TARGET, PEER = "node0/npu0/die0", "node0/npu4/die0"
SIZES = [4 << 10, 256 << 10, 1 << 20, 4 << 20]

NARROW = """
name: narrow
hosts: [cpu]
switches: [bus]
devices: [{name: npu, count: 2}]
launch_latency: 20 us
links:
  - {ends: [cpu, bus], kind: ub, bandwidth: 20 GB/s, latency: 1 us}
  - {ends: ["npu*", bus], kind: ub, bandwidth: 200 GB/s, latency: 1 us, flow: 15 GB/s}
"""


def cm384() -> Fabric:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    return fabric


def test_emulated_links_are_found_again(tmp_path: Path) -> None:
    fabric = cm384()
    found = probe(fabric=fabric, target=TARGET, via=[PEER], sizes=SIZES, repeats=3)
    assert [p.name for p in found.measured] == ["direct", f"via {PEER}"]
    assert found.machine["emulated"] is True and found.machine["time_scale"] > 1
    for path in found.measured:
        want = fabric.path(TARGET, via=path.via)
        for figures in (path.h2d, path.d2h):
            assert figures is not None
            # The smallest copies take 10 ms of wall-clock time; a machine under load wakes late. No upper bound on how
            # late is asserted, only that emulated links are not faster than they are, and the samples are all there.
            assert all(t >= 0.99 * want.seconds(n) for n, t in figures.samples)
            assert len(figures.samples) == 3 * len(SIZES)
    file = tmp_path / "paths.json"
    found.save(file)
    assert load(str(file)) == found
    rt = runtime.init(topology=str(file), backend="cpu")
    assert [p.name for p in rt.topology.paths(TARGET).paths] == ["direct", f"via {PEER}"]
    assert "not a measurement" in table(found)
    assert matrix(found).count("direct") >= 4


def test_a_shared_link_is_found(tmp_path: Path) -> None:
    file = tmp_path / "narrow.yaml"
    file.write_text(NARROW)
    fabric = load(str(file))
    assert isinstance(fabric, Fabric)
    # 15 GB/s each, 20 together: late wake-ups only make less of it.
    found = probe(fabric=fabric, via=["npu1"], sizes=[64 << 10, 4 << 20], repeats=2)
    assert {s.direction for s in found.shared} == {"h2d", "d2h"}
    assert all(s.bandwidth < 20.2e9 for s in found.shared)
    assert "share a bottleneck" in matrix(found)
    assert best_peers(fabric, "npu0") == ["npu1"]


def test_the_cpu_backend_as_it_is() -> None:
    backend = CpuBackend()
    found = probe(backend, sizes=[64 << 10, 8 << 20], repeats=3)
    backend.close()
    (path,) = found.measured
    assert (path.name, path.device, path.via) == ("direct", "cpu:0", None)
    assert found.machine["emulated"] is False
    assert backend.memory_stats().allocated == 0


def test_a_line_is_fitted_where_the_path_is_used() -> None:
    """Relays of small copies are one chunk; those that training queues are several, and begin later."""
    samples = [(n, 1e-5 + n / 1e9) for n in (1000, 10_000)] + [(n, 5e-5 + n / 1e9) for n in (10**6, 10**7)]
    none = torch.empty(0, dtype=torch.uint8)
    backend = CpuBackend()
    way = Way(
        "via", "host", "cpu:0", "cpu:1", HostSlab(0, none, None), none, {}, (backend.event(), backend.event())
    )
    way.samples["h2d"], way.least = samples, 10**6
    assert way.counted("h2d") == samples[2:]
    way.least = 10**7
    assert way.counted("h2d") == samples, "one size makes no line"


def test_changed_data_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    stream = backend.stream("probe direct d2h")

    def flip(_stream: object, dst: torch.Tensor, src: torch.Tensor) -> bool:
        dst.copy_(src)
        dst[-1] += 1
        return True

    stream.carrier = flip
    with pytest.raises(FerryError, match="direct d2h delivered 1 of 4096 bytes changed"):
        probe(backend, sizes=[4096, 4 << 20], repeats=1)
    backend.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [4096]}, "at least two sizes"),
        ({"sizes": [0, 4096]}, "above 0 bytes"),
        ({"repeats": 0}, "at least one repeat"),
        ({"target": "node9/nothing"}, "has no device"),
        ({"target": TARGET, "via": [TARGET]}, "cannot assist"),
        ({"via": ["node0/cpu0"]}, "cannot assist"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe(fabric=cm384(), **options)  # type: ignore[arg-type]


def test_options_of_emulation_need_a_fabric() -> None:
    with pytest.raises(ValueError, match="belong to an emulated fabric"):
        probe(CpuBackend(), target=TARGET)


def test_the_command_prints_tables_and_writes_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, plot = tmp_path / "p.json", tmp_path / "p.png"
    words = ["probe", "--fabric", "cm384", "--emulate", "--sizes", "64KiB", "2097152", "--repeats", "3"]
    assert main([*words, "--out", str(out), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "latency us" in shown and "h2d GB/s" in shown and "slowed" in shown
    assert isinstance(load(str(out)), Measured)
    assert plot.stat().st_size > 1000


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--backend", "cpu", "--sizes", "65536", "4MiB", "--repeats", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "memferry-topology"
    assert document["paths"][0]["h2d"]["bandwidth"] > 0


def test_the_command_plans_a_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    words = [
        "probe",
        "--plan-node",
        "cm384",
        "--train",
        "node0/npu[0-3]/die0",
        "--assist",
        "node0/npu[4-7]/die0",
    ]
    assert main([*words, "--plot", str(plot)]) == 0
    assert "assisted by" in capsys.readouterr().out
    assert plot.stat().st_size > 1000
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["loads"]) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fabric", "cm384"], "go together"),
        (["--emulate"], "go together"),
        (["--fabric", "cm385", "--emulate"], "cm385"),
        (["--fabric", "cm384", "--emulate", "--backend", "cuda"], "runs on the cpu backend"),
        (["--sizes", "12 parsecs"], "unknown unit"),
        (["--plan-node", "cm384", "--train", "nobody"], "no device matches"),
        (["--train", "x"], "belongs to --plan-node"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *words]) == 2
    assert message in capsys.readouterr().err


def test_tables_of_a_file_without_samples() -> None:
    figures = Figures(1e-5, 5e10)
    bare = Measured("old", (MeasuredPath("direct", "host", "cuda:0", None, figures, None),))
    assert "50.00" in table(bare) and "50.00" in matrix(bare)
