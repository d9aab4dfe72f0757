"""Who failed first, and why: what ranks leave for each other in the rendezvous store, and what they make of it.

A rank that fails for a reason of its own writes it there; the others read it when they miss that rank. Who does not
answer within `PATIENCE` was killed or crashed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from memferry_ascend.errors import PeerError

PATIENCE = 5.0
"""Seconds that ranks give each other to say they are alive once one of them has found a peer missing, and that the rank
that holds the store gives the others to read what it knows."""

_FAILED = "memferry/failed"


class FirstCause:
    """What this rank, `rank` of `size`, tells of its own failure and learns of another's."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._asking, self._said = threading.Lock(), ""

    def tell(self, error: BaseException) -> None:
        """This rank fails for a reason of its own: leave it for the others, unless somebody was first."""
        text = " ".join(str(error).split()) or type(error).__name__
        try:
            held = store()
            held.compare_set("memferry/cause", "", f"rank {self._rank}: {text}"[:2000])
            held.set(_FAILED, "1")
        except Exception:
            pass  # the store went with rank 0: its peers will say so

    def known(self) -> bool:
        """Some rank has said that it stops."""
        return bool(store().check([_FAILED]))

    def explain(self, error: BaseException) -> PeerError:
        """What to raise when a collective failed: the first cause, and who is gone. Threads that find out one after the
        other say the same."""
        if isinstance(error, PeerError):
            return error
        with self._asking:
            if not self._said:
                self._ask_around(error)
            return PeerError(self._said)

    def explanation(self, error: BaseException) -> str:
        """What `explain` says, as far as it is known now: asks nobody, so it never blocks."""
        return self._said or self._sentence("", error)

    def _sentence(self, cause: str, error: BaseException) -> str:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"rank {self._rank} of {self._size} stops: another rank failed{cause}. Resume from the last checkpoint "
            f"({first_line[:200]})"
        )

    def _ask_around(self, error: BaseException) -> None:
        """Say the first cause, or who does not answer, from what the ranks that are left write into the store. Its
        holder leaves last: the others could not read it any more."""
        cause = ""
        others = [r for r in range(self._size) if r != self._rank]
        try:
            held = store()
            held.set(f"memferry/alive/{self._rank}", "1")
            held.set(_FAILED, "1")
            gone = _missing(held, "memferry/alive/", others)
            if held.check(["memferry/cause"]):
                cause = f"; first cause: {held.get('memferry/cause').decode()}"
            elif gone:
                names = ", ".join(map(str, gone))
                cause = f"; rank {names} no longer answers: it was killed or crashed (see its own output)"
            self._said = self._sentence(cause, error)
            held.set(f"memferry/knows/{self._rank}", "1")
            if self._rank == 0:
                _missing(held, "memferry/knows/", [r for r in others if r not in gone])
        except Exception:
            cause = "; first cause: the rank that holds the store (rank 0, or torchrun on its node) is gone"
            self._said = self._said or self._sentence(cause, error)


def from_a_peer(error: BaseException | None) -> bool:
    """Whether it comes from another rank's failure."""
    while error is not None:
        if isinstance(error, PeerError):
            return True
        error = error.__cause__
    return False


def store() -> Any:
    """The rendezvous store."""
    return dist.distributed_c10d._get_default_store()


def _missing(held: Any, key: str, ranks: Sequence[int]) -> list[int]:
    """The ranks that have not written `key` and their number within PATIENCE. Asks again and again: the store's own
    wait cannot be left when only some of them answer."""
    deadline = time.monotonic() + PATIENCE
    left = list(ranks)
    while True:
        left = [r for r in left if not held.check([f"{key}{r}"])]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
