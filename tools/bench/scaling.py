"""Simulates data parallel training on 1 to 384 devices: what each resource does, and where the collectives take over.

python tools/bench/scaling.py [--json FILE] [--plot FILE]

The planner's event simulator with a fifth resource, the device fabric: a unit's gradient is exchanged before its shard
is downloaded, and its parameters are gathered after the shard's upload, before the forward pass needs them. Link bytes
and host updates of a rank are those of its shard. Weak scaling: every device computes the same batch at any size.

Figures for CloudMatrix384 from topology/fabrics/cm384.yaml (public, or fitted to the paper); what has no source is
ASSUMED below. It simulates rules, it measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memferry_ascend.planner.fluid import Record, run
from memferry_ascend.planner.iteration import PATIENT, RESOURCES, URGENT, Iteration
from memferry_ascend.planner.memory import SLOTS, Decision, decisions
from memferry_ascend.planner.plan import LayerPlan, Mode, Plan
from memferry_ascend.planner.profile import LayerProfile, LinkProfile, Profile

FABRIC = len(RESOURCES)
NAMES = (*RESOURCES, "fabric")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384)


@dataclass(frozen=True)
class Machine:
    """Bytes, seconds, parameters; per device unless said otherwise."""

    link: float = 53e9  # host link, bytes/s: the paper's direct path
    link_latency: float = 16.2e-6
    fabric_near: float = 170e9  # between devices of a node
    fabric_far: float = 150e9
    latency_near: float = 0.7e-6
    latency_far: float = 2.1e-6
    launch: float = 15.5e-6  # of a collective: ASSUMED equal to a copy's
    per_node: int = 16
    flops: float = 150e12  # ASSUMED, bf16, what a transformer block reaches on one die
    updates: float = 0.9e9  # ASSUMED, parameters/s of host update: a quarter of a socket that does 3.6 G/s


@dataclass(frozen=True)
class Workload:
    """A transformer of `layers` equal blocks of 12 width² parameters, `tokens` per device and step."""

    layers: int = 32
    width: int = 4096
    tokens: int = 8192

    @property
    def block(self) -> int:
        return 12 * self.width**2


def exchange_seconds(m: Machine, nbytes: float, near: int, far: int, times: float = 1.0) -> float:
    """An exchange among `near` ranks in which each sends (near - 1) / near of `nbytes`, then, between `far` nodes, the
    reduction of what remains, `times` as wide (fp32 for bf16 gradients)."""
    seconds = 0.0
    if near > 1:
        seconds += m.launch + (near - 1) * m.latency_near + nbytes * (near - 1) / near / m.fabric_near
    if far > 1 and times:
        shard = times * nbytes / near
        seconds += 2 * (m.launch + (far - 1) * m.latency_far + shard * (far - 1) / far / m.fabric_far)
    return seconds


class RankIteration(Iteration):
    """One rank's iteration: `Iteration` on its shards, with collectives on the fabric."""

    servers = len(RESOURCES) + 1

    def __init__(
        self, profile: Profile, chosen: Sequence[Decision], gather: float, exchange: float, update: str
    ) -> None:
        self._gather, self._exchange = gather, exchange
        super().__init__(profile, chosen, update, SLOTS)

    def _copy(
        self, seconds: float, rank: int, what: str, layer: int, after: Sequence[int], nbytes: int
    ) -> int:
        task = super()._copy(seconds, rank, what, layer, after, nbytes)
        if what != "upload" or not self._gather:
            return task
        return self._add(FABRIC, self._gather, (URGENT, layer), ("gather", layer), [task])

    def _download(self, store: int, backward: int) -> None:
        if self._exchange:
            order = (PATIENT, len(self.gradients))
            backward = self._add(FABRIC, self._exchange, order, ("exchange", store), [backward])
        super()._download(store, backward)


def simulate(machine: Machine, work: Workload, devices: int, update: str, sharding: str) -> dict[str, Any]:
    """Seconds an iteration, and busy seconds by resource. sharding: "node" (hybrid) or "all" ranks."""
    near = min(devices, machine.per_node) if sharding == "node" else devices
    far = -(-devices // near)
    nbytes = 2 * work.block
    shard = -(-nbytes // near)
    forward = 2 * work.block * work.tokens / machine.flops
    layers = tuple(
        LayerProfile(
            name=f"block{i}", kind="Block", bytes=shard, t_trans=machine.link_latency + shard / machine.link,
            t_fp=forward, t_bp=2 * forward, t_fp_dha=float("inf"), t_bp_dha=float("inf"),
            t_bp_grad_direct=float("inf"), t_gap_fp=0.0, t_gap_bp=0.0,
            t_update=work.block / near / machine.updates, dha_bytes=0,
        )
        for i in range(work.layers)
    )  # fmt: skip
    link = LinkProfile(
        h2d=machine.link, d2h=machine.link, duplex=2 * machine.link, latency=machine.link_latency
    )
    profile = Profile(layers, link)
    plan = Plan(tuple(LayerPlan(x.name, Mode.GFGB) for x in layers))
    if sharding == "node" or devices <= machine.per_node:
        gather = exchange_seconds(machine, nbytes, near, 1)
        exchange = exchange_seconds(machine, nbytes, near, far, times=2.0)
    else:  # every rank talks to every other; most of them are on other nodes
        gather = exchange = (
            machine.launch
            + (devices - 1) * machine.latency_far
            + nbytes * (devices - 1) / devices / machine.fabric_far
        )
    built = RankIteration(profile, decisions(plan), gather, exchange, update)
    record = Record()
    steady = run(built.template, built.capacity, record)
    busy = dict.fromkeys(NAMES, 0.0)
    for (_, task), (start, end, _) in record.spans.items():
        if built.template.server[task] >= 0:
            inside = min(end, steady.end) - max(start, steady.start)
            busy[NAMES[built.template.server[task]]] += max(0.0, inside) / steady.cycle
    return {
        "devices": devices,
        "sharding": sharding,
        "update": update,
        "seconds": steady.period,
        "busy": busy,
    }


def table(machine: Machine, work: Workload) -> list[dict[str, Any]]:
    """All sizes, both shardings, updates in backward."""
    return [simulate(machine, work, n, "backward", s) for s in ("node", "all") for n in SIZES]


def overtaken(rows: list[dict[str, Any]]) -> int | None:
    """The smallest simulated number of devices whose fabric is busy longer than either link direction."""
    for row in rows:
        if row["busy"]["fabric"] > max(row["busy"]["h2d"], row["busy"]["d2h"]):
            return int(row["devices"])
    return None


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Busy seconds by resource over the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for ax, sharding in zip(axes, ("node", "all"), strict=True):
        mine = [r for r in rows if r["sharding"] == sharding]
        x = [r["devices"] for r in mine]
        for name in NAMES:
            y = [r["busy"][name] or float("nan") for r in mine]
            ax.plot(x, y, "--x" if name == "d2h" else "-o", label=name)
        ax.plot(x, [r["seconds"] for r in mine], "k--", label="iteration")
        at = overtaken(mine)
        if at is not None:
            ax.axvline(at, color="gray", linewidth=0.8)
            said = f" collectives take longer than links from {at} devices"
            ax.text(at, 0.02, said, fontsize=8, transform=ax.get_xaxis_transform())
        ax.set(xscale="log", yscale="log", xlabel="devices")
        ax.set_title("shards within a node (as built)" if sharding == "node" else "shards over all ranks")
    axes[0].set_ylabel("seconds an iteration (simulated)")
    axes[1].legend(fontsize=8, loc="center right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    machine, work = Machine(), Workload()
    rows = table(machine, work)
    for row in rows:
        busy = "  ".join(f"{k} {v:.3f}" for k, v in row["busy"].items())
        print(f"{row['sharding']:5}{row['devices']:4} devices  {row['seconds']:.3f} s  busy: {busy}")
    if given.json:
        document = {"machine": machine.__dict__, "workload": work.__dict__, "rows": rows}
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    if given.plot:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
