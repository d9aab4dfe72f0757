"""Simulates data parallel training on 1 to 384 devices: what each resource does, and where the collectives take over.

python tools/bench/scaling.py [--json FILE] [--plot FILE]

The planner's own simulator (docs/planner.md): a unit's gradient is exchanged before its shard is downloaded, and its
parameters are gathered after the shard's copy, before a pass needs them. Link bytes and host updates of a rank are those
of its shard. Weak scaling: every device computes the same batch at any size. All blocks are GFGB, then all STREAM.

Figures for CloudMatrix384 from topology/fabrics/cm384.yaml (public, or fitted to the paper); what has no source is
ASSUMED below. It simulates rules, it measures nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memferry_ascend import planner
from memferry_ascend.planner import FabricProfile, LayerPlan, LayerProfile, LinkProfile, Mode, Plan, Profile
from memferry_ascend.planner.iteration import RESOURCES

MODES = ("GFGB", "STREAM")
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
    mode: str = "GFGB"

    @property
    def block(self) -> int:
        return 12 * self.width**2


def fabric_of(m: Machine, devices: int, sharding: str) -> FabricProfile | None:
    """What connects `devices` devices. sharding: "node" (hybrid) or "all" ranks, most of them on other nodes."""
    if devices == 1:
        return None
    if sharding == "all" and devices > m.per_node:
        return FabricProfile(devices, m.fabric_far, m.launch + (devices - 1) * m.latency_far)
    near = min(devices, m.per_node)
    far = -(-devices // near)
    latency = m.launch + (near - 1) * m.latency_near
    return FabricProfile(
        near, m.fabric_near, latency, far, m.fabric_far, m.launch + (far - 1) * m.latency_far
    )


def simulate(machine: Machine, work: Workload, devices: int, update: str, sharding: str) -> dict[str, Any]:
    """Seconds an iteration, and busy seconds by resource."""
    nbytes = 2 * work.block
    forward = 2 * work.block * work.tokens / machine.flops
    layers = tuple(
        LayerProfile(
            name=f"block{i}", kind="Block", bytes=nbytes, t_trans=machine.link_latency + nbytes / machine.link,
            t_fp=forward, t_bp=2 * forward, t_fp_dha=float("inf"), t_bp_dha=float("inf"),
            t_bp_grad_direct=float("inf"), t_gap_fp=0.0, t_gap_bp=0.0, t_update=work.block / machine.updates,
            dha_bytes=0,
        )
        for i in range(work.layers)
    )  # fmt: skip
    link = LinkProfile(
        h2d=machine.link, d2h=machine.link, duplex=2 * machine.link, latency=machine.link_latency
    )
    profile = Profile(layers, link, fabric=fabric_of(machine, devices, sharding))
    plan = Plan(tuple(LayerPlan(x.name, Mode(work.mode)) for x in layers))
    timeline = planner.simulate(profile, plan, update)
    return {
        "devices": devices,
        "sharding": sharding,
        "update": update,
        "mode": work.mode,
        "seconds": timeline.period,
        "busy": {name: timeline.busy.get(name, 0.0) for name in RESOURCES},
    }


def table(machine: Machine, work: Workload) -> list[dict[str, Any]]:
    """All sizes and modes, both shardings, updates in backward."""
    return [
        simulate(machine, replace(work, mode=mode), n, "backward", sharding)
        for mode in MODES
        for sharding in ("node", "all")
        for n in SIZES
    ]


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

    figure, axes = plt.subplots(1, 3, figsize=(15, 4), sharey=True)
    panels = (
        ("GFGB", "node", "all GFGB, shards within a node (as built)"),
        ("STREAM", "node", "all STREAM, shards within a node (as built)"),
        ("GFGB", "all", "all GFGB, shards over all ranks"),
    )
    for ax, (mode, sharding, title) in zip(axes, panels, strict=True):
        mine = [r for r in rows if r["sharding"] == sharding and r["mode"] == mode]
        x = [r["devices"] for r in mine]
        for name in RESOURCES:
            y = [r["busy"][name] or float("nan") for r in mine]
            ax.plot(x, y, "--x" if name == "d2h" else "-o", label=name)
        ax.plot(x, [r["seconds"] for r in mine], "k--", label="iteration")
        at = overtaken(mine)
        if at is not None:
            ax.axvline(at, color="gray", linewidth=0.8)
            said = f" collectives take longer than links from {at} devices"
            ax.text(at, 0.94, said, fontsize=8, transform=ax.get_xaxis_transform())
        ax.set(xscale="log", yscale="log", xlabel="devices")
        ax.set_title(title, fontsize=10)
    axes[0].set_ylabel("seconds an iteration (simulated)")
    axes[2].legend(fontsize=8, loc="lower left")
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
        print(
            f"{row['mode']:7}{row['sharding']:5}{row['devices']:4} devices  {row['seconds']:.3f} s  busy: {busy}"
        )
    if given.json:
        document = {"machine": machine.__dict__, "workload": work.__dict__, "rows": rows}
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    if given.plot:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
