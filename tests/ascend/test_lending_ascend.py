"""Relays between emulated NPUs of different processes: what arrives, in which order, and when the owner fails or goes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import assert_same, toy_fabric
from owners import Owner, Owners
from test_equality_ascend import reference
from test_relay_ascend import CHUNK, assisted, equal_paths, free, held

import memferry_ascend as mf
from memferry_ascend import lending, lendwire, runtime, transfers
from memferry_ascend.backends.ascend import AscendBackend
from memferry_ascend.backends.ascend_lending import AscendBorrowedRelay
from memferry_ascend.backends.base import BytesLost, HostSlab
from memferry_ascend.borrower import Channel, Link
from memferry_ascend.lending import Lending
from memferry_ascend.transfers import Transfers

EMULATED = {"devices": 3, "jitter": "100:3"}


@pytest.fixture
def backend() -> AscendBackend:
    made = runtime.init(backend="ascend").backend
    assert isinstance(made, AscendBackend)
    return made


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lending.OWNERS, f"test-{os.getpid()}")
        made = Owners(tmp_path_factory.mktemp("owners"))
        yield made
        made.close()


@pytest.fixture
def owner(owners: Owners) -> Iterator[Callable[..., Owner]]:
    """Starts an owner of device 1; it is killed behind the test, unless the test ends it."""
    made: list[Owner] = []

    def start(*words: str, **settings: object) -> Owner:
        made.append(owners.start(1, *words, **settings))
        return made[-1]

    yield start
    for one in made:
        one.end(signal.SIGKILL)


class Relayed:
    """Transfers from and to device 0, half of each through device 1 of another process."""

    def __init__(self, backend: AscendBackend) -> None:
        self.backend = backend
        self.link = Link(lendwire.connect(lending.idle_name(backend, 1)), backend, 1)
        self.lending = Lending(backend, {1: self.link}, None)
        self.slabs: list[HostSlab] = []
        self.transfers = Transfers(
            backend, equal_paths(1), peers={"npu:1": 1}, chunk=CHUNK, lending=self.lending
        )
        self.transfers.install()

    def slab(self, nbytes: int) -> HostSlab:
        self.slabs.append(self.lending.segments.alloc(nbytes))
        return self.slabs[-1]

    def relay(self, name: str, dst: torch.Tensor, src: torch.Tensor, slots: int = 4) -> None:
        stream = self.backend.stream(name)
        self.backend.relay(stream, dst, src, peer=1, chunk=CHUNK, slots=slots)
        self.backend.relays_done(stream)

    def close(self) -> None:
        self.backend.synchronize()
        self.transfers.close()
        for slab in self.slabs:
            self.lending.segments.free(slab)


@pytest.fixture
def relayed(
    owner: Callable[..., Owner],
    backend: AscendBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[Owner, Relayed]]]:
    made: list[Relayed] = []

    def start(*words: str, **settings: object) -> tuple[Owner, Relayed]:
        process = owner(*words, **settings)
        made.append(Relayed(backend))
        return process, made[-1]

    yield start
    for one in made:
        one.close()
    assert [t.name for t in threading.enumerate() if "borrow" in t.name] == []


class Asked(list[int]):
    """Bytes of each leg that an owner was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.some = threading.Event()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    sizes, ask = Asked(), Channel.ask

    def counted(channel: Channel, slot: object, place: object, nbytes: int) -> None:
        ask(channel, slot, place, nbytes)  # type: ignore[arg-type]
        sizes.append(nbytes)
        sizes.some.set()

    monkeypatch.setattr(Channel, "ask", counted)
    return sizes


def random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


Start = Callable[..., tuple[Owner, Relayed]]


def test_relays_deliver_in_both_directions(relayed: Start, asked: Asked) -> None:
    owner, two = relayed(jitter="2000:7")
    done = two.backend.event()
    for slots in (1, 2, 4):
        for nbytes in (1, 70_001, (1 << 20) + 13):
            slab, device = two.slab(nbytes), two.backend.alloc_device(nbytes)[:nbytes]
            for _ in range(2):
                want = random_bytes(nbytes)
                slab.host.copy_(want)
                device.zero_()
                two.backend.synchronize()
                del asked[:]
                two.relay("upload", device, slab.host, slots)
                two.backend.stream("upload").record(done)
                done.synchronize()
                assert torch.equal(device.cpu(), want)
                slab.host.zero_()
                two.relay("download", slab.host, device, slots)
                two.backend.stream("download").synchronize()
                assert torch.equal(slab.host, want)
                assert sum(asked) == 2 * nbytes  # all of it went through the owner
    assert torch.npu.current_device() == 0
    assert owner.complaints() == []


def test_copies_of_the_engines_streams_are_divided(relayed: Start, asked: Asked) -> None:
    _, two = relayed()
    n = (3 << 20) + 77
    slab, device, want = two.slab(n), two.backend.alloc_device(n)[:n], random_bytes(n)
    slab.host.copy_(want)
    two.backend.stream("upload").copy(device, slab.host)
    two.backend.stream("upload").synchronize()
    assert torch.equal(device.cpu(), want)
    slab.host.zero_()
    ready, done = two.backend.event(), two.backend.event()
    two.backend.stream("download").copy_behind(two.backend.compute, [(slab.host, device)], ready, done)
    done.synchronize()
    assert torch.equal(slab.host, want)
    assert set(two.transfers.moved) == {"direct", "via npu:1"}
    assert sum(asked) == two.transfers.moved["via npu:1"] > n / 2
    # What the owner cannot see goes directly.
    other = two.backend.alloc_host(n, mapped=True)
    del asked[:]
    two.backend.stream("download").copy(other.host, device)
    two.backend.stream("download").synchronize()
    assert torch.equal(other.host, want) and asked == []
    two.backend.free_host(other)


@pytest.mark.parametrize("name", ["upload", "download"])
def test_the_stream_goes_on_when_the_owner_has_delivered(relayed: Start, name: str) -> None:
    """The owner stands still: queuing returns at once, and neither the stream nor what is queued behind goes on."""
    owner, two = relayed()
    n = 6 * CHUNK
    slab, device, behind = two.slab(n), two.backend.alloc_device(n), two.slab(n)
    to, source = (device, slab.host) if name == "upload" else (slab.host, device)
    two.relay(name, to, source)
    two.backend.synchronize()
    slab.host.fill_(1)
    device.fill_(2)
    two.backend.synchronize()
    stream, done = two.backend.stream(name), two.backend.event()
    owner.send(signal.SIGSTOP)
    try:
        two.relay(name, to, source)
        stream.copy_direct([(behind.host, device)])
        stream.record(done)
        relay = two.backend.relays._made[name, 1, name == "upload"][2]
        assert isinstance(relay, AscendBorrowedRelay)
        assert not done.query() and not behind.host.any()
    finally:
        owner.send(signal.SIGCONT)
    done.synchronize()
    want = 1 if name == "upload" else 2
    assert slab.host.eq(want).all() and device.cpu().eq(want).all() and behind.host.eq(want).all()


def test_a_relay_starts_behind_its_streams_copies(relayed: Start) -> None:
    _, two = relayed()
    n = 2 * CHUNK
    first, second, last = (two.slab(n) for _ in range(3))
    middle = two.backend.alloc_device(n)
    first.host.fill_(3)
    two.backend.synchronize()
    up = two.backend.stream("upload")
    with held(two.backend, 0, up.handle):
        up.copy_direct([(middle, first.host)])
        two.relay("upload", last.host, middle)
        up.copy_direct([(middle, second.host)])  # behind the relay, which still reads
        two.relay("upload", middle, first.host)
        assert not last.host.any()
    up.synchronize()
    assert last.host.eq(3).all() and middle.cpu().eq(3).all()


def told(seen: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in seen if w.category is RuntimeWarning and "assisting" in str(w.message)]


@pytest.mark.parametrize("name", ["upload", "download"])
def test_an_owner_that_is_killed_with_bytes_under_way_loses_nothing(
    relayed: Start, name: str, asked: Asked
) -> None:
    owner, two = relayed()
    n = 40 * CHUNK
    slab, device, want = two.slab(n), two.backend.alloc_device(n), random_bytes(n)
    to, source = (device, slab.host) if name == "upload" else (slab.host, device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for k in range(3):
            source.copy_(want)
            to.zero_()
            two.backend.synchronize()
            if k == 1:
                owner.send(signal.SIGSTOP)
                asked.some.clear()
            two.backend.stream(name).copy(to, source)
            if k == 1:
                assert asked.some.wait(30)  # and will never be answered
                assert owner.end(signal.SIGKILL) == -signal.SIGKILL
            two.backend.stream(name).synchronize()
            assert torch.equal(to.cpu(), want)
    assert len(told(seen)) == 1
    assert "the process that owns device 1 is gone" in told(seen)[0] and "nothing was lost" in told(seen)[0]


@pytest.mark.parametrize("name", ["upload", "download"])
def test_an_owner_whose_copies_fail_loses_nothing(relayed: Start, name: str) -> None:
    _, two = relayed(fail="aclrtMemcpyAsync:5+:507899")
    n = 40 * CHUNK
    slab, device, want = two.slab(n), two.backend.alloc_device(n), random_bytes(n)
    to, source = (device, slab.host) if name == "upload" else (slab.host, device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            source.copy_(want)
            to.zero_()
            two.backend.synchronize()
            two.backend.stream(name).copy(to, source)
            two.backend.stream(name).synchronize()
            assert torch.equal(to.cpu(), want)
    assert len(told(seen)) == 1 and "ACL error 507899" in told(seen)[0]


def test_an_owner_that_failed_writes_nothing_any_more(relayed: Start) -> None:
    """One of its copies fails, those behind it are slow: the relay is not over before they are."""
    slow = ",".join(f"{stream}:20000" for stream in range(16))
    owner, two = relayed(fail="aclrtMemcpyAsync:2:507899", delay=slow)
    n = 8 * CHUNK
    slab, device = two.slab(n), two.backend.alloc_device(n)
    device.fill_(5)
    two.backend.synchronize()
    two.relay("download", slab.host, device)
    two.backend.stream("download").synchronize()
    assert slab.host.eq(5).all()
    slab.host.zero_()
    assert owner.end() == 0  # whatever it still had to do is done
    assert not slab.host.any()


@pytest.mark.parametrize(
    ("words", "settings", "why"),
    [
        (("--memory", "64KB"), {}, "it refused: it lends 62.50 KiB of staging memory at most"),
        ((), {"fail": "aclrtMalloc:1+:207001"}, "it refused: .*out of memory"),
        ((), {"fail": "aclrtIpcMemGetExportKey:1+:207000"}, "it refused: .*207000"),
        ((), {"fail": "aclrtHostRegisterV2:3+:507899"}, "could not map the host memory: .*507899"),
    ],
)
def test_an_owner_that_refuses_is_named(
    relayed: Start, words: tuple[str, ...], settings: dict[str, str], why: str
) -> None:
    _, two = relayed(*words, **settings)
    n = 8 * CHUNK
    slab, device, want = two.slab(n), two.backend.alloc_device(n), random_bytes(n)
    slab.host.copy_(want)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            two.backend.stream("upload").copy(device, slab.host)
            two.backend.stream("upload").synchronize()
    assert len(told(seen)) == 1 and re.search(why, told(seen)[0])
    assert torch.equal(device.cpu(), want)


@pytest.mark.parametrize("cause", ["another process is named", "the devices cannot reach each other"])
def test_a_borrower_that_cannot_import_takes_the_direct_path(
    owner: Callable[..., Owner],
    backend: AscendBackend,
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
) -> None:
    owner()
    if cause == "another process is named":
        monkeypatch.setattr(backend, "process", lambda: 1)
    else:
        monkeypatch.setattr(backend.acl, "reach", lambda _other: False)
    two = Relayed(backend)
    n = 8 * CHUNK
    slab, device, want = two.slab(n), backend.alloc_device(n), random_bytes(n)
    slab.host.copy_(want)
    why = (
        "ImportByKey failed" if cause == "another process is named" else "cannot open the memory of device 1"
    )
    with pytest.warns(RuntimeWarning, match=why):
        backend.stream("upload").copy(device, slab.host)
    backend.synchronize()
    assert torch.equal(device.cpu(), want)
    two.close()


def test_a_copy_between_the_devices_that_fails_is_an_error(
    relayed: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say what it has overwritten, so this is not mended in silence, although the bytes are copied again."""
    _, two = relayed()
    slab, device, want = two.slab(CHUNK), two.backend.alloc_device(CHUNK), random_bytes(CHUNK)
    two.relay("upload", device, slab.host)
    two.backend.synchronize()
    slab.host.copy_(want)
    relay = two.backend.relays._made["upload", 1, True][2]
    assert isinstance(relay, AscendBorrowedRelay)
    queued, copy = threading.Event(), relay._copy

    def noticed(*arguments: int) -> None:
        copy(*arguments)
        queued.set()

    monkeypatch.setattr(relay, "_copy", noticed)
    with held(two.backend, 0, relay._legs):
        two.relay("upload", device, slab.host)
        assert queued.wait(30)
        relay._channel.memory.close()  # the copy will find nothing there
    with pytest.raises(BytesLost, match="through device 1 failed after it had taken bytes: ACL error 507899"):
        two.backend.synchronize()
    two.backend.relays.drop_borrowed()
    assert torch.equal(device.cpu(), want)
    n = 4 * CHUNK  # enough to be divided
    with pytest.warns(RuntimeWarning, match="npu:1 failed"):
        two.backend.stream("upload").copy(two.backend.alloc_device(n), two.slab(n).host)


# -- who lets go first -------------------------------------------------------------------------------------------------
def test_an_owner_that_stops_lending_waits_until_its_memory_is_let_go(relayed: Start) -> None:
    owner, two = relayed()
    n = 8 * CHUNK
    slab, device = two.slab(n), two.backend.alloc_device(n)
    slab.host.copy_(random_bytes(n))
    two.backend.stream("upload").copy(device, slab.host)
    two.backend.synchronize()
    assert owner.end() == 0
    assert owner.complaints() == []  # an export that is closed before its imports would be one
    device.zero_()
    two.backend.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.backend.stream("upload").copy(device, slab.host)
        two.backend.synchronize()
    assert torch.equal(device.cpu(), slab.host)


def test_everything_is_given_back(relayed: Start) -> None:
    """The owner's memory comes back when a borrower closes, as often as one comes."""
    owner, two = relayed("--memory", f"{8 * CHUNK}")
    n = 8 * CHUNK
    before, theirs = free(0), owner.allocations()
    for _ in range(3):
        slab, device = two.slab(n), two.backend.alloc_device(n)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no room would be told
            two.backend.stream("upload").copy(device, slab.host)
            two.backend.synchronize()
        assert two.transfers.moved["via npu:1"] > 0
        assert owner.allocations() > theirs
        two.close()
        deadline = time.monotonic() + 30
        while owner.allocations() > theirs and time.monotonic() < deadline:
            time.sleep(0.01)
        assert owner.allocations() == theirs
        two.__init__(two.backend)  # type: ignore[misc]
        del device
    assert free(0) <= before
    assert owner.end() == 0 and owner.complaints() == []


# -- training ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [2, 5])
def test_training_through_an_owner_has_the_bits_of_training_without(
    owner: Callable[..., Owner], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    """Device 1 belongs to a process of its own, whose streams are slow; device 2 is driven here."""
    owner(jitter="500:5")
    file = tmp_path / "toy.yaml"
    file.write_text(toy_fabric(3, host=900))
    rt = runtime.init(topology=str(file), backend="ascend")
    monkeypatch.setattr(transfers, "RELAY_CHUNK", 512)
    want = reference(seed, mf.Config(precision="fp32"), steps=3)
    for got in assisted(seed, (1, 2), steps=3):
        assert_same(want, got)
        assert asked and rt.backend.lending is None
        del asked[:]
