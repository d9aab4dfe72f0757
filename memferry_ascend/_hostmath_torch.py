"""What `hostmath` falls back to without its extension: the same arithmetic over torch operations.

The operations are those of torch.optim's single-tensor Adam, in its order, block by block so that temporaries
stay in cache. `torch._fused_adamw_` would be faster on fp32 parameters, but it rounds in another order,
writes a scaled gradient back, and knows no split masters. Arguments have been checked by `hostmath`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from memferry_ascend.backends.fused import AdamArrays
    from memferry_ascend.hostmath import AdamHyper, AdamSegment

_BLOCK = 1 << 17  # elements: about 3 MiB of temporaries
_SUM_CHUNK = 1 << 14  # elements: below torch's grain size, so one thread adds each chunk in one order
_CANONICAL_NAN = 0x7FC00000


def _blocks(n: int, size: int = _BLOCK) -> Iterator[slice]:
    return (slice(a, min(a + size, n)) for a in range(0, n, size))


def _split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    bits = master.view(torch.int32).masked_fill(master.isnan(), _CANONICAL_NAN)
    lo.copy_(bits)  # an integer conversion keeps the low bits
    hi.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def _joined(hi: Tensor, lo: Tensor) -> Tensor:
    bits = hi.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(lo).view(torch.float32)


def split_master(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    master, hi, lo = master.detach().view(-1), hi.detach().view(-1), lo.view(-1)
    for b in _blocks(master.numel()):
        _split(master[b], hi[b], lo[b])


def join_master(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    hi, lo, out = hi.detach().view(-1), lo.view(-1), out.detach().view(-1)
    for b in _blocks(hi.numel()):
        out[b] = _joined(hi[b], lo[b])


def accumulate(acc: Tensor, grad: Tensor, first: bool, scale: float) -> None:
    acc, grad = acc.detach().view(-1), grad.detach().view(-1)
    for b in _blocks(acc.numel()):
        scaled = grad[b].float() * scale
        if first:
            acc[b] = scaled
        else:
            acc[b] += scaled


def sum_squares(grad: Tensor) -> float:
    flat = grad.detach().view(-1)
    total = 0.0
    for b in _blocks(flat.numel(), _SUM_CHUNK):
        total += flat[b].double().square_().sum().item()
    return total


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    ctypes.memmove(dst, src, nbytes)


@torch.no_grad()
def adam(segment: AdamSegment | AdamArrays, h: AdamHyper, block: int = _BLOCK) -> None:
    """One update of one segment: `hostmath.AdamProgram.run` in terms of torch operations, `block` elements at a time."""
    bias1 = 1 - h.beta1**h.step
    bias2_sqrt = (1 - h.beta2**h.step) ** 0.5
    scale = -h.grad_scale if h.maximize else h.grad_scale
    for b in _blocks(segment.numel, block):
        param = segment.param[b]
        p = param if segment.lo is None else _joined(param, segment.lo[b])
        g = segment.grad[b].float()  # the gradient itself when it is fp32: never written below
        if scale != 1.0:
            g = g * scale
        if h.weight_decay != 0:
            if h.decoupled:
                p.mul_(1 - h.lr * h.weight_decay)
            else:
                g = g.add(p, alpha=h.weight_decay)
        exp_avg = segment.exp_avg[b].lerp_(g, 1 - h.beta1)
        exp_avg_sq = segment.exp_avg_sq[b].mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
        denom = exp_avg_sq.sqrt().div_(bias2_sqrt).add_(h.eps)
        p.addcdiv_(exp_avg, denom, value=-(h.lr / bias1))
        if segment.lo is not None:
            _split(p, param, segment.lo[b])
