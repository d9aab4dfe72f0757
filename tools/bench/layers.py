"""What a layer costs by how its parameters and gradients are reached, on this machine: the planner's raw facts.

Everything goes through the backend's own host slabs, device aliases and streams. Times in ms, medians, bf16; a weight
has N x K elements (K in, N out), M is tokens.

    gpu          the kernel on device memory          copy          the weight, host to device
    copy+gpu     one after the other                  dha           the forward reading host memory
    dx / dx_dha  input gradient from device / host    dw_direct     weight gradient written to host memory
    dw+copy      weight gradient on the device, then copied to the host
    streamed     the forward fed in row slices through three small slots

    python -m memferry_ascend.bench.layers --json docs/benchmarks/layers-h200.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import memferry_ascend as mf
from memferry_ascend.backends.base import Backend, Stream
from memferry_ascend.files import write_json

from .measure import machine, versions

EMBEDDINGS = ((30522, 768, 4096), (50257, 1024, 8192), (128256, 4096, 8192))
NORMS = ((768, 4096), (4096, 8192))
LINEARS = tuple(
    (k, n, m)
    for k, n in ((768, 768), (768, 3072), (1024, 4096), (4096, 4096), (4096, 16384))
    for m in (512, 4096, 16384)
)
SMALL = (((512, 64, 32),), ((64, 32),), ((64, 128, 32),))
SLICES, SLOTS = 16, 3


class Bench:
    """Times operations on one backend."""

    def __init__(self, backend: Backend, repeats: int) -> None:
        self.backend, self.repeats = backend, repeats
        self.up, self.down = backend.stream("upload"), backend.stream("download")
        self._slabs: list[Any] = []

    def ms(self, job: Callable[[], Any]) -> float:
        """Median ms between events on the compute stream around `job`."""
        begin, end = (self.backend.event(timing=True) for _ in range(2))
        found = []
        for _ in range(self.repeats + 3):
            self.backend.synchronize()
            self.backend.compute.record(begin)
            job()
            self.backend.compute.record(end)
            end.synchronize()
            found.append(begin.elapsed(end) * 1e3)
        return statistics.median(found[3:])

    def mapped(self, *shape: int) -> tuple[Tensor, Tensor]:
        """The two faces of bf16 host memory."""
        slab = self.backend.alloc_host(2 * torch.Size(shape).numel(), mapped=True)
        assert slab.device is not None
        self._slabs.append(slab)
        host, device = (t.view(torch.bfloat16).view(shape) for t in (slab.host, slab.device))
        host.normal_()
        return host, device

    def device(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.backend.device, dtype=torch.bfloat16)

    def through(self, stream: Stream, dst: Tensor, src: Tensor) -> None:
        """A copy behind the compute stream so far and before what it does next."""
        before, after = self.backend.event(), self.backend.event()
        self.backend.compute.record(before)
        stream.wait(before)
        stream.copy(dst.view(-1), src.view(-1))
        stream.record(after)
        self.backend.compute.wait(after)

    def close(self) -> None:
        """Give the slabs back."""
        self.backend.synchronize()
        for slab in self._slabs:
            self.backend.free_host(slab)
        self._slabs.clear()

    # -- the layers ----------------------------------------------------------------------------------------------------
    def read(self, host: Tensor, alias: Tensor, forward: Callable[[Tensor], Any]) -> dict[str, float]:
        """A forward that reads one parameter, from everywhere."""
        w = torch.empty_like(alias, device=self.backend.device).copy_(alias)

        def fetched() -> None:
            self.through(self.up, w, host)
            forward(w)

        return {
            "gpu": self.ms(lambda: forward(w)),
            "copy": self.ms(lambda: self.through(self.up, w, host)),
            "copy+gpu": self.ms(fetched),
            "dha": self.ms(lambda: forward(alias)),
        }

    def embedding(self, vocab: int, width: int, tokens: int) -> dict[str, Any]:
        ids = torch.randint(0, vocab, (tokens,), device=self.backend.device)
        host, alias = self.mapped(vocab, width)
        return {"layer": "Embedding", "shape": [vocab, width], "tokens": tokens} | self.read(
            host, alias, lambda w: F.embedding(ids, w)
        )

    def norm(self, width: int, tokens: int) -> dict[str, Any]:
        x = self.device(tokens, width)
        host, alias = self.mapped(width)
        return {"layer": "LayerNorm", "shape": [width], "tokens": tokens} | self.read(
            host, alias, lambda w: F.layer_norm(x, (width,), w, w)
        )

    def linear(self, k: int, n: int, m: int) -> dict[str, Any]:
        x, dy = self.device(m, k), self.device(m, n)
        host, alias = self.mapped(n, k)
        grad_host, grad_alias = self.mapped(n, k)
        w, dw = self.device(n, k), self.device(n, k)
        row = {"layer": "Linear", "shape": [n, k], "tokens": m} | self.read(
            host, alias, lambda w: F.linear(x, w)
        )

        def staged() -> None:
            torch.mm(dy.t(), x, out=dw)
            self.through(self.down, grad_host, dw)

        return row | {
            "dx": self.ms(lambda: dy @ w),
            "dx_dha": self.ms(lambda: dy @ alias),
            "dw": self.ms(lambda: torch.mm(dy.t(), x, out=dw)),
            "dw_direct": self.ms(lambda: torch.mm(dy.t(), x, out=grad_alias)),
            "dw+copy": self.ms(staged),
            "streamed": self.streamed(host, x),
            "same_bits": self.same_bits(alias, x, dy, grad_host, grad_alias),
        }

    def streamed(self, host: Tensor, x: Tensor) -> float:
        """The forward, its weight copied slice by slice into a ring of slots while earlier slices are multiplied."""
        n, k = host.shape
        rows = -(-n // SLICES)
        slots = [torch.empty(rows, k, device=self.backend.device, dtype=torch.bfloat16) for _ in range(SLOTS)]
        loaded, free = ([self.backend.event() for _ in range(SLOTS)] for _ in range(2))
        y = torch.empty(n, x.shape[0], device=self.backend.device, dtype=torch.bfloat16)

        def job() -> None:
            for e in free:
                self.backend.compute.record(e)
            for i, at in enumerate(range(0, n, rows)):
                part, s = host[at : at + rows], i % SLOTS
                self.up.wait(free[s])
                self.up.copy(slots[s][: part.shape[0]].view(-1), part.reshape(-1))
                self.up.record(loaded[s])
                self.backend.compute.wait(loaded[s])
                torch.mm(slots[s][: part.shape[0]], x.t(), out=y[at : at + rows])
                self.backend.compute.record(free[s])

        return self.ms(job)

    def same_bits(self, alias: Tensor, x: Tensor, dy: Tensor, grad_host: Tensor, grad_alias: Tensor) -> bool:
        """True if forward, input gradient and weight gradient are the same from and to host memory."""
        w = alias.clone()
        torch.mm(dy.t(), x, out=grad_alias)
        self.backend.synchronize()
        there = torch.equal(grad_host, torch.mm(dy.t(), x).cpu())
        return there and torch.equal(F.linear(x, alias), F.linear(x, w)) and torch.equal(dy @ alias, dy @ w)


def table(backend: Backend, repeats: int, small: bool) -> list[dict[str, Any]]:
    """Every layer's row."""
    embeddings, norms, linears = SMALL if small else (EMBEDDINGS, NORMS, LINEARS)
    rows = []
    for make, shapes in (("embedding", embeddings), ("norm", norms), ("linear", linears)):
        for shape in shapes:
            bench = Bench(backend, repeats)
            rows.append(getattr(bench, make)(*shape))
            bench.close()
            times = "  ".join(f"{k} {v:.3f}" for k, v in rows[-1].items() if isinstance(v, float))
            print(f"{rows[-1]['layer']} {rows[-1]['shape']} M {rows[-1]['tokens']}: {times}", flush=True)
    return rows


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, and write the JSON when asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--backend", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--small", action="store_true", help="tiny layers: to try the program, not the machine"
    )
    arguments = parser.parse_args(words)
    backend = mf.init(backend=arguments.backend).backend
    with torch.no_grad():
        rows = table(backend, arguments.repeats, arguments.small)
    document = {
        "benchmark": "one layer by where its parameters and gradients are, ms",
        "machine": machine(),
        "versions": versions(),
        "backend": backend.name,
        "repeats": arguments.repeats,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, document)
    return document


if __name__ == "__main__":
    main()
