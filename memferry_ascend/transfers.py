"""Transfers over several paths: the adaptive data dispatcher at work (the MemFerry paper, section IV-E).

A copy between host memory and the device may go directly and through peers at once. `Transfers` is put into the
backend's copy streams as their *carrier*: a stream's copy is then divided over the paths, and counts as done, for the
events behind it, when every path has delivered. Nothing else in the engine knows about paths.

Two ways of carrying. Where copies block their stream's thread (the CPU backend) each path has workers that ask the
dispatcher for chunks; an assisted path's chunks go through a few staging buffers, so that one is forwarded while the
next arrives. Where copies are queued (CUDA, Ascend) the shares are fixed beforehand and `Backend.relay` queues the peer's
part in one native call.

A peer that fails is left out from then on: what it had not delivered goes over the other paths, and the user is told
once.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from memferry_ascend.backends.base import Backend, BytesLost, Stream
from memferry_ascend.borrower import Left, Link
from memferry_ascend.errors import ConfigError, FerryError
from memferry_ascend.lending import Lending
from memferry_ascend.pathlanes import BorrowedLane, Lane
from memferry_ascend.topology import (
    DynamicDispatch,
    EmulatedLinks,
    FabricPath,
    PathSet,
    StaticDispatch,
)
from memferry_ascend.topology.strategies import Transfer, chunks_in_flight

CHUNK = 1 << 20
"""Bytes of a chunk where copies block: few enough that a path that slows down is left quickly."""

RELAY_CHUNK = 8 << 20
"""Bytes of a staging buffer where relays are queued, and so of a chunk at most; a relay takes four."""

LEAST_SHARE = RELAY_CHUNK // 2
"""Bytes below which a queued relay is not worth its launches: on two H200 copies of 8 MiB gained nothing, 16 MiB a half."""

Part = tuple[torch.Tensor, torch.Tensor]
"""(dst, src) of one path's share."""

QUIET = 5.0
"""Seconds of transfers without a lender that has stopped lending, after which the user is told: ranks that end together do
not stop at the same moment."""

STREAMS = {"upload": "h2d", "reload": "h2d", "download": "d2h"}
"""The engine's streams and the direction of each."""


class Transfers:
    """Divides copies over `paths` (per direction, the direct path first).

    dispatch: "static" or "dynamic" (`topology.StaticDispatch`, `topology.DynamicDispatch`).
    links: emulated links that make each path take its time; None copies as fast as memory allows.
    peers: device index by peer name, for backends that queue relays.
    chunk: bytes, a multiple of 512; by default what suits the backend's way of copying.
    lending: devices of other processes among the peers, and this one's for others; closed with the transfers. A lender that
        refuses staging memory is left out. Without `paths` copies are left alone: this process only lends.

    Raises:
        ConfigError: `dispatch` is "dynamic" on a backend that queues its copies beforehand.
    """

    def __init__(
        self,
        backend: Backend,
        paths: Mapping[str, PathSet],
        *,
        dispatch: str = "static",
        links: EmulatedLinks | None = None,
        peers: Mapping[str, int] | None = None,
        chunk: int | None = None,
        lending: Lending | None = None,
    ) -> None:
        self._queues = backend.queues_relays
        chunk = chunk or (RELAY_CHUNK if self._queues else CHUNK)
        if self._queues and dispatch == "dynamic":
            raise ConfigError(
                f"Config.dispatch: backend {backend.name!r} queues copies ahead of time, so shares cannot change while "
                'they move; expected "static"'
            )
        self._backend, self._paths, self._links = backend, dict(paths), links
        self._dynamic, self._chunk = dispatch == "dynamic", chunk
        self._least = min(LEAST_SHARE, chunk // 2) if self._queues else 0
        self._peers = dict(peers or {})
        self.lending = lending
        self._lost: set[str] = set()
        self._warned = False
        self._left: dict[str, tuple[FabricPath, Left, float]] = {}
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._shares: dict[tuple[str, int, bool], list[tuple[FabricPath, int]]] = {}
        self.moved: dict[str, int] = {}
        """Bytes that were carried, by path name."""
        workers = 0
        if not self._queues:
            for direction, found in self._paths.items():
                for path in found.paths:
                    lane = self._lane(path, chunks_in_flight(path, chunk))
                    if lane is not None:
                        self._lanes[direction, path.name] = lane
            for key in [key for key in self._lanes if key[1] in self._lost]:
                self._lanes.pop(key).close()  # refused in the other direction
            workers = sum(lane.slots for lane in self._lanes.values())
        # `upload` and `reload` may both be moving in one direction; a third copy waits for workers, not for ever.
        self._pool = ThreadPoolExecutor(max(1, 2 * workers), thread_name_prefix="memferry-path")

    def _lane(self, path: FabricPath, slots: int) -> Lane | None:
        link = self._lender(path)
        if link is None or self.lending is None:
            return Lane(path, self._links, slots, self._chunk, self._backend)
        try:
            segments = self.lending.segments
            return BorrowedLane(path, self._links, slots, self._chunk, self._backend, link, segments)
        except FerryError as e:
            self._lose(path, e)
            return None

    def _lender(self, path: FabricPath) -> Link | None:
        """The process that a path leads through, if it is another one."""
        if self.lending is None or path.via is None:
            return None
        return self.lending.links.get(self._peers[path.via])

    # -- in the backend's streams ------------------------------------------------------------------------------------
    def install(self) -> None:
        """Carry the copies of the engine's streams from now on.

        Raises:
            FerryError: another engine has its transfers assisted on this backend.
        """
        streams = [self._backend.stream(name) for name in STREAMS if self._paths]
        if any(stream.carrier is not None for stream in streams):
            raise FerryError(
                "Config.assist_devices: the assisting devices are busy, another engine of this process uses them; "
                "close it first"
            )
        for stream in streams:
            stream.carrier = self.carry
        self._streams = streams

    def close(self) -> None:
        """Leave the streams (which must be idle) and end the workers. May be called twice."""
        for stream in self._streams:
            stream.carrier = None
        self._streams = []
        self._pool.shutdown()
        if self.lending is not None:
            self.lending.close()

    def carry(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """Take a stream's copy on. False: it is small, or no peer is left, and the stream copies as it always does
        (never with emulated links, which make direct copies take their time too)."""
        direction = STREAMS[stream.name]
        if self._left:
            self._tell_who_left()
        if not self._queues:
            self.move(dst, src, direction)
            return True
        shares = self.shares(src.nbytes, direction, src if direction == "h2d" else dst)
        if not any(share for path, share in shares if path.via is not None):
            return False
        self._queue(stream, flat(dst), flat(src), shares)
        return True

    def shares(
        self, nbytes: int, direction: str, host: torch.Tensor | None = None
    ) -> list[tuple[FabricPath, int]]:
        """Bytes of a transfer on each path that is still in use, as static dispatch divides them. `host`: its memory on
        the host, which lenders must have mapped."""
        seen = self._seen(host)
        found = self._shares.get((direction, nbytes, seen))
        if found is None:  # the same few sizes again and again: dividing takes longer than a small copy
            paths = self._live(direction, seen)
            found = list(zip(paths.paths, paths.split(nbytes, min_chunk=self._least), strict=True))
            with self._lock:
                if all(path.name not in self._lost for path in paths.paths):
                    self._shares[direction, nbytes, seen] = found
        return found

    # -- copies that are queued ----------------------------------------------------------------------------------------
    def _queue(
        self,
        stream: Stream,
        dst: torch.Tensor,
        src: torch.Tensor,
        shares: Sequence[tuple[FabricPath, int]],
    ) -> None:
        """A relay's chunks take long to queue, so the direct part goes first, beside them all the same."""
        main, at = shares[0][0], 0
        direct: list[Part] = []
        relays: list[tuple[FabricPath, Part, Callable[[], None]]] = []
        for path, share in shares:
            part = dst[at : at + share], src[at : at + share]
            at += share
            queue = None
            if share and path.via is not None:
                with self._or_lose(path):
                    peer = self._peers[path.via]
                    queue = self._backend.begin_relay(stream, *part, peer=peer, chunk=self._chunk)
            if queue is not None:
                relays.append((path, part, queue))
            elif share:
                direct.append(part)
                self._count(main.name, share)
        if direct:
            stream.copy_direct(direct)
        for path, part, queue in relays:
            by = main
            with self._or_lose(path):
                queue()
                by = path
            if by is main:
                stream.copy_direct([part])
            self._count(by.name, part[0].nbytes)
        self._backend.relays_done(stream)

    # -- copies that block ---------------------------------------------------------------------------------------------
    def move(self, dst: torch.Tensor, src: torch.Tensor, direction: str, only: str | None = None) -> None:
        """dst <- src (contiguous, equal numel and dtype) over the paths of `direction`; returns when all bytes have
        arrived. `only` names a single path to use (the probe measures them one by one).

        Raises:
            FerryError: every path failed.
        """
        to, source = flat(dst), flat(src)
        nbytes = source.numel()
        if not nbytes:
            return
        found = self._live(direction, self._seen(source if direction == "h2d" else to))
        if only is not None:
            used = [i for i, path in enumerate(found.paths) if path.name == only]
            if not used:
                raise FerryError(f"path {only!r} failed before, or does not exist")
        else:
            used = [i for i, share in enumerate(found.split(nbytes)) if share]
            # The direct path takes over what a peer that fails leaves behind, so it is always there.
            if used != [0] and 0 not in used:
                used.insert(0, 0)
        lanes = [self._lanes[direction, found.paths[i].name] for i in used]
        if len(lanes) == 1 and nbytes <= self._chunk:
            self._alone(lanes[0], to, source)
            return
        scale = self._links.time_scale if self._links is not None else 1.0
        dispatch: DynamicDispatch | StaticDispatch = StaticDispatch(self._chunk)
        if self._dynamic:
            dispatch = DynamicDispatch(self._chunk, clock=lambda: time.perf_counter() / scale)
        transfer = dispatch.begin(nbytes, found.together(used))
        failures: list[BaseException] = []
        futures: list[Future[None]] = [
            self._pool.submit(self._work, lane, transfer, to, source, failures)
            for lane in lanes
            for _ in range(lane.slots)
        ]
        # All of them, not only until the last byte is there: a late worker must not write to memory that is in use.
        errors = [e for future in futures if (e := future.exception()) is not None]
        for name, moved in transfer.moved.items():
            self._count(name, moved)
        if not transfer.done:
            cause = (failures or errors)[-1]
            raise FerryError(f"the transfer failed on every path: {cause}") from cause
        if errors:
            raise errors[0]

    def _alone(self, lane: Lane, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.no_grad():
            lane.copy(dst, src)
        self._count(lane.path.name, src.numel())

    def _work(
        self,
        lane: Lane,
        transfer: Transfer,
        dst: torch.Tensor,
        src: torch.Tensor,
        failures: list[BaseException],
    ) -> None:
        name = lane.path.name
        while (chunk := transfer.next_chunk(name, wait=True)) is not None:
            at, n = chunk
            try:
                with torch.no_grad():
                    lane.copy(dst[at : at + n], src[at : at + n])
            except Exception as e:
                failures.append(e)
                if lane.path.via is not None:
                    self._lose(lane.path, e)
                transfer.fail(name, e)
                return
            try:
                transfer.complete(name, chunk)
            except ValueError:
                if name in self._lost:  # another worker of this path has given its chunks back
                    return
                raise

    # -- peers that fail -----------------------------------------------------------------------------------------------
    def _seen(self, host: torch.Tensor | None) -> bool:
        """Whether processes that lend devices see this host memory; True where none does."""
        return self.lending is None or host is None or self.lending.segments.find(host) is not None

    def _live(self, direction: str, seen: bool = True) -> PathSet:
        """The paths that are in use; not those through other processes for memory that these have not `seen`."""
        found = self._paths[direction]
        if not self._lost and seen:
            return found
        live = (p for p in found.paths if p.name not in self._lost and (seen or self._lender(p) is None))
        return PathSet(tuple(live), found.capacity)

    @contextlib.contextmanager
    def _or_lose(self, path: FabricPath) -> Iterator[None]:
        """A path that refuses is lost, and another one has to carry the bytes."""
        try:
            yield
        except BytesLost:
            raise
        except (FerryError, RuntimeError) as e:
            self._lose(path, e)

    def _lose(self, path: FabricPath, error: BaseException) -> None:
        with self._lock:
            self._lost.add(path.name)
            self._shares.clear()
            if isinstance(error, Left):  # it may have ended its training as we are about to
                self._left[path.name] = (path, error, time.monotonic())
                return
        self._tell(path, error)

    def _tell_who_left(self) -> None:
        now = time.monotonic()
        with self._lock:
            long_ago = [name for name, (_, _, when) in self._left.items() if now - when >= QUIET]
            late = [self._left.pop(name) for name in long_ago]
        for path, error, _ in late:
            self._tell(path, error)

    def _tell(self, path: FabricPath, error: BaseException) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(
                f"assisting device {path.via} failed ({error}); its part of each transfer goes over the other paths "
                "from now on, nothing was lost, but transfers are slower",
                RuntimeWarning,
                stacklevel=2,
            )

    def _count(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.moved[name] = self.moved.get(name, 0) + nbytes


def flat(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return t.detach().view(-1).view(torch.uint8)
