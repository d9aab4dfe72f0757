"""`load`: a shipped fabric by name, a YAML file, or the JSON that a probe wrote.

A fabric file lists hosts, devices, switches and links; `templates` describe what is there many times and are
placed with `use`, so 48 equal nodes take one description. Names inside a placed template are prefixed
(`node0/npu3/die1`). `docs/topology.md` describes the format. Every mistake is reported with its line.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from yaml.nodes import Node, SequenceNode

from .fabric import LINK_KINDS, Fabric, Link, NodeKind
from .measured import Measured
from .yaml_marks import FabricError, Reader

FABRICS = FilePath(__file__).parent / "fabrics"
MAX_NODES = 100_000  # a template placed a million times by a slip of the finger should not fill memory

_BODY = ("hosts", "devices", "switches", "use", "links", "homes")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_SECTIONS: tuple[tuple[str, NodeKind], ...] = (
    ("hosts", "host"),
    ("devices", "device"),
    ("switches", "switch"),
)


def shipped() -> list[str]:
    """Names of the fabrics that come with the package."""
    return sorted(path.stem for path in FABRICS.glob("*.yaml"))


def load(name_or_path: str | os.PathLike[str]) -> Fabric | Measured:
    """The fabric called `name_or_path`, or described by that `.yaml` or probe `.json` file.

    Raises FabricError (a ValueError) with file and line for a file that cannot be used, and FileNotFoundError
    for a name that is neither shipped nor a file.
    """
    name = os.fspath(name_or_path)
    path = FilePath(name)
    if name in shipped():
        path = FABRICS / f"{name}.yaml"
    if not path.is_file():
        raise FileNotFoundError(
            f"no fabric {name!r}: expected one of {', '.join(shipped())}, or a .yaml or probe .json file"
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return Measured.from_json(text, source=str(path))
    return parse(text, source=path.name if path.parent == FABRICS else str(path))


def parse(text: str, source: str = "fabric") -> Fabric:
    """The fabric that a YAML text describes; `source` names it in errors."""
    reader = Reader(source)
    root = reader.compose(text)
    top = reader.mapping(root, ("name",), ("description", "launch_latency", "relay", "templates", *_BODY))
    templates = {}
    if "templates" in top:
        for name, (_, body) in reader.entries(top["templates"]).items():
            templates[name] = (body, reader.mapping(body, (), _BODY))
    builder = _Builder(reader, templates)
    builder.refuse_templates_within_themselves()
    builder.place({key: top[key] for key in _BODY if key in top}, "")
    builder.check(root)
    relay = reader.mapping(top["relay"], (), ("latency", "efficiency")) if "relay" in top else {}
    return Fabric(
        name=reader.text(top["name"]),
        nodes=builder.nodes,
        links=tuple(builder.links),
        description=reader.text(top["description"]) if "description" in top else "",
        launch_latency=reader.seconds(top["launch_latency"]) if "launch_latency" in top else 0.0,
        relay_latency=reader.seconds(relay["latency"]) if "latency" in relay else 0.0,
        relay_efficiency=reader.fraction(relay["efficiency"]) if "efficiency" in relay else 1.0,
        homes=builder.homes,
    )


@dataclass
class _Builder:
    """Expands a document into nodes, links and homes, remembering the line that each came from."""

    reader: Reader
    templates: dict[str, tuple[Node, dict[str, Node]]]
    nodes: dict[str, NodeKind] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    homes: dict[str, str] = field(default_factory=dict)
    marks: dict[str, Node] = field(default_factory=dict)  # by node or link name

    def refuse_templates_within_themselves(self) -> None:
        finished: set[str] = set()

        def visit(name: str, within: tuple[str, ...]) -> None:
            for node in self._list(self.templates[name][1], "use"):
                used = self.reader.mapping(node, ("template", "name"), ("count",))["template"]
                inner = self.reader.text(used)
                if inner not in self.templates:
                    raise self._unknown_template(used, inner)
                if inner in (*within, name):
                    ring = " > ".join([*within, name, inner])
                    raise self.reader.error(used, f"template {inner!r} contains itself: {ring}")
                if inner not in finished:
                    visit(inner, (*within, name))
            finished.add(name)

        for name in self.templates:
            visit(name, ())

    def place(self, body: dict[str, Node], prefix: str) -> None:
        for section, kind in _SECTIONS:
            for node in self._list(body, section):
                for name in self._names(node, ()):
                    self._add(prefix + name, kind, node)
        for node in self._list(body, "use"):
            used = self.reader.mapping(node, ("template", "name"), ("count",))["template"]
            template = self.reader.text(used)
            if template not in self.templates:
                raise self._unknown_template(used, template)
            for name in self._names(node, ("template",)):
                self.place(self.templates[template][1], f"{prefix}{name}/")
        for node in self._list(body, "links"):
            self._link(node, prefix)
        for node in self._list(body, "homes"):
            self._home(node, prefix)

    def check(self, root: Node) -> None:
        """What only the whole shows: PCIe is a tree, and every device can be reached from a host."""
        if "host" not in self.nodes.values() or "device" not in self.nodes.values():
            raise self.reader.error(root, "expected at least one host and one device")
        pcie, parts = _Groups(), _Groups()
        for link in self.links:
            if link.kind == "pcie" and not pcie.join(link.a, link.b):
                raise self.reader.error(
                    self.marks[link.name],
                    f"PCIe links form a cycle that {link.a} to {link.b} closes; expected a tree",
                )
            parts.join(link.a, link.b)
        reached = {parts.find(name) for name, kind in self.nodes.items() if kind == "host"}
        for name, kind in self.nodes.items():
            if kind == "device" and parts.find(name) not in reached:
                raise self.reader.error(self.marks[name], f"no links lead from any host to device {name}")

    def _list(self, body: dict[str, Node], key: str) -> list[Node]:
        return self.reader.items(body[key]) if key in body else []

    def _unknown_template(self, node: Node, name: str) -> FabricError:
        return self.reader.error(
            node, f"unknown template {name!r}; expected one of {', '.join(self.templates)}"
        )

    def _names(self, node: Node, more: tuple[str, ...]) -> list[str]:
        """`name` or `{name, count}`: with a count the names are numbered from 0."""
        name_node, count = node, None
        if more or not node.tag.endswith(":str"):
            fields = self.reader.mapping(node, (*more, "name"), ("count",))
            name_node = fields["name"]
            count = self.reader.count(fields["count"]) if "count" in fields else None
        name = self.reader.text(name_node)
        if not _NAME.fullmatch(name):
            raise self.reader.error(name_node, f"expected a name of letters and digits, found {name!r}")
        return [name] if count is None else [f"{name}{i}" for i in range(count)]

    def _add(self, name: str, kind: NodeKind, node: Node) -> None:
        if name in self.nodes:
            first = self.marks[name].start_mark.line + 1
            raise self.reader.error(node, f"{kind} {name!r}: the name is taken (line {first})")
        if len(self.nodes) >= MAX_NODES:
            raise self.reader.error(node, f"expected at most {MAX_NODES} nodes; look at the counts of `use`")
        self.nodes[name] = kind
        self.marks[name] = node

    def _match(self, node: Node, prefix: str) -> list[str]:
        """The nodes that a name or a pattern means; `*` stands for anything but a slash."""
        text = self.reader.text(node)
        if "*" not in text:
            if prefix + text not in self.nodes:
                raise self.reader.error(node, f"unknown node {prefix + text!r}")
            return [prefix + text]
        pattern = re.compile(re.escape(prefix + text).replace(r"\*", "[^/]*"))
        found = [name for name in self.nodes if pattern.fullmatch(name)]
        if not found:
            raise self.reader.error(node, f"no node matches {prefix + text!r}")
        return found

    def _link(self, node: Node, prefix: str) -> None:
        reader = self.reader
        fields = reader.mapping(node, ("ends", "kind", "bandwidth", "latency"), ("count", "duplex", "flow"))
        kind = reader.text(fields["kind"])
        if kind not in LINK_KINDS:
            raise reader.error(
                fields["kind"], f"unknown link kind {kind!r}; expected {', '.join(LINK_KINDS)}"
            )
        count = reader.count(fields["count"]) if "count" in fields else 1
        bandwidth = reader.bandwidth(fields["bandwidth"]) * count
        latency = reader.seconds(fields["latency"])
        flow = reader.bandwidth(fields["flow"]) if "flow" in fields else None
        if flow is not None and flow > bandwidth:
            raise reader.error(fields["flow"], "one transfer (flow) cannot exceed the bandwidth of all links")
        both = self._duplex(fields["duplex"], bandwidth) if "duplex" in fields else None
        for a, b in self._pairs(fields["ends"], prefix):
            name = f"{kind} {a}--{b}"
            for taken in (name, f"{kind} {b}--{a}"):
                if taken in self.marks:
                    first = self.marks[taken].start_mark.line + 1
                    raise reader.error(node, f"a second {kind} link {a} to {b} (line {first}); use `count`")
            self.marks[name] = node
            self.links.append(Link(name, a, b, kind, bandwidth, latency, count, both, flow))

    def _duplex(self, node: Node, bandwidth: float) -> float | None:
        """`full`, `half`, or the bandwidth that both directions reach together."""
        text = self.reader.text(node)
        if text in ("full", "half"):
            return None if text == "full" else bandwidth
        both = self.reader.bandwidth(node)
        if not bandwidth <= both <= 2 * bandwidth:
            raise self.reader.error(
                node, "expected full, half, or one to two times the bandwidth of all links"
            )
        return both

    def _pairs(self, node: Node, prefix: str) -> list[tuple[str, str]]:
        """One link per match of a pattern; two patterns link every pair once (a full mesh)."""
        ends = self.reader.items(node) if isinstance(node, SequenceNode) else []
        if len(ends) != 2:
            raise self.reader.error(node, "expected two ends: [a, b]")
        left, right = (self._match(end, prefix) for end in ends)
        if left == right and len(left) == 1:
            raise self.reader.error(node, f"{left[0]} is linked to itself")
        pairs: dict[tuple[str, str], None] = {}
        for a in left:
            for b in right:
                if a != b and (b, a) not in pairs:
                    pairs[a, b] = None
        return list(pairs)

    def _home(self, node: Node, prefix: str) -> None:
        fields = self.reader.mapping(node, ("host", "devices"))
        hosts = self._match(fields["host"], prefix)
        if len(hosts) != 1 or self.nodes[hosts[0]] != "host":
            raise self.reader.error(fields["host"], f"expected one host, found {', '.join(hosts)}")
        for pattern in self.reader.items(fields["devices"]):
            for name in self._match(pattern, prefix):
                if self.nodes[name] != "device":
                    raise self.reader.error(pattern, f"expected devices, found {self.nodes[name]} {name}")
                if name in self.homes:
                    raise self.reader.error(pattern, f"{name} has a home already: {self.homes[name]}")
                self.homes[name] = hosts[0]


class _Groups:
    """Union-find over names."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        while (parent := self._parent.setdefault(name, name)) != name:
            self._parent[name] = self._parent[parent]
            name = parent
        return name

    def join(self, a: str, b: str) -> bool:
        """Whether the two were apart before."""
        a, b = self.find(a), self.find(b)
        self._parent[a] = b
        return a != b
