"""Checkpoints: what is in them, where they load, and saving while training goes on."""

from __future__ import annotations

import copy
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from harness import ALL_POINTS, Delays, batches, make_model, plan_of, random_plan, small_units
from torch import nn

import memferry_ascend as mf
from memferry_ascend import files, runtime, torchfile
from memferry_ascend.errors import FerryError
from memferry_ascend.planner import Mode
from memferry_ascend.saving import SaveError

pytestmark = pytest.mark.usefixtures("cpu")

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


def ferry(model: nn.Module, plan: Any, precision: str = "fp32", name: str = "AdamW") -> mf.Engine:
    with small_units():
        optimizer = OPTIMIZERS[name](model.parameters())
        return mf.ferry(model, optimizer, config=mf.Config(precision=precision), plan=plan)


def steps(engine: mf.Engine, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for x in data:
        loss = engine.model(x)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture
def slow() -> Iterator[Delays]:
    delays = Delays(ALL_POINTS, seed=2, most=0.003)
    runtime.current().backend.disturb = delays
    yield delays
    runtime.current().backend.disturb = None


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_checkpoint_loads_into_another_plan_and_goes_on_the_same(
    name: str, seed: int, tmp_path: Path
) -> None:
    data = batches(8)
    model = make_model(seed)
    with ferry(model, plan_of(model, Mode.GFGB), "bf16", name) as engine:
        steps(engine, data[:4])
        torch.save(engine.state_dict(), tmp_path / "state.pt")
        want = steps(engine, data[4:])
        final = engine.state_dict()
    other = make_model(seed)
    with ferry(other, random_plan(other, seed), "bf16", name) as engine:
        engine.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert steps(engine, data[4:]) == want
        assert same(engine.state_dict(), final)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_precision_takes_the_same_masters(name: str, tmp_path: Path) -> None:
    data = batches(6)
    for first, second in (("bf16", "fp32"), ("fp32", "bf16")):
        model, other = make_model(3), make_model(3)
        with ferry(model, plan_of(model, Mode.STREAM), first, name) as engine:
            steps(engine, data[:3])
            state = engine.state_dict()
        with ferry(other, plan_of(other, Mode.DHA), second, name) as engine:
            engine.load_state_dict(state)
            assert same(engine.state_dict(), state)
            assert engine.model.embed.weight.dtype is {"bf16": torch.bfloat16, "fp32": torch.float32}[second]
            losses = steps(engine, data[3:])
        assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_loads_without_the_library(name: str, asynchronous: bool, tmp_path: Path) -> None:
    """Only torch: the parameters by name, the moments by name, and training goes on with equal numbers."""
    data = batches(8)
    model, plain = make_model(1), make_model(1)
    path = tmp_path / "state.pt"
    with ferry(model, random_plan(model, 1), "fp32", name) as engine:
        steps(engine, data[:4])
        if asynchronous:
            engine.save_async(path).result()
        else:
            torch.save(engine.state_dict(), path)
        want = steps(engine, data[4:])
    state = torch.load(path, weights_only=True)
    plain.load_state_dict(state["model"])
    optimizer = OPTIMIZERS[name](plain.parameters())
    for parameter_name, parameter in plain.named_parameters():
        optimizer.state[parameter] = state["optimizer"][parameter_name]
    got = []
    for x in data[4:]:
        loss = plain(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        got.append(float(loss.detach()))
    assert got == pytest.approx(want, rel=2e-6)


# -- while training goes on ----------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", [*Mode, None])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("staging", [None, 0, 2000])
def test_the_file_is_the_state_at_the_call(
    mode: Mode | None, name: str, staging: int | None, tmp_path: Path, slow: Delays
) -> None:
    """Updates in flight at the call are in it, later ones are not, whoever is late; training computes what it would."""
    data = batches(9)
    model, twin = make_model(2), make_model(2)
    plan = random_plan(model, 5) if mode is None else plan_of(model, mode)
    with ferry(twin, plan, "bf16", name) as engine:
        want_losses, states = [], []
        for k in range(0, 9, 3):
            want_losses += steps(engine, data[k : k + 3])
            states.append(engine.state_dict())
    with ferry(model, plan, "bf16", name) as engine:
        saves, losses = [], []
        for k in range(0, 9, 3):
            losses += steps(engine, data[k : k + 3])
            saves.append(engine.save_async(tmp_path / f"{k}.pt", staging=staging))
        losses_end = engine.state_dict()
        paths = [save.result() for save in saves]
    assert losses == want_losses
    assert same(losses_end, states[-1])
    for path, want in zip(paths, states, strict=True):
        assert same(torch.load(path, weights_only=True), want)
        torchfile.verify(path)


class Gate:
    """Holds the writer at its first write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        add = torchfile.TorchFile.add

        def slow_add(this: torchfile.TorchFile, tensor: torch.Tensor) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return add(this, tensor)

        monkeypatch.setattr(torchfile.TorchFile, "add", slow_add)


@pytest.mark.parametrize("mode", list(Mode))
def test_training_goes_on_while_the_disk_stands_still(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(6)
    model = make_model(2)
    gate = Gate(monkeypatch)
    with ferry(model, plan_of(model, mode)) as engine:
        steps(engine, data[:2])
        want = engine.state_dict()
        save = engine.save_async(tmp_path / "a.pt")
        assert gate.reached.wait(30)
        steps(engine, data[2:])  # would hang if an update waited for the writer
        engine.synchronize()
        assert not save.done()
        units = sum(len(engine.state_dict()["model"][n].view(-1)) * 12 for n in want["optimizer"])
        assert 0 < save.peak_staged <= units + 12 * 512 * len(engine._units)
        gate.open.set()
        assert same(torch.load(save.result(), weights_only=True), want)


def test_memory_is_bounded_by_the_staging_area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(4)
    model = make_model(2)
    gate = Gate(monkeypatch)
    with ferry(model, plan_of(model, Mode.GFGB)) as engine:
        steps(engine, data[:2])
        want = engine.state_dict()
        save = engine.save_async(tmp_path / "a.pt", staging=9000)
        assert gate.reached.wait(30)
        later = threading.Timer(0.05, gate.open.set)
        later.start()
        steps(engine, data[2:])  # waits for the writer, and comes to an end
        assert same(torch.load(save.result(), weights_only=True), want)
        largest = max(sum(p.numel * 12 for p in u.params) for u in engine._units)
        assert save.peak_staged <= max(9000, largest)
        later.join()


@pytest.mark.parametrize("what", ["edit", "load", "optimizer", "close"])
def test_who_changes_the_arena_waits_for_the_copies(what: str, tmp_path: Path, slow: Delays) -> None:
    data = batches(3)
    model = make_model(2)
    engine = ferry(model, random_plan(model, 2))
    start = engine.state_dict()
    initial = engine.optimizer.state_dict()
    steps(engine, data)
    want = engine.state_dict()
    save = engine.save_async(tmp_path / "a.pt")
    if what == "edit":
        with engine.edit() as m, torch.no_grad():
            for p in m.parameters():
                p.zero_()
    elif what == "load":
        engine.load_state_dict(start)
    elif what == "optimizer":
        engine.optimizer.load_state_dict(initial)
    engine.close()
    assert save.done()
    assert same(torch.load(save.result(), weights_only=True), want)
    assert not [t for t in threading.enumerate() if t.name == "memferry-save"]


def test_key_extra_and_then(tmp_path: Path) -> None:
    model = make_model(2)
    called = []
    with ferry(model, random_plan(model, 2)) as engine:
        extra = {"rng": {"cpu": torch.get_rng_state()}, "note": [1, "two", (None, 2.5)]}
        path = tmp_path / "a.pt"
        save = engine.save_async(path, key="engine", extra=extra, then=lambda: called.append(path.exists()))
        state = torch.load(save.result(), weights_only=True)
        assert called == [True]
        assert same(state, {"engine": engine.state_dict(), **extra})
        mapped = torch.load(path, weights_only=True, mmap=True)
        assert same(mapped["engine"], engine.state_dict())
        assert all(t.data_ptr() % 64 == 0 for t in mapped["engine"]["model"].values())


class FullDisk:
    """Writes fail with `code` after `room` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, code: int) -> None:
        replacing = files.replacing

        class Stream:
            def __init__(self, stream: IO[bytes]) -> None:
                self._stream, self._left = stream, room

            def write(self, data: bytes) -> int:
                self._left -= len(data)
                if self._left < 0:
                    raise OSError(code, os.strerror(code))
                return self._stream.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._stream, name)

        from contextlib import contextmanager

        @contextmanager
        def limited(path: Path) -> Iterator[Any]:
            with replacing(path) as stream:
                yield Stream(stream)

        monkeypatch.setattr(files, "replacing", limited)


@pytest.mark.parametrize("room", [0, 100, 5000])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_fails_the_save_and_not_the_training(
    room: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(4)
    model, twin = make_model(2), make_model(2)
    path = tmp_path / "a.pt"
    path.write_bytes(b"what was there")
    with ferry(twin, plan_of(twin, Mode.GFGB)) as engine:
        want = steps(engine, data)
    engine = ferry(model, plan_of(model, Mode.GFGB))
    with monkeypatch.context() as m:
        FullDisk(m, room, code)
        got = steps(engine, data[:2])
        save = engine.save_async(path, staging=0)
        got += steps(engine, data[2:])
        with pytest.raises(SaveError, match=os.strerror(code)) as caught:
            save.result()
    assert isinstance(caught.value.__cause__, OSError)
    assert got == want
    assert path.read_bytes() == b"what was there"
    assert sorted(os.listdir(tmp_path)) == ["a.pt"]
    engine.save_async(path).result()  # there is room again
    assert same(torch.load(path, weights_only=True), engine.state_dict())
    engine.close()


def test_a_failure_nobody_looked_at_is_raised_by_the_next_save_or_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for finish in ("save", "close"):
        model = make_model(2)
        engine = ferry(model, plan_of(model, Mode.GFGB))
        with monkeypatch.context() as m:
            FullDisk(m, 10, errno.ENOSPC)
            save = engine.save_async(tmp_path / "a.pt")
            save._future.exception()
        if finish == "save":
            with pytest.raises(SaveError, match="No space left"):
                engine.save_async(tmp_path / "a.pt")
            engine.close()
        else:
            with pytest.raises(FerryError, match="No space left"):
                engine.close()
            model(batches(1)[0])  # closed all the same


def test_a_failed_update_fails_the_save(tmp_path: Path) -> None:
    model = make_model(2)
    engine = ferry(model, plan_of(model, Mode.GFGB))
    steps(engine, batches(1))

    def fail(point: str) -> None:
        if point == "update":
            raise ValueError("the host fell over")

    engine.synchronize()
    runtime.current().backend.disturb = fail
    engine.model(batches(1)[0]).backward()
    engine.optimizer.step()
    with pytest.raises(FerryError, match="the host fell over"):
        engine.save_async(tmp_path / "a.pt").result()
    with pytest.raises(FerryError, match="the host fell over"):
        engine.model(batches(1)[0])
    runtime.current().backend.disturb = None
    with pytest.raises(FerryError, match="the host fell over"):
        engine.close()
    assert not (tmp_path / "a.pt").exists()
    model(batches(1)[0])


# -- the file itself -------------------------------------------------------------------------------------------------------


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.int16,
        torch.uint8,
    ]
    tensors = {str(d): torch.arange(7).to(d) for d in [*dtypes, torch.bool, torch.int32, torch.int8]}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "four": torch.randn(2, 1, 3, 4),
    }
    path = tmp_path / "t.pt"
    with files.replacing(path) as stream:
        out = torchfile.TorchFile(stream)
        refs = {k: out.add(v) for k, v in tensors.items()}
        out.finish({"t": refs, "tied": [refs["four"], refs["four"]], "n": 3, "x": None, "e": 1e-8})
    state = torch.load(path, weights_only=True)
    assert same(state["t"], tensors)
    assert state["tied"][0].data_ptr() == state["tied"][1].data_ptr()
    assert (state["n"], state["x"], state["e"]) == (3, None, 1e-8)
    torchfile.verify(path)
    tensors_again = copy.deepcopy(state["t"])
    torch.save(tensors_again, path)
    torchfile.verify(path)  # torch's own files too


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save({"x": torch.randn(500)}, path)
    whole = path.read_bytes()
    at = whole.index(torch.load(path)["x"].numpy().tobytes()[:16])
    path.write_bytes(whole[: at + 8] + bytes([whole[at + 8] ^ 4]) + whole[at + 9 :])
    torch.load(path, weights_only=True)  # torch does not look
    with pytest.raises(FerryError, match=r"checksum of record '.*data/0'"):
        torchfile.verify(path)
