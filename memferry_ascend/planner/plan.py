"""Decisions: which layer runs how, where its gradient goes and where it is updated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from memferry_ascend import sizes
from memferry_ascend.planner.files import check_document, check_items, read_json, write_json

FORMAT_VERSION = 1


class Mode(StrEnum):
    """How a layer's parameters are read (paper section IV-B; STREAM is ours)."""

    GFGB = "GFGB"
    DHA = "DHA"
    DFGB = "DFGB"
    STREAM = "STREAM"


class Grad(StrEnum):
    """Where a layer's gradient is produced and kept."""

    KEEP = "keep"
    STAGE = "stage"
    DIRECT = "direct"


class Update(StrEnum):
    """Where a layer's optimizer state lives and is updated."""

    HOST = "host"
    DEVICE = "device"


Decision = tuple[Mode, Grad, Update]

_ENUMS: dict[str, type[StrEnum]] = {"mode": Mode, "grad": Grad, "update": Update}


@dataclass(frozen=True)
class LayerPlan:
    """One layer's decisions; `name` is the qualified module name ("" for the root).

    why: which alternative it beat and by how many seconds. kind, bytes: of the layer, for reading, where
    known. mode, grad and update may be given as their strings. Raises ValueError naming the layer when a
    value is unknown, or when update="device" goes with a mode other than GFGB or with grad="direct":
    parameters and gradient are then on the device by definition.
    """

    name: str
    mode: Mode = Mode.GFGB
    grad: Grad = Grad.STAGE
    update: Update = Update.HOST
    why: str = ""
    kind: str = ""
    bytes: int | None = None

    def __post_init__(self) -> None:
        for field, enum in _ENUMS.items():
            value = getattr(self, field)
            try:
                object.__setattr__(self, field, enum(value))
            except ValueError:
                known = ", ".join(repr(str(x)) for x in enum)
                raise ValueError(
                    f"layer {self.name!r}: {field} must be one of {known}, found {value!r}"
                ) from None
        if self.update is Update.DEVICE and (self.mode is not Mode.GFGB or self.grad is Grad.DIRECT):
            raise ValueError(
                f"layer {self.name!r}: update 'device' keeps parameters and gradient on the device, so it "
                "needs mode "
                f"'GFGB' and grad 'keep' or 'stage', found mode {str(self.mode)!r} and grad "
                f"{str(self.grad)!r}"
            )


@dataclass(frozen=True)
class Plan:
    """The plan of a model: one LayerPlan per layer, in execution order.

    t_res, tag: what Alg. 1 leaves for Alg. 2: the reserved overlap time in seconds, and the position (from 0)
    where the next backtracking would start: the first GFGB layer whose copy was hidden, or the layer after
    the last one turned to DHA; -1 when there is neither.
    device_bytes, host_bytes: bytes the plan occupies. predicted_period, measured_period: seconds per
    iteration. None where nobody has computed or measured them. Raises ValueError when two layers bear one
    name.
    """

    layers: tuple[LayerPlan, ...]
    t_res: float = 0.0
    tag: int = -1
    device_bytes: int | None = None
    host_bytes: int | None = None
    predicted_period: float | None = None
    measured_period: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if len(self._index) != len(self.layers):
            names = [layer.name for layer in self.layers]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"layers {_quote(twice)} appear more than once; names must be unique")

    @cached_property
    def _index(self) -> dict[str, int]:
        return {layer.name: position for position, layer in enumerate(self.layers)}

    def __getitem__(self, name: str) -> LayerPlan:
        """The decisions for layer `name`; KeyError when the plan has no such layer."""
        if name not in self._index:
            raise KeyError(f"the plan has no layer {name!r}; it has {_quote(list(self._index))}")
        return self.layers[self._index[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """A plain-text table: layer, kind, mode, grad, update, MiB, why; then the totals that are known."""
        rows = [("layer", "kind", "mode", "grad", "update", "MiB", "why")]
        for layer in self.layers:
            size = "" if layer.bytes is None else f"{layer.bytes / 2**20:.2f}"
            name = layer.name or "(root)"
            rows.append(
                (name, layer.kind, layer.mode.value, layer.grad.value, layer.update.value, size, layer.why)
            )
        shown = [i for i in range(7) if i in (0, 2, 3, 4) or any(row[i] for row in rows[1:])]
        width = {i: max(len(row[i]) for row in rows) for i in shown}
        lines = ["  ".join(row[i].rjust(width[i]) if i == 5 else row[i].ljust(width[i]) for i in
        shown).rstrip()
                 for row in rows]  # fmt: skip
        totals = []
        for label, nbytes in (("device", self.device_bytes), ("host", self.host_bytes)):
            if nbytes is not None:
                totals.append(f"{label} {sizes.fmt(nbytes)}")
        for label, period in (("predicted", self.predicted_period), ("measured", self.measured_period)):
            if period is not None:
                totals.append(f"{label} {period * 1e3:.3f} ms per iteration")
        return "\n".join([*lines, *([", ".join(totals)] if totals else [])])

    def override(self, changes: Mapping[str, Mapping[str, str]]) -> Plan:
        """The plan with the layers matching each fnmatch pattern changed, later patterns over earlier ones.

        `changes` is {pattern: {"mode": ..., "grad": ..., "update": ...}}. What was computed for the old plan
        (periods, bytes) is dropped. Raises ValueError on a pattern that matches no layer or a field that
        does not exist.
        """
        layers = list(self.layers)
        for pattern, values in changes.items():
            unknown = sorted(set(values) - set(_ENUMS))
            if unknown:
                raise ValueError(
                    f"override {pattern!r}: unknown {', '.join(unknown)}; known are {', '.join(_ENUMS)}"
                )
            matched = [i for i, layer in enumerate(layers) if fnmatchcase(layer.name, pattern)]
            if not matched:
                raise ValueError(
                    f"override {pattern!r} matches no layer; the layers are {_quote(list(self._index))}"
                )
            for i in matched:
                layers[i] = replace(layers[i], **values, why=f"overridden by {pattern!r}")  # type: ignore[arg-type]
        return replace(
            self,
            layers=tuple(layers),
            device_bytes=None,
            host_bytes=None,
            predicted_period=None,
            measured_period=None,
        )

    def diff(self, other: Plan) -> str:
        """What changes from this plan to `other`, a line per layer that differs; "" when nothing does."""
        lines = []
        for layer in self.layers:
            if layer.name not in other:
                lines.append(f"- {layer.name}")
                continue
            new = other[layer.name]
            changed = [f"{f} {getattr(layer, f)} -> {getattr(new, f)}" for f in _ENUMS
                       if getattr(layer, f) != getattr(new, f)]  # fmt: skip
            if changed:
                lines.append(f"  {layer.name}: {', '.join(changed)}")
        lines += [f"+ {layer.name}" for layer in other.layers if layer.name not in self]
        return "\n".join(lines)

    def check_layers(self, names: Sequence[str]) -> None:
        """Raise ValueError, naming the layers that differ, unless the plan's are exactly `names` in order."""
        own = [layer.name for layer in self.layers]
        wanted = list(names)
        if own == wanted:
            return
        missing = [name for name in wanted if name not in self]
        extra = [name for name in own if name not in set(wanted)]
        parts = []
        if missing:
            parts.append(f"the plan lacks {_quote(missing)}")
        if extra:
            parts.append(f"the model lacks {_quote(extra)}")
        if not parts:
            place = next((i for i, (a, b) in enumerate(zip(own, wanted, strict=False)) if a != b), len(own))
            parts.append(f"the order differs from position {place}: plan {own[place:place + 1]}, "
                         f"model {wanted[place:place + 1]}")  # fmt: skip
        raise ValueError(f"the plan is for another model: {'; '.join(parts)}. Make a plan for this model")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        document: dict[str, Any] = {"format": "memferry plan", "version": FORMAT_VERSION}
        document.update({f.name: getattr(self, f.name) for f in fields(Plan) if f.name != "layers"})
        document["layers"] = [
            {
                f.name: str(v) if isinstance(v := getattr(layer, f.name), StrEnum) else v
                for f in fields(LayerPlan)
            }
            for layer in self.layers
        ]
        return document

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        """The inverse of to_json; a hand-written plan needs only `layers` with `name` and what differs from
        the
        defaults. Raises ValueError naming the layer and the field."""
        found = check_document(document, "plan", FORMAT_VERSION, ("layers",))
        layers = []
        for position, item in enumerate(check_items(found["layers"], "layers")):
            owner = f"layer {item.get('name', f'number {position}')!r}"
            if not isinstance(item.get("name"), str):
                raise ValueError(f"{owner}: name must be a string, found {item.get('name')!r}")
            _refuse_unknown(item, LayerPlan, owner)
            if item.get("bytes") is not None:
                _expect_number(item["bytes"], f"{owner}: bytes")
            layers.append(LayerPlan(**item))
        rest = {key: value for key, value in found.items() if key not in ("format", "version", "layers")}
        _refuse_unknown(rest, Plan, "plan")
        for key, value in rest.items():
            if value is not None or key in ("t_res", "tag"):
                _expect_number(value, f"plan: {key}")
        return cls(layers=tuple(layers), **rest)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path` atomically. Raises OSError as open() does."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what save wrote. Raises ValueError naming the file and what is wrong in it."""
        document = read_json(path, "plan")
        try:
            return cls.from_json(document)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def _expect_number(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what} must be a number, found {value!r}")


def _refuse_unknown(item: Mapping[str, Any], kind: type[Any], owner: str) -> None:
    known = [f.name for f in fields(kind)]
    unknown = sorted(set(item) - set(known))
    if unknown:
        raise ValueError(f"{owner}: unknown field {', '.join(unknown)}; known are {', '.join(known)}")


def _quote(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
