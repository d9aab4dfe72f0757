"""Saving while training goes on: a snapshot of one moment, copied unit by unit, just before each is updated again.

`engine.save_async(path)` returns at once. From then on a unit's masters and moments are copied exactly once: by the
writer thread as soon as the unit has the update that was in flight, or by the worker when it is about to make the next
one (copy on write). Copies made by the worker wait in a staging area of bounded size until they are written; when it is
full the worker waits for the disk, so training slows down and memory does not grow. The writer holds one unit more.

    memory    `staging` bytes, plus one unit (its fp32 masters and optimizer state)
    time      a copy of each unit on the writer, or on the worker; with native jobs on the thread that calls step()

The file is `engine.state_dict()` as it would have been at the call, written as a whole or not at all.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memferry_ascend import checkpoint, files, limits, sizes
from memferry_ascend.errors import FerryError
from memferry_ascend.torchfile import TensorRef, TorchFile

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine
    from memferry_ascend.shadow import Resident

Entries = tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]
"""One unit's part of a state: masters by name, optimizer state by parameter name."""


class SaveError(FerryError):
    """An asynchronous save failed. The file at its path is what it was before, and training may go on."""


class Save:
    """A save in flight, made by `Engine.save_async`."""

    def __init__(
        self,
        engine: Engine,
        path: Path,
        key: str | None,
        extra: Mapping[str, Any],
        then: Callable[[], None] | None,
        staging: int | None,
    ) -> None:
        self.path = path
        self._engine = engine
        self._key, self._then = key, then
        self._cond = threading.Condition()
        self._left: dict[int, Resident] = {r.unit.index: r for r in engine._residents}
        self._staged: deque[tuple[Entries, int]] = deque()
        self._staged_bytes = 0
        self.peak_staged = 0
        """Bytes: the most that has waited in the staging area."""
        self._staging = _default_staging(engine) if staging is None else staging
        self._failure: BaseException | None = None
        self._future: Future[Path] = Future()
        self._seen = False
        self._common = checkpoint.common_state(engine)
        self._extra = dict(extra)
        self._thread = threading.Thread(target=self._write, name="memferry-save", daemon=True)

    # -- what users call -----------------------------------------------------------------------------------------------
    def done(self) -> bool:
        """True when the file is complete and safe on disk, or the save has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the file is complete and safe on disk; returns its path. `timeout` in seconds.

        Raises:
            SaveError: it failed; says why. TimeoutError: not done yet.
        """
        result = self._future.exception(timeout)
        self._seen = True
        self._thread.join()
        if result is not None:
            raise result
        return self.path

    def unseen_failure(self) -> BaseException | None:
        """Wait for the end; what went wrong, unless `result` has raised it already."""
        error = self._future.exception()
        self._thread.join()
        seen, self._seen = self._seen, True
        return None if seen else error

    # -- for the engine ------------------------------------------------------------------------------------------------
    def before_update(self, unit: int) -> None:
        """The unit is about to change. Copies it if nobody has yet; waits while the staging area is full."""
        with self._cond:
            if unit not in self._left:
                return
            need = self._bytes(self._left[unit])
            self._cond.wait_for(
                lambda: self._failure or not self._staged_bytes or self._staged_bytes + need <= self._staging
            )
            if self._failure is None:
                self._staged.append((self._take(unit), need))
                self._staged_bytes += need
                self.peak_staged = max(self.peak_staged, self._staged_bytes)
                self._cond.notify_all()

    def notify(self) -> None:
        """Worker: a unit was updated, the writer may want it."""
        if self._left:
            with self._cond:
                self._cond.notify_all()

    def fail(self, error: BaseException) -> None:
        """The units that are left will never be ready."""
        with self._cond:
            self._failure = self._failure or error
            self._cond.notify_all()

    def settle(self) -> None:
        """User's thread: wait until every unit is copied; somebody else than an update will change the arena."""
        with self._cond:
            self._cond.wait_for(lambda: self._failure is not None or not self._left)

    # -- the copies ----------------------------------------------------------------------------------------------------
    def _take(self, unit: int) -> Entries:
        return checkpoint.unit_state(self._engine, self._left.pop(unit))

    def _bytes(self, r: Resident) -> int:
        return sum(p.numel * 4 for p in r.unit.params) + _state_bytes(self._engine, r)

    def _ready(self) -> int | None:
        return next((i for i, r in self._left.items() if r.host_ready), None)

    def _next(self) -> tuple[Entries, int] | None:
        """The next unit to write and the staging bytes that it gives back; None when all are written."""
        jobs = self._engine._jobs
        while True:
            with self._cond:
                if jobs.calls_back:
                    self._cond.wait_for(
                        lambda: self._failure or self._staged or not self._left or self._ready() is not None
                    )
                if self._failure is not None:
                    raise self._failure
                if self._staged:
                    return self._staged.popleft()
                if not self._left:
                    return None
                unit = self._ready()
                if unit is not None:
                    entries = self._take(unit)
                    self._cond.notify_all()  # for `settle`
                    return entries, 0
                waiting = next(iter(self._left))
            # Native jobs tell nobody when they are done. What is in flight needs nothing of ours to get done.
            jobs.wait_ticket(waiting, jobs.ticket(waiting))

    # -- the writer thread ---------------------------------------------------------------------------------------------
    def _write(self) -> None:
        try:
            with files.replacing(self.path) as stream:
                out = TorchFile(stream)
                try:
                    self._fill(out)
                except BaseException:
                    out.abandon()
                    raise
            if self._then is not None:
                self._then()
        except BaseException as error:
            self.fail(error)
            with self._cond:
                self._left.clear()
                self._staged.clear()
            self._engine = None  # type: ignore[assignment]
            self._future.set_exception(_explained(self.path, error))
        else:
            self._engine = None  # type: ignore[assignment]
            self._future.set_result(self.path)

    def _fill(self, out: TorchFile) -> None:
        written: dict[int, TensorRef] = {}

        def put(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in written:  # tied names share one record
                    written[id(value)] = out.add(value)
                return written[id(value)]
            if isinstance(value, Mapping):
                return {k: put(v) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(put(v) for v in value)
            return value

        model: dict[str, TensorRef] = {}
        optimizer: dict[str, Any] = {}
        while (part := self._next()) is not None:
            (masters, states), staged = part
            model |= put(masters)
            optimizer |= put(states)
            written.clear()  # by address: only while the tensors live
            del masters, states, part
            if staged:
                with self._cond:
                    self._staged_bytes -= staged
                    self._cond.notify_all()
        state = put(self._common)
        state["model"] = model | state["model"]
        state["optimizer"] = optimizer
        out.finish(({self._key: state} if self._key is not None else state) | put(self._extra))


def start(
    engine: Engine,
    path: str | os.PathLike[str],
    key: str | None = None,
    extra: Mapping[str, Any] | None = None,
    then: Callable[[], None] | None = None,
    staging: int | str | None = None,
) -> Save:
    """What `Engine.save_async` does."""
    if engine._parallel is not None:
        raise SaveError(
            "save_async writes from one process; with several ranks use distributed_checkpoint.save()"
        )
    target = Path(path)
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise SaveError(f"cannot save {target}: expected a folder that can be written to at {target.parent}")
    before, engine._saving = engine._saving, None
    failure = None if before is None else before.unseen_failure()
    if failure is not None:
        raise failure
    for r in engine._residents:
        if r.deferred is not None:
            r.wait()  # an update on the device that the save is to contain
    save = Save(engine, target, key, extra or {}, then, None if staging is None else sizes.parse(staging))
    engine._saving = save

    def failed() -> None:
        save.fail(FerryError(f"a host update failed: {engine._jobs.failure()}"))

    engine._jobs.on_failure(failed)
    if engine._jobs.failure() is not None:
        failed()
    save._thread.start()
    return save


def before_update(engine: Engine, r: Resident) -> Callable[[], None] | None:
    """An update of the unit is about to be handed over: what the worker has to do before it begins, if anything.

    A save that begins later wants what this update makes, so it is today's that matters. Native jobs never call back:
    the copy is then made here, on the user's thread.
    """
    save = engine._saving
    if save is None or save.done():
        return None
    if engine._jobs.calls_back:
        return lambda: save.before_update(r.unit.index)
    save.before_update(r.unit.index)
    return None


def _state_bytes(engine: Engine, r: Resident) -> int:
    update = engine._updates.get(r.unit.index)
    if update is None:
        return 0
    states = [update.state_of(p) for p in update.params]
    return sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))


def _default_staging(engine: Engine) -> int:
    """The whole state if memory has room for it, otherwise what there is less the usual margin."""
    whole = sum(p.numel * 4 for r in engine._residents for p in r.unit.params)
    whole += sum(_state_bytes(engine, r) for r in engine._residents)
    return min(whole, max(0, int(limits.available_host_bytes() * (1 - limits.MARGIN))))


def _explained(path: Path, error: BaseException) -> SaveError:
    if isinstance(error, OSError):
        hint = (
            "free some space"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else "check the folder"
        )
        reason = f"{error.strerror or error}; {hint} and save again"
    else:
        reason = str(error) or type(error).__name__
    wrapped = SaveError(f"saving {path} failed, nothing was written there: {reason}")
    wrapped.__cause__ = error
    return wrapped
