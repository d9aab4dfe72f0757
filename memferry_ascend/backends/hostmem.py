"""Anonymous host pages: the one place that maps them, for every backend."""

from __future__ import annotations

import mmap

import torch

from memferry_ascend.errors import FerryError

_HUGE = 2 << 20


class Pages:
    """Zeroed anonymous pages, private to this process and its children, with huge pages asked for when large.

    `tensor` is a one-dimensional uint8 CPU tensor over them; `close` unmaps them, after which it must not be used.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise FerryError(f"host memory: expected a positive number of bytes, got {nbytes}")
        self.nbytes = nbytes
        # One spare huge page, so that the tensor can start on a huge-page boundary.
        spare = _HUGE if nbytes >= _HUGE else 0
        try:
            self._map = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as e:
            raise FerryError(
                f"host memory: the system refused {nbytes} bytes ({e}); free some, or use less"
            ) from e
        if spare and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        skip = -whole.data_ptr() % _HUGE if spare else 0
        self.tensor = whole[skip : skip + nbytes]

    def close(self) -> None:
        """Give the memory back now. The address range itself goes with the last tensor over it, so a tensor that
        somebody kept reads zeros instead of crashing the process."""
        self._map.madvise(mmap.MADV_DONTNEED)
        del self.tensor
