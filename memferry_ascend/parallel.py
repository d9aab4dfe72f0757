"""Ranks: process groups, and collectives on bytes.

torch.distributed is the engine (nccl, hccl, gloo). Ranks of one node form a *shard group*: parameters are cut into as
many chunks as a node has ranks; across nodes each chunk's gradients are reduced between the ranks that own it (hybrid
sharding). Every sum over ranks is written as an exchange of bytes and a sum in rank order in fp32, not as a library's
reduce-scatter: the order in which those add depends on where an element lies in the buffer, so on the plan, and the
bits must not. The traffic is the same.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from memferry_ascend.backends.base import Backend
from memferry_ascend.causes import FirstCause, from_a_peer
from memferry_ascend.errors import ConfigError, FerryError, PeerError
from memferry_ascend.vigil import Vigil

LOOK = 1.0
"""Seconds of waiting for a collective after which a rank looks whether another has failed: a collective may wait for a
rank that is alive and has given up."""

COLLECTIVES = "MEMFERRY_COLLECTIVES"
"""Environment variable: "gloo" sends device tensors through host memory (slow; for ranks that share a device)."""

_all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class Ranks:
    """This process among all ranks. `local` ranks share a node; `index` is this one's place among them.

    Collectives block until the result may be read by the calling thread's current device stream. The groups `main`
    and `near` (this node) are the user's thread's, `meeting` (this node), `shard` and `across` the lane's, `loads` (this
    node) the other lane's. Every rank must call the same ones in the same order.
    """

    made = False
    """The default process group is ours."""

    def __init__(self, backend: Backend, local_size: int | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device = backend.device
        self.main = dist.new_group(backend="gloo")
        nodes = self._nodes(local_size)
        mine = next(members for members in nodes if self.rank in members)
        self.node, self.nodes = nodes.index(mine), len(nodes)
        self.members, self.index, self.local = mine, mine.index(self.rank), len(mine)
        wanted = os.environ.get(COLLECTIVES, "")
        kind = "gloo" if device.type == "cpu" or wanted == "gloo" else _device_backend(device)
        self.staged = kind == "gloo" and device.type != "cpu"
        self.on_device = kind != "gloo"
        """Collectives are queued on the device: the host learns of a missing peer from nothing but gloo."""
        self._by_node, self._kind = nodes, kind
        self.shard, self.loads = self._near_group(kind), self._near_group(kind)
        self.near, self.meeting = self._near_group("gloo"), self._near_group("gloo")
        self.across = dist.group.WORLD
        self.loads_done = 0
        """Collectives of `loads` that are done; -1: one was left unfinished."""
        for i in range(self.local if self.nodes > 1 else 0):
            twins = [members[i] for members in nodes]
            group = dist.new_group(twins, backend=kind)
            if i == self.index:
                self.across = group
        self._cause = FirstCause(self.rank, self.size)
        self._queueing = threading.Lock(), threading.Lock()
        """Held while a lane queues a collective, one for each: the first of a group waits there for the other ranks."""
        self._vigil: Vigil | None = None
        if self.on_device:
            self._vigil = Vigil(self, backend.synchronize)
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught

    def _nodes(self, local_size: int | None) -> list[list[int]]:
        """Ranks by node, in rank order."""
        key: Any = socket.gethostname()
        if "GROUP_RANK" in os.environ:
            key = int(os.environ["GROUP_RANK"])
        if local_size is not None:
            key = self.rank // local_size
        keys = self.gather_objects(key)
        nodes: dict[Any, list[int]] = {}
        for rank, k in enumerate(keys):
            nodes.setdefault(k, []).append(rank)
        sizes = {len(members) for members in nodes.values()}
        if len(sizes) > 1:
            raise ConfigError(
                f"data parallel: expected as many ranks on every node, found {sorted(map(len, nodes.values()))}"
            )
        return list(nodes.values())

    def _near_group(self, kind: str) -> Any:
        """A process group of this node's ranks. Every rank of all nodes calls."""
        groups = [dist.new_group(members, backend=kind) for members in self._by_node]
        return groups[self.node]

    # -- user's thread -------------------------------------------------------------------------------------------------
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        out: list[Any] = [None] * self.size
        with self.explained():
            dist.all_gather_object(out, value, group=self.main)
        return out

    def renew_loads(self) -> None:
        """Make `loads` fit for use: engines that closed in the middle of a pass may have left it at different places."""
        done = self.gather_objects(self.loads_done)
        if any(n != done[0] or n < 0 for n in done):
            self.loads, self.loads_done = self._near_group(self._kind), 0

    def from_first(self, value: Any) -> Any:
        """Rank 0's picklable `value`."""
        box = [value]
        with self.explained():
            dist.broadcast_object_list(box, src=0, group=self.main)
        return box[0]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        t = torch.tensor(values, dtype=torch.float64)
        with self.explained():
            self.wait(dist.all_reduce(t, group=self.main, async_op=True))
        return [float(x) for x in t]

    def barrier(self) -> None:
        """Every rank has come this far."""
        with self.explained():
            self.wait(dist.barrier(group=self.main, async_op=True))

    def concatenate(self, piece: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Pieces of a flat CPU tensor, `counts[i]` elements from local rank i, put together on every rank."""
        most = max(counts)
        if most == 0:
            return piece
        padded = torch.zeros(most, dtype=piece.dtype)
        padded[: piece.numel()].copy_(piece)
        out = torch.empty(most * self.local, dtype=piece.dtype)
        with self.explained():
            parts = out.view(torch.uint8), padded.view(torch.uint8)
            self.wait(_all_gather_single(*parts, group=self.near, async_op=True))
        return torch.cat([out[i * most : i * most + n] for i, n in enumerate(counts)])

    def wait(self, work: Any) -> None:
        """Block until a collective's result is there."""
        done = threading.Event()
        work.get_future().add_done_callback(lambda _future: done.set())
        while not done.wait(LOOK):
            self.look()
        work.wait()

    # -- the lane's thread ---------------------------------------------------------------------------------------------
    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        received: list[int],
        sent: list[int],
        wait: Callable[[Any], None],
        *,
        across: bool = False,
    ) -> None:
        """Send `sent[i]` bytes of `source` to local rank i (to node i with `across`), receive `received[i]`."""
        group = self.across if across else self.shard
        if self.staged:
            host = torch.empty(out.numel(), dtype=torch.uint8)
            wait(dist.all_to_all_single(host, source.cpu(), received, sent, group=group, async_op=True))
            out.copy_(host)
            return
        with self._queueing[0]:
            self.check()
            work = dist.all_to_all_single(out, source, received, sent, group=group, async_op=True)
        wait(work)

    def all_gather(
        self, out: torch.Tensor, piece: torch.Tensor, wait: Callable[[Any], None], group: Any
    ) -> None:
        """Equal pieces of all ranks of `group` (`shard`, `loads`, `across`) into `out`; `piece` may be its own part of
        it."""
        if self.staged:
            host = torch.empty(out.numel(), dtype=torch.uint8)
            wait(_all_gather_single(host, piece.cpu(), group=group, async_op=True))
            out.copy_(host)
            return
        with self._queueing[group is self.loads]:
            self.check()
            work = _all_gather_single(out, piece, group=group, async_op=True)
        wait(work)

    def exchange(self, row: torch.Tensor, wait: Callable[[Any], None], *, near: bool = False) -> torch.Tensor:
        """All ranks' rows of a CPU tensor, one below the other, for the user's thread; with `near` those of this node,
        for the lane's thread."""
        out = torch.empty((self.local if near else self.size, *row.shape), dtype=row.dtype)
        wait(
            _all_gather_single(
                out.view(-1).view(torch.uint8),
                row.view(-1).view(torch.uint8),
                group=self.meeting if near else self.main,
                async_op=True,
            )
        )
        return out

    # -- failures ------------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Raise if another rank has said that it stops."""
        self.check()
        if self._cause.known():
            raise RuntimeError("another rank has stopped")

    def check(self) -> None:
        """Raise if the vigil has heard that another rank has failed: nothing more may be queued that waits for it."""
        if self._vigil is not None and self._vigil.heard is not None:
            raise self._vigil.heard

    def queued(self, seconds: float) -> None:
        """Block, for no longer with each lane, until no collective is about to be queued that was not refused by
        `check`."""
        for lock in self._queueing:
            if lock.acquire(timeout=seconds):
                lock.release()

    def explained(self) -> _Explained:
        """A block in which torch.distributed's errors become one that says who failed and why."""
        return _Explained(self)

    def announce(self, error: BaseException) -> None:
        """This rank fails for a reason of its own: leave it for the others, unless somebody was first."""
        if isinstance(error, KeyboardInterrupt | SystemExit) or from_a_peer(error):
            return
        self._cause.tell(error)
        if self._vigil is not None:
            self._vigil.fail()

    def explain(self, error: BaseException) -> PeerError:
        """What to raise when a collective failed: the first cause, and who is gone."""
        if self._vigil is not None:
            self._vigil.fail()
        return self._cause.explain(error)

    def explanation(self, error: BaseException) -> str:
        """What `explain` says, as far as it is known without asking anybody."""
        return self._cause.explanation(error)

    def abort(self) -> None:
        """Unblock device kernels that wait for a rank that is gone."""
        if not self.on_device:
            return
        for group in {self.shard, self.loads, self.across}:
            try:
                group._get_backend(self.device).abort()
            except Exception:
                continue

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.announce(error)
        self._excepthook(kind, error, trace)

    def leave(self) -> None:
        """The last thing a program does that has not failed: all ranks together, so that none finds its peers gone
        while its threads still listen to them. Groups that the user made stay."""
        if self.made:
            self.barrier()
            if self._vigil is not None:
                self._vigil.join()
            dist.destroy_process_group()

    def close(self) -> None:
        """Undo what concerns this process only; the groups go with the process."""
        if self._vigil is not None:
            self._vigil.leave()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook


@dataclass
class _Explained:
    ranks: Ranks

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, FerryError):
            raise self.ranks.explain(error) from error


def _device_backend(device: torch.device) -> str:
    return {"cuda": "nccl", "npu": "hccl"}.get(device.type, "gloo")


def connect(backend: Backend) -> Ranks | None:
    """Join the other processes that torchrun started; None when there is only one.

    Uses the default process group if the user has made one, else makes it from torchrun's environment.

    Raises:
        ConfigError: the environment is incomplete, or disagrees with the user's process group.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if not dist.is_available():
        if size > 1:
            raise ConfigError(
                "data parallel: this build of torch has no torch.distributed; install one that has"
            )
        return None
    device = backend.device
    made = not dist.is_initialized()
    if made:
        if size <= 1:
            return None
        missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
        if missing:
            raise ConfigError(
                f"data parallel: WORLD_SIZE is {size} but {', '.join(missing)} is not set; start with torchrun"
            )
        kinds = "gloo"
        if device.type != "cpu" and os.environ.get(COLLECTIVES, "") != "gloo":
            kinds = f"cpu:gloo,{device.type}:{_device_backend(device)}"
        dist.init_process_group(kinds)
    elif "WORLD_SIZE" in os.environ and dist.get_world_size() != size:
        raise ConfigError(
            f"data parallel: WORLD_SIZE is {size}, but the process group has {dist.get_world_size()} ranks; make it "
            "over all ranks, or let memferry_ascend.init() make it"
        )
    if dist.get_world_size() == 1:
        return None
    local = os.environ.get("LOCAL_WORLD_SIZE")
    forced = os.environ.get("MEMFERRY_RANKS_PER_NODE")
    if local is not None and int(local) < 1:
        raise ConfigError(f"data parallel: LOCAL_WORLD_SIZE is {local}; expected at least 1")
    ranks = Ranks(backend, int(forced) if forced else None)
    ranks.made = made
    return ranks
