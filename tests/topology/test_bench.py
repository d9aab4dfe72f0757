"""The benchmarks run and state what they measured; no timing is asserted."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType

import pytest

ROOT = FilePath(__file__).parents[2]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A program of tools/bench, by name."""
    name = request.param
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/bench/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("bench", ["relay"], indirect=True)
def test_the_relay_benchmark_runs(bench: ModuleType, tmp_path: FilePath) -> None:
    result = bench.measure(1, 0.005, [64 << 10, 8 << 20])
    assert result["emulated"] is True
    assert len(result["rows"]) == 2 * 2 * 4
    for row in result["rows"]:
        assert sum(row["bytes_per_path"].values()) == row["bytes"]
        assert row["seconds"] > 0 and row["time_scale"] > 0
    bench.plot(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.parametrize("bench", ["assisted"], indirect=True)
def test_four_that_train_with_four_that_assist_end_with_the_same_bits(
    bench: ModuleType, tmp_path: FilePath
) -> None:
    work = bench.Work(layers=2, width=1024, forward=1e-4, backward=1e-4, steps=4, time_scale=20.0)
    result = bench.measure(work, 1)
    assert result["same_bits"] is True
    assert sorted(peer for peers in result["assist"].values() for peer in peers) == [
        f"node0/npu{i}/die0" for i in range(4, 8)
    ]
    by_scheme = {row["scheme"]: row for row in result["rows"]}
    assert set(by_scheme["direct"]["bytes"]) == {"direct"}
    total = by_scheme["direct"]["bytes"]["direct"]
    for scheme in ("static", "dynamic"):
        carried = by_scheme[scheme]["bytes"]
        assert sum(carried.values()) == total  # every copy, whichever way
        assert all(carried[f"via node0/npu{i}/die0"] > 0 for i in range(4, 8)) or scheme == "dynamic"
        row = by_scheme[scheme]
        assert row["predicted_share"] < by_scheme["direct"]["predicted_share"]
        assert row["predicted_iteration"] < by_scheme["direct"]["predicted_iteration"]
    bench.plot(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.parametrize("bench", ["assisted"], indirect=True)
def test_other_bits_would_be_noticed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    work = bench.Work(layers=1, width=1024, forward=0.0, backward=0.0, steps=3, time_scale=1.0)
    real = bench.train

    def train(work: object, scheme: str, fabric: object) -> list:
        ran = real(work, scheme, fabric)
        if scheme == "dynamic":
            ran[2].digest = "other"
        return ran

    monkeypatch.setattr(bench, "train", train)
    assert bench.measure(work, 1)["same_bits"] is False


@pytest.mark.parametrize("bench", ["probe_check"], indirect=True)
def test_the_probe_is_compared_with_plain_copies(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On invented figures: what is compared is what was measured, and 5 % is the limit."""
    theirs = {"h2d": (10e-6, 50e9), "d2h": (10e-6, 50e9)}
    ours = {"h2d": (10.4e-6, 52e9), "d2h": (9.4e-6, 44e9)}
    monkeypatch.setattr(bench, "plain", lambda *_: theirs)
    monkeypatch.setattr(bench, "probed", lambda _: ours)
    rows = bench.measure("cpu", 1, 1, [4096, 1 << 20])["rows"]
    assert [(r["direction"], r["what"], r["met"]) for r in rows] == [
        ("h2d", "latency", True), ("h2d", "bandwidth", True), ("d2h", "latency", False), ("d2h", "bandwidth", False),
    ]  # fmt: skip


@pytest.mark.parametrize("bench", ["probe_check"], indirect=True)
def test_the_comparison_runs(bench: ModuleType) -> None:
    result = bench.measure("cpu", 1, 2, [64 << 10, 4 << 20])
    assert all(row["probe"] >= 0 and row["plain"] >= 0 for row in result["rows"])
    assert len(result["rows"]) == 4
