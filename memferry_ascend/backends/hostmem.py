"""Host pages, private or shared between processes: the one place that maps them, for every backend."""

from __future__ import annotations

import contextlib
import ctypes
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


def nameless(nbytes: int) -> int:
    """A descriptor of `nbytes` zeroed bytes for `Pages(file=...)`, which may be handed to other processes. The memory goes
    with the last descriptor and mapping of it, however processes exit."""
    handle = os.memfd_create("memferry", os.MFD_CLOEXEC)
    try:
        os.ftruncate(handle, nbytes)
    except (OSError, OverflowError) as e:
        os.close(handle)
        raise FerryError(f"host memory: the system refused {nbytes} shared bytes ({e})") from e
    return handle


def empty(tensor: torch.Tensor) -> None:
    """Give the pages under a tensor over `nameless` memory back to the system, for all processes that map them."""
    page = os.sysconf("SC_PAGE_SIZE")
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(-(-end // page) * page - start), mmap.MADV_REMOVE
    )


def named(shared: str) -> int:
    """A descriptor of the memory that `Pages(shared=...)` has mapped under this name."""
    return os.open(os.path.join(SHARED_FOLDER, shared), os.O_RDWR | os.O_CLOEXEC)


class Pages:
    """Zeroed pages, private to this process or, with `shared`, one memory for all processes that give this name, or the
    memory behind the descriptor `file` (which stays the caller's). Huge pages are asked for when large. `node`: the NUMA
    node that private pages come from while it has room.

    `tensor` is a one-dimensional uint8 CPU tensor over them; `close` unmaps them, after which it must not be used.
    """

    def __init__(
        self, nbytes: int, shared: str | None = None, node: int | None = None, file: int | None = None
    ) -> None:
        if nbytes <= 0:
            raise FerryError(f"host memory: expected a positive number of bytes, got {nbytes}")
        self.nbytes = nbytes
        # One spare huge page, so that the tensor can start on a huge-page boundary.
        self.shared = shared is not None or file is not None
        spare = _HUGE if nbytes >= _HUGE and not self.shared else 0
        try:
            if file is not None:
                self._map = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED)
            elif shared is not None:
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
        if (spare or (file is not None and nbytes >= _HUGE)) and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # kernels without huge pages for shared memory
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        skip = -whole.data_ptr() % _HUGE if spare else 0
        self.tensor = whole[skip : skip + nbytes]
        if node is not None and not self.shared:
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
