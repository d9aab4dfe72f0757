"""May NPU kernels read and write host memory? Asked of the machine, never assumed.

`incoherence` lets host and device write to one slab in turns and compares what the other sees. `host_access` trains one
step of each layer kind with parameters in mapped host memory, and one whose weight gradients are written there
(ascend_writes.py), and compares with the same step on device memory, in a child process, because some builds of CANN end
the process there. The answer is kept per stack version, under the cache folder (`files.cache_folder`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memferry_ascend import files
from memferry_ascend.backends.base import DIRECT_KINDS
from memferry_ascend.errors import FerryError

if TYPE_CHECKING:
    from memferry_ascend.backends.ascend import AscendBackend
    from memferry_ascend.backends.base import Backend

VERSION = 2
"""Part of the cache's key: changes with what a child tests."""
ROUNDS = 4
PATIENCE = 300.0
"""Seconds for one layer kind; the first one includes starting CANN."""

IN_CHILD = "MEMFERRY_ASCEND_PROBING"


def incoherence(backend: Backend, *, shared: str | None = None) -> str | None:
    """None when host and device saw each other's writes to mapped memory in every round, else what went wrong.

    Each round writes new values over the same addresses: a cache that is not told shows the old ones.
    """
    try:
        slab = backend.alloc_host(1 << 16, mapped=True, shared=shared)
    except FerryError as error:
        return str(error)
    try:
        host = slab.host.view(torch.int32)
        assert slab.device is not None
        device = slab.device.view(torch.int32)
        pattern = torch.arange(host.numel(), dtype=torch.int32)
        for k in range(ROUNDS):
            host.copy_(pattern * (k + 3))
            backend.compute.synchronize()
            seen = (device + 0).cpu()
            if not torch.equal(seen, host):
                return f"in round {k + 1} the device did not see what the host had written to mapped memory"
            device.add_(k + 1)
            backend.compute.synchronize()
            if not torch.equal(host, pattern * (k + 3) + (k + 1)):
                return f"in round {k + 1} the host did not see what the device had written to mapped memory"
        return None
    except (FerryError, RuntimeError) as error:
        return f"a kernel on mapped memory failed: {_short(error)}"
    finally:
        device = host = torch.empty(0)
        with contextlib.suppress(FerryError, RuntimeError):
            backend.free_host(slab)


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


# -- layer kinds -------------------------------------------------------------------------------------------------------
def _tokens(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[3, 1, 30], [0, 3, 31]]).to(device)


def _rows(*shape: int) -> Callable[[torch.device, torch.dtype], torch.Tensor]:
    def make(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        g = torch.Generator().manual_seed(5)
        return torch.randn(shape, generator=g).to(dtype).to(device)

    return make


Inputs = Callable[[torch.device, torch.dtype], torch.Tensor]
KINDS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "Embedding": (lambda: nn.Embedding(32, 16), _tokens),
    "LayerNorm": (lambda: nn.LayerNorm(16), _rows(2, 3, 16)),
    "Linear": (lambda: nn.Linear(16, 24), _rows(2, 3, 16)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(16, 2, batch_first=True), _rows(2, 3, 16)),
    "RMSNorm": (lambda: nn.RMSNorm(16), _rows(2, 3, 16)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 16), _rows(2, 16, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(16), _rows(4, 16)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), _rows(2, 4, 4, 4)),
    "Conv1d": (lambda: nn.Conv1d(16, 16, 3, padding=1), _rows(2, 16, 6)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1), _rows(2, 4, 6, 6)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(32, 16), _tokens),
}
"""Layer kinds and what one is called with. All sizes are small: a kernel either works on host memory or does not."""

ALONG = {"MultiheadAttention": ("NonDynamicallyQuantizableLinear",)}
"""Kinds that are only ever called by another."""

WRITING = "direct:"
TRIALS = (*KINDS, *(WRITING + kind for kind in sorted(DIRECT_KINDS)))
"""What children try: a kind's name, or WRITING and the name of one whose gradients shall be written to host memory."""


def try_kind(backend: Backend, kind: str) -> str | None:
    """One kind in this process: None if parameters in mapped memory gave the numbers of parameters in device memory, in
    both precisions, before and after the host changed them; else what differed. Raises what the kernels raise."""
    make, inputs = KINDS[kind]
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        module = make().to(dtype)
        slab = backend.alloc_host(max(1, sum(p.numel() * 4 + 512 for p in module.parameters())), mapped=True)
        try:
            bad = _compare(backend, module, slab, inputs(backend.device, dtype))
        finally:
            backend.synchronize()
            for p in module.parameters():
                p.data = torch.empty(0)
            backend.free_host(slab)
        if bad is not None:
            return f"{bad} in {str(dtype).removeprefix('torch.')}"
    return None


def _compare(backend: Backend, module: nn.Module, slab: Any, x: torch.Tensor) -> str | None:
    hosts, aliases, at = [], [], 0
    for p in module.parameters():
        end = at + p.numel() * p.element_size()
        hosts.append(slab.host[at:end].view(p.dtype).view(p.shape))
        aliases.append(slab.device[at:end].view(p.dtype).view(p.shape))
        at = -(-end // 512) * 512
    values = [p.detach().clone() for p in module.parameters()]
    for b_name, b in list(module.named_buffers()):
        module._buffers[b_name] = b.to(backend.device)
    for k in range(2):
        values = [v * (1 + k) for v in values]
        near = _step(module, [v.to(backend.device) for v in values], x)
        for host, value in zip(hosts, values, strict=True):
            host.copy_(value)
        far = _step(module, aliases, x)
        for name in near:
            if not _same(near[name], far[name]):
                return f"{name} differs" + (" after the host changed the parameters" if k else "")
        if not all(torch.equal(h, v) for h, v in zip(hosts, values, strict=True)):
            return "the kernels changed the parameters"
    return None


def _step(module: nn.Module, storages: list[torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients, on the CPU, of one forward and backward with the parameters in `storages`."""
    for p, storage in zip(module.parameters(), storages, strict=True):
        p.data = storage
        p.grad = None
    x = x.detach()
    if x.is_floating_point():
        x.requires_grad_()
    out = module(x, x, x, need_weights=False)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
    backward(out)
    found = {"the output": out.detach().cpu()}
    if x.grad is not None:
        found["the input's gradient"] = x.grad.cpu()
    for name, p in module.named_parameters():
        if p.grad is not None:
            found[f"the gradient of {name}"] = p.grad.cpu()
    return found


def backward(out: torch.Tensor) -> None:
    """Run the backward pass of a loss in which every element of `out` counts differently from its neighbours."""
    weight = torch.arange(out.numel(), device=out.device).remainder(7).view(out.shape).to(out.dtype)
    (out * weight).sum().backward()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the order of sums: some backward kernels do not repeat their bits from call to call."""
    tolerance = 1e-5 if a.dtype is torch.float32 else 1.6e-2
    return torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)


# -- in a child process ------------------------------------------------------------------------------------------------
def host_access(backend: AscendBackend) -> tuple[frozenset[str], frozenset[str], list[str]]:
    """The layer kinds that read mapped host memory right, those that write their gradients there right, and a note on each
    that does not.

    Found by child processes on the backend's device; read from the cache when this stack was tried before.
    """
    if os.environ.get(IN_CHILD):
        return frozenset(), frozenset(), []
    stack = f"{backend.stack()}, route {backend.route}"
    key = hashlib.sha256(f"{VERSION} {stack}".encode()).hexdigest()[:16]
    folder = files.cache_folder("host-access")
    path = None if folder is None else folder / f"{key}.json"
    found = None if path is None else _read(path, stack)
    if found is None:
        found = probe(backend.device.index, list(TRIALS))
        if path is not None:
            with contextlib.suppress(OSError):  # probed again next time
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_json(path, {"stack": stack, "kinds": found})
    right = {kind for kind, verdict in found.items() if verdict == "right"}
    read = right & set(KINDS)
    read |= {other for kind in read for other in ALONG.get(kind, ())}
    written = {kind.removeprefix(WRITING) for kind in right - set(KINDS)}
    notes = []
    for trial, verdict in found.items():
        kind = trial.removeprefix(WRITING)
        if verdict != "right":
            notes.append(f"no direct {'host access' if kind == trial else 'gradients'} for {kind}: {verdict}")
    return frozenset(read), frozenset(written), notes


def _read(path: Path, stack: str) -> dict[str, str] | None:
    """A cached finding; None if there is none, or a damaged one."""
    try:
        found = json.loads(path.read_text())
        kinds = found["kinds"]
        if (
            found["stack"] == stack
            and set(kinds) == set(TRIALS)
            and all(isinstance(v, str) for v in kinds.values())
        ):
            return dict(kinds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def probe(index: int, kinds: list[str]) -> dict[str, str]:
    """A verdict for each of `kinds` (of TRIALS): "right", or what went wrong. A child that dies or hangs costs the kind it
    was at; the next child goes on behind it."""
    found: dict[str, str] = {}
    while len(found) < len(kinds):
        rest = [k for k in kinds if k not in found]
        at, ended = _child(index, rest, found)
        if at is not None:
            found[at] = ended
        elif all(k not in found for k in rest):  # it ended before it tried anything: the next would too
            found.update(dict.fromkeys(rest, ended))
    return found


def _child(index: int, kinds: list[str], found: dict[str, str]) -> tuple[str | None, str]:
    """Run one child over `kinds`, filling in `found`. Returns the kind it was at when it ended, and how it ended."""
    at: str | None = None
    # Without the task queue an error is raised where it was made, not on a thread that then ends the process.
    environ = {**os.environ, IN_CHILD: "1", "TASK_QUEUE_ENABLE": "0"}
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "memferry_ascend.backends.ascend_probe", str(index), *kinds],
            stdout=subprocess.PIPE,
            stderr=said,
            env=environ,
        )
        assert child.stdout is not None
        pending, until = b"", time.monotonic() + PATIENCE
        hung = False
        while True:
            ready, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                hung = True
                child.kill()
                break
            data = os.read(child.stdout.fileno(), 65536)
            if not data:
                break
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                word, _, rest = line.decode(errors="replace").partition(" ")
                kind, _, verdict = rest.partition(" ")
                if word == "@begin" and kind in kinds:
                    at, until = kind, time.monotonic() + PATIENCE
                elif word == "@end" and kind in kinds:
                    found[kind], at = verdict, None
        child.stdout.close()
        code = child.wait()
        said.seek(0)
        tail = said.read().decode(errors="replace").strip().splitlines()
    if hung:
        return at, f"it did not end within {PATIENCE:.0f} s"
    why = f"signal {-code}" if code < 0 else f"exit status {code}"
    if at is None:
        return None, f"the probe ended with {why}" + (f": {tail[-1][:200]}" if tail else "")
    return at, f"it ended the process ({why})"


def main(arguments: list[str]) -> int:
    """The child: try each kind in turn, saying so before and after."""
    from memferry_ascend.backends.ascend import AscendBackend
    from memferry_ascend.backends.ascend_writes import try_write

    backend = AscendBackend(int(arguments[0]))
    for kind in arguments[1:]:
        print(f"@begin {kind}", flush=True)
        try:
            name = kind.removeprefix(WRITING)
            tried = try_kind(backend, kind) if name == kind else try_write(backend, name)
            verdict, broken = tried or "right", False
        except Exception as error:
            verdict, broken = f"it failed: {_short(error)}", _broken(backend)
        print(f"@end {kind} {' '.join(verdict.split())}", flush=True)
        if broken:  # what is tried behind it would be blamed for it
            os._exit(0)
    os._exit(0)  # torch_npu's own shutdown is no part of the question


def _broken(backend: Backend) -> bool:
    """True if the device computes nothing any more."""
    try:
        backend.synchronize()
        return float(torch.ones(4, device=backend.device).sum()) != 4
    except RuntimeError:
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
