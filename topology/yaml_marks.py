"""Read a YAML document strictly, with the line of every mistake in the message.

Works on `yaml.compose` nodes, which keep their marks. Quantities are written with a unit (`56 GB/s`, `0.7
us`) or as plain numbers in bytes/s and seconds; YAML's own float rules (which read `1e9` as text) do not
matter.
"""

from __future__ import annotations

import difflib
import math
import re

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

BANDWIDTH_UNITS = {
    "B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "KiB/s": 2.0**10, "MiB/s": 2.0**20,
    "GiB/s": 2.0**30, "Gbit/s": 1e9 / 8,
}  # fmt: skip
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)")


class FabricError(ValueError):
    """A fabric or probe file that cannot be used; the message starts with file and line."""


class Reader:
    """Typed access to the nodes of one document; every method raises FabricError with file and line."""

    def __init__(self, source: str) -> None:
        self.source = source

    def compose(self, text: str) -> Node:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise FabricError(f"{self.source}{line}: not YAML: {error.problem}") from error
        except yaml.YAMLError as error:
            raise FabricError(f"{self.source}: not YAML: {error}") from error
        if root is None:
            raise FabricError(f"{self.source}:1: expected a fabric description, found an empty file")
        return root

    def error(self, node: Node, message: str) -> FabricError:
        return FabricError(f"{self.source}:{node.start_mark.line + 1}: {message}")

    def mapping(
        self, node: Node, required: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> dict[str, Node]:
        """The values by key. Unknown, repeated and missing keys are errors."""
        entries = self.entries(node)
        allowed = (*required, *optional)
        for key, (key_node, _) in entries.items():
            if key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(allowed)}"
                raise self.error(key_node, f"unknown key {key!r}; {hint}")
        for key in required:
            if key not in entries:
                raise self.error(node, f"missing {key!r}")
        return {key: value for key, (_, value) in entries.items()}

    def entries(self, node: Node) -> dict[str, tuple[Node, Node]]:
        """(key node, value node) by key, for mappings whose keys the writer chooses."""
        if not isinstance(node, MappingNode):
            raise self.error(node, f"expected a mapping (key: value), found {_describe(node)}")
        result: dict[str, tuple[Node, Node]] = {}
        for key_node, value in node.value:
            key = self.text(key_node)
            if key in result:
                raise self.error(key_node, f"{key!r} appears twice")
            result[key] = (key_node, value)
        return result

    def items(self, node: Node) -> list[Node]:
        if not isinstance(node, SequenceNode):
            raise self.error(node, f"expected a list, found {_describe(node)}")
        return list(node.value)

    def text(self, node: Node) -> str:
        if not isinstance(node, ScalarNode) or not node.value:
            raise self.error(node, f"expected a name, found {_describe(node)}")
        return str(node.value)

    def count(self, node: Node) -> int:
        text = self.text(node)
        if not re.fullmatch(r"\d{1,6}", text) or int(text) < 1:
            raise self.error(node, f"expected a whole number from 1 to 999999, found {text!r}")
        return int(text)

    def bandwidth(self, node: Node) -> float:
        """Bytes/s, above zero."""
        value = self._quantity(node, BANDWIDTH_UNITS, "a bandwidth such as '56 GB/s'")
        if value <= 0:
            raise self.error(node, f"expected a bandwidth above zero, found {node.value!r}")
        return value

    def seconds(self, node: Node) -> float:
        """Seconds, zero or more."""
        value = self._quantity(node, TIME_UNITS, "a time such as '0.7 us'")
        if value < 0:
            raise self.error(node, f"expected a latency of zero or more, found {node.value!r}")
        return value

    def fraction(self, node: Node) -> float:
        value = self._quantity(node, {}, "a fraction such as 0.9")
        if not 0 < value <= 1:
            raise self.error(node, f"expected a fraction above 0 and up to 1, found {node.value!r}")
        return value

    def _quantity(self, node: Node, units: dict[str, float], expected: str) -> float:
        text = self.text(node).strip()
        match = _QUANTITY.fullmatch(text)
        if match is None or (match[2] and match[2] not in units):
            known = f" (units: {', '.join(units)})" if units else ""
            raise self.error(node, f"expected {expected}{known}, found {text!r}")
        value = float(match[1]) * units.get(match[2], 1.0)
        if not math.isfinite(value):
            raise self.error(node, f"expected {expected}, found {text!r}")
        return value


def _describe(node: Node) -> str:
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    return repr(node.value) if node.value else "nothing"
