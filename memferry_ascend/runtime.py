"""`init()`: which device family, which fabric, which rank."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from memferry_ascend import numa
from memferry_ascend.backends.base import Backend
from memferry_ascend.config import host_threads
from memferry_ascend.errors import ConfigError, FerryError, unknown
from memferry_ascend.parallel import COLLECTIVES, Ranks, connect

BACKENDS = ("cpu", "cuda", "ascend")


@dataclass(frozen=True, eq=False)
class Runtime:
    """What `init` found. `topology` is the loaded fabric, None for "auto" without one."""

    backend: Backend
    topology_name: str
    topology: Any
    rank: int
    world: int
    local_rank: int
    local_world: int
    ranks: Ranks | None = None
    """The other processes, None when there is only one."""


_current: Runtime | None = None
_arguments: tuple[str, str | None] | None = None


def _choose() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if importlib.util.find_spec("torch_npu") is not None:
        return "ascend"
    return "cpu"


def make_backend(name: str, local_rank: int = 0) -> Backend:
    """The backend of that name on the device of this rank.

    Raises:
        ConfigError: unknown name.
        FerryError: the family's software or device is missing; says which and what to install.
    """
    if name == "cpu":
        from memferry_ascend.backends.cpu import CpuBackend

        return CpuBackend()
    if name == "cuda":
        from memferry_ascend.backends.cuda import CudaBackend

        return CudaBackend(local_rank)
    if name == "ascend":
        try:
            from memferry_ascend.backends.ascend import AscendBackend
        except ImportError as e:
            raise FerryError(f"the ascend backend is not available: {e}") from e
        return AscendBackend(local_rank)
    raise unknown("backend", name, BACKENDS)


def init(topology: str = "auto", backend: str | None = None) -> Runtime:
    """Pick the backend, read the topology and join the processes that torchrun started. Idempotent.

    With several processes the default process group is made if there is none (gloo on CPU, nccl or hccl on devices).

    topology: "auto", a shipped fabric ("cm384"), or a fabric or probe file. It never selects the backend; on "cpu" it
        gives the links to emulate.
    backend: "cpu", "cuda" or "ascend"; None takes MEMFERRY_BACKEND, else what the machine has.

    Raises:
        ConfigError: unknown backend or topology, or a second call that asks for other than what is there (one that leaves
            an argument out asks for nothing).
    """
    global _current, _arguments
    backend = backend or os.environ.get("MEMFERRY_BACKEND") or None
    if _current is not None:
        assert _arguments is not None
        if topology not in ("auto", _arguments[0]) or backend not in (None, _arguments[1]):
            raise ConfigError(
                f"init was called with topology={_arguments[0]!r}, backend="
                f"{_arguments[1]!r} before; expected the same arguments, got topology={topology!r}, "
                f"backend={backend!r}"
            )
        return _current
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    fabric = None
    if topology != "auto":
        from memferry_ascend import topology as topo

        fabric = topo.load(topology)
    shares_device = os.environ.get(COLLECTIVES) == "gloo" and torch.accelerator.is_available()
    made = make_backend(
        backend or _choose(), local_rank % torch.accelerator.device_count() if shares_device else local_rank
    )
    ranks = connect(made)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (ranks.local if ranks is not None else 1)
    made.node = numa.choose(made.pci_address(), host_threads(local_world))
    runtime = Runtime(
        backend=made,
        topology_name=topology,
        topology=fabric,
        rank=ranks.rank if ranks is not None else 0,
        world=ranks.size if ranks is not None else 1,
        local_rank=local_rank,
        local_world=local_world,
        ranks=ranks,
    )
    _current, _arguments = runtime, (topology, backend)
    return runtime


def current() -> Runtime:
    """What `init` made; calls it with its defaults the first time."""
    return _current if _current is not None else init()


def announce(error: BaseException) -> None:
    """This process fails: other ranks, if any, find the reason when they miss it."""
    if _current is not None and _current.ranks is not None:
        _current.ranks.announce(error)


def leave() -> None:
    """This program has done what it was to do: with other ranks, leave together."""
    if _current is not None and _current.ranks is not None:
        _current.ranks.leave()


def reset() -> None:
    """Forget the runtime (tests, and processes that switch backends). Engines must be closed."""
    global _current, _arguments
    if _current is not None:
        _current.backend.close()
        if _current.ranks is not None:
            _current.ranks.close()
    _current = _arguments = None
