"""The metrics file is readable at any moment and can be cut back; the plot is optional."""

import json
import sys

import pytest

from memferry_ascend import files
from memferry_ascend.train import metrics, plots

RECORDS = [
    {"step": 1, "loss": 5.0, "held_out_start": 5.5},
    {"step": 2, "loss": 4.0},
    {"step": 3, "loss": 3.0, "held_out": 3.5},
]


def test_each_record_is_readable_at_once_and_cutting_drops_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as log:
        for count, record in enumerate(RECORDS, 1):
            log.write(record)
            assert metrics.read(path) == RECORDS[:count]
        with pytest.raises(ValueError, match="not JSON compliant"):
            log.write({"step": 4, "loss": float("nan")})
    with path.open("a") as stream:
        stream.write('{"step": 4, "lo')  # killed while writing
    assert metrics.read(path) == RECORDS
    metrics.cut(path, path, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == RECORDS[:2]
    metrics.cut(tmp_path / "none", tmp_path / "new", 5)
    assert (tmp_path / "new").read_text() == ""
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "new"}


def test_replacing_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")

    def write():
        with files.replacing(path) as stream:
            stream.write(b"half")
            assert path.read_text() == "old"
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, float("inf"))
    assert path.read_text() == "old"


def test_plot_is_a_png_or_a_sentence(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert plots.save_loss(tmp_path / "loss.png", RECORDS, 3.2) is None
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is not installed" in plots.save_loss(tmp_path / "none.png", RECORDS, 3.2)
    assert not (tmp_path / "none.png").exists()
