"""The benchmark runs and states what it measured; its figures are not asserted."""

import importlib.util
from pathlib import Path as FilePath

ROOT = FilePath(__file__).parents[2]


def test_the_relay_benchmark_runs(tmp_path: FilePath) -> None:
    spec = importlib.util.spec_from_file_location("relay", ROOT / "tools/bench/relay.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    result = bench.measure(1, 0.005, [64 << 10, 8 << 20])
    assert result["emulated"] is True
    assert len(result["rows"]) == 2 * 2 * 4
    for row in result["rows"]:
        assert sum(row["bytes_per_path"].values()) == row["bytes"]
        assert row["seconds"] > 0 and row["time_scale"] > 0
    bench.plot(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
