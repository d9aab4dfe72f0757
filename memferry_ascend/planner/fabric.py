"""What connects the ranks of a job: how long their collectives take, and how many share a node's work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FabricProfile:
    """The device fabric, as one rank sees it. Every rank sends and receives at once.

    ranks: of one node, which share every unit's chunks. bandwidth: bytes/s a rank sends to the others of its node.
    latency: seconds of a collective of no bytes. nodes, bandwidth_across, latency_across: the same between nodes, where
    the owners of a chunk reduce its gradient in fp32. Raises ValueError naming the field.
    """

    ranks: int
    bandwidth: float
    latency: float
    nodes: int = 1
    bandwidth_across: float | None = None
    latency_across: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"fabric: {name} must be a whole number >= 1, found {value!r}")
        for name in ("bandwidth", "latency", "bandwidth_across", "latency_across"):
            value = getattr(self, name)
            if value is None and name == "bandwidth_across":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name.startswith("bandwidth")):
                raise ValueError(
                    f"fabric: {name} must be a finite number "
                    f"{'> 0' if name.startswith('bandwidth') else '>= 0'}, found {value!r}"
                )
        if self.nodes > 1 and self.bandwidth_across is None:
            raise ValueError("fabric: bandwidth_across is needed with more than one node")

    @property
    def world(self) -> int:
        """Ranks of all nodes."""
        return self.ranks * self.nodes

    def gather(self, nbytes: float) -> float:
        """Seconds until every rank of the node has all chunks of `nbytes` bytes."""
        if self.ranks == 1:
            return 0.0
        return self.latency + nbytes * (self.ranks - 1) / self.ranks / self.bandwidth

    def exchange(self, nbytes: float, itemsize: int) -> float:
        """Seconds until every rank has its chunk of a gradient of `nbytes` bytes, of all ranks: exchanged within the
        node, then reduced across nodes as fp32, in parts that are gathered again."""
        seconds = self.gather(nbytes)
        if self.nodes > 1:
            assert self.bandwidth_across is not None
            moved = nbytes / self.ranks * 4 / itemsize * (self.nodes - 1) / self.nodes
            seconds += 2 * (self.latency_across + moved / self.bandwidth_across)
        return seconds

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, document: Any) -> FabricProfile:
        """The inverse of to_json. Raises ValueError naming what is missing or wrong."""
        if not isinstance(document, dict):
            raise ValueError(f"expected the profile's fabric as a JSON object, found {document!r}")
        try:
            return cls(**document)
        except TypeError as error:
            raise ValueError(f"fabric: {str(error).removeprefix('FabricProfile.__init__() ')}") from error
