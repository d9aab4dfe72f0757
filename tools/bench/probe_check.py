"""The probe beside a plain copy benchmark on the same device: latency and bandwidth, both directions.

Plain means torch alone: a tensor from torch's own pinned allocator, `copy_(non_blocking=True)`, two events around a copy
that was queued behind a short wait. None of this library's host memory, streams or native code takes part; only the fit
of a line to the samples is shared. Probe and plain benchmark take turns, and the medians of the rounds are compared.
The same benchmark over the library's registered memory, and there on the library's stream, says where a difference is from.

    python -m memferry_ascend.bench.probe_check --json docs/benchmarks/probe-h200.json

Without a CUDA device it compares the CPU backend's copies with torch's, which only says that the program runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from memferry_ascend.topology import Measured, fit, probe
from memferry_ascend.topology.measured import write_text
from memferry_ascend.topology.probe import SIZES, SMALL_SIZES

from memferry_ascend import runtime

WITHIN = 0.05
DIRECTIONS = ("h2d", "d2h")
Figures = dict[str, tuple[float, float]]  # direction: (latency in s, bandwidth in bytes/s)


def plain(
    device: torch.device,
    sizes: Sequence[int],
    repeats: int,
    host: torch.Tensor | None = None,
    priority: int = 0,
) -> Figures:
    """torch's own copies, on a stream of that priority. `host`: uint8 memory to copy from and to, torch's own by default."""
    if host is None:
        host = torch.empty(max(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda").random_()
    there = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    once = _on_cuda(device, priority) if device.type == "cuda" else _on_cpu
    found: Figures = {}
    for direction in DIRECTIONS:
        samples = []
        for nbytes in sizes:
            pair = (there[:nbytes], host[:nbytes])
            dst, src = pair if direction == "h2d" else pair[::-1]
            once(dst, src)
            samples += [(nbytes, once(dst, src)) for _ in range(repeats)]
        line = fit(samples)
        found[direction] = (line.latency, line.bandwidth)
    return found


def _on_cuda(device: torch.device, priority: int) -> Callable[[torch.Tensor, torch.Tensor], float]:
    stream = torch.cuda.Stream(device, priority=priority)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(dst: torch.Tensor, src: torch.Tensor) -> float:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # about a millisecond: everything is queued before the copy begins
            start.record(stream)
            dst.copy_(src, non_blocking=True)
            end.record(stream)
        stream.synchronize()
        return start.elapsed_time(end) / 1e3

    return once


def _on_cpu(dst: torch.Tensor, src: torch.Tensor) -> float:
    begin = time.perf_counter()
    dst.copy_(src)
    return time.perf_counter() - begin


def probed(measured: Measured) -> Figures:
    """The direct path's figures."""
    path = measured.measured[0]
    assert path.h2d is not None and path.d2h is not None
    return {"h2d": (path.h2d.latency, path.h2d.bandwidth), "d2h": (path.d2h.latency, path.d2h.bandwidth)}


def measure(backend_name: str, rounds: int, repeats: int, sizes: Sequence[int] | None) -> dict[str, Any]:
    """Medians over `rounds` of both, and their ratios."""
    backend = runtime.make_backend(backend_name)
    chosen = tuple(sizes or (SMALL_SIZES if backend_name == "cpu" else SIZES))
    ours: list[Figures] = []
    theirs: list[Figures] = []
    between: dict[str, list[Figures]] = {"registered": [], "registered_urgent": []}
    slab = backend.alloc_host(max(chosen), mapped=True)
    try:
        for _ in range(rounds):
            theirs.append(plain(backend.device, chosen, repeats))
            for name, priority in (("registered", 0), ("registered_urgent", -1)):
                between[name].append(plain(backend.device, chosen, repeats, slab.host, priority))
            ours.append(probed(probe(backend, sizes=chosen, repeats=repeats)))
        about = list(backend.capabilities().notes)
    finally:
        backend.free_host(slab)
        backend.close()
    rows = []
    for direction in DIRECTIONS:
        for i, what in enumerate(("latency", "bandwidth")):
            a, b = (statistics.median(f[direction][i] for f in found) for found in (ours, theirs))
            ratio = a / b if b else (1.0 if a == b else float("inf"))
            rows.append({
                "direction": direction, "what": what, "probe": a, "plain": b, "ratio": ratio,
                "within": WITHIN, "met": abs(ratio - 1) <= WITHIN,
                "probe_rounds": [f[direction][i] for f in ours], "plain_rounds": [f[direction][i] for f in theirs],
                **{f"plain_{k}": statistics.median(f[direction][i] for f in found) for k, found in between.items()},
            })  # fmt: skip
    return {
        "benchmark": "probe_check", "backend": backend_name, "about": about, "sizes": list(chosen), "rounds": rounds,
        "repeats": repeats, "torch": torch.__version__, "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}", "cpus": os.cpu_count(),
        "load": os.getloadavg()[0], "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--backend", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, the medians are compared")
    parser.add_argument("--repeats", type=int, default=9, help="copies per size")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes (default: those of the probe)")
    arguments = parser.parse_args()
    result = measure(arguments.backend, arguments.rounds, arguments.repeats, arguments.sizes)
    for row in result["rows"]:
        unit, name = (1e6, "us") if row["what"] == "latency" else (1e-9, "GB/s")
        print(
            f"{'met ' if row['met'] else 'MISS'} {row['direction']} {row['what']}: probe {row['probe'] * unit:.3f} {name}, "
            f"plain {row['plain'] * unit:.3f} {name}, ratio {row['ratio']:.3f} (within {WITHIN:.0%}); plain on registered "
            f"memory {row['plain_registered'] * unit:.3f}, urgent stream {row['plain_registered_urgent'] * unit:.3f}"
        )
    if arguments.json:
        write_text(arguments.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
