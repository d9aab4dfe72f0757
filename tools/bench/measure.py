"""One row: build the model, train some steps, and say what it took."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memferry_ascend import __version__, hostmath, runtime
from memferry_ascend.backends.base import DeviceOutOfMemory

from . import models
from .models import Unavailable
from .peers import PEERS
from .systems import OURS, ForwardBackward, Setup, System

SYSTEMS: dict[str, Callable[[nn.Module, Setup], System]] = {**OURS, **PEERS}
EXTRA: dict[str, Callable[[nn.Module, Setup], System]] = {"forward-backward": ForwardBackward}
GIB = 1 << 30
SHAPE = ("batch", "seq", "clip", "accumulate", "backend", "threads", "ranks", "assist")
"""What a row says of its Setup."""
POOL = 4
"""Different batches, used in turn."""


@dataclass(frozen=True)
class Timing:
    """Steps before the clock starts, timed steps, and how many losses to record (at least all of those)."""

    warmup: int = 5
    iterations: int = 12
    losses: int = 0
    seed: int = 0
    profile: bool = True


def row(model: str, system: str, setup: Setup, timing: Timing) -> dict[str, Any]:
    """The record of one row; never raises for what a row may meet: `status` says how it ended.

    status: "ok", "does not fit" (memory), "unavailable" (not installed or not built), "failed". `reason` says why.
    """
    record: dict[str, Any] = {
        "model": model,
        "system": system,
        **{k: v for k, v in asdict(setup).items() if k in SHAPE},
        "tokens": setup.batch * setup.seq * setup.accumulate * setup.ranks,
        "status": "ok",
        "reason": "",
        "iter_ms": None,
        "peak_device_gib": None,
        "host_gib": None,
        "busy_share": None,
        "versions": versions(system),
    }
    try:
        record |= _train(model, system, setup, timing)
    except Unavailable as error:
        record |= {"status": "unavailable", "reason": str(error)}
    except Exception as error:
        record |= {"status": _status(error), "reason": f"{type(error).__name__}: {_short(error)}"}
        if os.environ.get("MEMFERRY_DEBUG") == "1":
            raise
    gc.collect()
    runtime.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return record


def _status(error: Exception) -> str:
    full = isinstance(error, torch.OutOfMemoryError | DeviceOutOfMemory | MemoryError)
    texts = ("out of memory", "can't allocate memory", "host memory:", "over the limit")
    return "does not fit" if full or any(t in str(error).lower() for t in texts) else "failed"


def _short(error: Exception, most: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[:most] + " ..."


def _train(name: str, system_name: str, setup: Setup, timing: Timing) -> dict[str, Any]:
    torch.manual_seed(timing.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    if setup.backend == "cuda":
        torch.cuda.set_device(setup.rank)
    limit_device(setup.device_cap)
    free_before, begin = available(), time.perf_counter()
    model = models.build(name, timing.seed)
    parameters = sum(p.numel() for p in model.parameters())
    system = (SYSTEMS | EXTRA)[system_name](model, setup)
    try:
        pool = models.batches(
            model,
            POOL * setup.accumulate,
            setup.batch,
            setup.seq,
            system.device,
            timing.seed + 7919 * setup.rank,
        )
        built = time.perf_counter() - begin
        on_device = system.device.type != "cpu"
        steps = max(timing.warmup + timing.iterations, timing.losses)
        losses: list[Tensor] = []
        clock = Clock(system.device)
        for i in range(steps):
            if i == timing.warmup:
                system.drain()
                clock.restart()
            clock.mark()
            at = i % POOL * setup.accumulate
            losses.append(system.step(pool[at : at + setup.accumulate]))
        clock.mark()
        system.drain()
        total = clock.stop()
        periods = clock.periods()[-(steps - timing.warmup) :]
        curve = [float(x) for x in losses]
        iter_ms = statistics.median(periods) * 1e3
        exact, own_peak = system.host_bytes(), system.peak_bytes()
        peak = clock.peak() if on_device else own_peak
        with_start = clock.peak_with_start() if on_device else own_peak
        rss, taken = resident(), max(0, free_before - available())
        result: dict[str, Any] = {
            "parameters": parameters,
            "iter_ms": iter_ms,
            "iters_ms": [p * 1e3 for p in periods],
            "mean_ms": total / (steps - timing.warmup) * 1e3,
            "tokens_per_s": setup.batch * setup.seq * setup.accumulate * setup.ranks / iter_ms * 1e3,
            "peak_device_gib": None if peak is None else peak / GIB,
            "peak_device_gib_with_start": None if with_start is None else with_start / GIB,
            "host_gib": (exact if exact is not None else max(rss, taken)) / GIB,
            "device_rows": system.device_rows(),
            "host_how": "arena" if exact is not None else "resident set or what the system lost, the larger",
            "host_resident_gib": rss / GIB,
            "host_system_gib": taken / GIB,
            "build_s": built,
            "losses": [x if math.isfinite(x) else None for x in curve],
            "states": system.states,
            "note": system.note,
        }

        def again(_: int) -> None:
            system.step(pool[: setup.accumulate])

        if timing.profile and on_device:
            result |= busy(again, system, iter_ms)
        result["recorded"] = system.trace(again)
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is the row's reason
            system.close()
        raise
    system.close()
    return result


def limit_device(cap: int | None) -> None:
    """Let torch's allocator take `cap` bytes at most; None takes an earlier cap away."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else min(1.0, cap / total))


class Clock:
    """Marks iterations: events on the device's stream, or the host's clock without a device.

    A period is the time between two marks: for work that is still under way beside the stream it counts only once
    the next iteration has to wait for it, and `stop` (which the caller calls after draining) counts all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []
        self._peak_before = 0
        self.restart()

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def restart(self) -> None:
        self.marks = []
        if self._cuda:
            torch.cuda.synchronize()
            self._peak_before = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def stop(self) -> float:
        """Seconds since `restart`, everything done."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - self._start

    def periods(self) -> list[float]:
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in pairs]

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._cuda else 0

    def peak_with_start(self) -> int:
        return max(self._peak_before, self.peak())


def busy(step: Callable[[int], Any], system: System, iter_ms: float, count: int = 3) -> dict[str, Any]:
    """Shares of an iteration in which kernels, and copies of each direction, ran; from a trace of a few more steps.
    Intervals come from the trace, the iteration's length from the untraced measurement."""
    from torch.profiler import ProfilerActivity, profile

    try:
        system.drain()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for i in range(count):
                step(i)
            system.drain()
            torch.cuda.synchronize()
        spans: dict[str, list[tuple[float, float]]] = {"busy_share": [], "h2d_share": [], "d2h_share": []}
        for e in trace.events():
            if "cuda" not in str(e.device_type).lower() or getattr(e, "is_user_annotation", False):
                continue
            key = "busy_share"
            if "memcpy" in e.name.lower():
                key = {"HtoD": "h2d_share", "DtoH": "d2h_share"}.get(
                    next((d for d in ("HtoD", "DtoH") if d in e.name), ""), ""
                )
            if key:
                spans[key].append((e.time_range.start, e.time_range.end))
        if not spans["busy_share"]:
            return {"busy_share": None, "busy_reason": "the profiler saw no kernel"}
        return {k: min(1.0, union(v) / 1e3 / count / iter_ms) for k, v in spans.items()}
    except Exception as error:  # a machine without tracing still has all other figures
        return {"busy_share": None, "busy_reason": f"{type(error).__name__}: {_short(error)}"}


def union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, -math.inf
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def available() -> int:
    """Bytes of memory the system could still give."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def resident() -> int:
    """Bytes of this process's resident set."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def versions(system: str = "") -> dict[str, str]:
    """What computed a row."""
    out = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "memferry": __version__,
        "host_arithmetic": hostmath.simd_level(),
    }
    packages = ["transformers", *(p for p in ("deepspeed", "torchao") if system.startswith(p))]
    for package in packages:
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out


def machine() -> dict[str, Any]:
    """Where it ran."""
    device = None
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / GIB:.0f} GiB"
    lines: list[str] = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")]
    return {
        "device": device,
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
