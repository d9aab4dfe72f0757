"""The recorder sees every copy, update, fold and layer, changes no bit, and is gone when off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ALL_POINTS, Delays, batches, make_model, plan_of, small_units

import memferry_ascend as mf
from memferry_ascend import recording, runtime
from memferry_ascend.planner import Grad, Mode, Plan, Update

FP32 = mf.Config(precision="fp32")
pytestmark = pytest.mark.usefixtures("cpu")


def arm(mode: Mode = Mode.GFGB, config: mf.Config = FP32, seed: int = 4, **kwargs: Any) -> mf.Engine:
    model = make_model(seed, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with small_units(1500):
        return mf.ferry(model, optimizer, config=config, plan=plan_of(model, mode))


def steps(engine: mf.Engine, count: int, micro: int = 1) -> list[float]:
    losses = []
    for batch in batches(count):
        for _ in range(micro):
            loss = engine.model(batch)
            loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def hooks(engine: mf.Engine) -> list[int]:
    modules = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules()]
    params = [len(p._post_accumulate_grad_hooks or ()) for p in engine.model.parameters()]
    return modules + params


def wrapped(engine: mf.Engine) -> list[str]:
    backend = runtime.current().backend
    targets = [*backend._streams.values(), backend, engine._jobs.worker]
    return [n for t in targets for n in ("copy", "copy_many", "copy_behind", "submit", "_at") if n in vars(t)]


def test_off_it_leaves_nothing_behind() -> None:
    with arm() as engine:
        steps(engine, 2)
        before = hooks(engine)
        assert wrapped(engine) == []
        engine.recorder.start()
        assert hooks(engine) != before and len(wrapped(engine)) >= 8
        steps(engine, 2)
        engine.recorder.stop()
        assert hooks(engine) == before
        assert wrapped(engine) == []
        steps(engine, 1)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_copy_and_update_is_seen(mode: Mode) -> None:
    with arm(mode) as engine:
        steps(engine, 2)
        engine.recorder.start()
        steps(engine, 3)
        found = engine.recorder.stop()
        sizes = {r.unit.name: r.memory.layout.nbytes for r in engine._residents}
        trainable = {r.unit.name for r in engine._residents}
    by = {}
    for x in found.intervals:
        by.setdefault((x.resource, x.what), []).append(x)
        assert x.start <= x.end
    updates = [x.name for x in by["host", "update"]]
    assert sorted(updates) == sorted(list(trainable) * 3)
    down = by["d2h", "download"]
    assert sorted(x.name for x in down) == sorted(list(trainable) * 3)
    gradients = sum(p.numel() * 4 for p in engine.model.parameters())
    assert sum(x.nbytes for x in down) == 3 * gradients
    assert all(sum(x.sizes) == x.nbytes for x in down)
    copies = [x for x in found.intervals if x.resource == "h2d"]
    if mode is Mode.DHA:
        assert not copies
    else:
        assert {x.name for x in copies} == set(sizes)
        assert all(x.nbytes == sizes[x.name] for x in copies)
    if mode is Mode.GFGB:
        assert len(copies) == 3 * len(sizes)
    if mode is Mode.DFGB:
        assert {x.what for x in copies} == {"reload"}
    layers = {x.name for x in by["compute", "forward"]}
    assert {"embed", "final"} <= layers and by["compute", "backward"]
    assert len(found.steps) == 3
    assert {n for n, _, _ in found.phases} == {"forward", "backward", "update"}
    assert sum(n == "forward" for n, _, _ in found.phases) == 3
    assert found.device_memory and found.host_memory


@pytest.mark.parametrize("mode", [Mode.GFGB, Mode.STREAM])
@pytest.mark.parametrize("checkpoint", [None, "plain", "reentrant"])
def test_recording_changes_no_bit(mode: Mode, checkpoint: str | None) -> None:
    def losses(record: bool) -> tuple[list[float], Any]:
        with arm(mode, mf.Config(), checkpoint=checkpoint) as engine:
            runtime.current().backend.disturb = Delays(ALL_POINTS, 1, most=0.0005)
            out = steps(engine, 2)
            if record:
                engine.recorder.start()
            out += steps(engine, 2)
            if record:
                recorded = engine.recorder.stop()
                assert any(x.what == "recompute" for x in recorded.intervals) == (checkpoint is not None)
            out += steps(engine, 1)
            runtime.current().backend.disturb = None
            return out, engine.state_dict()

    (plain, a), (recorded, b) = losses(False), losses(True)
    assert plain == recorded
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])


def test_folds_and_early_updates_are_seen() -> None:
    with arm(config=mf.Config(precision="fp32", accumulate=2)) as engine:
        engine.recorder.start()
        steps(engine, 2, micro=2)
        found = engine.recorder.stop()
        folds = [x for x in found.intervals if x.what == "fold"]
        assert len(folds) == 4 * len(engine._residents)
        assert all(x.resource == "host" for x in folds)
        assert found.timeline().period == found.period
    with arm(config=mf.Config(precision="fp32", update="backward")) as engine:
        engine.recorder.start()
        steps(engine, 3)
        found = engine.recorder.stop()
        assert len([x for x in found.intervals if x.what == "update"]) == 3 * len(engine._residents)
        assert found.timeline().update == "backward"


def test_copies_lie_inside_the_iteration_they_belong_to() -> None:
    """Order that the engine guarantees: a unit's download ends before its update begins, that before its upload."""
    with arm() as engine:
        steps(engine, 1)
        engine.recorder.start()
        steps(engine, 3)
        found = engine.recorder.stop()
    for name in {x.name for x in found.intervals if x.what == "update"}:
        rows = {
            what: [x for x in found.intervals if x.what == what and x.name == name]
            for what in ("download", "update", "upload")
        }
        for down, update, up in zip(*rows.values(), strict=True):
            assert down.start <= down.end <= update.end
            assert update.start <= update.end and up.start <= up.end
            assert down.end <= up.end


def test_a_save_is_a_trace_and_a_picture(tmp_path: Path) -> None:
    model = make_model(4)
    optimizer = torch.optim.AdamW(model.parameters())
    with mf.ferry(model, optimizer, config=FP32, sample_batch=batches(1)[0]) as engine:
        assert engine.recorder.save(tmp_path)[0].startswith("no trace.json")
        engine.recorder.start()
        steps(engine, 3)
        assert engine.recorder.save(tmp_path) == []  # ends the recording
        assert not engine.recorder.enabled
        measured = engine.plan.measured_period
    assert measured is not None
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {1, 2}  # measured and predicted
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in slices if e["pid"] == 1)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert "compute" in names and "host" in names
    assert any(e["ph"] == "C" for e in trace["traceEvents"])
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "profile.json").exists()
    loaded = recording.load(tmp_path)
    assert loaded == engine.recorder.recording
    assert loaded.predicted is not None and loaded.period == measured


@pytest.mark.parametrize("apart", [False, True])
def test_units_that_live_on_the_device_are_recorded_too(apart: bool, tmp_path: Path) -> None:
    """Their updates run on the compute stream, and nothing of them lies in the arena; beside units of the host, or alone."""
    model = make_model(4)
    layers = plan_of(model, Mode.GFGB).layers
    there = {"grad": Grad.KEEP, "update": Update.DEVICE}
    plan = Plan(tuple(x if apart and i % 2 else replace(x, **there) for i, x in enumerate(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with small_units(1500), mf.ferry(model, optimizer, config=FP32, plan=plan) as engine:
        engine.recorder.start()
        steps(engine, 2)
        found = engine.recorder.stop()
        engine.recorder.save(tmp_path)
    assert (tmp_path / "trace.json").exists()
    assert any(x.what == "forward" for x in found.intervals)
    assert any(x.what == "update" for x in found.intervals) is apart


def test_misuse_is_an_error() -> None:
    engine = arm()
    with pytest.raises(mf.FerryError, match=r"start\(\) before stop\(\)"):
        engine.recorder.stop()
    with pytest.raises(mf.FerryError, match="nothing was recorded"):
        engine.recorder.timeline()
    engine.recorder.start()
    steps(engine, 1)
    with pytest.raises(mf.FerryError, match="at least two optimizer steps"):
        engine.recorder.timeline()
    engine.recorder.start()  # forgets the first
    steps(engine, 2)
    assert len(engine.recorder.stop().steps) == 2
    engine.recorder.start()
    engine.close()  # while on
    assert wrapped(engine) == []
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in engine.model.modules())
    with pytest.raises(mf.FerryError, match="closed"):
        engine.recorder.start()


def test_an_evaluation_in_between_is_no_iteration() -> None:
    with arm() as engine:
        engine.recorder.start()
        steps(engine, 2)
        with torch.no_grad():
            engine.model(batches(1)[0])
        steps(engine, 1)
        found = engine.recorder.stop()
    assert len(found.steps) == 3
    assert sum(name == "forward" for name, _, _ in found.phases) == 4
    assert sum(name == "backward" for name, a, b in found.phases if b > a) == 3


def test_a_failed_update_is_reported_by_stop_and_recording_ends() -> None:
    engine = arm()
    steps(engine, 1)
    engine.recorder.start()

    def fail(point: str) -> None:
        if point == "update":
            raise RuntimeError("disk on fire")

    runtime.current().backend.disturb = fail
    engine.model(batches(1)[0]).backward()
    engine.optimizer.step()
    with pytest.raises(mf.FerryError, match="disk on fire"):
        engine.recorder.stop()
    runtime.current().backend.disturb = None
    with pytest.raises(mf.FerryError):
        engine.close()
    assert wrapped(engine) == []
