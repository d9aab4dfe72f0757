"""What a probe measured, as JSON: paths with latency and bandwidth per direction, the samples, and what
shares a link.

    {"format": "memferry-topology", "version": 1, "name": "node-17", "created": "2026-05-01T12:00:00Z",
     "machine": {"backend": "cuda", "host": "node-17"},
     "paths": [{"name": "direct", "host": "host", "device": "cuda:0", "via": null,
                "h2d": {"latency": 1e-05, "bandwidth": 5.5e10, "samples": [[65536, 2.2e-05], ...]},
                "d2h": {...}}],
     "shared": [{"paths": [["cuda:0", "direct"], ["cuda:0", "via cuda:1"]], "direction": "h2d", "bandwidth":
     6e10}]}

Seconds and bytes/s throughout; a sample is [bytes, seconds]. `shared` says what several paths reached
together where that was less than their sum. `machine` is free for the probe's own notes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from .paths import DIRECTIONS, Direction, FabricPath, PathSet
from .yaml_marks import FabricError

FORMAT, VERSION = "memferry-topology", 1

Sample = tuple[int, float]  # (bytes, seconds)


@dataclass(frozen=True)
class Figures:
    """One direction of a path: latency (s), bandwidth (bytes/s) and the samples they were fitted to."""

    latency: float
    bandwidth: float
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class MeasuredPath:
    """A probed way between `host` and `device`, through the peer `via` unless that is None."""

    name: str
    host: str
    device: str
    via: str | None = None
    h2d: Figures | None = None
    d2h: Figures | None = None


@dataclass(frozen=True)
class Shared:
    """Paths, as (device, path name), that reached only `bandwidth` bytes/s together in `direction`."""

    paths: tuple[tuple[str, str], ...]
    direction: Direction
    bandwidth: float


@dataclass(frozen=True)
class Measured:
    """A probe's result; answers the same questions as a `Fabric` (`devices`, `hosts`, `home`, `paths`)."""

    name: str
    measured: tuple[MeasuredPath, ...]
    shared: tuple[Shared, ...] = ()
    created: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.device for p in self.measured))

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.host for p in self.measured))

    def home(self, device: str) -> str:
        """The host of the path with the lowest latency from host to `device`."""
        found = [p for p in self.measured if p.device == device and p.h2d is not None and p.via is None]
        if not found:
            raise KeyError(
                f"{self.name} has no direct path to {device!r}; devices are {', '.join(self.devices)}"
            )
        return min(found, key=lambda p: p.h2d.latency if p.h2d else math.inf).host

    def paths(
        self,
        device: str,
        *,
        host: str | None = None,
        via: Iterable[str] | None = None,
        direction: Direction = "h2d",
    ) -> PathSet:
        """The measured paths of `device` in `direction`: direct first, then through the peers `via` (default
        all).
        """
        host = host or self.home(device)
        peers = None if via is None else set(via)
        found: list[FabricPath] = []
        capacity: dict[str, float] = {}
        for path in self.measured:
            figures = path.h2d if direction == "h2d" else path.d2h
            wanted = path.via is None or peers is None or path.via in peers
            if path.device != device or path.host != host or figures is None or not wanted:
                continue
            uses: dict[str, float] = {}
            for i, shared in enumerate(self.shared):
                if shared.direction == direction and (device, path.name) in shared.paths:
                    uses[f"shared {i}"] = 1.0
                    capacity[f"shared {i}"] = shared.bandwidth
            found.append(
                FabricPath(
                    path.name, figures.latency, figures.bandwidth, host, device, path.via, direction, uses
                )
            )
        if not found:
            raise KeyError(f"{self.name} has no {direction} path between {host} and {device!r}")
        return PathSet(tuple(sorted(found, key=lambda p: p.via is not None)), capacity)

    def to_json(self) -> str:
        def figures(value: Figures | None) -> dict[str, Any] | None:
            if value is None:
                return None
            samples = [[size, seconds] for size, seconds in value.samples]
            return {"latency": value.latency, "bandwidth": value.bandwidth, "samples": samples}

        paths = [
            {
                "name": p.name, "host": p.host, "device": p.device, "via": p.via,
                "h2d": figures(p.h2d), "d2h": figures(p.d2h),
            }
            for p in self.measured
        ]  # fmt: skip
        shared = [
            {"paths": [list(pair) for pair in s.paths], "direction": s.direction, "bandwidth": s.bandwidth}
            for s in self.shared
        ]
        document = {
            "format": FORMAT, "version": VERSION, "name": self.name, "created": self.created,
            "machine": dict(self.machine), "paths": paths, "shared": shared,
        }  # fmt: skip
        return json.dumps(document, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file, in place of an older one only once it is complete on disk."""
        write_text(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, source: str = "probe") -> Measured:
        """The reverse of `to_json`. Raises FabricError naming the entry that is wrong."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise FabricError(f"{source}:{error.lineno}: not JSON: {error.msg}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise FabricError(f'{source}: expected a probe\'s JSON with "format": "{FORMAT}"')
        if document.get("version") != VERSION:
            raise FabricError(f"{source}: expected version {VERSION}, found {document.get('version')!r}")
        check = _Checker(source)
        paths = []
        for i, entry in enumerate(check.sequence(document, "paths", "")):
            where = f"paths[{i}]"
            via = entry.get("via") if isinstance(entry, dict) else None
            paths.append(
                MeasuredPath(
                    check.text(entry, "name", where),
                    check.text(entry, "host", where),
                    check.text(entry, "device", where),
                    None if via is None else check.text(entry, "via", where),
                    check.figures(entry, "h2d", where),
                    check.figures(entry, "d2h", where),
                )
            )
        names = [(p.host, p.device, p.name) for p in paths]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise FabricError(f"{source}: paths[{i}]: {name[2]!r} of {name[1]} appears twice")
        shared = []
        for i, entry in enumerate(check.sequence(document, "shared", "") if "shared" in document else []):
            where = f"shared[{i}]"
            pairs = [tuple(p) if isinstance(p, list) else p for p in check.sequence(entry, "paths", where)]
            known = {(p.device, p.name) for p in paths}
            for pair in pairs:
                if pair not in known:
                    raise FabricError(
                        f"{source}: {where}: unknown path {pair!r}, expected [device, path name]"
                    )
            direction = check.text(entry, "direction", where)
            if direction not in DIRECTIONS:
                raise FabricError(f"{source}: {where}: expected direction h2d or d2h, found {direction!r}")
            bandwidth = check.number(entry, "bandwidth", where, above=True)
            shared.append(Shared(tuple(pairs), "h2d" if direction == "h2d" else "d2h", bandwidth))
        return cls(
            check.text(document, "name", "top level"), tuple(paths), tuple(shared),
            str(document.get("created", "")), document.get("machine") or {},
        )  # fmt: skip


class _Checker:
    """Typed access to decoded JSON, with the entry's place in every message."""

    def __init__(self, source: str) -> None:
        self.source = source

    def _get(self, entry: Any, key: str, where: str) -> Any:
        if not isinstance(entry, dict) or key not in entry:
            raise FabricError(f"{self.source}: {where}: missing {key!r}")
        return entry[key]

    def text(self, entry: Any, key: str, where: str) -> str:
        value = self._get(entry, key, where)
        if not isinstance(value, str) or not value:
            raise FabricError(f"{self.source}: {where}: expected a name as {key!r}, found {value!r}")
        return value

    def sequence(self, entry: Any, key: str, where: str) -> Sequence[Any]:
        value = self._get(entry, key, where)
        if not isinstance(value, list):
            raise FabricError(f"{self.source}: {where}: expected a list as {key!r}, found {value!r}")
        return value

    def number(self, entry: Any, key: str, where: str, *, above: bool) -> float:
        value = self._get(entry, key, where)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < 0 or (above and value == 0):
            bound = "above zero" if above else "of zero or more"
            raise FabricError(f"{self.source}: {where}: expected a {key} {bound}, found {value!r}")
        return float(value)

    def figures(self, entry: Any, key: str, where: str) -> Figures | None:
        value = entry.get(key)
        if value is None:
            return None
        where = f"{where}.{key}"
        samples = []
        for pair in self.sequence(value, "samples", where) if "samples" in value else []:
            if not (isinstance(pair, list) and len(pair) == 2 and pair[0] >= 0 and pair[1] > 0):
                raise FabricError(
                    f"{self.source}: {where}: expected samples [bytes, seconds], found {pair!r}"
                )
            samples.append((int(pair[0]), float(pair[1])))
        latency = self.number(value, "latency", where, above=False)
        return Figures(latency, self.number(value, "bandwidth", where, above=True), tuple(samples))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, also after a power cut."""
    target = FilePath(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
