"""Staging memory on a device that one process owns and another one relays through: what a family provides.

The leg of a relay that touches the host runs in the owner's process, between host memory that both have mapped and the
owner's own buffer; the other leg runs in the borrower's, which has imported that buffer. Importers close first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Loan(ABC):
    """Owner's side: a buffer on this process's device, and the way to and from the host."""

    key: str = ""
    """By which the borrower's backend finds the buffer."""
    file: int | None = None
    """A descriptor that travels with the key; stays the loan's."""

    @abstractmethod
    def carry(self, at: int, host: torch.Tensor, to_device: bool) -> None:
        """Copy between host memory of this backend and the buffer's bytes from `at` on; returns when they are there.
        One thread at a time."""

    @abstractmethod
    def close(self) -> None:
        """Give the buffer back. The borrower has closed its import, or its process is gone."""


class Borrowed(ABC):
    """Borrower's side: the owner's buffer in this process."""

    def part(self, at: int, nbytes: int) -> torch.Tensor:
        """Bytes of the buffer as a tensor, on families whose copies block (the CPU's)."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Let go of it. Nothing that uses it is in flight."""
