"""Direct, assisted and divided copies on real devices: what a second device's host link adds (the paper's Fig. 18a).

The paths' figures come from a probe file of this machine (`memferry probe --out paths.json`); copies go through the
library's own streams and transfers, and the bytes that arrive are checked. Two times of each copy, medians:

    device     between events around it, everything queued before the device starts
    hand_over  from the call to the event behind it on an idle device: queuing counts

    python -m memferry_ascend.bench.relay_device --paths paths.json --json OUT.json --plot OUT.png
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from memferry_ascend.topology import Measured, load
from memferry_ascend.topology.probe import SIZES

import memferry_ascend as mf
from memferry_ascend import sizes
from memferry_ascend.assist import device_names
from memferry_ascend.backends.base import Backend, Stream
from memferry_ascend.errors import ConfigError
from memferry_ascend.files import write_json
from memferry_ascend.transfers import RELAY_CHUNK, Transfers

from .measure import machine, versions

SCHEMES = ("direct", "assisted", "static")
STREAMS = {"h2d": "upload", "d2h": "download"}
Copy = Callable[[Stream, torch.Tensor, torch.Tensor], None]


def schemes(
    backend: Backend, paths: Measured, mine: str, peer: int, chunk: int
) -> tuple[dict[str, Copy], Transfers]:
    """How each scheme queues a copy."""
    names = device_names(paths)
    by_direction = {d: paths.paths(mine, via=[names[peer]], direction=d) for d in STREAMS}
    transfers = Transfers(backend, by_direction, peers={names[peer]: peer}, chunk=chunk)

    def direct(stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        stream.copy_direct([(dst, src)])

    def assisted(stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        backend.relay(stream, dst, src, peer=peer, chunk=chunk)
        backend.relays_done(stream)

    def static(stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        if not transfers.carry(stream, dst, src):
            direct(stream, dst, src)

    return {"direct": direct, "assisted": assisted, "static": static}, transfers


def rows_of(
    backend: Backend, copies: dict[str, Copy], nbytes: int, direction: str, repeats: int
) -> list[dict[str, Any]]:
    """Every scheme's times at one size, the schemes in turn."""
    slab = backend.alloc_host(nbytes, mapped=True)
    there = backend.alloc_device(nbytes)[:nbytes]
    stream = backend.stream(STREAMS[direction])
    want = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    begin, end = backend.event(timing=True), backend.event(timing=True)
    found: dict[str, tuple[list[float], list[float]]] = {scheme: ([], []) for scheme in copies}
    try:
        for i in range(repeats + 1):
            for scheme, copy in copies.items():
                dst, src = (there, slab.host) if direction == "h2d" else (slab.host, there)
                if i == 0:
                    slab.host.copy_(want)
                    there.copy_(want)
                    (there if direction == "h2d" else slab.host).zero_()
                    backend.synchronize()
                release = backend.hold([stream])
                stream.record(begin)
                copy(stream, dst, src)
                stream.record(end)
                release()
                end.synchronize()
                held = begin.elapsed(end)
                backend.synchronize()
                started = time.perf_counter()
                copy(stream, dst, src)
                stream.record(end)
                end.synchronize()
                handed = time.perf_counter() - started
                if i == 0:
                    backend.synchronize()
                    got = there.cpu() if direction == "h2d" else slab.host
                    if not torch.equal(got, want):
                        raise AssertionError(f"{scheme} {direction} {nbytes}: the bytes arrived changed")
                    continue
                found[scheme][0].append(held)
                found[scheme][1].append(handed)
    finally:
        backend.synchronize()
        backend.free_host(slab)
    return [
        {
            "scheme": scheme, "direction": direction, "bytes": nbytes, "device_s": statistics.median(a),
            "hand_over_s": statistics.median(b), "gb_per_s": nbytes / statistics.median(a) / 1e9,
        }
        for scheme, (a, b) in found.items()
    ]  # fmt: skip


def gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much faster the divided copy is than the direct one, by size, direction and chunk."""
    at = {(r["scheme"], r["direction"], r["bytes"], r["chunk"]): r for r in rows}
    return [
        {
            "direction": d, "bytes": n, "chunk": c,
            **{k: at["direct", d, n, c][k] / r[k] for k in ("device_s", "hand_over_s")},
        }
        for (scheme, d, n, c), r in at.items()
        if scheme == "static"
    ]  # fmt: skip


def draw(path: Path, rows: Sequence[dict[str, Any]], chunk: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, direction in zip(figure.subplots(1, 2), STREAMS, strict=True):
        for scheme in SCHEMES:
            mine = [
                r for r in rows if (r["scheme"], r["direction"], r["chunk"]) == (scheme, direction, chunk)
            ]
            axes.plot([r["bytes"] / 2**20 for r in mine], [r["gb_per_s"] for r in mine], "o-", label=scheme)
        axes.set(title=direction, xlabel="MiB", ylabel="GB/s")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--paths", required=True, help="what `memferry probe --out` wrote on this machine")
    add("--backend", choices=("cuda", "ascend"))
    add("--peer", type=int, default=1, help="index of the assisting device (default 1)")
    add("--sizes", nargs="+", type=sizes.parse, default=SIZES)
    add("--chunk", nargs="+", type=sizes.parse, default=[RELAY_CHUNK], help="bytes of a relay's chunk")
    add("--repeats", type=int, default=15)
    add("--json", type=Path)
    add("--plot", type=Path)
    given = parser.parse_args(arguments)
    topology = load(given.paths)
    if not isinstance(topology, Measured):
        raise ConfigError(f"--paths: expected a probe's file, {given.paths} is a fabric")
    backend = mf.init(backend=given.backend).backend
    mine = device_names(topology)[0]
    result: dict[str, Any] = {
        "benchmark": "copies through a second device, one machine, one run",
        "machine": machine(),
        "versions": versions(),
        "paths": given.paths,
        "rows": [],
    }
    for chunk in given.chunk:
        copies, transfers = schemes(backend, topology, mine, given.peer, chunk)
        for direction in STREAMS:
            for nbytes in given.sizes:
                found = rows_of(backend, copies, nbytes, direction, given.repeats)
                result["rows"] += [r | {"chunk": chunk} for r in found]
                speeds = "  ".join(f"{r['scheme']} {r['gb_per_s']:6.1f}" for r in found)
                handed = found[0]["hand_over_s"] / found[-1]["hand_over_s"]
                print(
                    f"{direction} {sizes.fmt(nbytes):>9} chunk {sizes.fmt(chunk)}: {speeds} GB/s; handed over "
                    f"{handed:.2f} x direct",
                    file=sys.stderr,
                    flush=True,
                )
        transfers.close()
    result["static_over_direct"] = gains(result["rows"])
    if given.json:
        write_json(given.json, result)
    if given.plot:
        draw(given.plot, result["rows"], given.chunk[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
