"""The bound: no system that keeps optimizer and parameters on the host can take less than its slowest resource.

Per iteration: the device's own forward and backward; host AdamW over all parameters while the iteration's own copies
run; each link direction's bytes. The bound is the largest. Measured on the machine and in the run of the rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import memferry_ascend as mf
from memferry_ascend import hostmath
from memferry_ascend.backends.base import Backend
from memferry_ascend.config import host_threads

from . import models
from .measure import Timing, row
from .systems import LR, Setup

UNIT = 16 << 20
"""Parameters per host update and per copy: 32 MiB of bf16."""
MOST = 512 << 20
"""Parameters that are measured; beyond the processor's caches time grows in proportion, and the rest is computed."""


def bound(name: str, setup: Setup, timing: Timing) -> dict[str, Any]:
    """All parts in ms, and `bound_ms`, the largest. A part that did not fit is None and named in `missing`."""
    plain = row(name, "forward-backward", setup, timing)
    out: dict[str, Any] = {
        "model": name,
        "batch": setup.batch,
        "seq": setup.seq,
        "accumulate": setup.accumulate,
        "forward_backward_ms": plain["iter_ms"],
        "forward_backward_peak_gib": plain["peak_device_gib"],
    }
    with torch.device("meta"):
        parameters = sum(p.numel() for p in models.find(name).make().parameters())
    out |= host_and_link(parameters, setup)
    parts = ["forward_backward_ms", "adamw_with_copies_ms", "h2d_ms", "d2h_ms"]
    out["missing"] = [p for p in parts if out[p] is None]
    if plain["status"] != "ok":
        out["reason"] = f"forward and backward: {plain['status']}: {plain['reason']}"
    found = {p: out[p] for p in parts if out[p] is not None}
    out["bound_ms"] = max(found.values())
    out["bound_by"] = max(found, key=lambda p: found[p])
    return out


def host_and_link(parameters: int, setup: Setup) -> dict[str, Any]:
    """Host AdamW alone and beside copies, and each direction alone, for 2 bytes a parameter each way."""
    backend = mf.init(backend=setup.backend).backend
    hostmath.set_threads(host_threads(1, setup.threads))
    measured = min(parameters, MOST)
    scale = parameters / measured
    sizes = [min(UNIT, measured - at) for at in range(0, measured, UNIT)]
    slabs = [[backend.alloc_host(2 * n, mapped=True) for _ in range(2)] for n in sizes]
    try:
        device = [backend.alloc_device(2 * n)[: 2 * n] for n in (sizes[0], sizes[0])]
        programs = []
        for n, (hi, grad) in zip(sizes, slabs, strict=True):
            grad.host.view(torch.bfloat16).fill_(1e-3)
            programs.append(
                hostmath.AdamProgram(
                    [
                        hostmath.AdamSegment(
                            grad.host.view(torch.bfloat16),
                            hi.host.view(torch.bfloat16),
                            torch.zeros(n, dtype=torch.int16),
                            torch.zeros(n),
                            torch.zeros(n),
                        )
                    ]
                )
            )
        up, down = backend.stream("upload"), backend.stream("download")

        def adam() -> None:
            for program in programs:
                program.run([hostmath.AdamHyper(LR, weight_decay=0.01)])

        def send() -> None:
            up.copy_many([(device[0][: 2 * n], hi.host) for n, (hi, _) in zip(sizes, slabs, strict=True)])

        def receive() -> None:
            down.copy_many(
                [(grad.host, device[1][: 2 * n]) for n, (_, grad) in zip(sizes, slabs, strict=True)]
            )

        def duplex() -> None:
            send()
            receive()

        def both() -> None:
            duplex()
            adam()

        def seconds(job: Callable[[], None], wait: bool) -> float:
            return timed(backend, job, wait) * scale * 1e3

        for g in device:
            g.zero_()
        result = {
            "parameters": parameters,
            "parameters_measured": measured,
            "h2d_bytes": 2 * parameters,
            "d2h_bytes": 2 * parameters,
            "adamw_ms": seconds(adam, False),
            "adamw_with_copies_ms": seconds(both, False),
            "h2d_ms": seconds(send, True),
            "d2h_ms": seconds(receive, True),
            "duplex_ms": seconds(duplex, True),
        }
        programs.clear()
        return result
    finally:
        backend.synchronize()
        for pair in slabs:
            for slab in pair:
                backend.free_host(slab)


def timed(backend: Backend, job: Callable[[], None], wait: bool, repeats: int = 5) -> float:
    """Median seconds of `job`, with `wait` until the device is idle too."""
    found = []
    for _ in range(repeats + 1):
        backend.synchronize()
        begin = time.perf_counter()
        job()
        if wait:
            backend.synchronize()
        found.append(time.perf_counter() - begin)
        backend.synchronize()
    return statistics.median(found[1:])
