"""Direct, assisted and divided copies through the library's own transfers, on emulated links: the paper's Fig. 18a.

Real bytes are copied with `memferry_ascend.transfers`: through the streams of the CPU backend, with the relay's staging
buffers and worker threads, and what arrives is checked. Times are wall-clock times divided by the time scale, which each
row states and which is chosen so that a late wake-up (some 0.1 ms) hardly shows. With contention, another job takes three
quarters of the assisting die's way out, halfway through the transfer. The schemes of a size take turns, so that whatever
else runs on the machine hits them alike; the medians count.

    python tools/bench/relay.py --json docs/benchmarks/relay-emulated.json --plot docs/benchmarks/relay-emulated.png

It says how this code behaves on links with the fabric file's figures. It is no measurement of an NPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import threading
from pathlib import Path
from typing import Any

import torch
from memferry_ascend.topology import Fabric, PathSet, load

from memferry_ascend.assist import emulated
from memferry_ascend.backends.cpu import CpuBackend
from memferry_ascend.files import write_json
from memferry_ascend.transfers import CHUNK, Transfers

KIB, MIB = 1 << 10, 1 << 20
TARGET, PEER = "node0/npu0/die0", "node0/npu4/die0"
CONTENDED = f"ub {PEER}>node0/ub"
SIZES = [64 * KIB << i for i in range(13)]  # 64 KiB to 256 MiB
SCHEMES = ("direct", "assisted", "static", "dynamic")


def measure(repeats: int, wall: float, sizes: list[int]) -> dict[str, Any]:
    fabric = load("cm384")
    assert isinstance(fabric, Fabric)
    both = {d: fabric.paths(TARGET, via=[PEER], direction=d) for d in ("h2d", "d2h")}
    rows = []
    for nbytes in sizes:
        found = _rows(both, nbytes, repeats, wall)
        print(_line(nbytes, found), flush=True)
        rows += found
    described = [{"name": p.name, "latency": p.latency, "bandwidth": p.bandwidth} for p in both["h2d"].paths]
    return {
        "benchmark": "relay",
        "emulated": True,
        "fabric": fabric.name,
        "paths": described,
        "contention": {"link": CONTENDED, "kept": 0.25, "begins": "half of the static model's time"},
        "repeats": repeats,
        "chunk": CHUNK,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rows": rows,
        "targets": targets(rows, described),
    }


def _rows(both: dict[str, PathSet], nbytes: int, repeats: int, wall: float) -> list[dict[str, Any]]:
    paths = both["h2d"]
    direct = paths.paths[0]
    scale = max(wall / direct.seconds(nbytes), wall / 20 / (CHUNK / direct.bandwidth))
    halfway = paths.seconds(paths.split(nbytes)) / 2
    cases = [(scheme, contention) for contention in (False, True) for scheme in SCHEMES]
    runs: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
    moved = {}
    for _ in range(repeats):
        for scheme, contention in cases:
            seconds, carried = _copy(both, scheme, nbytes, scale, halfway if contention else None)
            runs[scheme, contention].append(seconds)
            moved[scheme, contention] = carried
    rows = []
    for (scheme, contention), times in runs.items():
        seconds = statistics.median(times)
        rows.append({
            "scheme": scheme, "bytes": nbytes, "contention": contention, "time_scale": scale, "seconds": seconds,
            "runs": times, "gb_per_s": nbytes / seconds / 1e9, "bytes_per_path": moved[scheme, contention],
            "model_gb_per_s": None if contention else nbytes / _model(paths, scheme, nbytes) / 1e9,
        })  # fmt: skip
    return rows


def _model(paths: PathSet, scheme: str, nbytes: int) -> float:
    """Seconds by the fabric's figures; a divided copy cannot be faster than all paths ending together."""
    alone = {"direct": 0, "assisted": 1}
    return (
        paths.paths[alone[scheme]].seconds(nbytes) if scheme in alone else paths.seconds(paths.split(nbytes))
    )


def _copy(
    both: dict[str, PathSet], scheme: str, nbytes: int, scale: float, contention_at: float | None
) -> tuple[float, dict[str, int]]:
    """(emulated seconds from the hand-over to the event behind it, bytes per path)."""
    backend = CpuBackend()
    links = emulated(both, scale)
    transfers = Transfers(backend, both, dispatch="dynamic" if scheme == "dynamic" else "static", links=links)
    only = {"direct": "direct", "assisted": both["h2d"].paths[1].name}.get(scheme)
    stream, done = backend.stream("upload"), backend.event(timing=True)

    def carry(_stream: object, dst: torch.Tensor, src: torch.Tensor) -> bool:
        transfers.move(dst, src, "h2d", only)
        return True

    stream.carrier = carry
    source = torch.full((nbytes,), 7, dtype=torch.uint8)
    source[::4097] = 8
    target = torch.ones(nbytes, dtype=torch.uint8)  # not zeros: their pages come at the first write
    over = threading.Event()

    def disturb(after: float) -> None:
        if not over.wait(after * scale):
            links.set_bandwidth(CONTENDED, 0.25 * both["h2d"].paths[1].bandwidth)

    begin = backend.event(timing=True)
    contender = threading.Thread(target=disturb, args=(contention_at,)) if contention_at is not None else None
    backend.compute.record(begin)
    if contender is not None:
        contender.start()
    stream.copy(target, source)
    stream.record(done)
    done.synchronize()
    over.set()
    if contender is not None:
        contender.join()
    seconds = begin.elapsed(done) / scale
    stream.synchronize()
    assert torch.equal(source, target), "the data arrived changed"
    moved = dict(transfers.moved)
    transfers.close()
    stream.carrier = None
    backend.close()
    return seconds, moved


def targets(rows: list[dict[str, Any]], paths: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the design asks for, and what was reached; a ratio of medians each. The sum of both paths is the fabric's: a
    measured one would be easier to reach the more the machine was disturbed."""
    at = {(r["scheme"], r["bytes"], r["contention"]): r["seconds"] for r in rows}
    sizes = sorted({r["bytes"] for r in rows})
    found: list[dict[str, Any]] = []

    def add(what: str, value: float, least: float) -> None:
        found.append({"what": what, "value": value, "least": least, "met": value >= least})

    if 16 * MIB in sizes:
        add("16 MiB: static over direct", at["direct", 16 * MIB, False] / at["static", 16 * MIB, False], 1.5)
        add(
            "16 MiB: static over assisted",
            at["assisted", 16 * MIB, False] / at["static", 16 * MIB, False],
            1.9,
        )
    for scheme in ("static", "dynamic"):
        if 64 * KIB in sizes:
            value = at["direct", 64 * KIB, False] / at[scheme, 64 * KIB, False]
            add(f"64 KiB: {scheme} over direct (1, less 5 % of noise)", value, 0.95)
        for n in (n for n in sizes if n >= 16 * MIB):
            both = sum(n / (p["latency"] + n / p["bandwidth"]) for p in paths)
            add(f"{n // MIB} MiB: {scheme} over the sum of both paths", n / at[scheme, n, False] / both, 0.85)
    for n in (n for n in sizes if n >= 32 * MIB):
        gain = at["static", n, True] / at["dynamic", n, True]
        add(f"{n // MIB} MiB: dynamic over static, contended halfway", gain, 1.5)
    return found


def _line(nbytes: int, rows: list[dict[str, Any]]) -> str:
    def figures(contention: bool) -> str:
        return "  ".join(f"{r['scheme']} {r['gb_per_s']:5.1f}" for r in rows if r["contention"] is contention)

    return f"{nbytes / MIB:9.4g} MiB  {figures(False)}  |  contention halfway: {figures(True)} GB/s"


def plot(result: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for i, contention in enumerate((False, True)):
        axes = figure.add_subplot(1, 2, i + 1)
        for scheme in SCHEMES:
            rows = [r for r in result["rows"] if r["scheme"] == scheme and r["contention"] is contention]
            axes.plot(
                [r["bytes"] / MIB for r in rows], [r["gb_per_s"] for r in rows], marker="o", label=scheme
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("MiB")
        axes.set_ylabel("GB/s (emulated cm384)")
        axes.set_title("contention begins halfway" if contention else "no contention")
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--plot", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument("--repeats", type=int, default=5, help="runs per figure, the median counts")
    parser.add_argument(
        "--wall",
        type=float,
        default=0.2,
        help="wall-clock seconds of a direct copy, and of 20 chunks, at least",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.wall, arguments.sizes)
    for target in result["targets"]:
        print(
            f"{'met ' if target['met'] else 'MISS'} {target['what']}: {target['value']:.2f} ({target['least']})"
        )
    if arguments.json:
        write_json(Path(arguments.json), result)
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
