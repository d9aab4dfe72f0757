"""Host AdamW: parameters per second of the one pass update beside torch's calls, in one run on one machine.

Every variant does the whole job of one bf16 training step on the host: bf16 gradients in, fp32 masters and
moments updated, bf16 parameters out.

- native: one pass over bf16 gradient, split master (bf16 upper half + int16 remainder) and fp32 moments
- fused: gradients cast to fp32, torch._fused_adamw_ on fp32 masters, masters cast to bf16
- separate: the same casts around torch.optim.AdamW's single-tensor operations
- fallback: what hostmath does without its extension

Run as `python tools/bench/adamw.py [--json docs/benchmarks/adamw-cpu.json]`. A repetition runs every variant
once, so that whatever else the machine does is spread over all of them; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memferry_ascend import _hostmath_torch, hostmath

# Bytes of host memory an update reads and writes for each parameter.
NATIVE_BYTES = 2 + 2 * (2 + 2 + 4 + 4)
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


def split_pieces(numel: int, count: int, dtype: torch.dtype, scale: float) -> list[Tensor]:
    flat = torch.randn(numel, dtype=torch.float32).mul_(scale).to(dtype)
    return list(flat.split((numel + count - 1) // count))


class Native:
    """The update as the engine issues it: one program, one call."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self.segments = []
        for grad in grads:
            n = grad.numel()
            hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
            hostmath.split_master(torch.randn(n), hi, lo)
            self.segments.append(hostmath.AdamSegment(grad, hi, lo, torch.zeros(n), torch.zeros(n)))
        self.program = hostmath.AdamProgram(self.segments)

    def hyper(self, step: int) -> hostmath.AdamHyper:
        return hostmath.AdamHyper(LR, *BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, step=step)

    def step(self, step: int) -> None:
        self.program.run([self.hyper(step)] * len(self.segments))


class Fallback(Native):
    def step(self, step: int) -> None:
        hyper = self.hyper(step)
        for segment in self.segments:
            _hostmath_torch.adam(segment, hyper)


class Separate:
    """fp32 masters with a cast on either side; memory for the casts is allocated once."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self.grads = grads
        self.masters = [torch.nn.Parameter(torch.randn(g.numel())) for g in grads]
        self.params = [m.detach().bfloat16() for m in self.masters]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = torch.optim.AdamW(
            self.masters, LR, BETAS, EPS, WEIGHT_DECAY, foreach=False, fused=self.fused()
        )

    @staticmethod
    def fused() -> bool:
        return False

    @torch.no_grad()
    def step(self, step: int) -> None:
        for master, grad in zip(self.masters, self.grads, strict=True):
            assert master.grad is not None
            master.grad.copy_(grad)
        self.optimizer.step()
        for master, param in zip(self.masters, self.params, strict=True):
            param.copy_(master)


class Fused(Separate):
    @staticmethod
    def fused() -> bool:
        return True


VARIANTS: dict[str, type[Native] | type[Separate]] = {
    "native": Native,
    "fused": Fused,
    "separate": Separate,
    "fallback": Fallback,
}


def measure(names: Sequence[str], numel: int, tensors: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every repetition of every variant, after two that are not counted."""
    grads = split_pieces(numel, tensors, torch.bfloat16, 1e-2)
    variants = {name: VARIANTS[name](grads) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(1, repeats + 3):
        for name, variant in variants.items():
            begin = time.perf_counter()
            variant.step(step)
            elapsed = time.perf_counter() - begin
            if step > 2:
                seconds[name].append(elapsed)
    return seconds


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def report(names: Sequence[str], numel: int, tensors: int, threads: int, repeats: int) -> dict[str, Any]:
    hostmath.set_threads(threads)
    torch.set_num_threads(threads)
    seconds = measure(names, numel, tensors, repeats)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    return {
        "parameters": numel,
        "tensors": tensors,
        "threads": threads,
        "repeats": repeats,
        "variants": {
            name: {
                "median_s": medians[name],
                "min_s": min(s),
                "max_s": max(s),
                "parameters_per_s": numel / medians[name],
            }
            for name, s in seconds.items()
        },
        "native_bytes_per_s": numel * NATIVE_BYTES / medians["native"],
        "native_speedup": {name: m / medians["native"] for name, m in medians.items() if name != "native"},
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(document, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=32 << 20, help="how many (default 32 Mi)")
    parser.add_argument("--tensors", type=int, default=16, help="spread over how many tensors (default 16)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, cores}), help="thread counts to run"
    )
    parser.add_argument(
        "--repeats", type=int, default=11, help="timed repetitions of every variant (default 11)"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["fused", "separate"],
        help="what to run beside native (default: fused separate)",
    )
    parser.add_argument("--note", default="", help="a sentence about the machine, kept in the JSON")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results here")
    args = parser.parse_args()

    document: dict[str, Any] = {
        "benchmark": "host AdamW, bf16 gradients in, bf16 parameters out",
        "machine": {"processor": processor(), "cores": cores, "system": platform.system()},
        "load_average": os.getloadavg()[0],  # of the minute before: what else kept the cores busy
        "note": args.note,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "native": hostmath.NATIVE,
        "simd": hostmath.simd_level(),
        "runs": [],
    }
    names = ["native", *(name for name in args.variants if name != "native")]
    for threads in args.threads:
        run = report(names, args.parameters, args.tensors, threads, args.repeats)
        document["runs"].append(run)
        print(f"{run['parameters'] / 1e6:.1f} M parameters, {run['threads']} threads, {document['simd']}:")
        for name, v in run["variants"].items():
            print(
                f"  {name:9} {v['median_s'] * 1e3:8.1f} ms  {v['parameters_per_s'] / 1e6:8.1f} M parameters/s"
            )
        ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in run["native_speedup"].items())
        print(f"  native: {run['native_bytes_per_s'] / 1e9:.1f} GB/s, {ratios}", flush=True)
    if args.json:
        write_json(args.json, document)


if __name__ == "__main__":
    main()
