"""Handing a unit's update to whoever runs it: the background, or the device behind its own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memferry_ascend import saving
from memferry_ascend.backends.base import Event
from memferry_ascend.gradstate import GradState, UnitGrads
from memferry_ascend.hostupdate import Hypers
from memferry_ascend.jobs import Update
from memferry_ascend.shadow import Resident

if TYPE_CHECKING:
    from memferry_ascend.engine import Engine


def hand_over(
    engine: Engine, ug: UnitGrads, part: list[GradState], hypers: Hypers, scale: Any, after: Event | None
) -> None:
    """Queue one unit's update: download and `after` (an event on the compute stream), update, upload."""
    resident = ug.resident
    if resident.memory.on_device:
        _on_device(engine, ug, part, hypers, scale)
        return
    # A unit's own download is behind its last use on the compute stream: with `after` None that is enough.
    waits = [ug.downloaded] if after is None else [ug.downloaded, after]
    before = saving.before_update(engine, resident)
    resident.begin_update()
    engine._jobs.update(
        Update(
            unit=resident.unit.index,
            priority=resident.order,
            waits=waits,
            update=engine._updates[resident.unit.index],
            part=[s.p for s in part],
            summed=engine._gradients.summing,
            hypers=hypers,
            scale=scale,
            upload=resident.upload_job(after if after is not None else ug.downloaded),
            then=_then(engine, resident),
            before=before,
            clear=engine._gradients.to_clear(ug, part),
        )
    )
    ug.tickets[ug.turn] = engine._jobs.ticket(resident.unit.index)


def _then(engine: Engine, resident: Resident) -> Callable[[], None]:
    """What the background does when a unit is updated."""

    def then() -> None:
        resident.offer()
        if engine._saving is not None:
            engine._saving.notify()

    return then


def _on_device(engine: Engine, ug: UnitGrads, part: list[GradState], hypers: Hypers, scale: Any) -> None:
    """Launch one unit's update on the compute stream; once the norm is known, where it must be."""
    update, params = engine._updates[ug.resident.unit.index], [s.p for s in part]

    def launch() -> None:
        engine._jobs.wait_norm()
        before = saving.before_update(engine, ug.resident)
        if before is not None:
            before()
        update.run(params, engine._gradients.summing, hypers, scale.value)

    ug.resident.begin_update()
    ug.resident.deferred = launch
    if engine.config.max_grad_norm is None:
        ug.resident.wait()
