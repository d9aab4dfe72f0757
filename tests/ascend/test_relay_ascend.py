"""Relays between emulated NPUs: what arrives, through whose memory, in which order, and training through peers."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from harness import ALL_POINTS, Delays, Result, assert_same, make_model, poisoned, train
from memferry_ascend.topology import Measured, MeasuredPath, PathSet
from memferry_ascend.topology.measured import Figures
from test_equality_ascend import able, reference

import memferry_ascend as mf
from memferry_ascend import assist, runtime
from memferry_ascend.backends.ascend import AscendBackend
from memferry_ascend.backends.base import NotSupported
from memferry_ascend.planner import Mode
from memferry_ascend.transfers import Transfers

EMULATED = {"devices": 3, "jitter": "100:3"}
CHUNK = 64 << 10


@pytest.fixture(params=["unified", "registered"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AscendBackend:
    monkeypatch.setenv("MEMFERRY_ASCEND_ROUTE", request.param)
    made = runtime.init(backend="ascend").backend
    assert isinstance(made, AscendBackend)
    return made


def equal_paths(*peers: int) -> dict[str, PathSet]:
    """The direct path and one through each peer, all with the same figures, so that every copy is divided."""
    figures = Figures(0.0, 5e10)
    via = [("direct", None), *((f"via npu:{p}", f"npu:{p}") for p in peers)]
    measured = Measured(
        "host", tuple(MeasuredPath(name, "host", "npu:0", by, figures, figures) for name, by in via)
    )
    return {d: measured.paths("npu:0", direction=d) for d in ("h2d", "d2h")}


@contextmanager
def carried(backend: AscendBackend, *peers: int, chunk: int = CHUNK) -> Iterator[Transfers]:
    made = Transfers(backend, equal_paths(*peers), peers={f"npu:{p}": p for p in peers}, chunk=chunk)
    made.install()
    try:
        yield made
    finally:
        made.close()


def assisted(seed: int, peers: tuple[int, ...], steps: int) -> Iterator[Result]:
    """Train with `peers` assisting, delayed and poisoned: with updates in `step` and any mode, then with updates in
    backward and modes that copy."""
    for update, modes in (("step", list(Mode)), ("backward", [Mode.GFGB, Mode.STREAM])):
        model, rng = make_model(seed), random.Random(seed)
        config = mf.Config(precision="fp32", assist_devices=peers, update=update)
        plan = able(model, lambda _n: rng.choice(modes))
        with poisoned():
            got = train(model, plan, config=config, steps=steps, disturb=Delays(ALL_POINTS, seed, 0.001))
        yield got


@contextmanager
def held(backend: AscendBackend, device: int, stream: int) -> Iterator[None]:
    """The runtime's stream starts nothing."""
    library = ctypes.CDLL("libascendcl.so")

    def hold(on: bool) -> None:
        library.aclrtSetDevice(device)
        assert library.emuHoldStream(ctypes.c_void_p(stream), ctypes.c_int(on)) == 0
        library.aclrtSetDevice(backend.device.index)

    hold(True)
    try:
        yield
    finally:
        hold(False)


def free(device: int) -> int:
    """Bytes, asked past torch_npu, which had better not hear of the peer."""
    library, found, total = ctypes.CDLL("libascendcl.so"), ctypes.c_size_t(), ctypes.c_size_t()
    library.aclrtSetDevice(device)
    assert library.aclrtGetMemInfo(1, ctypes.byref(found), ctypes.byref(total)) == 0
    library.aclrtSetDevice(0)
    return found.value


@pytest.mark.parametrize("peer", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_relays_deliver_in_both_directions(backend: AscendBackend, peer: int, slots: int) -> None:
    up, down = backend.stream("upload"), backend.stream("download")
    done = backend.event()
    for nbytes in (1, 512, 70_001, (1 << 20) + 13):
        slab, device = backend.alloc_host(nbytes, mapped=True), backend.alloc_device(nbytes)[:nbytes]
        for _ in range(2):
            want = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
            slab.host.copy_(want)
            device.zero_()
            backend.synchronize()
            backend.relay(up, device, slab.host, peer=peer, chunk=CHUNK, slots=slots)
            backend.relays_done(up)
            up.record(done)
            done.synchronize()
            assert torch.equal(device.cpu(), want)
            slab.host.zero_()
            backend.relay(down, slab.host, device, peer=peer, chunk=CHUNK, slots=slots)
            backend.relays_done(down)
            down.synchronize()
            assert torch.equal(slab.host, want)
        backend.free_host(slab)
    assert torch.npu.current_device() == 0


def test_staging_is_the_peers_and_bounded(backend: AscendBackend) -> None:
    n, chunk = 8 << 20, 1 << 20
    slab, device = backend.alloc_host(n, mapped=True), backend.alloc_device(n)
    before = free(1), free(0)
    for _ in range(3):
        backend.relay(backend.stream("upload"), device, slab.host, peer=1, chunk=chunk, slots=2)
        backend.relay(backend.stream("download"), slab.host, device, peer=1, chunk=chunk, slots=2)
    backend.synchronize()
    taken = before[0] - free(1)
    assert 4 * chunk <= taken < n  # two buffers for each direction, not the copy
    assert free(0) == before[1]
    backend.free_host(slab)
    runtime.reset()
    assert free(1) == before[0]


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_the_stream_goes_on_when_the_peer_has_delivered(backend: AscendBackend, direction: str) -> None:
    n = 4 * CHUNK
    slab, device = backend.alloc_host(n, mapped=True), backend.alloc_device(n)
    to, source = (device, slab.host) if direction == "upload" else (slab.host, device)
    stream, done = backend.stream(direction), backend.event()
    backend.relay(stream, to, source, peer=1, chunk=CHUNK)  # makes the relay's streams
    backend.synchronize()
    slab.host.fill_(1)
    device.fill_(2)
    backend.synchronize()
    relay = backend.relays._made[direction, 1, direction == "upload"][2]
    legs = [(side.acl.device, handle) for side, handle in relay._legs]
    assert [d for d, _ in legs] == ([1, 0] if direction == "upload" else [0, 1])
    for device_of, handle in legs:
        with held(backend, device_of, handle):
            backend.relay(stream, to, source, peer=1, chunk=CHUNK)
            backend.relays_done(stream)
            stream.record(done)
            assert not done.query()
        done.synchronize()
        assert torch.equal(slab.host, device.cpu())
    backend.free_host(slab)


def test_what_a_stream_gets_after_a_relays_beginning_moves_beside_it(backend: AscendBackend) -> None:
    n = 2 * CHUNK
    slabs = [backend.alloc_host(n, mapped=True) for _ in range(2)]
    relayed, direct = (backend.alloc_device(n) for _ in range(2))
    for value, slab, device in zip((3, 4), slabs, (relayed, direct), strict=True):
        slab.host.fill_(value)
        device.zero_()
    backend.synchronize()
    up = backend.stream("upload")
    queue = backend.begin_relay(up, relayed, slabs[0].host, peer=1, chunk=CHUNK)
    up.synchronize()  # has reached the relay's beginning: held before that, it never would
    with held(backend, 0, up.handle):
        up.copy_direct([(direct, slabs[1].host)])
        queue()
        backend.relays.check()  # waits for the legs, not for the stream
        assert relayed.eq(3).all()
        assert direct.eq(0).all()
    backend.relays_done(up)
    up.synchronize()
    assert direct.eq(4).all()
    for slab in slabs:
        backend.free_host(slab)


def test_a_relay_starts_behind_its_streams_copies(backend: AscendBackend) -> None:
    n = 2 * CHUNK
    first, second = (backend.alloc_host(n, mapped=True) for _ in range(2))
    middle, last = backend.alloc_device(n), backend.alloc_host(n, mapped=True)
    first.host.fill_(3)
    backend.synchronize()
    up = backend.stream("upload")
    with held(backend, 0, up.handle):
        up.copy(middle, first.host)
        backend.relay(up, last.host, middle, peer=1, chunk=CHUNK)
        backend.relays_done(up)
        up.copy(middle, second.host)  # behind the relay, which still reads
        assert not last.host.any()
    up.synchronize()
    assert last.host.eq(3).all()
    for slab in (first, second, last):
        backend.free_host(slab)


def test_copies_of_the_engines_streams_are_divided(backend: AscendBackend) -> None:
    n = (3 << 20) + 77
    slab, device = backend.alloc_host(n, mapped=True), backend.alloc_device(n)[:n]
    want = torch.randint(0, 256, (n,), dtype=torch.uint8)
    with carried(backend, 1, 2) as paths:
        slab.host.copy_(want)
        backend.stream("upload").copy(device, slab.host)
        backend.stream("upload").synchronize()
        assert torch.equal(device.cpu(), want)
        slab.host.zero_()
        ready, done = backend.event(), backend.event()
        backend.stream("download").copy_behind(backend.compute, [(slab.host, device)], ready, done)
        done.synchronize()
        assert torch.equal(slab.host, want)
        assert set(paths.moved) == {"direct", "via npu:1", "via npu:2"}
        assert all(moved > n / 2 for moved in paths.moved.values())
    backend.free_host(slab)


def test_who_cannot_relay_is_refused(backend: AscendBackend) -> None:
    slab, device = backend.alloc_host(4096, mapped=True), backend.alloc_device(4096)
    for peer in (0, 3):
        with pytest.raises(NotSupported, match=f"device {peer} is absent: the machine has 3 NPUs"):
            backend.relay(backend.stream("upload"), device, slab.host, peer=peer, chunk=4096)
    backend.free_host(slab)


@pytest.mark.parametrize("peers", [(1,), (1, 2)])
@pytest.mark.parametrize("seed", [2, 5])
def test_training_through_peers_has_the_bits_of_training_without(
    backend: AscendBackend, seed: int, peers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = reference(seed, mf.Config(precision="fp32"), steps=4)
    made: list[Transfers] = []

    def for_engine(rt: runtime.Runtime, _config: mf.Config) -> Transfers:
        made.append(
            Transfers(rt.backend, equal_paths(*peers), peers={f"npu:{p}": p for p in peers}, chunk=512)
        )
        made[-1].install()
        return made[-1]

    monkeypatch.setattr(assist, "for_engine", for_engine)
    for got in assisted(seed, peers, steps=4):
        assert_same(want, got)
        assert set(made[-1].moved) == {"direct", *(f"via npu:{p}" for p in peers)}


def test_held_streams_start_together(backend: AscendBackend) -> None:
    """`hold`: what is queued from then on does not start, whether the bytes go directly or through a peer; what was queued
    before does. Twice, for the gate is used again."""
    n = 4 * CHUNK
    slab = backend.alloc_host(3 * n, mapped=True)
    room = backend.alloc_device(3 * n)
    up, down, third = (backend.stream(name) for name in ("upload", "download", "reload"))
    before, ends = backend.event(), [backend.event() for _ in range(3)]
    for k in (1, 2):
        slab.host.copy_(torch.arange(3 * n).remainder(50 + k).to(torch.uint8))
        slab.host[n : 2 * n] = 0
        room.fill_(k)
        backend.synchronize()
        up.copy(room[2 * n : 2 * n + 8], slab.host[2 * n : 2 * n + 8])
        up.record(before)
        release = backend.hold([up, down, third])
        up.copy(room[:n], slab.host[:n])
        down.copy(slab.host[n : 2 * n], room[n : 2 * n])
        backend.relay(third, room[2 * n :], slab.host[2 * n :], peer=1, chunk=CHUNK)
        backend.relays_done(third)
        for stream, end in zip((up, down, third), ends, strict=True):
            stream.record(end)
        before.synchronize()
        assert not any(end.query() for end in ends)
        assert not slab.host[n : 2 * n].any()
        release()
        for end in ends:
            end.synchronize()
        got = room.cpu()
        assert torch.equal(got[:n], slab.host[:n]) and torch.equal(got[2 * n :], slab.host[2 * n :])
        assert (slab.host[n : 2 * n] == k).all()
    backend.free_host(slab)


def test_the_gate_of_held_streams_is_given_back(backend: AscendBackend) -> None:
    backend.hold([backend.stream("upload")])()
    gate = backend._gate
    assert gate is not None
    backend.close()
    assert backend.acl.code("aclrtDestroyNotify", gate._notify) == 107000
