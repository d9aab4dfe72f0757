"""Where every byte of an engine lives, for people."""

from __future__ import annotations

from memferry_ascend.arena import Arena
from memferry_ascend.deviceupdate import DeviceMemory
from memferry_ascend.gradients import Gradients
from memferry_ascend.limits import NAMES
from memferry_ascend.ring import Ring
from memferry_ascend.shadow import Resident


def memory_rows(
    arena: Arena, residents: list[Resident], gradients: Gradients, ring: Ring | None
) -> list[tuple[str, str, int]]:
    """(place, what, bytes) of everything the engine holds."""
    rows = [("host", NAMES.get(k, k), v) for k, v in arena.bytes_by_kind.items()]
    kept = [ug.kept.buffer.nbytes for ug in gradients.units if ug.kept is not None]
    state = [
        a.nbytes for r in residents if isinstance(r.memory, DeviceMemory) for a in r.memory.arrays.values()
    ]
    rows += [
        ("device", "parameter buffers", sum(r.buffer.nbytes for r in residents if r.buffer is not None)),
        ("device", "ring slots", sum(s.bytes.nbytes for s in ring.slots) if ring is not None else 0),
        ("device", "kept gradients", sum(kept)),
        ("device", "masters and moments", sum(state)),
    ]
    return [row for row in rows if row[2]]
