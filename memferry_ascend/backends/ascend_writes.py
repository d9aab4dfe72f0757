"""May a layer kind's weight-gradient kernels write mapped host memory? One of the questions of ascend_probe.py.

The functions that write (direct.py) run against the layer's ordinary forward and backward, with the parameters on the
device. They must give the same bits, as the host reads them behind a synchronisation: gradient placement changes none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from memferry_ascend.backends.ascend_probe import ROUNDS, backward
from memferry_ascend.backends.base import Backend, HostSlab, align
from memferry_ascend.direct import Compute, DirectForward

PADDING = 3


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2: weight (in, out). Bound by its name, as theirs is."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], self.nf)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "Conv1D": lambda: Conv1D(24, 16),
    "Embedding": lambda: nn.Embedding(32, 16, padding_idx=PADDING),
    "LayerNorm": lambda: nn.LayerNorm(16),
    "Linear": lambda: nn.Linear(16, 24),
    "RMSNorm": lambda: nn.RMSNorm(16),
}
"""All take (2, 3, 16), the Embedding (2, 3)."""


class _Target:
    """Takes the place of `direct.Sink`: every gradient goes to the mapped tensor it was made with."""

    def __init__(self, host: torch.Tensor, alias: torch.Tensor) -> None:
        self.host, self.alias = host, alias
        self.state = SimpleNamespace(rows=False, clean=False)
        self.written = 0

    def begin(self) -> tuple[_Target]:
        return (self,)

    def write(self, begun: Any, compute: Compute) -> None:
        compute(self.alias)
        self.written += 1


def try_write(backend: Backend, kind: str) -> str | None:
    """One of `base.DIRECT_KINDS` in this process: None if its direct function gave the ordinary one's bits in both
    precisions, over the same addresses in several rounds, else what differed. Raises what the kernels raise."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        module = KINDS[kind]().to(dtype)
        slab = backend.alloc_host(
            sum(align(p.numel() * p.element_size()) for p in module.parameters()), mapped=True
        )
        try:
            bad = _compare(backend, module, slab)
        finally:
            backend.synchronize()
            backend.free_host(slab)
        if bad is not None:
            return f"{bad} in {str(dtype).removeprefix('torch.')}"
    return None


def _compare(backend: Backend, module: nn.Module, slab: HostSlab) -> str | None:
    assert slab.device is not None
    targets, at = {}, 0
    for name, p in module.named_parameters():
        end = at + p.numel() * p.element_size()
        host, alias = (side[at:end].view(p.dtype).view(p.shape) for side in (slab.host, slab.device))
        targets[name] = _Target(host, alias)
        at += align(end - at)
        p.data = p.data.to(backend.device)
    direct = DirectForward(module, targets["weight"], targets.get("bias"))  # type: ignore[arg-type]
    direct.enabled = True
    for k in range(ROUNDS):
        x = _inputs(module, k).to(backend.device)
        near = _step(module, module, x)
        near |= {
            f"the gradient of {name}": p.grad.cpu()
            for name, p in module.named_parameters()
            if p.grad is not None
        }
        for target in targets.values():
            # What a kernel leaves out shows. A table that was zero before gets only the rows that occur.
            target.state.clean = k % 2 == 1
            target.host.fill_(0.0 if target.state.clean else float("nan"))
        far = _step(module, direct, x)
        backend.compute.synchronize()
        far |= {f"the gradient of {name}": target.host for name, target in targets.items()}
        if any(t.written != k + 1 for t in targets.values()) or any(
            p.grad is not None for p in module.parameters()
        ):
            return "its gradients did not come from the kernels that write to the host"
        for name, value in near.items():
            if not torch.equal(value.view(torch.uint8), far[name].view(torch.uint8)):
                return f"{name} differs"
    return None


def _inputs(module: nn.Module, k: int) -> torch.Tensor:
    """New for every round: a cache that is not told of a write shows the round before."""
    if isinstance(module, nn.Embedding):
        return (torch.tensor([[PADDING, 1, 30], [0, 1, 31]]) + 5 * k) % 32
    g = torch.Generator().manual_seed(5 + k)
    return torch.randn((2, 3, 16), generator=g).to(next(module.parameters()).dtype)


def _step(
    module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output and input gradient, on the CPU, of one forward and backward; `p.grad` is new or None behind it."""
    for p in module.parameters():
        p.grad = None
    x = x.detach()
    if x.is_floating_point():
        x.requires_grad_()
    out = call(x)
    backward(out)
    found = {"the output": out.detach().cpu()}
    if x.grad is not None:
        found["the input's gradient"] = x.grad.cpu()
    return found
