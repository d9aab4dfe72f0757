"""What was measured: times per layer and bandwidths of the link. Seconds and bytes throughout."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from numbers import Real
from typing import Any

from memferry_ascend.planner.fabric import FabricProfile
from memferry_ascend.planner.files import check_document, check_items, read_json, write_json
from memferry_ascend.planner.launches import Launches, check_launches
from memferry_ascend.planner.parameters import LayerParams, check_params

FORMAT_VERSION = 1

_MAY_BE_INFINITE = frozenset({"t_fp_dha", "t_bp_dha", "t_bp_grad_direct", "t_update_device"})


def _check_number(
    owner: str, field: str, value: Any, *, infinite: bool = False, positive: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{owner}: {field} must be a number, found {value!r}")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{owner}: {field} is NaN; measure it again")
    if number < 0 or (positive and number == 0):
        raise ValueError(f"{owner}: {field} must be {'> 0' if positive else '>= 0'}, found {value!r}")
    if math.isinf(number) and not infinite:
        allowed = ", ".join(sorted(_MAY_BE_INFINITE))
        raise ValueError(f"{owner}: {field} must be finite, found inf (only {allowed} may be: 'not usable')")


def _check_bytes(owner: str, field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{owner}: {field} must be a whole number of bytes (int), found {value!r}")
    if value < 0:
        raise ValueError(f"{owner}: {field} must be >= 0 bytes, found {value}")


@dataclass(frozen=True)
class LayerProfile:
    """One layer as measured on the device; the variables of the MemFerry paper, section IV-B.

    name: qualified module name ("" for the root). kind: the module's class name.
    bytes: parameter bytes in the device dtype (S_l), of a tied parameter too. t_trans: seconds of one
    host-to-device copy of them, alone on the link (T_trans).
    t_fp, t_bp: seconds of forward and backward with parameters on the device (T_FP, T_BP; T_CBP of section
    IV-D). t_fp_dha, t_bp_dha: seconds with parameters read from host memory (T_FP^H, T_BP^H); inf = not
    usable that way. t_bp_grad_direct: seconds of a backward whose gradient goes straight to host memory
    (T_GBP); inf = not usable. t_gap_fp, t_gap_bp: seconds of computation between this layer and the next,
    A_{l,l+1}, in either pass. t_update: seconds of the host update of this layer, all threads, alone on the
    host. dha_bytes: bytes one DHA forward reads over the link.
    shares: the name of the layer that owns the tied parameter this layer reads; that parameter is then
    transferred, updated and counted once, and whatever `bytes` exceeds the owner's is this layer's own.
    trainable: False = no gradient, no update. recompute: its forward runs again in the backward pass.
    itemsize: bytes per element in the device dtype. t_update_device: seconds of an update on the device;
    inf = not usable; None = not measured (older profiles): plans made for the engine then offer none, and the
    simulator takes a sixteenth of t_update, the least ratio of device to host memory bandwidth met so far.
    t_host_fp, t_host_bp: seconds in which its forward and its backward are launched, GFGB and staged; 0 = not known.

    Raises ValueError naming the layer and the field.
    """

    name: str
    kind: str
    bytes: int
    t_trans: float
    t_fp: float
    t_bp: float
    t_fp_dha: float
    t_bp_dha: float
    t_bp_grad_direct: float
    t_gap_fp: float
    t_gap_bp: float
    t_update: float
    dha_bytes: int
    shares: str | None = None
    trainable: bool = True
    recompute: bool = False
    itemsize: int = 2
    t_update_device: float | None = None
    t_host_fp: float = 0.0
    t_host_bp: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.kind, str):
            raise ValueError(f"layer {self.name!r}: name and kind must be strings, found kind {self.kind!r}")
        owner = f"layer {self.name!r}"
        for field in _TIMES:
            _check_number(owner, field, getattr(self, field), infinite=field in _MAY_BE_INFINITE)
        for field in ("bytes", "dha_bytes", "itemsize"):
            _check_bytes(owner, field, getattr(self, field))
        if self.itemsize == 0:
            raise ValueError(f"{owner}: itemsize must be >= 1 byte, found 0")
        if self.t_update_device is not None:
            _check_number(owner, "t_update_device", self.t_update_device, infinite=True)
        if self.shares is not None and not isinstance(self.shares, str):
            raise ValueError(f"{owner}: shares must be a layer name or None, found {self.shares!r}")
        for field in ("trainable", "recompute"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{owner}: {field} must be true or false, found {getattr(self, field)!r}")

    @property
    def dha_usable(self) -> bool:
        """True when the forward may read host memory (DFGB needs only this)."""
        return math.isfinite(self.t_fp_dha)

    @property
    def dha_backward_usable(self) -> bool:
        """True when the backward may read host memory too (DHA needs both)."""
        return math.isfinite(self.t_bp_dha)

    @property
    def direct_usable(self) -> bool:
        """True when the gradient may be written straight to host memory."""
        return math.isfinite(self.t_bp_grad_direct)

    @property
    def device_update_usable(self) -> bool:
        """True unless the profile says that the layer cannot be updated on the device."""
        return self.t_update_device is None or math.isfinite(self.t_update_device)

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return self.bytes // self.itemsize

    @property
    def device_update_time(self) -> float:
        """Seconds of an update on the device, measured or estimated."""
        return self.t_update / 16 if self.t_update_device is None else self.t_update_device


_TIMES = (
    "t_trans", "t_fp", "t_bp", "t_fp_dha", "t_bp_dha", "t_bp_grad_direct", "t_gap_fp", "t_gap_bp", "t_update",
    "t_host_fp", "t_host_bp",
)  # fmt: skip


@dataclass(frozen=True)
class LinkProfile:
    """The link between host and device.

    h2d, d2h: bytes/s of one direction alone. duplex: bytes/s of both together when both are busy.
    latency: seconds a copy takes before its first byte. host_memory: bytes/s the host's memory gives to
    transfers and host updates together; None = never the bottleneck. Raises ValueError naming the field.
    """

    h2d: float
    d2h: float
    duplex: float
    latency: float
    host_memory: float | None = None

    def __post_init__(self) -> None:
        for field in ("h2d", "d2h", "duplex"):
            _check_number("link", field, getattr(self, field), positive=True)
        _check_number("link", "latency", self.latency)
        if self.host_memory is not None:
            _check_number("link", "host_memory", self.host_memory, positive=True)


@dataclass(frozen=True)
class Profile:
    """Everything the planner knows about a model on a machine.

    layers: in forward execution order, at least one. base_bytes: device bytes for activations, buffers and
    workspace, whatever the plan. fabric: what connects several ranks; None = one rank. parameters: the same
    layers in the model's order with what each owns and reads; empty = not known (older profiles), and bytes
    are then counted without alignment. launches: what each alternative to GFGB adds to the launching of a layer
    (`launches.py`); empty = nothing (not measured, or a device that does not queue). Times are of whole layers, with
    the link and the share of the host's cores that one rank has. Raises ValueError on no layer, a repeated name,
    `shares` naming no owner, parameters of other layers, or launches that make no sense.
    """

    layers: tuple[LayerProfile, ...]
    link: LinkProfile
    base_bytes: int = 0
    fabric: FabricProfile | None = None
    parameters: tuple[LayerParams, ...] = ()
    launches: Launches = dataclass_field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "launches", check_launches(self.launches))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "parameters", tuple(self.parameters))
        if not self.layers:
            raise ValueError("a profile needs at least one layer, found none: does the model own parameters?")
        for layer in self.layers:
            if not isinstance(layer, LayerProfile):
                raise ValueError(f"profile.layers must hold LayerProfile, found {type(layer).__name__}")
        if not isinstance(self.link, LinkProfile):
            raise ValueError(f"profile.link must be a LinkProfile, found {type(self.link).__name__}")
        _check_bytes("profile", "base_bytes", self.base_bytes)
        if len(self.index) != len(self.layers):
            counts = Counter(layer.name for layer in self.layers)
            twice = next(name for name, count in counts.items() if count > 1)
            raise ValueError(f"layer {twice!r} appears more than once; names must be unique")
        if self.parameters:
            check_params(self.parameters, self.index)
        for layer in self.layers:
            if layer.shares is None:
                continue
            if layer.shares not in self.index or layer.shares == layer.name:
                raise ValueError(
                    f"layer {layer.name!r}: shares names {layer.shares!r}, which is no other layer"
                )
            owner = self[layer.shares]
            if owner.shares is not None:
                raise ValueError(
                    f"layer {layer.name!r}: shares names {owner.name!r}, which itself shares "
                    f"{owner.shares!r}; "
                    "name the owner"
                )

    def __getitem__(self, name: str) -> LayerProfile:
        """The layer called `name`; KeyError when there is none."""
        return self.layers[self.index[name]]

    @cached_property
    def index(self) -> dict[str, int]:
        """Layer name -> position in forward order."""
        return {layer.name: position for position, layer in enumerate(self.layers)}

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Per layer, the position of the layer that owns what it reads: itself unless it `shares`."""
        return tuple(i if x.shares is None else self.index[x.shares] for i, x in enumerate(self.layers))

    @cached_property
    def own_bytes(self) -> tuple[int, ...]:
        """Per layer, its parameter bytes less those of the tied parameter it only reads."""
        return tuple(
            x.bytes if self.owners[i] == i else max(0, x.bytes - self.layers[self.owners[i]].bytes)
            for i, x in enumerate(self.layers)
        )

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Per layer, its own parameters' bytes as they are laid out on the device: aligned where it is known."""
        if not self.parameters:
            return self.own_bytes
        found = {x.name: x.stored_bytes for x in self.parameters}
        return tuple(found[x.name] for x in self.layers)

    @cached_property
    def own_fraction(self) -> tuple[float, ...]:
        """Per layer, own_bytes / bytes: the part of t_trans and t_update that is its own."""
        return tuple(
            1.0 if self.owners[i] == i else self.own_bytes[i] / x.bytes if x.bytes else 0.0
            for i, x in enumerate(self.layers)
        )

    @property
    def shards(self) -> int:
        """Ranks that share every layer's copies and update."""
        return 1 if self.fabric is None else self.fabric.ranks

    @cached_property
    def copy_times(self) -> tuple[float, ...]:
        """Per layer, seconds in which a rank brings its part of what the layer owns over its own link."""
        if self.shards == 1:
            return tuple(x.t_trans * f for x, f in zip(self.layers, self.own_fraction, strict=True))
        latency = self.link.latency
        return tuple(
            (min(x.t_trans, latency) + max(0.0, x.t_trans - latency) / self.shards) * f
            for x, f in zip(self.layers, self.own_fraction, strict=True)
        )

    @cached_property
    def update_times(self) -> tuple[float, ...]:
        """Per layer, seconds in which a rank updates its part of what the layer owns."""
        return tuple(
            x.t_update * f / self.shards for x, f in zip(self.layers, self.own_fraction, strict=True)
        )

    def gather_time(self, nbytes: float) -> float:
        """Seconds after a rank's copy until all of it is on the device."""
        return self.fabric.gather(nbytes) if self.fabric is not None and nbytes else 0.0

    def exchange_time(self, i: int) -> float:
        """Seconds between the layer's own gradient and its sum over ranks; 0 when it has none."""
        own = self.own_bytes[i]
        if self.fabric is None or not own or not self.layers[i].trainable:
            return 0.0
        return self.fabric.exchange(own, self.layers[i].itemsize)

    def as_one(self) -> Profile:
        """A profile for algorithms that know one rank: the fabric counts as a part of the link."""
        if self.fabric is None:
            return self
        layers = tuple(
            replace(
                x,
                t_trans=(self.copy_times[i] / f if (f := self.own_fraction[i]) else x.t_trans)
                + self.gather_time(x.bytes),
                t_update=x.t_update / self.shards,
            )
            for i, x in enumerate(self.layers)
        )
        return replace(self, layers=layers, fabric=None)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, the positions of all layers reading what it owns, in order; empty if it shares."""
        found: list[list[int]] = [[] for _ in self.layers]
        for position, owner in enumerate(self.owners):
            found[owner].append(position)
        return tuple(tuple(x) for x in found)

    @cached_property
    def tied(self) -> tuple[bool, ...]:
        """Per layer, whether it reads or owns a parameter that several layers read."""
        return tuple(o != i or len(self.readers[i]) > 1 for i, o in enumerate(self.owners))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict. Infinite times become the string "inf", because JSON has no infinity."""
        fabric = {} if self.fabric is None else {"fabric": self.fabric.to_json()}
        return {
            "format": "memferry profile",
            "version": FORMAT_VERSION,
            "base_bytes": self.base_bytes,
            "link": {f.name: getattr(self.link, f.name) for f in fields(LinkProfile)},
            **fabric,
            "layers": [
                {f.name: _encode(getattr(layer, f.name)) for f in fields(LayerProfile)}
                for layer in self.layers
            ],
            **({"parameters": [x.to_json() for x in self.parameters]} if self.parameters else {}),
            **(
                {"launches": {name: list(pair) for name, pair in self.launches.items()}}
                if self.launches
                else {}
            ),
        }

    @classmethod
    def from_json(cls, document: Any) -> Profile:
        """The inverse of to_json. Raises ValueError naming the layer and the field that is missing or
        wrong.
        """
        found = check_document(document, "profile", FORMAT_VERSION, ("base_bytes", "link", "layers"))
        if not isinstance(found["link"], Mapping):
            raise ValueError(f"expected the profile's link as a JSON object, found {found['link']!r}")
        link = _build(LinkProfile, found["link"], "link")
        layers = tuple(
            _build(LayerProfile, item, f"layer {item.get('name', f'number {position}')!r}")
            for position, item in enumerate(check_items(found["layers"], "layers"))
        )
        fabric = FabricProfile.from_json(found["fabric"]) if "fabric" in found else None
        parameters = tuple(
            LayerParams.from_json(x) for x in check_items(found.get("parameters", []), "parameters")
        )
        return cls(layers, link, found["base_bytes"], fabric, parameters, found.get("launches", {}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path` atomically. Raises OSError as open() does."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what save wrote. Raises ValueError naming the file and what is wrong in it."""
        document = read_json(path, "profile")
        try:
            return cls.from_json(document)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def _encode(value: Any) -> Any:
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _build(kind: type[Any], item: Mapping[str, Any], owner: str) -> Any:
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(item) - set(known))
    if unknown:
        raise ValueError(f"{owner}: unknown field {', '.join(unknown)}; known are {', '.join(known)}")
    values = {
        key: math.inf if value == "inf" and key in _MAY_BE_INFINITE else value for key, value in item.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{owner}: {str(error).removeprefix(kind.__name__ + '.__init__() ')}") from error
