"""Runs of the whole command, with plain PyTorch or an engine that misbehaves on purpose."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

from memferry_ascend import cli
from memferry_ascend.train import checkpoints, command, engines, loop, metrics, options

TEXT = b"the quick brown fox jumps over the lazy dog. " * 200
COMMON = ["--backend", "cpu", "--planner", "rules", "--precision", "fp32", "--context", "16", "--batch", "4"]
COMMON += ["--eval-every", "4", "--eval-batches", "2", "--json"]


@pytest.fixture(autouse=True)
def one_small_model(monkeypatch):
    monkeypatch.setitem(
        command.train_options.PRESETS, "gpt-tiny", loop.models.Shape(layers=1, width=16, heads=2, context=16)
    )


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_bytes(TEXT)

    def run(*words, arm=engines.arm, expect=0, plain=True):
        monkeypatch.setattr(command.run, "__defaults__", (arm,))
        base = ["train", "--text", str(tmp_path / "text"), "--model", "gpt-tiny", *COMMON]
        base += ["--plain"] if plain else []
        code = cli.main(["train", *words] if "--resume" in words else [*base, *words])
        out, err = capsys.readouterr()
        assert code == expect, err
        return json.loads(out) if out else err

    return run


def recorded(folder, *, without=("tokens_per_s",)):
    return [
        {k: v for k, v in record.items() if k not in without}
        for record in metrics.read(folder / "metrics.jsonl")
    ]


def same(a, b):
    """Whether two nested states hold the same bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Meddling(engines.PlainEngine):
    """A plain engine that calls `at[step]()` after that step's update; counts what is closed."""

    def __init__(self, at, *args):
        super().__init__(*args)
        self.steps, self.at, self.closed = 0, at, 0
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_):
        self.steps += 1
        self.at.get(self.steps, lambda: None)()

    def close(self):
        super().close()
        self.closed += 1


def meddling(at, made):
    def arm(model, optimizer, _sample, given):
        made.append(Meddling(at, model, optimizer, given))
        return made[-1]

    return arm


def test_a_run_writes_what_it_promises(train, tmp_path):
    out = tmp_path / "out"
    summary = train("--steps", "10", "--lr", "0.01", "--out", str(out), "--save-every", "4")
    records = metrics.read(out / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 11))
    for record in records:
        assert {"step", "loss", "tokens_per_s", "device_bytes", "host_bytes", "lr"} <= set(record)
        assert record["tokens_per_s"] > 0
        assert record["host_bytes"] > 0
    assert [r["step"] for r in records if "held_out" in r] == [4, 8, 10]
    assert records[0]["held_out_start"] == pytest.approx(math.log(256), abs=0.2)
    assert summary["held_out_loss"] == records[-1]["held_out"] < records[0]["held_out_start"] - 0.2
    assert summary["final_loss"] == records[-1]["loss"]
    assert summary["unigram_entropy"] == pytest.approx(2.9, abs=0.4)
    assert summary["tokens_per_s"] > 0
    assert summary["stopped"] is False
    if summary["peak_device_bytes"] is not None:  # plain training on the CPU has no device
        device = sum(n for place, _, n in summary["memory"] if place == "device")
        assert summary["peak_device_bytes"] >= device > 0
    assert summary["paths"]["checkpoint"].endswith("step-000010")
    assert summary == json.loads((out / "summary.json").read_text()) | {"stopped": False}
    assert [c.name for c in checkpoints.complete(out / "checkpoints")] == ["step-000008", "step-000010"]


def test_accumulation_gives_the_same_losses(train, tmp_path):
    for name, parts in (("one", "1"), ("four", "4")):
        train("--steps", "5", "--out", str(tmp_path / name), "--accumulate", parts)
    for one, four in zip(recorded(tmp_path / "one"), recorded(tmp_path / "four"), strict=True):
        assert one["loss"] == pytest.approx(four["loss"], rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "ferry"])
def test_resumed_metrics_are_identical(train, tmp_path, plain, precision):
    whole, parts, moved = tmp_path / "whole", tmp_path / "parts", tmp_path / "moved"
    words = ["--steps", "10", "--save-every", "3", "--keep", "0", "--precision", precision, "--clip", "1"]
    train(*words, "--out", str(whole), plain=plain)
    train(*words, "--out", str(parts), plain=plain)
    train("--resume", str(parts / "checkpoints" / "step-000003"), "--json")  # goes back, options as they were
    assert recorded(parts) == recorded(whole)
    train("--resume", str(parts / "checkpoints" / "step-000006"), "--json", "--out", str(moved))
    assert recorded(moved) == recorded(whole)
    states = [checkpoints.load(checkpoints.find(p))[0]["engine"] for p in (whole, parts, moved)]
    assert same(states[1], states[0])
    assert same(states[2], states[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_engine_trains_as_plain_pytorch(train, tmp_path, precision):
    words = ["--steps", "10", "--precision", precision, "--accumulate", "2", "--lr", "0.01"]
    for name, plain in (("plain", True), ("ferry", False)):
        train(*words, "--out", str(tmp_path / name), plain=plain)
    sizes = ("tokens_per_s", "device_bytes", "host_bytes")
    plain, ferry = (recorded(tmp_path / name, without=sizes) for name in ("plain", "ferry"))
    assert plain[0] == ferry[0]
    for theirs, ours in zip(plain, ferry, strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-4), key
    assert (tmp_path / "ferry" / "plan.json").exists()


def test_killed_run_resumes_identically(train, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = ["--steps", "8", "--save-every", "2"]
    train(*words, "--out", str(whole))
    script = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_loop as t
from memferry_ascend import cli
t.command.train_options.PRESETS["gpt-tiny"] = t.loop.models.Shape(layers=1, width=16, heads=2, context=16)
t.command.run.__defaults__ = (t.meddling({{5: lambda: os.kill(os.getpid(), signal.SIGKILL)}}, []),)
cli.main(["train", "--text", {str(tmp_path / "text")!r}, "--model", "gpt-tiny", "--out", {str(killed)!r},
          "--plain", *t.COMMON, *{words!r}])
"""
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert recorded(killed) == recorded(whole)[:4]
    train("--resume", str(killed), "--json")
    assert recorded(killed) == recorded(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_step_and_can_be_resumed(train, tmp_path, number, code):
    whole, out = tmp_path / "whole", tmp_path / "out"
    train("--steps", "8", "--out", str(whole))
    made = []
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    arm = meddling({3: lambda: os.kill(os.getpid(), number)}, made)
    summary = train("--steps", "8", "--out", str(out), arm=arm, expect=code)
    assert summary["stopped"] is True
    assert summary["step"] == 3
    assert made[0].closed
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert recorded(out) == recorded(whole)[:3]
    train("--resume", str(out), "--json")
    assert recorded(out) == recorded(whole)


def test_a_second_interrupt_stops_at_once(train, tmp_path):
    def twice():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    made = []
    words = ["--steps", "8", "--save-every", "2", "--out", str(tmp_path / "out")]
    err = train(*words, arm=meddling({3: twice}, made), expect=130)
    assert "stopped after step 2; go on with: memferry train --resume" in err
    assert made[0].closed
    assert len(recorded(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("every", "what"), [("5", "loss became nan at step 5"), ("4", "held-out loss became nan at step 4")]
)
def test_a_loss_that_is_not_finite_stops_with_a_sentence(train, tmp_path, every, what):
    made = []

    def ruin():
        made[0].model.ln.weight.data.fill_(float("nan"))

    words = ["--steps", "8", "--save-every", "2", "--out", str(tmp_path / "out"), "--eval-every", every]
    err = train(*words, arm=meddling({4: ruin}, made), expect=2)
    assert f"the {what}: try a lower --lr" in err
    assert "resuming from" in err
    assert made[0].closed
    assert len(recorded(tmp_path / "out")) == int(what[-1]) - 1


def test_no_run_is_overwritten_or_mixed_by_accident(train, tmp_path):
    out = str(tmp_path / "out")
    train("--steps", "4", "--out", out)
    before = recorded(tmp_path / "out")
    assert "already holds a run" in train("--steps", "4", "--out", out, expect=2)
    assert "nothing is left" in train("--resume", out, expect=2)
    assert "trained with --model gpt-tiny" in train(
        "--resume", out, "--steps", "9", "--context", "8", expect=2
    )
    assert recorded(tmp_path / "out") == before
    train("--resume", out, "--steps", "6", "--json")
    assert [r["step"] for r in recorded(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    train("--steps", "2", "--out", out, "--overwrite", "--save-every", "0")
    assert len(recorded(tmp_path / "out")) == 2
    assert checkpoints.latest(tmp_path / "out" / "checkpoints") is None


def test_what_is_refused_is_refused_before_anything_is_written(train, tmp_path):
    out = tmp_path / "out"

    def refuse(*_):
        raise loop.FerryError("needs 9.00 GiB and has 1.00 GiB")

    assert "needs 9.00 GiB" in train("--steps", "4", "--out", str(out), arm=refuse, expect=2)
    assert "--batch must be a multiple of 3" in train("--accumulate", "3", "--out", str(out), expect=2)
    assert not out.exists()


def test_schedule_warms_up_and_decays():
    o = options.resolve({"steps": 100, "warmup": 10})
    factors = [loop.learning_rate(step, o) for step in range(101)]
    assert factors[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)
    assert loop.learning_rate(0, options.resolve({"steps": 1})) == 1.0


def test_ranks_share_a_global_batch():
    rows = {"tokens": torch.arange(12).unsqueeze(1), "targets": torch.arange(12).unsqueeze(1)}
    seen = []
    for rank in range(2):
        micros = list(loop.World(rank, 2).micro_batches(rows, 3))
        assert [len(m["tokens"]) for m in micros] == [2, 2, 2]
        seen.append([m["tokens"].flatten().tolist() for m in micros])
    assert seen == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_people_see_progress_plan_and_memory(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    words = [w for w in COMMON if w != "--json"] + ["--plain", "--model", "gpt-tiny", "--steps", "3"]
    assert cli.main(["train", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "o"), *words]) == 0
    shown = capsys.readouterr().out
    for piece in ("step 3/3  loss", "tokens/s", "plain PyTorch", "optimizer state", "unigram entropy"):
        assert piece in shown
    assert "KiB" in shown
