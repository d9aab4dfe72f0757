"""Copies over several paths: what arrives, who carried it, and what happens when a peer fails."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest
import torch
from harness import (
    ALL_POINTS,
    Delays,
    assert_same,
    make_model,
    plan_of,
    poisoned,
    random_plan,
    toy_fabric,
    train,
)
from memferry_ascend.topology import PathSet, load

import memferry_ascend as mf
from memferry_ascend import runtime, transfers
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.planner import Mode
from memferry_ascend.transfers import Transfers

FABRIC = toy_fabric(3, host=900)


@pytest.fixture
def fabric(tmp_path: Path) -> str:
    file = tmp_path / "toy.yaml"
    file.write_text(FABRIC)
    return str(file)


def toy_paths(fabric: str, peers: tuple[str, ...] = ("npu1",)) -> dict[str, PathSet]:
    found = load(fabric)
    return {d: found.paths("npu0", via=peers, direction=d) for d in ("h2d", "d2h")}


class Bench:
    """Transfers in a CPU backend's streams."""

    def __init__(self, fabric: str, **options: object) -> None:
        self.backend = CpuBackend()
        peers = options.pop("peers", ("npu1",))
        self.transfers = Transfers(self.backend, toy_paths(fabric, peers), chunk=4096, **options)  # type: ignore[arg-type]
        self.transfers.install()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.disturb = None
        self.transfers.close()
        self.backend.close()


def random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["upload", "reload", "download"])
def test_what_arrives_is_what_was_sent(fabric: str, dispatch: str, name: str) -> None:
    with Bench(fabric, dispatch=dispatch, peers=("npu1", "npu2")) as bench:
        stream, done = bench.backend.stream(name), bench.backend.event()
        for n in (1, 511, 512, 4097, 100_000, 1 << 20):
            src, dst = random_bytes(n), torch.zeros(n, dtype=torch.uint8)
            stream.copy(dst, src)
            stream.record(done)
            done.synchronize()
            assert torch.equal(dst, src)
        assert set(bench.transfers.moved) == {"direct", "via npu1", "via npu2"}
        assert sum(bench.transfers.moved.values()) == 1 + 511 + 512 + 4097 + 100_000 + (1 << 20)


def test_other_dtypes_and_shapes(fabric: str) -> None:
    with Bench(fabric) as bench:
        stream = bench.backend.stream("download")
        pairs = [(torch.zeros_like(t), t) for t in (torch.randn(70, 90), torch.randn(9000).bfloat16())]
        pairs.append((torch.zeros(()), torch.tensor(3.0)))
        stream.copy_many(pairs)
        stream.synchronize()
        assert all(torch.equal(dst, src) for dst, src in pairs)


def test_copies_of_a_stream_stay_in_order_and_events_cover_all_paths(fabric: str) -> None:
    with Bench(fabric) as bench:
        release = threading.Event()

        def disturb(point: str) -> None:
            if point == "path:via npu1":
                assert release.wait(30)

        bench.backend.disturb = disturb
        stream, done = bench.backend.stream("upload"), bench.backend.event()
        first, second = random_bytes(50_000), random_bytes(50_000)
        dst = torch.zeros(50_000, dtype=torch.uint8)
        stream.copy(dst, first)
        stream.copy(dst, second)
        stream.record(done)
        assert not done.query()  # the assisted part cannot have come
        release.set()
        done.synchronize()
        assert torch.equal(dst, second)


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
def test_a_peer_that_fails_loses_nothing_and_is_named_once(fabric: str, dispatch: str) -> None:
    with Bench(fabric, dispatch=dispatch) as bench:
        calls: list[str] = []
        broken = threading.Event()

        def disturb(point: str) -> None:
            if point == "path:via npu1":
                calls.append(point)
                if len(calls) > 2:
                    broken.set()
                    raise OSError("link down")
            elif point == "path:direct":
                assert broken.wait(30)  # or the direct path may have carried everything before

        bench.backend.disturb = disturb
        stream = bench.backend.stream("upload")
        src, dst = random_bytes(400_000), torch.zeros(400_000, dtype=torch.uint8)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                dst.zero_()
                stream.copy(dst, src)
                stream.synchronize()
                assert torch.equal(dst, src)
        told = [str(w.message) for w in seen if w.category is RuntimeWarning]
        assert len(told) == 1
        assert "npu1 failed (link down)" in told[0] and "nothing was lost" in told[0]
        before = len(calls)
        stream.copy(dst, src)
        stream.synchronize()
        assert len(calls) == before  # not asked again


def test_all_paths_failing_is_an_error_of_the_stream(fabric: str) -> None:
    with Bench(fabric) as bench:

        def disturb(point: str) -> None:
            if point.startswith("path:"):
                raise OSError("power cut")

        bench.backend.disturb = disturb
        stream = bench.backend.stream("upload")
        stream.copy(torch.zeros(50_000, dtype=torch.uint8), random_bytes(50_000))
        with pytest.warns(RuntimeWarning), pytest.raises(FerryError, match="every path: power cut"):
            stream.synchronize()


def test_staging_memory_is_bounded(fabric: str) -> None:
    with Bench(fabric) as bench:
        lanes = [lane for lane in bench.transfers._lanes.values() if lane.path.via is not None]
        assert all(lane._free.qsize() == lane.slots <= 4 for lane in lanes)
        stream = bench.backend.stream("upload")
        src, dst = random_bytes(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
        stream.copy(dst, src)
        stream.synchronize()
        assert all(lane._free.qsize() == lane.slots for lane in lanes)


def start(fabric: str) -> runtime.Runtime:
    return runtime.init(topology=fabric, backend="cpu")


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
@pytest.mark.parametrize("seed", range(3))
def test_training_with_assistance_is_bit_identical(
    fabric: str, dispatch: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 512)
    carried: dict[str, int] = {}
    original = Transfers.close

    def close(self: Transfers) -> None:
        carried.update(self.moved)
        original(self)

    monkeypatch.setattr(Transfers, "close", close)
    start(fabric)
    plain = mf.Config(precision="bf16")
    want = train(make_model(seed), plan_of(make_model(seed), Mode.GFGB), config=plain, serial=True)
    model = make_model(seed)
    config = mf.Config(precision="bf16", assist_devices=(1, 2), dispatch=dispatch)
    delays = Delays((*ALL_POINTS, "path"), seed=seed, most=0.0005)
    with poisoned():
        got = train(model, random_plan(model, seed), config=config, disturb=delays)
    assert_same(want, got)
    assisted = [carried["via npu1"], carried["via npu2"]]
    # Whether a path gets its turn is for dynamic dispatch a question of time.
    assert carried["direct"] > 0 and (all(assisted) if dispatch == "static" else any(assisted))
    assert runtime.current().backend.stream("upload").carrier is None


def test_training_goes_on_when_a_peer_fails(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 512)
    start(fabric)
    model = make_model(1)
    want = train(model, plan_of(model, Mode.GFGB), serial=True)
    hits = 0

    def disturb(point: str) -> None:
        nonlocal hits
        if point == "path:via npu1":
            hits += 1
            if hits > 20:
                raise OSError("peer reset")

    model = make_model(1)
    config = mf.Config(precision="fp32", assist_devices=(1,))
    with pytest.warns(RuntimeWarning, match="npu1 failed"):
        got = train(model, plan_of(model, Mode.STREAM), config=config, disturb=disturb)
    assert_same(want, got)
    assert hits > 20


def test_a_refused_device_leaves_the_model_as_it_was(fabric: str) -> None:
    start(fabric)
    model = make_model(0)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = mf.Config(precision="fp32", assist_devices=(9,))
    with pytest.raises(ConfigError, match="device 9 is absent"):
        mf.ferry(model, optimizer, config=config, plan=plan_of(model, Mode.GFGB))
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert runtime.current().backend.stream("upload").carrier is None
    train(model, plan_of(model, Mode.GFGB), steps=1)


def test_shares_are_remembered_until_a_peer_is_lost(fabric: str) -> None:
    with Bench(fabric) as bench:
        first = bench.transfers.shares(400_000, "h2d")
        assert bench.transfers.shares(400_000, "h2d") is first
        (lost,) = [path for path, share in first if path.via is not None and share]
        with pytest.warns(RuntimeWarning, match="link down"):
            bench.transfers._lose(lost, OSError("link down"))
        for _ in range(2):
            assert [(p.name, n) for p, n in bench.transfers.shares(400_000, "h2d")] == [("direct", 400_000)]


def test_shares_too_small_to_queue_a_relay_for_go_directly(
    fabric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CpuBackend()
    monkeypatch.setattr(backend, "queues_relays", True, raising=False)
    found = Transfers(backend, toy_paths(fabric), peers={"npu1": 1}, chunk=1 << 20)
    try:
        (_, whole), (_, none) = found.shares(600_000, "h2d")
        assert (whole, none) == (600_000, 0)
        assert all(share >= 1 << 19 for _, share in found.shares(8 << 20, "h2d"))
    finally:
        found.close()
        backend.close()
