"""Bad input and broken surroundings, a table: each ends in the named error and leaves files and parameters as they were."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memferry_ascend import cli, runtime
from memferry_ascend.train import models
from memferry_ascend.train import options as train_options

from . import arming, command, loops, settings, states  # noqa: F401  # each adds its cases to the table
from .world import CASES, Case, World

SHAPE = models.Shape(layers=1, width=8, heads=2, context=8)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with two checkpoints each, texts and YAML files."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "empty").write_bytes(b"")
    (folder / "short").write_bytes(b"short")
    (folder / "hollow").mkdir()
    (folder / "bad.yaml").write_text("a: [")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "key.yaml").write_text("stepz: 3\n")
    train_options.PRESETS["gpt-bad"] = SHAPE
    words = (
        f"train --model gpt-bad --steps 4 --batch 2 --save-every 2 --eval-batches 1 --text {folder / 'text'}"
    )
    words += " --backend cpu --precision fp32 --json"
    for name in ("run", "second"):
        assert cli.main([*words.split(), "--out", str(folder / name)]) == 0
    runtime.reset()
    return folder


@pytest.fixture
def world(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, request: Any
) -> Iterator[World]:
    folder = tmp_path / "world"
    shutil.copytree(prepared, folder)
    for meta in folder.rglob("meta.json"):
        meta.write_text(meta.read_text().replace(str(prepared), str(folder)))
    monkeypatch.setitem(train_options.PRESETS, "gpt-bad", SHAPE)
    if "init" in request.node.name:
        runtime.init("auto", "cpu")
    w = World(folder, monkeypatch, capsys)
    w.remember()
    yield w
    if runtime._current is not None:
        runtime.current().backend.disturb = None


def names() -> list[str]:
    return [c.name for c in CASES]


@pytest.mark.parametrize("bad", CASES, ids=lambda c: c.name)
def test_ends_in_the_named_error_and_changes_nothing(bad: Case, world: World) -> None:
    runtime.init(backend="cpu")
    with pytest.raises(bad.error, match=f"(?s){bad.match}"):
        bad.do(world)
    world.patch.undo()
    runtime.current().backend.disturb = None
    world.check(bad.may_add)


def test_there_are_at_least_a_hundred_different_ones() -> None:
    assert len(set(names())) == len(CASES) >= 100
