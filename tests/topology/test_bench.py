"""The benchmark runs and states what it measured; its figures are not asserted."""

import importlib.util
import sys
from pathlib import Path as FilePath

ROOT = FilePath(__file__).parents[2]


def test_emulated_links_benchmark_runs() -> None:
    spec = importlib.util.spec_from_file_location("emulated_links", ROOT / "tools/bench/emulated_links.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["emulated_links"] = bench  # dataclasses look their module up
    try:
        spec.loader.exec_module(bench)
        result = bench.measure(1, 0.005, [64 << 10, 8 << 20])
    finally:
        del sys.modules["emulated_links"]
    assert result["emulated"] is True
    assert len(result["rows"]) == 2 * 2 * 4
    for row in result["rows"]:
        assert sum(row["bytes_per_path"].values()) == row["bytes"]
        assert row["seconds"] > 0
