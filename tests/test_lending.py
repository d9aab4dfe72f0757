"""Devices lent between processes, with both ends in this one: what arrives, what is refused, who lets go first."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import toy_fabric
from memferry_ascend.topology.load import parse

from memferry_ascend import lender as lender_module
from memferry_ascend import lendwire, transfers
from memferry_ascend.backends.base import HostSlab
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.borrower import Left, Link, Place
from memferry_ascend.errors import FerryError
from memferry_ascend.lender import Lender
from memferry_ascend.lending import Lending
from memferry_ascend.lendwire import Kind, Message, Wire
from memferry_ascend.transfers import Transfers

CHUNK = 4096
FABRIC = toy_fabric(3, host=900)


def threads() -> list[str]:
    """Those of lenders, borrowers and paths that are alive."""
    ours = ("memferry-lend", "memferry-borrow", "memferry-path")
    return [t.name for t in threading.enumerate() if t.name.startswith(ours)]


class Pair:
    """A lender of npu1 and a borrower on npu0, each with a backend of its own, as two processes would have."""

    def __init__(
        self, budget: int | None = None, limit: int | None = None, dispatch: str = "static", slots: int = 4
    ) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.owner, self.backend = CpuBackend(limit), CpuBackend()
        self.lender = Lender(self.owner, budget)
        self.far = Wire(there)
        self.lender.serve(self.far)
        self.link = Link(Wire(here), self.backend, 1)
        self.lending = Lending(self.backend, {1: self.link}, None)
        self.legs: list[str] = []
        self.owner.disturb = self.legs.append
        fabric = parse(FABRIC)
        self.transfers = Transfers(
            self.backend,
            {d: fabric.paths("npu0", via=("npu1",), direction=d) for d in ("h2d", "d2h")},  # type: ignore[arg-type]
            dispatch=dispatch,
            peers={"npu1": 1},
            chunk=CHUNK,
            lending=self.lending,
        )
        self.transfers.install()

    def slab(self, nbytes: int) -> HostSlab:
        return self.lending.segments.alloc(nbytes)

    def copy(self, name: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.backend.stream(name).copy(dst, src)
        self.backend.stream(name).synchronize()

    def close(self) -> None:
        self.backend.disturb = self.owner.disturb = None
        self.transfers.close()
        self.lender.close()
        self.backend.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**options: object) -> Pair:
        made.append(Pair(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert threads() == []


def random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


SIZES = (1, 511, 512, 4097, 100_000, 1 << 20)


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
def test_what_arrives_is_what_was_sent(pair: Callable[..., Pair], dispatch: str) -> None:
    two = pair(dispatch=dispatch)
    slab, device = two.slab(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    for n in SIZES:
        want = random_bytes(n)
        host = slab.host[(1 << 20) - n :]
        host.copy_(want)
        device.zero_()
        two.copy("upload", device[:n], host)
        assert torch.equal(device[:n], want) and not device[n:].any()
        host.zero_()
        two.copy("download", host, device[:n])
        assert torch.equal(host, want)
    assert set(two.transfers.moved) == {"direct", "via npu1"}
    assert two.legs.count("lend:h2d") >= 1 and two.legs.count("lend:d2h") >= 1
    if dispatch == "static":
        assert two.legs.count("lend:h2d") * CHUNK >= two.transfers.moved["via npu1"] / 2


def test_a_copy_is_done_when_the_owner_has_delivered(pair: Callable[..., Pair]) -> None:
    two, release = pair(), threading.Event()
    slab = two.slab(100_000)
    slab.host.copy_(random_bytes(100_000))
    device = torch.zeros(100_000, dtype=torch.uint8)
    two.owner.disturb = lambda _point: release.wait(30) and None
    stream, done = two.backend.stream("upload"), two.backend.event()
    stream.copy(device, slab.host)
    stream.record(done)
    assert not done.query()
    release.set()
    done.synchronize()
    assert torch.equal(device, slab.host)


def fails(two: Pair, name: str, match: str, break_it: Callable[[], None]) -> None:
    """Copies until the owner breaks, halfway through a transfer, and after it: nothing is lost and one warning comes."""
    n, calls = 400_000, 0
    slab, device, want = two.slab(n), torch.zeros(n, dtype=torch.uint8), random_bytes(n)
    broken = threading.Event()

    def owner(point: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            broken.set()
            break_it()

    def borrower(point: str) -> None:
        if point == "path:direct":  # or it may have carried everything before
            assert broken.wait(30)

    two.owner.disturb, two.backend.disturb = owner, borrower
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            slab.host.copy_(want) if name == "upload" else device.copy_(want)
            to, source = (device, slab.host) if name == "upload" else (slab.host, device)
            to.zero_()
            two.copy(name, to, source)
            assert torch.equal(to, want)
    told = [str(w.message) for w in seen if w.category is RuntimeWarning]
    assert len(told) == 1 and match in told[0] and "nothing was lost" in told[0]


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["upload", "download"])
def test_an_owner_whose_copy_fails_loses_nothing(pair: Callable[..., Pair], name: str, dispatch: str) -> None:
    def broken() -> None:
        raise OSError("link down")

    fails(pair(dispatch=dispatch), name, "npu1 failed (link down)", broken)


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["upload", "download"])
def test_an_owner_that_goes_with_bytes_under_way_loses_nothing(
    pair: Callable[..., Pair], name: str, dispatch: str
) -> None:
    two = pair(dispatch=dispatch)
    fails(two, name, "the process that owns device 1 is gone", two.far.stop)


def test_an_owner_without_room_refuses(pair: Callable[..., Pair]) -> None:
    with pytest.warns(RuntimeWarning, match=r"npu1 failed \(it refused: it lends 4.00 KiB .* 0 B are left"):
        two = pair(budget=4096)  # one direction gets a slot, the other none: neither is used
    slab, want = two.slab(100_000), random_bytes(100_000)
    slab.host.copy_(want)
    device = torch.zeros(100_000, dtype=torch.uint8)
    two.copy("upload", device, slab.host)
    assert torch.equal(device, want)
    slab.host.zero_()
    two.copy("download", slab.host, device)
    assert torch.equal(slab.host, want)
    assert two.legs == []
    again = two.link.open(1, CHUNK, True)  # the slot that it had granted is free again
    assert two.lender.lent == two.owner.memory_stats().allocated == CHUNK
    again.close()


def test_an_owner_whose_device_is_full_refuses(pair: Callable[..., Pair]) -> None:
    with pytest.warns(RuntimeWarning, match="it refused: device memory: asked for"):
        two = pair(limit=2 * CHUNK - 1)
    assert two.lender.lent == 0 and two.owner.memory_stats().allocated == 0


def test_staging_memory_is_bounded_and_counts_as_the_owners(pair: Callable[..., Pair]) -> None:
    two = pair(budget=5 * CHUNK)
    # Half of what is left each time: two slots for the first direction, one for the second.
    assert two.lender.lent == two.owner.memory_stats().allocated == 3 * CHUNK
    more = [two.link.open(4, CHUNK, True) for _ in range(2)]
    assert [len(channel.slots) for channel in more] == [1, 1] and two.lender.lent == 5 * CHUNK
    with pytest.raises(FerryError, match=r"no room for 4\.00 KiB"):
        two.link.open(1, CHUNK, False)
    more[0].close()
    slab, device = two.slab(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
    slab.host.copy_(random_bytes(1 << 20))
    two.copy("upload", device, slab.host)
    assert torch.equal(device, slab.host) and two.legs
    two.link.open(1, CHUNK, False)  # what was given back can be had again
    assert two.lender.lent == two.owner.memory_stats().allocated == 5 * CHUNK


def test_memory_that_the_owner_cannot_see_goes_directly(pair: Callable[..., Pair]) -> None:
    two = pair()
    slab, want = two.slab(100_000), random_bytes(100_000)
    device = torch.zeros(100_000, dtype=torch.uint8)
    two.copy("upload", device, want)
    assert torch.equal(device, want) and two.legs == []
    two.copy("download", slab.host, device)
    assert torch.equal(slab.host, want) and two.legs
    two.lending.segments.forget(slab)
    before = len(two.legs)
    two.copy("download", slab.host, device)
    assert len(two.legs) == before


def test_memory_goes_back_to_the_system_although_others_map_it(pair: Callable[..., Pair]) -> None:
    two = pair()
    slab = two.slab(100_000)
    kept = slab.host
    kept.fill_(7)
    two.lending.segments.free(slab)
    assert not kept.any()  # fresh pages


@pytest.mark.parametrize("found", ["before", "at the call"])
def test_memory_that_cannot_be_shared_is_ordinary_and_told(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    two = pair()
    alloc = two.backend.alloc_host

    def refuse(nbytes: int, *, file: int | None = None, **more: bool) -> HostSlab:
        if file is not None:
            raise FerryError("an old kernel")
        return alloc(nbytes, **more)

    if found == "before":
        monkeypatch.setattr(two.backend, "sharing_failure", lambda: "an old kernel")
    else:
        monkeypatch.setattr(two.backend, "alloc_host", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be shared with the processes .* .an old kernel"):
        slab = two.slab(100_000)
    device = torch.zeros(100_000, dtype=torch.uint8)
    slab.host.copy_(random_bytes(100_000))
    two.copy("upload", device, slab.host)
    assert torch.equal(device, slab.host) and two.legs == []


def test_a_segment_that_the_owner_cannot_map_is_a_failure_that_is_told(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = pair()
    monkeypatch.setattr(
        two.owner, "alloc_host", lambda *_a, **_k: (_ for _ in ()).throw(FerryError("locked out"))
    )
    slab, device = two.slab(100_000), torch.zeros(100_000, dtype=torch.uint8)
    slab.host.copy_(random_bytes(100_000))
    with pytest.warns(RuntimeWarning, match=r"could not map the host memory: locked out"):
        two.copy("upload", device, slab.host)
    assert torch.equal(device, slab.host)


# -- who lets go first -------------------------------------------------------------------------------------------------
def test_the_lender_may_close_first(pair: Callable[..., Pair]) -> None:
    """Its memory comes back although the borrower goes on, over the direct path and without a word at first."""
    two = pair()
    slab, device = two.slab(100_000), torch.zeros(100_000, dtype=torch.uint8)
    slab.host.copy_(random_bytes(100_000))
    two.copy("upload", device, slab.host)
    assert two.owner.memory_stats().allocated > 0
    two.lender.close()
    assert two.owner.memory_stats().allocated == 0 and two.lender.lent == 0
    before = len(two.legs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.zero_()
        two.copy("upload", device, slab.host)
    assert torch.equal(device, slab.host) and len(two.legs) == before
    with pytest.raises(Left, match="stopped lending"):
        two.link.open(1, CHUNK, True)


def test_who_goes_on_without_its_lender_is_told(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = pair()
    monkeypatch.setattr(transfers, "QUIET", 0.0)
    slab, device = two.slab(100_000), torch.zeros(100_000, dtype=torch.uint8)
    two.lender.close()
    two.copy("upload", device, slab.host)
    with pytest.warns(RuntimeWarning, match="has stopped lending it"):
        two.copy("upload", device, slab.host)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.copy("upload", device, slab.host)


def test_the_borrower_may_close_first(pair: Callable[..., Pair]) -> None:
    two = pair()
    two.transfers.close()
    two.lender.close()
    assert two.owner.memory_stats().allocated == 0
    assert threads() == []


def test_a_lender_waits_for_slots_that_are_taken(pair: Callable[..., Pair]) -> None:
    """Importers close first: what a borrower is using is not pulled from under it."""
    two = pair()
    channel = two.link.open(2, CHUNK, True)
    slot = channel.take()
    closing = threading.Thread(target=two.lender.close)
    closing.start()
    deadline = time.monotonic() + 30
    while two.link.lost is None and time.monotonic() < deadline:
        slot.done.wait(0.01)
    assert isinstance(two.link.lost, Left) and closing.is_alive()
    channel.memory.part(0, CHUNK).fill_(3)  # still mapped
    assert two.owner.memory_stats().allocated > 0
    channel.give(slot)
    closing.join(30)
    assert not closing.is_alive() and two.owner.memory_stats().allocated == 0


def test_a_borrower_that_does_not_answer_is_left_behind(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender_module, "PATIENCE", 0.05)
    two = pair()
    channel = two.link.open(1, CHUNK, True)
    slot = channel.take()
    two.lender.close()
    assert two.owner.memory_stats().allocated == 0
    channel.give(slot)


def test_both_may_close_at_once() -> None:
    for _ in range(20):
        two = Pair()
        ends = [threading.Thread(target=c) for c in (two.lender.close, two.transfers.close)]
        for end in ends:
            end.start()
        for end in ends:
            end.join(30)
            assert not end.is_alive()
        assert two.owner.memory_stats().allocated == 0
        two.close()
    assert threads() == []


# -- the wire ----------------------------------------------------------------------------------------------------------
def test_messages_come_out_as_they_went_in() -> None:
    here, there = (Wire(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    sent = Message(Kind.CARRY, 3, 2, 70_000, 1 << 40, (1 << 33) + 5, 17, True, "ünd mehr")
    here.send(sent, file=0)
    got = there.receive()
    assert got is not None and got[0] == sent and got[1] is not None
    os.close(got[1])
    here.stop()
    assert there.receive() is None
    with pytest.raises(OSError):
        here.send(sent)
    here.close()
    there.close()


def test_nonsense_ends_a_connection_and_nothing_else(pair: Callable[..., Pair]) -> None:
    two = pair()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    two.lender.serve(Wire(there))
    for wrong in (b"nonsense", Message(Kind.CARRY, 9).pack(), Message(Kind.GRANTED).pack()):
        here.send(wrong)
        assert here.recv(100) == b""
        here.close()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        two.lender.serve(Wire(there))
    here.close()
    slab, device = two.slab(100_000), torch.zeros(100_000, dtype=torch.uint8)
    two.copy("upload", device, slab.host)
    assert two.legs


def test_requests_out_of_bounds_are_refused(pair: Callable[..., Pair]) -> None:
    two = pair()
    two.slab(CHUNK)
    channel = two.link.open(1, CHUNK, True)
    slot = channel.take()
    for segment, offset, nbytes in ((1, 1, CHUNK), (1, 0, CHUNK + 1), (7, 0, 1)):
        channel.ask(slot, Place(segment, offset), nbytes)
        with pytest.raises(FerryError, match=r"out of bounds|could not map"):
            channel.wait(slot)
    channel.give(slot)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_not_served() -> None:
    name = f"memferry-test-{os.getpid()}"
    listening = lendwire.listen(name)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        wire = lendwire.connect(name)
        os._exit(0 if wire.receive() is None else 1)
    assert lendwire.accept(listening) is None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    listening.close()
