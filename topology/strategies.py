"""Hand out the chunks of one transfer to its paths, fixed beforehand or to whichever path is free.

`StaticDispatch` lays the shares of `split` end to end before the transfer starts (the MemFerry paper, section
IV-E). `DynamicDispatch` keeps one pool: a path that is free takes the next chunk, so a path that slows down
halfway simply comes back less often. Both give the unfinished chunks of a path that failed to the others.

Nothing here touches a device or starts a thread. The code that copies drives a `Transfer`, one loop per path:

    transfer = DynamicDispatch(4 << 20).begin(nbytes, paths)
    while (chunk := transfer.next_chunk("direct", wait=True)) is not None:
        copy(*chunk)                              # (offset, nbytes)
        transfer.complete("direct", chunk)        # or transfer.fail("direct", error), and leave the loop
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .dispatch import ALIGNMENT, Path, split

Chunk = tuple[int, int]  # (offset, nbytes) within the transfer


class TransferFailed(RuntimeError):
    """Every path of a transfer failed with bytes left to move; `__cause__` is the last path's error, if
    given.
    """


class Transfer:
    """The chunks of one transfer. Every method may be called from any thread.

    `paths` have distinct names, by which callers say who they are. Subclasses decide who takes what; this
    class keeps the lock, what is under way, and what has arrived.
    """

    def __init__(self, nbytes: int, paths: Sequence[Path]) -> None:
        if nbytes < 0:
            raise ValueError(f"expected 0 bytes or more, found {nbytes}")
        self.nbytes = nbytes
        self.paths = {p.name: p for p in paths}
        if len(self.paths) != len(paths) or not paths:
            raise ValueError(f"expected paths with distinct names, found {[p.name for p in paths]}")
        self._changed = threading.Condition()
        self._live = dict(self.paths)
        self._under_way: dict[str, list[Chunk]] = {name: [] for name in self.paths}
        self._moved = dict.fromkeys(self.paths, 0)
        self._error: BaseException | None = None

    # What subclasses provide; all are called with the lock held.

    def _take(self, path: Path) -> Chunk | None:
        raise NotImplementedError

    def _give_back(self, chunks: list[Chunk], failed: str) -> None:
        raise NotImplementedError

    def _completed(self, path: Path, chunk: Chunk) -> None:
        """A chunk has arrived."""

    # What callers use.

    @property
    def done(self) -> bool:
        """True once every byte has arrived."""
        with self._changed:
            return self._arrived()

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that have arrived over each path."""
        with self._changed:
            return dict(self._moved)

    def next_chunk(self, path: str, *, wait: bool = False) -> Chunk | None:
        """The (offset, nbytes) that `path` shall copy next, or None when there is nothing for it.

        With `wait`, None means that all bytes have arrived or that `path` has failed: until then the call
        blocks, so that a chunk which another path gives back finds someone. Without `wait`, None means
        "nothing now", and the caller looks at `done` before it leaves. A path may hold several chunks (a
        pipelined relay).

        Raises KeyError for an unknown path and TransferFailed when all paths have failed.
        """
        with self._changed:
            self._known(path)
            while True:
                if self._arrived():
                    return None
                if not self._live:
                    raise self._failure()
                if path not in self._live:
                    return None
                chunk = self._take(self._live[path])
                if chunk is not None:
                    self._under_way[path].append(chunk)
                    return chunk
                if not wait:
                    return None
                self._changed.wait()

    def complete(self, path: str, chunk: Chunk) -> None:
        """The bytes of `chunk` have arrived over `path`; ValueError if `path` does not hold that chunk."""
        with self._changed:
            self._known(path)
            if chunk not in self._under_way[path]:
                raise ValueError(
                    f"path {path!r} completed {chunk}, but holds {self._under_way[path]}: "
                    "complete each chunk once, and none after fail()"
                )
            self._completed(self._live[path], chunk)
            self._under_way[path].remove(chunk)
            self._moved[path] += chunk[1]
            self._changed.notify_all()

    def fail(self, path: str, error: BaseException | None = None) -> None:
        """`path` will copy nothing more: what it holds, and what was meant for it, goes to the other paths.

        A chunk that had been copied in part is copied again as a whole.
        """
        with self._changed:
            self._known(path)
            if self._live.pop(path, None) is None:
                return
            self._error = error
            chunks, self._under_way[path] = self._under_way[path], []
            self._give_back(chunks, path)
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until every byte has arrived; False after `timeout` (s). Raises TransferFailed as above."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived() or not self._live, timeout)
            if not self._arrived() and not self._live:
                raise self._failure()
            return self._arrived()

    def _known(self, path: str) -> None:
        if path not in self.paths:
            raise KeyError(f"expected one of the paths {list(self.paths)}, found {path!r}")

    def _arrived(self) -> bool:
        return sum(self._moved.values()) == self.nbytes

    def _failure(self) -> TransferFailed:
        left = self.nbytes - sum(self._moved.values())
        failure = TransferFailed(
            f"all paths failed ({', '.join(self.paths)}) with {left} of {self.nbytes} bytes left"
        )
        failure.__cause__ = self._error
        return failure


class Dispatch(Protocol):
    """A strategy: `begin` makes the transfer object for `nbytes` over `paths`."""

    def begin(self, nbytes: int, paths: Sequence[Path]) -> Transfer: ...


@dataclass(frozen=True)
class StaticDispatch:
    """Shares by `split`, before the transfer starts. `chunk` (bytes) cuts each share in pieces; None leaves
    it whole.

    `min_chunk` (bytes) is the smallest share worth a path of its own.
    """

    chunk: int | None = None
    min_chunk: int = 0

    def __post_init__(self) -> None:
        if self.chunk is not None:
            _check_chunk(self.chunk)

    def begin(self, nbytes: int, paths: Sequence[Path]) -> Transfer:
        return _StaticTransfer(nbytes, paths, self.chunk, self.min_chunk)


@dataclass(frozen=True)
class DynamicDispatch:
    """Chunks of up to `chunk` bytes (a multiple of 512) from one pool, to whichever path is free.

    Before each chunk, what is left is split anew by the rates observed so far (`clock` gives seconds; the
    paths' own figures count until their first chunk has arrived) and by what each path holds. A path takes
    its share, up to `chunk`; one without a share leaves the rest to the others. So all paths end together,
    and a small transfer stays on the path with the lower latency, as with `split`. `min_chunk` (bytes, an
    eighth of `chunk` when 0) is the smallest share worth a chunk.

    Each path should hold `chunks_in_flight` at a time (as many callers): then the startup of the next chunk hides
    behind those that move.
    """

    chunk: int
    min_chunk: int = 0
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        _check_chunk(self.chunk)
        if not 0 <= self.min_chunk <= self.chunk:
            raise ValueError(f"expected min_chunk from 0 to {self.chunk} bytes, found {self.min_chunk}")

    def begin(self, nbytes: int, paths: Sequence[Path]) -> Transfer:
        smallest = _round_up(self.min_chunk or self.chunk // 8)
        return _DynamicTransfer(nbytes, paths, self.chunk, min(smallest, self.chunk), self.clock)


class _StaticTransfer(Transfer):
    def __init__(self, nbytes: int, paths: Sequence[Path], chunk: int | None, min_chunk: int) -> None:
        super().__init__(nbytes, paths)
        self._chunk, self._min_chunk = chunk, min_chunk
        self._queues: dict[str, deque[Chunk]] = {name: deque() for name in self.paths}
        self._assign([(0, nbytes)])

    def _assign(self, ranges: list[Chunk]) -> None:
        """Split `ranges` over the live paths by the paths' figures and queue each path's pieces."""
        names = list(self._live)
        shares = split(sum(n for _, n in ranges), list(self._live.values()), min_chunk=self._min_chunk)
        rest = deque((offset, n) for offset, n in ranges if n)
        for name, share in zip(names, shares, strict=True):
            while share:
                offset, n = rest.popleft()
                piece = min(n, share, self._chunk or n)
                self._queues[name].append((offset, piece))
                share -= piece
                if piece < n:
                    rest.appendleft((offset + piece, n - piece))

    def _take(self, path: Path) -> Chunk | None:
        queue = self._queues[path.name]
        return queue.popleft() if queue else None

    def _give_back(self, chunks: list[Chunk], failed: str) -> None:
        ranges = sorted([*chunks, *self._queues[failed]])
        self._queues[failed].clear()
        if ranges and self._live:
            self._assign(ranges)


class _DynamicTransfer(Transfer):
    """A path is seen as a pipeline: a chunk begins to move once its startup has passed and the chunk before it has
    arrived. That says when a path could begin another one, and how fast it moved those that have arrived."""

    def __init__(
        self, nbytes: int, paths: Sequence[Path], chunk: int, smallest: int, clock: Callable[[], float]
    ) -> None:
        super().__init__(nbytes, paths)
        self._chunk, self._smallest, self._clock = chunk, smallest, clock
        self._pool: deque[Chunk] = deque([(0, nbytes)] if nbytes else [])
        # Bytes and seconds of the last few chunks; until there are any, one chunk at the path's own figures.
        self._seen = {p.name: (float(chunk), chunk / p.bandwidth) for p in paths}
        self._taken: dict[Chunk, float] = {}  # when each chunk under way was handed out
        self._arrived_at = dict.fromkeys(self.paths, 0.0)  # when the last chunk of each path arrived
        self._declined: set[str] = set()

    def _take(self, path: Path) -> Chunk | None:
        if not self._pool:
            return None
        now = self._clock()
        left = sum(n for _, n in self._pool)
        want = min(self._share(path, left, now), self._chunk)
        if not want:
            if self._someone_else_will_come(path):
                if path.name not in self._declined:
                    self._declined.add(path.name)
                    self._changed.notify_all()  # a path that left the rest to this one has to think again
                return None
            want = self._chunk
        self._declined.discard(path.name)
        offset, n = self._pool.popleft()
        if n > want:
            self._pool.appendleft((offset + want, n - want))
            n = want
        self._taken[offset, n] = now
        return offset, n

    def _share(self, path: Path, left: int, now: float) -> int:
        """Bytes of the `left` for `path` when all live paths finish together, with what they hold."""
        live = [Path(name, self._begin(p, now) - now, self._rate(name)) for name, p in self._live.items()]
        shares = split(left, live, min_chunk=min(self._smallest, left))
        return shares[list(self._live).index(path.name)]

    def _begin(self, path: Path, now: float) -> float:
        """When a chunk that `path` takes `now` would begin to move, behind what it holds."""
        end = self._arrived_at[path.name]
        for chunk in self._under_way[path.name]:
            began = max(self._taken[chunk] + path.latency, end)
            end = began + chunk[1] / self._rate(path.name)
            if end < now:  # overdue: nobody knows for how long; as long again as until now is a fair guess
                end = now + (now - began)
        return max(now + path.latency, end)

    def _rate(self, name: str) -> float:
        nbytes, seconds = self._seen[name]
        return nbytes / seconds

    def _someone_else_will_come(self, path: Path) -> bool:
        """Whether another path is at work, or has not declined: all declining at once would never end."""
        others = (name for name in self._live if name != path.name)
        return any(self._under_way[name] or name not in self._declined for name in others)

    def _completed(self, path: Path, chunk: Chunk) -> None:
        name, now = path.name, self._clock()
        taken, before = self._taken.pop(chunk), self._arrived_at[name]
        waited = now - max(taken, before)
        # A path may start faster than its figures say: a startup never explains more than three quarters.
        moved = max(now - max(taken + path.latency, before), waited / 4)
        # Bytes and seconds are averaged apart, so that a late report, which makes the next one look early, evens out.
        # Older chunks count half as much each time: contention comes and goes.
        nbytes, seconds = self._seen[name]
        self._seen[name] = (nbytes / 2 + chunk[1], seconds / 2 + max(moved, 0.0))
        self._arrived_at[name] = now

    def _give_back(self, chunks: list[Chunk], failed: str) -> None:
        for chunk in chunks:
            del self._taken[chunk]
        self._pool.extendleft(sorted(chunks, reverse=True))
        self._declined.clear()


def chunks_in_flight(path: Path, chunk: int, most: int = 4) -> int:
    """How many chunks of `chunk` bytes `path` should hold, 2 to `most`: the one that moves, and as many as move while
    one starts up. With fewer the path idles between chunks; more would only wait, and be stuck there if it slows down.
    """
    return min(max(2, 1 + math.ceil(path.latency * path.bandwidth / chunk)), most)


def _round_up(nbytes: int) -> int:
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


def _check_chunk(chunk: int) -> None:
    if chunk <= 0 or chunk % ALIGNMENT:
        raise ValueError(f"expected a chunk that is a multiple of {ALIGNMENT} bytes, found {chunk}")
