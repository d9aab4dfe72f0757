"""`memferry lend`: a process of its own that owns an idle device, ended and killed while others train through it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import assert_same, make_model, plan_of, toy_fabric, train
from test_cli import run

import memferry_ascend as mf
from memferry_ascend import lending, runtime, transfers
from memferry_ascend.planner import Mode


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setenv(lending.OWNERS, f"test-{os.getpid()}")
    words = [sys.executable, "-m", "memferry_ascend", "lend", "--backend", "cpu", "--device", "1"]
    process = subprocess.Popen([*words, "--memory", "1MiB"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "device 1 (cpu): lends up to 1.00 MiB\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Callable[[int], None]) -> int:
    """Train through device 1, which somebody else owns; `at` hears of each chunk. How many there were."""
    monkeypatch.setattr(transfers, "CHUNK", 512)
    file = tmp_path / "toy.yaml"
    file.write_text(toy_fabric(2, host=900))
    rt = runtime.init(topology=str(file), backend="cpu")
    model = make_model(1)
    want = train(model, plan_of(model, Mode.GFGB), serial=True)
    chunks = 0

    def disturb(point: str) -> None:
        nonlocal chunks
        if point == "path:via npu1":
            chunks += 1
            assert rt.backend.lending is not None and 1 in rt.backend.lending.links
            at(chunks)

    model = make_model(1)
    config = mf.Config(precision="fp32", assist_devices=(1,))
    assert_same(want, train(model, plan_of(model, Mode.STREAM), config=config, disturb=disturb))
    assert rt.backend.lending is None
    return chunks


def test_an_owner_lends_until_it_is_told_to_stop(
    owner: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained(tmp_path, monkeypatch, lambda _n: None) > 20
    code, out, err = run(capsys, "lend", "--backend", "cpu", "--device", "1")
    assert (code, out) == (2, "") and err.startswith("memferry: device 1 is lent by another process already")
    owner.send_signal(signal.SIGTERM)
    assert owner.wait(30) == 0


def test_training_goes_on_when_the_owner_is_killed(
    owner: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(chunk: int) -> None:
        if chunk == 20:
            owner.kill()
            owner.wait()

    with pytest.warns(
        RuntimeWarning, match="npu1 failed .the process that owns device 1 is gone.*nothing was lost"
    ):
        assert trained(tmp_path, monkeypatch, kill) >= 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "-1", "--backend", "cpu"), "expected an index of at least 0, got -1"),
        (("--device", "0", "--backend", "tpu"), "unknown backend 'tpu'"),
        (("--device", "0", "--backend", "cpu", "--memory", "much"), "much"),
        (("--backend", "cpu"), "--device"),
    ],
)
def test_bad_words_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, "lend", *words)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
