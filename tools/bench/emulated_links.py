"""CPU-to-NPU bandwidth over transfer size on emulated CloudMatrix384 links: the shape of the paper's Fig.
18a.

Real threads copy over `EmulatedLinks` (fabric `cm384`): direct only, assisted only, and both with static and
with dynamic dispatch. Then the same sizes with contention that begins halfway: another job takes three
quarters of the assisting die's way out. Times are wall-clock times divided by the time scale, chosen per size
so that the late wake-up of a thread (some 0.1 ms) hardly shows; the model's own figure stands beside each.

    python tools/bench/emulated_links.py --json docs/benchmarks/emulated-links.json --plot fig18a.png

This says how the dispatcher behaves on links with the fabric file's figures. It is no measurement of an NPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from memferry_ascend.topology import (
    DynamicDispatch,
    EmulatedLinks,
    Fabric,
    FabricPath,
    PathSet,
    StaticDispatch,
    load,
)
from memferry_ascend.topology.measured import write_text

MIB = 1 << 20
TARGET, PEER = "node0/npu0/die0", "node0/npu4/die0"
CONTENDED = f"ub {PEER}>node0/ub"
KEPT = 0.25 * 51.1e9  # bytes/s that contention leaves of the assisted path
CHUNK = 2 * MIB  # of dynamic dispatch; larger ones are stuck longer in a path that slows down
SIZES = [
    64 << 10,
    256 << 10,
    MIB,
    2 * MIB,
    4 * MIB,
    8 * MIB,
    16 * MIB,
    32 * MIB,
    64 * MIB,
    128 * MIB,
    256 * MIB,
]


@dataclass(frozen=True)
class Scheme:
    name: str
    paths: tuple[FabricPath, ...]
    dynamic: bool = False


def copy(
    fabric: Fabric, scheme: Scheme, nbytes: int, scale: float, contention_at: float | None
) -> tuple[float, dict[str, int]]:
    """(emulated seconds until the last byte, bytes per path) of one transfer, in wall-clock time over
    `scale`.
    """
    dispatch: StaticDispatch | DynamicDispatch = StaticDispatch()
    if scheme.dynamic:
        dispatch = DynamicDispatch(CHUNK, clock=lambda: time.perf_counter() / scale)
    transfer = dispatch.begin(nbytes, scheme.paths)
    over = threading.Event()
    with EmulatedLinks(fabric, time_scale=scale) as links:

        def work(path: FabricPath) -> None:
            while (piece := transfer.next_chunk(path.name, wait=True)) is not None:
                links.transfer(path, piece[1])
                transfer.complete(path.name, piece)

        def disturb(after: float) -> None:
            if not over.wait(after * scale):
                links.set_bandwidth(CONTENDED, KEPT)

        # Dynamic dispatch keeps two chunks in each path, so that the next one's startup hides behind the
        # first.
        workers = [p for p in scheme.paths for _ in range(2 if scheme.dynamic else 1)]
        with ThreadPoolExecutor(len(workers) + 1) as pool:
            begin = time.perf_counter()
            jobs = [pool.submit(work, path) for path in workers]
            if contention_at is not None:
                jobs.append(pool.submit(disturb, contention_at))
            transfer.join()
            seconds = (time.perf_counter() - begin) / scale
            over.set()
            for job in jobs:
                job.result()
    return seconds, transfer.moved


def measure(repeats: int, wall: float, sizes: list[int]) -> dict[str, Any]:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    both = fabric.paths(TARGET, via=[PEER])
    direct, assisted = both.paths
    schemes = (
        Scheme("direct", (direct,)),
        Scheme("assisted", (assisted,)),
        Scheme("static", both.paths),
        Scheme("dynamic", both.paths, dynamic=True),
    )
    rows = []
    for nbytes in sizes:
        scale = max(wall / direct.seconds(nbytes), wall / 10 / (CHUNK / direct.bandwidth))
        model = model_seconds(both, nbytes)
        for contention in (False, True):
            halfway = model["static"] / 2 if contention else None
            for scheme in schemes:
                runs = [copy(fabric, scheme, nbytes, scale, halfway) for _ in range(repeats)]
                seconds = statistics.median(r[0] for r in runs)
                rows.append(
                    {
                        "scheme": scheme.name,
                        "bytes": nbytes,
                        "contention": contention,
                        "time_scale": scale,
                        "seconds": seconds,
                        "runs": [r[0] for r in runs],
                        "gb_per_s": nbytes / seconds / 1e9,
                        "model_gb_per_s": None
                        if contention or scheme.dynamic
                        else nbytes / model[scheme.name] / 1e9,
                        "bytes_per_path": runs[-1][1],
                    }
                )
        print(line(nbytes, rows[-2 * len(schemes) :]), flush=True)
    return {
        "benchmark": "emulated_links",
        "emulated": True,
        "fabric": fabric.name,
        "paths": [{"name": p.name, "latency": p.latency, "bandwidth": p.bandwidth} for p in both.paths],
        "contention": {"link": CONTENDED, "bandwidth": KEPT, "begins": "half of the static model's time"},
        "repeats": repeats,
        "wall_seconds_per_direct_copy_at_least": wall,
        "chunk": CHUNK,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "rows": rows,
    }


def model_seconds(both: PathSet, nbytes: int) -> dict[str, float]:
    direct, assisted = both.paths
    static = both.seconds(both.split(nbytes))
    return {"direct": direct.seconds(nbytes), "assisted": assisted.seconds(nbytes), "static": static}


def line(nbytes: int, rows: list[dict[str, Any]]) -> str:
    def figures(contention: bool) -> str:
        return "  ".join(f"{r['scheme']} {r['gb_per_s']:5.1f}" for r in rows if r["contention"] is contention)

    return f"{nbytes / MIB:9.4g} MiB  {figures(False)}  |  contention halfway: {figures(True)} GB/s"


def plot(result: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for i, contention in enumerate((False, True)):
        axes = figure.add_subplot(1, 2, i + 1)
        for scheme in ("direct", "assisted", "static", "dynamic"):
            rows = [r for r in result["rows"] if r["scheme"] == scheme and r["contention"] is contention]
            axes.plot(
                [r["bytes"] / MIB for r in rows], [r["gb_per_s"] for r in rows], marker="o", label=scheme
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("MiB")
        axes.set_ylabel("GB/s (emulated)")
        axes.set_title("contention begins halfway" if contention else "no contention")
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--plot", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument("--repeats", type=int, default=3, help="runs per figure, the median counts")
    parser.add_argument(
        "--wall",
        type=float,
        default=0.1,
        help="wall-clock seconds of a direct copy, ten times those of a chunk, at least",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.wall, arguments.sizes)
    if arguments.json:
        write_text(arguments.json, json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
