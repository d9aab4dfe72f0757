"""Batches repeat, never touch the held-out part, and bad texts are refused with a reason."""

import math

import numpy as np
import pytest
import torch

from memferry_ascend.errors import ConfigError
from memferry_ascend.train import data


@pytest.fixture
def corpus():
    return data.Corpus("counted", np.arange(1000).astype(np.uint8), held_out=100, files=1)


def test_batches_depend_on_seed_and_step_only(corpus):
    first = corpus.batch(3, batch=4, context=16, seed=7)
    corpus.batch(4, batch=4, context=16, seed=7)
    again = corpus.batch(3, batch=4, context=16, seed=7)
    assert torch.equal(first["tokens"], again["tokens"])
    for step, seed in ((4, 7), (3, 8)):
        assert not torch.equal(first["tokens"], corpus.batch(step, batch=4, context=16, seed=seed)["tokens"])
    assert first["tokens"].shape == first["targets"].shape == (4, 16)
    assert first["tokens"].dtype == first["targets"].dtype == torch.int64
    assert torch.equal((first["tokens"] + 1) % 256, first["targets"])


def test_every_training_start_is_reachable_and_none_is_held_out():
    text = np.concatenate([np.zeros(20, np.uint8), np.ones(9, np.uint8)])
    corpus = data.Corpus("marked", text, held_out=9, files=1)
    batch = corpus.batch(0, batch=4000, context=4)
    assert not batch["tokens"].any()
    assert not batch["targets"].any()
    counted = data.Corpus("counted", np.arange(29).astype(np.uint8), held_out=9, files=1)
    assert set(counted.batch(0, batch=4000, context=4)["tokens"][:, 0].tolist()) == set(range(16))


def test_held_out_batches_repeat_and_cover_the_tail(corpus):
    batches = list(corpus.held_out_batches(3, batch=2, context=10))
    assert [b["tokens"].shape for b in batches] == [(2, 10)] * 3
    starts = [int(x) for b in batches for x in b["tokens"][:, 0]]
    assert starts[0] == 900 % 256
    assert len(set(starts)) == 6
    assert all((b["tokens"] >= 900 % 256).all() for b in batches)
    assert torch.equal(
        batches[2]["targets"], list(corpus.held_out_batches(3, batch=2, context=10))[2]["targets"]
    )
    assert len(list(corpus.held_out_batches(100, batch=2, context=40))) == 1  # no more than the tail holds
    assert next(corpus.held_out_batches(1, batch=5, context=99))["tokens"].shape == (5, 99)


def test_unigram_entropy():
    assert data.Corpus("two", np.array([1, 2] * 8, np.uint8), 2, 1).unigram_entropy == pytest.approx(
        math.log(2)
    )
    assert str(data.Corpus("one", np.ones(8, np.uint8), 2, 1).unigram_entropy) == "0.0"


def test_folder_is_sorted_and_skips_binaries_hidden_and_caches(tmp_path):
    for name, content in {
        "b.txt": b"bb",
        "a.txt": b"aa",
        "z/c.txt": b"cc",
        "k/d.bin": b"dd\0",
        ".git/x": b"no",
        ".hidden": b"no",
        "__pycache__/y": b"no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    corpus = data.load(tmp_path, held_out=0.5)
    assert corpus.bytes.tobytes() == b"aabbcc"
    assert corpus.tail.tobytes() == b"bcc"
    assert corpus.files == 3


def test_file_is_taken_as_it_is(tmp_path):
    (tmp_path / "f").write_bytes(b"\0\xff" * 10_000)
    corpus = data.load(tmp_path / "f")
    assert corpus.bytes.tobytes() == b"\0\xff" * 10_000
    assert corpus.held_out == 1000


def test_stdlib_is_python_source():
    corpus = data.load("stdlib")
    assert len(corpus.bytes) > 1_000_000
    assert 2.5 < corpus.unigram_entropy < 3.6
    assert b"import " in corpus.tail.tobytes()


def test_bad_texts_are_refused(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bin").mkdir()
    with pytest.raises(ConfigError, match="no text at"):
        data.load(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is empty"):
        data.load(tmp_path / "empty")
    with pytest.raises(ConfigError, match="no text files"):
        data.load(tmp_path / "bin")
    (tmp_path / "bin" / "x").write_bytes(b"\0")
    with pytest.raises(ConfigError, match="no text files"):
        data.load(tmp_path / "bin")
    with pytest.raises(ConfigError, match="between 0 and 1"):
        data.load(tmp_path / "bin", held_out=1.0)


def test_unreadable_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("x")

    def refuse(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    for text in (tmp_path, tmp_path / "secret.txt"):
        with pytest.raises(ConfigError, match=r"cannot read .*secret.txt: Permission denied"):
            data.load(text)


def test_too_short_is_refused_for_either_part(corpus):
    corpus.check(99)
    with pytest.raises(ConfigError, match="held-out part has 100 bytes and one sequence needs 101"):
        corpus.check(100)
    short = data.Corpus("short", np.zeros(110, np.uint8), held_out=100, files=1)
    with pytest.raises(ConfigError, match="training part has 10 bytes"):
        short.check(10)
