"""Reports compute what they say, from any recording, with and without matplotlib."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner.helpers import layer, profile_of

from memferry_ascend import cli, files, report
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import LayerPlan, Plan, simulate
from memferry_ascend.recording import Interval, Recording, load, trace_events

MADE = Recording(
    intervals=(
        Interval("h2d", "upload", "a", 1.0, 2.0, 1000, (1000,)),
        Interval("compute", "forward", "a", 2.0, 4.0),
        Interval("compute", "wait", "b", 4.0, 5.0),
        Interval("h2d", "reload", "b", 4.0, 5.0, 512, (512,)),
        Interval("compute", "backward", "a", 5.0, 9.0),
        Interval("d2h", "download", "a", 8.0, 10.0, 800, (300, 500)),
        Interval("host", "update", "a", 11.0, 12.0),
        Interval("host", "update", "a", 21.0, 23.0),
    ),
    steps=(1.0, 11.0, 21.0),
    phases=(("forward", 2.0, 5.0), ("backward", 5.0, 9.0), ("update", 11.0, 12.0), ("update", 21.0, 23.0)),
    device_memory=((1.0, 100), (5.0, 300), (30.0, 50)),
    host_memory=((1.0, 7000),),
    device={"backend": "cpu"},
)


def with_prediction() -> Recording:
    profile = profile_of(layer("a"), layer("b"))
    return replace(MADE, predicted=simulate(profile, Plan((LayerPlan("a"), LayerPlan("b")))))


def test_the_timeline_of_a_recording() -> None:
    timeline = MADE.timeline()
    assert timeline.period == 10.0 and timeline.cycle == 2
    assert timeline.intervals["h2d"] == ((0.0, 1.0, "upload a"), (3.0, 4.0, "reload b"))
    assert timeline.intervals["host"] == (
        (10.0, 11.0, "update a"),
    )  # what comes after the last step is not in it
    assert timeline.busy == {"compute": 3.0, "h2d": 1.0, "d2h": 1.0, "host": 0.5}
    # 2 s of copies alone, 1 s of a host update alone, 1 s of a download alone, the rest computes or idles
    assert timeline.critical_path == {"compute": 8.0, "h2d": 1.0, "d2h": 0.5, "host": 0.5}
    assert sum(timeline.critical_path.values()) == pytest.approx(timeline.period)
    assert timeline.critical == "compute"
    assert timeline.device_bytes == ((0.0, 100), (4.0, 300))
    assert type(timeline).from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_throughput_counts_the_part_of_a_copy_that_lies_in_the_phase() -> None:
    found = MADE.throughput()
    assert found["forward"]["h2d"] == pytest.approx(512 / 3)  # 1 s of the reload; the upload came before
    assert found["backward"] == {"h2d": 0.0, "d2h": pytest.approx(400 / 4)}  # half of the download
    assert found["update"] == {"h2d": 0.0, "d2h": 0.0}
    assert replace(MADE, phases=()).throughput()["forward"] == {"h2d": 0.0, "d2h": 0.0}


def test_transfer_sizes_are_of_tensors_by_powers_of_two() -> None:
    assert MADE.transfer_sizes("h2d") == [(512, 1), (1024, 1)]
    assert MADE.transfer_sizes("d2h") == [(512, 2)]


def test_last_iteration() -> None:
    last = MADE.last_iteration()
    assert last["host"] == [(0.0, 1.0, "update a")]
    assert last["h2d"] == []


def test_a_recording_survives_json() -> None:
    for made in (MADE, with_prediction(), Recording()):
        assert Recording.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), "expected a recording"),
        (lambda d: d.update(version=99), "recording version 1, found 99"),
        (lambda d: d.pop("steps"), "damaged .KeyError"),
        (lambda d: d["intervals"][0].update(colour=1), "damaged .TypeError"),
    ],
)
def test_damaged_recordings_are_refused(change: Any, message: str) -> None:
    document = MADE.to_json()
    change(document)
    with pytest.raises(FerryError, match=message):
        Recording.from_json(document)


def save(made: Recording, folder: Path) -> None:
    files.write_json(folder / "trace.json", trace_events(made))


def test_report_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(with_prediction(), tmp_path)
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["period"]["measured"] == 10.0 and found["period"]["predicted"] > 0
    assert found["prediction_error"] == pytest.approx(found["period"]["predicted"] / 10 - 1)
    assert found["transfer_sizes"]["d2h"] == [[512, 2]]
    assert found["peak_device_bytes"] == 300 and found["moved_per_step"]["h2d"] == pytest.approx(1512 / 3)
    for name in ("timeline.png", "report.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert cli.main(["report", str(tmp_path / "trace.json")]) == 0
    text = capsys.readouterr().out
    assert "period" in text and "backward" in text and "512 B" in text and "10000.000" in text


def test_without_matplotlib_there_is_text_and_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    save(MADE, tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "matplotlib is not installed" in out and "10000.000" in out
    assert not (tmp_path / "report.png").exists()


def test_what_is_no_run_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "broken.json").write_text("{")
    save(replace(MADE, steps=(1.0,)), tmp_path)
    for name, message in (
        ("missing", "no such trace"),
        ("other.json", "expected a trace written by memferry"),
        ("broken.json", "does not parse"),
        ("trace.json", "at least two optimizer steps"),
    ):
        assert cli.main(["report", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and out == ""


def test_a_picture_needs_two_steps_and_says_so(tmp_path: Path) -> None:
    note = report.draw_timeline(replace(MADE, steps=()), tmp_path / "timeline.png")
    assert note is not None and "two optimizer steps" in note
    with pytest.raises(FerryError):
        load(tmp_path)
