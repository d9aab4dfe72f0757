"""What a profile keeps of the model's parameters, so that bytes can be counted as the engine lays them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

ALIGNMENT = 512
"""Bytes: where a parameter may start in a buffer (DESIGN, section 2)."""


@dataclass(frozen=True)
class ParamProfile:
    """One parameter. index: its number in the model. itemsize: bytes an element in the device dtype. shared: it has
    several names, of which more than one module may read. Raises ValueError naming the field."""

    index: int
    elements: int
    itemsize: int
    trainable: bool
    shared: bool

    def __post_init__(self) -> None:
        for field, least in (("index", 0), ("elements", 0), ("itemsize", 1)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field} must be a whole number >= {least}, found {value!r}")
        for field in ("trainable", "shared"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be true or false, found {getattr(self, field)!r}")

    @property
    def bytes(self) -> int:
        """Without alignment."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class LayerParams:
    """A layer's parameters. owns: those that belong to it. reads: the numbers of all it has, owned or tied."""

    name: str
    owns: tuple[ParamProfile, ...]
    reads: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of what it owns, each parameter aligned."""
        return sum(-(-p.bytes // ALIGNMENT) * ALIGNMENT for p in self.owns)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; a parameter is a list of its fields in their order."""
        return {"name": self.name, "owns": [list(astuple(p)) for p in self.owns], "reads": list(self.reads)}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> LayerParams:
        """The inverse of to_json. Raises ValueError naming the layer and what is wrong."""
        name = item.get("name")
        try:
            if not isinstance(name, str):
                raise ValueError(f"name must be a string, found {name!r}")
            return cls(name, tuple(ParamProfile(*p) for p in item["owns"]), tuple(item["reads"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"parameters of layer {name!r}: expected name, owns (lists of index, elements, itemsize, trainable, "
                f"shared) and reads: {error}"
            ) from error


def check_params(parameters: Sequence[LayerParams], names: Mapping[str, int]) -> None:
    """Raise ValueError unless `parameters` are those of exactly the layers `names`, and what is read is owned."""
    found = [x.name for x in parameters]
    if set(found) != set(names) or len(found) != len(names):
        differ = sorted(set(found) ^ set(names)) or sorted({x for x in found if found.count(x) > 1})
        raise ValueError(f"parameters: expected each of the profile's layers once, these differ: {differ}")
    owned = {p.index for x in parameters for p in x.owns}
    for x in parameters:
        missing = [i for i in x.reads if i not in owned]
        if missing:
            raise ValueError(
                f"parameters of layer {x.name!r}: it reads number {missing[0]}, which no layer owns"
            )
