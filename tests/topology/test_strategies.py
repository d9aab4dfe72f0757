"""Static and dynamic dispatch: every byte exactly once, whoever is slow, whoever fails, from any number of
threads.
"""

import heapq
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memferry_ascend.topology import Fabric, LinkClock, PathSet, load
from memferry_ascend.topology.dispatch import Path, finish_time, split
from memferry_ascend.topology.emulate import Moving
from memferry_ascend.topology.strategies import (
    Chunk,
    Dispatch,
    DynamicDispatch,
    StaticDispatch,
    Transfer,
    TransferFailed,
    chunks_in_flight,
)

MIB = 1 << 20
DIRECT, ASSISTED = Path("direct", 16e-6, 56e9), Path("assisted", 59e-6, 51e9)


class VirtualClock:
    """Seconds of a simulated run, so that no test depends on the machine's speed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(transfer: Transfer, seconds: dict, clock: VirtualClock) -> tuple[float, list[Chunk]]:
    """Copy in virtual time, one chunk at a time per path; `seconds[name](nbytes, now)`. Returns (end,
    chunks).
    """
    events: list[tuple[float, str, Chunk]] = []
    idle, chunks = set(transfer.paths), []
    while not transfer.done:
        progress = True
        while progress:  # a path that declines may make another one take what is left
            progress = False
            for name in sorted(idle):
                if (chunk := transfer.next_chunk(name)) is not None:
                    heapq.heappush(events, (clock.now + seconds[name](chunk[1], clock.now), name, chunk))
                    idle.discard(name)
                    progress = True
        if transfer.done:
            break
        clock.now, name, chunk = heapq.heappop(events)
        transfer.complete(name, chunk)
        chunks.append(chunk)
        idle.add(name)
    return clock.now, chunks


def drive_links(
    transfer: Transfer,
    paths: PathSet,
    clock: VirtualClock,
    chunk: int,
    slow: tuple[float, str, float] | None = None,
) -> float:
    """Copy over modelled links in virtual time, `chunks_in_flight` at a time per path; returns the end. `slow` is
    (seconds, resource, bytes/s): what a resource carries from then on.
    """
    model = LinkClock(dict(paths.capacity))
    flying: list[tuple[Moving, str, Chunk]] = []
    last: dict[str, Moving] = {}
    while not transfer.done:
        progress = True
        while progress:  # a path that declines may make another one take what is left
            progress = False
            for path in paths.paths:
                while sum(name == path.name for _, name, _ in flying) < chunks_in_flight(path, chunk):
                    if (found := transfer.next_chunk(path.name)) is None:
                        break
                    moving = model.join(
                        clock.now, found[1], path.latency, path.uses, path.bandwidth, last.get(path.name)
                    )
                    last[path.name] = moving
                    flying.append((moving, path.name, found))
                    progress = True
        soonest = min(model.wake(moving) for moving, _, _ in flying)
        if slow is not None and slow[0] <= soonest:
            clock.now = slow[0]
            model.set_capacity(*slow)
            slow = None
            continue
        clock.now = soonest
        model.advance(soonest)
        for moving, name, found in [f for f in flying if f[0].end is not None]:
            transfer.complete(name, found)
            flying.remove((moving, name, found))
    return clock.now


def at_speed(*paths: Path) -> dict:
    return {p.name: lambda n, now, p=p: p.seconds(n) for p in paths}


def assert_covers(chunks: list[Chunk], nbytes: int) -> None:
    position = 0
    for offset, n in sorted(chunks):
        assert offset == position
        assert n > 0
        position += n
    assert position == nbytes


def test_static_hands_out_the_split() -> None:
    transfer = StaticDispatch().begin(64 * MIB, [DIRECT, ASSISTED])
    a, b = transfer.next_chunk("direct"), transfer.next_chunk("assisted")
    assert a is not None
    assert b is not None
    assert [a[1], b[1]] == split(64 * MIB, [DIRECT, ASSISTED])
    assert_covers([a, b], 64 * MIB)
    assert transfer.next_chunk("direct") is None
    assert not transfer.done
    transfer.complete("direct", a)
    transfer.complete("assisted", b)
    assert transfer.done
    assert transfer.moved == {"direct": a[1], "assisted": b[1]}


@pytest.mark.parametrize("dispatch", [StaticDispatch(), StaticDispatch(MIB), DynamicDispatch(MIB)])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 100_000, 3 * MIB + 7, 64 * MIB])
def test_every_byte_exactly_once(dispatch: Dispatch, size: int) -> None:
    paths = [DIRECT, ASSISTED, Path("far", 1e-3, 200e9)]
    transfer = dispatch.begin(size, paths)
    clock = VirtualClock()
    _, chunks = drive(transfer, at_speed(*paths), clock)
    assert_covers(chunks, size)
    assert sum(transfer.moved.values()) == size


def test_dynamic_leaves_small_transfers_to_the_low_latency_path() -> None:
    for size in (512, 64 << 10, MIB, 2 * MIB):
        clock = VirtualClock()
        transfer = DynamicDispatch(MIB, clock=clock).begin(size, [DIRECT, ASSISTED])
        drive(transfer, at_speed(DIRECT, ASSISTED), clock)
        assert transfer.moved == {"direct": size, "assisted": 0}


def test_dynamic_is_close_to_the_optimum_when_startup_is_cheap() -> None:
    # Chunks pay the startup each, so the comparison is made where it does not matter.
    paths = [Path("a", 1e-9, 50e9), Path("b", 2e-9, 20e9), Path("c", 1e-9, 7e9)]
    clock = VirtualClock()
    transfer = DynamicDispatch(MIB, clock=clock).begin(64 * MIB, paths)
    end, _ = drive(transfer, at_speed(*paths), clock)
    assert end < 1.03 * finish_time(split(64 * MIB, paths), paths)


def test_dynamic_beats_static_when_contention_begins_halfway() -> None:
    size = 256 * MIB
    paths = [DIRECT, ASSISTED]

    def slowed(n: int, now: float) -> float:
        """The assisted path keeps a quarter of its bandwidth from the first millisecond on, fluidly."""
        before = max(0.0, 1e-3 - now - ASSISTED.latency) * ASSISTED.bandwidth
        if n <= before:
            return ASSISTED.seconds(n)
        return ASSISTED.latency + before / ASSISTED.bandwidth + (n - before) / (ASSISTED.bandwidth / 4)

    seconds = {**at_speed(DIRECT), "assisted": slowed}
    clock = VirtualClock()
    static, _ = drive(StaticDispatch().begin(size, paths), seconds, clock)
    clock = VirtualClock()
    dynamic, _ = drive(DynamicDispatch(4 * MIB, clock=clock).begin(size, paths), seconds, clock)
    assert dynamic < 0.7 * static  # each chunk pays its startup here


PEER = "node0/npu4/die0"


def supernode_paths() -> PathSet:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    return fabric.paths("node0/npu0/die0", via=[PEER])


@pytest.mark.parametrize("chunk", [MIB, 2 * MIB])
@pytest.mark.parametrize("size", [64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB + 7])
def test_dynamic_ends_when_static_would_on_links_that_stay_as_they_are(size: int, chunk: int) -> None:
    paths, clock = supernode_paths(), VirtualClock()
    end = drive_links(DynamicDispatch(chunk, clock=clock).begin(size, paths.together()), paths, clock, chunk)
    assert end <= 1.005 * paths.seconds(paths.split(size))
    if size >= 16 * MIB:
        assert end <= size / (0.85 * sum(size / p.seconds(size) for p in paths.paths))


@pytest.mark.parametrize("size", [32 * MIB, 64 * MIB, 256 * MIB])
def test_dynamic_is_half_as_long_again_sooner_when_a_path_drops_to_a_quarter_halfway(size: int) -> None:
    paths = supernode_paths()
    ends = []
    for dynamic in (False, True):
        clock = VirtualClock()
        dispatch = DynamicDispatch(MIB, clock=clock) if dynamic else StaticDispatch(MIB)
        slow = (paths.seconds(paths.split(size)) / 2, f"ub {PEER}>node0/ub", paths.paths[1].bandwidth / 4)
        ends.append(drive_links(dispatch.begin(size, paths.together()), paths, clock, MIB, slow))
    assert ends[0] >= 1.5 * ends[1]


def test_as_many_chunks_in_flight_as_hide_a_startup() -> None:
    assert chunks_in_flight(Path("p", 0.0, 1e9), MIB) == 2
    assert chunks_in_flight(Path("p", 1e-3, 1e9), 1_000_000) == 2
    assert chunks_in_flight(Path("p", 2.5e-3, 1e9), 1_000_000) == 4
    assert chunks_in_flight(Path("p", 1.0, 1e9), 1_000_000) == 4
    assert chunks_in_flight(Path("p", 1.0, 1e9), 1_000_000, most=9) == 9


def test_reports_that_come_late_in_pairs_do_not_spoil_the_rates() -> None:
    """Both paths move a chunk a second; a's reports come two at a time, the first a second late."""
    clock = VirtualClock()
    paths = [Path("a", 0.0, 512.0), Path("b", 0.0, 512.0)]
    transfer = DynamicDispatch(512, clock=clock).begin(100 * 512, paths)
    for _ in range(10):
        first, second, other = (transfer.next_chunk(name) for name in ("a", "a", "b"))
        assert first is not None and second is not None and other is not None
        clock.now += 1
        transfer.complete("b", other)
        other = transfer.next_chunk("b")
        assert other is not None
        clock.now += 0.98
        transfer.complete("a", first)
        clock.now += 0.02
        transfer.complete("a", second)
        transfer.complete("b", other)
        rate = transfer._rate("a")  # type: ignore[attr-defined]
        assert 256 < rate < 1024


def test_a_chunk_that_is_overdue_counts_against_its_path() -> None:
    """The path that is stuck with a chunk is not left anything that another path could move meanwhile."""
    clock = VirtualClock()
    paths = [Path("stuck", 0.0, 1e6), Path("sound", 0.5, 1e6)]
    transfer = DynamicDispatch(512_000, clock=clock).begin(1_024_000, paths)
    assert transfer.next_chunk("stuck") is not None
    clock.now = 10.0  # it should have taken half a second
    assert transfer.next_chunk("sound") == (512_000, 512_000)


def test_all_paths_declining_is_impossible() -> None:
    rng = random.Random(5)
    for _ in range(300):
        paths = [
            Path(str(i), 10 ** rng.uniform(-7, -3), 10 ** rng.uniform(8, 11))
            for i in range(rng.randint(1, 6))
        ]
        size = rng.randint(1, 8 * MIB)
        clock = VirtualClock()
        transfer = DynamicDispatch(MIB, clock=clock).begin(size, paths)
        _, chunks = drive(transfer, at_speed(*paths), clock)  # an empty heap would raise IndexError
        assert_covers(chunks, size)


@pytest.mark.parametrize("dispatch", [StaticDispatch(), StaticDispatch(MIB), DynamicDispatch(MIB)])
def test_a_failed_path_gives_its_chunks_back(dispatch: Dispatch) -> None:
    paths = [DIRECT, ASSISTED, Path("third", 20e-6, 30e9)]
    transfer = dispatch.begin(48 * MIB, paths)
    held = transfer.next_chunk("assisted")
    assert held is not None
    transfer.fail("assisted", OSError("link down"))
    assert transfer.next_chunk("assisted") is None
    with pytest.raises(ValueError, match="none after fail"):
        transfer.complete("assisted", held)
    chunks: list[Chunk] = []
    while not transfer.done:
        for name in ("direct", "third"):
            if (chunk := transfer.next_chunk(name)) is not None:
                transfer.complete(name, chunk)
                chunks.append(chunk)
    assert_covers(chunks, 48 * MIB)
    assert transfer.moved["assisted"] == 0
    assert min(transfer.moved["direct"], transfer.moved["third"]) > 0


@pytest.mark.parametrize("dispatch", [StaticDispatch(), DynamicDispatch(MIB)])
def test_when_every_path_fails_the_caller_hears_why(dispatch: Dispatch) -> None:
    transfer = dispatch.begin(8 * MIB, [DIRECT, ASSISTED])
    transfer.next_chunk("direct")
    transfer.fail("assisted")
    transfer.fail("direct", OSError("bus error"))
    transfer.fail("direct")  # a second report changes nothing
    for call in (lambda: transfer.next_chunk("direct"), transfer.join):
        with pytest.raises(TransferFailed, match="all paths failed") as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("dispatch", [StaticDispatch(64 << 10), DynamicDispatch(64 << 10)])
def test_threads_with_a_failure_halfway(dispatch: Dispatch) -> None:
    """Real threads write a buffer; one path dies holding a chunk. The buffer is complete, each byte written
    once.
    """
    size = 4 * MIB + 3
    paths = [Path(str(i), 1e-6, 1e9) for i in range(4)]
    transfer = dispatch.begin(size, paths)
    written = np.zeros(size, dtype=np.uint8)
    assert transfer.next_chunk("2") is not None  # in its hands before the others can take everything

    def work(name: str) -> None:
        if name == "2":
            transfer.fail(name, OSError("gone"))
        while (chunk := transfer.next_chunk(name, wait=True)) is not None:
            offset, n = chunk
            written[offset : offset + n] += 1
            transfer.complete(name, chunk)

    threads = [threading.Thread(target=work, args=(p.name,)) for p in paths]
    for t in threads:
        t.start()
    assert transfer.join(timeout=60)
    for t in threads:
        t.join(timeout=60)
        assert not t.is_alive()
    assert sum(transfer.moved.values()) == size
    assert transfer.moved["2"] == 0
    assert (written == 1).all()


def test_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 512"):
        DynamicDispatch(1000)
    with pytest.raises(ValueError, match="min_chunk"):
        DynamicDispatch(512, min_chunk=1024)
    with pytest.raises(ValueError, match="distinct names"):
        StaticDispatch().begin(1, [DIRECT, DIRECT])
    transfer = StaticDispatch().begin(MIB, [DIRECT])
    with pytest.raises(KeyError, match="sideways"):
        transfer.next_chunk("sideways")
    with pytest.raises(ValueError, match="complete each chunk once"):
        transfer.complete("direct", (0, 1))


@given(
    st.integers(0, 20 * MIB),
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["next", "next", "complete", "fail"])), max_size=60
    ),
    st.sampled_from([StaticDispatch(), StaticDispatch(MIB), DynamicDispatch(MIB), DynamicDispatch(512)]),
)
@settings(max_examples=200, deadline=None)
def test_any_order_of_calls_moves_every_byte_once(
    size: int, count: int, calls: list, dispatch: Dispatch
) -> None:
    """Paths ask, complete and fail in any order, several chunks in hand; whoever is left then finishes the
    rest.
    """
    clock = VirtualClock()
    if isinstance(dispatch, DynamicDispatch):
        dispatch = replace(dispatch, chunk=max(dispatch.chunk, 64 << 10), clock=clock)
    paths = [Path(str(i), i * 10e-6, (i + 1) * 10e9) for i in range(count)]
    transfer = dispatch.begin(size, paths)
    held: dict[str, list[Chunk]] = {p.name: [] for p in paths}
    arrived: list[Chunk] = []
    failed: set[str] = set()
    for index, call in calls:
        name = paths[index % count].name
        clock.now += 1e-5
        if call == "next" and (chunk := transfer.next_chunk(name)) is not None:
            held[name].append(chunk)
        elif call == "complete" and held[name]:
            chunk = held[name].pop()
            transfer.complete(name, chunk)
            arrived.append(chunk)
        elif call == "fail" and len(failed) < count - 1:
            transfer.fail(name)
            failed.add(name)
            held[name].clear()
    while not transfer.done:
        before = len(arrived)
        for name in held:
            while name not in failed and (chunk := transfer.next_chunk(name)) is not None:
                held[name].append(chunk)
            for chunk in held[name]:
                transfer.complete(name, chunk)
                arrived.append(chunk)
            held[name].clear()
        assert len(arrived) > before, "nobody takes what is left"
    assert_covers(arrived, size)
    assert transfer.join(timeout=0)
