"""Host pages, private or shared between processes: the one place that maps them, for every backend."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from memferry_ascend import numa
from memferry_ascend.errors import FerryError

_HUGE = 2 << 20


SHARED_FOLDER = "/dev/shm"
"""Where names of shared memory live; a tmpfs, so pages are RAM."""


def forget(shared: str) -> None:
    """Remove the name of shared pages. Processes that have mapped them keep them; nothing is left when they exit,
    however they exit."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(SHARED_FOLDER, shared))


class Pages:
    """Zeroed pages, private to this process or, with `shared`, one memory for all processes that give this name.
    Huge pages are asked for when large. `node`: the NUMA node that private pages come from while it has room.

    `tensor` is a one-dimensional uint8 CPU tensor over them; `close` unmaps them, after which it must not be used.
    """

    def __init__(self, nbytes: int, shared: str | None = None, node: int | None = None) -> None:
        if nbytes <= 0:
            raise FerryError(f"host memory: expected a positive number of bytes, got {nbytes}")
        self.nbytes = nbytes
        # One spare huge page, so that the tensor can start on a huge-page boundary.
        spare = _HUGE if nbytes >= _HUGE and shared is None else 0
        self.shared = shared is not None
        try:
            if shared is not None:
                self._map = _map_shared(shared, nbytes)
            else:
                self._map = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as e:
            raise FerryError(
                f"host memory: the system refused {nbytes} bytes ({e}); free some, or use less"
                + (
                    f" (they are shared between ranks through {SHARED_FOLDER}: make it larger)"
                    if shared
                    else ""
                )
            ) from e
        if spare and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        skip = -whole.data_ptr() % _HUGE if spare else 0
        self.tensor = whole[skip : skip + nbytes]
        if node is not None and shared is None:
            numa.prefer(self.tensor, node)

    def close(self) -> None:
        """Give the memory back now. The address range itself goes with the last tensor over it, so a tensor that
        somebody kept reads zeros instead of crashing the process."""
        if not self.shared:  # shared pages go with the last process that maps them
            self._map.madvise(mmap.MADV_DONTNEED)
        del self.tensor


def _map_shared(name: str, nbytes: int) -> mmap.mmap:
    """Map the file of that name, made and filled with zeros by whoever comes first."""
    handle = os.open(os.path.join(SHARED_FOLDER, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, nbytes)  # now, or a full tmpfs kills the process at the first write
        return mmap.mmap(handle, nbytes, flags=mmap.MAP_SHARED)
    finally:
        os.close(handle)
