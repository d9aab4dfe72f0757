"""The CUDA update kernel's arithmetic, compiled for this processor: the host's bits. tests/cuda runs it on a device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ops.adam_cases import assert_same_bits, result, segment, state

from memferry_ascend import hostmath
from memferry_ascend.backends import cuda_adam
from memferry_ascend.backends.fused import AdamArrays
from memferry_ascend.hostmath import AdamHyper

COMPILER = shutil.which("g++")
# What nvrtc knows and g++ does not. A block's threads run one after the other, so only kernels that need no barrier can.
SHIM = """
#include <cmath>
#include <cstring>
#define __global__
#define __device__ static
#define __shared__ static
#define __restrict__
#define __syncthreads()
struct Index { unsigned x; };
static Index threadIdx, blockIdx;
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
"""
LOOP = """
extern "C" void run_NAME(const Adam* k, unsigned blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) NAME(*k);
}
"""
NAMES = ("adam_fp32_fp32", "adam_bf16_fp32", "adam_fp32_split", "adam_bf16_split")

pytestmark = pytest.mark.skipif(
    COMPILER is None or not hostmath.NATIVE, reason="needs g++ and the native arithmetic"
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("kernels")
    source = folder / "adam.cpp"
    source.write_text(SHIM + cuda_adam.SOURCE + "".join(LOOP.replace("NAME", name) for name in NAMES))
    library = folder / "adam.so"
    options = ["-O1", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
    subprocess.run([str(COMPILER), *options, str(source), "-o", str(library)], check=True, timeout=120)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(
    "hyper",
    [
        AdamHyper(lr=1e-2, weight_decay=0.1, step=1),
        AdamHyper(lr=3e-4, weight_decay=0.1, step=7, decoupled=False, maximize=True, grad_scale=0.37),
        AdamHyper(lr=1e-3, beta1=0.3, beta2=0.5, eps=0.0, step=1000, grad_scale=0.37),
        AdamHyper(lr=1e-3, step=3, decoupled=False),
    ],
    ids=["adamw", "adam", "lerp-from-the-end", "no-decay"],
)
@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 255, 1024, 5000])
def test_it_gives_the_hosts_bits(
    kernels: ctypes.CDLL, n: int, grads: torch.dtype, split: bool, hyper: AdamHyper
) -> None:
    data = state(n, n, grads)
    if n > 1000:  # infinities, NaNs and what rounds to infinity
        data["grad"][:3] = torch.tensor([float("inf"), float("nan"), 3e38]).to(grads)
        data["param"][3] = 3.4e38
    expected, found = segment(data, split), segment(data, split)
    hostmath.AdamProgram([expected]).run([hyper])
    arrays = AdamArrays(found.grad, found.param, found.lo, found.exp_avg, found.exp_avg_sq)
    run = kernels[f"run_{cuda_adam.kernel_of(arrays)}"]
    run(ctypes.byref(cuda_adam.argument(arrays, hyper)), -(-n // 1024))
    a, b = result(found), result(expected)
    for name in a:  # which NaN an operation gives is the processor's choice where no master is split
        both = torch.from_numpy(a[name].view("f4")).isnan() & torch.from_numpy(b[name].view("f4")).isnan()
        a[name][both.numpy()] = b[name][both.numpy()] = 0
    assert_same_bits(a, b)
