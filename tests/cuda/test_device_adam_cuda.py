"""The device's own update kernels give the host's bits; norms agree with sums in double precision."""

from __future__ import annotations

import pytest
import torch
from ops.adam_cases import assert_same_bits, placed, result, segment, state

import memferry_ascend as mf
from memferry_ascend import hostmath
from memferry_ascend.backends.fused import AdamArrays
from memferry_ascend.hostmath import AdamHyper, AdamSegment

HYPERS = [
    AdamHyper(lr=1e-2, weight_decay=0.1, step=1),
    AdamHyper(lr=3e-4, weight_decay=0.1, step=7, decoupled=False, maximize=True, grad_scale=0.37),
    AdamHyper(lr=1e-3, beta1=0.3, beta2=0.5, eps=0.0, step=1000, grad_scale=0.37),
]


@pytest.mark.parametrize("hyper", HYPERS, ids=["adamw", "adam", "lerp-from-the-end"])
@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 1023, 1_000_003])
def test_updates_have_the_hosts_bits(n: int, grads: torch.dtype, split: bool, hyper: AdamHyper) -> None:
    kernels = mf.current().backend.fused_adam()
    assert kernels is not None
    data = state(n, n, grads)
    host = segment(data, split, offset=3)
    names = ("grad", "param", "lo", "exp_avg", "exp_avg_sq")
    there = {k: None if t is None else placed(t, 3).cuda() for k in names for t in (getattr(host, k),)}
    kernels.update(AdamArrays(**there), hyper)
    hostmath.AdamProgram([host]).run([hyper])
    back = {k: None if t is None else t.cpu() for k, t in there.items()}
    assert_same_bits(result(AdamSegment(**back)), result(host))


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 16_384, 1_000_003])
def test_norms_are_summed_in_double(n: int, grads: torch.dtype) -> None:
    kernels = mf.current().backend.fused_adam()
    assert kernels is not None
    grad = state(n, n, grads)["grad"]
    out = torch.full((1,), -1.0, device="cuda")
    kernels.norm_into(out, grad.cuda())
    expected = grad.double().square().sum().sqrt().float()
    torch.testing.assert_close(out.cpu()[0], expected, rtol=1e-7, atol=0)
    again = torch.empty_like(out)
    kernels.norm_into(again, grad.cuda())
    assert torch.equal(out, again)
