"""Processes that hear of another rank's failure while their device, and what they could do about it, may be stuck.

python -m parallel.vigil_cases FOLDER    runs all cases next to each other. What rank N of a case said goes to
FOLDER/CASE-N.txt, exit codes by case to FOLDER/codes.json. A process that is still there after LIMIT is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memferry_ascend import causes, runtime, vigil
from memferry_ascend.errors import PeerError
from memferry_ascend.parallel import Ranks

from .world import start, wait

LIMIT = 30
"""Seconds, far above what any case takes."""


def for_ever(*_: Any) -> None:
    threading.Event().wait()


def nothing(*_: Any) -> None:
    return None


# -- one rank of two, the other made up --------------------------------------------------------------------------------
class Work:
    """What a group's send or receive gives."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class Group:
    """A process group of which `receive` gives the next rank's word and `send` takes this rank's."""

    def __init__(self, receive: Callable[[], int], send: Callable[[int], None]) -> None:
        self._receive, self._send = receive, send

    def recv(self, words: list[torch.Tensor], _source: int, _tag: int) -> Work:
        return Work(lambda: nothing(words[0].fill_(self._receive())))

    def send(self, words: list[torch.Tensor], _listener: int, _tag: int) -> Work:
        return Work(lambda: self._send(int(words[0])))


class Alone:
    """What a vigil asks of ranks."""

    rank, size = 0, 2

    def __init__(self, queued: Any = nothing, abort: Any = nothing, explain: Any = None) -> None:
        self.queued, self.abort = queued, abort
        self.explain = explain or (lambda error: PeerError(self.explanation(error)))

    def explanation(self, error: BaseException) -> str:
        return f"rank 0 of 2 stops: {error}"


def watch(
    ranks: Alone | None = None,
    *,
    receive: Callable[[], int] = lambda: vigil._FAILED,
    send: Callable[[int], None] = nothing,
    synchronize: Callable[[], None] = for_ever,
) -> vigil.Vigil:
    vigil.dist.new_group = lambda **_: Group(receive, send)  # type: ignore[assignment]
    return vigil.Vigil(ranks or Alone(), synchronize)  # type: ignore[arg-type]


def stuck_before_it_hears() -> dict[str, Callable[..., Any]]:
    """`send` never returns, and only then another rank is heard to have failed."""
    sending = threading.Event()

    def send(_word: int) -> None:
        sending.set()
        for_ever()

    def receive() -> int:
        sending.wait()
        return vigil._FAILED

    return {"send": send, "receive": receive}


def stuck_telling() -> int:
    watch(send=for_ever)
    for_ever()
    return 0


def stuck_telling_on_another_thread() -> int:
    """That thread was there first."""
    made = watch(**stuck_before_it_hears())
    threading.Thread(target=made.fail, daemon=True).start()
    for_ever()
    return 0


def stuck_explaining() -> int:
    watch(Alone(explain=for_ever))
    for_ever()
    return 0


def stuck_aborting() -> int:
    watch(Alone(abort=for_ever))
    for_ever()
    return 0


def stuck_queueing() -> int:
    watch(Alone(queued=for_ever))
    for_ever()
    return 0


def stuck_writing() -> int:
    """Nobody reads standard error, and the pipe is full."""
    _, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    os.set_blocking(full, True)
    os.dup2(full, 2)
    watch()
    for_ever()
    return 0


def an_error_before_it_waits() -> int:
    """What a task left behind is raised once, by a call that has then waited for nothing."""
    errors = [RuntimeError("a task failed")]

    def synchronize() -> None:
        if errors:
            raise errors.pop()
        for_ever()

    watch(synchronize=synchronize)
    for_ever()
    return 0


def only_errors() -> int:
    """The device tells nobody whether it has ended."""

    def synchronize() -> None:
        raise RuntimeError("the device is lost")

    watch(synchronize=synchronize)
    for_ever()
    return 0


def a_free_device() -> int:
    """As soon as the failure is passed on. The process ends as it likes, although nobody takes the word."""
    passed_on = threading.Event()

    def send(word: int) -> None:
        if word == vigil._FAILED:
            passed_on.set()
        for_ever()

    made = watch(send=send, synchronize=lambda: nothing(passed_on.wait()))
    made._thread.join()
    assert made.heard is not None
    atexit._run_exitfuncs()
    return 0


def a_rank_that_leaves_while_its_word_is_under_way() -> int:
    """The failure is heard later."""
    watch(**stuck_before_it_hears(), synchronize=nothing).join()
    return 0


# -- three ranks over gloo, their devices made up ----------------------------------------------------------------------
def ranks_with(synchronize: Callable[[], None]) -> tuple[Ranks, vigil.Vigil, Any]:
    """Ranks as on a device family, and their store. All have come this far."""
    ranks = runtime.init(backend="cpu").ranks
    assert ranks is not None
    ranks._vigil = made = vigil.Vigil(ranks, synchronize)
    ranks.barrier()
    return ranks, made, causes.store()


def a_rank_is_killed() -> int:
    ranks, _, _ = ranks_with(for_ever)
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    for_ever()
    return 0


def a_rank_raises() -> int:
    ranks, _, _ = ranks_with(for_ever)
    if ranks.rank == 1:
        ranks.announce(ValueError("the data set is damaged"))
    for_ever()
    return 0


def a_rank_learns_of_it_elsewhere() -> int:
    """Rank 2's own collective tells it first, its device is free, and it ends in good order."""
    ranks, _, _ = ranks_with(nothing if runtime.current().rank == 2 else for_ever)
    if ranks.rank != 2:
        for_ever()
    try:
        with ranks.explained():
            raise RuntimeError("closed by peer")
    except PeerError as error:
        ranks.announce(error)
    atexit._run_exitfuncs()
    return 0


def a_rank_is_killed_while_another_ends() -> int:
    """Rank 2's program is over, its device is not."""

    def synchronize() -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 has taken the store with it
            causes.store().set("waits", "1")
        for_ever()

    ranks, _, store = ranks_with(synchronize)
    if ranks.rank == 0:
        store.wait(["waits"])
        os.kill(os.getpid(), signal.SIGKILL)
    if ranks.rank == 2:
        atexit._run_exitfuncs()
    for_ever()
    return 0


def all_leave() -> int:
    """Rank 1 when rank 0 has said that it leaves, and waits."""
    ranks, made, store = ranks_with(nothing)
    if ranks.rank == 2:
        made._thread.join()
        store.set("rank 0 leaves", "1")
    if ranks.rank == 1:
        store.wait(["rank 0 leaves"])
        store.set("rank 1 leaves", "1")
    made.join()
    assert made.heard is None
    assert ranks.rank != 0 or store.check(["rank 1 leaves"])
    return 0


STUCK = (
    stuck_telling,
    stuck_telling_on_another_thread,
    stuck_explaining,
    stuck_aborting,
    stuck_queueing,
    stuck_writing,
    an_error_before_it_waits,
    only_errors,
)
FREE = (a_free_device, a_rank_that_leaves_while_its_word_is_under_way)
THREE = (
    a_rank_is_killed,
    a_rank_raises,
    a_rank_learns_of_it_elsewhere,
    a_rank_is_killed_while_another_ends,
    all_leave,
)


def main(folder: Path) -> int:
    def process(case: Callable[[], int], grace: float) -> Callable[[int], int]:
        def run(_rank: int) -> int:
            signal.alarm(LIMIT)
            torch.set_num_threads(1)
            vigil.GRACE = grace
            return case()

        return run

    pids = {}
    for size, cases, grace in ((1, STUCK, 0.5), (1, FREE, vigil.GRACE), (3, THREE, 2.0)):
        for case in cases:
            outputs = [folder / f"{case.__name__}-{rank}.txt" for rank in range(size)]
            pids[case.__name__] = start(size, process(case, grace), outputs)
    (folder / "codes.json").write_text(json.dumps({name: wait(some) for name, some in pids.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
